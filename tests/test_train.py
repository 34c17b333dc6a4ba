"""Data, tokenizer, optimiser, checkpoints and the training loop: what train.py promises."""
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import regex
import torch
from helpers import tiny

import model
import train
import verify

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Tests change folders and what is in them: no corpus is kept from one to the next."""
    for f in vars(train).values():
        if hasattr(f, "cache_clear"):
            f.cache_clear()


def problem_text(n, seed=0):
    return "".join(q + s for q, s, _ in train.math_texts(n, seed, False))


def small_data(seq_len=32):
    """Two domains of a few thousand tokens, and the tokenizer."""
    text = problem_text(60)
    ranks = train.train_bpe(text, 320, quiet=True)
    corpus = {"math": {"train": [text], "held": [problem_text(20, 1)]},
              "code": {"train": [Path(json.__file__).read_text()], "held": [Path(json.decoder.__file__).read_text()]}}
    return train.Data(corpus, train.encoding({"ranks": [b.decode("latin-1") for b in ranks]}), seq_len, quiet=True)


def refused(*argv, run=train.main, name="train.py", monkeypatch, capsys):
    """Runs a command that has to fail; returns the one line it says."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
    with pytest.raises(SystemExit) as stopped:
        train.command(run)
    assert stopped.value.code not in (0, None)
    return one_line(capsys.readouterr().err)


def one_line(err):
    """The single line on stderr beside progress bars, which end in a carriage return or hold a rate."""
    lines = [line.split("\r")[-1].strip() for line in err.split("\n")]
    lines = [line for line in lines if line and not re.search(r"\d+%\||\dit \[|[\d?](it|B|s)/(s|it)", line)]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# Worked problems
# ---------------------------------------------------------------------------------------------------------------------
def solve(question):
    """The answer to a question, computed from its words alone."""
    n = [int(x) for x in re.findall(r"-?\d+", question)]
    if m := re.fullmatch(r"(\w+) has (\d+) (\w+)\. (.*) How many \3 does \1 have now\?", question):
        total = int(m[2])
        for sentence in re.findall(r"[^.]+\.", m[4]):
            if times := re.fullmatch(rf" ?Then the number of {m[3]} grows to (\d+) times as many\.", sentence):
                total *= int(times[1])
            else:
                verb, k = re.fullmatch(rf" ?Then {m[1]} (buys|finds|gets|gives away|loses) (\d+) {m[3]}\.", sentence).groups()
                total += int(k) if verb in ("buys", "finds", "gets") else -int(k)
        return str(total)
    if "dollars each" in question:
        paid = int(re.search(r"pays with (\d+) dollars", question)[1])
        return str(paid - sum(int(k) * int(price) for k, price in re.findall(r"(\d+) \w+ at (\d+) dollars each", question)))
    if re.fullmatch(r"Add \d+ and \d+\.", question):
        return str(n[0] + n[1])
    if re.fullmatch(r"Multiply \d+ by \d+\.", question):
        return str(n[0] * n[1])
    if m := re.fullmatch(r"Solve (\d+)([a-z]) ([+-]) (\d+) = (-?\d+) for \2\.", question):
        return str(Fraction(int(m[5]) - int(m[3] + m[4]), int(m[1])))
    if m := re.fullmatch(r"Compute (\d+/\d+) \+ (\d+/\d+)\.", question):
        return str(Fraction(m[1]) + Fraction(m[2]))
    if question.startswith("Sort the numbers"):
        return ", ".join(map(str, sorted(n)))
    if re.fullmatch(r"What is \d+ percent of \d+\?", question):
        return str(Fraction(n[0] * n[1], 100))
    if m := re.fullmatch(r"A sequence starts (\d+), (\d+), (\d+) and goes on in the same way\. What is number (\d+)\?", question):
        a, b, c, last = map(int, m.groups())
        assert c - b == b - a
        return str(a + (last - 1) * (b - a))
    raise AssertionError(f"a problem of unknown form: {question}")


def equalities(text):
    """Every chain 'expression = expression = ...' of a solution, as lists of exact values."""
    number = r"-?\d+(?:/\d+)?"
    side = rf"{number}(?: [-+*/] {number})*"
    for chain in re.finditer(rf"(?<![\w/]){side}(?: = {side})+", text):
        yield [eval(re.sub(r"\d+", r"Fraction(\g<0>)", part), {"Fraction": Fraction}) for part in chain[0].split(" = ")]


@pytest.mark.parametrize("kind", train.PROBLEMS, ids=lambda kind: kind.__name__)
def test_problems_have_the_right_answer_and_true_steps(kind):
    """Each kind's answer equals one computed from the question's words, and every written equality holds."""
    r = random.Random(5)
    for _ in range(300):
        question, steps, answer = kind(r)
        text = "\n".join(steps)
        assert str(answer) == solve(question), question
        chains = list(equalities(text))
        assert all(len(set(chain)) == 1 for chain in chains), (question, text)
        if kind in (train.addition, train.sorting):  # these two count on, digit by digit and number by number
            continue
        assert chains[-1][-1] == answer if kind is not train.fractions else text.endswith(f"gives {answer.numerator}/{answer.denominator}.")


def test_written_additions_and_sortings_lead_to_their_answers():
    """The digits written and the last carry make up the sum; each 'smallest' is one and leaves the others."""
    r = random.Random(6)
    for _ in range(200):
        _, steps, answer = train.addition(r)
        digits = [re.search(r"write (\d), carry (\d)", step).groups() for step in steps]
        assert int(digits[-1][1] + "".join(d for d, _ in reversed(digits))) == answer
        question, steps, _ = train.sorting(r)
        left = sorted(map(int, re.findall(r"\d+", question)))
        for step in steps:
            smallest, *rest = map(int, re.findall(r"\d+", step))
            assert smallest == left[0] and sorted(rest) == left[1:]
            left = left[1:]


def test_multiplications_split_and_fractions_are_reduced_truly():
    """The steps that are no equations: the split of a factor, the greatest common divisor."""
    r = random.Random(7)
    for _ in range(200):
        whole, tens, ones = map(int, re.findall(r"\d+", train.multiplication(r)[1][0]))
        assert whole == tens + ones and tens % 10 == 0 and 0 <= ones < 10
        top, bottom, divisor, a, b = map(int, re.findall(r"\d+", train.fractions(r)[1][-1]))
        assert divisor == math.gcd(top, bottom) and (a, b) == (top // divisor, bottom // divisor)


def test_a_problem_reads_as_question_solution_answer():
    """The prompt ends in 'Solution:', the solution in its answer, which answer_of finds; an unfinished text has none."""
    r = random.Random(8)
    for _ in range(100):
        question, solution, answer = train.worked_problem(r)
        assert question.endswith("\nSolution:") and solution.endswith(f"\nAnswer: {answer}\n")
        assert train.answer_of(solution) == answer and train.answer_of(solution[:-1]) is None


def test_no_held_out_problem_is_trained_on():
    """Whatever the seed and the heading, the training side and the held-out side have no problem in common."""
    def bodies(texts):
        return {re.sub(r"^(Problem:|Question:|Exercise\.) ", "", q) for q, _, _ in texts}
    trained = bodies(train.math_texts(12000, 1234, False))
    for seed in (1234, 99, 100, 101):
        held = bodies(train.math_texts(400, seed, True))
        assert len(held) == 400 and not held & trained


def test_every_kind_of_problem_is_trained_on_about_equally():
    """Kinds with few different problems repeat them in training; held-out problems are distinct."""
    kinds = Counter(re.sub(r"\d+", "0", q.split()[1]) for q, _, _ in train.math_texts(12000, 1234, False))
    kinds["a name"] = sum(kinds.pop(name, 0) for name in train.NAMES)  # two kinds start so
    assert len(kinds) == 8 and all(n > 0.09 * 12000 for n in kinds.values())
    held = [q.split(" ", 1)[1] for q, _, _ in train.math_texts(400, 99, True)]
    assert len(set(held)) == len(held)


# ---------------------------------------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------------------------------------
def test_a_file_is_held_out_with_all_its_docstrings(monkeypatch):
    """Code and prose are split by file: no source is on both sides, and a docstring is on the side of its source."""
    files = train.stdlib_files()[::12]
    monkeypatch.setattr(train, "stdlib_files", lambda: files)
    corpus = inspect.unwrap(train.read_corpus)(quiet=True)
    assert set(corpus) == {"math", "code", "prose"} and all(c["train"] and c["held"] for c in corpus.values())
    sources = {name: f.read_text(encoding="utf-8") for name, f in files}
    sides = {name: "held" if source in corpus["code"]["held"] else "train" for name, source in sources.items()}
    assert len(corpus["code"]["held"]) + len(corpus["code"]["train"]) == len(sources) and set(sides.values()) == {"held", "train"}
    assert not set(corpus["code"]["held"]) & set(corpus["code"]["train"]) - {""}
    for name, source in sources.items():
        assert all(doc in corpus["prose"][sides[name]] for doc in train.docstrings(source))


def test_a_folder_is_split_by_file_and_a_file_by_length(tmp_path, capsys):
    """--data: both sides together are the whole text, and no part is on both; files that are no text are left out, and named."""
    texts = [f"file number {i}\n" * 5 for i in range(17)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00\x80")  # no UTF-8
    (tmp_path / "blank.txt").write_text(" \n")
    corpus = train.read_corpus(tmp_path)
    assert "1 of 19 files" in (told := capsys.readouterr().err) and "picture.bin" in told
    assert sorted(corpus["text"]["train"] + corpus["text"]["held"]) == sorted(texts) and len(corpus["text"]["held"]) == 3
    (tmp_path / "one.txt").write_text("".join(texts))
    corpus = train.read_corpus(tmp_path / "one.txt")
    (a,), (b,) = corpus["text"]["train"], corpus["text"]["held"]
    assert a + b == "".join(texts) and len(b) == math.ceil(len(a + b) / 8)


def test_batches_depend_on_step_and_seed_alone():
    """Equal arguments, equal batches, in another process with other string hashes as well; another step or seed, other ones."""
    data = small_data()
    batch = data.batch(3, 4, seed=1)
    assert batch.shape == (4, 32) and batch.equal(small_data().batch(3, 4, seed=1))
    assert not batch.equal(data.batch(4, 4, seed=1)) and not batch.equal(data.batch(3, 4, seed=2))
    script = "import test_train as t; print(t.small_data().batch(3, 4, seed=1).tolist())"
    env = {**ENV, "PYTHONHASHSEED": "77", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    other = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == batch.tolist()


def test_batches_begin_where_texts_do_and_keep_to_their_side():
    """Training rows hold nothing of the held-out side, and start at a line's or a document's beginning."""
    enc = train.encoding({"ranks": [bytes([b]).decode("latin-1") for b in range(256)]})
    corpus = {"text": {"train": ["aaa\naaaaa\n" * 30, "aa\n" * 30], "held": ["bbbb\nb\n" * 40]}}
    data = train.Data(corpus, enc, 16, quiet=True)
    stream = data.tokens["text", "train"]
    starts = {0} | {i + 1 for i, t in enumerate(stream.tolist()) if t in (10, enc.eot_token)}
    windows = {tuple(stream[i:i + 16].tolist()) for i in starts if i + 16 <= len(stream)}
    for step in range(20):
        rows, held = data.batch(step, 8), data.batch(step, 8, side="held")
        assert {tuple(row) for row in rows.tolist()} <= windows
        assert ord("b") not in rows and ord("a") not in held
    for prompt, answer in data.prompts(9)["text"]:
        assert len(prompt) == 4 and ord("a") not in prompt and answer is None


def test_math_prompts_are_held_out_questions_with_their_answers():
    """The prompts of a report are questions alone; the answers that come with them are right."""
    data = small_data()
    for prompt, answer in data.prompts(20, seed=3)["math"]:
        text = data.enc.decode(prompt)
        heading, body = text.removesuffix("\nSolution:").split(" ", 1)
        assert heading in ("Problem:", "Question:", "Exercise.") and solve(body) == answer and text.endswith("\nSolution:")
        assert train.held_out(text.split(" ", 1)[1])


def writer(data, seed=0):
    """A tiny target in fp64 for the data's vocabulary that its texts tell apart from others."""
    target = tiny(data.enc.n_vocab, data.seq_len + 8, seed=seed)
    target.fingerprint = train.fingerprint(target)
    return target


def test_texts_that_the_target_writes_have_its_law():
    """A start from the corpus; then the first half is the target's greedy continuation, up to the end of a document, and the
    second half is drawn from its law: the sum of log p(token) + entropy is a martingale, and stays within 4.4 standard
    deviations (false alarms: 1e-5), where greedy text is far outside."""
    data = small_data()
    target, n, start = writer(data), 130, 4  # 130: one batch of 128, and a small one
    with mock.patch.object(data, "batch", wraps=data.batch) as batch:
        texts = train.write_texts(target, data, n, quiet=True)
    starts = torch.cat([data.batch(*call.args, **call.kwargs) for call in batch.call_args_list])
    assert texts.shape == (2 * n, 32) and texts[:, :start].equal(starts[:, :start])
    for row in texts[:n:7].tolist():
        plain = verify.autoregressive(target, row[:start], 32 - start, stop=(data.enc.eot_token,)).tokens
        assert row[start:start + len(plain)] == plain
    with torch.no_grad():
        log_p = target(texts[:, :-1])[0][:, start - 1:].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    gain = log_p.gather(-1, texts[:, start:, None])[..., 0] + entropy
    variance = (log_p.exp() * log_p ** 2).sum(-1) - entropy ** 2
    z = [(half.sum() / v.sum() ** 0.5).item() for half, v in zip(gain.chunk(2), variance.chunk(2))]
    assert z[0] > 20 and abs(z[1]) < 4.4


def test_texts_are_kept_for_the_target_that_wrote_them(tmp_path):
    """Written once, and anew where the file is of another target or too short, or is damaged."""
    data, path = small_data(), tmp_path / "target.texts"
    first = train.texts_of(writer(data), data, 8, path, quiet=True)
    with mock.patch.object(train, "write_texts", side_effect=AssertionError):
        assert all(train.texts_of(writer(data), data, n, path).equal(first) for n in (8, 3))
    longer = train.texts_of(writer(data), data, 9, path, quiet=True)
    other = train.texts_of(writer(data, seed=1), data, 8, path, quiet=True)
    assert len(longer) == 18 and other.shape == first.shape and not other.equal(first)
    path.write_bytes(path.read_bytes()[:99])
    assert train.texts_of(writer(data), data, 8, path, quiet=True).equal(first)


@pytest.mark.parametrize("text", train.TEXTS)
def test_a_drafter_trains_on_the_text_that_it_was_told_to(text, tmp_path):
    """--text: the share of every kind of row among 600 within 4.4 standard deviations; the held-out side is left alone."""
    data, target = small_data(), tmp_path / "target.pt"
    torch.manual_seed(0)
    config = model.GPTConfig(32, data.enc.n_vocab, 1, 1, 8)
    train.save(target, {"kind": "target", "model": model.GPT(config).state_dict(), "config": vars(config), "args": {}, "tokenizer":
                        {"ranks": [data.enc.decode_single_token_bytes(i).decode("latin-1") for i in range(data.enc.n_vocab - 1)]},
                        "fingerprint": "f" * 16})
    kinds = torch.full((32, 32), 1), torch.full((32, 32), 2)
    with mock.patch.object(train, "load_data", lambda *_: data), mock.patch.object(train, "texts_of", lambda *_: torch.cat(kinds)):
        train.get_target(train.Args(target=target, seq_len=32, device="cpu"), "greedy")  # leaves nothing behind
        _, data = train.get_target(train.Args(target=target, seq_len=32, device="cpu"), text)
    rows = torch.cat([data.batch(step, 8) for step in range(75)])
    share = {"greedy": (rows == 1).all(1).sum() / 600, "sampled": (rows == 2).all(1).sum() / 600}
    expected = {"corpus": (0, 0), "greedy": (1, 0), "sampled": (0, 1), "mixed": (1 / 3, 1 / 3)}[text]
    for found, p in zip(share.values(), expected):
        assert abs(found - p) <= 4.4 * (p * (1 - p) / 600) ** 0.5
    assert data.batch(0, 8).equal(data.batch(0, 8)) and not (data.batch(0, 8, side="held") < 3).all(1).any()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------------------------------
def naive_bpe(text, vocab_size):
    """Byte-pair encoding as it is defined: recount every pair after every merge."""
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(train.PATTERN, text)]
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < vocab_size - 1:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i:i + 2] = [best[0] + best[1]]
                i += 1
    return ranks


def test_bpe_equals_the_definition_on_code():
    """The incremental training gives the merges, in order, of a recount after every merge."""
    text = Path(json.decoder.__file__).read_text()[:5000] + problem_text(5)
    assert list(train.train_bpe(text, 420, quiet=True).items()) == list(naive_bpe(text, 420).items())


def test_bpe_equals_the_definition_where_pairs_overlap_and_run_out():
    """Two letters only: overlapping pairs (aaa), many ties, and texts too short for the vocabulary."""
    r = random.Random(0)
    for n in range(40):
        text = " ".join("".join(r.choices("ab", weights=(3, 1), k=r.randint(1, 12))) for _ in range(n))
        ranks = train.train_bpe(text, 300, quiet=True)
        assert list(ranks.items()) == list(naive_bpe(text, 300).items())
        assert sorted(ranks.values()) == list(range(len(ranks)))


def test_tokens_round_trip_and_digits_stand_alone():
    """Any text survives; every byte has a token; no token holds two digits; END is the last id and never comes from text."""
    ranks = train.train_bpe(problem_text(100) + "1000 2000 1000 2000\n" * 50, 400, quiet=True)
    enc = train.encoding({"ranks": [b.decode("latin-1") for b in ranks]})
    assert enc.n_vocab == 400 and enc.eot_token == 399 == len(ranks)
    r = random.Random(1)
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = ["".join(map(chr, r.choices(alphabet, k=200))) for alphabet in (points, range(300)) for _ in range(50)]
    texts += ["", " ", "\r\n\n \t", "a\0b", train.END, "x" + train.END, problem_text(3, 5)]
    for text in texts:
        ids = enc.encode_ordinary(text)
        assert enc.decode(ids) == text and enc.eot_token not in ids
    assert all(enc.decode_single_token_bytes(enc.encode_single_token(bytes([b]))) == bytes([b]) for b in range(256))
    assert not any(re.search(rb"\d.|.\d", piece, re.DOTALL) for piece in ranks)
    assert [enc.decode([i]) for i in enc.encode_ordinary("12x")] == ["1", "2", "x"]


# ---------------------------------------------------------------------------------------------------------------------
# Optimiser
# ---------------------------------------------------------------------------------------------------------------------
def test_muon_orthogonalises():
    """The update is near the polar factor of the gradient: singular values near 1, the gradient's own directions."""
    torch.manual_seed(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        params = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(3)]  # of one shape: they share a stack, not their values
        for p in params:
            p.grad = torch.randn(shape) * random.Random(str(shape)).uniform(0.01, 10)
        train.Muon(params, lr=1.0).step()
        for p in params:
            update = -p.detach() / max(1, shape[0] / shape[1]) ** 0.5
            s = torch.linalg.svdvals(update)
            u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
            assert 0.3 < s.min() and s.max() < 1.3, s
            assert torch.cosine_similarity(update.flatten(), (u @ vh).flatten(), 0) > 0.95


def test_muon_looks_ahead_with_momentum():
    """The second step follows Nesterov's momentum: it equals a first step on the combined gradient."""
    torch.manual_seed(1)
    a, b = torch.randn(6, 6), torch.randn(6, 6)
    p = torch.nn.Parameter(torch.zeros(6, 6))
    muon = train.Muon([p], lr=1.0, momentum=0.9)
    p.grad = a
    muon.step()
    first, p.grad = p.detach().clone(), b
    muon.step()
    q = torch.nn.Parameter(torch.zeros(6, 6))
    momentum = 0.9 * (0.1 * a) + 0.1 * b
    q.grad = 0.1 * b + 0.9 * momentum
    train.Muon([q], lr=1.0, momentum=0.0).step()
    torch.testing.assert_close(p.detach() - first, q.detach(), atol=1e-4, rtol=1e-4)


def test_muon_lets_weights_decay():
    """Beside its update a matrix shrinks by lr times the decay."""
    torch.manual_seed(2)
    start, grad, ends = torch.randn(4, 6), torch.randn(4, 6), []
    for decay in (0.0, 0.5):
        p = torch.nn.Parameter(start.clone())
        p.grad = grad.clone()
        train.Muon([p], lr=0.1, decay=decay).step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[1], ends[0] - 0.05 * start)


def test_schedule_clipping_and_who_gets_which_rule():
    """4 % warmup, then a straight way down to a tenth, for both rules; gradients of norm 1 at most; only inner matrices get Muon."""
    target = model.GPT(model.GPTConfig(16, 300, 1, 2, 8))
    optimiser = train.Optimiser(target, 0.02, 100)
    (muon, _), (adam, _) = optimiser.parts
    names = {p: n for n, p in target.named_parameters()}
    matrices = {names[p] for group in muon.param_groups for p in group["params"]}
    rest = {names[p] for group in adam.param_groups for p in group["params"]}
    assert matrices == {f"blocks.0.{n}.weight" for n in ("c_attn", "attn_proj", "c_fc", "mlp_proj")}
    assert matrices | rest == set(names.values()) and not matrices & rest
    norms, scale, scale_adam, base = [], [], [], adam.param_groups[0]["lr"]
    muon.step = lambda: norms.append(math.sqrt(sum(float(p.grad.norm()) ** 2 for p in target.parameters())))
    adam.step = lambda: (scale.append(muon.param_groups[0]["lr"] / 0.02), scale_adam.append(adam.param_groups[0]["lr"] / base))
    for step in range(100):
        for p in target.parameters():
            p.grad = torch.full_like(p, 50.0)
        optimiser.step(step)
        assert all(p.grad is None for p in target.parameters())
    assert scale == pytest.approx(scale_adam)
    assert scale[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert scale[4:] == pytest.approx([1 - 0.9 * i / 96 for i in range(96)])
    assert norms == pytest.approx([1] * 100, abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------
CHECKPOINT = {"kind": "target", "model": {"w": torch.arange(3000.0)}, "config": {"n_layer": 2, "gelu": False}, "args": {"steps": 3}, "step": 3}


def save_for_ever(path):
    while True:
        train.save(path, CHECKPOINT)


def test_a_killed_save_leaves_a_complete_file(tmp_path):
    """kill -9 at any moment of saving: the file is always a complete one."""
    path, r = tmp_path / "x.pt", random.Random(0)
    train.save(path, CHECKPOINT)
    for _ in range(25):
        began = path.stat()
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        while process.is_alive() and path.stat() == began:  # until it has saved once
            time.sleep(0.001)
        time.sleep(r.uniform(0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert train.load(path, "target")["model"]["w"].equal(CHECKPOINT["model"]["w"])


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    """What cannot be written does not touch what is there."""
    train.save(tmp_path / "x.pt", CHECKPOINT)
    with pytest.raises((AttributeError, TypeError, RuntimeError, pickle.PicklingError)):
        train.save(tmp_path / "x.pt", {**CHECKPOINT, "model": lambda: None})
    assert [f.name for f in tmp_path.iterdir()] == ["x.pt"] and train.load(tmp_path / "x.pt", "target")["step"] == 3


def test_damaged_checkpoints_get_one_clear_line(tmp_path):
    """Cut anywhere, overwritten, or no checkpoint at all: a UserError of one line that names the file."""
    path, r = tmp_path / "x.pt", random.Random(0)
    train.save(path, CHECKPOINT)
    raw = path.read_bytes()
    damaged = [raw[:n] for n in range(0, len(raw), 397)] + [r.randbytes(r.randint(1, 300)) for _ in range(60)]
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(train.UserError) as error:
            train.load(path, "target")
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("what", [[1, 2], torch.zeros(3), {"weights": torch.zeros(3)}, {"kind": "target"}], ids=lambda w: type(w).__name__)
def test_foreign_files_and_wrong_kinds_are_refused(tmp_path, what):
    """A PyTorch file of something else, and a checkpoint of another kind, are told apart from a damaged one."""
    torch.save(what, tmp_path / "x.pt")
    with pytest.raises(train.UserError, match="not a checkpoint of this project"):
        train.load(tmp_path / "x.pt", "target")
    train.save(tmp_path / "x.pt", CHECKPOINT)
    with pytest.raises(train.UserError, match="holds a target checkpoint"):
        train.load(tmp_path / "x.pt", "dflash")
    with pytest.raises(train.UserError, match="no checkpoint at .*--train"):
        train.load(tmp_path / "y.pt", "target")
    train.save(tmp_path / "x.pt", {**CHECKPOINT, "config": {}})
    with pytest.raises(train.UserError, match="x.pt: written by an earlier version"):
        train.load(tmp_path / "x.pt", "target")


def test_a_fingerprint_tells_targets_apart():
    """The same weights give the same 16 digits, on any copy; one changed weight gives others."""
    torch.manual_seed(0)
    a, b = (model.GPT(model.GPTConfig(16, 300, 1, 2, 8)) for _ in range(2))
    assert train.fingerprint(a) != train.fingerprint(b)
    b.load_state_dict(a.state_dict())
    assert train.fingerprint(a) == train.fingerprint(b) == train.fingerprint(a.double())
    with torch.no_grad():
        b.wpe.weight[3, 2] += 1e-6
    assert train.fingerprint(a.float()) != train.fingerprint(b)


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2 weights
# ---------------------------------------------------------------------------------------------------------------------
def published_gpt2(vocab):
    """Random weights under GPT-2's published names and shapes (projections are (in, out)), 2 layers of width 64."""
    torch.manual_seed(0)
    weights = {"wte.weight": (vocab, 64), "wpe.weight": (32, 64), "ln_f.weight": (64,), "ln_f.bias": (64,)}
    for layer in range(2):
        for name, rows, columns in (("attn.c_attn", 64, 192), ("attn.c_proj", 64, 64), ("mlp.c_fc", 64, 256), ("mlp.c_proj", 256, 64)):
            weights |= {f"h.{layer}.{name}.weight": (rows, columns), f"h.{layer}.{name}.bias": (columns,)}
        weights |= {f"h.{layer}.{name}.{part}": (64,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
        weights[f"h.{layer}.attn.bias"] = (1, 1, 32, 32)  # the published files carry their causal masks
    return {name: torch.randn(shape) * 0.1 for name, shape in weights.items()}


def write_safetensors(path, weights):
    header, raw = {"__metadata__": {"format": "pt"}}, b""
    for name, w in weights.items():
        data = w.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(w.shape), "data_offsets": [len(raw), len(raw) + len(data)]}
        raw += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw)


@pytest.fixture
def gpt2_folder(tmp_path, monkeypatch):
    """A working folder with a tiny GPT-2 in both published formats, and a tokenizer beside it."""
    monkeypatch.chdir(tmp_path)
    ranks = train.train_bpe(problem_text(50), 320, quiet=True)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"ranks": [b.decode("latin-1") for b in ranks]}))
    weights = published_gpt2(320)
    write_safetensors(tmp_path / "tiny.safetensors", weights)
    torch.save({f"transformer.{k}": v for k, v in weights.items()}, tmp_path / "tiny.bin")
    return weights


@pytest.mark.parametrize("file", ["tiny.safetensors", "tiny.bin"])
def test_init_takes_published_weights(gpt2_folder, file, monkeypatch, capsys):
    """--init FILE --prompt: a checkpoint with exactly these weights, projections turned round, and the tokenizer beside the file."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--init", file, "--prompt", "Question: Add", "--max_new_tokens", "5"])
    train.main()
    assert "Question: Add" in capsys.readouterr().out
    target = train.target_from(train.load("out/tiny.pt", "target"), "cpu")
    c, weights = target.config, gpt2_folder
    assert (c.max_seq_len, c.vocab_size, c.n_layer, c.n_head, c.n_embd) == (32, 320, 2, 1, 64)
    assert target.wte.weight.equal(weights["wte.weight"]) and target.ln_f.bias.equal(weights["ln_f.bias"])
    for layer, block in enumerate(target.blocks):
        for ours, theirs in (("c_attn", "attn.c_attn"), ("attn_proj", "attn.c_proj"), ("c_fc", "mlp.c_fc"), ("mlp_proj", "mlp.c_proj")):
            assert getattr(block, ours).weight.equal(weights[f"h.{layer}.{theirs}.weight"].t())
            assert getattr(block, ours).bias.equal(weights[f"h.{layer}.{theirs}.bias"])
        assert block.ln_2.weight.equal(weights[f"h.{layer}.ln_2.weight"])
    assert train.encoding(target.tokenizer).n_vocab == 320


def test_init_writes_where_it_is_told(gpt2_folder, monkeypatch):
    """--ckpt names the checkpoint of the converted target too."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--init", "tiny.bin", "--ckpt", "mine/a.pt", "--prompt", "Add", "--max_new_tokens", "1"])
    train.main()
    assert train.load("mine/a.pt", "target")["config"]["n_embd"] == 64 and not Path("out").exists()


@pytest.mark.parametrize("damage", ["cut", "text", "name", "vocabulary", "tokenizer", "missing"])
def test_init_refuses_what_is_not_gpt2(gpt2_folder, damage, monkeypatch, capsys):
    """A cut file, a text, a missing tensor, another vocabulary, a tokenizer that is none, no file: one line, nothing written."""
    file = Path("tiny.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "text":
        file.write_text("These are not weights. " * 10)
    elif damage == "name":
        write_safetensors(file, {k: v for k, v in gpt2_folder.items() if k != "h.1.ln_2.bias"})
    elif damage == "vocabulary":
        write_safetensors(file, published_gpt2(321))
    elif damage == "tokenizer":
        Path("tokenizer.json").write_text('{"ranks": ["\u4e00", 3]}')
    else:
        file.unlink()
    line = refused("--init", file, monkeypatch=monkeypatch, capsys=capsys)
    assert "--init tiny.safetensors" in line and not Path("out").exists()


def test_init_without_a_network_says_so(tmp_path, monkeypatch, capsys):
    """--init gpt2 offline: one line with the address and the way out; no half-fetched file."""
    monkeypatch.chdir(tmp_path)

    def offline(url, file, *_):
        Path(file).write_bytes(b"half")
        raise urllib.error.URLError("no route to host")
    monkeypatch.setattr(urllib.request, "urlretrieve", offline)
    line = refused("--init", "gpt2", monkeypatch=monkeypatch, capsys=capsys)
    assert "https://huggingface.co/" in line and "--init FILE" in line
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]


def test_a_tokenizer_that_cannot_be_fetched_says_so(monkeypatch):
    """GPT-2's own tokenizer without a network: one line, whatever tiktoken raises."""
    monkeypatch.setattr(train.tiktoken, "get_encoding", lambda name: 1 / 0)
    with pytest.raises(train.UserError, match="TIKTOKEN_CACHE_DIR"):
        train.encoding({"name": "gpt2"})


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------
TINY = ["--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--seq_len", "32", "--vocab_size", "320",
        "--batch_size", "4", "--data", "data"]
DRAFT = ["--train", "--seq_len", "32", "--batch_size", "4", "--block_size", "4", "--n_anchors", "99",
         "--n_draft_layer", "1", "--data", "data", "--target", "target.pt"]
RUNS = [["train.py", "--steps", "2", "--ckpt", "target.pt", *TINY], ["dflash.py", "--steps", "2", "--ckpt", "drafter.pt", *DRAFT]]
DRIVER = """
import torch, test_train
torch.set_num_threads(1)
test_train.train_both()
"""


def train_both():
    """The target and a drafter, in fp32, where a share of the batch is the same sum in another order; without reports."""
    import dflash
    with mock.patch.multiple(train, has_bf16=lambda: False, report=lambda *_: {}, show=lambda *_: None):
        for module, argv in zip((train, dflash), RUNS):
            with mock.patch.object(sys, "argv", argv):
                module.main()
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # as between two commands
        train.command(lambda: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a little text."""
    (tmp_path / "data").mkdir()
    for i in range(4):
        (tmp_path / "data" / f"{i}.txt").write_text(problem_text(25, i))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tensors(state, prefix=""):
    """All tensors of a nested state, by path."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    found = {prefix: state} if isinstance(state, torch.Tensor) else {}
    for key, value in items:
        found |= tensors(value, f"{prefix}/{key}")
    return found


def test_two_processes_train_as_one(folder, monkeypatch):
    """torchrun with two gloo processes: weights and optimiser state (the gradients' averages) of one process on the joint batch."""
    train_both()
    one = [torch.load(f, weights_only=True) for f in ("target.pt", "drafter.pt")]
    (folder / "two").mkdir()
    monkeypatch.chdir(folder / "two")
    os.symlink(folder / "data", "data")
    Path("driver.py").write_text(DRIVER)
    env = {**ENV, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "driver.py"], env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, err = process.communicate(timeout=400)
    finally:
        process.terminate()  # torchrun ends what it started
        process.wait()
    assert process.returncode == 0, err[-3000:]
    two = [torch.load(f, weights_only=True) for f in ("target.pt", "drafter.pt")]
    for alone, shared in zip(one, two):
        assert alone["model"].keys() == shared["model"].keys() and not [k for k in shared["model"] if "module." in k or "_orig_mod" in k]
        for part in ("model", "optimiser"):
            a, b = tensors(alone[part]), tensors(shared[part])
            assert a.keys() == b.keys() and len(a) > 5
            for key in a:
                torch.testing.assert_close(a[key], b[key], atol=2e-4, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}")


def test_a_batch_that_does_not_divide_is_refused(folder, monkeypatch, capsys):
    """Three processes and four sequences: one line, before anything is written."""
    monkeypatch.setattr(train, "start_processes", lambda args: (0, 3))
    assert "--batch_size 4" in refused("--steps", 2, *TINY, monkeypatch=monkeypatch, capsys=capsys)
    assert not Path("out").exists()


def test_interrupting_saves_and_says_how_to_go_on(folder):
    """Ctrl-C in a run: one line, a status that is not 0, and a checkpoint of a complete step."""
    process = subprocess.Popen([sys.executable, ROOT / "train.py", "--steps", "100000", *TINY], cwd=folder, env=ENV,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = folder / "out" / "target.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().strip()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    line = one_line(err)
    assert process.returncode not in (0, None) and "--resume" in line
    step = train.load(folder / "out" / "target.pt", "target")["step"]
    assert 10 <= step < 100000 and f"after step {step};" in line


def test_interrupting_one_of_two_processes_stops_both(folder):
    """Ctrl-C reaches processes at different steps: they agree on the last one, and each ends in its one line."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    both = [subprocess.Popen(
        [sys.executable, ROOT / "train.py", "--steps", "100000", *TINY], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**ENV, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        for rank in range(2)]
    try:
        log = folder / "out" / "target.jsonl"
        while both[0].poll() is None and not (log.exists() and log.read_text().strip()):
            time.sleep(0.1)
        both[1].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=120)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    step = train.load(folder / "out" / "target.pt", "target")["step"]
    for process, err in zip(both, errors):
        assert process.returncode not in (0, None) and f"after step {step};" in one_line(err)


def test_a_loss_that_is_no_number_ends_the_run_without_a_checkpoint(folder, monkeypatch, capsys):
    """NaN never reaches a checkpoint, not even the one of every minute; the line names --lr."""
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(train.time, "time", lambda: next(clock))
    monkeypatch.setattr(train.F, "cross_entropy", lambda logits, labels: logits.sum() * float("nan"))
    assert "--lr" in refused("--steps", 20, *TINY, monkeypatch=monkeypatch, capsys=capsys)
    assert not Path("out/target.pt").exists()


def test_training_lowers_the_loss(folder, monkeypatch, capsys):
    """The loop learns: the logged loss falls well below that of a guess."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "40", *TINY])
    train.main()
    losses = [json.loads(line)["loss"] for line in Path("out/target.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5 and losses[-1] < math.log(320) - 1
    capsys.readouterr()
