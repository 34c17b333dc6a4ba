"""Data, tokenizer, optimizer, checkpoints and the frame of a training run: what train.py promises."""
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import tiktoken
import torch
from cli import ENV, ROOT, SHAPE, SMALL, problems, refused, run, tensors, write_texts
from test_model import published

import dflash
import model
import train

STDLIB = Path(json.__file__).parent.parent


BYTES = train.encoding({"ranks": [chr(b) for b in range(256)]})  # a token for every byte, and END


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a little text."""
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- Worked problems ----
ANSWERS = {
    r"Add (\d+) and (\d+)\.": lambda a, b: a + b,
    r"Multiply (\d+) by (\d+)\.": lambda a, b: a * b,
    r"What is (\d+) percent of (\d+)\?": lambda p, n: Fraction(p * n, 100),
    r"Solve (\d+)[xyn] \+ (\d+) = (\d+) for [xyn]\.": lambda a, b, c: Fraction(c - b, a),
    r"Solve (\d+)[xyn] - (\d+) = (-?\d+) for [xyn]\.": lambda a, b, c: Fraction(c + b, a),
    r"A sequence starts (\d+), (\d+), \d+ and .* What is number (\d+)\?": lambda a, b, n: a + (n - 1) * (b - a),
}


def solve(question):
    """The answer to a question, computed from its words alone."""
    for form, answer in ANSWERS.items():
        if m := re.fullmatch(form, question):
            return answer(*map(int, m.groups()))
    total = int(re.match(r"\w+ has (\d+)", question)[1])
    for verb, k in re.findall(r"(buys|finds|gives away|loses) (\d+)", question):
        total += int(k) if verb in ("buys", "finds") else -int(k)
    return total


@pytest.mark.parametrize("kind", "story addition multiplication equation percentage sequence".split())
def test_problems_have_the_right_answer_and_true_steps(kind):
    """The answer is what the question's words give, every equality holds, and the last step has the answer."""
    kind, r, side = getattr(train, kind), random.Random(5), r"-?\d+(?: [-+*/] -?\d+)*"
    for _ in range(300):
        question, steps, answer = kind(r)
        assert answer == solve(question)
        for chain in re.findall(rf"(?<![\w/]){side}(?: = {side})+", "\n".join(steps)):
            parts = re.sub(r"\d+", r"Fraction(\g<0>)", chain).split(" = ")
            values = {eval(part, {"Fraction": Fraction}) for part in parts}
            assert len(values) == 1, (question, chain)
        if kind is train.addition:  # digit by digit
            digits = [re.search(r"write (\d), carry (\d)", step).groups() for step in steps]
            values = {int(digits[-1][1] + "".join(d for d, _ in reversed(digits)))}
        assert values == {answer}


def test_no_held_out_problem_is_trained_on():
    """Held-out problems are distinct, prompts are such; in training all kinds are equally frequent (6e-5 alarms)."""
    trained = train.math_texts(12000, 1234, False)
    for seed in (1234, 99, 100):
        held = {question for question, _, _ in train.math_texts(400, seed, True)}
        assert len(held) == 400 and not held & {question for question, _, _ in trained}
    kinds = Counter("a name" if q.split()[1] in train.NAMES else q.split()[1] for q, _, _ in trained)
    assert len(kinds) == 6 and all(abs(n - 2000) < 4.4 * (12000 * 5 / 36) ** 0.5 for n in kinds.values())
    for question, solution, answer in trained[:100]:
        assert question.endswith("\nSolution:") and solution.endswith("\n" + answer)
    data = train.Data({"math": {"train": ["text " * 9], "held": ["text " * 9]}}, BYTES, 32)
    for prompt, answer in data.prompts(20, seed=3)["math"]:
        question = BYTES.decode(prompt)
        assert f"Answer: {solve(question[9:-10])}\n" == answer and train.held_out(question[9:-10])


# ---- The corpus ----
def test_a_source_is_held_out_with_its_docstrings(tmp_path, monkeypatch):
    """Code and prose are split by file, nothing is on both sides, tests and other people's packages are not read. A
    library without sources, as an embedded Python has, is refused in one line."""
    monkeypatch.setattr(train.ast, "__file__", str(tmp_path / "ast.py"))
    with pytest.raises(SystemExit, match=r"^code, train: 0 tokens; give more --data"):
        train.Data(train.read_corpus(), BYTES, 64)
    for file in [*STDLIB.glob("[b-d]*.py"), *STDLIB.glob("json/*.py"), *STDLIB.glob("email/*.py")]:
        copy = tmp_path / file.relative_to(STDLIB)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    for i in range(24):  # the same docstring in files of both sides
        (tmp_path / f"twin{i}.py").write_text(f'"""The same\ndocstring."""\nx = {i}\n', encoding="utf-8")
    sources = [f.read_text(encoding="utf-8") for f in tmp_path.rglob("*.py")]
    for name in ("test", "site-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("'''Not\nread.'''", encoding="utf-8")
    corpus = train.read_corpus()
    assert set(corpus) == {"math", "code", "prose"}
    for domain in corpus.values():
        assert domain["train"] and domain["held"] and not set(domain["train"]) & set(domain["held"]) - {""}
    assert sorted(corpus["code"]["train"] + corpus["code"]["held"]) == sorted(sources)
    for side in ("train", "held"):
        docs = [text for source in corpus["code"][side] for text in train.prose_of(source)]
        assert docs and set(docs) <= set(corpus["prose"][side]) | {"The same\ndocstring."}


def test_the_last_eighth_of_every_file_is_held_out(tmp_path):
    """--data: the sides together are the whole text, two million spaces included; what is no UTF-8 is replaced."""
    texts = ["a text\n" * 40 + " " * 2_000_000 + "end\n" * 40, "", "Gr\ufffd\ufffde"]
    for name, text in zip("abc", texts):
        (tmp_path / name).write_bytes(text.encode().replace("\ufffd".encode(), b"\xff"))
    corpus = train.read_corpus(tmp_path)["text"]
    assert [a + b for a, b in zip(corpus["train"], corpus["held"])] == texts
    assert [len(text) for text in corpus["held"]] == [math.ceil(len(text) / 8) for text in texts]
    assert train.read_corpus(tmp_path / "a") == {"text": {side: corpus[side][:1] for side in corpus}}
    data = train.Data({"text": corpus}, BYTES, 32)
    for side in corpus:
        assert BYTES.decode(data.tokens["text", side].tolist()) == "".join(t + train.END for t in corpus[side])


# ---- Tokenizer ----
def test_any_text_survives_its_tokens():
    """Every byte has a token, digits stand alone, END is the last id and never comes from text."""
    corpus = {"text": {"train": [problems(100), "1000 2000 1000 2000\n" * 50]}}
    enc = train.encoding(train.train_tokenizer(corpus, 400))
    assert enc.n_vocab == 400 and enc.eot_token == 399
    r = random.Random(1)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["".join(map(chr, r.choices(alphabet, k=200))) for alphabet in (points, range(300)) for _ in range(50)]
    for text in [*texts, "", "\r\n\n \t", "a\0b", "x" + train.END, problems(3, 5)]:
        ids = enc.encode_ordinary(text)
        assert enc.decode(ids) == text and enc.eot_token not in ids
    pieces = [enc.decode_single_token_bytes(i) for i in range(399)]
    assert {bytes([b]) for b in range(256)} <= set(pieces)
    assert not any(re.search(rb"\d.|.\d", piece, re.DOTALL) for piece in pieces)


def test_a_batch_is_a_function_of_its_step_and_keeps_to_its_side():
    """Equal arguments, equal rows; another step or seed, others. Rows start where a line or a document does."""
    corpus = {"text": {"train": ["aaa\naaaaa\n" * 30, "aa\n" * 30], "held": ["bbbb\nb\n" * 40]}}
    data, again = (train.Data(corpus, BYTES, 16) for _ in range(2))
    stream = data.tokens["text", "train"].tolist()
    starts = [0] + [i + 1 for i, t in enumerate(stream) if t in (ord("\n"), BYTES.eot_token)]
    windows = {tuple(stream[i:i + 16]) for i in starts}
    for step in range(20):
        rows, held = data.batch(step, 8), data.batch(step, 8, side="held")
        assert rows.shape == (8, 16) and rows.equal(again.batch(step, 8))
        assert {tuple(row) for row in rows.tolist()} <= windows
        assert ord("b") not in rows and ord("a") not in held
    batches = [data.batch(step, 8, seed) for step in range(5) for seed in range(5)]
    assert not any(a.equal(b) for a, b in itertools.combinations(batches, 2))
    assert all(ord("a") not in prompt and answer is None for prompt, answer in data.prompts(9)["text"])
    two = train.Data({"math": corpus["text"], "code": {"train": ["c\n" * 99], "held": ["d\n" * 99]}}, BYTES, 16)
    share = (two.batch(0, 4000) == ord("c")).any(1).double().mean().item()
    assert share == pytest.approx(0.35 / 0.75, abs=0.04)  # 5 standard errors
    assert (two.batch(0, 9, domain="code") != ord("a")).all() and len(two.starts["math", "train"]) == 2


# ---- Optimizer ----
@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muon_orthogonalises(shape):
    """An update has singular values near 1 and the gradient's own directions, whatever the gradient's size."""
    torch.manual_seed(0)
    for size in (0.01, 1, 100):
        x = torch.randn(shape) * size
        update = train.orthogonal(x)
        s = torch.linalg.svdvals(update)
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        assert s.min() > 0.3 and s.max() < 1.3 and s.mean() > 0.75
        assert torch.cosine_similarity(update.flatten(), (u @ vh).flatten(), 0) > 0.95


def test_schedule_clipping_and_who_gets_which_rule(monkeypatch):
    """4 % warmup, linear decay to a tenth, for both; gradients of norm 1; Muon for the blocks' matrices alone, with
    Nesterov momentum and longer steps for tall ones."""
    target = model.GPT(model.GPTConfig(16, 300, 1, 2, 8))
    optimizer = train.Optimizer(target, 0.02, 100)
    muon = [f"blocks.0.{n}.weight" for n in ("c_attn", "attn_proj", "c_fc", "mlp_proj")]
    rest = dict(target.named_parameters())
    assert [id(rest.pop(name)) for name in muon] == [id(p) for p in optimizer.matrices]
    adams, rates, momentum = [], [], 0.0
    monkeypatch.setattr(torch.optim.Adam, "step", lambda _: adams.append([p.grad.clone() for p in rest.values()]))
    monkeypatch.setattr(train, "orthogonal", lambda x: x)
    size = sum(p.numel() for p in target.parameters()) ** 0.5
    for step in range(100):
        before = [p.detach().mean() for p in optimizer.matrices]
        for p in target.parameters():
            p.grad = torch.full_like(p, 50.0)
        optimizer.step(step)
        assert all(p.grad is None for p in target.parameters())
        momentum = 0.95 * momentum + 0.05 / size
        steps = [(a - p.detach().mean()) / (0.05 / size + 0.95 * momentum) for a, p in zip(before, optimizer.matrices)]
        rates.append((steps[1].item() / 0.02, optimizer.param_groups[0]["lr"] / 0.02 * 6))
        assert [s / steps[1] for s in steps] == pytest.approx([3 ** 0.5, 1, 2, 1], rel=0.02)
    expected = [0.25, 0.5, 0.75] + [1 - 0.9 * max(0, step - 4) / 96 for step in range(3, 100)]
    assert [a for a, _ in rates] == pytest.approx(expected, rel=0.01)
    assert [b for _, b in rates] == pytest.approx(expected)
    assert len(adams) == 100 and all((grad * size - 1).abs().max() < 1e-4 for grads in adams for grad in grads)


# ---- Checkpoints ----
def checkpoint():
    torch.manual_seed(0)
    target = model.GPT(model.GPTConfig(16, 300, 1, 2, 8))
    return {"name": "target", "model": target.state_dict(), "config": vars(target.config), "args": {"steps": 3},
            "step": 3, "tokenizer": {"ranks": [chr(b) for b in range(256)]}, "optimizer": [{"state": torch.zeros(9)}]}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("writer failed\nat 0x1")])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, error):
    """Saving fails half way: one line, the old checkpoint as it was, and nothing beside it."""
    path = tmp_path / "x.pt"
    train.save(path, checkpoint())
    before = path.read_bytes()

    def half(_, where):
        Path(where).write_bytes(before[:len(before) // 2])
        raise error
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(SystemExit, match=r"x\.pt could not be written: [^\n]*$"):
        train.save(path, checkpoint())
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
    monkeypatch.undo()
    with path.open("rb") as reader:  # who reads meanwhile has the old file, whole
        train.save(path, {**checkpoint(), "step": 4})
        assert reader.read() == before != path.read_bytes()


@pytest.mark.filterwarnings("ignore")  # torch's own about such files
def test_files_that_are_no_checkpoint_are_refused_in_one_line(tmp_path):
    """Missing, cut anywhere, of random bytes, of something else, of another name."""
    path, r = tmp_path / "x.pt", random.Random(0)
    torch.save(checkpoint(), path)
    raw = path.read_bytes()
    files = [raw[:n] for n in range(0, len(raw), 397)] + [r.randbytes(r.randint(1, 300)) for _ in range(60)]
    for what in [[1, 2], torch.zeros(3), {"model": torch.zeros(3)}, {"name": "eagle1"}]:
        torch.save(what, path)
        files.append(path.read_bytes())
    path.unlink()
    for raw in [None, *files]:
        if raw is not None:
            path.write_bytes(raw)
        with pytest.raises(SystemExit, match=r"x\.pt.*(cut short|holds a eagle1)[^\n]*$"):
            train.load(path, "target")


def test_shipped_weights_are_read_where_out_has_none(tmp_path, monkeypatch):
    """out/ in the working folder goes before weights/ beside train.py, which are in half precision. What a shipped
    target was trained with is no default for another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "__file__", str(tmp_path / "clone" / "train.py"))
    own, shipped = Path("out/target.pt"), tmp_path / "clone" / "weights" / "target.pt"
    assert train.find("target") == own
    whole = checkpoint()
    train.save(shipped, whole | {"model": {name: w.half() for name, w in whole["model"].items()}})
    assert train.find("target") == shipped
    assert train.parse(train.Args, "", "target", []).steps == train.Args().steps
    half = train.load_target(shipped, "cpu")
    assert all(w.half().float().equal(half.state_dict()[name]) for name, w in whole["model"].items())
    train.save(own, {**checkpoint(), "config": {"n_layer": 2}})
    with pytest.raises(SystemExit, match="other settings"):
        train.load_target(train.find("target"), "cpu")


# ---- GPT-2 weights ----
@pytest.fixture
def gpt2(folder, monkeypatch):
    """Weights as published, 2 layers of width 128, which is 2 heads; a tokenizer of their size."""
    torch.save(published(), "tiny.bin")
    letters = tiktoken.Encoding(
        "letters", pat_str="a+|.", mergeable_ranks={b"abcdefghijkl"[i:i + 1]: i for i in range(12)},
        special_tokens={train.END: 12})
    monkeypatch.setattr(train.tiktoken, "get_encoding", lambda name: letters)


def test_init_takes_published_weights(gpt2):
    """A target of the file's shape, which gives the logits that model.load_gpt2 does."""
    assert run(train, "--device", "cpu", "--init", "tiny.bin")[0] == 0
    target, idx = train.load_target("out/target.pt", "cpu"), torch.arange(10)[None]
    assert target.config == model.GPTConfig(10, 13, 2, 2, 128, bias=True, gelu=True)
    torch.testing.assert_close(target(idx)[0], model.load_gpt2(published())(idx)[0])
    assert target.enc._pat_str == "a+|." and target.enc.encode("decaf") == [3, 4, 2, 0, 5]


OFFLINE = mock.Mock(side_effect=OSError("no route to host"))


@pytest.mark.parametrize("which, damage", [
    ("tiny.bin", lambda patch: Path("tiny.bin").write_bytes(Path("tiny.bin").read_bytes()[:-1000])),
    ("tiny.bin", lambda patch: torch.save(dict(list(published().items())[:-1]), "tiny.bin")),
    ("tiny.bin", lambda patch: torch.save(published(14), "tiny.bin")),
    ("gpt2", lambda patch: patch.setattr(torch.hub, "load_state_dict_from_url", OFFLINE)),
    ("tiny.bin", lambda patch: patch.setattr(train.tiktoken, "get_encoding", OFFLINE)),
], ids=["cut short", "a tensor less", "other vocabulary", "no network", "no tokenizer"])
def test_init_refuses_what_is_not_gpt2(gpt2, monkeypatch, which, damage):
    """In one line, and nothing is written."""
    damage(monkeypatch)
    assert refused(train, "--device", "cpu", "--init", which).startswith(f"--init {which}: GPT-2 weights neither")
    assert not Path("out").exists()


# ---- Runs ----
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_loss_that_is_no_number_is_never_saved(folder, monkeypatch, interrupted):
    """A step size that blows up ends in one line, and the checkpoint stays as it was; after Ctrl-C as well."""
    assert run(train, *SMALL, *SHAPE, "--steps", 1)[0] == 0
    before, batch = Path("out/target.pt").read_bytes(), train.Data.batch

    def then_interrupt(self, step, *how, **named):
        if interrupted and step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step, *how, **named)
    monkeypatch.setattr(train.Data, "batch", then_interrupt)
    line = refused(train, *SMALL, *SHAPE, "--resume", "--steps", 30, "--lr", 1e20)
    assert re.match("the loss is (nan|inf) at step " + ("4" if interrupted else "10"), line) and "--lr" in line
    assert Path("out/target.pt").read_bytes() == before


def test_interrupting_saves_and_resuming_goes_on(folder):
    """Ctrl-C in a real process: one line, a status, a checkpoint of a complete step; --resume alone ends the run."""
    argv = map(str, [sys.executable, ROOT / "train.py", *SMALL, *SHAPE, "--steps", 100000])
    process = subprocess.Popen([*argv], env=ENV, stderr=subprocess.PIPE, encoding="utf-8")
    shown = ""
    while process.poll() is None and "loss=" not in shown:
        shown += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    step = train.load("out/target.pt", "target")["step"]
    assert process.returncode == 1 and "Traceback" not in err and 10 <= step < 100000
    assert err.splitlines()[-1] == f"interrupted after step {step}; --resume goes on"
    assert run(train, "--resume", "--steps", step + 2)[0] == 0
    assert train.load("out/target.pt", "target")["step"] == step + 2


def train_both():
    """A target, and a drafter with a block at every anchor of a sequence, in float32 on every machine."""
    drafter = ["--train", "--block_size", 4, "--n_anchors", 99, "--n_draft_layer", 1, "--n_lengths", 1]
    for module, name, own in ((train, "target", SHAPE), (dflash, "dflash", drafter)):
        args = train.parse(module.Args, "", name, [str(word) for word in (*SMALL, *own, "--steps", 2)])
        with mock.patch.object(train.Run, "autocast", lambda run: contextlib.nullcontext()):
            module.train(args)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # the checkpoint is written


def test_two_processes_train_as_one(folder, monkeypatch):
    """torchrun with two gloo processes: weights and momenta (mean gradients) of one process on the whole batch."""
    train_both()
    shutil.copytree("data", "two/data")
    monkeypatch.chdir("two")
    Path("driver.py").write_text("import test_train\ntest_train.train_both()\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "driver.py"]
    done = subprocess.run(command, env=ENV, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("target.pt", "dflash.pt"):
        one, two = tensors(folder / "out" / name), tensors(folder / "two" / "out" / name)
        assert len(one) == len(two) and all((a - b).norm() <= 1e-3 * a.norm() for a, b in zip(one, two))
