"""Commands as a user runs them, but in this process; and settings that make them small."""
import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch

import train
import verify

ROOT = Path(train.__file__).resolve().parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
SMALL = ["--device", "cpu", "--dtype", "float64", "--data", "data", "--seq_len", 64, "--batch_size", 4]
SHAPE = ["--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--vocab_size", 400]


def problems(n, seed=0):
    return "".join(question + solution for question, solution, _ in train.math_texts(n, seed, False))


def write_texts(folder, n=5):
    """A folder `data` with n files of worked problems."""
    (folder / "data").mkdir()
    for i in range(n):
        (folder / "data" / f"{i}.txt").write_text(problems(25, i), encoding="utf-8")


def run(module, *argv, encoding="utf-8"):
    """`python MODULE.py ARGV` on a console of this encoding -> (status or last line, stdout, stderr)."""
    streams, status = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)], 0
    handler, keep_drafts = signal.getsignal(signal.SIGINT), verify.Session.keep_drafts
    argv = [f"{module.__name__}.py", *map(str, argv)]
    with (mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(streams[0]),
          contextlib.redirect_stderr(streams[1])):
        try:
            module.main()
        except SystemExit as stopped:
            status = stopped.code or 0
            if isinstance(status, str):
                print(status, file=sys.stderr)  # as Python does
        finally:
            signal.signal(signal.SIGINT, handler)
            verify.Session.keep_drafts = keep_drafts
            torch.set_flush_denormal(False)
            for stream in streams:
                stream.flush()
    return status, *(stream.buffer.getvalue().decode(encoding) for stream in streams)


def refused(module, *argv):
    """The one line with which a command refuses: sys.exit's, or the last one of argparse."""
    status, _, err = run(module, *argv)
    assert status, f"{module.__name__}.py accepts {argv}"
    line = err.strip().split("\n")[-1] if status == 2 else status.strip()
    assert line and "\n" not in line and "Traceback" not in err
    return line


def tensors(path):
    """All tensors of a checkpoint's weights and of its optimizer."""
    saved = torch.load(path, weights_only=True)
    states = saved["optimizer"]["state"].values()
    return [*saved["model"].values(), *(value for state in states for value in state.values())]
