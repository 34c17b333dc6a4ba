"""Data, tokenizer, optimiser, checkpoints, and the training of the target itself.

    python train.py                         trains the target on text that every Python installation carries
    python train.py --train --steps 2000    anew, and longer
    python train.py --prompt "def "         continues a text with the trained target
    python train.py --init gpt2             takes real GPT-2 weights instead of training

Three domains, because a draft's acceptance depends on what is written:
    math    worked problems, made up here, endless and correct
    code    the source of Python's standard library
    prose   its docstrings and help topics
Text whose checksum is 0 modulo 8 (by file for code and prose, by problem for math) is held out and never trained on.
"""
import argparse
import ast
import contextlib
import hashlib
import heapq
import json
import math
import os
import random
import signal
import sys
import sysconfig
import time
import warnings
import zlib
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise, product
from pathlib import Path

import regex
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import model
import verify

END = "<|endoftext|>"


class UserError(Exception):
    """Wrong use: its text, one line that says what to do, is all that the user sees."""


# ---------------------------------------------------------------------------------------------------------------------
# Data: worked problems
# ---------------------------------------------------------------------------------------------------------------------
NAMES = ["Ada", "Ben", "Carla", "Deniz", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mei", "Nils", "Olga",
         "Priya", "Rosa", "Sam", "Tariq", "Uma"]
THINGS = ["apples", "books", "coins", "pencils", "stamps", "marbles", "cards", "shells", "stickers", "tickets"]


def word_problem(r):
    """Additions, subtractions and one multiplication in a small story."""
    name, thing, n = r.choice(NAMES), r.choice(THINGS), r.randint(5, 30)
    text, steps = [f"{name} has {n} {thing}."], []
    for _ in range(r.randint(2, 3)):
        kind, k = r.choice(("buys", "finds", "gives away", "loses", "times")), r.randint(2, 12)
        if kind == "times" and n < 40:
            k = r.randint(2, 3)
            text.append(f"Then the number of {thing} grows to {k} times as many.")
            steps.append(f"{n} * {k} = {n * k}, so {name} now has {n * k} {thing}.")
            n *= k
        elif kind in ("gives away", "loses") and k <= n:
            text.append(f"Then {name} {kind} {k} {thing}.")
            steps.append(f"{n} - {k} = {n - k}, so {name} now has {n - k} {thing}.")
            n -= k
        else:
            kind = kind if kind in ("buys", "finds") else "gets"
            text.append(f"Then {name} {kind} {k} {thing}.")
            steps.append(f"{n} + {k} = {n + k}, so {name} now has {n + k} {thing}.")
            n += k
    return " ".join(text) + f" How many {thing} does {name} have now?", steps, n


def shopping(r):
    """Prices times quantities, a total, and the change."""
    name, n = r.choice(NAMES), r.randint(2, 3)
    items = [(thing, r.randint(2, 9), r.randint(2, 9)) for thing in r.sample(THINGS, n)]
    total = sum(k * price for _, k, price in items)
    paid = (total // 50 + 1) * 50
    text = f"{name} buys " + " and ".join(f"{k} {thing} at {price} dollars each" for thing, k, price in items)
    steps = [f"The {thing} cost {k} * {price} = {k * price} dollars." for thing, k, price in items]
    steps.append("Together that is " + " + ".join(str(k * price) for _, k, price in items) + f" = {total} dollars.")
    steps.append(f"{name} gets back {paid} - {total} = {paid - total} dollars.")
    return text + f", and pays with {paid} dollars. How many dollars does {name} get back?", steps, paid - total


def addition(r):
    """Written addition, digit by digit with carries."""
    a, b, carry, steps = r.randint(100, 999), r.randint(100, 999), 0, []
    for i, place in zip(range(len(str(max(a, b)))), ("ones", "tens", "hundreds", "thousands")):
        x, y = a // 10**i % 10, b // 10**i % 10
        s = x + y + carry
        with_carry = f" + {carry}" if carry else ""
        steps.append(f"The {place}: {x} + {y}{with_carry} = {s}, write {s % 10}, carry {s // 10}.")
        carry = s // 10
    return f"Add {a} and {b}.", steps, a + b


def multiplication(r):
    """Long multiplication by partial products."""
    a, b = r.randint(12, 99), r.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    steps = [f"Split {a} into {tens} + {ones}.", f"First, {tens} * {b} = {tens * b}.", f"Then, {ones} * {b} = {ones * b}.",
             f"Together, {tens * b} + {ones * b} = {a * b}."]
    return f"Multiply {a} by {b}.", steps, a * b


def equation(r):
    """A linear equation in one unknown."""
    x, a, b, v = r.randint(1, 12), r.randint(2, 9), r.randint(1, 20), r.choice("xyn")
    sign, back, verb = r.choice((("+", "-", "Subtract"), ("-", "+", "Add")))
    c = a * x + b if sign == "+" else a * x - b
    steps = [f"{verb} {b} on both sides: {a}{v} = {c} {back} {b} = {a * x}.",
             f"Divide both sides by {a}: {v} = {a * x} / {a} = {x}."]
    return f"Solve {a}{v} {sign} {b} = {c} for {v}.", steps, x


def fractions(r):
    """A sum of two fractions, over the common denominator and in lowest terms."""
    b, d = r.sample(range(2, 7), 2)
    a, c = r.randint(1, b - 1), r.randint(1, d - 1)
    top, bottom, g = a * d + c * b, b * d, math.gcd(a * d + c * b, b * d)
    steps = [f"The common denominator is {b} * {d} = {bottom}.",
             f"{a}/{b} = {a * d}/{bottom} and {c}/{d} = {c * b}/{bottom}.",
             f"{a * d} + {c * b} = {top}, so the sum is {top}/{bottom}.",
             f"The greatest common divisor of {top} and {bottom} is {g}, which gives {top // g}/{bottom // g}."]
    return f"Compute {a}/{b} + {c}/{d}.", steps, Fraction(top, bottom)


def sorting(r):
    """Selection sort, the smallest first."""
    left, done, steps = r.sample(range(1, 100), r.randint(3, 5)), [], []
    text = f"Sort the numbers {', '.join(map(str, left))}."
    while len(left) > 1:
        done.append(min(left))
        left.remove(done[-1])
        steps.append(f"The smallest is {done[-1]}. Left: {', '.join(map(str, left))}.")
    return text, steps, ", ".join(map(str, done + left))


def percentage(r):
    """A percentage of a number, by way of one percent."""
    p, n = r.choice(range(10, 100, 10)), r.randint(1, 12) * 100
    steps = [f"1 percent of {n} is {n} / 100 = {n // 100}.", f"{p} percent is {p} * {n // 100} = {p * n // 100}."]
    return f"What is {p} percent of {n}?", steps, p * n // 100


def sequence(r):
    """A member of an arithmetic sequence, written out one by one."""
    a, d, n = r.randint(1, 20), r.randint(2, 10), r.randint(5, 8)
    steps = [f"The difference is {d}."] + [f"Number {i}: {a + (i - 2) * d} + {d} = {a + (i - 1) * d}." for i in range(4, n + 1)]
    return f"A sequence starts {a}, {a + d}, {a + 2 * d} and goes on in the same way. What is number {n}?", steps, a + (n - 1) * d


PROBLEMS = (word_problem, shopping, addition, multiplication, equation, fractions, sorting, percentage, sequence)
ASK = ("Problem: {}", "Question: {}")


def worked_problem(r):
    """One problem from the random generator r -> (the question, the worked solution with its answer, the answer)."""
    question, steps, answer = r.choice(PROBLEMS)(r)
    return r.choice(ASK).format(question) + "\nSolution:", " " + "\n".join(steps) + f"\nAnswer: {answer}\n", str(answer)


def answer_of(text):
    """What a generated solution gives as its answer, or None."""
    found = regex.search(r"Answer: ([^\n]+)\n", text)
    return found and found[1]


# ---------------------------------------------------------------------------------------------------------------------
# Data: the corpus
# ---------------------------------------------------------------------------------------------------------------------
def held_out(key):
    return zlib.crc32(key.encode()) % 8 == 0


def math_texts(n, seed, holdout):
    """n problems from one side of the split, as (question, solution, answer). Held-out ones are distinct; in training a kind
    that has few different problems repeats them, so that all kinds are equally frequent."""
    r, texts, seen = random.Random(seed), [], set()
    while len(texts) < n:
        question, solution, answer = worked_problem(r)
        key = question.split(" ", 1)[1]  # the same problem under another heading is the same problem
        if held_out(key) == holdout and not (holdout and key in seen):
            seen.add(key)
            texts.append((question, solution, answer))
    return texts


def stdlib_files():
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "encodings", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "__pycache__",
            "ensurepip", "config", "turtledemo"}
    files = [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]
    return [(f.relative_to(root).as_posix(), f) for f in files]


def docstrings(source):
    """All docstrings of at least four lines in a Python source, outermost first."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                doc = ast.get_docstring(node)
                if doc and doc.count("\n") >= 3:
                    yield doc


@lru_cache(maxsize=2)
def read_corpus(data=None, quiet=False):
    """Returns {domain: {"train": [document], "held": [document]}}; a document is a string.

    data: a text file or a folder of text files to use instead of the embedded corpus (one domain, "text"; a folder is split
    by file, a single file at 7/8 of its length). Raises UserError where nothing can be read.
    """
    corpus = defaultdict(lambda: {"train": [], "held": []})

    def add(domain, key, text):
        corpus[domain]["held" if held_out(key) else "train"].append(text)

    if data is not None:
        path = Path(data)
        if not path.exists():
            raise UserError(f"--data {data}: no such file or folder")
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        texts, skipped = [], []
        for f in files:
            try:
                texts.append(f.read_text(encoding="utf-8"))
            except (UnicodeDecodeError, OSError) as error:
                if path.is_file():
                    raise UserError(f"--data {data}: cannot be read as UTF-8 text ({error})") from None
                skipped.append(f.name)
        texts = [t for t in texts if t.strip()]
        if not texts:
            raise UserError(f"--data {data}: holds no text")
        if skipped and not quiet:
            print(f"--data {data}: {len(skipped)} of {len(files)} files are left out, as they are not UTF-8 text, {skipped[0]} for one", file=sys.stderr)
        if len(texts) > 1:
            for i, text in enumerate(texts):
                corpus["text"]["held" if i % 8 == 7 or i == len(texts) - 1 else "train"].append(text)
        else:
            cut = len(texts[0]) * 7 // 8
            corpus["text"] = {"train": [texts[0][:cut]], "held": [texts[0][cut:]]}
        return corpus
    for holdout, n in ((False, 16000), (True, 400)):
        corpus["math"]["held" if holdout else "train"] = [q + s for q, s, _ in math_texts(n, 1234, holdout)]
    for name, f in tqdm(stdlib_files(), "reading the standard library", leave=False, disable=quiet):
        with contextlib.suppress(UnicodeDecodeError, OSError):
            source = f.read_text(encoding="utf-8")
            add("code", name, source)
            for doc in docstrings(source):
                add("prose", name, doc)
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics
        for name, text in topics.items():
            add("prose", name, text)
    return corpus


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE (Sennrich et al. 2016; GPT-2's bytes), trained here, run by tiktoken
# ---------------------------------------------------------------------------------------------------------------------
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # digits stand alone


def train_bpe(text, vocab_size, quiet=False):
    """Merges of the most frequent pair, ties by first bytes; pairs are counted once and then kept up to date.
    Returns {bytes: rank} with vocab_size - 1 entries (the last id is END) or fewer where the text has no more pairs."""
    words = [[[bytes([b]) for b in w.encode()], n] for w, n in Counter(regex.findall(PATTERN, text)).items()]
    ranks = {bytes([b]): b for b in range(256)}
    count, where = Counter(), defaultdict(set)
    for i, (parts, n) in enumerate(words):
        for pair in pairwise(parts):
            count[pair] += n
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    bar = tqdm(total=vocab_size - 257, desc="training the tokenizer", leave=False, disable=quiet)
    while len(ranks) < vocab_size - 1 and heap:
        n, pair = heapq.heappop(heap)
        if -n != count[pair]:  # an entry from before other merges changed the count
            if count[pair] > 0:
                heapq.heappush(heap, (-count[pair], pair))
            continue
        ranks[pair[0] + pair[1]] = len(ranks)
        bar.update()
        changed = set()
        for i in where.pop(pair):
            parts, n = words[i]
            for old in pairwise(parts):
                count[old] -= n
                changed.add(old)
            merged, j = [], 0
            while j < len(parts):
                step = 2 if tuple(parts[j:j + 2]) == pair else 1
                merged.append(b"".join(parts[j:j + step]))
                j += step
            words[i][0] = merged
            for new in pairwise(merged):
                count[new] += n
                where[new].add(i)
                changed.add(new)
        for p in changed - {pair}:
            if count[p] > 0:
                heapq.heappush(heap, (-count[p], p))
        count[pair] = 0
    bar.close()
    return ranks


def encoding(tokenizer):
    """The tiktoken Encoding of a tokenizer as it stands in a checkpoint: {"ranks": [latin-1]} or {"name": "gpt2"}."""
    if "name" in tokenizer:
        try:
            return tiktoken.get_encoding(tokenizer["name"])
        except Exception as error:  # noqa: BLE001  # requests' errors, by way of tiktoken
            raise UserError(f"the {tokenizer['name']} tokenizer cannot be loaded without a network once "
                            f"(set TIKTOKEN_CACHE_DIR to a folder that has it): {type(error).__name__}") from None
    ranks = {piece.encode("latin-1"): i for i, piece in enumerate(tokenizer["ranks"])}
    return tiktoken.Encoding("corpus-bpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


SHARE = {"math": 0.5, "code": 0.3, "prose": 0.2, "text": 1.0}  # of the sequences in a batch


class Data:
    """The corpus as tokens, and what training and measuring take from it.

    tokens[domain, side]: (n,) int64, documents separated by END; starts: where a line or a document begins (math: a document),
    so that sequences begin as prompts do. written: (texts, share), what the target wrote itself and its share of the rows, or None.
    """
    def __init__(self, corpus, enc, seq_len, quiet=False):
        self.enc, self.seq_len, self.corpus, self.written = enc, seq_len, corpus, None
        self.tokens, self.starts = {}, {}
        newline = torch.tensor([b"\n" in enc.decode_single_token_bytes(i) for i in range(enc.n_vocab - 1)] + [True])
        for domain in tqdm(corpus, "encoding", leave=False, disable=quiet):
            for side, documents in corpus[domain].items():
                ids = [i for doc in enc.encode_ordinary_batch(documents, num_threads=2) for i in doc + [enc.eot_token]]
                t = torch.tensor(ids)
                if len(t) <= seq_len:
                    raise UserError(f"the {side} part of the corpus ({domain}) has {len(t)} tokens, fewer than one sequence of "
                                    f"--seq_len {seq_len}: give more text, or a smaller --seq_len to train.py and then to the method")
                is_start = t == enc.eot_token if domain == "math" else newline[t]
                start = torch.cat([torch.zeros(1, dtype=torch.long), is_start.nonzero()[:, 0] + 1])
                start = start[start < len(t) - seq_len]
                self.tokens[domain, side], self.starts[domain, side] = t, start
        self.domains = list(corpus)

    def batch(self, step, batch_size, seed=0, side="train", domain=None):
        """(batch_size, seq_len) tokens, a function of its arguments and of `written`, so that a resumed run sees the same text."""
        g = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {side}".encode()))
        share = torch.tensor([SHARE[d] for d in self.domains])
        rows = []
        for k in torch.multinomial(share, batch_size, replacement=True, generator=g).tolist():
            key = domain or self.domains[k], side
            i = self.starts[key][torch.randint(len(self.starts[key]), (), generator=g)]
            rows.append(self.tokens[key][i:i + self.seq_len])
        rows = torch.stack(rows)
        if side == "train" and self.written is not None:
            texts, share = self.written
            written = torch.rand(batch_size, 1, generator=g) < share
            rows = torch.where(written, texts[torch.randint(len(texts), (batch_size,), generator=g)], rows)
        return rows

    def prompts(self, n, seed=0):
        """Held-out prompts: {domain: [(tokens of the prompt, right answer or None)]}, n each."""
        r, found = random.Random(seed), {}
        for domain in self.domains:
            if domain == "math":
                found[domain] = [(self.enc.encode_ordinary(q), a) for q, _, a in math_texts(n, 99 + seed, True)]
            else:
                t, starts = self.tokens[domain, "held"], self.starts[domain, "held"]
                picks = [int(starts[r.randrange(len(starts))]) for _ in range(n)]
                found[domain] = [(t[i:i + self.seq_len // 4].tolist(), None) for i in picks]
        return found


TEXTS = {"corpus": 0, "greedy": 1, "sampled": 1, "mixed": 2 / 3}  # what a drafter trains on, and how much of it the target wrote


@torch.no_grad()
def write_texts(target, data, n, quiet=False):
    """(2n, seq_len) tokens that the target writes itself, after an eighth of a sequence of training text: n rows greedy, then n
    sampled (T = 1). Greedy text that has come to the end of its document goes on sampled, or it would repeat itself."""
    device, c, T, rows = target.wte.weight.device, target.config, data.seq_len, []
    together = max(1, min(128, 2**28 // (2 * c.n_layer * c.n_embd * T)))  # a cache of 1 GB at most
    torch.manual_seed(1)
    bar = tqdm(total=2 * n * (T - T // 8), desc="the target writes text to train on", unit=" tokens", disable=quiet)
    for from_start, first in product((False, True), range(0, n, together)):
        idx = data.batch(first, min(together, n - first), seed=1).to(device)
        sampled = torch.full(idx[:, 0].shape, from_start, device=device)
        cache, new = target.new_cache(T - c.max_seq_len, len(idx)), idx[:, :T // 8]
        for t in range(T // 8, T):
            cache.reserve(t)
            logits = target(new, cache)[0][:, -1]
            cache.pos += new.shape[1]
            idx[:, t] = torch.where(sampled, verify.sample(logits.softmax(-1)), logits.argmax(-1))
            new = idx[:, t:t + 1]
            sampled |= idx[:, t] == data.enc.eot_token
            bar.update(len(idx))
        rows.append(idx.cpu())
    bar.close()
    return torch.cat(rows)


def texts_of(target, data, n, path, quiet=False):
    """What write_texts returns, or a longer one; kept in a file, so that all drafters of a target train on the same."""
    key = {"target": target.fingerprint, "seq_len": data.seq_len, "data": sum(int(t.sum()) for t in data.tokens.values())}
    with contextlib.suppress(Exception):  # missing, damaged or of another target: written anew
        kept = torch.load(path, weights_only=True)
        if {k: kept[k] for k in key} == key and len(kept["texts"]) >= 2 * n:
            return kept["texts"]
    texts = write_texts(target, data, n, quiet)
    save(path, {**key, "texts": texts})
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Optimiser
# ---------------------------------------------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024), for matrices, which may decay (Liu et al. 2025).

    torch.optim.Muon always iterates in bfloat16, which a CPU without bf16 units emulates: 9 s for a step that takes 0.4 s
    here, in fp32 and over all matrices of one shape at once.
    """

    def __init__(self, params, lr=0.02, momentum=0.95, decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for (rows, cols), params in by_shape.items():
                updates = []
                for p in params:
                    buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buf, group["momentum"]))  # Nesterov
                x = torch.stack(updates)
                x = x.mT if rows > cols else x
                x = x.bfloat16() if x.is_cuda else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(5):  # a quintic whose fixed points lie around 1: all singular values move there
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.mT if rows > cols else x
                for p, u in zip(params, x):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(u, alpha=-group["lr"] * max(1, rows / cols) ** 0.5)


class Optimiser:
    """Muon for the matrices inside the network, which may decay, Adam for everything else; warmup, then a linear way down to a tenth."""

    def __init__(self, module, lr, steps, decay=0.0):
        tables = {m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)}
        params = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in params if p.dim() == 2 and p not in tables]
        rest = [p for p in params if p.dim() != 2 or p in tables]
        self.params, self.steps = params, steps
        muon, adam = partial(Muon, decay=decay), partial(torch.optim.Adam, betas=(0.9, 0.95))
        self.parts = [(kind(some, rate), rate) for kind, some, rate in ((muon, matrices, lr), (adam, rest, lr / 6)) if some]

    def step(self, step):
        """One update with the gradients at hand, of norm at most 1, then clears them. step counts from 0."""
        warmup = max(1, self.steps // 25)  # 4 %
        scale = min((step + 1) / warmup, 1 - 0.9 * max(0, step - warmup) / max(1, self.steps - warmup))
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for part, lr in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self):
        return [part.state_dict() for part, _ in self.parts]

    def load_state_dict(self, states):
        for (part, _), state in zip(self.parts, states):
            part.load_state_dict(state)


# ---------------------------------------------------------------------------------------------------------------------
# Command line: the flags that all commands share
# ---------------------------------------------------------------------------------------------------------------------
def flag(default, help, trained=True, redraft=False, least=1):
    """A field of Args. trained: a checkpoint remembers it, and it may be given in training only (False: it is for drafting, and may
    differ from run to run; redraft: it may be given in both). least: the smallest value of an integer."""
    return field(default=default, metadata={"help": help, "trained": trained, "redraft": redraft, "least": least})


@dataclass
class CommonArgs:
    train: bool = flag(False, "train, then report")
    prompt: str = flag(None, "text to continue")
    bench: bool = flag(False, "measure on held-out prompts, next to plain decoding")
    json: bool = flag(False, "end with the report as one line of JSON")
    verbose: bool = flag(False, "one line per round: what was drafted, accepted, supplied by the target")
    seed: int = flag(0, "of all random numbers")
    device: str = flag("auto", "cpu, cuda, cuda:1 ...; auto takes CUDA where it is")
    dtype: str = flag("auto", "of inference: float32, bfloat16, float64; auto: bfloat16 on CUDA, float32 on a CPU")
    target: str = flag("out/target.pt", "checkpoint of the target")
    init: str = flag(None, "take the target from GPT-2 weights: gpt2, gpt2-medium, gpt2-large, gpt2-xl or a file")
    ckpt: str = flag(None, "checkpoint to write and read (default: out/ and the command's name)")
    data: str = flag(None, "a text file or folder instead of the embedded corpus")
    resume: bool = flag(False, "go on from the checkpoint, up to --steps")
    max_new_tokens: int = flag(128, "to generate, per prompt", least=0)
    temperature: float = flag(0.0, "of sampling; 0 is greedy. A report covers 0 and 1 unless this is given")
    top_k: int = flag(None, "sample from the k likeliest tokens")
    top_p: float = flag(None, "sample from the smallest set of this mass")
    prompts: int = flag(10, "held-out prompts per domain in a report")


@dataclass
class Args(CommonArgs):
    steps: int = flag(1400, "optimiser steps")
    batch_size: int = flag(8, "sequences per step")
    seq_len: int = flag(256, "tokens per sequence")
    lr: float = flag(0.03, "learning rate of Muon; Adam has a sixth of it")
    n_layer: int = flag(24, "blocks")
    n_head: int = flag(3, "attention heads")
    n_embd: int = flag(96, "width")
    vocab_size: int = flag(512, "entries of the tokenizer")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message + f" (see python {Path(sys.argv[0]).name} --help)")


def parse(Args, doc, kind, argv=None):
    """The command line as an Args, with args.given, the names of the flags that were given. kind names the checkpoint and so its
    default path. Raises UserError for values that make no sense."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Args):
        type_ = f.type
        default = "" if f.default in (None, False) else f" [{f.default}]"
        how = {"action": "store_true"} if type_ is bool else {"type": type_}
        parser.add_argument("--" + f.name, help=f.metadata["help"] + default, default=argparse.SUPPRESS, **how)
    given = vars(parser.parse_args(argv))
    args = Args(**given)
    args.given = set(given)

    def need(ok, message):
        if not ok:
            raise UserError(message)

    for f in fields(Args):
        value, least = getattr(args, f.name), f.metadata["least"]
        if f.type is int and f.name != "seed":
            need(value is None or value >= least, f"--{f.name} has to be at least {least}, not {value}")
        if f.type is float:
            need(value is None or 0 <= value < math.inf, f"--{f.name} has to be a number from 0 up, not {value}")
    need(abs(args.seed) < 2**62, f"--seed {args.seed} is too large")
    need(getattr(args, "seq_len", 16) >= 16, "--seq_len has to be at least 16")
    need(args.top_p is None or 0 < args.top_p <= 1, f"--top_p lies above 0 and at most at 1, not {args.top_p}")
    need(getattr(args, "lr", 1) > 0, f"--lr has to be positive, not {getattr(args, 'lr', 1)}")
    need(not hasattr(args, "n_head") or args.n_embd % (2 * args.n_head) == 0, "--n_embd has to be an even multiple of --n_head")
    need(getattr(args, "vocab_size", 512) > 300, "--vocab_size has to exceed 300: 256 bytes come first")
    need(getattr(args, "text", "corpus") in TEXTS, f"--text has to be one of {', '.join(TEXTS)}")
    need(args.prompt != "", "--prompt is empty: give at least one character")
    need(args.data != "", "--data is empty: give a text file or a folder")
    need(kind != "target" or not given.keys() & {"bench", "json", "verbose", "prompts"},
         "train.py trains and continues text; --bench, --json, --verbose and --prompts belong to a method, e.g. python dflash.py --bench")
    if kind != "target":
        training = args.train or args.resume
        need(args.bench or training or not args.json, "--json is the report's: give --bench or --train with it")
        need(args.prompt is None or not (args.bench or args.json),
             "--prompt continues one text and reports nothing: leave --bench and --json out")
        for f in fields(Args)[len(fields(CommonArgs)):]:  # the method's own
            need(training or f.name not in given or not f.metadata["trained"] or f.metadata["redraft"],
                 f"--{f.name} is a matter of training: give --train with it")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(args.device)
        need(device.type in ("cpu", "cuda"), f"--device {args.device}: only cpu and cuda are supported")
        need(device.type != "cuda" or torch.cuda.is_available(),
             f"--device {args.device}: this PyTorch sees no CUDA device; use --device cpu")
        need(device.type != "cuda" or (device.index or 0) < torch.cuda.device_count(),
             f"--device {args.device}: there are {torch.cuda.device_count()} CUDA devices")
    except RuntimeError:
        raise UserError(f"--device {args.device}: unknown; use cpu or cuda") from None
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    need(args.dtype in ("float32", "bfloat16", "float64"), f"--dtype {args.dtype}: use float32, bfloat16 or float64")
    args.name = kind
    if args.init and "target" not in given:
        args.target = f"out/{Path(args.init).stem}.pt"
    if kind == "target":
        args.ckpt = args.target = args.ckpt or args.target
    elif args.ckpt is None:  # drafters of different targets do not overwrite each other
        suffix = "" if args.target == CommonArgs.target else "-" + Path(args.target).stem
        args.ckpt = f"out/{kind}{suffix}.pt"
    need(not Path(args.ckpt).is_dir(), f"--ckpt {args.ckpt} is a folder: give the name of a file in it")
    need(not any(p.is_file() for p in Path(args.ckpt).parents), f"--ckpt {args.ckpt}: part of this path is a file, not a folder")
    if (args.train or kind == "target") and Path(args.ckpt).exists():
        load(args.ckpt, kind)  # what is overwritten is a checkpoint of the same kind
    if args.resume:
        need(Path(args.ckpt).exists(), f"--resume: there is no {args.ckpt} yet; leave --resume out")
        args.train = True
        adopt(args, load(args.ckpt, kind), {"seed", "data"})
    return args


def adopt(args, checkpoint, also=frozenset()):
    """Gives args the settings of their own, and those named in also, that a checkpoint was trained with, except where the command
    line says otherwise."""
    others = {f.name for f in fields(CommonArgs)} - also | {f.name for f in fields(args) if not f.metadata["trained"]} | args.given
    for name in ({f.name for f in fields(args)} - others) & set(checkpoint["args"]):
        setattr(args, name, checkpoint["args"][name])


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------
def save(path, checkpoint):
    """Writes under a temporary name and renames, so that the file is always a complete one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path, kind=None):
    """Reads a checkpoint and checks what it is; raises UserError if it is not a complete checkpoint of this kind (None: any)."""
    if not Path(path).exists():
        raise UserError(f"no checkpoint at {path}: train it first (--train), or give the path of one")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # on a damaged file torch.load raises nearly anything
        raise UserError(f"{path}: not a readable checkpoint, perhaps cut short; delete it and train again "
                        f"({type(error).__name__})") from None
    if not isinstance(checkpoint, dict) or not {"kind", "model", "config", "args"} <= set(checkpoint):
        raise UserError(f"{path}: a PyTorch file, but not a checkpoint of this project")
    if kind not in (None, checkpoint["kind"]):
        raise UserError(f"{path}: holds a {checkpoint['kind']} checkpoint, and this needs {kind}")
    if "gelu" not in checkpoint["config"]:
        raise UserError(f"{path}: written by an earlier version, whose networks were others; train it again")
    return checkpoint


def fingerprint(target):
    """16 hex digits that identify the weights of a target, whatever their dtype and device were since."""
    digest = hashlib.sha256()
    for name, p in sorted(target.state_dict().items()):
        digest.update(name.encode() + p.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def target_from(checkpoint, device, dtype=torch.float32):
    """A checkpoint (of load) -> the frozen target, with .tokenizer and .fingerprint."""
    target = model.GPT(model.GPTConfig(**checkpoint["config"]))
    target.load_state_dict(checkpoint["model"])
    target.tokenizer = checkpoint["tokenizer"]
    target.fingerprint = checkpoint["fingerprint"]
    return model.by_columns(target.to(device, dtype).eval().requires_grad_(False))


# ---------------------------------------------------------------------------------------------------------------------
# Real GPT-2 weights
# ---------------------------------------------------------------------------------------------------------------------
def read_weights(path):
    """{name: tensor} from a .safetensors or a PyTorch .bin file."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True)
    raw = path.read_bytes()  # 8 bytes: length of the header; the header, JSON; the tensors
    size = int.from_bytes(raw[:8], "little")
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    weights = {}
    for name, info in json.loads(raw[8:8 + size]).items():
        if name != "__metadata__" and info["dtype"] in kinds:
            begin, end = (8 + size + o for o in info["data_offsets"])
            flat = torch.frombuffer(bytearray(raw[begin:end]), dtype=kinds[info["dtype"]])
            weights[name] = flat.view(info["shape"]).float()
    return weights


def init_target(args):
    """--init: converts GPT-2 weights, from a file or over the network, into a target checkpoint. A tokenizer for a file: the
    file tokenizer.json beside it ({"ranks": [...]}, as our own checkpoints have it), otherwise GPT-2's."""
    if args.init in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        file = Path("out") / f"{args.init}.safetensors"
        if not file.exists():
            url = f"https://huggingface.co/openai-community/{args.init}/resolve/main/model.safetensors"
            file.parent.mkdir(exist_ok=True)
            temporary = file.with_name("." + file.name)
            try:
                import urllib.request
                with tqdm(desc=f"fetching {args.init}", unit="B", unit_scale=True) as bar:
                    urllib.request.urlretrieve(url, temporary, lambda n, block, total: (setattr(bar, "total", total), bar.update(block)))
                os.replace(temporary, file)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise UserError(f"--init {args.init}: cannot fetch {url} ({error}); with the file at hand, use --init FILE") from None
    else:
        file = Path(args.init)
        if not file.is_file():
            raise UserError(f"--init {args.init}: no such file, and not one of gpt2, gpt2-medium, gpt2-large, gpt2-xl")
    beside = file.with_name("tokenizer.json")
    tokenizer = {"name": "gpt2"}
    try:
        if beside.is_file() and "ranks" in (found := json.loads(beside.read_text())):
            tokenizer = {"ranks": found["ranks"]}
        enc, target = encoding(tokenizer), model.load_gpt2(read_weights(file))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a foreign file may cause
        raise UserError(f"--init {args.init}: not GPT-2 weights in the published layout ({type(error).__name__})") from None
    if enc.n_vocab != target.config.vocab_size:
        raise UserError(f"--init {args.init}: {target.config.vocab_size} embeddings, but the tokenizer has {enc.n_vocab} entries")
    save(args.target, {"kind": "target", "model": target.state_dict(), "config": asdict(target.config), "args": {}, "step": 0,
                       "tokenizer": tokenizer, "fingerprint": fingerprint(target)})
    print(f"{args.init}: {sum(p.numel() for p in target.parameters()) / 1e6:.1f} M parameters, written to {args.target}")


# ---------------------------------------------------------------------------------------------------------------------
# Training: what is the same for the target and for every drafter
# ---------------------------------------------------------------------------------------------------------------------
class Run:
    """The frame of a training loop: `for step in run` shows a progress bar with the loss and the time left, logs to
    a .jsonl beside the checkpoint, saves at the end, every minute, and after Ctrl-C, and resumes. With torchrun every process takes its share
    of the batch and gradients are averaged (DistributedDataParallel); the first one talks and writes.

    probe: a function that returns a line to print, called about once a minute.
    extra(): what the checkpoint holds beside the weights, "kind" above all.
    """

    def __init__(self, args, module, optimiser, extra, probe=None):
        self.args, self.module, self.optimiser, self.extra, self.probe = args, module, optimiser, extra, probe
        self.rank, self.world = start_processes(args)
        self.first, self.path, self.losses = 0, Path(args.ckpt), []
        if args.batch_size % self.world:
            raise UserError(f"--batch_size {args.batch_size} does not divide among {self.world} processes")
        if args.resume:
            checkpoint = load(self.path, extra()["kind"])
            try:
                module.load_state_dict(checkpoint["model"])
                optimiser.load_state_dict(checkpoint["optimiser"])
            except (RuntimeError, ValueError):
                raise UserError(f"--resume: {self.path} was trained with other settings than the ones given: leave them out") from None
            self.first = checkpoint["step"]
            if self.first >= args.steps:
                raise UserError(f"--resume: {self.path} has its {self.first} steps already; ask for more with --steps")
        self.parallel = module
        if self.world > 1:
            self.parallel = torch.nn.parallel.DistributedDataParallel(module)

    def batch(self, data, step):
        """This process's rows of the batch of a step."""
        return data.batch(step, self.args.batch_size, self.args.seed)[self.rank::self.world].to(self.args.device)

    def autocast(self):
        """bfloat16 on CUDA, and on a CPU that multiplies it in tiles."""
        kind = torch.device(self.args.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" or has_bf16())

    def save(self, step):
        if self.rank == 0:
            save(self.path, {**self.extra(), "model": self.module.state_dict(), "step": step, "optimiser": self.optimiser.state_dict(),
                             "args": {k: v for k, v in vars(self.args).items() if isinstance(v, (int, float, str, bool, type(None)))}})

    def __iter__(self):
        show = self.rank == 0
        bar = tqdm(total=self.args.steps, initial=self.first, desc=f"training {self.args.name}", disable=not show, smoothing=0.05)
        if show:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        log = open(self.path.with_suffix(".jsonl") if show else os.devnull, "a" if self.first else "w")  # noqa: SIM115  # closed below
        began = spoke = time.time()
        done, interrupts = self.first, []

        def interrupt(*_):  # Ctrl-C stops after the step at hand, between two complete states; the second one at once
            if interrupts:
                raise KeyboardInterrupt
            interrupts.append(done)

        handler = signal.signal(signal.SIGINT, interrupt)
        try:
            for step in range(self.first, self.args.steps):
                torch.manual_seed(zlib.crc32(f"{self.args.seed} {step} {self.rank}".encode()))  # so that --resume draws the same
                yield step
                done = step + 1
                bar.update()
                if done % 10 == 0 or done == self.args.steps:
                    loss = sum(self.losses) / max(1, len(self.losses))
                    bar.set_postfix_str(f"loss {loss:.3f}")
                    self.losses.clear()
                    log.write(json.dumps({"step": done, "loss": round(loss, 4), "seconds": round(time.time() - began, 1)}) + "\n")
                    log.flush()
                    if not math.isfinite(loss):
                        raise UserError(f"the loss is {loss} at step {done}: try a smaller --lr")
                if self.agreed(interrupts) and done < self.args.steps:
                    self.save(done)
                    command = f"python train.py --ckpt {self.path} --resume" if self.args.name == "target" else "--resume"
                    raise UserError(f"interrupted after step {done}; {self.path} has it: {command} goes on")
                if show and time.time() - spoke > 60 and done < self.args.steps and all(map(math.isfinite, self.losses)):
                    self.save(done)
                    if self.probe:
                        line, numbers = self.probe()
                        tqdm.write(f"step {done}: {line}")
                        log.write(json.dumps({"step": done, **numbers}) + "\n")
                    spoke = time.time()
            self.save(self.args.steps)
        finally:
            signal.signal(signal.SIGINT, handler)
            bar.close()
            log.close()

    def agreed(self, interrupts):
        """Whether any process was interrupted: they stop after the same step or not at all."""
        if self.world == 1:
            return bool(interrupts)
        told = torch.tensor(len(interrupts), device=self.args.device)
        dist.all_reduce(told)
        return told.item() > 0

    def log(self, loss):
        self.losses.append(loss.item())


def drafter_run(args, target, data, drafter, optimiser, generate):
    """The Run of a drafter: its checkpoint names the target, and once a minute it reports held-out tau, greedy."""
    prompts = data.prompts(3, seed=7)

    def probe():
        drafter.eval()
        rounds = {d: [n for prompt, _ in pairs for n in generate(
            target, drafter, prompt[:args.seq_len // 2], 64, stop=(data.enc.eot_token,)).committed] for d, pairs in prompts.items()}
        drafter.train()
        tau = {f"tau_{d}": round(sum(n) / max(1, len(n)), 2) for d, n in rounds.items()}
        return "held-out " + ", ".join(f"{k} {v:.2f}" for k, v in tau.items()), tau

    if start_processes(args)[0] == 0:
        own, whole = (sum(p.numel() for p in m.parameters()) / 1e6 for m in (drafter, target))
        print(f"{args.name}: {own:.2f} M trainable parameters beside a target of {whole:.2f} M", flush=True)
    extra = {"kind": drafter.kind, "config": asdict(target.config), "target": target.fingerprint}
    return Run(args, drafter, optimiser, lambda: extra, probe)


def has_bf16():
    """Whether this CPU has AMX. With AVX-512's bfloat16 alone a step takes longer than in float32."""
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


def start_processes(args):
    """Under torchrun: joins the group. Returns (rank, number of processes)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        cuda = torch.device(args.device).type == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        dist.init_process_group("nccl" if cuda else "gloo")
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def get_target(args, text="corpus"):
    """The frozen target and its data, `text` of TEXTS; trains the target first where there is none (drafters call this)."""
    rank, world = start_processes(args)
    missing = [not Path(args.target).exists()]
    if world > 1:
        dist.broadcast_object_list(missing)  # what the first process saw holds for all
    if missing[0] and args.init:
        if rank == 0:
            init_target(args)
    elif missing[0]:
        if rank == 0:
            print(f"no target at {args.target} yet: training it first, {Args.steps} steps (a weaker one is had sooner: python train.py "
                  f"--ckpt {args.target} --steps 400)", flush=True)
        train(Args(target=args.target, ckpt=args.target, data=args.data, seed=args.seed, device=args.device))
    if world > 1:
        dist.barrier()
    checkpoint = load(args.target, "target")
    done, steps = checkpoint.get("step", 0), checkpoint["args"].get("steps", 0)
    if done < steps:
        raise UserError(f"{args.target} stopped after {done} of {steps} steps: python train.py --ckpt {args.target} --resume finishes it")
    if args.resume and load(args.ckpt)["target"] != checkpoint["fingerprint"]:
        raise UserError(f"--resume: {args.ckpt} was trained for another target than {args.target}")
    args.data = args.data or checkpoint["args"].get("data")  # what the target was trained on
    target = target_from(checkpoint, args.device)
    if args.seq_len > target.config.max_seq_len:
        raise UserError(f"--seq_len {args.seq_len} exceeds the target's context: give --seq_len {target.config.max_seq_len}")
    data = load_data(args.data, json.dumps(target.tokenizer), args.seq_len, rank > 0)
    data.written = None
    if TEXTS[text]:
        n, path = min(512, args.steps * args.batch_size), Path(args.target).with_suffix(".texts")
        if rank == 0:
            texts_of(target, data, n, path)
        if world > 1:
            dist.barrier()
        greedy, sampled = texts_of(target, data, n, path).chunk(2)
        data.written = {"greedy": greedy, "sampled": sampled}.get(text, torch.cat([greedy, sampled])), TEXTS[text]
    return target, data


@lru_cache(maxsize=2)
def load_data(path, tokenizer, seq_len, quiet=False):
    """The Data of a corpus (--data, or None) under a tokenizer given as JSON, made once per process."""
    return Data(read_corpus(path, quiet), encoding(json.loads(tokenizer)), seq_len, quiet)


@torch.no_grad()
def held_out_loss(target, data, n=16):
    """{domain: (nats per token, nats per byte)} over n held-out sequences each."""
    device, found = target.wte.weight.device, {}
    for domain in data.domains:
        idx = data.batch(0, n, seed=1, side="held", domain=domain).to(device)
        loss = sum(F.cross_entropy(target(row[:, :-1])[0].flatten(0, 1), row[:, 1:].flatten()).item() * len(row)
                   for row in idx.split(8)) / n
        text = sum(len(data.enc.decode_bytes(row[1:].tolist())) for row in idx)
        found[domain] = loss, loss * (idx.shape[1] - 1) * n / text
    return found


def train(args):
    """Trains the target on all domains; cross-entropy of the next token."""
    args.name = "target"
    rank, _ = start_processes(args)
    corpus = read_corpus(args.data, rank > 0)
    if args.resume and Path(args.ckpt).exists():
        tokenizer = load(args.ckpt, "target")["tokenizer"]
    else:
        text = "".join(doc for c in corpus.values() for doc in random.Random(0).sample(c["train"], len(c["train"])) [:4000])
        tokenizer = {"ranks": [b.decode("latin-1") for b in train_bpe(text[:6_000_000], args.vocab_size, quiet=rank > 0)]}
    data = load_data(args.data, json.dumps(tokenizer), args.seq_len, rank > 0)
    torch.manual_seed(args.seed)
    config = model.GPTConfig(args.seq_len, data.enc.n_vocab, args.n_layer, args.n_head, args.n_embd)
    target = model.GPT(config).to(args.device)
    if rank == 0:
        size = sum(p.numel() for p in target.parameters()) / 1e6
        amount = ", ".join(f"{d} {len(data.tokens[d, 'train']) / 1e6:.1f} M" for d in data.domains)
        print(f"target: {size:.1f} M parameters, {args.n_layer} layers; tokens to train on: {amount}", flush=True)

    def probe():
        losses = held_out_loss(target.eval(), data, n=4)
        question = data.prompts(1)[data.domains[0]][0][0]
        record = verify.autoregressive(target, question[:args.seq_len // 2], 48, stop=(data.enc.eot_token,))
        target.train()
        line = ", ".join(f"{d} {a:.2f}" for d, (a, _) in losses.items())
        sample = data.enc.decode(question[-16:] + record.tokens)
        return f"held-out nats per token: {line}\n  sample: {sample!r}", {d: a for d, (a, _) in losses.items()}

    optimiser = Optimiser(target, args.lr, args.steps, decay=0.1)
    run = Run(args, target, optimiser, lambda: {"kind": "target", "config": asdict(config), "tokenizer": tokenizer,
                                                "fingerprint": fingerprint(target)}, probe)
    for step in run:
        idx = run.batch(data, step)
        with run.autocast():
            logits, _ = run.parallel(idx[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), idx[:, 1:].flatten())
        loss.backward()
        optimiser.step(step)
        run.log(loss)
    if rank == 0:
        print("held-out loss, nats per token (per byte): " + ", ".join(
            f"{d} {a:.3f} ({b:.3f})" for d, (a, b) in held_out_loss(target.eval(), data).items()), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What `python METHOD.py` does around the method's own train and generate
# ---------------------------------------------------------------------------------------------------------------------
def command(run):
    """Runs a command's main function; wrong use ends in one line on stderr and status 1."""
    try:
        run()
    except (UserError, KeyboardInterrupt, OSError) as error:  # OSError: a full disk, a folder that may not be written ...
        print(f"{Path(sys.argv[0]).name}: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def load_drafter(method, args, target):
    """The drafter of args.ckpt for this target, with the settings it was trained with where the command line gives no others."""
    checkpoint = load(args.ckpt, method.Drafter.kind)
    if checkpoint["target"] != target.fingerprint:
        raise UserError(f"{args.ckpt} was trained for another target than {args.target}: train it again (--train), or give its --target")
    adopt(args, checkpoint, {"data"})
    drafter = method.Drafter(target.config, args)
    try:
        drafter.load_state_dict(checkpoint["model"])
    except RuntimeError:
        raise UserError(f"{args.ckpt} was trained with other settings than the ones given: leave them out, or train again") from None
    return model.by_columns(drafter.to(args.device, getattr(torch, args.dtype)).eval())


def marked(record, enc, colour=None):
    """The text of a generation with the drafted and accepted tokens marked: green on a terminal, in brackets elsewhere."""
    colour = sys.stdout.isatty() if colour is None else colour
    on, off = ("\033[32m", "\033[0m") if colour else ("[", "]")
    text, i = "", 0
    while i < len(record.tokens):
        j = i
        while j < len(record.tokens) and record.from_draft[j] == record.from_draft[i]:
            j += 1
        part = enc.decode(record.tokens[i:j])
        text += on + part + off if record.from_draft[i] else part
        i = j
    return text


def show(method, args, target, drafter, enc, prompt):
    """Continues one prompt and shows, token by token, who wrote what."""
    room = target.config.max_seq_len
    if not 0 < len(prompt) < room:
        raise UserError(f"the prompt has {len(prompt)} tokens; this target's context of {room} takes 1 to {room - 1}")
    knobs = (args.max_new_tokens, args.temperature, args.top_k, args.top_p, (enc.eot_token,))
    torch.manual_seed(args.seed)
    record = method.generate(target, drafter, prompt, *knobs)
    torch.manual_seed(args.seed)
    plain = verify.autoregressive(target, prompt, *knobs)
    print(enc.decode(prompt) + marked(record, enc))
    if args.verbose:
        at = 1
        for i, ((drafted, _), kept) in enumerate(zip(record.rounds, record.committed), 1):
            new, ours = record.tokens[at:at + kept], record.from_draft[at:at + kept]
            accepted = [enc.decode([t]) for t, o in zip(new, ours) if o]
            supplied = [enc.decode([t]) for t, o in zip(new, ours) if not o]
            print(f"round {i}: drafted up to {drafted} deep; accepted {len(accepted)}: {accepted}; the target adds {supplied}")
            at += kept

    if record.committed and plain.committed:
        speed, base = (sum(r.committed) / r.seconds["rounds"] for r in (record, plain))
        same = f"; equal to plain decoding: {record.tokens == plain.tokens}" if args.temperature == 0 else ""
        print(f"\n(marked: drafted and accepted; the rest is the target's) tau {record.tau:.2f}, {speed:.0f} tokens/s, "
              f"plain decoding {base:.0f} tokens/s, speedup {speed / base:.2f}{same}")


def report(method, args, target, drafter, data):
    """Measures on held-out prompts, domain by domain, at temperature 0 and 1 (or the one given); prints a table and returns
    the numbers of the first temperature, those of others under "at_temperature_T"."""
    temperatures = [args.temperature] if "temperature" in args.given else [0.0, 1.0]
    prompts, found = data.prompts(args.prompts, args.seed), []
    room = target.config.max_seq_len - 8

    def generate(prompt, *knobs):
        return method.generate(target, drafter, prompt, *knobs)

    for domain in prompts:  # warm up
        generate(prompts[domain][0][0][:room], min(16, args.max_new_tokens), temperatures[-1])
    for temperature in temperatures:
        result = {"method": args.name, "device": args.device, "dtype": args.dtype, "temperature": temperature}
        domains, times = {}, Counter()
        for domain, pairs in prompts.items():
            numbers, records = verify.measure(
                target, generate, [p[-room:] for p, _ in pairs], args.max_new_tokens, temperature, args.top_k, args.top_p,
                (data.enc.eot_token,), args.seed, partial(tqdm, desc=f"measuring {domain} at T={temperature:g}", leave=False))
            if domain == "math":
                right = [[answer_of(data.enc.decode(r.tokens)) == answer for r in pair] for pair, (_, answer) in zip(records, pairs)]
                numbers["right_answers"] = sum(with_draft for with_draft, _ in right)
                numbers["right_answers_plain"] = sum(without for _, without in right)
            for key in ("draft_ms", "verify_ms", "ar_ms"):
                times[key] += numbers.pop(key) / len(prompts)
            domains[domain] = numbers
        equal = [sum(d.pop("equal") for d in domains.values()), sum(d["prompts"] for d in domains.values())]
        result.update({key: round(value, 3) for key, value in times.items()})
        result.update(greedy_equal=equal if temperature == 0 else None, domains=domains)
        found.append(result)
        table(result)
    first, *others = found
    return {**first, **{f"at_temperature_{r['temperature']:g}": r for r in others}}


def table(result):
    print(f"\n{result['method']} at T={result['temperature']:g} on held-out prompts ({result['device']}, {result['dtype']}, "
          f"{torch.get_num_threads()} threads)")
    print(f"{'':6}  tau  plain tok/s  tok/s  speedup (quartiles)    repeated  right answers  acceptance at draft position 1, 2, ...")
    for domain, d in result["domains"].items():
        right = f"{d['right_answers']} / {d['right_answers_plain']} of {d['prompts']}" if "right_answers" in d else ""
        low, _, high = d["speedup_quartiles"]
        print(f"{domain:6} {d['tau']:4.2f} {d['ar_tok_s']:12.0f} {d['tok_s']:6.0f}  {d['speedup']:4.2f}x ({low:.2f}-{high:.2f})"
              f"{d['repetition']:14.0%} {right:>15}  {' '.join(f'{a:.2f}' for a in d['n_alpha'][:8])}")
    print(f"a draft takes {result['draft_ms']:.2f} ms, its verification {result['verify_ms']:.2f} ms, "
          f"one token of plain decoding {result['ar_ms']:.2f} ms")
    if result["greedy_equal"]:
        print("greedy output identical: {} of {} prompts".format(*result["greedy_equal"]))


def launch(method):
    """`python METHOD.py`: trains if asked to, then reports (--train, --bench) or continues a prompt."""
    args = parse(method.Args, method.__doc__, method.Drafter.kind)
    args.name = Path(method.__file__).stem  # methods may share a kind of checkpoint
    if args.train:
        method.train(args)
        if dist.is_initialized() and dist.get_rank() > 0:
            return
    if not Path(args.target).exists():
        raise UserError(f"no target at {args.target}: give the path of one, or train it first (--train)")
    target = target_from(load(args.target, "target"), args.device, getattr(torch, args.dtype))
    drafter, enc = load_drafter(method, args, target), encoding(target.tokenizer)
    if args.prompt is not None:
        show(method, args, target, drafter, enc, enc.encode_ordinary(args.prompt))
    elif args.bench or args.train:
        data = load_data(args.data, json.dumps(target.tokenizer), min(256, target.config.max_seq_len), False)
        numbers = report(method, args, target, drafter, data)
        print()
        show(method, args, target, drafter, enc, data.prompts(1, args.seed)[data.domains[0]][0][0])
        if args.json:
            print(json.dumps(numbers))
    else:
        show(method, args, target, drafter, enc, enc.encode_ordinary(math_texts(1, args.seed, True)[0][0]))


def main():
    args = parse(Args, __doc__, "target")
    if args.init:
        init_target(args)
    elif args.train or args.prompt is None:
        if not args.train and Path(args.ckpt).exists():
            raise UserError(f"{args.ckpt} is there already: --resume goes on, --train starts over, --prompt continues a text")
        train(args)
        if dist.is_initialized() and dist.get_rank() > 0:
            return
    target = target_from(load(args.ckpt, "target"), args.device, getattr(torch, args.dtype))
    enc = encoding(target.tokenizer)
    prompt = enc.encode_ordinary(args.prompt or "def ")
    room = target.config.max_seq_len
    if not 0 < len(prompt) < room:
        raise UserError(f"the prompt has {len(prompt)} tokens; this target's context of {room} takes 1 to {room - 1}")
    torch.manual_seed(args.seed)
    record = verify.autoregressive(target, prompt, args.max_new_tokens, args.temperature, args.top_k, args.top_p, (enc.eot_token,))
    print(enc.decode(prompt + record.tokens))


if __name__ == "__main__":
    command(main)
