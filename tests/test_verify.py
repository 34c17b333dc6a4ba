"""The output of every method has exactly the target's law.

The rules are run on all branches of their random decisions, for all drafts, and the law that comes out is compared
with the target's to 1e-12. Whole generations are compared with plain decoding token for token (greedy) and, all runs
enumerated, with the target's law; what a method drafts is compared with the q that it reports, over many drafts.
"""
import contextlib
import sys
import types
from dataclasses import dataclass
from functools import partial
from itertools import product

import helpers as hp
import pytest
import torch
import torch.nn.functional as F
from helpers import METHODS, Informed, build, joint, output_law, tiny, topology
from torch import nn

import verify
from eagle1 import generate  # the loop that every method has
from model import KVCache
from train import CommonArgs, arg, number
from verify import Session, Topology, Tree, chain, siblings, verify_block, verify_chain, verify_tree

FALSE_ALARM = 1e-6  # of one chi-square
EXACT = 1e-12
RULES = [verify_chain, verify_block, verify_tree]


def scaled(T):
    return [x / x.sum(-1, keepdim=True) for x in T]


def laws(kind, V, D, seed=0):
    """Tables (P, Q) of target and draft."""
    g = torch.Generator().manual_seed(seed)
    P, Q = (hp.tables(V, D, g, 0.4 if kind == "zeros" else 0.0) for _ in range(2))
    if kind == "equal":
        Q = P
    if kind == "nearly equal":
        Q = scaled([x * (1 + 1e-15 * torch.randn(x.shape, generator=g, dtype=x.dtype)) for x in P])
    if kind == "disjoint":
        even = torch.arange(V) % 2 == 0
        P, Q = scaled([x * even for x in P]), scaled([x * ~even for x in Q])
    if kind == "certain":
        Q = [F.one_hot(x.argmin(-1), V).double() for x in P]
    return P, Q


KINDS = ["random", "zeros", "equal", "nearly equal", "disjoint", "certain"]


# ---- The rules, exactly ----
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_chain_law(rule, kind):
    """A drawn chain, verified as a chain, as a block and as a tree: the joint law of all committed tokens is p's."""
    for V, gamma, seed in ((3, 0, 0), (3, 1, 0), (3, 3, 0), (3, 3, 1), (4, 2, 0)):
        P, Q = laws(kind, V, gamma, seed)
        law, accepted = output_law(rule, chain(gamma), P, Q)
        assert (law - joint(P)).abs().max() < EXACT
        assert abs(accepted - gamma) < 1e-9 or "equal" not in kind
        assert accepted == 0 or kind != "disjoint"


def test_one_hot_chain_law():
    """A chain without q, whatever its tokens are and however they were found."""
    for seed in range(3):
        P, Q = laws("zeros", 3, 3, seed)
        for drawn_from in (Q, [F.one_hot(x.argmax(-1), 3).double() for x in P]):
            law, _ = output_law(verify_tree, chain(3), P, Q, one_hot=True, drawn_from=drawn_from)
            assert (law - joint(P)).abs().max() < EXACT


def test_block_accepts_no_less_than_chain(monkeypatch):
    """Block verification is never worse than token by token, better somewhere, and what drawn chains go through."""
    tables = [laws("random", 3, 3, seed) for seed in range(20)]
    gains = [output_law(verify_block, chain(3), *T)[1] - output_law(verify_chain, chain(3), *T)[1] for T in tables]
    assert min(gains) > -EXACT and max(gains) > 0.01 and Session.chain_rule is verify_block
    used, target = [], tiny()
    monkeypatch.setattr(Session, "chain_rule", staticmethod(lambda *draft: used.append(1) or verify_block(*draft)))
    assert len(generate(target, Informed(target, chain(3)), [1], 9, 1.0).rounds) == len(used) > 0


@pytest.mark.parametrize("n_drawn", range(5))
def test_siblings(n_drawn):
    """Children differ, as long as q has tokens left; those behind the drawn ones are the likeliest of the rest."""
    torch.manual_seed(0)
    logits = torch.randn(300, 5)
    tokens, q = siblings(logits, 4, n_drawn, lambda z: verify.probs(z, top_k=2))
    assert (q is None) == (n_drawn == 0) and tokens.shape == (300, 4)
    for row, z in zip(tokens.tolist(), logits.tolist()):
        drawn = set(row[:n_drawn])
        assert len(set(row)) == 4 or n_drawn > 2
        assert row[n_drawn:] == sorted(set(range(5)) - drawn, key=lambda x: -z[x])[:4 - n_drawn]


TREES = {  # V, parent of every node
    "three siblings": (4, [-1, 0, 0, 0]),
    "binary": (3, [-1, 0, 0, 1, 1, 2]),
    "deep": (3, [-1, 0, 0, 2, 3]),
    "interleaved": (3, [-1, 0, 1, 0, 3, 1]),
    "more siblings than tokens": (3, [-1, 0, 0, 0, 0]),
    "two drawn, then chosen": (4, [-1, 0, 0, 0, 0, 2, 2, 3]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("how", ["chosen", "drawn", "first drawn"])
def test_tree_law(how, shape, kind):
    """Trees of any shape, siblings chosen, drawn, or both: the law of the path, the bonus and what follows is p's."""
    V, parent = TREES[shape]
    first = [i for i, a in enumerate(parent) if i and a not in parent[:i]]
    drawn = {"chosen": [], "drawn": range(1, len(parent)), "first drawn": first}[how]
    t = topology(parent, [1, 2, 5] if shape == "two drawn, then chosen" else drawn)
    P, Q = laws(kind, V, t.max_depth)
    law, accepted = output_law(verify_tree, t, P, Q, one_hot=not t.max_drawn)
    assert (law - joint(P)).abs().max() < EXACT
    assert accepted == 0 or kind != "disjoint" or not t.drawn[1:].all()
    if kind == "equal" and t.drawn[1] and "siblings" in shape:
        assert abs(accepted - t.max_depth) < EXACT  # the first sibling is always taken


def test_how_much_one_node_accepts():
    """One drawn child: sum of min(p, q). Chosen ones: their p. Others beside a drawn one: never less, mostly more."""
    gains = []
    for seed in range(10):
        P, Q = laws("random", 4, 1, seed)
        shapes = [(topology([-1] + [0] * k, range(1, n + 1)), n) for k, n in ((1, 1), (3, 0), (3, 1), (3, 3))]
        single, chosen, *more = [output_law(verify_tree, t, P, Q, one_hot=not n)[1] for t, n in shapes]
        assert abs(single - torch.minimum(P[0], Q[0]).sum()) < EXACT
        assert abs(chosen - P[0][Q[0].topk(3).indices].sum()) < EXACT
        gains.append([x - single for x in more])
    gains = torch.tensor(gains, dtype=torch.float64)
    assert gains.min() > -EXACT and gains.mean(0).min() > 0.05


def test_decisions_off_the_path_play_no_part():
    """Every node deciding for itself, all outcomes: the same results as with outcomes shared by nodes of a depth."""
    t = topology([-1, 0, 0, 1], [1, 2, 3])
    P, Q = laws("random", 2, 2)
    for draft, code, _ in zip(*hp.drafts(t, Q)):
        tree = Tree(draft, t, hp.at_nodes(Q, code[None], t.depth.tolist())[0])
        p, n_runs = hp.at_nodes(P, code[None], t.depth.tolist())[0], 0
        left = {str(result): chance for chance, result in zip(*hp.outcomes(verify_tree, p, tree)) if chance}
        for chance, (path, n, bonus) in hp.every_run(partial(verify_tree, p, tree)):
            left[str((path, n, bonus))] -= chance
            n_runs += 1
        assert n_runs > len(left) > 1 and max(map(abs, left.values())) < EXACT


# ---- Wrong rules and wrong drafts are noticed: the same enumeration finds the bias ----
def bias(rule, t, wrong, **right):
    """Mean total variation of wrong(P, Q) from p; with the right draft and rule it is 0."""
    found = []
    for seed in range(5):
        P, Q = laws("random", 4, t.max_depth, seed)
        assert (output_law(rule, t, P, Q, **right)[0] - joint(P)).abs().max() < EXACT
        found.append(((wrong(P, Q) - joint(P)).abs().sum() / 2).item())
    return sum(found) / len(found)


THREE, TWO = (topology([-1] + [0] * n, range(1, n + 1)) for n in (3, 2))


@pytest.mark.parametrize("kept", [TWO, THREE], ids=["pruned", "reordered"])
def test_wrong_drawn_siblings_by_score(kept):
    """Drawing three and keeping the two likeliest is not drawing two; all have to be tried in the order of drawing."""
    def wrong(P, Q):
        def by_score(tokens, code, weight):
            order = F.pad(Q[0][tokens[:, 1:]], (1, 0), value=2).topk(len(kept.parent)).indices
            return kept, tokens.gather(1, order), code.gather(1, order), weight
        return output_law(verify_tree, THREE, P, Q, change=by_score)[0]

    assert bias(verify_tree, THREE, wrong) > 0.03


def test_wrong_chosen_tokens_verified_with_their_softmax():
    """Top-k children are not a sample of q, and a chain of the likeliest tokens is none."""
    t = topology([-1, 0, 0, 0])
    assert bias(verify_tree, t, lambda P, Q: output_law(
        verify_tree, t, P, Q, change=lambda *draft: (THREE, *draft))[0], one_hot=True) > 0.1
    for rule in RULES:
        assert bias(rule, chain(2), lambda P, Q, rule=rule: output_law(
            rule, chain(2), P, Q, drawn_from=[F.one_hot(x.argmax(-1), 4).double() for x in Q])[0]) > 0.1


@pytest.mark.parametrize("independent, masked", [(False, False), (True, True), (True, False)],
                         ids=["unmasked q", "duplicates", "independent, with their rule"])
def test_wrong_second_sibling(independent, masked, monkeypatch):
    """The q of a second sibling is without the first where it was drawn so, and with it where it was drawn so."""
    def law(P, Q):
        scatter = torch.Tensor.scatter
        with monkeypatch.context() as m:
            if not masked:  # along the vocabulary the rule scatters nothing but the zeros of q
                m.setattr(torch.Tensor, "scatter", lambda x, dim, *a: x if dim == 1 else scatter(x, dim, *a))
            return output_law(verify_tree, TWO, P, Q, independent=independent)[0]

    found = bias(verify_tree, TWO, law)
    assert found > 0.003 if independent == masked else found < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrong", ["p for residual", "softmaxed residual", "another q", "bonus from raw logits"])
def test_wrong_distribution(rule, wrong, monkeypatch):
    """After a rejection the token comes from (p - q)+ over its sum; q is what was drawn from; the bonus comes from the
    processed law, like every other token."""
    def law(P, Q):
        sharp_p, sharp_q = (scaled([x ** 2 for x in T]) for T in (P, Q))
        how = {"another q": {"drawn_from": sharp_q}, "bonus from raw logits": {"p_seen": P[:2] + sharp_p[2:]}}
        with monkeypatch.context() as m:
            if wrong not in how:
                m.setattr(verify, "normalize", lambda w, p: p if wrong == "p for residual" else w.softmax(-1))
            return output_law(rule, chain(2), P, Q, **how.get(wrong, {}))[0]

    assert bias(rule, chain(2), law) > 0.02


# ---- The random decisions themselves ----
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_accepts_and_sample_have_their_laws(dtype):
    """min(1, p/q), independently for every element; weights of any scale, and rows are independent (chi-square)."""
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.3, 0.2, 0.05, 0.9], dtype=dtype)
    q = torch.tensor([0.4, 0.6, 0.25, 0.9, 0.3], dtype=dtype)
    hits = verify.accepts(p.expand(40000, 5), q.expand(40000, 5))
    chance = (p / q).clamp(max=1).double()
    law = torch.stack([torch.where(torch.arange(32) >> i & 1 == 1, c, 1 - c) for i, c in enumerate(chance)]).prod(0)
    assert hp.p_value((hits * 2 ** torch.arange(5)).sum(1).bincount(minlength=32).double(), law) > FALSE_ALARM
    for scale in (1.0, 1e-9, 250.0):
        w = scale * torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2], [0.1, 0.1, 0.7, 0.1, 0.0]], dtype=dtype)
        counts = (verify.sample(w.expand(40000, 2, 5)) @ torch.tensor([5, 1])).bincount(minlength=25).double()
        a, b = scaled(w.double())
        assert hp.p_value(counts, (a[:, None] * b).flatten()) > FALSE_ALARM


@pytest.mark.parametrize("u", [0.0, 1e-17, 0.3, 1 - 2 ** -53])
def test_accepts_and_sample_at_the_edges(u, monkeypatch):
    """For any uniform number: never accepts at p = 0 or q = 0, always at p >= q > 0, draws nothing of weight 0."""
    monkeypatch.setattr(torch, "rand", lambda shape, **how: torch.full(shape, u, **how))
    p, q = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.2, 1e-30]), torch.tensor([0.5, 0.0, 0.0, 0.5, 0.1, 1e-30])
    for dtype in (torch.float64, torch.float32):
        assert verify.accepts(p.to(dtype), q.to(dtype)).tolist() == [False, False, False, True, True, True]
    w = [[0, 0, 1e-30, 0, 3.0, 0], [0.1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1e-300], [0, 1, 1, 1, 0, 0]]
    w = torch.tensor(w, dtype=torch.float64)
    assert (w.gather(1, verify.sample(w)[:, None]) > 0).all()


@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 2.0])
def test_probs(temperature):
    """Temperature, then top_k, then top_p: against a loop over the sorted tokens."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(20, 6, dtype=torch.float64)
    for top_k, top_p in product((None, 1, 3, 6, 99), (None, 1e-38, 0.01, 0.5, 0.9, 1.0)):
        p = verify.probs(logits, temperature, top_k, top_p)
        for row, got in zip((logits / temperature).softmax(-1).tolist(), p):
            order = sorted(range(6), key=lambda x: -row[x])[:top_k]
            total, mass, want = sum(row[x] for x in order), 0.0, torch.zeros(6, dtype=torch.float64)
            for x in order:
                if top_p is None or mass < top_p:
                    want[x] = row[x]
                mass += row[x] / total
            assert (got - want / want.sum()).abs().max() < EXACT


def test_probs_at_the_edges():
    """Tiny temperatures, a tiny top_p and huge logits: one token or even ones, never NaN; ties at top_k all stay."""
    z = torch.tensor([30.0, 1.0, 30.0, -3e38])
    for temperature in (1e-38, 1e-300, 1e-3):
        assert verify.probs(z, temperature).tolist() == [0.5, 0, 0.5, 0]
        assert verify.probs(z, temperature, top_p=1e-38).tolist() == [1, 0, 0, 0]
    assert verify.probs(z, 1.0, top_p=1e-300).tolist() == verify.probs(z.double(), 1.0, None, 1e-300).tolist()
    assert verify.probs(torch.tensor([3e38, -3e38]), 0.5).tolist() == [1, 0]
    assert verify.probs(z, 1.0, top_k=1).tolist() == [0.5, 0, 0.5, 0]
    assert verify.probs(z.bfloat16()).dtype == torch.float32


def test_topology():
    """Depth, ancestors and the table of drawn children, worked out by hand; chains of any length."""
    t = topology([-1, 0, 0, 2, 0, 2, 3], [2, 4, 3, 5])
    assert t.depth.tolist() == [0, 1, 1, 2, 1, 2, 3] and t.max_depth == 3
    sees = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 4], [0, 2, 5], [0, 2, 3, 6]]
    assert [(row == 0).nonzero().flatten().tolist() for row in t.ancestors] == sees
    assert t.children.tolist() == [[2, 0, 3, 0, 0, 0, 0], [4, 0, 5, 0, 0, 0, 0]]
    for n in (0, 1, 2, 3, 4, 5, 8, 9, 17):
        t = chain(n)
        assert t.depth.tolist() == Topology(t.parent, n).depth.tolist() == list(range(n + 1)) and t.is_chain
        assert ((t.ancestors == 0) == torch.ones(n + 1, n + 1).tril().bool()).all()


# ---- Greedy decoding: token for token ----
V, LIMIT = 5, 24
PROMPTS = [[0], [3], [1, 4, 0, 2, 2], [2] * 13]
GOOD = {f"wrong at {j}": (chain(4), [0] + [int(i == j) for i in range(4)]) for j in range(4)} | {
    "oracle": (chain(4), None),
    "tree": (topology([-1, 0, 0, 0, 3, 3, 5, 1]), [0, 2, 1, 0, 1, 0, 0, 0]),  # the target's own: nodes 3, 5, 6
    "wide tree": (topology([-1] + [0] * 4 + [4] * 4 + [8] * 4), None),
    "hopeless tree": (topology([-1, 0, 0, 1, 2]), [0, 4, 3, 0, 0]),
    "nothing drafted": (chain(0), None),
}
CASES = [(name, way) for name in METHODS for way in hp.ways(name)]
SWITCHED = [(name, way) for name, way in CASES if all(isinstance(v, bool) for v in way.values())]  # and the defaults


def informed(target, name):
    """Chains that go wrong at one position or nowhere, and trees."""
    t, ranks = GOOD[name]
    return Informed(target, t, ranks=ranks)


def each(cases):
    names = [name + "".join(f" {k}={v}" for k, v in way.items()) for name, way in cases]
    return pytest.mark.parametrize("name, way", cases, ids=names)


@pytest.fixture(scope="module")
def target():
    return tiny(V, LIMIT, 3, seed=2)


@pytest.fixture
def passes(target):
    """A list that grows by one with every forward pass of the target."""
    passes = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    hook.remove()


def same_as_plain(target, run, lengths=(0, 1, 2, LIMIT)):
    for prompt, n in product(PROMPTS, lengths):
        record, plain = run(prompt, n), verify.autoregressive(target, prompt, n)
        assert record.tokens == plain.tokens and len(plain.tokens) == min(n, LIMIT - len(prompt))
        assert sum(r.kept for r in record.rounds) == max(0, len(record.tokens) - 1)


@torch.no_grad()
def test_plain_decoding(target, passes):
    """The baseline itself: argmax of uncached passes, one pass per token."""
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) < LIMIT:
            text.append(target(torch.tensor([text]))[0][0, -1].argmax().item())
        passes.clear()
        record = verify.autoregressive(target, prompt, LIMIT)
        assert record.tokens == text[len(prompt):] and len(set(text)) > 2 and len(passes) == len(record.tokens)
        assert record.rounds == [(0, 1, 0, 1, None)] * (len(record.tokens) - 1)


@pytest.mark.parametrize("name", GOOD)
def test_greedy_is_plain_decoding(target, name):
    """Good and bad drafts alike, to the last position of the context."""
    same_as_plain(target, partial(generate, target, informed(target, name)))


@each(CASES)
def test_methods_are_plain_decoding(target, name, way):
    """Every method in every way it drafts, with random weights; two calls in a row do not know of each other."""
    module, drafter = build(name, way, target)
    same_as_plain(target, partial(module.generate, target, drafter), (2, LIMIT))
    again, first = (module.generate(target, d, PROMPTS[2], 12) for d in (drafter, build(name, way, target)[1]))
    assert (again.tokens, again.rounds) == (first.tokens, first.rounds)


@each(CASES)
def test_methods_in_a_small_target(name, way):
    """One layer, a vocabulary smaller than most trees are wide, a context shorter than a draft."""
    for target in (tiny(4, 6, 1), tiny(V, 9, 8)):
        module, drafter = build(name, way, target)
        n = target.config.max_seq_len
        assert module.generate(target, drafter, [3], n).tokens == verify.autoregressive(target, [3], n).tokens
        assert len(module.generate(target, drafter, [3], n, 1.0, 4, 0.9).tokens) == n - 1


@each(CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_passes_and_rows_of_the_methods(target, passes, name, way, temperature, monkeypatch):
    """One target pass per round and one for the prompt; rows are written to the `nodes` next slots alone."""
    (module, drafter), rows, append = build(name, way, target), [], KVCache.append

    def noted(cache, layer, slots, kv):
        rows.append((slots.max() - cache.pos).item() + 1 if cache.pos > 0 else 0)  # but for the prompt's
        return append(cache, layer, slots, kv)

    monkeypatch.setattr(KVCache, "append", noted)
    record = module.generate(target, drafter, [1], 11, temperature)
    assert len(passes) == len(record.rounds) + 1 and len(record.tokens) == 11 and max(rows) <= drafter.nodes
    assert all(r.accepted < r.nodes <= drafter.nodes > r.depth >= r.accepted for r in record.rounds)


# ---- Rounds, counting, stopping ----
@pytest.mark.parametrize("wrong, name", [*enumerate(GOOD)][:5])
def test_every_accept_length(target, wrong, name):
    """A chain wrong at position j has exactly j tokens accepted in every round; the oracle all 4, and its bonus."""
    record = generate(target, informed(target, name), [1], 16)
    *whole, last = [r.kept for r in record.rounds]
    assert {r[:3] for r in record.rounds} == {(4, 5, wrong)}
    assert set(whole) == {wrong + 1} and sum(whole) + last == 15
    assert verify.n_alpha(record.rounds) == [1.0] * wrong + [0.0] * (wrong < 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GOOD)
@torch.no_grad()
def test_features_are_the_targets(target, passes, name, temperature):
    """What a drafter absorbs, round by round, is the committed text and the target's features of it, once, in order."""
    torch.manual_seed(0)
    drafter = informed(target, name)
    record = generate(target, drafter, [1, 4], 12, temperature)
    assert len(passes) == len(record.rounds) + 1 == len(drafter.h)
    text = ([1, 4] + record.tokens)[:len(drafter.text)]
    assert drafter.text[:len(text)] == text
    _, h = target(torch.tensor([drafter.text]), taps=drafter.taps)
    for tap, want in enumerate(h):
        torch.testing.assert_close(torch.cat([part[tap] for part in drafter.h]), want[0], rtol=0, atol=EXACT)
    found = {r.accepted for r in record.rounds}
    assert temperature or found == {"tree": {3}, "hopeless tree": {0}}.get(name, found)


def test_measurements(target):
    """tau, passes, equality and n-alpha are those of the records."""
    drafter = informed(target, "wrong at 2")
    numbers, pairs = verify.measure(target, partial(generate, target, drafter), [[1], [2], [3, 0]], 10)
    assert numbers["target_passes"] == sum(len(r.rounds) for r, _ in pairs) == 9 and numbers["tau"] == 3.0
    assert numbers["equal"] == numbers["prompts"] == 3 and numbers["nodes"] == 5 and numbers["new_tokens"] == 30
    assert numbers["n_alpha"] == [1.0, 1.0, 0.0]
    for i, speed in enumerate(("tok_s", "ar_tok_s")):
        assert numbers[speed] == pytest.approx(27 / sum(pair[i].seconds for pair in pairs))
    assert numbers["speedup"] == pytest.approx(numbers["tok_s"] / numbers["ar_tok_s"])
    rounds = [verify.Round(depth, 9, accepted, kept) for depth, accepted, kept in
              ((3, 0, 1), (3, 1, 2), (3, 3, 4), (3, 3, 2), (2, 2, 3))]  # the fourth was cut
    assert verify.n_alpha(rounds) == [3 / 4, 2 / 3, 1.0] and verify.n_alpha(rounds[3:4]) == verify.n_alpha([]) == []


@pytest.mark.parametrize("name", ["wrong at 1", "oracle", "tree", "wide tree"])
def test_stop_token(target, name):
    """Decoding ends with the first stop token, token 0 included, wherever in a round it falls; no more is counted."""
    drafter, inside = informed(target, name), 0
    for prompt, stop in product(PROMPTS, range(V)):
        full = verify.autoregressive(target, prompt, 11).tokens
        record = generate(target, drafter, prompt, 11, stop=(stop, 99))
        want = full[:full.index(stop) + 1] if stop in full else full
        assert record.tokens == want == verify.autoregressive(target, prompt, 11, stop=(stop,)).tokens
        assert sum(r.kept for r in record.rounds) == len(want) - 1
        inside += stop in full and bool(record.rounds) and record.rounds[-1].kept <= record.rounds[-1].accepted
    assert inside > 2  # stops that were drafted tokens, in the middle of a path


def test_full_context_and_foreign_prompts(target):
    """A prompt that fills the context gives nothing; a longer one and an empty one are refused."""
    drafter = informed(target, "tree")
    assert [len(generate(target, drafter, [1] * n, 5).tokens) for n in (LIMIT, LIMIT - 1)] == [0, 1]
    for prompt in ([], [1] * (LIMIT + 1)):
        with pytest.raises(AssertionError, match="a prompt has 1 to 24"):
            generate(target, drafter, prompt, 5)


# ---- Sampling, end to end ----
SKEWS = {"the same": lambda z: z, "sharper": lambda z: 3 * z, "flatter": lambda z: 0.3 * z, "opposite": lambda z: -z}
CONTROLS = [(1.0, 2, None), (1.0, None, None), (0.5, None, None), (1.5, 3, None), (1.0, None, 0.8), (1.5, 4, 0.9)]
SMOOTH = partial(tiny, vocab_size=4, max_seq_len=12, scale=0.35)
DRAFTS = {"block": chain(2), "drawn": topology([-1, 0, 0], [1, 2]), "mixed": topology([-1, 0, 0, 1], [1, 3]),
          "chosen": topology([-1, 0, 0, 2]), "chain": chain(2)}


def check_law(run, target, controls, *modules):
    """All runs of a whole generation, enumerated: prefill, rounds, cuts. The law of three tokens is the target's."""
    law, n_runs = torch.zeros(4, 4, 4, dtype=torch.float64), 0
    for weight, record in hp.every_run(partial(run, [1, 3], 3, *controls), *modules):
        law[tuple(record.tokens)] += weight
        n_runs += 1
    worst = (law - hp.target_law(target, [1, 3], 3, *controls)).abs().max()
    assert n_runs > 4 and worst < EXACT, f"not the target's law: {worst:.1e} off in {n_runs} runs"


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("name", DRAFTS)
def test_generation_law_exactly(name, skew, monkeypatch):
    """Chains under both rules, and trees, with drafts that are good, bad, too sure or not sure enough."""
    target = SMOOTH()
    drafter = Informed(target, DRAFTS[name], SKEWS[skew])
    monkeypatch.setattr(Session, "chain_rule", staticmethod(verify_chain if name == "chain" else verify_block))
    for controls in (CONTROLS[0], CONTROLS[4]):
        check_law(partial(generate, target, drafter), target, controls)


def test_plain_law_exactly():
    """The baseline, under all sampling controls."""
    for controls in CONTROLS:
        check_law(partial(verify.autoregressive, SMOOTH()), SMOOTH(), controls)


def check_method(name, way):
    target = SMOOTH()
    with pytest.MonkeyPatch.context() as m:
        if name == "eagle1":
            m.setattr("eagle1.TREE", ((0, 0), (0, 1)))
        module, drafter = build(name, way, target)
        check_law(partial(module.generate, target, drafter), target, CONTROLS[0], module)


@each([(name, way) for name in METHODS for way in hp.small_ways(name)])
def test_law_of_the_methods_exactly(name, way):
    """The same for every method, its drafts being small, with every switch flipped."""
    check_method(name, way)


@torch.inference_mode()
def check_drafts(name, way, n, V=40):
    """Draws n drafts in each of three states, under other controls each: the drawn children of a node, in their order,
    have the law that q says, without their elder siblings (chi-square by depth, rank and the parent's token)."""
    target, seen, told = SMOOTH(vocab_size=V), {}, {}
    _, drafter = build(name, way, target)
    for prompt, (temperature, top_k, top_p) in zip(([2, 1], [1, 3, 0], [3]), CONTROLS[1:6:2]):
        s, _, draft, _ = hp.a_round(name, target, prompt, temperature=temperature, drafter=drafter)
        s.probs = partial(verify.probs, temperature=temperature, top_k=top_k, top_p=top_p)
        for tree in (draft() for _ in range(n)):
            t, tokens, depth = tree.topology, tree.tokens.tolist(), tree.topology.depth.tolist()
            families = [] if tree.q is None else t.children.T.tolist()
            drawn = sorted(i for family in families for i in family if i)
            assert tree.q is None or drawn == t.drawn.nonzero().flatten().tolist()
            for above, family in enumerate(families):
                law = tree.q[above].tolist()
                assert not any(family) or abs(sum(law) - 1) < 1e-9, "not a distribution"
                assert sum(x > 0 for x in law) <= (top_k or V), "not cut as the target's law is"
                for rank, i in enumerate(filter(None, family)):
                    total, key = sum(law), (depth[i], rank, tokens[above])
                    if total > 1e-9:  # otherwise any token will do
                        seen.setdefault(key, [0] * V)[tokens[i]] += 1
                        told[key] = [a + b / total for a, b in zip(told.get(key, [0] * V), law)]
                    law[tokens[i]] = 0.0
    for key, counts in seen.items():
        p = hp.p_value(torch.tensor(counts).double(), torch.tensor(told[key], dtype=torch.float64))
        assert p > FALSE_ALARM, f"not drawn from q: depth, rank, token before {key}, p-value {p:.1e}"


@each(CASES)
def test_drafts_of_the_methods_have_their_law(name, way):
    check_drafts(name, way, 500 if (name, way) in SWITCHED else 50)


@pytest.mark.parametrize("name, way, least", [
    ("dflash", {"block_size": 4}, 0.5), ("dflash2", {"block_size": 3, "n_candidates": 1}, 0.55),
    *((name, {"width": 2, "depth": 1, "n_nodes": 3, "drawn": drawn}, least)
      for name, least in (("eagle2", 0.4), ("eagle3", 0.3)) for drawn in (0, 1))])
def test_law_where_drafts_end_early(name, way, least, monkeypatch):
    """The law is the target's where some drafts end because going on is not worth it, and others do not."""
    found, worth = [], Session.worth
    monkeypatch.setattr(Session, "least_chance", least)
    monkeypatch.setattr(Session, "worth", lambda self, chance: found.append(worth(self, chance)) or found[-1])
    check_method(name, way)
    assert len(set(found)) > 1


# ---- Wrong methods are noticed ----
@dataclass
class CheatArgs(CommonArgs):
    likeliest: bool = arg(False, "drafts the likeliest tokens and reports their softmax as q")
    demoted: bool = arg(False, "calls an unlikely drawn child chosen")
    n_dropped: int = arg(0, "draws so many siblings more, and keeps the likeliest", number(int, 0, 2))


class Medusa(nn.Module):
    """Two heads on one feature: two siblings, and a child of the first. Exact without its flags; it has no `train`."""

    def __init__(self, config, args):
        super().__init__()
        self.args, self.taps, self.nodes = args, [config.n_layer], 4
        self.heads = nn.Linear(config.n_embd, 2 * config.vocab_size)

    def reset(self, session):
        """Nothing lasts longer than a round."""

    def absorb(self, target, new):
        self.feature = new.h[0][new.n - 1]

    def draft(self, target, anchor, probs=None):
        logits, drawing = self.heads(self.feature).view(2, -1), probs and not self.args.likeliest
        q, n = probs(logits) if probs else logits, 2 + (self.args.n_dropped if probs else 0)
        first, second = (siblings(z[None], k, k if drawing else 0, probs)[0][0] for z, k in zip(logits, (n, 1)))
        first = first[q[0][first].topk(2).indices.sort().values]
        demoted = self.args.demoted and q[0][first[0]] < q[0].max()
        t = topology([-1, 0, 0, 1], [2, 3] if demoted else [1, 2, 3])
        return Tree(torch.cat([anchor, first, second]), t, F.pad(q, (0, 0, 0, 2)) if probs else None)


@pytest.mark.parametrize("check", [check_method, partial(check_drafts, n=300)], ids=["law", "drafts"])
def test_wrong_methods(check, target, monkeypatch):
    """Both checks pass the method without its flags, and notice each of them: booleans, an integer, two at once."""
    medusa = types.ModuleType("medusa")
    vars(medusa).update(Args=CheatArgs, Drafter=Medusa, generate=generate)
    monkeypatch.setitem(sys.modules, "medusa", medusa)
    for way in hp.ways("medusa"):
        if check is check_method and "n_dropped" in way:  # too many outcomes
            continue
        with pytest.raises(AssertionError, match=r"^not ") if way else contextlib.nullcontext():
            check("medusa", way)
    same_as_plain(target, partial(generate, target, build("medusa", {}, target)[1]))


def test_demonstration(capsys):
    """`python verify.py`: the three right ways keep the law, the wrong one does not."""
    verify.main(n=1000)
    *right, wrong = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[-4:]]
    assert max(right) < 0.05 < 0.1 < wrong
