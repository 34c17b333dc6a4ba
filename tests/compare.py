"""All methods side by side: trains what is missing, measures, checks losslessness, writes the README's table and the figures.

    python tests/compare.py                            the five methods, 20 prompts per domain
    python tests/compare.py dflash.py ../my/idea.py    these files, wherever they are
    python tests/compare.py --no-write                 leaves README.md and .github/assets alone

Speeds are taken next to plain decoding in one interleaved run: leave the machine alone meanwhile.
"""
import argparse
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train
import verify

FIVE = ["eagle1.py", "eagle2.py", "eagle3.py", "dflash.py", "dflash2.py"]
ASSETS = ROOT / ".github" / "assets"


def load_method(path):
    """The module in a method's file, from any folder."""
    path = (Path(path) if Path(path).exists() else ROOT / path).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def prepare(module, target=None, **settings):
    """(args, target, drafter) of a trained method; settings override what its checkpoint says."""
    args = train.parse(module.Args, module.__doc__, module.Drafter.kind, [])
    for name, value in settings.items():
        setattr(args, name, value)
        args.given.add(name)
    target = target or train.target_from(train.load(args.target, "target"), args.device, getattr(torch, args.dtype))
    return args, target, train.load_drafter(module, args, target)


@torch.inference_mode()
def law_is_exact(module, target, drafter, prompt, n=600, length=4, top_k=3):
    """p-value of a chi-square test: the first `length` new tokens of n generations at T = 1, of three possible tokens each, so that
    rounds, caches and depths play a part, against the target's exact joint law from passes of its own. Texts that are expected
    fewer than five times are one cell; nan where that leaves nothing to compare."""
    law, device = {(): 1.0}, target.wte.weight.device
    for _ in range(length):
        law = {(*text, t): weight * q[t].item() for text, weight in law.items()
               for q in [verify.probs(target(torch.tensor([[*prompt, *text]], device=device))[0][0, -1].double(), 1.0, top_k)]
               for t in q.nonzero()[:, 0].tolist()}
    torch.manual_seed(0)
    count = Counter(tuple(module.generate(target, drafter, prompt, length, 1.0, top_k).tokens) for _ in range(n))
    if count.keys() - law.keys():
        return 0.0  # what cannot happen has happened
    cells = [(count[text], n * weight) for text, weight in law.items() if n * weight >= 5]
    rest = n - sum(c for c, _ in cells), n - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 1 else []
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)).item() if len(cells) > 1 else math.nan


def calibration(module, target, drafter, prompts, bins=10):
    """EAGLE-2's claim: [(confidence, acceptance, count)] of the children of the anchor, over greedy generations."""
    pairs, draft = [], drafter.draft
    for prompt in prompts:
        seen = []

        def wrapped(target, anchor, law=None, seen=seen):
            top = drafter.read(target, drafter.state).softmax(-1).topk(4)
            seen.append((top.values[0].tolist(), top.indices[0].tolist()))
            return draft(target, anchor, law)

        drafter.draft = wrapped
        record = module.generate(target, drafter, prompt, 64)
        at = 1
        for (c, tokens), kept in zip(seen, record.committed):
            pairs += [(ci, float(record.tokens[at] == t)) for ci, t in zip(c, tokens)]
            at += kept
    drafter.draft = draft
    rows = []
    for i in range(bins):
        inside = [(c, a) for c, a in pairs if i / bins <= c < (i + 1) / bins + (i == bins - 1)]
        if len(inside) >= 10:
            rows.append((sum(c for c, _ in inside) / len(inside), sum(a for _, a in inside) / len(inside), len(inside)))
    return rows


SIZES = {  # settings of a draft's size that are tried one by one
    "eagle2": [("n_nodes", (8, 12, 16, 26)), ("depth", (3, 4, 6, 7)), ("beam", (1, 3))],
    "dflash": [("block_size", (8, 16)), ("tree", (16, 24, 48))],
    "dflash2": [("block_size", (8, 16)), ("tree", (16, 24, 48))],
}


def sweep(module, target, prompts):
    """[(setting, value, {temperature: {domain: (tau, speedup)}})] for the sizes of a method; prompts {domain: [tokens]}."""
    rows = []
    for setting, values in SIZES[module.__name__]:
        for value in values:
            _, _, drafter = prepare(module, target, **{setting: value})
            found = {}
            for T in (0, 1):
                for domain, texts in prompts.items():
                    numbers, _ = verify.measure(target, partial(module.generate, target, drafter), texts, 96, T)
                    found.setdefault(str(T), {})[domain] = numbers["tau"], numbers["speedup"]
            rows.append((setting, value, found))
            print(f"{module.__name__} --{setting} {value}: " + "; ".join(f"T = {T}: " + ", ".join(
                f"{d} tau {tau:.2f}, {speed:.2f}x" for d, (tau, speed) in found[T].items()) for T in found), flush=True)
    return rows


def training_minutes(ckpt):
    log = Path(ckpt).with_suffix(".jsonl")
    if not log.exists():
        return math.nan
    seconds = [row["seconds"] for row in map(json.loads, log.read_text().splitlines()) if "seconds" in row]
    return sum(a for a, b in pairwise([*seconds, 0]) if b < a) / 60  # a resumed run starts at 0 again


def sizes(sweeps):
    """The README's table of draft sizes."""
    lines = []
    for name, rows in sweeps.items():
        if not lines:
            domains = " / ".join(rows[0][2]["0"])
            lines = [f"| | T = 0: τ on {domains} | speedup | T = 1: τ | speedup |", "|---|---|---|---|---|"]
        for setting, value, found in rows:
            cells = [" / ".join(f"{pair[i]:.2f}" for pair in found[T].values()) for T in found for i in (0, 1)]
            lines.append(f"| {name} `--{setting} {value}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(results, hardware):
    """The README's table."""
    lines = [f"{hardware}.", ""]
    domains = [{"math": "maths"}.get(d, d) for d in next(iter(results.values()))["numbers"]["domains"]]
    for key, title in (("", "greedy, T = 0"), ("at_temperature_1", "sampled, T = 1")):
        lines += [f"**{title}**", "",
                  "| | " + " | ".join(f"{d} τ | {d} speedup" for d in domains)
                  + " | nodes | draft ms | verify ms | plain ms/token | bound | free drafting | parameters | trained in |",
                  "|---|" + "---|" * (8 + 2 * len(domains))]
        for name, r in results.items():
            run = r["numbers"][key] if key else r["numbers"]
            cells = []
            for d in run["domains"].values():
                low, _, high = d["speedup_quartiles"]
                cells += [f"{d['tau']:.2f}", f"**{d['speedup']:.2f}×** ({low:.2f}–{high:.2f})"]
            tau = sum(d["tau"] for d in run["domains"].values()) / len(run["domains"])
            verified = sum(d["nodes"] for d in run["domains"].values()) / len(run["domains"])
            bound = tau * run["ar_ms"] / (run["draft_ms"] + run["verify_ms"])
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {verified:.1f} | {run['draft_ms']:.2f} | {run['verify_ms']:.2f} | "
                         f"{run['ar_ms']:.2f} | {bound:.2f}× | {tau * run['ar_ms'] / run['verify_ms']:.2f}× | "
                         f"{r['parameters'] / 1e6:.2f} M | {r['minutes']:.1f} min |")
        lines.append("")
    every = [r["numbers"]["domains"] for r in results.values()]
    plain = every[0]
    lines.append("Plain greedy decoding repeats " + ", ".join(f"{v['repetition']:.0%} of its 8-grams on {d}" for d, v in plain.items())
                 + (f"; right answers in maths {plain['math']['right_answers_plain']} of {plain['math']['prompts']}, "
                    f"with drafting {', '.join(str(d['math']['right_answers']) for d in every)}" if "math" in plain else "") + ".")
    lines.append("")
    lines.append("Greedy output identical to plain decoding: " + ", ".join(
        "{} {} of {}".format(name, *r["numbers"]["greedy_equal"]) for name, r in results.items())
        + ". Chi-square test of 600 sampled continuations of four tokens against the target's exact law (T = 1, top-k 3), p-values: "
        + ", ".join(f"{name} {r['p_value']:.2f}" for name, r in results.items()) + ".")
    return "\n".join(lines)


def figures(results, extra):
    try:
        import matplotlib
    except ImportError:
        print("no figures: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    ASSETS.mkdir(parents=True, exist_ok=True)
    colours = dict(zip(results, ("#9ecae1", "#4292c6", "#08519c", "#fd8d3c", "#d94801", "#555555", "#999999")))

    def done(fig, name):
        fig.tight_layout()
        fig.savefig(ASSETS / f"{name}.png", dpi=110)
        plt.close(fig)

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for ax, key, title in zip(axes, ("", "at_temperature_1"), ("T = 0", "T = 1")):
        for i, (name, r) in enumerate(results.items()):
            domains = (r["numbers"][key] if key else r["numbers"])["domains"]
            ax.bar([x + i * 0.16 for x in range(len(domains))], [d["speedup"] for d in domains.values()], 0.15, label=name, color=colours[name])
            ax.set_xticks([x + 0.32 for x in range(len(domains))], domains)
        ax.axhline(1, color="black", lw=0.8)
        ax.set_title(title)
    axes[0].set_ylabel("speedup over plain decoding")
    axes[1].legend(fontsize=8)
    done(fig, "speedup")

    fig, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True)
    for ax, domain in zip(axes, ("math", "code", "prose")):
        for name, r in results.items():
            a = r["numbers"]["domains"].get(domain, {"n_alpha": []})["n_alpha"]
            ax.plot(range(1, len(a) + 1), a, "o-", ms=3, label=name, color=colours[name])
        ax.set_title(domain)
        ax.set_xlabel("draft position n")
    axes[0].set_ylabel("n-α at T = 0")
    axes[0].legend(fontsize=7)
    done(fig, "n_alpha")

    if extra.get("sweeps"):
        fig, axes = plt.subplots(1, 2, figsize=(9, 3))
        for name, rows in extra["sweeps"].items():
            for setting in ("n_nodes", "block_size", "tree"):
                points = [(value, list(found["0"].values())) for s, value, found in rows if s == setting]
                for i, ax in enumerate(axes if points else ()):
                    ax.plot([value for value, _ in points], [sum(pair[i] for pair in pairs) / len(pairs) for _, pairs in points],
                            "o--" if setting == "block_size" else "o-", color=colours.get(name),
                            label=name + {"n_nodes": "", "block_size": ", chain", "tree": ", tree"}[setting])
        for ax, title in zip(axes, ("τ", "speedup")):
            ax.set_title("T = 0, mean over domains", fontsize=9)
            ax.set_xlabel("nodes verified per pass")
            ax.set_ylabel(title)
        axes[0].legend(fontsize=7)
        done(fig, "draft_size")

    if extra.get("calibration"):
        fig, ax = plt.subplots(figsize=(3.6, 3.2))
        ax.plot([0, 1], [0, 1], color="grey", lw=0.8)
        ax.plot([c for c, _, _ in extra["calibration"]], [a for _, a, _ in extra["calibration"]], "o-", color="#08519c")
        ax.set_xlabel("draft confidence c")
        ax.set_ylabel("accepted")
        done(fig, "calibration")

    fig, ax = plt.subplots(figsize=(5, 3))
    for name, log in {r["ckpt"]: Path(r["ckpt"]).with_suffix(".jsonl") for r in results.values()}.items():
        if log.exists():
            rows = [json.loads(line) for line in log.read_text().splitlines()]
            rows = [r for r in rows if "loss" in r]
            ax.plot([r["step"] for r in rows], [r["loss"] for r in rows], label=Path(name).stem)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss (not comparable between methods)")
    ax.legend(fontsize=7)
    done(fig, "loss")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=FIVE)
    parser.add_argument("--prompts", type=int, default=20, help="per domain [20]")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="per prompt [128]")
    parser.add_argument("--data", help="a text file or folder instead of the embedded corpus, as in training")
    parser.add_argument("--no-write", action="store_true", help="leave README.md and the figures alone")
    parser.add_argument("--no-sweeps", action="store_true", help="without tree sizes and calibration")
    options = parser.parse_args()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    results, target = {}, None
    for file in options.methods:
        module = load_method(file)
        args = train.parse(module.Args, module.__doc__, module.Drafter.kind, [])
        if not Path(args.ckpt).exists() or not Path(args.target).exists():
            print(f"no {args.ckpt}: training {file} with its defaults first", flush=True)
            own_text = ["--data", options.data] if options.data else []
            subprocess.run([sys.executable, module.__file__, "--train", "--prompts", "1", *own_text], check=True, env=env)
        args, target, drafter = prepare(module, target)
        data = train.load_data(options.data, json.dumps(target.tokenizer), min(256, target.config.max_seq_len))
        args.name, args.prompts, args.max_new_tokens = Path(file).stem, options.prompts, options.max_new_tokens
        numbers = train.report(module, args, target, drafter, data)
        prompt = data.prompts(1, seed=3)[data.domains[-1]][0][0]  # where the law has many texts
        results[args.name] = {
            "numbers": numbers, "parameters": sum(p.numel() for p in drafter.parameters()),
            "minutes": training_minutes(args.ckpt), "ckpt": args.ckpt, "p_value": law_is_exact(module, target, drafter, prompt)}
        print(f"law of the first four tokens at T=1, top-k 3: chi-square p-value: {results[args.name]['p_value']:.3f}")
    extra = {}
    if not options.no_sweeps:
        prompts = {d: [p for p, _ in pairs] for d, pairs in data.prompts(3, seed=11).items()}
        methods = {Path(f).stem: load_method(f) for f in options.methods}
        if "eagle2" in methods:
            _, _, drafter = prepare(methods["eagle2"], target)
            extra["calibration"] = calibration(methods["eagle2"], target, drafter, [p for texts in prompts.values() for p in texts])
        extra["sweeps"] = {name: sweep(module, target, prompts) for name, module in methods.items() if name in SIZES}
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((line.split(":")[1].strip() for line in known.splitlines() if "model name" in line), platform.processor())
    hardware = (f"{torch.get_num_threads()} threads of {cpu}, {next(iter(results.values()))['numbers']['dtype']}, PyTorch {torch.__version__}, "
                f"Python {platform.python_version()}; {options.prompts} held-out prompts per domain, up to {options.max_new_tokens} new tokens each; "
                f"speedup of all tokens, quartiles over prompts in brackets")
    text = markdown(results, hardware)
    Path("out").mkdir(exist_ok=True)
    Path("out/compare.json").write_text(json.dumps({"results": results, **extra}, indent=1))
    print("\n" + text)
    if not options.no_write:
        readme = (ROOT / "README.md").read_text()
        for mark, part in (("table", text), ("sizes", sizes(extra.get("sweeps", {})))):
            if part:
                before, rest = readme.split(f"<!-- {mark} -->")
                readme = f"{before}<!-- {mark} -->\n{part}\n<!-- /{mark} -->{rest.split(f'<!-- /{mark} -->')[1]}"
        (ROOT / "README.md").write_text(readme)
        figures(results, extra)


if __name__ == "__main__":
    train.command(main)
