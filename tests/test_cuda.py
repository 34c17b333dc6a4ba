"""On a real GPU: rounds that are captured as graphs write the text of eager rounds. Skipped without one; not yet run on one."""
import importlib

import pytest
import torch
from helpers import METHODS, a_round, tiny

import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; test_fake_cuda.py goes as far as a CPU can")
DEVICES = [f"cuda:{i}" for i in range(min(2, torch.cuda.device_count()))]


def text(name, device, dtype, temperature, captured, monkeypatch):
    """Tokens of one generation, with rounds replayed from graphs or run eagerly."""
    torch.cuda.set_device(device)
    target = tiny(64, 128, n_layer=8).to(device, dtype)
    run = verify.Session.run
    monkeypatch.setattr(verify.Session, "run", lambda s, *f: (setattr(s, "capture", captured), run(s, *f))[1])
    torch.manual_seed(0)
    if name is None:
        return verify.autoregressive(target, [1, 2, 3], 100, temperature).tokens
    method = importlib.import_module(name)
    torch.manual_seed(1)
    drafter = method.Drafter(target.config, method.Args(seq_len=128)).to(device, dtype).eval()
    torch.manual_seed(2)
    return method.generate(target, drafter, [1, 2, 3], 100, temperature).tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [None, *METHODS])
def test_captured_text_is_eager_text(name, temperature, dtype, device):
    texts = []
    for captured in (False, True):
        with pytest.MonkeyPatch.context() as m:
            texts.append(text(name, device, dtype, temperature, captured, m))
    assert texts[0] == texts[1] and len(texts[0]) == 100


@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_an_eager_round_does_not_synchronise(name):
    """Up to its one read: draft and verification never wait for the device."""
    target = tiny(64, 128, n_layer=8).to("cuda")
    _, _, draft, check = a_round(name, target, device="cuda")
    check(draft())
    torch.cuda.set_sync_debug_mode("error")
    try:
        check(draft())
    finally:
        torch.cuda.set_sync_debug_mode("default")
