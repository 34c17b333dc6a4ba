"""The target: its taps, its cache, tree passes, and GPT-2's weights."""
import math

import numpy as np
import pytest
import torch
from helpers import tiny, topology

from model import GPT, GPTConfig, KVCache, by_columns, load_gpt2, rope_angles, rotate

EXACT = {"rtol": 0, "atol": 1e-12}


def tokens(n, V=7, seed=0):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))


def random_topology(N, g):
    """A tree of N nodes whose parents are random earlier nodes: bushy, deep and mixed ones alike."""
    return topology([-1] + [int(torch.randint(max(0, i - 1 - i // 2), i, (1,), generator=g)) for i in range(1, N)])


def filled(target, text, extra=0):
    """A cache that holds text."""
    cache = target.new_cache(extra)
    if len(text):
        target(text[None], cache)
        cache.pos += len(text)
    return cache


def lineage(t, node):
    """Node numbers from the root to node."""
    path = [node]
    while t.parent[path[0]] >= 0:
        path.insert(0, t.parent[path[0]].item())
    return path


@pytest.mark.parametrize("extra", [0, 9])
@torch.no_grad()
def test_cached_is_uncached(extra):
    """A sequence split anywhere in two passes has the logits and taps of one pass."""
    target, text = tiny(), tokens(20)
    taps = [2, 0, 1]
    logits, h = target(text[None], taps=taps)
    assert all((logits[0, i] - logits[0, j]).abs().max() > 1e-3 for i in range(20) for j in range(i))  # rows are distinct
    for split in range(1, 20):
        cache = target.new_cache(extra)
        first, h1 = target(text[None, :split], cache, taps=taps)
        cache.pos += split
        second, h2 = target(text[None, split:], cache, taps=taps)
        torch.testing.assert_close(torch.cat([first, second], 1), logits, **EXACT)
        for a, b, c in zip(h1, h2, h):
            torch.testing.assert_close(torch.cat([a, b], 1), c, **EXACT)


@torch.no_grad()
def test_a_batch_is_its_rows():
    """Sequences in a batch do not see each other."""
    target = tiny()
    idx = torch.stack([tokens(9, seed=1), tokens(9, seed=2)])
    torch.testing.assert_close(target(idx)[0], torch.cat([target(row[None])[0] for row in idx]), **EXACT)


@pytest.mark.parametrize("n_layer", [1, 3])
@torch.no_grad()
def test_taps_are_a_hand_run(n_layer):
    """h[0] is the embedding, h[l] the output of block l, h[L] the state after the final norm, which the head reads."""
    target, text = tiny(n_layer=n_layer), tokens(12)
    logits, h = target(text[None], taps=range(n_layer + 1))
    x = target.wte.weight[text][None] + target.wpe.weight[:12]
    torch.testing.assert_close(h[0], x, **EXACT)
    for l, block in enumerate(target.blocks, 1):
        x = block(x)
        torch.testing.assert_close(h[l], x if l < n_layer else target.ln_f(x), **EXACT)
    torch.testing.assert_close(logits, h[-1] @ target.wte.weight.t(), **EXACT)


@torch.no_grad()
def test_no_token_sees_its_future():
    """Changing a token changes its own row and later ones, and no earlier row."""
    target, text = tiny(), tokens(10)
    logits = target(text[None])[0][0]
    for i in range(10):
        other = text.clone()
        other[i] = (other[i] + 1) % 7
        moved = (target(other[None])[0][0] - logits).abs().amax(-1) > 1e-12
        assert moved.tolist() == [j >= i for j in range(10)]


@pytest.mark.parametrize("prefix", [0, 1, 2, 7])
@torch.no_grad()
def test_tree_nodes_are_their_paths(prefix):
    """Every node of a random tree has the logits and taps of its path run as plain text after the prefix."""
    target, text, g = tiny(), tokens(prefix), torch.Generator().manual_seed(prefix)
    for N in (1, 2, 5, 12):
        t, new = random_topology(N, g), tokens(N, seed=N)
        cache = filled(target, text, N)
        logits, h = target(new[None], cache, t, [0, 1, 2])
        for i in range(N):
            path = lineage(t, i)
            plain, taps = target(torch.cat([text, new[path]])[None], taps=[0, 1, 2])
            assert t.depth[i] == len(path) - 1
            assert (t.ancestors[i] == 0).nonzero().flatten().tolist() == path
            torch.testing.assert_close(logits[0, i], plain[0, -1], **EXACT)
            for a, b in zip(h, taps):
                torch.testing.assert_close(a[0, i], b[0, -1], **EXACT)


@torch.no_grad()
def test_kept_path_is_a_recomputation():
    """Keeping any path of a tree, or the upper part of one, continues exactly as text encoded from scratch."""
    target, text, g = tiny(max_seq_len=32), tokens(4), torch.Generator().manual_seed(3)
    apart = 0
    for N in (3, 6, 10):
        t, new = random_topology(N, g), tokens(N, seed=N)
        for leaf in range(N):
            path = lineage(t, leaf)
            apart += path != list(range(len(path)))
            padded = torch.tensor(path + [leaf] * (t.max_depth + 1 - len(path)))
            for n in range(1, len(path) + 1):
                cache = filled(target, text, N)
                target(new[None], cache, t)
                cache.keep(padded, torch.tensor(n))
                assert cache.pos == 4 + n
                scratch = filled(target, torch.cat([text, new[path[:n]]]), N)
                torch.testing.assert_close(cache.kv[..., :4 + n, :], scratch.kv[..., :4 + n, :], **EXACT)
                more = tokens(5, seed=leaf)
                plain = target(torch.cat([text, new[path[:n]], more])[None])[0][:, -5:]
                torch.testing.assert_close(target(more[None], cache)[0], plain, **EXACT)
    assert apart > 5  # paths whose rows do not lie side by side


@torch.no_grad()
def test_rejected_rows_are_never_seen():
    """Whatever lies at and beyond pos, the next pass, plain or tree, is the same."""
    target, text, more = tiny(), tokens(6), tokens(5, seed=1)
    t = topology([-1, 0, 0, 1, 2])
    for tree in (None, t):
        clean, dirty = filled(target, text, 8), filled(target, text, 8)
        dirty.kv[..., 6:, :] = 1e6
        torch.testing.assert_close(target(more[None], clean, tree)[0], target(more[None], dirty, tree)[0], rtol=0, atol=0)


@torch.no_grad()
def test_several_rounds_of_draft_and_rollback():
    """Draft, keep a part, draft again, ten times: the cache stays the text's own."""
    target, g = tiny(max_seq_len=48), torch.Generator().manual_seed(0)
    text = tokens(3)
    cache = filled(target, text, 8)
    for step in range(10):
        t, new = random_topology(8, g), tokens(8, seed=step)
        logits, _ = target(new[None], cache, t)
        path = lineage(t, step % 8)
        torch.testing.assert_close(logits[0, path], target(torch.cat([text, new[path]])[None])[0][0, -len(path):], **EXACT)
        n = 1 + step % len(path)
        cache.keep(torch.tensor(path), torch.tensor(n))
        text = torch.cat([text, new[path[:n]]])


@pytest.mark.parametrize("room", [1, 2, 3])
@torch.no_grad()
def test_tree_over_the_end_of_the_context(room):
    """A tree deeper than the room left: nodes inside the context are exact, and nothing is indexed past the end."""
    target = tiny(max_seq_len=16)
    text, t, new = tokens(16 - room), topology([-1, 0, 1, 0, 2, 4, 3]), tokens(7, seed=1)
    cache = filled(target, text, 7)
    logits, _ = target(new[None], cache, t)
    assert logits.isfinite().all() and t.max_depth >= room
    for i in range(7):
        path = lineage(t, i)
        if len(path) <= room:
            torch.testing.assert_close(logits[0, i], target(torch.cat([text, new[path]])[None])[0][0, -1], **EXACT)
    cache.keep(torch.tensor(lineage(t, 5)[:room]), torch.tensor(room))
    assert cache.pos == 16


@torch.no_grad()
def test_longer_than_the_context_is_refused():
    """A plain pass over more tokens than there are positions says so."""
    with pytest.raises(AssertionError, match="context of 8"):
        tiny(max_seq_len=8)(tokens(9)[None])


@torch.no_grad()
def test_reserve_changes_nothing():
    """A pass that attends to a part of the slots is the pass that attends to all of them."""
    target, text, t = tiny(max_seq_len=200), tokens(70), topology([-1, 0, 0, 1, 2, 4])
    for length in (1, 57, 58, 59, 63, 64, 65, 70):
        wide, narrow = filled(target, text[:length], 6), filled(target, text[:length], 6)
        narrow.reserve(length + 6)
        assert length + 6 <= narrow.span < wide.span == 206
        for tree in (t, None):
            torch.testing.assert_close(target(text[None, :6], narrow, tree)[0], target(text[None, :6], wide, tree)[0], **EXACT)
    narrow.reserve(10_000)
    assert narrow.span == 206


def test_keep_reads_before_it_writes():
    """A path that overlaps its own destination arrives whole."""
    cache = KVCache(1, 1, 1, 8, dtype=torch.float64)
    cache.kv[:] = torch.arange(8.0, dtype=torch.float64)[:, None]
    cache.pos += 2
    cache.keep(torch.tensor([0, 2, 3, 5]), torch.tensor(3))
    assert cache.kv[0, 0, 0, 0, :, 0].tolist() == [0, 1, 2, 4, 5, 7, 6, 7] and cache.pos == 5


@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"gelu": True}], ids=["default", "bias", "gelu"])
@torch.no_grad()
def test_by_columns_changes_only_the_memory(settings):
    """Shapes, names, values and logits stay; every matrix lies column by column, also after new weights are loaded into it."""
    torch.manual_seed(0)
    target = GPT(GPTConfig(16, 11, 2, 2, 16, **settings)).double()
    before, state = target(tokens(9, 11)[None])[0], {k: v.clone() for k, v in target.state_dict().items()}
    assert by_columns(target) is target
    target.load_state_dict(state)
    assert all(m.weight.mT.is_contiguous() for m in target.modules() if isinstance(m, torch.nn.Linear))
    assert all(torch.equal(v, state[k]) and v.shape == state[k].shape for k, v in target.state_dict().items())
    torch.testing.assert_close(target(tokens(9, 11)[None])[0], before, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2
# ---------------------------------------------------------------------------------------------------------------------
def published(prefix, V=13, context=10, d=128, n_layer=2):
    """Random weights with GPT-2's published names and shapes: Conv1D, that is (in, out)."""
    g = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (V, d), "wpe.weight": (context, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for l in range(n_layer):
        for name, shape in {"ln_1": (d,), "attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "ln_2": (d,),
                            "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}.items():
            shapes[f"h.{l}.{name}.weight"], shapes[f"h.{l}.{name}.bias"] = shape, shape[-1:]
    w = {k: 0.2 * torch.randn(s, generator=g) for k, s in shapes.items()}
    w.update({f"h.{l}.attn.bias": torch.ones(1, 1, context, context).tril() for l in range(n_layer)})  # a mask, published too
    return {prefix + k: v for k, v in w.items()}


def by_hand(w, text, n_head):
    """GPT-2's logits (T, V), straight from the paper, in numpy."""
    w = {k: v.double().numpy() for k, v in w.items()}
    T, d = len(text), w["wte.weight"].shape[1]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"] + w[name + ".bias"]

    def conv1d(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][text] + w["wpe.weight"][:T]
    for l in range(2):
        qkv = conv1d(norm(x, f"h.{l}.ln_1"), f"h.{l}.attn.c_attn")
        heads = []
        for i in range(n_head):
            q, k, v = (qkv[:, j * d + i * 64:j * d + (i + 1) * 64] for j in range(3))
            a = np.exp(q @ k.T / 8) * np.tril(np.ones((T, T)))
            heads.append(a / a.sum(-1, keepdims=True) @ v)
        x = x + conv1d(np.concatenate(heads, -1), f"h.{l}.attn.c_proj")
        u = conv1d(norm(x, f"h.{l}.ln_2"), f"h.{l}.mlp.c_fc")
        u = 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u ** 3)))
        x = x + conv1d(u, f"h.{l}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


@pytest.mark.parametrize("prefix", ["", "transformer."])
@torch.no_grad()
def test_gpt2_weights(prefix, tmp_path):
    """A file in the published layout loads, and its logits are GPT-2's."""
    torch.save(published(prefix), tmp_path / "pytorch_model.bin")
    target = load_gpt2(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)).double()
    assert (target.config.n_layer, target.config.n_head, target.config.max_seq_len, target.config.vocab_size) == (2, 2, 10, 13)
    text = tokens(10, 13)
    hand = torch.from_numpy(by_hand(published(""), text.numpy(), 2))
    assert hand.std() > 0.1
    torch.testing.assert_close(target(text[None])[0][0], hand, rtol=0, atol=1e-10)


def test_gpt2_weights_with_a_name_missing():
    """A missing tensor is named."""
    w = published("")
    del w["h.1.mlp.c_fc.bias"]
    with pytest.raises(KeyError, match="h.1.mlp.c_fc.bias"):
        load_gpt2(w)


@torch.no_grad()
def test_gpt2_weights_in_transformers():
    """The same weights in Hugging Face's GPT2LMHeadModel give the same logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(13, 10, 128, 2, 2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    w = {k: v for k, v in published("transformer.").items() if not k.endswith(".attn.bias")}
    missing, unexpected = theirs.load_state_dict(w, strict=False)
    assert not unexpected and all(k == "lm_head.weight" or k.endswith((".attn.bias", "masked_bias")) for k in missing)
    theirs.tie_weights()
    text = tokens(10, 13)[None]
    torch.testing.assert_close(load_gpt2(w).double()(text)[0], theirs(text).logits, rtol=0, atol=1e-10)


def test_rotary_positions_are_rotations():
    """rotate turns pairs (i, i + hd/2) like complex numbers, by position times base^(-2i/hd): lengths stay, and the product of a
    query and a key depends on their distance alone."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 8, generator=g, dtype=torch.float64)
    for position in (0, 3, 100):
        at = torch.full((5,), position)
        turned = torch.view_as_complex(torch.stack(rotate(q, rope_angles(at, 8, torch.float64)).chunk(2, -1), -1))
        angle = position * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        plain = torch.view_as_complex(torch.stack(q.chunk(2, -1), -1))
        torch.testing.assert_close(turned, plain * torch.polar(torch.ones_like(angle), angle), atol=1e-6, rtol=1e-5)
        near, far = (rotate(q, rope_angles(at + s, 8, torch.float64)) @ rotate(k, rope_angles(at + s + 7, 8, torch.float64)).T for s in (0, 50))
        torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
