"""Data, tokenizer, optimizer, checkpoints, the frame of a training run, and the training of the target itself.

    python train.py                 trains a target of your own, on text that every Python installation carries
    python train.py --init gpt2     takes published GPT-2 weights instead
    torchrun --nproc_per_node 2 train.py --train    (any command that trains) on several devices

Three domains, because a draft's acceptance depends on what is written: worked maths problems, made up here; code, the
standard library; prose, its docstrings, long comments and help topics. An eighth, by checksum, is never trained on.
"""
import argparse
import ast
import codecs
import hashlib
import json
import math
import os
import random
import re
import signal
import sys
import time
import zlib
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiktoken._educational import bpe_train
from tqdm import tqdm

import model
import verify

END, CUDA = "<|endoftext|>", torch.cuda.is_available()


# ---- Data: worked problems, each a function of a random generator r -> (question, steps of the solution, answer) ----
NAMES = ("Ada Ben Carla Deniz Emma Farid Grace Hugo Ines Jonas "
         "Kofi Lena Mei Nils Olga Priya Rosa Sam Tariq Uma").split()
THINGS = "apples books coins pencils stamps marbles cards shells stickers tickets".split()


def story(r):
    name, thing, n = r.choice(NAMES), r.choice(THINGS), r.randint(5, 30)
    text, steps = f"{name} has {n} {thing}.", []
    for _ in range(r.randint(2, 3)):
        k, verb = r.randint(2, 12), r.choice(("buys", "finds", "gives away", "loses"))
        if k > n:
            verb = "buys"
        sign, after = ("+", n + k) if verb in ("buys", "finds") else ("-", n - k)
        text += f" Then {name} {verb} {k} {thing}."
        steps.append(f"{n} {sign} {k} = {after}, so {name} now has {after} {thing}.")
        n = after
    return f"{text} How many {thing} does {name} have now?", steps, n


def addition(r):
    a, b, carry, steps = r.randint(100, 999), r.randint(100, 999), 0, []
    for i, place in enumerate(("ones", "tens", "hundreds")):
        x, y = a // 10**i % 10, b // 10**i % 10
        s = x + y + carry
        with_carry = f" + {carry}" if carry else ""
        steps.append(f"The {place}: {x} + {y}{with_carry} = {s}, write {s % 10}, carry {s // 10}.")
        carry = s // 10
    return f"Add {a} and {b}.", steps, a + b


def multiplication(r):
    a, b = r.randint(12, 99), r.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    steps = [f"Split {a} into {tens} + {ones}.", f"First, {tens} * {b} = {tens * b}.",
             f"Then, {ones} * {b} = {ones * b}.", f"Together, {tens * b} + {ones * b} = {a * b}."]
    return f"Multiply {a} by {b}.", steps, a * b


def equation(r):
    x, a, b, v = r.randint(1, 12), r.randint(2, 9), r.randint(1, 20), r.choice("xyn")
    sign, back, verb = r.choice((("+", "-", "Subtract"), ("-", "+", "Add")))
    c = a * x + b if sign == "+" else a * x - b
    steps = [f"{verb} {b} on both sides: {a}{v} = {c} {back} {b} = {a * x}.",
             f"Divide both sides by {a}: {v} = {a * x} / {a} = {x}."]
    return f"Solve {a}{v} {sign} {b} = {c} for {v}.", steps, x


def percentage(r):
    p, n = r.choice(range(5, 100, 5)), r.randint(1, 30)
    parts = [part for part in (p // 10 * 10, p % 10) if part]
    steps = [f"1 percent of {n}00 is {n}00 / 100 = {n}."]
    steps += [f"{part} percent is {part} * {n} = {part * n}." for part in parts]
    if len(parts) == 2:
        steps.append(f"Together, {parts[0] * n} + {parts[1] * n} = {p * n}.")
    return f"What is {p} percent of {n}00?", steps, p * n


def sequence(r):
    a, d, n = r.randint(1, 30), r.randint(2, 12), r.randint(5, 8)
    steps = [f"The difference is {a + d} - {a} = {d}."]
    steps += [f"Number {i}: {a + (i - 2) * d} + {d} = {a + (i - 1) * d}." for i in range(4, n + 1)]
    start = f"{a}, {a + d}, {a + 2 * d}"
    return f"A sequence starts {start} and goes on in the same way. What is number {n}?", steps, a + (n - 1) * d


def held_out(key):
    return zlib.crc32(key.encode()) % 8 == 0


def math_texts(n, seed, holdout):
    """n problems from one side of the split: [(question, solution, answer)]. Only held-out ones are distinct."""
    kinds = story, addition, multiplication, equation, percentage, sequence
    r, texts, seen = random.Random(seed), [], set()
    while len(texts) < n:
        question, steps, answer = r.choice(kinds)(r)
        if held_out(question) == holdout and not (holdout and question in seen):
            seen.add(question)
            solution, answer = " " + "\n".join(steps) + "\n", f"Answer: {answer}\n"
            texts.append((f"Problem: {question}\nSolution:", solution + answer, answer))
    return texts


# Left out: other people's packages, tests (assertions that repeat, tables of data) and encodings (tables).
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def prose_of(source):
    """Docstrings of at least two lines and comments of at least four, in a Python source."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    docs = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    comments = re.findall(r"(?m)(?:^ *# [^\n]*\n){4,}", source)
    comments = [re.sub(r"(?m)^ *# ?", "", text) for text in comments]
    return [text for text in docs + comments if text and "\n" in text]


def read_corpus(data=None):
    """{domain: {"train": [text], "held": [text]}}. A docstring that stands on both sides is not held out."""
    if data is not None:
        root = Path(data)
        files = sorted(f for f in (root, *root.rglob("*")) if f.is_file() and os.access(f, os.R_OK))
        texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
        if sum(map(len, texts)) < 5000:
            sys.exit(f"--data {data}: no such file, or fewer than 5000 characters")
        train, held = [t[:-len(t) // 8] for t in texts], [t[-len(t) // 8:] for t in texts]
        return {"text": {"train": train, "held": held}}
    corpus = {domain: {"train": [], "held": []} for domain in ("math", "code", "prose")}
    for side, n in (("train", 60000), ("held", 400)):
        problems = math_texts(n, 1234, side == "held")
        corpus["math"][side] = [q + solution for q, solution, _ in problems]
    root = Path(ast.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not NOT_READ & set(name.parts):
            source = file.read_text(encoding="utf-8", errors="replace")
            side = "held" if held_out(name.as_posix()) else "train"
            corpus["code"][side].append(source)
            corpus["prose"][side] += prose_of(source)
    from pydoc_data.topics import topics
    for name, text in topics.items():
        corpus["prose"]["held" if held_out(name) else "train"].append(text)
    held, trained = corpus["prose"]["held"], set(corpus["prose"]["train"])
    corpus["prose"]["held"] = [t for t in held if t not in trained]
    return corpus


# ---- Tokenizer: byte-level BPE (Sennrich et al. 2016; GPT-2's bytes), trained and run by tiktoken ----
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def train_tokenizer(corpus, vocab_size):
    """A tokenizer as it stands in a checkpoint, of a sample of every domain; the last id is END."""
    print("training a tokenizer (a minute)")
    shuffled = (random.Random(0).sample(c["train"], len(c["train"])) for c in corpus.values())
    sample = "".join("".join(texts)[:100_000] for texts in shuffled)
    ranks = bpe_train(sample, vocab_size - 1, PATTERN, visualise=None)
    return {"ranks": [piece.decode("latin-1") for piece in ranks]}


def encoding(tokenizer):
    """The tiktoken Encoding of a tokenizer as it stands in a checkpoint."""
    ranks = {piece.encode("latin-1"): i for i, piece in enumerate(tokenizer["ranks"])}
    return tiktoken.Encoding("corpus", pat_str=tokenizer.get("pattern", PATTERN),
                             mergeable_ranks=ranks, special_tokens={END: len(ranks)})


class Data:
    """The corpus as tokens, and what runs take from it. tokens[domain, side] (n,): documents, with END
    after each; starts: where a line or document begins (math: a document), so that sequences begin as prompts do."""

    def __init__(self, corpus, enc, seq_len):
        self.enc, self.seq_len, self.domains = enc, seq_len, list(corpus)
        self.tokens, self.starts = {}, {}
        newline = torch.tensor([b"\n" in enc.decode_bytes([i]) for i in range(enc.n_vocab)])
        for domain in tqdm(corpus, "encoding", leave=False):
            for side, texts in corpus[domain].items():
                t = torch.tensor([token for text in texts for token in self.encode(text)])
                if len(t) <= seq_len:
                    sys.exit(f"{domain}, {side}: {len(t)} tokens; give more --data or a smaller --seq_len")
                is_end = (t == enc.eot_token) | (newline[t] & (domain != "math"))
                start = F.pad(is_end.nonzero()[:, 0] + 1, (1, 0))
                self.tokens[domain, side] = t
                self.starts[domain, side] = start[start < len(t) - seq_len]

    def encode(self, text):
        """In pieces: a very long run of one character overflows tiktoken's stack."""
        pieces = [text[i:i + 20000] for i in range(0, len(text), 20000)]
        return [t for piece in pieces for t in self.enc.encode_ordinary(piece)] + [self.enc.eot_token]

    def batch(self, step, batch_size, seed=0, side="train", domain=None):
        """(batch_size, seq_len) tokens, a function of the arguments alone, so that a resumed run sees the same text."""
        r, rows = random.Random(f"{seed} {step} {side}"), []
        share = {"math": 0.4, "code": 0.35, "prose": 0.25, "text": 1.0}
        for d in r.choices(self.domains, [share[d] for d in self.domains], k=batch_size):
            key = domain or d, side
            i = r.choice(self.starts[key])
            rows.append(self.tokens[key][i:i + self.seq_len])
        return torch.stack(rows)

    def prompts(self, n, seed=0):
        """Held-out prompts: {domain: [(tokens of the prompt, right answer or None)]}, n each."""
        r, found = random.Random(seed), {}
        for domain in self.domains:
            if domain == "math":
                problems = math_texts(n, 99 + seed, True)
                found[domain] = [(self.enc.encode_ordinary(q), a) for q, _, a in problems]
            else:
                t, starts = self.tokens[domain, "held"], self.starts[domain, "held"]
                first = [r.choice(starts) for _ in range(n)]
                found[domain] = [(t[i:i + self.seq_len // 4].tolist(), None) for i in first]
        return found


def orthogonal(x):
    """The matrix with the directions of x and singular values near 1, by Newton-Schulz (Jordan et al. 2024): five steps
    of a quintic with fixed points around 1. bfloat16 is emulated on many a CPU."""
    y = x.mT if x.shape[0] > x.shape[1] else x
    y = y.bfloat16() if y.is_cuda else y
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        a = y @ y.mT
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return y.mT if x.shape[0] > x.shape[1] else y


class Optimizer(torch.optim.Adam):
    """Muon for the matrices inside a network (momentum, orthogonalised; with decay, Liu et al. 2025), Adam for
    embeddings and everything else; warmup over 4 % of the steps, then linear decay to 10 %."""

    def __init__(self, module, lr, steps, decay=0.0):
        super().__init__(module.parameters(), betas=(0.9, 0.95))
        tables = {m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)}
        self.matrices = [p for p in module.parameters() if p.dim() == 2 and p not in tables]
        for p in self.matrices:
            self.state[p] = {"step": torch.tensor(0.0), "momentum": torch.zeros_like(p)}
        self.lr, self.steps, self.decay = lr, steps, decay

    @torch.no_grad()
    def step(self, step):
        """One update with the gradients at hand, of norm at most 1, then clears them. step counts from 0."""
        warmup = max(1, self.steps // 25)
        left = (self.steps - step) / max(1, self.steps - warmup)
        lr = self.lr * min((step + 1) / warmup, 0.1 + 0.9 * left)
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        for p in [p for p in self.matrices if p.grad is not None]:
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            update = orthogonal(p.grad.lerp(momentum, 0.95))  # Nesterov
            p.mul_(1 - lr * self.decay)
            p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            p.grad = None  # Adam passes over it
        self.param_groups[0]["lr"] = lr / 6
        super().step()
        self.zero_grad()


# ---- Command line: the flags that all commands share ----
def arg(default, help, type=str, **how):
    """A field of Args and a flag of the command line; type and how are argparse's."""
    if default is False:
        how["action"] = "store_true"
    else:
        how["type"] = number(int, 1) if isinstance(default, int) and type is str else type
    help += "" if default in (None, False) else f" [{default}]"
    return field(default=default, metadata={"help": help, **how})


def number(kind, low, high=math.inf):
    """A type for argparse: a number of this kind from low to high."""
    def parse(text):
        if not low <= kind(text) <= high:
            raise ValueError
        return kind(text)
    parse.__name__ = f"number from {low} to {high}"
    return parse


@dataclass
class CommonArgs:
    train: bool = arg(False, "train, then report")
    prompt: str = arg(None, "text to continue")
    bench: bool = arg(False, "measure on held-out prompts")
    json: bool = arg(False, "end the report with a line of JSON")
    verbose: bool = arg(False, "draw every round as a tree")
    seed: int = arg(0, "of all random numbers", number(int, 0))
    device: str = arg("cuda" if CUDA else "cpu", "cpu, cuda, cuda:1 ...")
    dtype: str = arg("bfloat16" if CUDA else "float32", "of inference",
                     choices=("float32", "bfloat16", "float64"))
    target: str = arg(None, "checkpoint of the target")
    ckpt: str = arg(None, "checkpoint to write and read")
    data: str = arg(None, "text file or folder to learn from")
    resume: bool = arg(False, "go on from the checkpoint")
    max_new_tokens: int = arg(128, "per prompt", number(int, 0))
    temperature: float = arg(None, "0 is greedy", number(float, 0))
    top_k: int = arg(None, "sample from the k likeliest tokens", number(int, 1))
    top_p: float = arg(None, "... those of this mass", number(float, 1e-300, 1))
    prompts: int = arg(10, "held-out prompts per domain")


@dataclass
class Args(CommonArgs):
    steps: int = arg(2000, "optimizer steps")
    batch_size: int = arg(8, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence, and the context", number(int, 64))
    lr: float = arg(0.03, "learning rate of Muon", number(float, 1e-9))
    n_layer: int = arg(24, "blocks")
    n_head: int = arg(2, "attention heads")
    n_embd: int = arg(128, "width")
    vocab_size: int = arg(512, "entries of the tokenizer", number(int, 300))
    init: str = arg(None, "gpt2 ... gpt2-xl or a file")


def parse(Args, doc, name, argv=None):
    """The command line. A checkpoint that is read, of this name, brings its settings as defaults."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    torch.set_flush_denormal(True)  # softmax tails: 50 times slower
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Args):
        parser.add_argument("--" + f.name, default=f.default, **f.metadata)
    args = parser.parse_args(argv)
    path = args.ckpt or find(name)
    if Path(path).is_file() and (args.resume or not (args.train or name == "target")):
        common = {f.name for f in fields(CommonArgs)}
        if args.resume:
            common -= {"data", "seed"}
        saved = load(path, name)["args"].items()
        parser.set_defaults(**{k: v for k, v in saved if k not in common})
        args = parser.parse_args(argv)
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    if args.device.startswith("cuda"):
        index = torch.device(args.device).index
        torch.cuda.set_device(index or int(os.environ.get("LOCAL_RANK", 0)))
    args.name, args.train = name, args.train or args.resume
    return args


# ---- Checkpoints: one dict that torch.load(weights_only=True) reads ----
def find(name):
    """The checkpoint that a command reads: your own in out/, or the one that came with the repository."""
    mine = Path("out", f"{name}.pt")
    shipped = Path(__file__).parent / "weights" / f"{name}.pt"
    return shipped if shipped.exists() and not mine.exists() else mine


def save(path, checkpoint):
    """Writes under a temporary name and renames, so that the file is always a complete one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path} could not be written: {str(error).splitlines()[0]}")


def load(path, name):
    """Reads a checkpoint of this name ("target", "eagle1", ...), or ends in one line that says why not."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        found = saved["name"]
    except Exception as error:  # torch.load raises nearly anything
        sys.exit(f"{path}: no checkpoint, or cut short ({type(error).__name__}): --train")
    if found != name:
        sys.exit(f"{path}: holds a {found} checkpoint, not {name}")
    return saved


def load_weights(module, saved, path):
    try:
        module.load_state_dict(saved["model"])
    except RuntimeError:
        sys.exit(f"{path} has other settings: leave those flags out, or train it again")


def load_target(path, device, dtype=torch.float32):
    """The frozen target of a checkpoint, with .enc, its tokenizer, and .fingerprint, hex digits of its weights."""
    saved = load(path, "target")
    if saved["step"] < saved["args"].get("steps", 0):
        sys.exit(f"{path} is not trained to the end: python train.py --ckpt {path} --resume")
    target = model.GPT(model.GPTConfig(**saved["config"]))
    load_weights(target, saved, path)
    weights = sorted(target.state_dict().items())
    weights = b"".join(w.float().numpy().tobytes() for _, w in weights)
    target.fingerprint = hashlib.sha256(weights).hexdigest()[:16]
    target.enc = encoding(saved["tokenizer"])
    return model.column_major(target.to(device, dtype).eval().requires_grad_(False))


def load_drafter(method, args, target):
    """The drafter of args.ckpt for this target; a method without train has nothing to load."""
    drafter = method.Drafter(target.config, args)
    if hasattr(method, "train"):
        path = args.ckpt or find(args.name)
        saved = load(path, args.name)
        if saved["target"] != target.fingerprint:
            sys.exit(f"{path} was trained for another target: give its --target, or --train")
        load_weights(drafter, saved, path)
    return model.column_major(drafter.to(args.device, getattr(torch, args.dtype)).eval())


def init_target(args):
    """--init: published GPT-2 weights, in a file or fetched by name, as a checkpoint."""
    name, url = args.init, "https://huggingface.co/openai-community/{}/resolve/main/pytorch_model.bin"
    try:
        if Path(name).exists():
            weights = torch.load(name, map_location="cpu", weights_only=True)
        else:
            weights = torch.hub.load_state_dict_from_url(
                url.format(name), "out", file_name=f"{name}.bin", weights_only=True)
        target, enc = model.load_gpt2(weights), tiktoken.get_encoding("gpt2")
        assert enc.n_vocab == target.config.vocab_size, "not GPT-2's vocabulary"
    except Exception as error:
        sys.exit(f"--init {name}: GPT-2 weights neither there nor fetched ({error!r})")
    ranks = [enc.decode_bytes([i]).decode("latin-1") for i in range(enc.eot_token)]
    save(args.ckpt, {"name": "target", "model": target.state_dict(), "args": {}, "step": 0,
                     "config": vars(target.config),
                     "tokenizer": {"ranks": ranks, "pattern": enc._pat_str}})


# ---- Training: what is the same for the target and for every drafter ----
class Run:
    """The frame of a training loop: `for step in run` shows progress, saves every minute, at the end and on Ctrl-C, and
    resumes. Under torchrun every process takes its share of the batch. extra: more that the checkpoint holds."""

    def __init__(self, args, module, optimizer, extra):
        self.args, self.module, self.optimizer, self.extra = args, module, optimizer, extra
        self.path = Path(args.ckpt or f"out/{args.name}.pt")
        self.first, self.losses, self.curve = 0, [], []
        if args.resume or self.path.exists():
            found = load(self.path, args.name)  # never over a foreign file
        if args.resume:
            if found.get("target") != extra.get("target") or "optimizer" not in found:
                sys.exit(f"--resume: {self.path} has another target, or weights alone")
            self.first, self.curve = found["step"], found["curve"]
            load_weights(module, found, self.path)
            optimizer.load_state_dict(found["optimizer"])
        self.rank, self.world, self.parallel = 0, 1, module
        if "RANK" in os.environ:  # started by torchrun
            if not dist.is_initialized():
                dist.init_process_group()
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.parallel = torch.nn.parallel.DistributedDataParallel(module)

    def batch(self, data, step):
        rows = data.batch(step, self.args.batch_size, self.args.seed)
        return rows[self.rank::self.world].to(self.args.device)

    def autocast(self):
        """bfloat16 on CUDA, and on a CPU with AMX; with AVX-512 alone a step takes longer than in float32."""
        kind = torch.device(self.args.device).type
        amx = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" or amx)

    def __iter__(self):
        args, stop, saved = self.args, [], time.time()
        signal.signal(signal.SIGINT, lambda *_: stop.append(True))  # not in mid-step
        bar = tqdm(range(self.first, args.steps), args.name, args.steps,
                   initial=self.first, disable=self.rank > 0)
        for step in bar:
            torch.manual_seed(zlib.crc32(f"{args.seed} {step} {self.rank}".encode()))
            yield step
            done, now = step + 1, time.time()
            due = stop or done == args.steps or now > saved + 60
            if due or done % 10 == 0:
                loss = torch.stack(self.losses).mean().item()
                self.losses.clear()
                if not math.isfinite(loss):
                    sys.exit(f"the loss is {loss} at step {done}: try a smaller --lr")
                self.curve.append([done, loss])
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if due and self.rank == 0:
                weights, state = self.module.state_dict(), self.optimizer.state_dict()
                save(self.path, {**self.extra, "name": args.name, "args": vars(args), "step": done,
                                 "curve": self.curve, "model": weights, "optimizer": state})
            saved = now if due else saved
            if stop and done < args.steps:
                sys.exit(f"\ninterrupted after step {done}; --resume goes on")
        signal.signal(signal.SIGINT, signal.default_int_handler)


def get_target(args):
    """The frozen target that a drafter is trained for, and its data."""
    target = load_target(args.target or find("target"), args.device)
    if args.seq_len > (limit := target.config.max_seq_len):
        sys.exit(f"--seq_len {args.seq_len} exceeds the target's context, {limit}")
    return target, Data(read_corpus(args.data), target.enc, args.seq_len)


def train(args):
    """Trains the target on all domains; cross-entropy of the next token."""
    if args.n_embd % (16 * args.n_head):
        sys.exit("--n_embd has to be a multiple of 16 times --n_head")
    corpus = read_corpus(args.data)
    new = not args.resume
    tokenizer = train_tokenizer(corpus, args.vocab_size) if new else load(args.ckpt, "target")["tokenizer"]
    data = Data(corpus, encoding(tokenizer), args.seq_len + 1)
    torch.manual_seed(args.seed)
    config = model.GPTConfig(args.seq_len, data.enc.n_vocab, args.n_layer, args.n_head, args.n_embd)
    target = model.GPT(config).to(args.device)
    optimizer = Optimizer(target, args.lr, args.steps, decay=0.1)
    run = Run(args, target, optimizer, {"config": vars(config), "tokenizer": tokenizer})
    for step in run:
        idx = run.batch(data, step)
        with run.autocast():
            logits, _ = run.parallel(idx[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), idx[:, 1:].flatten())
        loss.backward()
        optimizer.step(step)
        run.losses.append(loss.detach())
    for domain in data.domains:
        idx = data.batch(0, 16, seed=1, side="held", domain=domain).to(args.device)
        loss = F.cross_entropy(target(idx[:, :-1])[0].mT, idx[:, 1:])
        print(f"held-out {domain}: {loss:.3f} nats per token")


# ---- What `python METHOD.py` does around the method's own train and generate ----
def marked(record, enc):
    """The text, accepted tokens green on a terminal, in brackets elsewhere; a character is marked as its last token."""
    on, off = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    text, at = decode(enc.decode_bytes(record.tokens[:1])), 1
    for r in record.rounds:
        new, at = record.tokens[at:at + r.kept], at + r.kept
        drafted = decode(enc.decode_bytes(new[:r.accepted]))
        text += (on + drafted + off if drafted else "") + decode(enc.decode_bytes(new[r.accepted:]))
    return text + decode(b"", True)


def draw(record, enc):
    """Every round on its own: the drafted tree, depth first, its accepted path marked +, and what was supplied."""
    at = 1
    for r in record.rounds:
        (tokens, parents), new, at = r.draft, record.tokens[at:at + r.kept], at + r.kept
        print(f"\n{len(tokens) - 1} drafted, {r.accepted} accepted, "
              f"supplied: {enc.decode(new[r.accepted:])!r}")
        paths = [()]
        for i, parent in enumerate(parents[1:], 1):
            paths.append((*paths[parent], i))
        for path in sorted(paths[1:]):
            words = [tokens[i] for i in path]
            mark = "+ " if words == new[:r.accepted][:len(path)] else "  "
            print("  " * (len(path) - 1) + mark + repr(enc.decode(words[-1:])))


def show(measure, args, enc, limit):
    """Continues one prompt, shorter than limit, and shows who wrote what. A shell's "\\n" stands for a newline."""
    text = args.prompt or math_texts(1, args.seed, True)[0][0]
    prompt = enc.encode_ordinary(text.replace("\\n", "\n"))
    if len(prompt) >= limit:
        sys.exit(f"the prompt has {len(prompt)} tokens; at most {limit - 1} fit")
    verify.Session.keep_drafts = args.verbose
    n, [(record, _)] = measure([prompt], args.max_new_tokens, args.temperature or 0.0)
    print(enc.decode(prompt) + marked(record, enc))
    if args.verbose:
        draw(record, enc)
    same = "" if args.temperature else f"; equal to plain decoding: {n['equal'] == 1}"
    print(f"\n(marked: drafted and accepted) tau {n['tau']:.2f}, {n['tok_s']:.0f} tokens/s, "
          f"plain decoding {n['ar_tok_s']:.0f}{same}")


def benchmark(measure, args, data):
    """Measures on held-out prompts by domain, at temperature 0 and 1 or the one given; prints it and returns it."""
    enc, prompts, results = data.enc, data.prompts(args.prompts, args.seed), []
    for T in [0.0, 1.0] if args.temperature is None else [args.temperature]:
        print(f"\n{args.method} at T={T:g}, {args.prompts} held-out prompts per domain "
              f"({args.device}, {args.dtype}, {torch.get_num_threads()} threads)")
        domains = {}
        for domain, pairs in prompts.items():
            texts = [prompt[8 - data.seq_len:] for prompt, _ in pairs]  # leaves room
            measure(texts[:1], 16, T)  # warms up
            n, records = measure(tqdm(texts, domain, leave=False), args.max_new_tokens, T)
            print(f"{domain:6} tau {n['tau']:5.2f}, {n['tok_s']:5.0f} tokens/s, plain decoding "
                  f"{n['ar_tok_s']:.0f}: {n['speedup']:.2f} x; accepted by position",
                  *(f"{rate:.2f}" for rate in n["n_alpha"][:8]))
            if domain == "math":
                n["right_answers"] = [
                    sum(answer in enc.decode(r.tokens) for r, (_, answer) in zip(side, pairs))
                    for side in zip(*records)]
                print("       right answers: {}, plain decoding {}".format(*n["right_answers"]))
            domains[domain] = n
        if T == 0:
            equal = [f"{n['equal']} of {n['prompts']}" for n in domains.values()]
            print("greedy output identical:", ", ".join(equal))
        results.append({"temperature": T, "domains": domains})
    return {"method": args.method, "device": args.device, "dtype": args.dtype, "results": results}


def launch(method):
    """`python METHOD.py`: trains if asked to, then reports (--train, --bench) or continues a prompt."""
    stem = Path(method.__file__).stem
    args = parse(method.Args, method.__doc__, getattr(method.Drafter, "name", stem))
    args.method = stem
    if args.train and hasattr(method, "train"):
        method.train(args)
        if int(os.environ.get("RANK", 0)) > 0:
            return
    target = load_target(args.target or find("target"), args.device, getattr(torch, args.dtype))
    if "OMP_NUM_THREADS" not in os.environ and target.config.n_embd <= 256:
        torch.set_num_threads(1)  # a second one does not pay
    generate = partial(method.generate, target, load_drafter(method, args, target))

    def measure(prompts, n, temperature):
        sampling = temperature, args.top_k, args.top_p, (target.enc.eot_token,)
        return verify.measure(target, generate, prompts, n, *sampling, seed=args.seed)

    limit = target.config.max_seq_len
    if not (args.bench or args.train):
        return show(measure, args, target.enc, limit)
    numbers = benchmark(measure, args, Data(read_corpus(args.data), target.enc, min(256, limit)))
    if args.json:
        print(json.dumps(numbers))


def main():
    args = parse(Args, __doc__, "target")
    args.ckpt = args.ckpt or "out/target.pt"
    if Path(args.ckpt).exists() and not args.train:
        sys.exit(f"{args.ckpt} exists: --resume it, or --train over it")
    elif args.init:
        init_target(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
