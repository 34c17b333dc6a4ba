"""The commands as a user runs them: one smoke test each, wrong use in one line, any console, and the README's links."""
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT

import train

METHODS = ["eagle1", "eagle2", "eagle3", "dflash", "dflash2"]
SMALL = ["--seq_len", "64", "--steps", "6", "--batch_size", "2", "--data", "text"]
REPORT = ["--prompts", "1", "--max_new_tokens", "8", "--dtype", "float64", "--json"]


def start(folder, *argv, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(folder, *argv, code=0, **env):
    process = start(folder, *argv, **env)
    out, err = (text.decode("utf-8", "replace") for text in process.communicate(timeout=300))
    assert process.returncode == code and "Traceback" not in err, out + err
    return out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a little text, a target, and an EAGLE-1 drafter."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text").mkdir()
    for i in range(4):
        text = "".join(q + s for q, s, _ in train.math_texts(30, i, False))
        (folder / "text" / f"{i}.txt").write_text(text, encoding="utf-8")
    run(folder, ROOT / "train.py", *SMALL, "--n_layer", 7, "--n_embd", 32, "--vocab_size", 300)
    run(folder, ROOT / "eagle1.py", "--train", *SMALL, *REPORT)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_trains_reports_and_continues(folder, name):
    if name != "eagle2":  # which runs EAGLE-1's checkpoint as it is
        out, _ = run(folder, ROOT / f"{name}.py", "--train", *SMALL, *REPORT)
        report = json.loads(out.splitlines()[-1])
        assert report["method"] == name and report["results"][0]["equal"] == [1, 1] and "right answers" in out
    out, _ = run(folder, ROOT / f"{name}.py", "--prompt", "Add 1\u2192", "--max_new_tokens", 9, "--verbose", PYTHONIOENCODING="utf-8")
    assert out.startswith("Add 1\u2192") and " drafted, " in out and "tau" in out


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_any_console(folder, encoding):
    """Help, prompts and reports print on consoles that lack their characters."""
    for name in METHODS:
        out, _ = run(folder, ROOT / f"{name}.py", "--help", PYTHONIOENCODING=encoding)
        assert "--max_new_tokens" in out
    run(folder, ROOT / "eagle2.py", "--prompt", "\u2192", "--max_new_tokens", 4, PYTHONIOENCODING=encoding, PYTHONUTF8="1")
    out, _ = run(folder, ROOT / "eagle2.py", "--bench", "--data", "text", *REPORT, PYTHONIOENCODING=encoding)
    assert json.loads(out.splitlines()[-1])["method"] == "eagle2"


@pytest.mark.parametrize("argv, message", [
    (["dflash.py", "--target", "none.pt"], "no checkpoint at none.pt"),
    (["eagle3.py", "--ckpt", "out/eagle1.pt"], "holds a eagle1 checkpoint"),
    (["eagle1.py", "--train", *SMALL, "--ckpt", "out/target.pt"], "overwrite"),
    (["eagle1.py", "--train", *SMALL, "--seq_len", "999"], "exceeds the target's context"),
    (["eagle1.py", "--prompt", "x " * 400], "this target's context takes up to 63"),
    (["eagle1.py", "--temperature", "-1"], "--temperature"),
    (["eagle1.py", "--top_p", "0"], "--top_p"),
    (["eagle1.py", "--batch_size", "0"], "--batch_size"),
    (["eagle1.py", "--device", "gpu"], "--device"),
    (["eagle1.py", "--device", "cuda"], "--device"),
    (["eagle1.py", "--no_such_flag"], "--no_such_flag"),
    (["eagle1.py", "--prompt", ""], "--prompt is empty"),
    (["train.py"], "is there already"),
    (["train.py", "--init", "none.bin"], "--init none.bin"),
])
def test_wrong_use(folder, argv, message):
    """One line that says what to do, and a non-zero status."""
    _, err = run(folder, ROOT / argv[0], *argv[1:], code=2 if message.startswith("--") and "init" not in message else 1)
    assert message in err.splitlines()[-1]


def test_ctrl_c_saves_and_resume_goes_on(folder):
    process = start(folder, ROOT / "train.py", *SMALL[:2], "--steps", 100000, *SMALL[4:], "--ckpt", "out/long.pt", "--n_layer", 2,
                    "--n_embd", 32, "--vocab_size", 300)
    log = folder / "out" / "long.jsonl"
    for _ in range(600):
        time.sleep(0.1)
        if log.exists() and log.stat().st_size:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    done = train.load(folder / "out" / "long.pt", "target")["step"]
    assert process.returncode == 1 and f"interrupted after step {done}" in err.decode()
    run(folder, ROOT / "train.py", "--resume", "--ckpt", "out/long.pt", "--steps", done + 2, "--data", "text")
    assert train.load(folder / "out" / "long.pt", "target")["step"] == done + 2


def test_readme_and_methods():
    """Files that the README links exist, and every method has the names that a method has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link
    for name in METHODS:
        module = importlib.import_module(name)
        assert all(hasattr(module, part) for part in ("Args", "Drafter", "train", "generate", "main"))
