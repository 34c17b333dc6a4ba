"""The inference path as CUDA sees it: static shapes, no hidden synchronisation, replays equal to eager rounds. Without a GPU the
same round functions are traced here as one graph, which proves that they have no break and do not specialise on the position."""
import importlib

import pytest
import torch
from helpers import METHODS, tiny
from rounds import a_round

import verify
from model import GPT, GPTConfig

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_round_traces_as_one_graph(name, temperature):
    """Draft and verification are free of graph breaks, and a new position needs no new graph."""
    torch.manual_seed(0)
    target = tiny(vocab_size=40, max_seq_len=96, n_layer=8)
    session, _, draft, verify_ = a_round(name, target, temperature=temperature)
    for cache in session.caches:
        cache.reserve(cache.kv.shape[4])                        # as on CUDA: one shape for all positions
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        whole = torch.compile(lambda: verify_(draft()), fullgraph=True, backend=backend, dynamic=False)
        for i in range(4):
            whole()
            if i == 0:
                traced = len(graphs)
    assert traced == 1
    assert len(graphs) <= 2                                   # the second: buffers have left the prefill


@cuda
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_equals_eager(name, temperature):
    """Captured rounds give what eager rounds give: the same greedy text; at T=1 valid text; twice in a row."""
    torch.manual_seed(0)
    method, target = importlib.import_module(name), GPT(GPTConfig(128, 64, 8, 2, 32)).cuda().eval()
    drafter = method.Drafter(target.config, method.Args()).cuda().eval()
    for prompt in ([1, 2, 3], [5] * 20):
        record = method.generate(target, drafter, prompt, 200, temperature)
        assert len(record.tokens) == 128 - len(prompt)
        if temperature == 0:
            assert record.tokens == verify.autoregressive(target, prompt, 200).tokens


@cuda
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_replay_does_not_synchronise(name, temperature):
    """A replayed round waits for nothing but the read of its report."""
    target = GPT(GPTConfig(128, 64, 8, 2, 32)).cuda().eval()
    session, _, draft, verify_ = a_round(name, target, device="cuda", temperature=temperature)
    with torch.inference_mode():
        for _ in range(2):
            verify_(draft())
        draft, tree = verify.capture(draft)
        verify_, _ = verify.capture(verify_, tree)
        torch.cuda.set_sync_debug_mode("error")
        try:
            verify_(draft())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert session.report[0] >= 0
