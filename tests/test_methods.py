"""What each method promises beyond losslessness: training sees what inference computes, caches hold the target's features, trees
are the ones the papers describe. All in fp64 on tiny targets with random weights."""
import copy
import dataclasses
import importlib
import math
from itertools import count, pairwise, product

import pytest
import torch
from helpers import METHODS, tiny
from rounds import a_round

import verify
from dflash2 import DynamicConv
from verify import Committed

EAGLES, BLOCKS = ("eagle1", "eagle2", "eagle3"), ("dflash", "dflash2")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def target():
    return tiny(vocab_size=23, max_seq_len=64, n_layer=8)


def shaken(drafter, seed=5):
    """Random weights everywhere, also where training starts from zeros or the identity."""
    g = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return drafter


def text(target, n, seed=1):
    return torch.randint(target.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))


def committed(target, drafter, idx, n):
    """What a drafter absorbs when the first n tokens of idx are committed and token n is the anchor."""
    _, h = target(idx[:, :n], taps=drafter.taps)
    return Committed(idx[0, :n + 1], [x[0] for x in h], torch.tensor(0), torch.tensor(n))


# ---------------------------------------------------------------------------------------------------------------------
# Training sees what inference computes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EAGLES)
@torch.no_grad()
def test_training_pass_equals_drafting(name, target):
    """Step i of the training pass is what drafting computes in its pass i, at every slot (one step for EAGLE-1 and 2)."""
    method = importlib.import_module(name)
    settings = {"ttt": 4} if name == "eagle3" else {"noise": 0.0}
    session, drafter, _, _ = a_round(name, target, **settings)
    shaken(drafter)
    outputs, advance = [], drafter.advance
    drafter.advance = lambda *a: outputs.append(advance(*a)) or outputs[-1]
    idx = text(target, 20)
    drafter(target, idx)
    drafter.advance = advance
    assert len(outputs) == (4 if name == "eagle3" else 1)
    for n in (1, 2, 7, 15):
        drafter.reset(session)
        drafter.absorb(target, committed(target, drafter, idx, n))
        state = drafter.state
        for i, out in enumerate(outputs):
            if i > 0:
                state = drafter.step(target, state, idx[0, n + i:n + i + 1], i, torch.zeros(1, i, dtype=torch.float64))
            assert torch.allclose(state[0], out[0, n - 1], atol=1e-10, rtol=0), (n, i)
    assert method.Drafter.kind == drafter.kind


@pytest.mark.parametrize("name", EAGLES)
@torch.no_grad()
def test_labels_are_the_targets_own(name, target):
    """Drafts that are the target's own laws, each at the position it is drafted for, cost the entropy of these laws, the least
    there is; uniform drafts cost log V."""
    _, drafter, _, _ = a_round(name, target, **({"ttt": 3} if name == "eagle3" else {"noise": 0.0}))
    idx, V, costs = torch.cat([text(target, 18, seed) for seed in (1, 2)]), target.config.vocab_size, []
    logits = target(idx)[0]
    for read in (lambda _, a: logits[:, -a.shape[1]:], lambda _, a: torch.zeros(*a.shape[:2], V, dtype=torch.float64)):
        drafter.read = read
        costs.append(drafter(target, idx).item())
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    steps = [(0.8 ** i, entropy[:, 1 + i:].mean()) for i in range(3)] if name == "eagle3" else [(1.0, entropy[:, 1:].mean())]
    least = sum(w * h for w, h in steps).item() / sum(w for w, _ in steps)
    weight = 1.0 if name == "eagle3" else drafter.args.w_cls
    assert costs[1] - costs[0] == pytest.approx(weight * (math.log(V) - least), abs=1e-5)


@pytest.mark.parametrize("name", EAGLES)
@torch.inference_mode()
def test_a_drafted_path_continues_the_sequence(name, target):
    """The passes along a drafted path are those of one causal sequence: committed slots with the target's features, then drafted
    ones with the drafter's own outputs, at consecutive positions."""
    session, drafter, _, _ = a_round(name, target)
    shaken(drafter)
    idx, n, drafted = text(target, 12), 7, 4
    new = committed(target, drafter, idx, n)
    drafter.reset(session)
    drafter.absorb(target, new)
    states = [drafter.state.clone()]
    for i in range(1, drafted + 1):
        states.append(drafter.step(target, states[-1], idx[0, n + i:n + i + 1], i, torch.zeros(1, i, dtype=torch.float64)))
    first = drafter.fuse([h[None] for h in new.h]) if name == "eagle3" else new.h[0][None]
    rows = torch.cat([first, torch.stack(states[:-1], 1)], 1)
    positions = drafter.angles(torch.arange(n + drafted))
    whole = drafter.advance(target, rows, idx[:, 1:n + drafted + 1], positions,
                            lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True))
    assert torch.allclose(whole[0, n - 1:], torch.cat(states), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", EAGLES)
@torch.inference_mode()
def test_drafted_nodes_see_their_own_ancestors(name, target):
    """Every expanded node of a tree computes what it computes when its path is drafted alone."""
    session, drafter, _, _ = a_round(name, target, **({} if name == "eagle1" else {"width": 4, "beam": 4, "depth": 3}))
    shaken(drafter)
    idx, n, levels, step = text(target, 12), 7, [], drafter.step

    def start():
        drafter.reset(session)
        drafter.absorb(target, committed(target, drafter, idx, n))

    def recorded(target, states, tokens, *rest):
        levels.append((states, tokens, step(target, states, tokens, *rest)))
        return levels[-1][2]

    start()
    drafter.step = recorded
    drafter.draft(target, idx[0, n:n + 1])
    drafter.step, above, paths = step, drafter.state.clone(), [()]
    assert len(levels) >= 3 and len(levels[1][1]) > 1
    for states, tokens, outputs in levels:
        parents = [(above == state).all(1).nonzero()[0].item() for state in states]  # the row whose output a node goes on from
        paths = [(*paths[p], token) for p, token in zip(parents, tokens)]
        for path, output in zip(paths, outputs):
            start()
            state = drafter.state
            for depth, token in enumerate(path, 1):
                state = step(target, state, token[None], depth, torch.zeros(1, depth, dtype=torch.float64))
            assert torch.allclose(state[0], output, atol=1e-10, rtol=0)
        above = outputs


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_training_blocks_equal_drafting(name, target, monkeypatch):
    """A block trained among others, in the middle of a sequence, computes what drafting computes from the text before its anchor
    alone: nothing leaks from its future, from other blocks, or across a block's border."""
    _, drafter, _, _ = a_round(name, target, block_size=5, n_draft_layer=2, n_anchors=6)
    shaken(drafter)
    idx, seen = text(target, 24), []
    order = torch.tensor([[3.0, 0.1, 0.2, 0.3, 9, 9, 9, 0.0, 9, 9, 0.4, 9, 9, 9, 9, 9, 9, 9, 0.5]])
    monkeypatch.setattr(torch, "rand", lambda *size, **_: order if size[-1] == 19 else 1 / 0)
    anchors = (1 + order.argsort(1)[0, :6]).tolist()
    assert len({abs(a - b) for a in anchors for b in anchors} & {1, 2, 3}) == 3  # blocks overlap
    hook = drafter.norm.register_forward_hook(lambda _, __, out: seen.append(out))
    drafter(target, idx)
    monkeypatch.undo()
    trained = seen.pop()[0].unflatten(0, (6, 5))
    for a, block in zip(anchors, trained):
        session, *_ = a_round(name, target, prompt=idx[0, :a].tolist(), drafter=drafter)
        drafter.draft(target, idx[0, a:a + 1])
        assert torch.allclose(seen.pop(), block[1:], atol=1e-10, rtol=0), a
        assert session.length == a + 1
    hook.remove()


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_slot_k_is_trained_on_token_anchor_plus_k(name, target, monkeypatch):
    """An oracle that says token a+k in slot k of the block at anchor a has loss 0: no shift; any other slot's token has not."""
    _, drafter, _, _ = a_round(name, target, block_size=5, n_anchors=3, hard=True)
    idx = text(target, 30)
    order = torch.rand(1, 25, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: order)
    anchors = 1 + order.argsort(1)[0, :3]
    V = target.config.vocab_size
    for shift, perfect in ((0, True), (1, False), (-1, False)):
        said = torch.stack([idx[0, a + 1 + shift:a + 5 + shift] for a in anchors])
        monkeypatch.setattr(target, "head", lambda x, said=said: 1e3 * torch.nn.functional.one_hot(said, V)[None].double()
                            if x.shape[1] == 3 else x @ target.wte.weight.T)
        assert (drafter(target, idx).item() < 1e-6) == perfect


# ---------------------------------------------------------------------------------------------------------------------
# Caches and features
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_drafts_equal_those_of_a_drafter_built_anew(name):
    """After every round the drafter drafts what one would that absorbed the whole text from scratch: no row of an estimate, of a
    rejected node or of a block survives."""
    target = tiny(vocab_size=9, max_seq_len=64, n_layer=8)  # so small a vocabulary that random drafts are accepted now and then
    settings = {"drawn": 0} if name in EAGLES else {}
    session, drafter, _, _ = a_round(name, target, **settings)
    shaken(drafter)
    session, drafter, _, verify_ = a_round(name, target, drafter=drafter, temperature=1.0)  # deterministic drafts of a random text
    words, accepted = [1, 2, 3, 4] + session.record.tokens, 0
    while len(words) < 45:
        tree = drafter.draft(target, session.anchor)
        anew = copy.deepcopy(drafter)
        anew.reset(session)
        new = committed(target, anew, torch.tensor([words]), len(words) - 1)
        anew.absorb(*((target, new) if name in EAGLES else (new,)))
        again = anew.draft(target, session.anchor)
        assert again.tokens.tolist() == tree.tokens.tolist()
        assert again.topology.parent.tolist() == tree.topology.parent.tolist()
        verify_(tree)
        new = [t for t in session.report.tolist() if t >= 0]
        accepted += len(new) - 1
        words += new
        assert drafter.cache.pos == session.cache.pos == len(words) - 1
    assert accepted > 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n_layer", [2, 3, 5, 7, 8, 12, 24, 36])
def test_taps_are_layers_of_the_target(name, n_layer):
    """Whatever the depth of the target, taps are layers that exist, in order; DFlash's are distinct."""
    method = importlib.import_module(name)
    from model import GPTConfig
    taps = method.Drafter(GPTConfig(16, 8, n_layer, 2, 16), method.Args()).taps
    assert all(1 <= t <= n_layer for t in taps) and taps == sorted(taps)
    if name in BLOCKS:
        assert len(set(taps)) == len(taps) == min(n_layer, method.Args().n_taps)
    if name == "eagle3" and n_layer >= 7:
        assert taps == [2, n_layer // 2, n_layer - 3] and len(set(taps)) == 3


@torch.no_grad()
def test_eagle1_sees_the_sampled_token(target):
    """The draft depends on the anchor token; in the ablation it does not."""
    idx = text(target, 9)
    other = idx.clone()
    other[0, 8] = (idx[0, 8] + 1) % target.config.vocab_size
    for no_token in (False, True):
        session, drafter, _, _ = a_round("eagle1", target, no_token=no_token)
        states = []
        for words in (idx, other):
            drafter.reset(session)
            drafter.absorb(target, committed(target, drafter, words, 8))
            states.append(drafter.state)
        assert torch.equal(*states) == no_token


def test_eagle2_runs_an_eagle1_checkpoint(target):
    """The two drafters have the same weights under the same names, and the same kind of checkpoint."""
    one, two = (importlib.import_module(n) for n in EAGLES[:2])
    torch.manual_seed(0)
    drafter = one.Drafter(target.config, one.Args()).double()
    two.Drafter(target.config, two.Args()).double().load_state_dict(drafter.state_dict())
    assert one.Drafter.kind == two.Drafter.kind


# ---------------------------------------------------------------------------------------------------------------------
# Trees
# ---------------------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def test_eagle1_tree_is_the_published_one(target):
    """25 nodes below the anchor, 4/8/8/3/2 by level; siblings are the top tokens in order, all different."""
    _, _, draft, _ = a_round("eagle1", target)
    tree = draft()
    assert torch.bincount(tree.topology.depth).tolist() == [1, 4, 8, 8, 3, 2]
    for node in range(26):
        children = tree.tokens[tree.topology.parent == node].tolist()
        assert len(set(children)) == len(children)


@pytest.mark.parametrize("name", EAGLES[1:])
@torch.inference_mode()
def test_dynamic_tree_holds_the_best_values(name, target):
    """With room for everything to be expanded, the tree is the set of the N - 1 best path values, found here by brute force."""
    session, drafter, _, _ = a_round(name, target, width=3, beam=9, depth=2, n_nodes=9)
    shaken(drafter)
    drafter.width, drafter.beam = 3, 3  # beam <= width: with depth 1 every node of the first level is expanded
    drafter.args.depth = 1
    drafter.reset(session)
    drafter.absorb(target, committed(target, drafter, text(target, 12), 11))
    tree = drafter.draft(target, text(target, 12)[0, 11:])
    sharp = importlib.import_module(name).GREEDY                # of the confidences at T = 0
    first = (sharp * drafter.read(target, drafter.state)).log_softmax(-1)[0].topk(3)
    values = {(a,): v for a, v in zip(first.indices.tolist(), first.values.tolist())}
    for a, v in list(values.items()):
        sees = torch.zeros(1, 1, dtype=torch.float64)
        after = (sharp * drafter.read(target, drafter.step(target, drafter.state, torch.tensor(a), 1, sees))).log_softmax(-1)[0].topk(3)
        values |= {a + (b,): v + w for b, w in zip(after.indices.tolist(), after.values.tolist())}
    best = set(sorted(values, key=values.get, reverse=True)[:8])
    assert set(paths(tree)) == best


def paths(tree):
    """The token paths of all nodes but the anchor."""
    found = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.topology.parent.tolist()[1:]):
        found.append(found[parent] + (token,))
    return found[1:]


@pytest.mark.parametrize("name", EAGLES[1:])
@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("width, beam, n_nodes", [(3, 2, 12), (12, 3, 1)], ids=["roomy", "crowded"])
@torch.inference_mode()
def test_dynamic_tree_is_connected_under_ties(name, drawn, width, beam, n_nodes, target, monkeypatch):
    """All confidences equal: parents come before their children, none is missing, no sibling occurs twice, only drawn
    nodes are expanded, and what was drawn is kept, also where leaves near the root are worth more and would fill the tree."""
    torch.manual_seed(0)
    monkeypatch.setattr(importlib.import_module(name), "ALPHA", 0.2)  # of little worth: the deep ones less than leaves near the root
    session, drafter, _, _ = a_round(name, target, temperature=1.0 if drawn else 0.0, width=width, beam=beam, depth=3, n_nodes=n_nodes,
                                     drawn=drawn)
    drafter.read = lambda target, a: torch.zeros(len(a), target.config.vocab_size, dtype=torch.float64)
    tree = drafter.draft(target, session.anchor, session.law)
    parent = tree.topology.parent
    assert parent[0] == -1 and (parent[1:] < torch.arange(1, len(parent))).all() and (parent[1:] >= 0).all()
    assert len(set(paths(tree))) == len(parent) - 1
    depth = [0]
    for p in parent[1:].tolist():
        depth.append(depth[p] + 1)
    assert tree.topology.depth.tolist() == depth
    if drawn:
        has_law = tree.q.sum(1) > 0
        levels = [1]                                           # expanded in each: of the drawn children, at most `beam`
        for _ in range(3):
            levels.append(min(beam, drawn * levels[-1]))
        assert has_law.sum() == sum(levels) and tree.topology.drawn[has_law][1:].all()
        for node in has_law.nonzero()[:, 0]:
            assert (tree.topology.drawn & (parent == node)).sum() == drawn


@pytest.mark.parametrize("name", EAGLES[1:])
@torch.inference_mode()
def test_sampled_tree_keeps_the_best_leaves(name, target):
    """At T > 0, one child drawn: the drawn nodes are a path of full depth, and of their siblings the tree keeps those of greatest
    value, the chance α^i of coming that far times (1-α) q."""
    torch.manual_seed(0)
    method = importlib.import_module(name)
    session, drafter, _, _ = a_round(name, target, temperature=1.0, width=4, beam=2, depth=3, n_nodes=11)
    shaken(drafter)
    drafter.reset(session)
    drafter.absorb(target, committed(target, drafter, text(target, 12), 11))
    tree = drafter.draft(target, text(target, 12)[0, 11:], session.law)
    parent, drawn = tree.topology.parent, tree.topology.drawn
    path = [0] + drawn.nonzero()[:, 0].tolist()
    assert len(path) == 5 and parent[path[1:]].tolist() == path[:-1]
    values = {}
    for i, (node, child) in enumerate(pairwise(path)):
        q = tree.q[node].index_fill(0, tree.tokens[child], -1)
        values |= {(node, x): method.ALPHA ** i * (1 - method.ALPHA) * q[x].item() for x in q.topk(3).indices.tolist()}
    best = set(sorted(values, key=values.get, reverse=True)[:6])
    assert {(parent[n].item(), tree.tokens[n].item()) for n in range(1, 11) if not drawn[n]} == best


@pytest.mark.parametrize("name", EAGLES[1:])
@torch.inference_mode()
def test_a_sure_parent_is_kept_before_its_child(name, target):
    """Where a child is certain it is worth as much as its parent: of a path that does not fit, the beginning is kept."""
    session, drafter, _, _ = a_round(name, target, width=3, beam=2, depth=4, n_nodes=3)
    level = count(1)
    drafter.read = lambda target, a: 1e4 * torch.eye(target.config.vocab_size, dtype=torch.float64)[[next(level)] * len(a)]
    assert paths(drafter.draft(target, session.anchor)) == [(1,), (1, 2)]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("N", [2, 6, 20])
@torch.inference_mode()
def test_best_first_tree_is_the_best(name, N, target):
    """The heap finds the N - 1 likeliest prefixes of all, found here by brute force."""
    _, drafter, draft, _ = a_round(name, target, block_size=4, tree=N, **({"n_candidates": 4} if name == "dflash2" else {}))
    shaken(drafter)
    _, drafter, draft, _ = a_round(name, target, drafter=drafter)
    found = {}
    best_first = drafter.best_first
    drafter.best_first = lambda *a: found.update(args=a) or best_first(*a)
    tree = draft()
    scores = found["args"][1].log_softmax(-1)
    values = {}
    for n in (1, 2, 3):
        for ranks in product(range(scores.shape[-1]), repeat=n):
            if name == "dflash2":
                tokens = tuple(found["args"][2][t, b].item() for t, b in enumerate(ranks))
                values[tokens] = sum(scores[t, a, b].item() for t, (a, b) in enumerate(zip((0,) + ranks, ranks)))
            else:
                values[ranks] = sum(scores[t, x].item() for t, x in enumerate(ranks))
    best = sorted(values, key=values.get, reverse=True)[:N - 1]
    assert set(paths(tree)) == set(best)


@torch.inference_mode()
def test_best_first_tree_of_a_sure_draft_is_the_chain(target):
    """Where one path dominates, the tree of B nodes is the block's chain."""
    _, drafter, _, _ = a_round("dflash", target, block_size=6, tree=6)
    logits = 50 * torch.eye(target.config.vocab_size, dtype=torch.float64)[torch.tensor([3, 1, 4, 1, 5])]
    tree = drafter.best_first(torch.tensor([2]), logits)
    assert tree.tokens.tolist() == [2, 3, 1, 4, 1, 5] and tree.topology.parent.tolist() == [-1, 0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------------------
# DFlash-2
# ---------------------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def test_dflash2_starts_as_dflash(target):
    """With a DFlash's weights and nothing trained, DFlash-2 has the same drafts, and draws them from the same law."""
    _, one, _, _ = a_round("dflash", target)
    shaken(one)
    _, two, _, _ = a_round("dflash2", target)
    missing = two.load_state_dict(one.state_dict(), strict=False)
    assert not missing.unexpected_keys and {k.split(".")[0] for k in missing.missing_keys} <= {"A", "B", "gate", "layers"}
    assert all("convs" in k for k in missing.missing_keys if k.startswith("layers"))
    for prompt in ([1], [5, 6, 7, 8], list(range(20))):
        trees = [a_round(n, target, prompt=prompt, drafter=d)[2]() for n, d in (("dflash", one), ("dflash2", two))]
        assert torch.equal(trees[0].tokens, trees[1].tokens)
        q = [a_round(n, target, prompt=prompt, drafter=d, temperature=1.0)[2]().q for n, d in (("dflash", one), ("dflash2", two))
             if torch.manual_seed(3)]  # prefill draws the same anchor
        assert (q[0] - q[1]).abs().max() < 1e-12


@torch.no_grad()
def test_dynamic_conv_shifts_within_a_block():
    """The second tap alone moves every slot's state to the next slot of its block: slot 1 reads the anchor, slot 0 nothing; the
    kernels are those of the formula."""
    torch.manual_seed(0)
    conv = DynamicConv(32, block_size=4, group=16).double()
    x, h = torch.randn(2, 12, 32, dtype=torch.float64), torch.randn(2, 12, 32, dtype=torch.float64)
    assert torch.equal(conv(x, conv.kernels(h * 0)[0]), x)     # the identity to start with
    conv.base.data[:, 0], conv.base.data[:, 1] = 0, 1
    shifted = conv(x, conv.kernels(h * 0)[1]).unflatten(1, (3, 4))
    assert torch.equal(shifted[:, :, 1:], x.unflatten(1, (3, 4))[:, :, :-1]) and not shifted[:, :, 0].any()
    torch.nn.init.normal_(conv.dynamic.weight)
    torch.nn.init.normal_(conv.base)
    D = (h @ conv.dynamic.weight.T).view(2, 12, 2, 2, 2)       # side, tap, group
    for side, kernel in enumerate(conv.kernels(h)):
        for tap in range(2):
            for channel in (0, 15, 16, 31):
                expected = conv.base[side, tap, channel] + D[:, :, side, tap, channel // 16]
                assert torch.allclose(kernel[tap][:, :, channel], expected)


@torch.inference_mode()
def test_selector_walks_greedily_and_scores_pairs(target):
    """The drafted path takes at every slot the best successor of the token just taken, S_t(a, b) computed here one by one."""
    _, drafter, _, _ = a_round("dflash2", target, block_size=5, n_candidates=6)
    shaken(drafter)
    torch.nn.init.normal_(drafter.B.weight)
    _, drafter, draft, _ = a_round("dflash2", target, drafter=drafter)
    seen = []
    hook = drafter.norm.register_forward_hook(lambda _, __, out: seen.append(out))
    tree = draft()
    hook.remove()
    a, moved = tree.tokens[0], False
    for t, h in enumerate(seen[-1]):
        U = target.head(h)
        candidates = U.topk(6).indices
        S = U[candidates] + drafter.B(candidates) @ (drafter.A(a) * drafter.gate(h))
        moved |= bool(S.argmax() != 0)
        a = candidates[S.argmax()]
        assert a == tree.tokens[t + 1]
    assert moved                                                # the selector did choose against the LM head


@torch.inference_mode()
def test_selector_returns_the_law_it_drew_from(target):
    """At T > 0 the drafted pair of tokens has the law that q claims, row by row (chi-square, false alarm below 1e-6), and q is what
    the selector says: softmax of U + the pair's score, where tokens outside the candidates have no score, whatever went before."""
    _, drafter, _, _ = a_round("dflash2", target, block_size=3, n_candidates=4)
    shaken(drafter)
    torch.nn.init.normal_(drafter.B.weight)
    T = 2.5                                                     # so that tokens outside the candidates are drawn too
    session, drafter, _, _ = a_round("dflash2", target, drafter=drafter, temperature=T)
    hidden = []
    hook = drafter.norm.register_forward_hook(lambda _, __, out: hidden.append(out))
    torch.manual_seed(0)
    anchor, count, law, n = session.anchor.clone(), {}, {}, 4000
    for _ in range(n):
        tree = drafter.draft(target, anchor, session.law)
        a, b = tree.tokens[1:].tolist()
        assert (tree.q[:2] > 0).all() and torch.allclose(tree.q[:2].sum(1), torch.ones(2, dtype=torch.float64))
        count[a, b] = count.get((a, b), 0) + 1
        if (a, 0) not in law:
            for q, before, h in zip(tree.q, (anchor[0], a), hidden[-1]):
                U = target.head(h)
                top = U.topk(4).indices
                S = U.index_add(0, top, drafter.B(top) @ (drafter.A(torch.tensor(int(before))) * drafter.gate(h)))
                assert (q - (S / T).softmax(-1)).abs().max() < 1e-12
        law |= {(a, c): (tree.q[0, a] * tree.q[1, c]).item() for c in tree.q[1].nonzero()[:, 0].tolist()}
    hook.remove()
    outside = {a for a, _ in count} - set(target.head(hidden[-1][0]).topk(4).indices.tolist())
    assert outside
    first = {a for a, _ in count}
    assert abs(sum(law.values()) - tree.q[0, list(first)].sum()) < 1e-9
    cells = [(count.get(k, 0), n * p) for k, p in law.items() if n * p >= 5]
    cells.append((n - sum(c for c, _ in cells), n - sum(e for _, e in cells)))
    statistic = sum((c - e) ** 2 / e for c, e in cells if e > 1)
    dof = len(cells) - 1
    assert torch.special.gammaincc(torch.tensor(dof / 2), torch.tensor(statistic / 2)) > 1e-6
    assert math.isfinite(statistic) and verify.n_alpha([]) == []


@torch.no_grad()
def test_selector_is_trained_on_the_law_that_drafts_are_drawn_from(target):
    """Cross-entropy of the drafts' law, softmax(U + score), is the selector's loss and that of the tokens outside the K among
    themselves, which the selector cannot change."""
    _, drafter, _, _ = a_round("dflash2", target, block_size=3, n_candidates=4)
    shaken(drafter)
    torch.nn.init.normal_(drafter.B.weight)
    torch.manual_seed(0)
    V, label = target.config.vocab_size, torch.tensor([[[3, 1, 2]]])
    h = torch.randn(1, 1, 2, target.config.n_embd, dtype=torch.float64)
    U, p = (torch.randn(1, 1, 2, V, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    loss, p = drafter.selector_loss(h, U, p.exp(), label), p.exp()
    for t in range(2):
        u = U[0, 0, t]
        top = u.topk(4).indices
        log_q = u.index_add(0, top, drafter.B(top) @ (drafter.A(label[0, 0, t]) * drafter.gate(h[0, 0, t]))).log_softmax(-1)
        others = u.scatter(0, top, -math.inf).log_softmax(-1).scatter(0, top, 0)
        assert abs(-(p[0, 0, t] * log_q).sum() - loss[0, 0, t] + (p[0, 0, t] * others).sum()) < 1e-6  # the loss is in fp32


@torch.no_grad()
def test_dflash2_trains_with_more_candidates_than_tokens_and_without_unused_weights(target):
    """K beyond the vocabulary is all of it; without the selector there are no tables that never get a gradient."""
    module = importlib.import_module("dflash2")
    idx = text(target, 20)
    drafter = module.Drafter(target.config, module.Args(block_size=4, n_candidates=5000, seq_len=20)).double()
    assert drafter(target, idx).isfinite()
    drafter = module.Drafter(target.config, module.Args(block_size=4, no_selector=True, seq_len=20)).double()
    with torch.enable_grad():
        drafter(target, idx).backward()
    assert all(p.grad is not None for p in drafter.parameters())


def test_dflash2_needs_groups_of_16_channels(target):
    """A target of another width is refused in a line that says what to do."""
    module = importlib.import_module("dflash2")
    config = dataclasses.replace(target.config, n_embd=40)
    with pytest.raises(module.UserError, match="--no_conv"):
        module.Drafter(config, module.Args(block_size=4, seq_len=20))
    module.Drafter(config, module.Args(block_size=4, seq_len=20, no_conv=True))


@torch.no_grad()
def test_eagle3_takes_features_of_any_scale(target):
    """Features that are a thousand times as large, each by itself, fuse to the same."""
    _, drafter, _, _ = a_round("eagle3", target)
    h = [torch.randn(1, 5, target.config.n_embd, dtype=torch.float64) for _ in drafter.taps]
    scaled = [x * factor for x, factor in zip(h, (1.0, 100.0, 1000.0))]
    torch.testing.assert_close(drafter.fuse(scaled), drafter.fuse(h), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_eagle3_reads_a_normed_state(target):
    """The state is free in scale: only its norm reaches the LM head."""
    _, drafter, _, _ = a_round("eagle3", target)
    a = torch.randn(3, target.config.n_embd, dtype=torch.float64)
    assert (drafter.read(target, 50 * a) - drafter.read(target, 100 * a)).abs().max() < 1e-6


@torch.no_grad()
def test_the_conv_behind_a_sublayer_has_its_own_kernel(target):
    """With the kernels behind both sublayers zero, and those before them not, a layer of DFlash-2 passes its input on."""
    _, drafter, _, _ = a_round("dflash2", target, block_size=4)
    layer, x = drafter.layers[0], torch.randn(1, 4, target.config.n_embd, dtype=torch.float64)
    for conv in layer.convs:
        conv.base[1] = 0
    out = layer(x, drafter.angles(torch.arange(4)), torch.nn.functional.scaled_dot_product_attention)
    assert torch.equal(out, x)
