"""What each method promises beyond losslessness: training computes what drafting computes, caches hold the target's
features, trees are the ones the papers describe. In fp64, on tiny targets with random weights."""
import copy
import importlib
from functools import partial
from itertools import count, pairwise, product

import pytest
import torch
import torch.nn.functional as F
from helpers import a_round, tiny

from dflash2 import DynamicConv
from model import GPTConfig
from verify import Committed

EAGLES, BLOCKS = ("eagle1", "eagle2", "eagle3"), ("dflash", "dflash2")
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def target():
    return tiny(vocab_size=23, max_seq_len=64, n_layer=8)


def text(b, n, V=23):
    return torch.randint(V, (b, n), generator=torch.Generator().manual_seed(1))


def shaken(name, target, temperature=0.0, **settings):
    """(session, drafter) with random weights everywhere, also where training starts from zeros or the identity."""
    _, drafter, _, _ = a_round(name, target, **settings)
    g = torch.Generator().manual_seed(5)
    for p in drafter.parameters():
        p += 0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return a_round(name, target, drafter=drafter, temperature=temperature)[:2]


def absorb(target, session, drafter, words, other_tap=None):
    """A new text: all words but the last are committed, the last is the anchor. other_tap: has another feature."""
    h = [x[0] for x in target(words[None, :-1], taps=drafter.taps)[1]]
    if other_tap is not None:
        h[other_tap][0, 0] += 1  # one channel: a norm would not see all of them move
    new = Committed(words, h, torch.tensor(0), torch.tensor(len(words) - 1))
    drafter.reset(session)
    drafter.absorb(*((target, new) if hasattr(drafter, "step") else (new,)))
    return words[-1:]


def heads(monkeypatch, target):
    """A list that gets what reaches the target's LM head."""
    seen, head = [], target.head
    monkeypatch.setattr(target, "head", lambda x: seen.append(x) or head(x))
    return seen


def walked(drafter, target, path):
    """EAGLE's states from the anchor down a path of tokens that is drafted alone."""
    states = [drafter.state.clone()]
    for depth, token in enumerate(path, 1):
        visible = torch.zeros(1, depth, dtype=torch.float64)
        states.append(drafter.step(target, states[-1], torch.tensor([int(token)]), depth, visible))
    return torch.cat(states)


def paths(tree):
    """The token paths of all nodes but the anchor."""
    found = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.topology.parent.tolist()[1:]):
        found.append((*found[parent], token))
    return found[1:]


# ---- Training computes what drafting computes ----
@pytest.mark.parametrize("name", EAGLES)
def test_training_pass_equals_drafting(name, target):
    """Step i of the training pass is pass i of drafting, at every slot. All passes along a drafted path are those of
    one causal sequence: committed slots, then the drafter's own outputs."""
    session, drafter = shaken(name, target, **({"ttt": 4} if name == "eagle3" else {"noise": 0.0}))
    outputs, advance, idx = [], drafter.advance, text(2, 14)
    drafter.advance = lambda *a: outputs.append(advance(*a)) or outputs[-1]
    drafter(target, idx)
    drafter.advance = advance
    assert len(outputs) == (4 if name == "eagle3" else 1)
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    for b, n in product((0, 1), range(1, 14)):
        absorb(target, session, drafter, idx[b, :n + 1])
        states = walked(drafter, target, idx[b, n + 1:])  # from the anchor on
        for out, state in zip(outputs, states):
            close(out[b, n - 1], state, rtol=0, atol=1e-10)
        h = target(idx[b:b + 1, :n], taps=drafter.taps)[1]
        rows = torch.cat([drafter.fuse(h) if name == "eagle3" else h[0], states[None, :-1]], 1)
        whole = advance(target, rows, idx[b:b + 1, 1:], drafter.angles(torch.arange(13)), causal)
        close(whole[0, n - 1:], states, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("shorter", [1, 4])
def test_training_blocks_equal_drafting(name, shorter, target, monkeypatch):
    """Every block trained among others computes what drafting computes from the text before its anchor alone. Anchors
    are drawn anew in every pass, and come to be all that leave room for a block. So it is with shorter blocks."""
    B = 5
    session, drafter = shaken(name, target, block_size=B, n_draft_layer=2)
    seen, idx, drafted, met = heads(monkeypatch, target), text(2, 11 + B), [], set()
    for row, a in product((0, 1), range(1, 12)):
        drafter.draft(target, absorb(target, session, drafter, idx[row, :a + 1]))
        drafted.append(seen[-1].flatten())
    drafted = torch.stack(drafted).unflatten(0, (2, 11))
    drafter.args.block_size, drafter.args.n_anchors = B * shorter, 4 // shorter
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(shorter // 4))
    for _ in range(30):  # all 11 anchors but for a chance of 1e-5
        drafter(target, idx)
        trained = seen[-1].flatten(2)  # (2, 4, (B-1) * d)
        distance, which = (trained[:, :, None] - drafted[:, None]).abs().amax(-1).min(2)
        assert distance.max() < 1e-9 and all(len(set(row)) == 4 for row in which.tolist())
        met |= set(which.flatten().tolist())
    assert len(met) == 11


@pytest.mark.parametrize("name", EAGLES)
def test_eagle_labels_are_the_targets_own(name, target):
    """An oracle of the target's features (EAGLE-3: logits) costs the target's entropy; a position off, more."""
    _, drafter = shaken(name, target, **({"ttt": 3} if name == "eagle3" else {"noise": 0.0}))
    idx, costs = text(2, 18), []
    logits, (f,) = target(idx, taps=[8])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    for late in (0, 1, -1):
        if name == "eagle3":
            drafter.read = lambda _, a, late=late: logits.roll(late, 1)[:, -a.shape[1]:]
        else:
            drafter.advance = lambda *_, late=late: f.roll(late, 1)[:, 1:]
        costs.append(drafter(target, idx).item())
    if name == "eagle3":
        least = sum(0.8 ** i * entropy[:, 1 + i:].mean() for i in range(3)) / sum(0.8 ** i for i in range(3))
    else:
        least = 0.1 * entropy[:, 1:].mean()
        drafter.args.w_cls = 0.0
        drafter.advance = lambda *_: f[:, 1:] + 2
        assert drafter(target, idx).item() == pytest.approx(1.5)  # SmoothL1
    assert costs[0] == pytest.approx(least.item(), abs=1e-5) and min(costs[1:]) > costs[0] + 0.01


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("B, gamma_w", [(16, 7), (10, 5), (8, 4)])
def test_slot_k_is_trained_on_token_anchor_plus_k(name, B, gamma_w, target, monkeypatch):
    """An oracle that gives slot k of the block at anchor a the target's law of token a+k costs the entropy of these
    laws under the published weights, the least there is; the law of a token before or after costs more. No shift."""
    all_tokens = {"n_candidates": 5000} if name == "dflash2" else {}
    _, drafter = shaken(name, target, block_size=B, n_lengths=1, **all_tokens)
    idx, head, costs = text(3, B + 1), target.head, []  # room for one anchor: position 1
    logits = target(idx)[0]
    w = torch.exp(-torch.arange(B - 1) / gamma_w)
    entropy = (w * torch.distributions.Categorical(logits=logits[:, 1:B]).entropy()).sum(1).mean() / w.sum()
    if name == "dflash2":
        drafter.B.weight.zero_()  # the selector has nothing to add: its loss is the same once more
    for late in (0, 1, -1):
        said = logits.roll(late, 1)[:, None, 1:B]
        monkeypatch.setattr(target, "head", lambda x, said=said: head(x) if x.dim() == 3 else said)
        costs.append(drafter(target, idx).item())
    least = entropy.item() * (2 if name == "dflash2" else 1)
    assert costs[0] == pytest.approx(least, abs=1e-5) and min(costs[1:]) > costs[0] + 0.01


@pytest.mark.parametrize("name", EAGLES[:2])
def test_noise_is_uniform_on_the_features(name, target):
    """The features that training reads are the target's plus U(-0.1, 0.1): bounds, mean and spread of 2176 values."""
    _, drafter = shaken(name, target)
    seen, advance, idx = [], drafter.advance, text(8, 18)
    drafter.advance = lambda *a: seen.append(a[1]) or advance(*a)
    drafter(target, idx)
    noise = seen[0] - target(idx, taps=[8])[1][0][:, :-1]
    assert 0.099 < noise.abs().max() <= 0.1 and noise.mean().abs() < 0.006  # 5 standard errors
    assert noise.std().item() == pytest.approx(0.1 / 3 ** 0.5, rel=0.06)


# ---- Caches and features ----
@pytest.mark.parametrize("name", EAGLES + BLOCKS)
def test_drafts_equal_those_of_a_drafter_built_anew(name):
    """After every round the drafter drafts what one would that absorbed the whole text from scratch: no row of an
    estimate, of a rejected node or of a block survives."""
    target = tiny(vocab_size=9, max_seq_len=64, n_layer=8)  # so few tokens that random drafts are accepted at times
    _, drafter = shaken(name, target, **({"drawn": 0} if name in EAGLES else {}))
    session, _, _, verify_ = a_round(name, target, drafter=drafter, temperature=1.0)  # chosen drafts of a random text
    accepted = 0
    while len(session.record.tokens) < 40:
        words, anew = torch.tensor([1, 2, 3, 4, *session.record.tokens]), copy.deepcopy(drafter)
        absorb(target, session, anew, words)
        trees = [d.draft(target, session.anchor) for d in (drafter, anew)]
        assert trees[0].tokens.equal(trees[1].tokens)
        assert trees[0].topology.parent.equal(trees[1].topology.parent)
        assert drafter.cache.pos == session.cache.pos == len(words) - 1
        verify_(trees[0])
        accepted += session.record_tokens(session.new_tokens.tolist())[0]
    assert accepted > 0


@pytest.mark.parametrize("name", EAGLES + BLOCKS)
def test_a_draft_depends_on_the_anchor_and_on_every_tap(name, target, monkeypatch):
    """Another anchor, or another feature of one tap at the first position, changes what the first drafted token is
    read from; where nothing changes it is the same."""
    session, drafter = shaken(name, target)
    seen, words, first = heads(monkeypatch, target), text(1, 9)[0], []
    other = torch.cat([words[:-1], (words[-1:] + 1) % 23])
    for edit in ((words,), (words,), (other,), *((words, tap) for tap in range(len(drafter.taps)))):
        anchor = absorb(target, session, drafter, *edit)
        seen.clear()
        drafter.draft(target, anchor)
        first.append(seen[0])
    assert first[0].equal(first[1]) and all((x - first[0]).abs().max() > 1e-6 for x in first[2:])


@pytest.mark.parametrize("name", EAGLES + BLOCKS)
@pytest.mark.parametrize("n_layer", [2, 3, 5, 7, 8, 12, 24, 36])
def test_taps_are_layers_of_the_target(name, n_layer):
    """Taps are layers that exist, in order: f for EAGLE-1 and 2, the published three for EAGLE-3 where they are
    distinct, distinct ones from the first to the last for DFlash."""
    method = importlib.import_module(name)
    taps = method.Drafter(GPTConfig(16, 8, n_layer, 2, 16), method.Args()).taps
    assert all(1 <= t <= n_layer for t in taps) and taps == sorted(taps)
    if name in EAGLES[:2]:
        assert taps == [n_layer]
    elif name in BLOCKS:
        assert len(set(taps)) == len(taps) == min(n_layer, 5) and {1, n_layer} <= set(taps)
    elif n_layer >= 7:
        assert taps == [2, n_layer // 2, n_layer - 3] and len(set(taps)) == 3


# ---- Drafts ----
@pytest.mark.parametrize("name", EAGLES)
def test_drafted_nodes_see_their_own_ancestors(name, target, monkeypatch):
    """Every expanded node of a tree, of EAGLE-1's published one, computes what it does when its path stands alone."""
    published = (0, 0, 0, 0), (0, 0, 0, 1, 1, 2, 2, 3), (0, 0, 0, 1, 1, 2, 2, 3), (0, 0, 0), (0, 0)
    monkeypatch.setattr(importlib.import_module("eagle1"), "TREE", published)
    session, drafter = shaken(name, target, **({} if name == "eagle1" else {"width": 4, "beam": 4, "depth": 3}))
    session.least_chance, levels, step, words = 0.0, [], drafter.step, text(1, 8)[0]
    drafter.step = lambda *a: levels.append((*a[1:3], step(*a))) or levels[-1][2]
    anchor = absorb(target, session, drafter, words)
    drafter.draft(target, anchor)
    drafter.step, above, found = step, drafter.state.clone(), [()]
    assert len(levels) >= 3 and len(levels[1][1]) > 1
    for states, tokens, outputs in levels:
        parents = [(above == state).all(1).nonzero()[0, 0] for state in states]  # the row a node goes on from
        found = [(*found[p], token) for p, token in zip(parents, tokens)]
        for path, output in zip(found, outputs):
            close(walked(drafter, target, path)[-1], output, rtol=0, atol=1e-10)
        above = outputs


@pytest.mark.parametrize("name", EAGLES[1:])
@pytest.mark.parametrize("width, beam, depth, N", [(3, 3, 1, 9), (4, 2, 3, 12), (3, 1, 4, 6), (3, 3, 3, 100)])
def test_dynamic_tree_holds_the_best_values(name, width, beam, depth, N, target):
    """The papers' two phases, by hand on path values: the `beam` best of every level get their `width` best children,
    and of all these the N - 1 best are the tree."""
    session, drafter = shaken(name, target, width=width, beam=beam, depth=depth, n_nodes=N)
    session.least_chance, read = 0.0, drafter.read
    drafter.read = lambda *a: read(*a) / 40  # so that depth and breadth are worth about the same
    for words in text(8, 12):
        anchor, frontier, values = absorb(target, session, drafter, words), [()], {(): 0.0}
        for _ in range(depth + 1):
            new = {}
            for path in frontier:
                logits = drafter.read(target, walked(drafter, target, path)[-1])
                best = logits.log_softmax(-1).topk(width)
                new |= {(*path, x): values[path] + v for v, x in zip(best.values.tolist(), best.indices.tolist())}
            values |= new
            frontier = sorted(new, key=new.get, reverse=True)[:beam]
        del values[()]
        best = sorted(values, key=values.get, reverse=True)[:N - 1]
        assert set(paths(drafter.draft(target, anchor))) == set(best)


@pytest.mark.parametrize("name", EAGLES[1:])
@pytest.mark.parametrize("drawn", [0, 1])
@pytest.mark.parametrize("width, beam, n_nodes", [(3, 2, 12), (12, 3, 2)], ids=["roomy", "crowded"])
def test_dynamic_tree_is_connected_and_keeps_what_was_drawn(name, drawn, width, beam, n_nodes, target, monkeypatch):
    """All confidences equal: parents come before children, no sibling occurs twice; the drawn nodes are a path of full
    depth, kept also where leaves near the root are worth more and would fill the tree."""
    module, rare = importlib.import_module(name), torch.tensor([0.2], dtype=torch.float64)
    monkeypatch.setattr(module, "acceptance", lambda q: rare)  # drawn nodes are worth less than other leaves
    settings = {"width": width, "beam": beam, "depth": 3, "n_nodes": n_nodes, "drawn": drawn}
    session, drafter = shaken(name, target, float(drawn), **settings)
    session.least_chance = 0.0
    drafter.read = lambda _, a: torch.zeros(len(a), 23, dtype=torch.float64)
    tree = drafter.draft(target, session.anchor, session.probs)
    t, node = tree.topology, torch.arange(len(tree.tokens))
    assert t.parent[0] == -1 and (t.parent[1:] >= 0).all() and (t.parent < node).all()
    assert len(set(paths(tree))) == len(node) - 1 and [0, *map(len, paths(tree))] == t.depth.tolist()
    assert len(node) == (5 if drawn and n_nodes < 5 else n_nodes)
    path = node[t.drawn].tolist()
    assert t.parent[path].tolist() == [0, *path][:-1] and len(path) == (4 if drawn else 0)
    if drawn:
        assert (tree.q.sum(1) > 0).nonzero()[:, 0].tolist() == [0, *path[:-1]]  # those that were expanded


@pytest.mark.parametrize("name", EAGLES[1:])
def test_sampled_tree_keeps_the_best_leaves(name, target, monkeypatch):
    """At T > 0, beside the drawn path, the tree keeps the children of greatest value: the chance Π α that the walk
    comes to their parent, times (1-α) q."""
    def accepted(q):
        return 0.3 + 0.6 * (q.argmax(-1) % 3 > 0).double()  # so that nodes differ

    monkeypatch.setattr(importlib.import_module(name), "acceptance", accepted)
    session, drafter = shaken(name, target, 1.0, width=4, beam=2, depth=3, n_nodes=11)
    session.least_chance, read, reached = 0.0, drafter.read, 1.0
    drafter.read = lambda *a: read(*a) / 9  # so that values of other levels are within reach
    tree = drafter.draft(target, session.anchor, session.probs)
    parent, drawn = tree.topology.parent, tree.topology.drawn
    path, values = [0, *drawn.nonzero()[:, 0].tolist()], {}
    assert parent[path[1:]].tolist() == path[:-1] and len(path) == 5
    for node, child in pairwise(path):
        q = tree.q[node].index_fill(0, tree.tokens[child], -1)
        alpha = accepted(tree.q[node]).item()
        values |= {(node, x): reached * (1 - alpha) * q[x].item() for x in q.topk(3).indices.tolist()}
        reached *= alpha
    best = sorted(values, key=values.get, reverse=True)[:6]
    assert {(parent[n].item(), tree.tokens[n].item()) for n in range(1, 11) if not drawn[n]} == set(best)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_are_drafted_as_far_as_is_worth_it(name, temperature, target):
    """The product of the slots' largest q, each at least a half, says how many tokens are drafted."""
    session, drafter = shaken(name, target, temperature, block_size=9)
    seen, head = [], target.head
    target.head = lambda x: seen.append(head(x)) or seen[-1]
    for least in (0.01, 0.1, 0.3):
        session.least_chance = least
        tree = drafter.draft(target, session.anchor, session.probs if temperature else None)
        chance = seen[-1].softmax(-1).amax(-1).clamp_min(0.5).cumprod(0)
        assert len(tree.tokens) - 1 == (chance >= least).sum() >= 1


@pytest.mark.parametrize("name", EAGLES[1:])
def test_a_sure_parent_is_kept_before_its_child(name, target):
    """A child that is certain is worth as much as its parent: of a path that does not fit, the beginning is kept."""
    session, drafter = shaken(name, target, width=3, beam=2, depth=4, n_nodes=3)
    level = count(1)
    drafter.read = lambda _, a: 1e4 * torch.eye(23, dtype=torch.float64)[[next(level)] * len(a)]
    assert paths(drafter.draft(target, session.anchor)) == [(1,), (1, 2)]


@pytest.mark.parametrize("B, N", [(4, 2), (4, 6), (4, 20), (2, 99)])
def test_best_first_tree_is_the_best(B, N, target, monkeypatch):
    """The heap finds the N - 1 likeliest prefixes of all, by brute force; fewer where there are no more."""
    session, drafter = shaken("dflash", target, block_size=B, tree=N)
    seen = heads(monkeypatch, target)
    tree = drafter.draft(target, session.anchor)
    score, values = F.linear(seen[-1], target.wte.weight).log_softmax(-1), {}
    for n in range(1, B):
        for path in product(range(23), repeat=n):
            values[path] = sum(score[slot, x].item() for slot, x in enumerate(path))
    assert set(paths(tree)) == set(sorted(values, key=values.get, reverse=True)[:N - 1])


# ---- DFlash-2 ----
def test_dflash2_starts_as_dflash(target):
    """With a DFlash's weights and nothing trained, DFlash-2 has the same drafts, and draws them from the same law."""
    one, two = shaken("dflash", target)[1], a_round("dflash2", target)[1]
    assert not two.load_state_dict(one.state_dict(), strict=False).unexpected_keys
    for prompt, temperature in product(([1], [5, 6, 7, 8], range(20)), (0.0, 1.0)):
        trees = []
        for drafter in (one, two):
            torch.manual_seed(3)  # prefill draws the same anchor
            trees.append(a_round(drafter.name, target, prompt, drafter=drafter, temperature=temperature)[2]())
        if temperature:
            close(trees[0].q, trees[1].q, rtol=0, atol=1e-12)
        else:
            assert trees[0].tokens.equal(trees[1].tokens)


def test_dynamic_conv(target):
    """The formula, kernel by kernel; the shift stays in its block: slot 1 reads the anchor, slot 0 nothing. With the
    kernels behind both sublayers zero, and those before them not, a layer passes its input on."""
    x, layer = torch.randn(1, 4, 16, dtype=torch.float64), a_round("dflash2", target, block_size=4)[1].layers[0]
    for conv in layer.convs:
        conv.base[1] = 0
    assert torch.equal(layer(x, torch.ones(2, 4, 8, dtype=torch.float64), F.scaled_dot_product_attention, 4), x)
    conv, x = DynamicConv(32).double(), torch.randn(2, 12, 32, dtype=torch.float64)
    h = torch.randn_like(x)
    assert torch.equal(conv(x, conv.kernels(h * 0)[0], 4), x)  # the identity to start with
    for p in conv.parameters():
        p.normal_()
    D = (h @ conv.dynamic.weight.T).view(2, 12, 2, 2, 2).repeat_interleave(16, -1)  # side, tap, channel
    before = F.pad(x.unflatten(1, (3, 4)), (0, 0, 1, 0))[:, :, :4].flatten(1, 2)
    for side, kernel in enumerate(conv.kernels(h)):
        taps = [conv.base[side, tap] + D[:, :, side, tap] for tap in (0, 1)]
        close(conv(x, kernel, 4), taps[0] * x + taps[1] * before)


def test_selector_scores_pairs_and_walks_greedily(target, monkeypatch):
    """Given the token before, S(a, b) = U(b) + <A(a) ⊙ W_h h, B(b)> for the K candidates, U(b) for others. At T = 0
    the draft takes the best candidate, greedily; at T > 0, q is softmax(S / T), whatever was drawn."""
    seen, K, chose_otherwise = heads(monkeypatch, target), 6, 0
    for T in (0.0, 2.5):  # 2.5: so that tokens outside the candidates are drawn too
        session, drafter = shaken("dflash2", target, T, block_size=5, n_candidates=K)
        drafter.B.weight.normal_()
        outside = 0
        for _ in range(20 if T else 1):
            tree = drafter.draft(target, session.anchor, session.probs if T else None)
            for t, (a, b) in enumerate(pairwise(tree.tokens)):
                h, S = seen[-1][t], F.linear(seen[-1][t], target.wte.weight)
                top = S.topk(K).indices
                S = S.index_add(0, top, drafter.B(top) @ (drafter.A(a) * drafter.gate(h)))
                if T:
                    close(tree.q[t], (S / T).softmax(-1), rtol=0, atol=1e-12)
                    outside += b not in top
                else:
                    assert b == top[S[top].argmax()]
                    chose_otherwise += b != top[0]
    assert chose_otherwise and outside


def test_selector_loss_is_cross_entropy_among_the_candidates(target):
    """Among the K candidates of a slot, given the true token before; what p holds outside them is skipped."""
    (_, drafter), idx, seen = shaken("dflash2", target, n_candidates=4), text(2, 17), []  # one anchor: position 1
    with pytest.MonkeyPatch.context() as m:
        m.setattr(drafter, "selector_loss", lambda h, U, p, before: seen.append(before) or p.sum(-1))
        drafter(target, idx)
    assert seen[0][:, 0].equal(idx[:, 1:16])
    before, h = torch.tensor([[[3, 1]]]), torch.randn(1, 1, 2, 16, dtype=torch.float64)
    U, p = torch.randn(2, 1, 1, 2, 23, dtype=torch.float64).log_softmax(-1)
    loss = drafter.selector_loss(h, U, p.exp(), before)
    for t in (0, 1):
        top = U[0, 0, t].topk(4).indices
        S = U[0, 0, t, top] + drafter.B(top) @ (drafter.A(before[0, 0, t]) * drafter.gate(h[0, 0, t]))
        expected = F.cross_entropy(S, p[0, 0, t, top].exp())
        assert loss[0, 0, t].item() == pytest.approx(expected.item(), abs=1e-6)  # the loss is in fp32
