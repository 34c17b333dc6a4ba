"""The smallest method that reads a feature: a chain, from the target's last feature and the token that followed.

What a fork starts from when no file is near enough. tests/test_fork.py uses it so.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from train import CommonArgs, Optimizer, Run, arg, get_target, launch
from verify import Session, Tree, chain, sample


@dataclass
class Args(CommonArgs):
    steps: int = arg(200, "optimizer steps")
    batch_size: int = arg(8, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence")
    lr: float = arg(0.02, "learning rate")
    n_draft: int = arg(3, "drafted tokens")


class Drafter(nn.Module):
    name = "toy"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.taps, self.nodes = args, [config.n_layer], 1 + args.n_draft
        self.mix = nn.Linear(config.n_embd, config.n_embd)

    def advance(self, target, state, tokens):
        """States (..., d) and the tokens (...) that followed them -> states one position further."""
        return state + self.mix(F.relu(state + target.wte(tokens)))

    def forward(self, target, idx):
        with torch.no_grad():
            logits, (f,) = target(idx, taps=self.taps)
        state = self.advance(target, f[:, :-1], idx[:, 1:])
        return -(logits[:, 1:].softmax(-1) * target.head(state).log_softmax(-1)).sum(-1).mean()

    def absorb(self, target, new):
        """The feature of the newest committed position and the anchor: all that the draft depends on."""
        last = new.n[None] - 1
        self.state.copy_(self.advance(target, new.h[0].index_select(0, last), new.tokens.index_select(0, last + 1)))

    def draft(self, target, anchor, probs):
        state, tokens, rows = self.state, [anchor], []
        for _ in range(self.args.n_draft):
            logits = target.head(state)
            rows.append(probs(logits) if probs else logits)
            tokens.append(sample(rows[-1]) if probs else logits.argmax(-1))
            state = self.advance(target, state, tokens[-1])
        q = F.pad(torch.cat(rows), (0, 0, 0, 1)) if probs else None
        return Tree(torch.cat(tokens), chain(self.args.n_draft, anchor.device), q)


def train(args):
    target, data = get_target(args)
    torch.manual_seed(args.seed)
    drafter = Drafter(target.config, args).to(args.device)
    optimizer = Optimizer(drafter, args.lr, args.steps)
    run = Run(args, drafter, optimizer, {"target": target.fingerprint})
    for step in run:
        loss = run.parallel(target, run.batch(data, step))
        loss.backward()
        optimizer.step(step)
        run.losses.append(loss.detach())


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    drafter.state = torch.zeros(1, target.config.n_embd, device=s.device, dtype=s.cache.kv.dtype)
    drafter.absorb(target, s.committed)

    def verify(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(target, s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.probs if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    main()
