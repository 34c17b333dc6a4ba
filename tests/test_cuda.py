"""On real GPUs (not yet run on one): captured rounds give the text of eager rounds, and an eager round waits for the
device once. What can be checked without a GPU is in test_fake_cuda.py."""
import importlib

import pytest
import torch
from helpers import a_round

import verify
from model import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
METHODS = (None, "eagle1", "eagle2", "eagle3", "dflash", "dflash2")
second = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")


def networks(name, device, dtype):
    """[target, drafter] with random weights; so few tokens that drafts are accepted now and then."""
    torch.manual_seed(0)
    target = GPT(GPTConfig(128, 9, 8, 2, 32))
    method = importlib.import_module(name) if name else None
    modules = [target, method.Drafter(target.config, method.Args())] if name else [target]
    for p in (p for module in modules for p in module.parameters()):
        p.data += 0.3 * torch.randn_like(p)
    return [module.to(device, dtype).eval() for module in modules]


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=second)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_captured_equals_eager(name, temperature, dtype, device, monkeypatch):
    """The same text for the same seed, round by round, in two generations in a row."""
    generate = importlib.import_module(name).generate if name else verify.autoregressive
    modules, capture, captures, texts = networks(name, device, dtype), verify.capture, [], []
    monkeypatch.setattr(verify, "capture", lambda *a: captures.append(a) or capture(*a))
    with torch.cuda.device(device):  # as train.parse sets it
        for captured in (False, True):
            given = property(lambda session, captured=captured: captured, lambda session, value: None)
            monkeypatch.setattr(verify.Session, "capture", given, raising=False)
            for seed, prompt in enumerate(([1, 2, 3], [5] * 20)):
                torch.manual_seed(seed)
                record = generate(*modules, prompt, 200, temperature)
                texts.append((record.tokens, record.rounds))
    assert texts[:2] == texts[2:] and len(captures) == (4 if name else 2)
    assert [len(tokens) for tokens, _ in texts[:2]] == [128 - 3, 128 - 20]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS[1:])
def test_an_eager_round_synchronises_once(name, temperature):
    """Nothing before the read of its new tokens waits for the device; the read does."""
    target, drafter = networks(name, "cuda", torch.bfloat16)
    session, _, draft, verify_ = a_round(name, target, device="cuda", temperature=temperature, drafter=drafter)
    with torch.inference_mode():
        verify_(draft())  # caches are filled
        torch.cuda.set_sync_debug_mode("error")
        try:
            verify_(draft())
            with pytest.raises(RuntimeError):
                session.new_tokens.tolist()
        finally:
            torch.cuda.set_sync_debug_mode("default")
