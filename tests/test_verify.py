"""The output of every method has exactly the target's law.

Two kinds of evidence. The rules themselves are run on all branches of their random decisions, for all drafts, and the law that
comes out is compared with the target's to 1e-12. Whole generations are compared with plain decoding token for token (greedy), by
enumeration (short chains), and by chi-square (everything; a test raises a false alarm with probability 1e-6).
"""
import dataclasses
import importlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    METHODS,
    Informed,
    build,
    counted,
    drafts,
    every_run,
    generate,
    joint,
    output_law,
    p_value,
    tables,
    target_law,
    tiny,
    topology,
    tv,
    ways,
)
from rounds import a_round

import verify
from model import KVCache
from verify import Topology, Tree, chain, verify_block, verify_chain, verify_tree

FALSE_ALARM = 1e-6
EXACT = 1e-12


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def laws(kind, V, D, seed=0):
    """Tables (P, Q) of target and draft."""
    g = rng(seed)
    P, Q = tables(V, D, g), tables(V, D, g)
    if kind == "zeros":
        P, Q = tables(V, D, g, 0.4), tables(V, D, g, 0.4)
    if kind == "equal":
        Q = P
    if kind == "nearly equal":
        Q = [x * (1 + 1e-15 * torch.randn(x.shape, generator=g, dtype=x.dtype)) for x in P]
        Q = [x / x.sum(-1, keepdim=True) for x in Q]
    if kind == "disjoint":
        even = torch.arange(V) % 2 == 0
        P, Q = [x * even for x in P], [x * ~even for x in Q]
        P, Q = ([x / x.sum(-1, keepdim=True) for x in T] for T in (P, Q))
    if kind == "certain":
        Q = [F.one_hot(x.argmin(-1), V).double() for x in P]
    return P, Q


KINDS = ["random", "zeros", "equal", "nearly equal", "disjoint", "certain"]


# ---------------------------------------------------------------------------------------------------------------------
# The rules, exactly
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_chain_law(rule, kind):
    """A drawn chain, verified as a chain, as a block and as a tree: the joint law of all committed tokens is p's."""
    for V, gamma, seed in ((3, 1, 0), (3, 3, 0), (3, 3, 1), (4, 1, 0), (4, 2, 0), (4, 2, 1)):
        P, Q = laws(kind, V, gamma, seed)
        law, accepted = output_law(rule, chain(gamma), P, Q)
        assert (law - joint(P)).abs().max() < EXACT
        if "equal" in kind:
            assert abs(accepted - gamma) < 1e-9
        if kind == "disjoint":
            assert accepted == 0


@pytest.mark.parametrize("rule", [verify_chain, verify_block])
def test_one_hot_chain_law(rule):
    """A chain without q, whatever its tokens are and however they were found."""
    for seed in range(3):
        P, Q = laws("zeros", 3, 3, seed)
        assert (output_law(rule, chain(3), P, Q, one_hot=True)[0] - joint(P)).abs().max() < EXACT
        likeliest = [F.one_hot(x.argmax(-1), 3).double() for x in P]
        law, accepted = output_law(rule, chain(3), P, likeliest, one_hot=True)
        assert (law - joint(P)).abs().max() < EXACT
        best = joint([x * y for x, y in zip(P[:3], likeliest)]).sum().item()
        assert accepted >= 3 * best > 0


def test_block_accepts_no_less_than_chain():
    """Block verification is never worse than token by token, and strictly better somewhere."""
    gains = []
    for seed in range(20):
        P, Q = laws("random", 3, 3, seed)
        gains.append(output_law(verify_block, chain(3), P, Q)[1] - output_law(verify_chain, chain(3), P, Q)[1])
    assert min(gains) > -EXACT and max(gains) > 0.01


TREES = {  # V, parent of every node
    "three siblings": (4, [-1, 0, 0, 0]),
    "chain": (3, [-1, 0, 1, 2]),
    "binary": (3, [-1, 0, 0, 1, 1, 2]),
    "deep": (3, [-1, 0, 0, 2, 3]),
    "interleaved": (3, [-1, 0, 1, 0, 3, 1]),
    "more siblings than tokens": (3, [-1, 0, 0, 0, 0]),
}
FIRST = {name: [i for i, a in enumerate(parent) if a not in parent[:i] and i] for name, (_, parent) in TREES.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("how", ["chosen", "drawn independently", "drawn without replacement", "one drawn, the rest chosen"])
def test_tree_law(how, shape, kind):
    """A tree of any shape, its siblings drafted in any of the four ways: the law of the path, the bonus and what follows is p's."""
    V, parent = TREES[shape]
    drawn = {"chosen": [], "one drawn, the rest chosen": FIRST[shape]}.get(how, range(1, len(parent)))
    t = topology(parent, drawn)
    P, Q = laws(kind, V, t.max_depth)
    law, accepted = output_law(verify_tree, t, P, Q, replacement=how == "drawn independently", one_hot=how == "chosen")
    assert (law - joint(P)).abs().max() < EXACT
    if kind == "disjoint" and how.startswith("drawn"):
        assert accepted == 0
    if kind == "equal" and how != "chosen" and shape in ("three siblings", "chain", "more siblings than tokens"):
        assert abs(accepted - t.max_depth) < EXACT  # the first sibling is always taken


def test_two_drawn_then_chosen_law():
    """Several drawn children before several chosen ones, which depend on what was drawn."""
    t = topology([-1, 0, 0, 0, 0, 2, 2, 3], [1, 2, 5])
    for kind in KINDS:
        P, Q = laws(kind, 4, 2)
        law, accepted = output_law(verify_tree, t, P, Q)
        assert (law - joint(P)).abs().max() < EXACT and accepted > 0.5


def test_more_siblings_accept_more():
    """Each way of using three siblings beats one drawn token, and one node accepts what the table of verify.py says."""
    P, Q = laws("random", 4, 1, 3)
    single = output_law(verify_tree, topology([-1, 0], [1]), P, Q)[1]
    for drawn, replacement, kind in (((1, 2, 3), True, "i.i.d."), ((1, 2, 3), False, "without replacement"),
                                     ((1,), False, "1 drawn + top-(k-1) of the rest"), ((), False, "top-k")):
        accepted = output_law(verify_tree, topology([-1, 0, 0, 0], drawn), P, Q, replacement, one_hot=not drawn)[1]
        law, said = verify.one_node(P[0], Q[0], kind)
        assert abs(accepted - said) < EXACT and (law - P[0]).abs().max() < EXACT
        assert accepted > single + 0.05
    law, best = verify.one_node(P[0], Q[0], "top-(k-1) + 1 drawn from the rest")
    assert best > said and (law - P[0]).abs().max() < EXACT


def test_decisions_off_the_path_play_no_part():
    """Full enumeration, every node deciding for itself: the same law as with outcomes shared by the nodes of a depth."""
    V, t = 2, topology([-1, 0, 0, 1], [1, 2, 3])
    P, Q = laws("random", V, 2)
    tokens, code, weight = drafts(t, Q)
    law, n_runs = torch.zeros(V, V, V, dtype=torch.float64), 0
    for draft, at, chance in zip(tokens, code.tolist(), weight.tolist()):
        p, q = (torch.stack([T[d].view(-1, V)[c] for d, c in zip(t.depth.tolist(), at)]) for T in (P, Q))
        for branch, (path, n, bonus) in every_run(partial(verify_tree, p, Tree(draft, t, q))):
            new = draft[path[1:n]].tolist() + [bonus.item()]
            rest = P[len(new):]
            after = joint([T[tuple(new)] for T in rest]) if rest else torch.ones((), dtype=torch.float64)
            law[tuple(new)] += chance * branch * after
            n_runs += 1
    assert n_runs > 100 and (law - joint(P)).abs().max() < EXACT
    assert (law - output_law(verify_tree, t, P, Q)[0]).abs().max() < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# Wrong rules are noticed: each is injected into the real code, and the same enumeration finds the bias
# ---------------------------------------------------------------------------------------------------------------------
def bias(rule, t, wrong, V=4, seeds=5, **right):
    """Mean total variation from p with the wrong settings; with the right ones it is 0."""
    found = []
    for seed in range(seeds):
        P, Q = laws("random", V, t.max_depth, seed)
        if right:
            assert tv(output_law(rule, t, P, Q, **right)[0], joint(P)) < EXACT
        found.append(tv(wrong(P, Q), joint(P)))
    return sum(found) / seeds


SIBLINGS = topology([-1, 0, 0, 0], [1, 2, 3])


def test_wrong_chosen_siblings_verified_with_their_softmax():
    """Top-k children are not a sample of q."""
    t = topology([-1, 0, 0, 0])
    assert bias(verify_tree, t, lambda P, Q: output_law(verify_tree, t, P, Q, change=lambda *d: (SIBLINGS, *d))[0], one_hot=True) > 0.1
    argmax = chain(2)
    assert bias(verify_chain, argmax, lambda P, Q: output_law(
        verify_chain, argmax, P, Q, drawn_from=[F.one_hot(x.argmax(-1), 4).double() for x in Q])[0], replacement=False) > 0.1


def test_wrong_drawn_siblings_pruned_by_score():
    """Drawing three and keeping the two likeliest is not drawing two."""
    def prune(tokens, code, weight, Q):
        keep = F.pad(Q[0][tokens[:, 1:]], (1, 0), value=2).topk(3).indices.sort(1).values
        return topology([-1, 0, 0], [1, 2]), tokens.gather(1, keep), code.gather(1, keep), weight

    assert bias(verify_tree, SIBLINGS, lambda P, Q: output_law(
        verify_tree, SIBLINGS, P, Q, change=lambda *d: prune(*d, Q))[0], replacement=False) > 0.03


def test_wrong_siblings_in_another_order():
    """Siblings drawn without replacement have to be tried in the order in which they were drawn."""
    def by_score(tokens, code, weight, Q):
        order = F.pad(Q[0][tokens[:, 1:]], (1, 0), value=2).argsort(1, descending=True)
        return SIBLINGS, tokens.gather(1, order), code.gather(1, order), weight

    assert bias(verify_tree, SIBLINGS, lambda P, Q: output_law(
        verify_tree, SIBLINGS, P, Q, change=lambda *d: by_score(*d, Q))[0], replacement=False) > 0.03


@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
@pytest.mark.parametrize("residual", ["p itself", "softmaxed"])
def test_wrong_residual(rule, residual, monkeypatch):
    """After a rejection the token comes from (p - q)+ over its sum: not from p, and not from a softmax of it."""
    wrong_norm = {"p itself": lambda w, otherwise: otherwise, "softmaxed": lambda w, otherwise: w.softmax(-1)}[residual]

    def wrong(P, Q):
        with monkeypatch.context() as m:
            m.setattr(verify, "norm", wrong_norm)
            return output_law(rule, chain(2), P, Q)[0]

    assert bias(rule, chain(2), wrong, replacement=False) > 0.05


def test_wrong_replacement_flag():
    """Siblings drawn without replacement and verified as if independent, and the other way round."""
    for replacement in (False, True):
        assert bias(verify_tree, SIBLINGS, lambda P, Q, replacement=replacement: output_law(
            verify_tree, SIBLINGS, P, Q, replacement, told=not replacement)[0], replacement=replacement) > 0.01


def test_wrong_duplicates_dropped():
    """Independent siblings of which equal ones are merged are no longer independent."""
    two, one = topology([-1, 0, 0], [1, 2]), topology([-1, 0], [1])

    def merge(tokens, code, weight, equal):
        m = (tokens[:, 1] == tokens[:, 2]) == equal
        t = one if equal else two
        N = len(t.parent)
        return t, tokens[m, :N], code[m, :N], weight[m]

    assert bias(verify_tree, two, lambda P, Q: sum(output_law(
        verify_tree, two, P, Q, True, change=partial(merge, equal=equal))[0] for equal in (True, False)), replacement=True) > 0.003


@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_wrong_bonus_from_raw_logits(rule):
    """The bonus comes from the processed law, like every other token."""
    def sharp(T):
        return [x ** 2 / (x ** 2).sum(-1, keepdim=True) for x in T]

    for seed in range(3):
        P, Q = laws("random", 4, 2, seed)
        S = sharp(P)
        assert tv(output_law(rule, chain(2), S, Q)[0], joint(S)) < EXACT
        assert tv(output_law(rule, chain(2), S, Q, p_seen=S[:2] + P[2:])[0], joint(S)) > 0.005


@pytest.mark.parametrize("rule", [verify_chain, verify_block, verify_tree])
def test_wrong_q_is_not_what_was_drawn_from(rule):
    """Drawing at one temperature and returning q of another."""
    def wrong(P, Q):
        return output_law(rule, chain(2), P, Q, drawn_from=[x ** 2 / (x ** 2).sum(-1, keepdim=True) for x in Q])[0]

    assert bias(rule, chain(2), wrong, replacement=False) > 0.03


# ---------------------------------------------------------------------------------------------------------------------
# The random decisions themselves
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_accepts_has_its_law(dtype):
    """min(1, p/q), independently for every element (chi-square over 40000 draws)."""
    torch.manual_seed(0)
    p, q = torch.tensor([0.1, 0.3, 0.2, 0.05, 0.9], dtype=dtype), torch.tensor([0.4, 0.6, 0.25, 0.9, 0.3], dtype=dtype)
    hits = verify.accepts(p.expand(40000, 5), q.expand(40000, 5))
    chance = (p / q).clamp(max=1).double()
    code = (hits * 2 ** torch.arange(5)).sum(1)
    law = torch.stack([torch.where(torch.arange(32) >> i & 1 == 1, chance[i], 1 - chance[i]) for i in range(5)]).prod(0)
    assert p_value(code.bincount(minlength=32).double(), law) > FALSE_ALARM


def test_accepts_at_the_edges(monkeypatch):
    """Never at p = 0 or q = 0, always at p >= q > 0, whatever the uniform number is, 0 included."""
    p, q = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.2, 1e-300]), torch.tensor([0.5, 0.0, 0.0, 0.5, 0.1, 1e-30])
    for u in (0.0, 0.5, 1 - 2 ** -53):
        monkeypatch.setattr(torch, "rand", lambda shape, u=u, **kw: torch.full(shape, u, **kw))
        got = verify.accepts(p.double(), q.double()).tolist()
        assert got[:5] == [False, False, False, True, True]


@pytest.mark.parametrize("scale", [1.0, 1e-9, 250.0])
def test_sample_has_its_law(scale):
    """Weights need no normalisation, and rows are independent (chi-square over 40000 draws)."""
    torch.manual_seed(0)
    w = scale * torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2], [0.1, 0.1, 0.7, 0.1, 0.0]], dtype=torch.float64)
    x = verify.sample(w.expand(40000, 2, 5))
    p = w / w.sum(-1, keepdim=True)
    assert p_value((x[:, 0] * 5 + x[:, 1]).bincount(minlength=25).double(), (p[0, :, None] * p[1]).flatten()) > FALSE_ALARM


def test_sample_at_the_edges(monkeypatch):
    """A token of weight 0 is never drawn, at the ends of the vocabulary or for extreme uniform numbers."""
    w = torch.tensor([[0, 0, 1e-30, 0, 3.0, 0], [0.1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1e-300], [0, 1 / 3, 1 / 3, 1 / 3, 0, 0]],
                     dtype=torch.float64)
    for u in (0.0, 1e-17, 0.3, 1 - 2 ** -53):
        monkeypatch.setattr(torch, "rand", lambda shape, u=u, **kw: torch.full(shape, u, **kw))
        x = verify.sample(w)
        assert (w.gather(1, x[:, None]) > 0).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_probs(temperature):
    """Temperature, then top_k, then top_p: against a loop over the sorted tokens."""
    logits = 2 * torch.randn(20, 6, generator=rng(), dtype=torch.float64)
    for top_k, top_p in itertools.product((None, 1, 3, 6, 99), (None, 0.01, 0.5, 0.9, 1.0)):
        p = verify.probs(logits, temperature, top_k, top_p)
        for row, got in zip(logits.tolist(), p):
            order = sorted(range(6), key=lambda x: -row[x])[:top_k]
            w = {x: torch.tensor(row[x] / temperature, dtype=torch.float64).exp().item() for x in order}
            total, mass, kept = sum(w.values()), 0.0, {}
            for x in order:
                if top_p is None or mass < top_p:
                    kept[x] = w[x] / total
                mass += w[x] / total
            want = torch.tensor([kept.get(x, 0) / sum(kept.values()) for x in range(6)], dtype=torch.float64)
            assert (got - want).abs().max() < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# Topologies
# ---------------------------------------------------------------------------------------------------------------------
def test_probs_of_the_coldest_and_the_largest():
    """Tiny temperatures and huge logits are one-hot or even, never NaN."""
    z = torch.tensor([30.0, 1.0, 30.0, -3e38])
    for temperature in (1e-38, 1e-300, 1e-3):
        assert verify.probs(z, temperature).tolist() == [0.5, 0, 0.5, 0]
    assert verify.probs(torch.tensor([3e38, -3e38]), 0.5).tolist() == [1, 0]


def test_topology():
    """Depth, ancestors and the table of drawn children, worked out by hand."""
    t = topology([-1, 0, 0, 2, 0, 2, 3], [2, 4, 3, 5])
    assert t.depth.tolist() == [0, 1, 1, 2, 1, 2, 3] and t.max_depth == 3
    sees = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 4], [0, 2, 5], [0, 2, 3, 6]]
    assert [(row == 0).nonzero().flatten().tolist() for row in t.ancestors] == sees
    assert t.children.tolist() == [[2, 0, 3, 0, 0, 0, 0], [4, 0, 5, 0, 0, 0, 0]]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 17])
def test_chain_topology(n):
    """A chain's nodes see all nodes before them, at any length."""
    t = chain(n)
    assert t.depth.tolist() == list(range(n + 1)) and t.is_chain
    assert ((t.ancestors == 0) == torch.ones(n + 1, n + 1).tril().bool()).all()
    assert Topology(t.parent, n).depth.tolist() == list(range(n + 1))


# ---------------------------------------------------------------------------------------------------------------------
# Greedy decoding: token for token
# ---------------------------------------------------------------------------------------------------------------------
V, LIMIT = 5, 24
PROMPTS = [[0], [3], [1, 4, 0, 2, 2], [2] * 13]
BRANCHED = [-1, 0, 0, 0, 3, 3, 5, 1]
BRANCHED_RANKS = [0, 2, 1, 0, 1, 0, 0, 0]  # the target's own choices are the nodes 3, 5, 6


@pytest.fixture(scope="module")
def target():
    return tiny(V, LIMIT, 3, seed=2)


def informed(target):
    """Chains that go wrong at every position or nowhere, and trees."""
    for j in range(5):
        yield f"chain wrong at {j}", Informed(target, chain(4), ranks=[0] + [int(i == j) for i in range(4)])
    yield "tree", Informed(target, topology(BRANCHED), ranks=BRANCHED_RANKS)
    yield "wide tree", Informed(target, topology([-1] + [0] * 4 + [4] * 4 + [8] * 4))
    yield "hopeless tree", Informed(target, topology([-1, 0, 0, 1, 2]), ranks=[0, 4, 3, 0, 0])


def case_name(case):
    return case[0] + "".join(f" {k}={v}" for k, v in case[1].items())


def same_as_plain(target, run, prompts=PROMPTS):
    for prompt in prompts:
        for n in (0, 1, 2, LIMIT):
            record, plain = run(prompt, n), verify.autoregressive(target, prompt, n)
            assert record.tokens == plain.tokens and len(plain.tokens) == min(n, LIMIT - len(prompt))
            assert sum(record.committed) == max(0, len(record.tokens) - 1) and len(record.from_draft) == len(record.tokens)


@torch.no_grad()
def test_plain_decoding(target):
    """The baseline itself: argmax of uncached passes."""
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) < LIMIT:
            text.append(target(torch.tensor([text]))[0][0, -1].argmax().item())
        record = verify.autoregressive(target, prompt, LIMIT)
        assert record.tokens == text[len(prompt):] and len(set(text)) > 2
        assert record.rounds == [(0, 0)] * (len(record.tokens) - 1)


@pytest.mark.parametrize("name", ["chain wrong at 0", "chain wrong at 1", "chain wrong at 2", "chain wrong at 3", "chain wrong at 4",
                                  "tree", "wide tree", "hopeless tree"])
def test_greedy_is_plain_decoding(target, name):
    """Good and bad drafts alike, to the last position of the context."""
    drafter = dict(informed(target))[name]
    same_as_plain(target, lambda prompt, n: generate(target, drafter, prompt, n))


@pytest.mark.parametrize("case", ways(), ids=case_name)
def test_methods_are_plain_decoding(target, case):
    """Every method in every way it drafts, with random weights; two calls in a row do not know of each other."""
    module, drafter = build(*case, target)
    same_as_plain(target, lambda prompt, n: module.generate(target, drafter, prompt, n))
    fresh = build(*case, target)[1]
    again, first = (module.generate(target, d, PROMPTS[2], 12) for d in (drafter, fresh))
    assert (again.tokens, again.rounds) == (first.tokens, first.rounds)


@pytest.mark.parametrize("case", ways(), ids=case_name)
def test_methods_in_a_small_target(case):
    """One layer, a vocabulary smaller than most trees are wide, a context shorter than a draft."""
    for target in (tiny(4, 6, 1), tiny(V, 9, 2), tiny(V, 12, 8)):
        module, drafter = build(*case, target)
        for prompt in ([0], [1, 2, 3]):
            n = target.config.max_seq_len
            assert module.generate(target, drafter, prompt, n).tokens == verify.autoregressive(target, prompt, n).tokens
            assert len(module.generate(target, drafter, prompt, n, 1.0).tokens) == n - len(prompt)


@pytest.mark.parametrize("case", ways(), ids=case_name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_rounds_stay_within_their_reserve(target, case, temperature, monkeypatch):
    """No pass of a round writes or keeps rows beyond the `nodes` slots that the session holds ready behind the committed ones."""
    drafter = build(*case, target)[1]
    _, _, draft, verify_ = a_round(case[0], target, temperature=temperature, drafter=drafter)
    rows, append, keep = [], KVCache.append, KVCache.keep
    monkeypatch.setattr(KVCache, "append", lambda cache, layer, slots, kv: rows.append((slots.max() - cache.pos).item() + 1)
                        or append(cache, layer, slots, kv))
    monkeypatch.setattr(KVCache, "keep", lambda cache, path, n: rows.append(len(path)) or keep(cache, path, n))
    for _ in range(2):
        verify_(draft())
    assert len(rows) > 4 and max(rows) <= drafter.nodes


# ---------------------------------------------------------------------------------------------------------------------
# Rounds, counting, stopping
# ---------------------------------------------------------------------------------------------------------------------
def cut(record):
    """Rounds that were not cut."""
    return [r for r in record.rounds if r[1] is not None]


@pytest.mark.parametrize("wrong", range(5))
def test_every_accept_length(target, wrong):
    """A chain wrong at position j has exactly j tokens accepted in every round; at 4 it is the oracle, and the bonus is kept."""
    drafter = dict(informed(target))[f"chain wrong at {wrong}"]
    record = generate(target, drafter, [1], 16)
    assert set(cut(record)) == {(4, wrong)}
    assert record.committed[:-1] == [wrong + 1] * (len(record.committed) - 1)
    assert all((accepted is None) == (kept <= wrong) for (_, accepted), kept in zip(record.rounds, record.committed))
    pattern = ([True] * wrong + [False]) * 16
    assert record.from_draft == [False] + pattern[:15]
    assert verify.n_alpha(record.rounds) == [1.0] * wrong + [0.0] * (wrong < 4)


def test_tree_accepts_its_path(target):
    """The path 3, 5, 6 of a tree is found, and its rows, which lie apart, are the target's own from then on."""
    drafter = dict(informed(target))["tree"]
    assert set(cut(generate(target, drafter, [1], 17))) == {(3, 3)}
    assert set(cut(generate(target, dict(informed(target))["hopeless tree"], [1], 9))) == {(2, 0)}


@pytest.mark.parametrize("name", ["chain wrong at 2", "chain wrong at 4", "tree", "wide tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_features_are_the_targets(target, name, temperature):
    """What a drafter absorbs, round by round, is the committed text and the target's features of it, once each, in order."""
    torch.manual_seed(0)
    drafter = dict(informed(target))[name]
    record = generate(target, drafter, [1, 4], 12, temperature)
    text = ([1, 4] + record.tokens)[:len(drafter.text)]
    assert drafter.text[:len(text)] == text and len(drafter.h) == len(record.rounds) + 1
    _, h = target(torch.tensor([drafter.text]), taps=drafter.taps)
    for tap, want in enumerate(h):
        torch.testing.assert_close(torch.cat([part[tap] for part in drafter.h]), want[0], rtol=0, atol=EXACT)


@pytest.fixture
def passes(target):
    """A list that grows by one with every forward pass of the target."""
    passes = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    hook.remove()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_passes_are_counted(target, passes, temperature):
    """One target pass per round and one for the prompt, by a hook on the target; tau is tokens per pass after the prompt's."""
    for _, drafter in informed(target):
        passes.clear()
        record = generate(target, drafter, [1], 11, temperature)
        assert len(passes) == len(record.rounds) + 1 == len(record.committed) + 1
        assert sum(record.committed) == 10 and record.tau == 10 / (len(passes) - 1)


def test_passes_of_the_methods_are_counted(target, passes):
    """The same for every method: drafting never runs the target."""
    for case in ways():
        module, drafter = build(*case, target)
        for temperature in (0.0, 1.0):
            passes.clear()
            record = module.generate(target, drafter, [1], 11, temperature)
            assert len(passes) == len(record.rounds) + 1 and len(record.tokens) == 11


def test_measure(target):
    """tau, passes and equality in the report are those of the records; hooks are gone afterwards."""
    drafter = dict(informed(target))["chain wrong at 2"]
    numbers, pairs = verify.measure(target, lambda *a: generate(target, drafter, *a), [[1], [2], [3, 0]], 10)
    rounds = sum(len(r.rounds) for r, _ in pairs)
    assert numbers["target_passes"] == rounds == 9 and numbers["tau"] == 3.0 and numbers["equal"] == 3
    assert numbers["n_alpha"] == [1.0, 1.0, 0.0] and numbers["new_tokens"] == 30 and not target._forward_hooks


def test_n_alpha():
    """Conditional on all earlier positions being accepted, among the rounds that drafted so far and were not cut."""
    assert verify.n_alpha([(3, 0), (3, 1), (3, 3), (3, None), (2, 2)]) == [0.75, 0.667, 1.0]
    assert verify.n_alpha([(3, 0), (3, 0)]) == [0.0]
    assert verify.n_alpha([(3, None)]) == verify.n_alpha([]) == []


def test_repetition():
    """The share of n-grams seen before."""
    assert verify.repetition([1, 2, 3, 1, 2, 3, 1], n=3) == 0.4
    assert verify.repetition([1, 2], n=3) == 0.0


@pytest.mark.parametrize("name", ["chain wrong at 1", "chain wrong at 4", "tree", "wide tree"])
def test_stop_token(target, name):
    """Decoding ends with the first stop token, wherever in a round it falls, and counts nothing after it."""
    drafter, inside = dict(informed(target))[name], 0
    for prompt in PROMPTS:
        full = verify.autoregressive(target, prompt, 11).tokens
        for stop in range(V):
            record = generate(target, drafter, prompt, 11, stop=(stop, 99))
            want = full[:full.index(stop) + 1] if stop in full else full
            assert record.tokens == want == verify.autoregressive(target, prompt, 11, stop=(stop,)).tokens
            assert sum(record.committed) == len(want) - 1 and len(record.from_draft) == len(want)
            inside += stop in full and record.from_draft[-1]
    assert inside > 2 or name == "hopeless tree"  # stops that were drafted tokens, in the middle of a path


def test_token_0_is_a_token(target):
    """Id 0 is committed, and stops when it is asked to."""
    drafter = dict(informed(target))["chain wrong at 4"]
    prompt = next([a, b] for a, b in itertools.product(range(V), repeat=2) if 0 in verify.autoregressive(target, [a, b], 9).tokens[1:4])
    plain = verify.autoregressive(target, prompt, 9).tokens
    assert generate(target, drafter, prompt, 9).tokens == plain
    assert generate(target, drafter, prompt, 9, stop=(0,)).tokens == plain[:plain.index(0) + 1]


def test_full_context_and_foreign_prompts(target):
    """A prompt that fills the context gives nothing; a longer one and an empty one are refused."""
    drafter = dict(informed(target))["tree"]
    assert generate(target, drafter, [1] * LIMIT, 5).tokens == []
    assert len(generate(target, drafter, [1] * (LIMIT - 1), 5).tokens) == 1
    for prompt in ([], [1] * (LIMIT + 1)):
        with pytest.raises(AssertionError, match="1 to 24 tokens"):
            generate(target, drafter, prompt, 5)


@pytest.mark.parametrize("case", ways(), ids=case_name)
def test_seeds(target, case):
    """At T = 1 the same seed gives the same text, and other seeds other texts."""
    module, drafter = build(*case, target)

    def text(seed):
        torch.manual_seed(seed)
        return tuple(module.generate(target, drafter, [1], 20, 1.0).tokens)

    assert text(0) == text(0) and len({text(seed) for seed in range(5)}) == 5


# ---------------------------------------------------------------------------------------------------------------------
# Sampling, end to end
# ---------------------------------------------------------------------------------------------------------------------
SKEWS = {"the same": lambda z: z, "sharper": lambda z: 3 * z, "flatter": lambda z: 0.3 * z, "opposite": lambda z: -z}
CONTROLS = [(0.5, None, None), (1.0, None, None), (1.5, 3, None), (1.0, None, 0.8), (1.5, 4, 0.9)]
SMOOTH = {"vocab_size": 4, "max_seq_len": 12, "n_layer": 2, "scale": 0.35}


@pytest.mark.parametrize("rule", [verify_chain, verify_block])
@pytest.mark.parametrize("skew", SKEWS)
def test_generation_law_exactly(skew, rule):
    """All runs of a whole generation, enumerated: prefill, rounds, cuts. The joint law of three tokens is the target's."""
    target = tiny(**SMOOTH)
    drafter = Informed(target, chain(2), SKEWS[skew])
    knobs = (3, 1.0, 2)  # two tokens have to be likely enough for all branches to be few
    runs = [(w, r.tokens) for w, r in every_run(lambda: generate(target, drafter, [1, 3], *knobs, rule=rule))]
    assert len(runs) >= 16 and (counted(4 ** 3, 4, runs) - target_law(target, [1, 3], *knobs)).abs().max() < EXACT


@pytest.mark.parametrize("name, more", [(name, {}) for name in METHODS if hasattr(importlib.import_module(name), "sample")]
                         + [("eagle2", {"width": 3, "drawn": 2, "beam": 2})])
def test_law_of_the_methods_exactly(name, more, monkeypatch):
    """The same for the methods that draw with sample: all of their runs, with drafts small enough to have few branches, or of
    two tokens where a tree has many."""
    target, module = tiny(**SMOOTH), importlib.import_module(name)
    known = {f.name for f in dataclasses.fields(module.Args)}
    small = {"block_size": 2 if "n_candidates" in known else 3, "n_candidates": 2, "width": 2, "beam": 1, "depth": 1, "n_nodes": 4, **more}
    if hasattr(module, "TREE"):
        monkeypatch.setattr(module, "TREE", ((2,), (1,)))
    _, drafter = build(name, {k: v for k, v in small.items() if k in known}, target)
    knobs = (2 if more else 3, 1.0, 2)
    runs = [(w, r.tokens) for w, r in every_run(lambda: module.generate(target, drafter, [1, 3], *knobs), module)]
    assert len(runs) > 50 and (counted(4 ** knobs[0], 4, runs) - target_law(target, [1, 3], *knobs)).abs().max() < EXACT


def frequencies(run, law, n, seed=0):
    """p-value of n runs against a law of three tokens."""
    torch.manual_seed(seed)
    counts = counted(len(law), 4, ((1, run().tokens) for _ in range(n)))
    assert counts.sum() == n
    return p_value(counts, law)


DRAFTS = {  # topology, draws with replacement, without q
    "chain": (chain(2), False, False),
    "one-hot chain": (chain(2), False, True),
    "independent": (topology([-1, 0, 0, 1, 2, 2], range(1, 6)), True, False),
    "without replacement": (topology([-1, 0, 0, 1, 1, 2], range(1, 6)), False, False),
    "mixed": (topology([-1, 0, 0, 0, 1, 1, 3], [1, 4, 6]), False, False),
    "chosen": (topology([-1, 0, 0, 1, 2, 2]), False, True),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_generation_law(name):
    """Chi-square of three tokens over 450 generations, the skew of q and the sampling controls changing from draft to draft."""
    target = tiny(**SMOOTH)
    i, (t, replacement, one_hot) = list(DRAFTS).index(name), DRAFTS[name]
    controls = CONTROLS[i % len(CONTROLS)]
    drafter = Informed(target, t, list(SKEWS.values())[(1 + i) % 4], None, replacement, one_hot)
    law = target_law(target, [2, 1], 3, *controls)
    assert frequencies(lambda: generate(target, drafter, [2, 1], 3, *controls), law, 450) > FALSE_ALARM


def test_plain_law():
    """The baseline samples from the same law."""
    target = tiny(**SMOOTH)
    for controls in CONTROLS[1:3]:
        law = target_law(target, [2, 1], 3, *controls)
        assert frequencies(partial(verify.autoregressive, target, [2, 1], 3, *controls), law, 450) > FALSE_ALARM


def test_chi_square_notices():
    """The same chi-square rejects a rule that resamples from p, a wrong temperature, and a wrong top_k."""
    target = tiny(**SMOOTH)
    drafter, law = Informed(target, chain(2), SKEWS["opposite"]), target_law(target, [2, 1], 3)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(verify, "norm", lambda w, otherwise: otherwise)
        assert frequencies(lambda: generate(target, drafter, [2, 1], 3, 1.0, rule=verify_chain), law, 450) < FALSE_ALARM
    assert frequencies(lambda: generate(target, drafter, [2, 1], 3, 1.3), law, 600) < FALSE_ALARM
    assert frequencies(lambda: generate(target, drafter, [2, 1], 3, 1.0), target_law(target, [2, 1], 3, 1.0, 3), 100) < FALSE_ALARM


@pytest.mark.parametrize("case", ways(), ids=case_name)
def test_law_of_the_methods(case):
    """Chi-square of three tokens over 100 generations of every method in every way it drafts; and q, where a draft has one, is
    what its tokens were drawn from: drawn nodes have every token as often as q, without their elder siblings, says: |z| < 5.5,
    false alarm 4e-8; where the variance is below 1 the normal law is none, and Bennett's bound says so at the same rate."""
    target = tiny(**SMOOTH)
    module, drafter = build(*case, target)
    trees, draft = [], drafter.draft
    drafter.draft = lambda *a, **kw: trees.append(draft(*a, **kw)) or trees[-1]
    controls = CONTROLS[ways().index(case) % len(CONTROLS)]
    law = target_law(target, [2, 1], 3, *controls)
    assert frequencies(lambda: module.generate(target, drafter, [2, 1], 3, *controls), law, 100) > FALSE_ALARM
    with_q = [tree for tree in trees if tree.q is not None]
    assert len(with_q) in (0, len(trees))
    excess, variance = {}, {}  # by depth and rank among the drawn siblings: the shape of a tree may depend on its tokens
    for tree in with_q:
        t = tree.topology
        assert (tree.q[t.parent[t.drawn]].sum(-1) - 1).abs().max() < 1e-9
        for rank, row in enumerate(t.children.tolist()):
            for above, i in ((above, i) for above, i in enumerate(row) if i):
                law = tree.q[above].clone()
                law[[] if tree.replacement else tree.tokens[t.children[:rank, above]]] = 0
                if law.sum() > 0:  # where nothing is left to draw, any token will do
                    law, at = law / law.sum(), (t.depth[i].item(), rank)
                    assert law[tree.tokens[i]] > 0
                    excess[at] = excess.get(at, 0) + F.one_hot(tree.tokens[i], 4) - law
                    variance[at] = variance.get(at, 0) + law * (1 - law)
    for at, v in variance.items():
        t = excess[at].abs()
        rare = (v < 1) & (v * ((1 + t / v) * (1 + t / v).log() - t / v) <= -math.log(4e-8))
        assert ((t <= 5.5 * v.sqrt() + 1e-9) | rare).all()
    assert bool(excess) == bool(with_q)


def test_methods_are_found():
    """The tests above cover every method's file."""
    assert "dflash" in METHODS and {name for name, _ in ways()} == set(METHODS)
