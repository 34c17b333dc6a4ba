"""A new idea in a folder of its own: trained by its own command, measured by compare.py, tested by the lossless tests, without a
change to the trunk. And a new idea that is wrong is caught there."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent
LOSSLESS = "test_law_of_the_methods or test_methods_are_plain_decoding or test_methods_in_a_small_target or exactly"


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A folder with idea.py, some text, and nothing else."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copy(ROOT / "tests" / "toy.py", folder / "idea.py")
    (folder / "data").mkdir()
    for i in range(5):
        (folder / "data" / f"{i}.txt").write_text("".join(q + s for q, s, _ in train.math_texts(25, i, False)))
    return folder


def python(folder, *argv):
    return subprocess.run([sys.executable, *map(str, argv)], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def test_a_new_file_is_trained_and_measured(fork):
    """train.py, idea.py --train, compare.py idea.py: all in the new folder."""
    small = ["--data", "data", "--seq_len", 64, "--steps", 20, "--batch_size", 2]
    done = python(fork, ROOT / "train.py", *small, "--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--vocab_size", 400)
    assert done.returncode == 0, done.stdout
    done = python(fork, "idea.py", "--train", *small, "--prompts", 1, "--max_new_tokens", 8)
    assert done.returncode == 0 and "greedy output identical: 1 of 1" in done.stdout, done.stdout
    before = {f: f.read_bytes() for f in [ROOT / "README.md", *(ROOT / ".github").rglob("*.png")]}
    done = python(fork, ROOT / "tests" / "compare.py", "idea.py", "--data", "data", "--no-write", "--prompts", 2, "--max_new_tokens", 8)
    assert done.returncode == 0 and "| idea |" in done.stdout and "idea 2 of 2" in done.stdout, done.stdout
    assert before == {f: f.read_bytes() for f in before}


@pytest.mark.parametrize("honest", [True, False])
def test_a_new_file_is_tested(fork, honest):
    """pytest --method idea.py runs the lossless tests on it: an exact drafter passes, one that draws its likeliest token and
    reports the softmax as q does not."""
    source = (fork / "idea.py").read_text()
    file = fork / ("honest.py" if honest else "cheat.py")
    file.write_text(source if honest else source.replace("sample(rows[-1]) if law else", ""))
    assert honest or file.read_text() != source
    done = python(fork, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", ROOT / "tests" / "test_verify.py", "--method", file,
                  "-k", f"{file.stem} and ({LOSSLESS})")
    assert (done.returncode == 0) == honest and (" passed" if honest else " failed") in done.stdout, done.stdout
