"""The weights that travel with the repository: what they draft is recorded, so that a change that costs acceptance is
seen without training anything; and their law."""
import importlib
from functools import cache, partial

import compare
import pytest
import torch

import train
import verify

PROMPTS = [question for question, _, _ in train.math_texts(2, 99, True)] + [
    'def area(width, height):\n    """', "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def ",
    "Return the number of ", "This module provides a class that reads files and "]
# τ of six greedy texts of 64 tokens, by method.
GOLDEN = {"eagle1": 3.94, "eagle2": 3.98, "eagle3": 4.91, "dflash": 3.60, "dflash2": 4.06}
plain, exact_law = cache(verify.autoregressive), cache(compare.exact_law)  # the same for all methods


@pytest.fixture(scope="module")
def target():
    return train.load_target(compare.ROOT / "weights" / "target.pt", "cpu", torch.float64)


@pytest.fixture(params=GOLDEN)
def method(request, target):
    """(its name, generate with the shipped drafter)."""
    module = importlib.import_module(request.param)
    path = str(compare.ROOT / "weights" / f"{module.Drafter.name}.pt")
    drafter = compare.load_drafter(module, target, ckpt=path)
    return request.param, partial(module.generate, target, drafter.double())


def test_tau_is_the_recorded_one(target, method):
    """To 2 %; in float64 greedy text equals plain decoding."""
    (name, generate), rounds = method, []
    for prompt in PROMPTS:
        tokens = tuple(target.enc.encode_ordinary(prompt))
        record = generate(tokens, 64)
        assert record.tokens == plain(target, tokens, 64).tokens
        rounds += record.rounds
    assert sum(r.kept for r in rounds) / len(rounds) == pytest.approx(GOLDEN[name], rel=0.02)


def test_law_of_the_shipped_drafters(target, method):
    """Four tokens at T = 1, each among the three likeliest: a chi-square test of 120 texts against their exact law."""
    prompt = tuple(target.enc.encode_ordinary(PROMPTS[4]))
    assert compare.law_test(method[1], prompt, exact_law(target, prompt), 120) > 1e-6  # the rate of false alarms
