"""What the choices are worth: variants of a method, trained alike and measured side by side, written into the README.

    python tests/ablate.py                    all groups, an hour and a half on two cores; what is trained already is kept
    python tests/ablate.py eagle1 dflash2     these groups
    python tests/ablate.py --no-write         leaves README.md alone

A row is tau on held-out prompts, domain by domain. Checkpoints and numbers stay in out/ablate.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from compare import ROOT, load_method, prepare, training_minutes

import train

DRAWING = {"a deterministic tree at T > 0": ("default", {"drawn": 0}), "all children drawn at T > 0": ("default", {"drawn": 9})}
AS_LONG_AS = "--steps for the time that another variant took"
GROUPS = {  # name: (file, what holds for all, {label: flags of training}, {label: (variant, settings of drafting)})
    "eagle1": ("eagle1.py", [], {
        "default": [], "features alone, without the token that followed": ["--no_token"]}, DRAWING),
    "eagle2": ("eagle2.py", [], {"default": []}, DRAWING),
    "eagle3": ("eagle3.py", [], {"default": [], "without the training-time test": ["--ttt", "1"]}, DRAWING),
    "dflash": ("dflash.py", ["--steps", "300", "--n_anchors", "16"], {
        "3 layers, B = 16, soft labels, mixed text": [], "corpus text": ["--text", "corpus"], "greedy text": ["--text", "greedy"],
        "sampled text": ["--text", "sampled"], "hard labels": ["--hard"], "1 layer": ["--n_draft_layer", "1"],
        "5 layers": ["--n_draft_layer", "5"], "B = 8": ["--block_size", "8"], "32 anchors per sequence": ["--n_anchors", "32"]},
        {"argmax drafts at T = 1": ("3 layers, B = 16, soft labels, mixed text", {"argmax": True})}),
    "dflash2": ("dflash2.py", ["--steps", "300", "--n_anchors", "16"], {
        "DFlash": ["--no_conv", "--no_selector"], "+ conv": ["--no_selector"], "+ selector": ["--no_conv"], "+ both": [],
        "+ both, a true token outside the K skipped": ["--outside", "skip"],
        "+ both, a true token outside the K inserted": ["--outside", "insert"],
        "DFlash, trained as long as + both": ["--no_conv", "--no_selector", AS_LONG_AS, "+ both"]},
        {}),
}


def slug(text):
    return re.sub(r"\W+", "-", text).strip("-")


def recall(module, target, drafter, prompts, ks=(1, 16)):
    """{k: [share of greedy rounds in which the target's own token is among the k likeliest of slot 1, 2, ...]}."""
    hits, head, seen = [], target.head, []
    target.head = lambda h: seen.append(head(h)) or seen[-1]
    draft = drafter.draft

    def wrapped(*args):
        seen.clear()
        tree = draft(*args)
        rounds.append(seen[-1])
        return tree

    drafter.draft = wrapped
    for prompt in prompts:
        rounds = []
        record, at = module.generate(target, drafter, prompt, 96), 1
        for logits, kept in zip(rounds, record.committed):
            truth = torch.tensor(record.tokens[at:at + len(logits)], dtype=torch.long, device=logits.device)
            if len(truth) == len(logits):
                hits.append((logits > logits.gather(1, truth[:, None])).sum(1))
            at += kept
    target.head, drafter.draft = head, draft
    ranks = torch.stack(hits)
    return {k: [round(share, 2) for share in (ranks < k).float().mean(0).tolist()] for k in ks}


def measured(module, target, data, n, **settings):
    """{temperature: {domain: tau}} over n held-out prompts a domain, and the recall of drafters of blocks."""
    _, _, drafter = prepare(module, target, **settings)
    found, prompts = {}, {d: [p for p, _ in pairs] for d, pairs in data.prompts(n, seed=5).items()}
    for T in (0.0, 0.7, 1.0) if hasattr(drafter.args, "drawn") else (0.0, 1.0):
        for domain, texts in prompts.items():
            torch.manual_seed(0)
            records = [module.generate(target, drafter, p, 96, T, stop=(data.enc.eot_token,)) for p in texts]
            found.setdefault(f"{T:g}", {})[domain] = sum(sum(r.committed) for r in records) / sum(len(r.committed) for r in records)
    if hasattr(drafter.args, "block_size"):
        found["recall"] = recall(module, target, drafter, [p for texts in prompts.values() for p in texts])
    return found


def rows(name, n):
    """Trains and measures one group -> (label, numbers), one by one."""
    file, common, variants, drafting = GROUPS[name]
    module, target, data = load_method(file), None, None
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def path(label):
        return Path("out/ablate") / f"{name}-{slug(label)}.pt"

    for label, flags in variants.items():
        ckpt = path(label)
        if AS_LONG_AS in flags:
            *flags, _, other = flags
            base = next(one for one, own in variants.items() if own == flags)  # the same drafter at the usual number of steps
            steps = int(common[common.index("--steps") + 1]) * training_minutes(path(other)) / training_minutes(path(base))
            flags, label = [*flags, "--steps", str(round(steps))], f"{label} ({round(steps)} steps)"
        if not ckpt.exists():
            subprocess.run([sys.executable, module.__file__, "--train", "--ckpt", str(ckpt), "--prompts", "1", "--max_new_tokens", "8",
                            *common, *flags], check=True, env=env)
        if target is None:
            _, target, _drafter = prepare(module, ckpt=str(ckpt))
            data = train.load_data(None, json.dumps(target.tokenizer), min(256, target.config.max_seq_len))
        yield label, measured(module, target, data, n, ckpt=str(ckpt))
        for other, (variant, settings) in drafting.items():
            if variant == label:
                yield other, measured(module, target, data, n, ckpt=str(ckpt), **settings)


def markdown(name, found):
    file, common, _, _ = GROUPS[name]
    domains = list(found[0][1]["0"])
    shown = [T for T in found[0][1] if T != "recall"]
    lines = [f"**{file}{' ' + ' '.join(common) if common else ''}**: τ by domain ({', '.join(domains)}), and its mean", "",
             "| | " + " | ".join(f"T = {T} | mean" for T in shown) + " |", "|---|" + "---|" * (2 * len(shown))]
    for label, numbers in found:
        cells = []
        for T in shown:
            tau = list(numbers[T].values())
            cells += [" / ".join(f"{t:.2f}" for t in tau), f"**{sum(tau) / len(tau):.2f}**"]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    if name == "dflash2":
        lines += ["", "The target's own token is among the K likeliest of slot 1, 2, 4, 8, 15 (greedy rounds; the selector's ceiling):", ""]
        for label, numbers in found[:4]:
            picked = {k: " ".join(f"{shares[i - 1]:.2f}" for i in (1, 2, 4, 8, 15)) for k, shares in numbers["recall"].items()}
            lines.append(f"- {label}: " + "; ".join(f"K = {k}: {shares}" for k, shares in picked.items()))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--prompts", type=int, default=12, help="per domain [12]")
    parser.add_argument("--no-write", action="store_true", help="leave README.md alone")
    options = parser.parse_args()
    os.chdir(ROOT)
    store = Path("out/ablate/numbers.json")
    numbers = json.loads(store.read_text()) if store.exists() else {}
    for name in GROUPS:
        if not options.groups or name in options.groups:
            numbers[name] = []
            for row in rows(name, options.prompts):
                numbers[name].append(row)
                store.write_text(json.dumps(numbers))
            print(markdown(name, numbers[name]), flush=True)
    if not options.no_write:
        text = "\n\n".join(markdown(name, numbers[name]) for name in GROUPS if name in numbers)
        before, rest = (ROOT / "README.md").read_text().split("<!-- ablations -->")
        after = rest.split("<!-- /ablations -->")[1]
        (ROOT / "README.md").write_text(f"{before}<!-- ablations -->\n{text}\n<!-- /ablations -->{after}")


if __name__ == "__main__":
    train.command(main)
