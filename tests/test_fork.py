"""A new idea in a folder of its own: trained by its own command, measured by compare.py, tested by the lossless tests, without
a change to the trunk. And a new idea that is wrong is caught there."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A folder with idea.py, lookup.py, a little text, and a target trained on it."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copy(ROOT / "tests" / "toy.py", folder / "idea.py")
    shutil.copy(ROOT / "tests" / "lookup.py", folder / "copies.py")
    (folder / "data").mkdir()
    for i in range(5):
        text = "".join(q + s for q, s, _ in train.math_texts(25, i, False))
        (folder / "data" / f"{i}.txt").write_text(text, encoding="utf-8")
    shape = ["--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--vocab_size", 400]
    python(folder, ROOT / "train.py", *SMALL, *shape)
    return folder


SMALL = ["--data", "data", "--seq_len", 64, "--steps", 20, "--batch_size", 2]


def python(folder, *argv, ok=True):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, env=env, encoding="utf-8", errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def test_a_new_file_is_trained_and_measured(fork):
    report = ["--data", "data", "--prompts", 1, "--max_new_tokens", 8, "--dtype", "float64"]
    assert "identical: 1 of 1" in python(fork, "idea.py", "--train", *SMALL, *report[2:])
    assert "identical: 1 of 1" in python(fork, "copies.py", "--bench", *report)
    out = python(fork, ROOT / "tests" / "compare.py", "idea.py", "copies.py", "--data", "data", "--no-write", "--prompts", 1,
                 "--max_new_tokens", 8)
    assert "| idea |" in out and "| copies |" in out


@pytest.mark.parametrize("name", ["idea", "copies", "cheat"])
def test_a_new_file_is_tested(fork, name):
    """pytest --method FILE runs the lossless tests on it: exact drafters pass, one that drafts its likeliest token and reports the
    softmax as q does not."""
    if name == "cheat":
        source = (fork / "idea.py").read_text(encoding="utf-8")
        wrong = source.replace("sample(rows[-1]) if probs else", "")
        assert wrong != source
        (fork / "cheat.py").write_text(wrong, encoding="utf-8")
    out = python(fork, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
                 ROOT / "tests" / "test_verify.py", "--method", fork / f"{name}.py", "-k", name, ok=name != "cheat")
    assert (" failed" if name == "cheat" else " passed") in out
