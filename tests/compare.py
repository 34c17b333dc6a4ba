"""Methods beside plain decoding, on held-out prompts; prints tables.

    python tests/compare.py                           the five methods and prompt lookup; writes tests/RESULTS.md
    python tests/compare.py dflash ../my/idea.py      these: names of files in the root, or paths
    python tests/compare.py --figure                  measures nothing, draws .github/rounds.svg

Speeds are this machine's: nothing else should run on it meanwhile.
"""
import argparse
import html
import importlib.util
import json
import math
import os
import platform
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import helpers

import train
import verify

ROOT = Path(train.__file__).resolve().parent
METHODS = ["eagle1", "eagle2", "eagle3", "dflash", "dflash2", "tests/lookup"]


# ---- What is measured ----
def load_method(file):
    """The module of a method: the name of a file in the root, or a path."""
    path = Path(file) if Path(file).suffix else ROOT / f"{file}.py"
    if not path.exists():
        sys.exit(f"no method at {path}: give the name of a file in {ROOT}, or a path")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load_drafter(module, target, ckpt=None, **settings):
    """A method's drafter, with the checkpoint's settings but for those given here."""
    name = getattr(module.Drafter, "name", module.__name__)
    ckpt = ckpt or str(train.find(name))
    args = train.parse(module.Args, module.__doc__, name, ["--ckpt", ckpt])
    vars(args).update(settings)
    return train.load_drafter(module, args, target)


def open_target(path, data):
    """The target on the default device, with as many threads as train.launch gives it, and its data."""
    args = train.CommonArgs()
    target = train.load_target(path or train.find("target"), args.device, getattr(torch, args.dtype))
    if "OMP_NUM_THREADS" not in os.environ and target.config.n_embd <= 256:
        torch.set_num_threads(1)
    return target, train.Data(train.read_corpus(data), target.enc, min(256, target.config.max_seq_len))


# ---- Measurements ----
def measure(generate, target, enc, pairs, n_new, T):
    """verify.measure on [(prompt, answer)]; also quartiles of the speedup over prompts, right answers with drafting
    and without, share of 8-grams that plain decoding repeats."""
    sampling = T, None, None, (enc.eot_token,)
    texts = [prompt for prompt, _ in pairs]
    verify.measure(target, generate, texts[:1], 16, *sampling)  # warm up both
    numbers, records = verify.measure(target, generate, texts, n_new, *sampling)
    timed = [pair for pair in records if all(r.rounds[r.warm_up:] for r in pair)]
    ratios = torch.tensor([verify.speed([a]) / verify.speed([b]) for a, b in timed] or [math.nan])
    numbers["quartiles"] = [ratios.quantile(share).item() for share in (0.25, 0.75)]
    grams = [[tuple(r.tokens[i - 8:i]) for i in range(8, len(r.tokens) + 1)] for _, r in records]
    numbers["repeated"] = 1 - sum(len(set(g)) for g in grams) / max(1, sum(map(len, grams)))
    truth = [answer for _, answer in pairs]
    texts = [[enc.decode(r.tokens) for r in side] for side in zip(*records)]
    right = [sum(str(answer) in text for text, answer in zip(side, truth)) for side in texts]
    numbers["right"] = right if truth[0] else None
    return numbers


def stage_times(generate, prompts, T, n_new=64):
    """(ms of a draft, ms of a pass and all that follows it): medians over rounds, the first two of a text left out.
    On CUDA later rounds are graphs, as in Session.run."""
    times = []

    def clock(session):
        if session.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    def run(session, draft, check):
        rounds, tree = 0, None
        while not session.done:
            if session.capture and rounds == 2:
                if draft:
                    draft, tree = verify.capture(draft)
                check, _ = verify.capture(check, tree)
            began = clock(session)
            if draft:
                tree = draft() or tree
            drafted = clock(session)
            check(tree)
            new = session.new_tokens.tolist()
            ended = clock(session)
            session.record_tokens(new)
            rounds += 1
            if rounds > 2:
                times.append((drafted - began, ended - drafted))
        return session.record

    with mock.patch.object(verify.Session, "run", run):
        for prompt in prompts:
            generate(prompt, n_new, T)
    return torch.tensor(times or [(math.nan, math.nan)]).median(0).values.tolist()


@torch.inference_mode()
def exact_law(target, prompt, length=4, top_k=3):
    """{text: probability} of the next tokens at T = 1, each among the three likeliest, from uncached passes."""
    law = {(): 1.0}
    for _ in range(length):
        idx = torch.tensor([[*prompt, *text] for text in law], device=target.wte.weight.device)
        rows = verify.probs(target(idx)[0][:, -1].double(), 1.0, top_k).tolist()
        law = {(*text, t): law[text] * p for text, row in zip(law, rows) for t, p in enumerate(row) if p > 0}
    return law


def law_test(generate, prompt, law, n=600):
    """p-value of a chi-square test: n texts against their exact law."""
    torch.manual_seed(0)
    count = Counter(tuple(generate(prompt, 4, 1.0, 3).tokens) for _ in range(n))
    pairs = [(count[text], law.get(text, 0.0)) for text in law.keys() | count.keys()]
    return helpers.p_value(*torch.tensor(pairs, dtype=torch.float64).T)


# ---- Tables ----
def machine(target, options):
    """One line: on what, with what, how often, when, at which commit."""
    info = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else None
    cpu = found[1] if found else platform.processor()
    where = torch.cuda.get_device_name() if target.wte.weight.is_cuda else cpu
    commit = os.popen(f'git -C "{ROOT}" describe --always --dirty').read().strip() or "unknown"
    return (f"{where}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {target.wte.weight.dtype}, PyTorch "
            f"{torch.__version__}; target {target.fingerprint}; {options.prompts} held-out prompts per domain, up to "
            f"{options.max_new_tokens} new tokens each; {time.strftime('%Y-%m-%d')}, commit {commit}.")


def table(header, rows):
    rows = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def markdown(found):
    """RESULTS.md. found: machine, runs (one for every temperature and method), methods."""
    domains = list(found["runs"][0]["domains"])
    speeds, stages, alphas, copies = [], [], [], {}
    for run in found["runs"]:
        who, numbers, cells = [run["method"], run["T"]], run["domains"].values(), []
        for n in numbers:
            low, high = n["quartiles"]
            cells += [f"{n['tau']:.2f}", f"**{n['speedup']:.2f}×** {low:.2f}–{high:.2f}", f"{n['nodes']:.1f}"]
        right = ["{} ({})".format(*n["right"]) for n in numbers if n["right"]] or ["–"]
        equal, prompts = (sum(n[key] for n in numbers) for key in ("equal", "prompts"))
        speeds.append([*who, *cells, *right, "–" if float(run["T"]) else f"{equal} of {prompts}"])
        plain, draft, check = run["ms"]
        stages.append([*who, *(f"{x:.2f}" for x in (plain, draft, check, (draft + check) / plain))])
        alphas.append([*who, *(" ".join(f"{a:.2f}" for a in n["n_alpha"][:8]) for n in numbers)])
        copies[run["T"]] = [run["T"], *(f"{n['repeated']:.0%}" for n in numbers)]
    methods = [[name, f"{m['parameters'] / 1e6:.2f}", f"{m['p_value']:.3f}",
                *(f"{n} ({n / one:.2f})" for n, one in zip(m["operations"], found["plain"]))]
               for name, m in found["methods"].items()]
    columns = [f"{d} {what}" for d in domains for what in ("τ", "speedup", "nodes")]
    return "\n".join([
        f"# Results\n\nWritten by `python tests/compare.py`. {found['machine']}\n",
        "τ: tokens per target pass. Speedup: over plain decoding, measured in turns; quartiles over prompts.",
        "Nodes: rows of a pass. Right: answers to problems, in brackets plain decoding's. Equal: texts, to its.\n",
        table(["", "T", *columns, "right", "equal"], speeds),
        "Stages of a round, medians in ms; t_AR: a token of plain decoding. Last: about the τ from which it pays.\n",
        table(["", "T", "t_AR", "t_draft", "t_verify", "(t_draft + t_verify) / t_AR"], stages),
        "n-α: how often draft position n = 1, 2, ... is accepted where all before it are.\n",
        table(["", "T", *domains], alphas),
        "8-grams of plain decoding that stand earlier in the same text. Drafters copy them easily.\n",
        table(["T", *domains], copies.values()),
        "Law: p-value of a chi-square test in float32 of the first four tokens of 600 texts (T = 1, top-k 3).",
        "Operations: what a CUDA graph of a round would hold, computed, not measured; in brackets by those of plain",
        "decoding, {} and {}: the τ from which drafting pays where each takes as long.\n".format(*found["plain"]),
        table(["", "M parameters", "law, p", "operations, T = 0", "T = 1"], methods)])


# ---- The picture ----
CELL, PITCH, LEFT = 11, 24, 104  # width of a token, height of a row, width of the labels
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .title, .tau { font-weight: 600 }
.text { font: 11px ui-monospace, monospace; fill: #57606a } .drafted { fill: #2f6fde } .supplied { fill: #f2a33c }
.between { stroke: #fff; stroke-opacity: .55 }"""


def label(x, y, text, style=""):
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'


def block(x, y, kept, drafted):
    """A round: its tokens in the target's colour, the drafted ones painted over, lines between tokens."""
    def bar(kind, tokens):
        return f'<rect class="{kind}" x="{x}" y="{y}" width="{tokens * CELL - 2}" height="16" rx="3"/>'

    lines = "".join(f"M{x + i * CELL - 1} {y}v16" for i in range(1, kept))
    supplied, covered = bar("supplied", kept) * (kept > drafted), bar("drafted", drafted) * (drafted > 0)
    return supplied + covered + f'<path class="between" d="{lines}"/>' * (kept > 1)


def picture(methods, target, data, n=64):
    """SVG: greedy continuations of a problem and of code, held-out both; methods {label: generate}."""
    methods = {"plain": partial(verify.autoregressive, target), **methods}
    parts = [block(17, 17, 1, 1), label(34, 29, "drafted and accepted"), block(190, 17, 1, 0),
             label(207, 29, "supplied by the target"),
             label(374, 29, "a block is one target pass, as wide as the tokens that it committed")]
    stop, y = (data.enc.eot_token,), 62
    for domain in [d for d in data.domains if d in ("math", "code")] or data.domains[:1]:
        prompts = [prompt for prompt, _ in data.prompts(10)[domain]]
        texts = [methods["plain"](prompt, n + 1, stop=stop).tokens for prompt in prompts]
        longest = texts.index(max(texts, key=len))  # the solution of a problem may be short
        text = data.enc.decode(texts[longest][1:]).replace("\n", "⏎")
        text = text if len(text) < 106 else text[:104] + " …"
        parts += [label(16, y, domain, 'class="title"'), label(LEFT, y, text, 'class="text"')]
        for name, generate in methods.items():
            record, x = generate(prompts[longest], n + 1, stop=stop), LEFT
            y += PITCH
            parts.append(label(LEFT - 12, y + 2, name, 'text-anchor="end"'))
            for r in record.rounds:
                parts.append(block(x + 1, y - 10, r.kept, min(r.accepted, r.kept)))
                x += r.kept * CELL
            tau = sum(r.kept for r in record.rounds) / len(record.rounds)
            parts.append(label(LEFT + n * CELL + 12, y + 2, f"τ {tau:.2f}", 'class="tau"'))
        y += 42
    size = LEFT + n * CELL + 84, y - 24
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}">'.format(*size),
        f'<style>{STYLE}</style><rect width="100%" height="100%" rx="8" fill="#fff"/>', *parts, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="names of files in the root, or paths")
    parser.add_argument("--prompts", type=train.number(int, 1), default=20, help="held-out ones per domain [20]")
    parser.add_argument("--max_new_tokens", type=train.number(int, 1), default=128, help="per prompt [128]")
    parser.add_argument("--temperatures", type=train.number(float, 0), nargs="+", default=[0, 1], help="[0 1]")
    parser.add_argument("--data", help="a text file or folder instead of the embedded corpus")
    parser.add_argument("--target", help="checkpoint of the target, if not target.pt in out/ or weights/")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md alone")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there, too")
    parser.add_argument("--figure", action="store_true", help="draw .github/rounds.svg, measure nothing")
    options = parser.parse_args()
    target, data = open_target(options.target, options.data)
    methods, generates = {}, {}
    for file in options.methods or METHODS:
        module = load_method(file)
        drafter = load_drafter(module, target)
        name = module.__name__
        generates[name] = partial(module.generate, target, drafter)
        methods[name] = {"parameters": sum(p.numel() for p in drafter.parameters()),
                         "operations": [sum(helpers.operations(name, target, T, drafter)) for T in (0.0, 1.0)]}
    if options.figure:
        (ROOT / ".github" / "rounds.svg").write_text(picture(generates, target, data), encoding="utf-8")
        return
    room = target.config.max_seq_len - 8
    prompts = {d: [(p[-room:], answer) for p, answer in pairs] for d, pairs in data.prompts(options.prompts).items()}
    few = [pairs[0][0] for pairs in prompts.values()]
    runs, plain = [], partial(verify.autoregressive, target)
    for T in options.temperatures:
        for name, generate in generates.items():
            print(f"{name}, T = {T:g}", file=sys.stderr, flush=True)
            runs.append({
                "method": name, "T": f"{T:g}", "ms": [stage_times(plain, few, T)[1], *stage_times(generate, few, T)],
                "domains": {d: measure(generate, target, data.enc, pairs, options.max_new_tokens, T)
                            for d, pairs in prompts.items()}})
    found = {"machine": machine(target, options), "runs": runs, "methods": methods,
             "plain": [sum(helpers.operations(None, target, T)) for T in (0.0, 1.0)]}
    target.float()
    laws = [exact_law(target, prompt) for prompt in few]
    entropies = [-sum(p * math.log(p) for p in law.values()) for law in laws]
    prompt, law = max(zip(entropies, few, laws))[1:]  # the prompt with the most continuations
    for name, generate in generates.items():
        generate.args[1].float()  # its drafter
        methods[name]["p_value"] = law_test(generate, prompt, law)
    text = markdown(found)
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not (options.no_write or options.methods):
        (ROOT / "tests" / "RESULTS.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
