"""What single choices are worth: short trainings with one thing changed, written to tests/ABLATIONS.md.

    python tests/ablate.py                  all of them, an hour or two; what is trained already is kept in out/ablate
    python tests/ablate.py eagle1 dflash    these methods, printed only
    python tests/ablate.py --quick          five steps each, printed only: that everything runs
"""
import argparse
import contextlib
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import compare
import torch
import torch.nn.functional as F

import train


# ---- Changes that no flag makes: of a method's module, in force while it trains and drafts ----
def without_token(module):
    """EAGLE-1 on features alone: the token that followed is embedded as zeros."""
    advance = module.Drafter.advance

    def blind(self, target, *rest):
        zeros = SimpleNamespace(wte=lambda tokens: torch.zeros_like(target.wte(tokens)))
        return advance(self, zeros, *rest)
    return patch.object(module.Drafter, "advance", blind)


def hard_labels(module):
    """To the loss, the target is sure of the text's own next token."""
    class Sure(SimpleNamespace):
        def __call__(self, idx, taps):
            logits, h = self.target(idx, taps=taps)
            return 1e4 * F.one_hot(idx.roll(-1, 1), logits.shape[-1]), h

    def loss(self, target, idx):
        return forward(self, Sure(target=target, wte=target.wte, head=target.head), idx)
    forward = module.Drafter.forward
    return patch.object(module.Drafter, "forward", loss)


def sharper(module):
    """At T > 0, drafts are drawn from q^1.3."""
    draft = module.Drafter.draft
    return patch.object(module.Drafter, "draft", lambda self, target, anchor, probs=None: draft(
        self, target, anchor, probs and (lambda logits: probs(1.3 * logits))))


def normed_taps(module):
    name = "fuse" if module.Drafter.name == "eagle3" else "context"
    fuse = getattr(module.Drafter, name)
    return patch.object(module.Drafter, name, lambda self, h: fuse(self, [F.layer_norm(x, x.shape[-1:]) for x in h]))


EXPERIMENTS = [  # (label, method, settings or a change)
    ("default: one child drawn at T > 0", "eagle1", {}),
    ("none drawn", "eagle1", {"drawn": 0}),
    ("all drawn", "eagle1", {"drawn": 3}),
    ("without the token that followed", "eagle1", without_token),
    ("default: one child drawn at T > 0, depth 7", "eagle2", {}),
    ("none drawn", "eagle2", {"drawn": 0}),
    ("depth 5", "eagle2", {"depth": 5}),
    ("default: one child drawn at T > 0, depth 7", "eagle3", {}),
    ("none drawn", "eagle3", {"drawn": 0}),
    ("depth 5", "eagle3", {"depth": 5}),
    ("one step of the training-time test", "eagle3", {"ttt": 1}),
    ("normed taps", "eagle3", normed_taps),
    ("default: 3 layers, B = 16, soft labels, drawn", "dflash", {}),
    ("hard labels: the text's own tokens", "dflash", hard_labels),
    ("normed taps", "dflash", normed_taps),
    ("q^1.3", "dflash", sharper),
    ("1 layer", "dflash", {"n_draft_layer": 1}),
    ("5 layers", "dflash", {"n_draft_layer": 5}),
    ("training blocks of B alone", "dflash", {"n_lengths": 1}),
    ("B = 8", "dflash", {"block_size": 8}),
    ("B = 10", "dflash", {"block_size": 10}),
    ("a best-first tree of 24 nodes", "dflash", {"tree": 24}),
    ("default: conv and selector", "dflash2", {}),
    ("without conv", "dflash2", lambda m: patch.object(m.DynamicConv, "forward", lambda self, x, kernel, B: x)),
    # Without its loss B, and with it every score, stays 0.
    ("without selector", "dflash2", lambda m: patch.object(m.Drafter, "selector_loss", lambda *_: 0.0)),
]
DRAFTING = {"drawn", "depth", "tree", sharper}  # what training does not see


def trained(label, module, settings, target, data, steps):
    """The checkpoint of an experiment; trained now, unless there is one of as many steps for this target."""
    name = module.Drafter.name
    path = Path("out/ablate", re.sub(r"\W+", "-", f"{name} {label} {steps}") + ".pt")
    found = train.load(path, name) if path.exists() else {"step": 0}
    if found["step"] == steps and found["target"] == target.fingerprint:
        return path
    args = module.Args(ckpt=str(path), steps=steps, **settings)
    args.name = name
    with patch.object(module, "get_target", lambda args: (target, data)):
        module.train(args)
    return path


def row(label, method, what, target, data, options):
    """[label, τ and speedup by domain with their means at T = 0 and at T = 1]."""
    module, cells = compare.load_method(method), [label]
    settings, change = ({}, what) if callable(what) else (what, contextlib.nullcontext)
    training = {k: v for k, v in settings.items() if k not in DRAFTING}
    with change(module):
        # What only drafting sees shares the default's checkpoint.
        tag = label if training or (callable(what) and what not in DRAFTING) else ""
        path = trained(tag, module, training, target, data, options.steps)
        drafter = compare.load_drafter(module, target, ckpt=str(path), **settings)
        generate = partial(module.generate, target, drafter)
        for T in (0.0, 1.0):
            found = [compare.measure(generate, target, data.enc, pairs, options.max_new_tokens, T)
                     for pairs in data.prompts(options.prompts, seed=5).values()]
            for key in ("tau", "speedup"):
                numbers = [n[key] for n in found]
                mean = sum(numbers) / len(numbers)
                cells.append(" / ".join(f"{n:.2f}" for n in numbers) + f", **{mean:.2f}**")
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="these alone")
    parser.add_argument("--steps", type=train.number(int, 1), default=300, help="of every training [300]")
    parser.set_defaults(prompts=12, max_new_tokens=96)
    parser.add_argument("--quick", action="store_true", help="5 steps, 1 prompt, 8 tokens")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.max_new_tokens = 5, 1, 8
    target, data = compare.open_target(None, None)
    rows = {}
    for label, method, what in EXPERIMENTS:
        if method in options.methods or not options.methods:
            rows.setdefault(method, []).append(row(label, method, what, target, data, options))
            print(" | ".join(rows[method][-1]), flush=True)
    text = [f"# Ablations\n\nWritten by `python tests/ablate.py`, {options.steps} steps of training each. By domain",
            f"({', '.join(data.domains)}), and the mean in bold. {compare.machine(target, options)}\n"]
    header = ["T = 0: τ", "speedup", "T = 1: τ", "speedup"]
    text += [compare.table([method, *header], found) for method, found in rows.items()]
    print("\n".join(text))
    if not options.methods and not options.quick:
        (compare.ROOT / "tests" / "ABLATIONS.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
