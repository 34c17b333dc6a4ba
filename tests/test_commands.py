"""Every command from outside: one smoke test each, consoles that lack characters, wrong use in one line."""
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli import ENV, ROOT, SHAPE, SMALL, problems, refused, run, tensors, write_texts
from test_train import BYTES

import train
import verify
from verify import Record, Round

FIVE = ["eagle1", "eagle2", "eagle3", "dflash", "dflash2"]
DRAFT = ["--train", *SMALL, "--steps", 3, "--prompts", 2, "--max_new_tokens", 12]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A working folder with text, a trained target, drafters of it, and files that are none -> {method: its report}."""
    folder, before, reports = tmp_path_factory.mktemp("world"), os.getcwd(), {}
    os.chdir(folder)
    write_texts(folder)
    for argv in (["--steps", 40], ["--steps", 1, "--seed", 9, "--ckpt", "other.pt"]):
        status, _, err = run(train, *SMALL, *SHAPE, *argv)
        assert status == 0, err
    target = train.load_target("out/target.pt", "cpu")
    idx = torch.tensor(target.enc.encode_ordinary(problems(9))[:64])
    loss = torch.nn.functional.cross_entropy(target(idx[None, :-1])[0][0], idx[1:])
    assert loss < 4.5 and len(train.load("out/target.pt", "target")["curve"]) == 4, loss  # at first it is 6
    for name in FIVE:
        reports[name] = run(importlib.import_module(name), *DRAFT, "--json")
    torch.save(torch.load("out/target.pt", weights_only=True) | {"step": 3}, "half.pt")
    Path("notes.txt").write_text("Notes, and nothing else.\n", encoding="utf-8")
    Path("empty.txt").write_text("", encoding="utf-8")
    yield reports
    os.chdir(before)


@pytest.mark.parametrize("name", FIVE)
def test_a_method_trains_reports_and_continues(world, name):
    """The report's numbers agree with each other, and greedy text is plain decoding's."""
    status, out, err = world[name]
    assert status == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["method"] == name and [r["temperature"] for r in report["results"]] == [0, 1]
    assert report["results"][0]["domains"]["text"]["equal"] == 2
    for result in report["results"]:
        n = result["domains"]["text"]
        assert n["tau"] * n["target_passes"] == pytest.approx(n["new_tokens"] - 2)  # a text's first token is prefill's
    target, module = train.load_target("out/target.pt", "cpu", torch.float64), importlib.import_module(name)
    enc, here = target.enc, ["--device", "cpu", "--dtype", "float64", "--max_new_tokens", 20]
    _, out, err = run(module, *here, "--prompt", "Add 12", "--verbose")
    plain = verify.autoregressive(target, enc.encode_ordinary("Add 12"), 20, stop=(enc.eot_token,))
    text, rounds = re.split(r"\n\n(?=\d+ drafted)", out, maxsplit=1)
    assert re.sub(r"[\[\]]", "", text) == re.sub(r"[\[\]]", "", "Add 12" + enc.decode(plain.tokens)), err
    assert "accepted, supplied: " in rounds and "equal to plain decoding: True" in rounds
    drawn = [run(module, *here, "--prompt", "Add", "--temperature", 1, "--seed", seed)[1] for seed in (3, 3, 4)]
    a, b, c = (text.split("\n\n(marked")[0] for text in drawn)
    assert a == b != c


@pytest.mark.parametrize("name", ["train", *FIVE])
def test_a_resumed_run_ends_as_an_uninterrupted_one(world, name, tmp_path, monkeypatch):
    """Ctrl-C in the second of four steps, then --resume alone: equal weights and optimizer, so equal data and seed."""
    monkeypatch.setattr(train, "benchmark", lambda *_: {})
    module, whole, broken = importlib.import_module(name), tmp_path / "a.pt", tmp_path / "b.pt"
    batch, seeds = train.Data.batch, set()
    base = [*SMALL, *(SHAPE if module is train else ["--train"]), "--steps", 4, "--seed", 5]
    assert run(module, *base, "--ckpt", whole)[0] == 0

    def interrupted(self, step, *how, **named):
        seeds.add(torch.initial_seed())
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step, *how, **named)
    with monkeypatch.context() as patched:
        patched.setattr(train.Data, "batch", interrupted)
        assert "interrupted after step 2; " in refused(module, *base, "--ckpt", broken)
    assert torch.load(broken, weights_only=True)["step"] == len(seeds) == 2  # every step draws anew
    assert run(module, "--device", "cpu", "--resume", "--ckpt", broken)[0] == 0
    assert len(tensors(whole)) == len(tensors(broken))
    assert all(a.equal(b) for a, b in zip(tensors(whole), tensors(broken)))


# ---- What is shown ----
def test_right_answers_are_counted(capsys):
    """Of the method, then of plain decoding: whole numbers, in the line of the answer."""
    texts = [("so\nAnswer: 12\n", "12\n"), ("Answer: 12\n", "Answer: 7\n"), ("Answer: 31\n", "Answer: 1\n")]
    records = [tuple(Record(list(text.encode())) for text in pair) for pair in texts]
    numbers = {"tau": 1, "ar_tok_s": 1, "tok_s": 1, "speedup": 1, "n_alpha": [], "equal": 0, "prompts": 3}
    pairs = [([1], f"Answer: {n}\n") for n in (12, 7, 1)]
    data = SimpleNamespace(enc=BYTES, seq_len=64, prompts=lambda *_: {"math": pairs})
    args = train.Args(temperature=0.0)
    args.method = "x"
    report = train.benchmark(lambda *_: (dict(numbers), records), args, data)
    assert report["results"][0]["domains"]["math"]["right_answers"] == [1, 2]
    assert "right answers: 1, plain decoding 2\n" in capsys.readouterr().out


def test_marks_show_who_wrote_a_character():
    """For every way to draft the bytes of a text: in brackets are the characters whose last byte was drafted."""
    text = "aü你b"
    ends = [len(text[:i].encode()) - 1 for i in range(1, len(text) + 1)]
    for flags in product([False, True], repeat=len(text.encode()) - 1):
        record = Record(list(text.encode()), [Round(1, 2, int(flag), 1) for flag in flags])
        owners = groupby(zip(text, ends), key=lambda char: char[1] > 0 and flags[char[1] - 1])
        parts = [(drafted, "".join(char for char, _ in chars)) for drafted, chars in owners]
        marked = train.marked(record, BYTES).replace("][", "")
        assert marked == "".join(f"[{part}]" if drafted else part for drafted, part in parts)
        for _ in range(4):
            record.tokens.pop()
            assert re.sub(r"[\[\]]", "", train.marked(record, BYTES)) == BYTES.decode(record.tokens)


def test_a_round_is_drawn_as_a_tree(capsys):
    """Depth first, + where it was accepted; a round without a draft; a round that was cut after one token."""
    tree, chain = (list(b"abxcyc"), [-1, 0, 0, 1, 1, 2]), (list(b"d"), [-1])
    rounds = [Round(2, 6, 2, 3, tree), Round(0, 1, 0, 1, chain), Round(2, 6, 2, 1, tree)]
    train.draw(Record(list(b"abcdeb"), rounds), BYTES)
    assert capsys.readouterr().out.split("\n\n") == [
        "\n5 drafted, 2 accepted, supplied: 'd'\n+ 'b'\n  + 'c'\n    'y'\n  'x'\n    'c'",
        "0 drafted, 0 accepted, supplied: 'e'",
        "5 drafted, 2 accepted, supplied: ''\n+ 'b'\n    'c'\n    'y'\n  'x'\n    'c'\n"]


CONTINUE = ["--prompt", "Grüße →", "--max_new_tokens", 9, "--verbose"]
REPORT = ["--bench", *SMALL, "--prompts", 1, "--max_new_tokens", 9, "--json"]


@pytest.mark.parametrize("encoding, argv", [("ascii", CONTINUE), ("cp1252", REPORT)])
def test_any_console_will_do(world, encoding, argv):
    """Help, text and JSON print where characters are missing, in a process with PYTHONIOENCODING as well."""
    for name in ("train", *FIVE):
        status, out, _ = run(importlib.import_module(name), "--help", encoding=encoding)
        assert status == 0 and all(f"--{flag} " in out for flag in ("train", "data", "steps", "lr"))
    _, out, _ = run(importlib.import_module("dflash"), *CONTINUE, encoding=encoding)
    assert out.startswith({"ascii": "Gr??e ?", "cp1252": "Grüße ?"}[encoding])
    command, env = map(str, [sys.executable, ROOT / "dflash.py", *argv]), {**ENV, "PYTHONIOENCODING": encoding}
    done = subprocess.run([*command], env=env, capture_output=True, encoding=encoding, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Gr??e ?") if argv is CONTINUE else json.loads(done.stdout.splitlines()[-1])


# ---- Wrong use: a status, one line that says what is wrong, and no file is touched ----
REFUSED = [(["--prompt", "Add", "--ckpt", "none.pt"], "none.pt: no checkpoint"),
           ([*DRAFT, "--target", "none.pt"], "none.pt: no checkpoint"),
           (["--prompt", "Add", "--ckpt", "out/eagle3.pt"], "holds a eagle3 checkpoint"),
           (["--prompt", "Add", "--target", "other.pt"], "trained for another target"),
           (["--resume", *SMALL, "--steps", 9, "--target", "other.pt"], "has another target"),
           ([*DRAFT, "--target", "half.pt"], "half.pt --resume"),
           ([*DRAFT, "--target", "other.pt", "--ckpt", "other.pt"], "target"),
           (["--prompt", "Add", "--n_draft_layer", 9], "other settings"),
           ([*DRAFT, "--seq_len", 999], "--seq_len 999 exceeds the target's context"),
           (["--prompt", "Add 1 and 2. " * 60], "at most 63 fit")]
VALUES = ["temperature=-1", "temperature=nan", "top_p=0", "top_p=1.5", "top_k=0", "batch_size=0", "lr=0", "dtype=int8",
          "device=abacus", "device=cuda:99", "no_such_flag=3", "seq_len=63", "block_size=1", "block_size=33"]
DATA = [(name, f"--data {name}: no such file, or fewer than") for name in ("nowhere", "empty.txt", "notes.txt")]
REFUSED = [("dflash", *case) for case in REFUSED + [([f"--{value}"], f"--{value.split('=')[0]}") for value in VALUES]]
REFUSED += [("train", [*SMALL, *SHAPE, "--ckpt", "new.pt", "--data", data], line) for data, line in DATA]
REFUSED += [("train", [*SMALL, *SHAPE, "--train", "--ckpt", "notes.txt"], "notes.txt: no checkpoint"),
            ("train", [*SMALL, *SHAPE, "--n_head", 3, "--ckpt", "new.pt"], "multiple of 16 times --n_head"),
            ("train", SMALL, "out/target.pt exists"), ("train", ["--init", "gpt2"], "out/target.pt exists")]


@pytest.mark.parametrize("name, argv, line", REFUSED)
def test_wrong_use_is_told_in_one_line(world, name, argv, line):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert line in refused(importlib.import_module(name), "--device=cpu", *argv)
    assert before == {path: path.stat().st_mtime_ns for path in Path().rglob("*")}


def test_what_the_readme_names_exists():
    """Linked files, and the files of its commands but the reader's own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"(?:python|diff) ([\w/]+\.py)", text)
    assert len(files) > 10 and not [file for file in files if file != "idea.py" and not (ROOT / file).exists()]
