"""The target: its taps, its cache, tree passes, and GPT-2's weights. In fp64; all rows of logits are distinct."""
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny, topology

from model import KVCache, load_gpt2, rope_angles, rotate

close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tokens(n, V=7, seed=0):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))


def random_topology(N, g):
    """A tree of N nodes whose parents are random earlier nodes: bushy, deep and mixed ones alike."""
    return topology([-1] + [int(torch.randint((i - 1) // 2, i, (1,), generator=g)) for i in range(1, N)])


def filled(target, text, extra=0):
    """A cache that holds text, and rubbish in all rows behind it, as after rejected drafts."""
    cache = target.new_cache(extra)
    cache.kv += 1e6
    if len(text):
        target(text[None], cache)
        cache.pos += len(text)
    return cache


def lineage(t, node):
    """Node numbers from the root to node."""
    parent = t.parent[node].item()
    return [node] if parent < 0 else [*lineage(t, parent), node]


@pytest.mark.parametrize("n_layer", [1, 3])
def test_taps_are_a_hand_run(n_layer):
    """h[0] is the embedding, h[l] the output of block l, h[L] the state after the final norm, for the head."""
    target, text = tiny(n_layer=n_layer), tokens(12)
    logits, h = target(text[None], taps=range(n_layer + 1))
    x = target.wte.weight[text][None] + target.wpe.weight[:12]
    close(h[0], x)
    for l, block in enumerate(target.blocks, 1):
        x = block(x)
        close(h[l], x if l < n_layer else target.ln_f(x))
    close(logits, h[-1] @ target.wte.weight.t())


def test_cached_is_uncached():
    """A sequence split anywhere in two passes has the logits and taps of one pass, over all slots or a part."""
    target, text, taps = tiny(max_seq_len=200), tokens(70), [2, 0, 1]
    logits, h = target(text[None], taps=taps)
    assert (torch.cdist(logits[0], logits[0]) + torch.eye(70)).min() > 1e-3  # rows are distinct
    for split in [*range(1, 12), 58, 62, 63, 64, 65, 69]:
        cache = filled(target, text[:split])
        for slots in (200, 70):
            cache.attend_up_to(slots)
            second, taken = target(text[None, split:], cache, taps=taps)
            close(second, logits[:, split:])
            for a, b in zip(taken, h):
                close(a, b[:, split:])


def test_no_token_sees_its_future_or_another_sequence():
    """Changing a token changes its own row and later ones, no earlier row, and no other sequence of the batch."""
    target, idx = tiny(), torch.stack([tokens(10), tokens(10, seed=1)])
    logits = target(idx)[0]
    for i in range(10):
        other = idx.clone()
        other[0, i] = (other[0, i] + 1) % 7
        moved = (target(other)[0] - logits).abs().amax(-1) > 1e-12
        assert moved.tolist() == [[j >= i for j in range(10)], [False] * 10]


@pytest.mark.parametrize("prefix", [0, 1, 7, 20, 22, 23])
def test_tree_nodes_are_their_paths(prefix):
    """Every node of a random tree has the logits and taps of its path run as plain text after the prefix; a tree may
    reach over the end of the context (24), where its nodes are finite and the others are still exact."""
    target, text, g = tiny(), tokens(prefix), torch.Generator().manual_seed(prefix)
    for N in (1, 2, 5, 12):
        t, new = random_topology(N, g), tokens(N, seed=N)
        logits, h = target(new[None], filled(target, text, N), t, [0, 1, 2])
        assert logits.isfinite().all()
        for i in range(N):
            path = lineage(t, i)
            assert t.depth[i] == len(path) - 1
            assert (t.ancestors[i] == 0).nonzero()[:, 0].tolist() == path
            if prefix + len(path) <= 24:
                plain, taps = target(torch.cat([text, new[path]])[None], taps=[0, 1, 2])
                close(logits[0, i], plain[0, -1])
                for a, b in zip(h, taps):
                    close(a[0, i], b[0, -1])


def test_a_committed_path_is_a_recomputation():
    """Committing any path of a tree, or its upper part, goes on exactly as text encoded from scratch does. Paths lie
    apart in the cache, and overlap the place they move to."""
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
                cache.commit_path(padded, torch.tensor(n))
                whole = torch.cat([text, new[path[:n]], tokens(5, seed=leaf)])[None]
                close(target(whole[:, -5:], cache)[0], target(whole)[0][:, -5:])
    assert apart > 5


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 200])
def test_masks_and_slots(slots):
    """Slots and what a pass attends to are multiples of 64 that suffice; a mask shows the committed prefix and the
    given rows behind it, nothing else."""
    cache, given = KVCache(1, 1, 1, slots), torch.tensor([[0.0, -math.inf, 2.0], [3.0, 0.0, -math.inf]])
    for n in (1, 64, slots):
        cache.attend_up_to(n)
        assert cache.attended == math.ceil(n / 64) * 64
        for pos in (0, 1, cache.attended // 2, cache.attended - 3):
            cache.pos.fill_(pos)
            expected = F.pad(F.pad(given, (pos, 0)), (0, cache.attended - pos - 3), value=-math.inf)
            assert torch.equal(cache.mask(given), expected)


def test_rotary_positions_are_rotations():
    """rotate turns pairs (i, i + hd/2) like complex numbers, by position times base^(-2i/hd)."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    position = torch.tensor([0, 1, 3, 10, 100])
    angle = position[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    by_hand = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    turned = rotate(x, rope_angles(position, 8, torch.float64))  # its angles are in fp32
    close(turned, torch.cat([by_hand.real, by_hand.imag], -1), atol=1e-5)


# ---- GPT-2 ----
def published(V=13, context=10, d=128, n_layer=2):
    """Random weights with GPT-2's published names and shapes: Conv1D, that is (in, out)."""
    g = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (V, d), "wpe.weight": (context, d)}
    parts = {"ln_1": (d,), "attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "ln_2": (d,),
             "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    layers = {f"h.{l}.{name}": shape for l in range(n_layer) for name, shape in parts.items()}
    for name, shape in {**layers, "ln_f": (d,)}.items():
        shapes |= {name + ".weight": shape, name + ".bias": shape[-1:]}
    return {name: 0.3 * torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def by_hand(w, text, n_head):
    """GPT-2's logits (T, V), from its definition."""
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"])

    def conv1d(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][text] + w["wpe.weight"][:len(text)]
    for l in (0, 1):
        qkv = conv1d(norm(x, f"h.{l}.ln_1"), f"h.{l}.attn.c_attn").chunk(3, -1)
        heads = [torch.stack(x.chunk(n_head, -1)) for x in qkv]  # (nh, T, hd)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + conv1d(torch.cat([*y], -1), f"h.{l}.attn.c_proj")
        u = conv1d(norm(x, f"h.{l}.ln_2"), f"h.{l}.mlp.c_fc")
        x = x + conv1d(F.gelu(u, approximate="tanh"), f"h.{l}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_weights(prefix):
    """Weights under the published names, masks among them, give GPT-2's logits."""
    w, text = published(), tokens(10, 13)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 10, 10), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    target = load_gpt2({prefix + name: tensor for name, tensor in {**w, **masks}.items()})
    assert (target.config.n_layer, target.config.max_seq_len, target.config.vocab_size) == (2, 10, 13)
    close(target.double()(text[None])[0][0], by_hand(w, text, 2), atol=1e-4)  # loaded in fp32


def test_gpt2_weights_in_transformers():
    """The same weights in Hugging Face's GPT2LMHeadModel give the same logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(13, 10, 128, 2, 2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    w = {"transformer." + k: v for k, v in published().items()}
    missing, unexpected = theirs.load_state_dict(w, strict=False)
    assert not unexpected and all(k == "lm_head.weight" or k.endswith((".attn.bias", "masked_bias")) for k in missing)
    theirs.tie_weights()
    close(load_gpt2(w)(tokens(10, 13)[None])[0], theirs(tokens(10, 13)[None]).logits, atol=1e-4)
