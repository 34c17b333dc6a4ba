"""A new idea in a folder of its own: trained by its own command, measured by compare.py, tested by the lossless tests,
without a change to the trunk. And an idea that is wrong is caught there."""
import shutil
import subprocess
import sys

import pytest
from cli import ENV, ROOT, SHAPE, SMALL, write_texts

REPORT = ["--data", "data", "--prompts", 1, "--max_new_tokens", 8]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A folder with two ideas, a little text, and a target trained on it."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copy(ROOT / "tests" / "toy.py", folder / "idea.py")
    shutil.copy(ROOT / "tests" / "lookup.py", folder / "copies.py")
    write_texts(folder)
    python(folder, ROOT / "train.py", *SMALL, *SHAPE, "--steps", 20)
    return folder


def python(folder, *argv, ok=True):
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, env=ENV, encoding="utf-8", errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def test_a_new_file_is_trained_and_measured(fork):
    """One that is trained, and one that has nothing to train."""
    assert "identical: 1 of 1" in python(fork, "idea.py", "--train", *SMALL, *REPORT, "--steps", 20)
    assert "identical: 1 of 1" in python(fork, "copies.py", "--bench", "--dtype", "float64", *REPORT)
    results = (ROOT / "tests" / "RESULTS.md").read_bytes()
    out = python(fork, ROOT / "tests" / "compare.py", "idea.py", "copies.py", *REPORT)
    assert "| idea |" in out and "| copies |" in out and results == (ROOT / "tests" / "RESULTS.md").read_bytes()


@pytest.mark.parametrize("name", ["idea", "copies", "cheat"])
def test_a_new_file_is_tested(fork, name):
    """pytest --method FILE: exact drafters pass; one that drafts its likeliest token and reports the softmax fails."""
    if name == "cheat":
        source = (fork / "idea.py").read_text(encoding="utf-8")
        wrong = source.replace("sample(rows[-1]) if probs else", "")
        assert wrong != source
        (fork / "cheat.py").write_text(wrong, encoding="utf-8")
    out = python(fork, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
                 ROOT / "tests" / "test_verify.py", "--method", fork / f"{name}.py", "-k", name, ok=name != "cheat")
    assert (" failed" if name == "cheat" else " passed") in out and "error" not in out.splitlines()[-1]
