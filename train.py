"""Data, tokenizer, optimizer, checkpoints, the frame of a training run, and the training of the target itself.

    python train.py                 trains a target of your own, on text that every Python installation carries
    python train.py --init gpt2     takes published GPT-2 weights instead
    torchrun --nproc_per_node 2 train.py --train    (any command that trains) on several devices

Three domains, because a draft's acceptance depends on what is written:
    math    worked problems, made up here, endless and correct
    code    the source of Python's standard library
    prose   its docstrings, long comments and help topics
Text whose checksum is 0 modulo 8 (by file for code and prose, by problem for math) is held out, never trained on.
Checkpoints are written to out/ and read from out/, or from weights/ where out/ has none.
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
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
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

END = "<|endoftext|>"


# ---- Data: worked problems, each a function of a random generator r -> (question, steps of the solution, answer) ----
NAMES = "Ada Ben Carla Deniz Emma Farid Grace Hugo Ines Jonas Kofi Lena Mei Nils Olga Priya Rosa Sam Tariq Uma".split()
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


PROBLEMS = story, addition, multiplication, equation, percentage, sequence


def held_out(key):
    return zlib.crc32(key.encode()) % 8 == 0


def math_texts(n, seed, holdout):
    """n problems from one side of the split: [(question, solution, answer)]. Held-out ones are distinct; in training
    a kind with few different problems repeats them, so that all kinds are equally frequent."""
    r, texts, seen = random.Random(seed), [], set()
    while len(texts) < n:
        question, steps, answer = r.choice(PROBLEMS)(r)
        if held_out(question) == holdout and not (holdout and question in seen):
            seen.add(question)
            solution = " " + "\n".join(steps) + f"\nAnswer: {answer}\n"
            texts.append((f"Problem: {question}\nSolution:", solution, str(answer)))
    return texts


# ---- Data: the corpus ----
# Left out: other people's packages, tests (assertions that repeat, tables of data) and encodings (tables).
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


def prose_of(source):
    """Docstrings of at least two lines and comments of at least four, in a Python source."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    docs = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, documented)]
    comments = [re.sub(r"(?m)^ *# ?", "", c) for c in re.findall(r"(?m)(?:^ *# [^\n]*\n){4,}", source)]
    return [text for text in docs + comments if text and "\n" in text]


def read_corpus(data=None):
    """{domain: {"train": [document], "held": [document]}}, documents being strings. --data, a text file or a folder of
    them, is one domain, "text"; the last eighth of every file is held out."""
    if data is not None:
        root = Path(data)
        files = sorted(f for f in (root, *root.rglob("*")) if f.is_file() and os.access(f, os.R_OK))
        texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
        if sum(map(len, texts)) < 5000:
            sys.exit(f"--data {data}: no such file, or fewer than 5000 characters in it: give more text")
        return {"text": {"train": [t[:len(t) * 7 // 8] for t in texts], "held": [t[len(t) * 7 // 8:] for t in texts]}}
    corpus = {domain: {"train": [], "held": []} for domain in ("math", "code", "prose")}
    for side, n in (("train", 60000), ("held", 400)):
        problems = math_texts(n, 1234, side == "held")
        corpus["math"][side] = [question + solution for question, solution, _ in problems]
    root = Path(sysconfig.get_paths()["stdlib"])
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
    trained = set(corpus["prose"]["train"])  # two files may have the same docstring
    corpus["prose"]["held"] = [text for text in corpus["prose"]["held"] if text not in trained]
    return corpus


# ---- Tokenizer: byte-level BPE (Sennrich et al. 2016; GPT-2's bytes), trained and run by tiktoken ----
# Words with their space, single digits, punctuation, white space.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def train_tokenizer(corpus, vocab_size):
    """A tokenizer as it stands in a checkpoint, of a sample of every domain; the last id is END."""
    print("training the tokenizer (a minute)", file=sys.stderr)
    shuffled = (random.Random(0).sample(c["train"], len(c["train"])) for c in corpus.values())
    sample = "".join("".join(documents)[:100_000] for documents in shuffled)
    try:
        ranks = bpe_train(sample, vocab_size - 1, PATTERN, visualise=None)
    except ValueError:  # no two tokens stand side by side any more
        sys.exit(f"the text repeats itself too much for --vocab_size {vocab_size}: give other text (--data)")
    return {"ranks": [piece.decode("latin-1") for piece in ranks]}


def encoding(tokenizer):
    """The tiktoken Encoding of a tokenizer as it stands in a checkpoint."""
    ranks = {piece.encode("latin-1"): i for i, piece in enumerate(tokenizer["ranks"])}
    return tiktoken.Encoding("corpus", pat_str=tokenizer.get("pattern", PATTERN), mergeable_ranks=ranks,
                             special_tokens={END: len(ranks)})


SHARE = {"math": 0.4, "code": 0.35, "prose": 0.25, "text": 1.0}  # of the sequences in a batch


class Data:
    """The corpus as tokens, and what runs take from it. tokens[domain, side] (n,): documents, with END
    after each; starts: where a line or document begins (math: a document), so that sequences begin as prompts do."""

    def __init__(self, corpus, enc, seq_len):
        self.enc, self.seq_len, self.domains = enc, seq_len, list(corpus)
        self.tokens, self.starts = {}, {}
        newline = torch.tensor([b"\n" in enc.decode_single_token_bytes(i) for i in range(enc.n_vocab)])
        for domain in tqdm(corpus, "encoding", leave=False):
            for side, documents in corpus[domain].items():
                t = torch.tensor([token for text in documents for token in self.encode(text)])
                if len(t) <= seq_len:
                    sys.exit(f"{domain}, {side}: {len(t)} tokens; give more text (--data) or a smaller --seq_len")
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
        for d in r.choices(self.domains, [SHARE[d] for d in self.domains], k=batch_size):
            key = domain or d, side
            i = r.choice(self.starts[key])
            rows.append(self.tokens[key][i:i + self.seq_len])
        return torch.stack(rows)

    def prompts(self, n, seed=0):
        """Held-out prompts: {domain: [(tokens of the prompt, right answer or None)]}, n each."""
        r, found = random.Random(seed), {}
        for domain in self.domains:
            if domain == "math":
                found[domain] = [(self.enc.encode_ordinary(q), a) for q, _, a in math_texts(n, 99 + seed, True)]
            else:
                t, starts = self.tokens[domain, "held"], self.starts[domain, "held"]
                first = [r.choice(starts) for _ in range(n)]
                found[domain] = [(t[i:i + self.seq_len // 4].tolist(), None) for i in first]
        return found


# ---- Optimizer ----
def orthogonal(x):
    """The matrix with the directions of x and singular values near 1, by Newton-Schulz (Jordan et al. 2024). In float32
    on a CPU: one without bfloat16 units emulates them, as for torch.optim.Muon, twenty times slower."""
    y = x.mT if x.shape[0] > x.shape[1] else x
    y = y.bfloat16() if y.is_cuda else y
    y = y / (y.norm() + 1e-7)
    for _ in range(5):  # a quintic whose fixed points lie around 1: all singular values move there
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
        self.state.update({p: {"step": torch.tensor(0.0), "momentum": torch.zeros_like(p)} for p in self.matrices})
        self.lr, self.steps, self.decay = lr, steps, decay

    @torch.no_grad()
    def step(self, step):
        """One update with the gradients at hand, of norm at most 1, then clears them. step counts from 0."""
        warmup = max(1, self.steps // 25)
        lr = self.lr * min((step + 1) / warmup, 1 - 0.9 * max(0, step - warmup) / max(1, self.steps - warmup))
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        for p in [p for p in self.matrices if p.grad is not None]:  # those that the loss reaches
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            update = orthogonal(p.grad.lerp(momentum, 0.95))  # Nesterov
            p.mul_(1 - lr * self.decay)
            p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            p.grad = None  # Adam passes over it
        self.param_groups[0]["lr"] = lr / 6
        super().step()
        self.zero_grad()


# ---- Command line: the flags that all commands share ----
def arg(default, help, type=None, **how):
    """A field of Args and a flag of the command line; type and how are argparse's."""
    help += "" if default in (None, False) else f" [{default}]"
    return field(default=default, metadata={"help": help, "type": type, **how})


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
    bench: bool = arg(False, "measure on held-out prompts, next to plain decoding")
    json: bool = arg(False, "end with the report as one line of JSON")
    verbose: bool = arg(False, "draw every round: what was drafted (children below parents), + accepted, supplied")
    seed: int = arg(0, "of all random numbers", number(int, 0, 2**60))
    device: str = arg("cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, cuda:1 ...")
    dtype: str = arg("bfloat16" if torch.cuda.is_available() else "float32", "of inference: bfloat16, float32, float64",
                     choices=("float32", "bfloat16", "float64"))
    target: str = arg(None, "checkpoint of the target, if not target.pt in out/ or weights/")
    ckpt: str = arg(None, "checkpoint to write and read, if not the method's in out/ or weights/")
    data: str = arg(None, "a text file or folder instead of the embedded corpus")
    resume: bool = arg(False, "go on from the checkpoint, up to --steps")
    max_new_tokens: int = arg(128, "to generate, per prompt", number(int, 0))
    temperature: float = arg(None, "0 is greedy; a report covers 0 and 1", number(float, 0))
    top_k: int = arg(None, "sample from the k likeliest tokens")
    top_p: float = arg(None, "sample from the smallest set of this mass", number(float, 1e-300, 1))
    prompts: int = arg(10, "held-out prompts per domain in a report")


@dataclass
class Args(CommonArgs):
    steps: int = arg(2000, "optimizer steps")
    batch_size: int = arg(8, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence, and the context")
    lr: float = arg(0.03, "learning rate of Muon; Adam has a sixth of it", number(float, 1e-9))
    n_layer: int = arg(24, "blocks")
    n_head: int = arg(2, "attention heads")
    n_embd: int = arg(128, "width")
    vocab_size: int = arg(512, "entries of the tokenizer", number(int, 300))
    init: str = arg(None, "gpt2, gpt2-medium, gpt2-large, gpt2-xl or a file: no training")


def parse(Args, doc, name, argv=None):
    """The command line as an Args. A checkpoint that is read, of this name, brings its settings as defaults."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # any text on any console
    torch.set_flush_denormal(True)  # confident softmax tails are denormal numbers, 50 times slower on a CPU
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Args):
        how = dict(f.metadata)
        kind = how.pop("type") or (number(int, 1) if f.type is int else f.type)
        how |= {"action": "store_true"} if f.type is bool else {"type": kind, "metavar": f.type.__name__}
        parser.add_argument("--" + f.name, default=f.default, **how)
    args = parser.parse_args(argv)
    path = args.ckpt or find(name)
    if Path(path).is_file() and (args.resume or not args.train):
        common = {f.name for f in fields(CommonArgs)} - ({"data", "seed"} if args.resume else set())
        saved = load(path, name)["args"].items()
        parser.set_defaults(**{k: v for k, v in saved if hasattr(args, k) and k not in common})
        args = parser.parse_args(argv)
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    if args.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(args.device).index or int(os.environ.get("LOCAL_RANK", 0)))
    args.name, args.train = name, args.train or args.resume
    return args


# ---- Checkpoints: one dict that torch.load(weights_only=True) reads ----
def find(name):
    """The checkpoint that a command reads: your own in out/, or the one that came with the repository."""
    mine, shipped = (Path(folder) / f"{name}.pt" for folder in ("out", Path(__file__).parent / "weights"))
    return shipped if shipped.exists() and not mine.exists() else mine


def save(path, checkpoint):
    """Writes under a temporary name and renames, so that the file is always a complete one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path} could not be written: {str(error).splitlines()[0]}")


def load(path, name):
    """Reads a checkpoint of this name ("target", "eagle1", ...), or ends in one line that says why not."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        found = checkpoint["name"]
    except Exception as error:  # on a damaged or foreign file torch.load raises nearly anything
        sys.exit(f"{path}: no checkpoint, or cut short ({type(error).__name__}): train one (a target: python train.py)")
    if found != name:
        sys.exit(f"{path}: holds a {found} checkpoint, and this needs {name}")
    return checkpoint


def load_weights(module, checkpoint, path):
    try:
        module.load_state_dict(checkpoint["model"])
    except RuntimeError:
        sys.exit(f"{path} has other settings (leave those flags out) or is of another version (train it again)")


def load_target(path, device, dtype=torch.float32):
    """The frozen target of a checkpoint, with .enc, its tokenizer, and .fingerprint, hex digits of its weights."""
    checkpoint = load(path, "target")
    if checkpoint["step"] < checkpoint["args"].get("steps", 0):
        sys.exit(f"{path} is not trained to the end: python train.py --ckpt {path} --resume finishes it")
    target = model.GPT(model.GPTConfig(**checkpoint["config"]))
    load_weights(target, checkpoint, path)
    weights = [w.float().numpy().tobytes() for _, w in sorted(target.state_dict().items())]
    target.fingerprint = hashlib.sha256(b"".join(weights)).hexdigest()[:16]
    target.enc = encoding(checkpoint["tokenizer"])
    return model.column_major(target.to(device, dtype).eval().requires_grad_(False))


def load_drafter(method, args, target):
    """The drafter of args.ckpt for this target; a method without train has nothing to load."""
    drafter = method.Drafter(target.config, args)
    if hasattr(method, "train"):
        path = args.ckpt or find(args.name)
        checkpoint = load(path, args.name)
        if checkpoint["target"] != target.fingerprint:
            sys.exit(f"{path} was trained for another target than {args.target or find('target')}: give its --target "
                     "(the shipped ones' is weights/target.pt), or --train it")
        load_weights(drafter, checkpoint, path)
    return model.column_major(drafter.to(args.device, getattr(torch, args.dtype)).eval())


def init_target(args):
    """--init: published GPT-2 weights, a file with its config.json beside it or fetched by name, as a checkpoint."""
    file, url = Path(args.init), f"https://huggingface.co/openai-community/{args.init}/resolve/main/pytorch_model.bin"
    try:
        if file.exists():
            weights = torch.load(file, map_location="cpu", weights_only=True)
            n_head = json.loads(file.with_name("config.json").read_text(encoding="utf-8"))["n_head"]
        else:
            weights = torch.hub.load_state_dict_from_url(url, "out", file_name=f"{file}.bin", weights_only=True)
            n_head = weights["wte.weight"].shape[1] // 64  # in all four sizes
        target, enc = model.load_gpt2(weights, n_head), tiktoken.get_encoding("gpt2")
        assert enc.n_vocab == target.config.vocab_size, "not as many embeddings as GPT-2's tokenizer has tokens"
    except Exception as error:  # whatever a network or a foreign file may cause
        sys.exit(f"--init {args.init}: no GPT-2 weights with a config.json beside them, nor fetched ({error!r})")
    ranks = [enc.decode_single_token_bytes(i).decode("latin-1") for i in range(enc.eot_token)]
    save(args.ckpt, {"name": "target", "model": target.state_dict(), "args": {}, "step": 0,
                     "config": asdict(target.config), "tokenizer": {"ranks": ranks, "pattern": enc._pat_str}})


# ---- Training: what is the same for the target and for every drafter ----
class Run:
    """The frame of a training loop: `for step in run` shows progress, saves every minute, at the end and on Ctrl-C, and
    resumes. Under torchrun every process takes its share of the batch, and gradients are averaged; rank 0 saves. extra:
    what the checkpoint holds beside weights and curve, [step, mean loss] of every ten steps."""

    def __init__(self, args, module, optimizer, extra):
        self.args, self.module, self.optimizer, self.extra = args, module, optimizer, extra
        self.path, self.first = Path(args.ckpt or f"out/{args.name}.pt"), 0
        self.losses, self.curve = [], []
        found = load(self.path, args.name) if args.resume or self.path.exists() else {}  # never over a foreign file
        if args.resume:
            if found.get("target") != extra.get("target") or "optimizer" not in found:
                sys.exit(f"--resume: {self.path} is for another target, or holds the weights alone")
            self.first, self.curve = found["step"], found["curve"]
            load_weights(module, found, self.path)
            optimizer.load_state_dict(found["optimizer"])
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and not dist.is_initialized():  # started by torchrun
            dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        self.parallel = torch.nn.parallel.DistributedDataParallel(module) if self.world > 1 else module

    def batch(self, data, step):
        """This process's rows of the batch of a step."""
        rows = data.batch(step, self.args.batch_size, self.args.seed)
        return rows[self.rank::self.world].to(self.args.device)

    def autocast(self):
        """bfloat16 on CUDA, and on a CPU with AMX; with AVX-512 alone a step takes longer than in float32."""
        kind = torch.device(self.args.device).type
        amx = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" or amx)

    def __iter__(self):
        args, stop, saved = self.args, [], time.time()
        signal.signal(signal.SIGINT, lambda *_: stop.append(True))  # acted on between two complete steps
        bar = tqdm(range(self.first, args.steps), args.name, args.steps, initial=self.first, disable=self.rank > 0)
        for step in bar:
            torch.manual_seed(zlib.crc32(f"{args.seed} {step} {self.rank}".encode()))  # --resume draws the same
            yield step
            done, now = step + 1, time.time()
            due = stop or done == args.steps or now - saved > 60
            if due or done % 10 == 0:
                loss = torch.stack(self.losses).mean().item()
                self.losses.clear()
                if not math.isfinite(loss):  # the checkpoint stays the last good one
                    sys.exit(f"the loss is {loss} at step {done}: try a smaller --lr")
                self.curve.append([done, loss])
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if due and self.rank == 0:
                save(self.path, {**self.extra, "name": args.name, "model": self.module.state_dict(), "step": done,
                                 "optimizer": self.optimizer.state_dict(), "args": vars(args), "curve": self.curve})
            saved = now if due else saved
            if stop and done < args.steps:
                sys.exit(f"\ninterrupted after step {done}; {self.path} has it: --resume goes on")
        signal.signal(signal.SIGINT, signal.default_int_handler)


def get_target(args):
    """The frozen target that a drafter is trained for, and its data."""
    target = load_target(args.target or find("target"), args.device)
    if args.seq_len > target.config.max_seq_len:
        sys.exit(f"--seq_len {args.seq_len} exceeds the target's context: give --seq_len {target.config.max_seq_len}")
    return target, Data(read_corpus(args.data), target.enc, args.seq_len)


def train(args):
    """Trains the target on all domains; cross-entropy of the next token."""
    corpus = read_corpus(args.data)
    tokenizer = load(args.ckpt, "target")["tokenizer"] if args.resume else train_tokenizer(corpus, args.vocab_size)
    data = Data(corpus, encoding(tokenizer), args.seq_len)
    torch.manual_seed(args.seed)
    config = model.GPTConfig(args.seq_len, data.enc.n_vocab, args.n_layer, args.n_head, args.n_embd)
    target = model.GPT(config).to(args.device)
    optimizer = Optimizer(target, args.lr, args.steps, decay=0.1)
    run = Run(args, target, optimizer, {"config": asdict(config), "tokenizer": tokenizer})
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
        loss = F.cross_entropy(target(idx[:, :-1])[0].flatten(0, 1), idx[:, 1:].flatten())
        print(f"held-out {domain}: {loss:.3f} nats per token")


# ---- What `python METHOD.py` does around the method's own train and generate ----
def marked(record, enc):
    """The text of a generation with the drafted and accepted tokens marked: green on a terminal, in brackets elsewhere.
    A character of several tokens is marked as its last one is."""
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
        print(f"\n{len(tokens) - 1} drafted, {r.accepted} accepted, supplied: {enc.decode(new[r.accepted:])!r}")
        paths = [()]
        for i, parent in enumerate(parents[1:], 1):
            paths.append((*paths[parent], i))
        for path in sorted(paths[1:]):
            words = [tokens[i] for i in path]
            mark = "+ " if words == new[:r.accepted][:len(path)] else "  "
            print("  " * (len(path) - 1) + mark + repr(enc.decode(words[-1:])))


def show(generate, args, target):
    """Continues one prompt and shows who wrote what."""
    enc, text = target.enc, args.prompt or math_texts(1, args.seed, True)[0][0]
    prompt = enc.encode_ordinary(text.replace("\\n", "\n"))  # a shell's "\n" is two characters
    limit = target.config.max_seq_len
    if len(prompt) >= limit:
        sys.exit(f"the prompt has {len(prompt)} tokens; this target's context takes up to {limit - 1}")
    verify.Session.keep_drafts = args.verbose
    sampling = args.temperature or 0.0, args.top_k, args.top_p, (enc.eot_token,)
    n, [(record, _)] = verify.measure(target, generate, [prompt], args.max_new_tokens, *sampling, seed=args.seed)
    print(enc.decode(prompt) + marked(record, enc))
    if args.verbose:
        draw(record, enc)
    same = "" if args.temperature else f"; equal to plain decoding: {n['equal'] == 1}"
    print(f"\n(marked: drafted and accepted; the rest is the target's) tau {n['tau']:.2f}, {n['tok_s']:.0f} tokens/s, "
          f"plain decoding {n['ar_tok_s']:.0f} tokens/s{same}")


def benchmark(generate, args, target, data):
    """Measures on held-out prompts by domain, at temperature 0 and 1 or the one given; prints a table, returns it."""
    enc, prompts, results = data.enc, data.prompts(args.prompts, args.seed), []
    for temperature in [0.0, 1.0] if args.temperature is None else [args.temperature]:
        sampling, domains = (temperature, args.top_k, args.top_p, (enc.eot_token,)), {}
        print(f"\n{args.method} at T={temperature:g} ({args.device}, {args.dtype}, {torch.get_num_threads()} threads), "
              f"{args.prompts} held-out prompts per domain\n          tau  plain tok/s  tok/s  speedup  right, plain's"
              "  acceptance at draft position 1, 2, ...")
        for domain, pairs in prompts.items():
            texts = [prompt[8 - target.config.max_seq_len:] for prompt, _ in pairs]  # with room to go on
            verify.measure(target, generate, texts[:1], 16, *sampling)  # warm up both
            texts = tqdm(texts, f"measuring {domain}", leave=False)
            n, records = verify.measure(target, generate, texts, args.max_new_tokens, *sampling, seed=args.seed)
            sides = [[enc.decode(record.tokens) for record in side] for side in zip(*records)]
            right = [sum(f"Answer: {answer}\n" in text for text, (_, answer) in zip(side, pairs)) for side in sides]
            n["right_answers"] = right if domain == "math" else None
            shown = f"{right[0]} of {len(pairs)}, {right[1]}" if domain == "math" else ""
            print(f"{domain:6} {n['tau']:6.2f} {n['ar_tok_s']:12.0f} {n['tok_s']:6.0f} {n['speedup']:7.2f}x {shown:14}",
                  *(f"{a:.2f}" for a in n["n_alpha"][:8]))
            domains[domain] = n
        if temperature == 0:
            equal, of = (sum(n[key] for n in domains.values()) for key in ("equal", "prompts"))
            print(f"greedy output identical: {equal} of {of} prompts")
        results.append({"temperature": temperature, "domains": domains})
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
        torch.set_num_threads(1)  # a pass this small is over before a second thread has started
    generate = partial(method.generate, target, load_drafter(method, args, target))
    if args.bench or args.train:
        data = Data(read_corpus(args.data), target.enc, min(256, target.config.max_seq_len))
        numbers = benchmark(generate, args, target, data)
        if args.json:
            print(json.dumps(numbers))
    else:
        show(generate, args, target)


def main():
    args = parse(Args, __doc__, "target")
    args.ckpt = args.ckpt or "out/target.pt"
    if args.prompt or args.bench:
        sys.exit("train.py trains a target: --prompt and --bench are for a method's file, such as dflash.py")
    if args.init:
        init_target(args)
    elif Path(args.ckpt).exists() and not args.train:
        sys.exit(f"{args.ckpt} is there already: --resume goes on, --train starts over")
    else:
        train(args)


if __name__ == "__main__":
    main()
