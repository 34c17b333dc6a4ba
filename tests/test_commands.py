"""Every command file from the outside: the whole path at a tiny size, and every kind of wrong use."""
import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train
import verify

ROOT = Path(__file__).resolve().parents[1]
MODULES = [importlib.import_module(f.stem) for f in sorted(ROOT.glob("*.py"))]
COMMANDS = [m for m in MODULES if hasattr(m, "main") and hasattr(m, "Args")]
METHODS = [m for m in COMMANDS if hasattr(m, "Drafter")]
every_command = pytest.mark.parametrize("module", COMMANDS, ids=lambda m: m.__name__)
every_method = pytest.mark.parametrize("module", METHODS, ids=lambda m: m.__name__)

TARGET = ["--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--seq_len", "64", "--vocab_size", "400", "--steps", "30",
          "--batch_size", "4", "--data", "data"]
DRAFTER = ["--train", "--seq_len", "64", "--steps", "3", "--batch_size", "2", "--data", "data", "--prompts", "2", "--max_new_tokens", "12"]


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Tests change folders and what is in them: no corpus is kept from one to the next."""
    for f in vars(train).values():
        if hasattr(f, "cache_clear"):
            f.cache_clear()


def run(module, *argv):
    """`python MODULE.py ARGV` in this process -> (exit status, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [f"{module.__name__}.py", *map(str, argv)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train.command(module.main)
        except SystemExit as stopped:
            code = stopped.code
    return code, out.getvalue(), err.getvalue()


def one_line(err):
    """The single line on stderr beside progress bars, which end in a carriage return or hold a rate."""
    lines = [line.split("\r")[-1].strip() for line in err.split("\n")]
    lines = [line for line in lines if line and not re.search(r"\d+%\||\dit \[|[\d?](it|B|s)/(s|it)", line)]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def files(folder="."):
    """Every file below a folder, with what would tell that it was written to."""
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in Path(folder).rglob("*") if f.is_file()}


def own_checkpoint(module):
    return f"out/{module.Drafter.kind if module in METHODS else 'target'}.pt"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A working folder with text, a trained target, and every method's drafter; {method: (status, stdout, stderr) of its training}."""
    folder, before = tmp_path_factory.mktemp("world"), os.getcwd()
    os.chdir(folder)
    (folder / "data").mkdir()
    for i in range(5):
        (folder / "data" / f"{i}.txt").write_text("".join(q + s for q, s, _ in train.math_texts(25, i, False)))
    code, _out, err = run(train, *TARGET)
    assert code == 0, err
    assert run(train, *TARGET, "--steps", 1, "--seed", 9, "--ckpt", "other.pt")[0] == 0
    reports = {}
    for module in METHODS:
        try:
            reports[module.__name__] = run(module, *DRAFTER, "--json")
        except Exception:  # noqa: BLE001  # one broken method does not take the tests of all others with it
            reports[module.__name__] = 1, "", traceback.format_exc()
    (folder / "notes.txt").write_text("Notes, and nothing else.\n")
    (folder / "empty.txt").write_text("")
    (folder / "hollow").mkdir()
    (folder / "binary").mkdir()
    (folder / "binary" / "x.bin").write_bytes(bytes(range(256)))
    torch.save([1, 2], folder / "foreign.pt")
    for checkpoint in (folder / "out").glob("*.pt"):
        raw = checkpoint.read_bytes()
        (folder / f"cut-{checkpoint.name}").write_bytes(raw[:len(raw) // 2])
    yield reports
    os.chdir(before)


# ---------------------------------------------------------------------------------------------------------------------
# The whole path
# ---------------------------------------------------------------------------------------------------------------------
def check_report(result, module, temperature):
    """A report's keys, and that its numbers agree with each other."""
    assert {"method", "device", "dtype", "temperature", "draft_ms", "verify_ms", "ar_ms", "greedy_equal", "domains"} <= set(result)
    assert (result["method"], result["device"], result["dtype"], result["temperature"]) == (module.__name__, "cpu", "float32", temperature)
    assert result["greedy_equal"] == ([2, 2] if temperature == 0 else None)
    assert list(result["domains"]) == ["text"] and min(result[k] for k in ("draft_ms", "verify_ms", "ar_ms")) > 0
    d = result["domains"]["text"]
    assert {"prompts", "new_tokens", "target_passes", "tau", "n_alpha", "tok_s", "ar_tok_s", "speedup", "repetition"} <= set(d)
    assert d["prompts"] == 2 and 2 < d["new_tokens"] <= 24
    assert d["tau"] * d["target_passes"] == pytest.approx(d["new_tokens"] - d["prompts"], abs=0.1)  # the first token is prefill's
    assert d["speedup"] == pytest.approx(d["tok_s"] / d["ar_tok_s"], rel=0.02)
    assert 0 <= d["repetition"] <= 1 and all(0 <= a <= 1 for a in d["n_alpha"])


@every_method
def test_train_reports_and_ends_in_json(world, module):
    """--train --json: trains, measures at T = 0 and 1, and the last line is one JSON object."""
    code, out, err = world[module.__name__]
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    check_report(result, module, 0)
    check_report(result["at_temperature_1"], module, 1)
    losses = [json.loads(line) for line in Path(own_checkpoint(module)).with_suffix(".jsonl").read_text().splitlines()]
    assert losses[-1]["step"] == 3 and losses[-1]["loss"] > 0


@every_method
def test_bench_measures_the_trained_drafter_as_told(world, module):
    """--bench --json with sampling controls: that temperature alone; nothing is written."""
    before = files()
    code, out, err = run(module, "--bench", "--json", "--temperature", 0.7, "--top_k", 20, "--top_p", 0.9, "--prompts", 2,
                         "--max_new_tokens", 12, "--data", "data")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    check_report(result, module, 0.7)
    assert not [key for key in result if key.startswith("at_temperature")] and files() == before


@every_method
def test_prompt_continues_as_the_target_would(world, module):
    """--prompt: the text is the target's own greedy one, marks aside, and --verbose accounts for every token of it."""
    target = train.target_from(train.load("out/target.pt", "target"), "cpu")
    enc = train.encoding(target.tokenizer)
    prompt = enc.encode_ordinary("Question: Add 12")
    plain = verify.autoregressive(target, prompt, 20, stop=(enc.eot_token,)).tokens
    code, out, err = run(module, "--prompt", "Question: Add 12", "--max_new_tokens", 20, "--verbose")
    assert code == 0 and out.startswith("Question: Add 12"), err
    text, *rounds = re.split(r"\n(?=round \d+: )", out)
    assert re.sub(r"[\[\]]", "", text) == re.sub(r"[\[\]]", "", enc.decode(prompt + plain))
    rounds[-1], last = rounds[-1].split("\n", 1)
    numbers = [re.fullmatch(r"round (\d+): drafted up to (\d+) deep; accepted (\d+): \[.*\]; the target adds \[.*\]", r).groups() for r in rounds]
    assert [int(i) for i, _, _ in numbers] == list(range(1, len(rounds) + 1)) and all(int(a) <= int(d) for _, d, a in numbers)
    tau = float(re.search(r"tau ([\d.]+)", last)[1])
    assert tau == pytest.approx((len(plain) - 1) / len(rounds), abs=0.01) and "equal to plain decoding: True" in last
    marks = sum(int(a) > 0 for _, _, a in numbers)
    assert ("[" in text) == (marks > 0)


@every_method
def test_the_same_seed_gives_the_same_text(world, module):
    """--seed decides all that is random in a continuation."""
    def text(seed):
        code, out, err = run(module, "--prompt", "Question: ", "--temperature", 1, "--max_new_tokens", 25, "--seed", seed)
        assert code == 0, err
        return out.split("\n\n(marked")[0]
    assert text(3) == text(3) != text(4)


def fake_decoding():
    """A record of two rounds: 'a' from prefill, 'bc' drafted and 'd' added, then 'e' added alone; and its tokenizer."""
    enc = train.encoding({"ranks": [bytes([b]).decode("latin-1") for b in range(256)]})
    record = verify.Record(tokens=list(b"abcde"), from_draft=[False, True, True, False, False], rounds=[(4, 2), (4, 0)], committed=[3, 1],
                           seconds={"prefill": 1.0, "draft": 1.0, "verify": 1.0, "rounds": 2.0})
    return record, enc


def test_marks_show_who_wrote_what(capsys, monkeypatch):
    """Drafted and accepted tokens stand in brackets without a terminal and in green on one; --verbose has one line a round."""
    record, enc = fake_decoding()
    assert train.marked(record, enc) == "a[bc]de" and train.marked(record, enc, colour=True) == "a\033[32mbc\033[0mde"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert train.marked(record, enc) == "a\033[32mbc\033[0mde"
    monkeypatch.undo()
    monkeypatch.setattr(verify, "autoregressive", lambda *_: record)
    target = SimpleNamespace(config=SimpleNamespace(max_seq_len=64))
    args = SimpleNamespace(max_new_tokens=5, temperature=0, top_k=None, top_p=None, seed=0, verbose=True)
    train.show(SimpleNamespace(generate=lambda *_: record), args, target, None, enc, list(b"xyz"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["xyza[bc]de", "round 1: drafted up to 4 deep; accepted 2: ['b', 'c']; the target adds ['d']",
                         "round 2: drafted up to 4 deep; accepted 0: []; the target adds ['e']"]
    assert "tau 2.00" in lines[-1] and "speedup 1.00" in lines[-1]


def test_right_answers_are_counted_with_and_without_drafting(monkeypatch, capsys):
    """On math the report counts solutions that end in the right answer, for both ways of decoding."""
    _, enc = fake_decoding()
    texts = train.math_texts(6, 99, True)
    solutions = [list(s.encode()) for _, s, _ in texts]
    given = [(verify.Record(tokens=s if i % 2 else s[:-1]), verify.Record(tokens=s if i == 3 else list(b"\nAnswer: no idea\n")))
             for i, s in enumerate(solutions)]
    ones = dict.fromkeys(("tau", "ar_tok_s", "tok_s", "speedup", "draft_ms", "verify_ms", "ar_ms"), 1)
    measured = {**ones, "prompts": 6, "equal": 6, "speedup_quartiles": [1, 1, 1], "repetition": 0, "n_alpha": []}
    monkeypatch.setattr(verify, "measure", lambda *_: (dict(measured), given))
    data = SimpleNamespace(enc=enc, prompts=lambda n, seed: {"math": [(list(q.encode()), a) for q, _, a in texts]})
    args = train.Args(prompts=6)
    args.given, args.name = set(), "some"
    method = SimpleNamespace(generate=lambda *_: None)
    target = SimpleNamespace(config=SimpleNamespace(max_seq_len=2000))
    result = train.report(method, args, target, None, data)
    math = result["domains"]["math"]
    assert (math["right_answers"], math["right_answers_plain"], math["prompts"]) == (3, 1, 6)
    assert "3 / 1 of 6" in capsys.readouterr().out


@every_method
def test_a_missing_target_is_trained_first(world, module, tmp_path, monkeypatch):
    """--train without a target says that it trains one, does, and then trains the drafter."""
    @dataclass
    class Small(train.Args):
        steps: int = train.flag(2, "")
        seq_len: int = train.flag(64, "")
        n_layer: int = train.flag(2, "")
        n_head: int = train.flag(2, "")
        n_embd: int = train.flag(32, "")
        vocab_size: int = train.flag(330, "")
    monkeypatch.setattr(train, "Args", Small)
    data = Path("data").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "report", lambda *_: {})
    code, out, err = run(module, *DRAFTER, "--data", data)
    assert code == 0 and "training it first" in out, err
    assert {f.name for f in Path("out").glob("*.pt")} == {"target.pt", f"{module.Drafter.kind}.pt"}


@every_method
def test_a_drafter_holds_nothing_of_its_target(world, module):
    """The checkpoint loads with weights_only, its keys carry no wrapper's prefix, and neither embedding nor head is in it."""
    checkpoint = torch.load(own_checkpoint(module), weights_only=True)
    target = torch.load("out/target.pt", weights_only=True)
    assert checkpoint["target"] == target["fingerprint"] and checkpoint["step"] == 3
    of_target = [w for w in target["model"].values() if w.dim() == 2]
    for name, w in checkpoint["model"].items():
        assert not re.search(r"^module\.|_orig_mod|target|wte|lm_head", name)
        assert not any(w.equal(theirs) for theirs in of_target), name


@every_command
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(world, module, tmp_path, monkeypatch):
    """Ctrl-C in the second of four steps, then --resume: weights and optimiser state are those of a run without a break, bit by bit."""
    base = [*(DRAFTER if module in METHODS else TARGET), "--steps", 4, "--seed", 5]
    monkeypatch.setattr(train, "report", lambda *_: {})
    monkeypatch.setattr(train, "show", lambda *_: None)
    whole, broken, batch = tmp_path / "whole.pt", tmp_path / "broken.pt", train.Data.batch
    assert run(module, *base, "--ckpt", whole)[0] == 0
    if module is train:
        monkeypatch.setattr(train, "held_out_loss", lambda *_, **__: {})

    def interrupted(self, step, *rest, **named):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step, *rest, **named)
    with monkeypatch.context() as patched:
        patched.setattr(train.Data, "batch", interrupted)
        code, _, err = run(module, *base, "--ckpt", broken)
    assert code not in (0, None) and "--resume" in one_line(err) and train.load(broken, torch.load(broken)["kind"])["step"] == 2
    code, _, err = run(module, "--resume", "--ckpt", broken)  # it goes on with the settings it began with
    assert code == 0, err
    a, b = (torch.load(f, weights_only=True) for f in (whole, broken))
    assert a["step"] == b["step"] == 4 and a["args"] == {**b["args"], "ckpt": a["args"]["ckpt"], "resume": False} | (
        {k: a["args"][k] for k in ("target", "prompts", "max_new_tokens", "train") if k in a["args"]})
    assert all(w.equal(b["model"][k]) for k, w in a["model"].items())
    for ours, theirs in zip(a["optimiser"], b["optimiser"]):
        for i, state in ours["state"].items():
            assert all(torch.as_tensor(v).equal(torch.as_tensor(theirs["state"][i][k])) for k, v in state.items())


@every_command
def test_help_lists_every_flag(module):
    """--help ends well and names all flags; the common ones are in every command."""
    code, out, _ = run(module, "--help")
    assert code == 0 and all(re.search(rf"--{f.name}\b", out) for f in fields(module.Args))
    assert {f.name for f in fields(train.CommonArgs)} | {"steps", "batch_size", "seq_len", "lr"} <= {f.name for f in fields(module.Args)}


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use: a status that is not 0, one line on stderr that says what is wrong, no traceback, no file
# ---------------------------------------------------------------------------------------------------------------------
def refuse(module, *argv):
    """Runs a command that has to refuse; returns its one line."""
    before = files()
    code, _, err = run(module, *argv)
    assert code not in (0, None), f"accepted {argv}"
    assert files() == before and not Path("nowhere").exists()
    line = one_line(err)
    assert line.startswith(f"{module.__name__}.py: ") and len(line) > len(module.__name__) + 15
    return line


WRONG = {  # what the line has to name: flags that it is about
    "--prompt": ["--prompt="], "--temperature": [f"--temperature={v}" for v in ("-1", "nan", "inf", "warm")] + ["--temperature"],
    "--top_p": [f"--top_p={v}" for v in ("0", "1.5", "nan", "-0.1")], "--top_k": [f"--top_k={v}" for v in ("0", "-3", "2.5")],
    "--device": ["--device=abacus", "--device=meta"], "CUDA": ["--device=cuda", "--device=cuda:7"], "--dtype": ["--dtype=int8"],
    "--max_new_tokens": ["--max_new_tokens=-1", "--max_new_tokens=many"], "--steps": [f"--steps={v}" for v in ("0", "-5", "2.5")],
    "--batch_size": ["--batch_size=0"], "--seq_len": ["--seq_len=0", "--seq_len=1", "--data=notes.txt"],
    "--lr": [f"--lr={v}" for v in ("0", "-1", "nan")], "--prompts": ["--prompts=0"], "--seed": ["--seed=x", f"--seed={10**22}"],
    "--n_embd": ["--n_embd=33 --n_head=3", "--n_embd=20 --n_head=4"], "--banana": ["--banana", "--banana=3"], "--temp": ["--temp=1"], "--max_new": ["--max_new=3"], "--see": ["--see=1"], "--tra": ["--tra"],
    "hello": ["hello"], "--text": ["--text=novel", "--text="], "--data": ["--data="], "nowhere": ["--data=nowhere"], "empty.txt": ["--data=empty.txt"],
    "hollow": ["--data=hollow"], "binary": ["--data=binary", "--data=binary/x.bin"],
    "--ckpt data": ["--ckpt=data"], "--ckpt notes.txt": ["--ckpt=notes.txt/x.pt"],
    "--resume": ["--resume --ckpt=nowhere/x.pt"], "foreign.pt": ["--resume --ckpt=foreign.pt"],
}


@every_command
@pytest.mark.parametrize("word, flags", [(word, flags) for word, variants in WRONG.items() for flags in variants])
def test_wrong_values_are_refused(world, module, word, flags, monkeypatch):
    """A value that makes no sense, an unknown or shortened flag, text that cannot be had: refused before anything is trained."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    base = [*(DRAFTER if module in METHODS else TARGET), "--ckpt", "nowhere/new.pt"]
    assert word in refuse(module, *base, *flags.split(" "))


@every_command
def test_flags_that_would_do_nothing_are_refused(world, module):
    """A flag is obeyed or refused, never passed over in silence."""
    idle = ["--bench", "--json", "--verbose", "--prompts=3"] if module not in METHODS else [
        "--json", "--prompt=Add --json", "--prompt=Add --bench", "--steps=3", "--bench --lr=0.1", "--prompt=Add --batch_size=2"]
    for f in fields(module.Args):  # what a checkpoint was trained with cannot be changed afterwards
        if module in METHODS and f.name not in train.CommonArgs.__dataclass_fields__ and f.metadata["trained"] and not f.metadata["redraft"]:
            value = "" if f.type is bool else "=out/x.pt" if f.type is str else f"={f.default}"
            idle += [f"--bench --{f.name}{value}"]
    for flags in idle:
        assert flags.split()[-1].split("=")[0] in refuse(module, *flags.split())


@every_command
def test_training_does_not_overwrite_what_is_of_another_kind(world, module):
    """--ckpt with the target's checkpoint, a drafter's of another kind, a foreign file, a text."""
    other = own_checkpoint(METHODS[0] if module is not METHODS[0] and module.__name__ != "eagle2" else METHODS[-1])
    for which in (["out/target.pt"] if module in METHODS else []) + [other, "foreign.pt", "notes.txt"]:
        assert which in refuse(module, *(DRAFTER if module in METHODS else TARGET), "--ckpt", which)


@pytest.mark.parametrize("module", [m for m in METHODS if hasattr(m.Args, "init_from")], ids=lambda m: m.__name__)
def test_a_start_from_a_drafter_of_another_target_or_depth_is_refused(world, module, tmp_path):
    """--init_from: weights that would load, or load in part, but belong to something else."""
    whole = torch.load("out/dflash.pt", weights_only=True)
    part = {k: w for k, w in whole["model"].items() if not k.startswith("layers.2.")}
    for name, changed, word in (("other", {"target": "0" * 16}, "another target"), ("part", {"model": part}, "another shape")):
        torch.save({**whole, **changed}, tmp_path / f"{name}.pt")
        assert word in refuse(module, *DRAFTER, "--ckpt", "nowhere/new.pt", "--init_from", tmp_path / f"{name}.pt")


@every_command
def test_every_flag_of_its_own_has_bounds(world, module):
    """No integer below its least value, no float that is negative or no number, in any flag of any command."""
    for f in fields(module.Args):
        if f.type is int and f.name != "seed":
            least = f.metadata["least"]
            assert f"--{f.name} " in refuse(module, "--prompt", "Add", f"--{f.name}={least - 1}")
        if f.type is float:
            for value in ("-0.5", "nan", "inf"):
                assert f"--{f.name} " in refuse(module, "--prompt", "Add", f"--{f.name}={value}")


@every_command
@pytest.mark.parametrize("which, word", [("nowhere/x.pt", "no checkpoint"), ("foreign.pt", "foreign.pt"), ("notes.txt", "notes.txt"),
                                         ("empty.txt", "empty.txt"), ("cut", "cut short"), ("wrong kind", "holds a")])
def test_checkpoints_that_are_none_are_refused(world, module, which, word):
    """Missing, foreign, a text, an empty file, cut short, of another kind."""
    own = Path(own_checkpoint(module)).name
    other = "out/target.pt" if module in METHODS else own_checkpoint(METHODS[0])
    which = {"cut": f"cut-{own}", "wrong kind": other}.get(which, which)
    assert word in refuse(module, "--prompt", "Add", "--ckpt", which)


@every_method
@pytest.mark.parametrize("which, word", [("nowhere/x.pt", "no target"), ("foreign.pt", "foreign.pt"), ("notes.txt", "notes.txt"),
                                         ("cut-target.pt", "cut short"), ("own", "holds a"), ("other.pt", "another target")])
def test_targets_that_are_none_are_refused(world, module, which, word):
    """The same for --target, and a target that the drafter was not trained for."""
    own = own_checkpoint(module)
    assert word in refuse(module, "--prompt", "Add", "--ckpt", own, "--target", own if which == "own" else which)


@pytest.mark.parametrize("module", [m for m in METHODS if hasattr(m.Args, "init_from")], ids=lambda m: m.__name__)
@pytest.mark.parametrize("which", ["nowhere/x.pt", "foreign.pt", "notes.txt", "cut-target.pt", "out/target.pt", "out/eagle1.pt"])
def test_starts_from_what_is_no_drafter_of_its_like_are_refused(world, module, which):
    """--init_from: missing, foreign, damaged, the target, a drafter of another method."""
    assert which in refuse(module, *DRAFTER, "--ckpt", "nowhere/new.pt", "--init_from", which)


def test_a_trained_target_is_not_overwritten_in_passing(world):
    """train.py where a target is already: it asks for --train, --resume or --prompt, and leaves the file alone."""
    before = Path("out/target.pt").read_bytes()
    assert "--resume goes on" in refuse(train, "--data", "data", "--steps", 3)
    assert Path("out/target.pt").read_bytes() == before


@every_method
def test_a_target_that_is_half_trained_is_not_drafted_for(world, module, tmp_path):
    """A target that was interrupted, by Ctrl-C or a kill: the line says how to finish it."""
    whole = torch.load("out/target.pt", weights_only=True)
    torch.save({**whole, "step": 3}, tmp_path / "half.pt")
    assert "--resume finishes it" in refuse(module, *DRAFTER, "--target", tmp_path / "half.pt", "--ckpt", "nowhere/new.pt")


def test_a_drafter_reads_the_text_of_its_target(world, tmp_path):
    """Without --data a drafter trains, and reports, on what the target was trained on."""
    argv = [a for a in DRAFTER if a not in ("--data", "data")]
    code, out, err = run(METHODS[0], *argv, "--ckpt", tmp_path / "new.pt")
    assert code == 0 and torch.load(tmp_path / "new.pt", weights_only=True)["args"]["data"] == "data" and "\ntext " in out, err


@every_method
def test_a_drafter_does_not_go_on_with_another_target(world, module):
    """--resume refuses a target that the checkpoint was not trained for."""
    argv = "--resume", "--steps", 9, "--ckpt", own_checkpoint(module), "--target", "other.pt", "--data", "data"
    assert "another target" in refuse(module, *argv)


@every_command
def test_resuming_what_is_complete_or_of_another_shape_is_refused(world, module):
    """--resume with all steps done asks for more; with settings of other shapes it says so."""
    assert "--steps" in refuse(module, "--resume", "--ckpt", own_checkpoint(module))
    if module is train:
        assert "other settings" in refuse(module, "--resume", "--steps", 99, "--n_layer", 3)


@every_command
def test_prompts_longer_than_the_context_are_refused(world, module):
    """A prompt has to leave room for one token; the line states both numbers."""
    line = refuse(module, "--prompt", "Add 1 and 2. " * 60, "--ckpt", own_checkpoint(module))
    assert "64" in line and re.search(r"has \d{3} tokens", line)


@every_method
def test_sequences_longer_than_the_context_are_refused(world, module):
    """--seq_len beyond the target's context."""
    assert "--seq_len" in refuse(module, *DRAFTER, "--seq_len", 4096, "--ckpt", "nowhere/x.pt")


@every_method
def test_bench_refuses_text_that_is_too_short(world, module):
    """--bench needs held-out text of one sequence."""
    assert "--seq_len" in refuse(module, "--bench", "--data", "notes.txt")


@every_method
@pytest.mark.parametrize("value", [0, 1, 70])
def test_extreme_settings_work_or_are_refused(world, module, value, tmp_path, monkeypatch):
    """A method's own integers at 0 where that means something, at 1, and beyond the sequence: it trains and decodes, or says in one
    line why it cannot."""
    common = {f.name for f in fields(train.CommonArgs)} | {"steps", "batch_size", "seq_len"}
    monkeypatch.setattr(train, "report", lambda method, args, target, drafter, data: method.generate(target, drafter, [5, 6], 3) and {})
    for f in fields(module.Args):
        if f.type is int and f.name not in common and value >= f.metadata["least"]:
            code, _, err = run(module, *DRAFTER, "--steps", 1, f"--{f.name}={value}", "--ckpt", tmp_path / f"{f.name}.pt")
            if code:
                assert value and f"--{f.name}" in one_line(err)
            else:
                assert (tmp_path / f"{f.name}.pt").exists()


# ---------------------------------------------------------------------------------------------------------------------
# As real processes
# ---------------------------------------------------------------------------------------------------------------------
def process(*argv):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_real_process_continues_a_prompt(world):
    """python train.py --prompt: status 0, the text on stdout, nothing on stderr."""
    done = process(ROOT / "train.py", "--prompt", "Question: Add", "--max_new_tokens", 8)
    assert done.returncode == 0 and done.stdout.startswith("Question: Add") and done.stderr == ""


def test_a_real_process_measures(world):
    """python dflash.py --bench --json: the report under the method's own name, from a file that runs as __main__."""
    done = process(ROOT / "dflash.py", "--bench", "--json", "--prompts", 2, "--max_new_tokens", 12, "--data", "data")
    assert done.returncode == 0, done.stderr
    check_report(json.loads(done.stdout.splitlines()[-1]), sys.modules["dflash"], 0)


def test_a_real_process_refuses_in_one_line(world):
    """Wrong use of a command started as a process: status 1, one line on stderr, nothing on stdout."""
    done = process(ROOT / "dflash.py", "--prompt", "x", "--ckpt", "foreign.pt")
    assert done.returncode == 1 and done.stdout == "" and "foreign.pt" in one_line(done.stderr)
