"""Prompt lookup as drafter: no model, no training; copies what followed the same tokens earlier in the text.

The longest suffix of 3 to 1 tokens that occurred before is looked up, and the 10 tokens after its latest occurrence are
the draft, going on into itself. Free where text repeats itself (github.com/apoorvumang/prompt-lookup-decoding).
"""
import sys
from dataclasses import dataclass

import torch

from train import CommonArgs, arg, launch
from verify import Session, Tree, chain


@dataclass
class Args(CommonArgs):
    n_draft: int = arg(10, "drafted tokens")
    ngram: int = arg(3, "longest suffix that is looked up")


class Drafter(torch.nn.Module):
    taps = ()

    def __init__(self, config, args):
        super().__init__()
        self.args, self.nodes = args, 1 + args.n_draft

    def absorb(self, new):
        """The text lives on the host."""
        n = new.n.item()
        self.text = self.text[:new.start.item()] + new.tokens[:n + 1].tolist()

    def draft(self, n):
        """At most n tokens, chosen, so there is no q; where nothing is found, an empty draft."""
        text = list(self.text)
        for length in range(min(self.args.ngram, len(text) - 1), 0, -1):
            for at in range(len(text) - length - 1, -1, -1):
                if text[at:at + length] == text[-length:]:
                    for i in range(n):
                        text.append(text[at + length + i])
                    return text[len(self.text) - 1:]
        return text[-1:]


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    s.capture = False  # drafts are made on the host
    drafter.text = []
    drafter.absorb(s.committed)

    def draft():
        tokens = drafter.draft(drafter.args.n_draft)
        return Tree(torch.tensor(tokens, device=s.device), chain(len(tokens) - 1, s.device))

    def verify(tree):
        logits, _ = target(tree.tokens[None], s.cache, tree.topology)
        s.verify(tree, logits[0], [])
        drafter.absorb(s.committed)

    return s.run(draft, verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    main()
