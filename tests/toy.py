"""A bigram as drafter: the smallest method there is, and what a fork starts from when no file is near enough.

tests/test_fork.py copies it into an empty folder and trains, tests and measures it there as the five are.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from train import CommonArgs, Optimiser, command, drafter_run, flag, get_target, launch
from verify import Session, Tree, chain, sample


@dataclass
class Args(CommonArgs):
    steps: int = flag(200, "optimiser steps")
    batch_size: int = flag(8, "sequences per step")
    seq_len: int = flag(256, "tokens per sequence")
    lr: float = flag(0.02, "learning rate")
    n_draft: int = flag(3, "drafted tokens")


class Drafter(nn.Module):
    kind = "toy"

    def __init__(self, config, args):
        super().__init__()
        self.args, self.taps, self.nodes = args, [], 1 + args.n_draft
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, target, idx):
        with torch.no_grad():
            p = target(idx)[0].softmax(-1)
        return -(p * self.table(idx).log_softmax(-1)).sum(-1).mean()

    def draft(self, anchor, law):
        tokens, rows = [anchor], []
        for _ in range(self.args.n_draft):
            logits = self.table(tokens[-1])
            rows.append(law(logits) if law else logits)
            tokens.append(sample(rows[-1]) if law else logits.argmax(-1))
        return Tree(torch.cat(tokens), self.shape, F.pad(torch.cat(rows), (0, 0, 0, 1)) if law else None)


def train(args):
    target, data = get_target(args)
    torch.manual_seed(args.seed)
    drafter = Drafter(target.config, args).to(args.device)
    optimiser = Optimiser(drafter, args.lr, args.steps)
    run = drafter_run(args, target, data, drafter, optimiser, generate)
    for step in run:
        loss = run.parallel(target, run.batch(data, step))
        loss.backward()
        optimiser.step(step)
        run.log(loss)


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    drafter.shape = chain(drafter.args.n_draft, s.device)

    def verify(tree):
        logits, _ = target(tree.tokens[None], s.cache, tree.topology)
        s.verify(tree, logits[0], [])

    return s.run(lambda: drafter.draft(s.anchor, s.law if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    command(main)
