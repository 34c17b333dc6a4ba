"""Rounds as CUDA runs them, without a GPU. On the device: fake tensors that say they are on CUDA; fails where a round
mixes devices or dtypes, reads a tensor on the host, copies from it, or has shapes that depend on data. Captured: the
operations of draft() and verify(tree) are recorded, with their tensors, and a replay runs them again on the same
storages, without the methods' Python; the text has to be that of eager rounds."""
import ctypes
import importlib
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import build, operations, tiny
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model
import verify

EAGLES, BLOCKS, TOP = ("eagle1", "eagle2", "eagle3"), ("dflash", "dflash2"), {"top_k": 5, "top_p": 0.9}
WAYS = [*product((None, *EAGLES, *BLOCKS), [{}]), *product(EAGLES, [{"drawn": 0}])]
CONTROLS = pytest.mark.parametrize("temperature, controls", [(0.0, {}), (1.0, {}), (0.8, TOP)])


def tensors(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


# ---- On the device ----
class OnDevice(TorchDispatchMode):
    """Every tensor of every operation has to be on the device; x[:, 0] = 0 alone may pass a scalar as it is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        passes = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.fill_.Tensor)
        for t in tensors((args, kwargs, out)) if func.namespace != "prim" else []:
            assert t.is_cuda or (passes and t.dim() == 0), f"{func}: a tensor of shape {tuple(t.shape)} on {t.device}"
        return out


@pytest.fixture
def pretend(monkeypatch):
    """Indexing a CUDA tensor asks for a device guard, which a CPU build lacks: meta's, which does nothing, serves.
    Fused attention asks for the GPU's properties, where PyTorch was built for one: spelled out, it does not."""
    library = Path(torch.__path__[0], "lib", "libc10.so")
    if torch.cuda.is_available() or not library.exists():
        pytest.skip("there is a GPU (tests/test_cuda.py), or this PyTorch keeps its device guards elsewhere")
    guards = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(library), "_ZN3c104impl26device_guard_impl_registryE")

    def attention(q, k, v, attn_mask=None, is_causal=False):
        assert len({t.dtype for t in (q, k, v, attn_mask) if t is not None}) == 1, "attention of mixed dtypes"
        w = q @ k.mT
        return (w if attn_mask is None else w + attn_mask).softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    before, guards[1] = guards[1], guards[14]
    yield
    guards[1] = before
    model.causal.cache_clear()  # no fake tensor outlives its test
    verify.chain.cache_clear()


def two_rounds(monkeypatch, name, dtype, temperature=0.0, controls=None, **way):
    """Prefill and two rounds of a method (None: plain decoding), all fake. Prefill may read made-up values."""
    with FakeTensorMode(), torch.no_grad():  # under inference_mode fakes cannot be made of numbers
        with torch.device("cuda"), monkeypatch.context() as m:
            torch.set_default_dtype(dtype)
            m.setattr(verify.Session, "run", lambda *a: a)
            m.setattr(FakeTensor, "tolist", lambda t: [0] * len(t))
            method, target = importlib.import_module(name or "verify"), model.GPT(model.GPTConfig(64, 512, 3, 3, 96))
            models = (target, method.Drafter(target.config, method.Args(**way))) if name else (target,)
            generate = method.generate if name else verify.autoregressive
            torch.set_default_dtype(torch.float32)
            session, draft, verify_ = generate.__wrapped__(*models, [1, 2, 3, 4], 60, temperature, **controls or {})
        for _ in range(2):
            made = model.causal.cache_info().misses + verify.chain.cache_info().misses
            with OnDevice():
                verify_(draft() if draft else None)
        assert made == model.causal.cache_info().misses + verify.chain.cache_info().misses, "made in a capture"
        assert session.new_tokens.is_cuda and session.cache.attended == session.cache.kv.shape[4]


@CONTROLS
@pytest.mark.parametrize("name, way", [*WAYS, ("eagle1", {"drawn": 3}), ("dflash2", {"n_candidates": 2})])
def test_round_stays_on_the_device(pretend, monkeypatch, name, way, temperature, controls):
    two_rounds(monkeypatch, name, torch.float32 if temperature == 1 else torch.bfloat16, temperature, controls, **way)


@pytest.mark.parametrize("name", EAGLES + BLOCKS)
@pytest.mark.parametrize("owner, what, fault", [
    (verify, "greedy", lambda f, y, tree: (y[0].item(), f(y, tree))[1]),
    (verify, "greedy", lambda f, y, tree: (y[y > 0], f(y, tree))[1]),
    (verify.Topology, "__init__", lambda f, t, *a: (f(t, *a), setattr(t, "node", t.node.cpu()))[0]),
    ("Drafter", "draft", lambda f, *a: (torch.tensor([5], device="cuda"), f(*a))[1]),
    ("Drafter", "draft", lambda f, *a: (torch.tensor(5, device="cuda"), f(*a))[1]),
    (model.KVCache, "mask", lambda f, *a: f(*a).float()),
], ids=["item", "mask index", "host topology", "host data", "host scalar", "dtype"])
def test_faults_on_the_device_are_found(pretend, monkeypatch, name, owner, what, fault):
    owner = importlib.import_module(name).Drafter if owner == "Drafter" else owner
    real = getattr(owner, what)
    monkeypatch.setattr(owner, what, lambda *a: fault(real, *a))
    with pytest.raises(BaseException, match=r"_local_scalar|on cpu|same device|nonzero|mixed dtypes"):
        two_rounds(monkeypatch, name, torch.bfloat16)


MOST = {None: 303, "eagle1": 503, "eagle2": 737, "eagle3": 757, "dflash": 422, "dflash2": 501}  # at T = 0


@pytest.mark.parametrize("name", MOST)
def test_operations_of_a_round_only_fall(name, monkeypatch):
    """Beside a target of 24 layers. A GPU takes about as long for each of them, whatever its size: lower the bound with
    the count. What it takes from a round is in RESULTS.md."""
    monkeypatch.setattr(verify.Session, "worth", lambda self, chance: len(chance))
    assert sum(operations(name, model.GPT(model.GPTConfig()).eval())) <= MOST[name]


# ---- Captured ----
class Recorder(TorchDispatchMode):
    """The operations in order. Views need no second run: they go on looking at the same storage."""

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.held = [], {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, func._schema.arguments
        written = tensors([a for a, s in zip(args, schema) if s.alias_info and s.alias_info.is_write])
        for storage in [t.untyped_storage() for t in written]:
            self.before.setdefault(storage._cdata, (storage, storage.clone()))
        inputs = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        out = func(*args, **kwargs)
        made = [t for t in tensors(out) if t.untyped_storage()._cdata not in inputs]
        self.held.append((args, kwargs, out))  # no storage is freed, so that none is used twice
        if (written or made) and func is not torch.ops.aten.lift_fresh.default:  # constants of the host are baked in
            self.operations.append((func, args, kwargs, [] if written else made))
        return out


def capture(replays, function, *args):
    """verify.capture, on a CPU. A capture computes nothing: what it wrote is undone, and what it made is rubbish."""
    with torch.random.fork_rng(devices=[]), Recorder() as recorder:
        outputs = function(*args)
    for storage, content in recorder.before.values():
        storage.copy_(content)
    for t in tensors([made for *_, made in recorder.operations]):
        t.fill_(1)

    def replay(*_):
        replays.append(function)
        for func, args, kwargs, made in recorder.operations:
            for old, new in zip(made, tensors(func(*args, **kwargs))):
                old.copy_(new)
    return replay, outputs


def texts(name, way, captured, temperature=0.0, **controls):
    """Two generations in a row, eager or captured, with random drafts for a target of so few tokens that some are
    accepted -> [(tokens, rounds)], number of replays."""
    target, records, replays, attend_up_to = tiny(9, 64, n_layer=3), [], [], model.KVCache.attend_up_to
    module, drafter = build(name, way, target) if name else (None, None)
    generate = partial(module.generate, target, drafter) if name else partial(verify.autoregressive, target)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(verify.Session, "capture", property(lambda s: captured, lambda s, value: None), raising=False)
        m.setattr(verify.Session, "worth", lambda self, chance: len(chance))  # as on CUDA
        m.setattr(verify, "capture", partial(capture, replays))
        m.setattr(torch.cuda, "synchronize", lambda: None)
        m.setattr(model.KVCache, "attend_up_to", lambda self, n: attend_up_to(self, self.kv.shape[4]))  # as on CUDA
        for seed, prompt in enumerate(([1, 2, 3, 4], [5, 6, 7] * 9)):
            torch.manual_seed(seed)
            records.append(generate(prompt, 64, temperature, **controls))
    return [(r.tokens, r.rounds) for r in records], len(replays)


@pytest.mark.slow
@CONTROLS
@pytest.mark.parametrize("name, way", WAYS)
def test_replays_equal_eager_rounds(name, way, temperature, controls):
    eager, replayed = (texts(name, way, captured, temperature, **controls) for captured in (False, True))
    assert eager[0] == replayed[0] and eager[1] == 0
    assert replayed[1] == sum(len(rounds) - 2 for _, rounds in replayed[0]) * (2 if name else 1)
    assert name is None or sum(r.accepted for _, rounds in replayed[0] for r in rounds[3:])
    assert temperature or [r[0] for r in replayed[0]] == [r[0] for r in texts(None, {}, False)[0]]
