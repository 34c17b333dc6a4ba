"""What the tests share: tiny targets, the enumeration of all branches, drafters that know the target, the methods."""
import contextlib
import copy
import dataclasses
import importlib
import math
from functools import partial, reduce
from itertools import combinations, product
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
import verify
from model import GPT, GPTConfig
from verify import Session, Topology, Tree, verify_tree


def tiny(vocab_size=7, max_seq_len=24, n_layer=2, seed=0, scale=0.5):
    """A target in fp64 with large random weights: every row of logits is different, and its text does not stand still
    (small biases and a final norm of random signs keep the tied head from repeating its input)."""
    g = torch.Generator().manual_seed(seed)
    target = GPT(GPTConfig(max_seq_len, vocab_size, n_layer, n_head=2, n_embd=16, bias=True)).double().eval()
    for name, p in target.named_parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=p.dtype)
        if name != "ln_f.weight":
            p.data = p.data * scale * (0.2 if "bias" in name else 1) + ("ln_" in name and "weight" in name)
    return target


# ---- Enumeration: the real rules, on every branch of their random decisions, for every draft ----
def tables(V, D, g, zeros=0.0):
    """Laws that depend on everything before: table d has shape (V,)*d + (V,), the law of a token after d others.
    A share `zeros` of the entries is exactly 0."""
    made = []
    for d in range(D + 1):
        z = 1.5 * torch.randn((V,) * (d + 1), generator=g, dtype=torch.float64)
        gone = torch.rand(z.shape, generator=g) < zeros
        gone.scatter_(-1, z.argmax(-1, keepdim=True), False)
        made.append(z.masked_fill(gone, -math.inf).softmax(-1))
    return made


def joint(P):
    """The law of len(P) tokens in a row, (V,)*len(P)."""
    return reduce(lambda law, table: law[..., None] * table, P)


def at_nodes(T, code, depth):
    """Rows of the tables at every node: code (M, N) numbers the path to a node -> (M, N, V)."""
    V = T[0].shape[-1]
    return torch.stack([T[d].view(-1, V)[code[:, i]] for i, d in enumerate(depth)], 1)


def drafts(t, Q, independent=False):
    """All drafts of topology t: drawn nodes come from the tables Q, without replacement among siblings (or wrongly,
    each on its own), others are the likeliest that no elder sibling has. -> tokens, code (M, N), probability (M,)."""
    V, depth, parent = Q[0].shape[-1], t.depth.tolist(), t.parent.tolist()
    tokens, weight = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    code = tokens
    for i, above in list(enumerate(parent))[1:]:
        law = Q[depth[above]].view(-1, V)[code[:, above]]  # (M, V)
        seen = F.one_hot(tokens[:, [j for j in range(1, i) if parent[j] == above]], V).sum(1) > 0
        if not t.drawn[i]:
            law = F.one_hot((law - 2.0 * seen).argmax(-1), V).double()
        elif not independent:
            law = law.masked_fill(seen, 0)
            last = F.one_hot(torch.tensor(V - 1), V).double()  # where nothing is left to draw, any token will do
            law = torch.where(law.sum(-1, keepdim=True) == 0, last, law / law.sum(-1, keepdim=True))
        m, x = (law > 0).nonzero(as_tuple=True)
        tokens, weight = torch.cat([tokens[m], x[:, None]], 1), weight[m] * law[m, x]
        code = torch.cat([code[m], code[m, above, None] * V + x[:, None]], 1)
    return tokens, code, weight


def chance_to_accept(p, q):
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def branches(rule, t, tokens, p, q, weight):
    """Runs the real rule on every branch: one batch over drafts (M of them) x outcomes of all random decisions.

    verify.accepts and verify.sample are replaced by given outcomes, whose probabilities are collected. In a tree the
    decisions of different nodes are independent, and one node of each depth at most is on the path: so nodes of one
    depth share an outcome, and only those on the path count. -> path (K, D+1), n, bonus, weight, draft (K,)."""
    V, D, children = p.shape[-1], t.max_depth, [] if q is None else t.children
    used = [(s, d) for s, child in enumerate(children) for d in range(D) if (child > 0)[t.depth == d].any()]
    all_bits = torch.zeros(2 ** len(used), max(1, len(children)), D + 1, dtype=torch.bool)
    for i, (s, d) in enumerate(used):
        all_bits[:, s, d] = torch.arange(len(all_bits)) >> i & 1 == 1
    one_draw = rule is not verify_tree and q is not None  # chain rules draw once, after their decision
    ys = torch.tensor(list(product(range(V), repeat=1 if one_draw else D + 1)))
    m, b, y = torch.cartesian_prod(*(torch.arange(len(x)) for x in (tokens, all_bits, ys))).T

    def one(tokens, p, q, bits, y):
        chances, draws = [], []

        def accepts(p, q):
            outcome, chance = bits[len(chances)][t.depth[:len(q)]].view(q.shape), chance_to_accept(p, q)
            chances.append(torch.where(outcome, chance, 1 - chance).flatten())
            return outcome

        def sample(w):
            w = w[:1] if one_draw else w  # vmap repeats the row that index_select takes with a 0-d index
            outcome = y[t.depth[:len(w)]]
            draws.append((w / w.sum(-1, keepdim=True)).gather(1, outcome[:, None])[:, 0])
            return outcome

        with mock.patch.multiple(verify, accepts=accepts, sample=sample):
            path, n, bonus = rule(p, Tree(tokens, t, q))
        on = (t.node[:, None] == path).any(-1) if rule is verify_tree else t.node >= 0
        factors = [torch.where((on & (child > 0))[:len(c)], 2 * c, 1.0) for c, child in zip(chances, children)]
        factors += [torch.where(on[:len(d)], V * d, 1.0) for d in draws]
        chance = torch.stack([f.prod() for f in factors]).prod()
        return path, n, bonus, chance / (len(all_bits) * len(ys))  # outcomes that play no part were uniform

    given = p if q is None else q
    run = torch.vmap(lambda tokens, p, x, bits, y: one(tokens, p, None if q is None else x, bits, y))
    path, n, bonus, chance = run(tokens[m], p[m], given[m], all_bits[b], ys[y])
    assert not chance.isnan().any()
    return path, n, bonus, weight[m] * chance, m


def output_law(rule, t, P, Q, one_hot=False, independent=False, drawn_from=None, p_seen=None, change=None):
    """Exact law (V,)*(D+1) of the tokens after the anchor, when one round is run with `rule` and the rest comes from
    the target; and the expected number of accepted tokens. P, Q: tables of target and draft; one_hot: no q is told.
    Wrong variants: independent, see drafts; drawn_from, what drafts truly come from; p_seen, what the rule is told of
    the target; change(tokens, code, weight) -> (topology, tokens, code, weight), which tampers with the drafts."""
    V, D = P[0].shape[-1], t.max_depth
    draft = drafts(t, drawn_from or Q, independent)
    t, tokens, code, weight = change(*draft) if change else (t, *draft)
    p, q = (at_nodes(T, code, t.depth.tolist()) for T in (p_seen or P, Q))
    path, n, bonus, weight, m = branches(rule, t, tokens, p, None if one_hot else q, weight)
    end = code[m].gather(1, path.gather(1, n[:, None] - 1))[:, 0] * V + bonus  # numbers the committed tokens
    law = torch.zeros(1, dtype=torch.float64)
    for d in range(1, D + 2):
        mass = torch.zeros(V ** d, dtype=torch.float64).index_add(0, end[n == d], weight[n == d])
        law = (law[:, None] * P[d - 1].view(-1, V)).flatten() + mass
    return law.view((V,) * (D + 1)), ((n - 1) * weight).sum().item()


# ---- Drafters that know the target ----
def topology(parent, drawn=()):
    """A topology from plain lists: parent of every node, numbers of the nodes that are drawn."""
    depth = [0]
    for a in parent[1:]:
        depth.append(depth[a] + 1)
    most = max(sum(parent[i] == a for i in drawn) for a in range(len(parent)))
    is_drawn = torch.tensor([i in drawn for i in range(len(parent))])
    return Topology(torch.tensor(parent), max(depth), is_drawn, most)


class Informed:
    """Drafts from the target's own logits z after every node, so that drafts can be as good or as bad as a test needs.

    Drawn nodes come from q = probs(skew(z)); chosen ones have the token of rank ranks[i] (default: the best that no
    elder sibling has). A chain without ranks is the oracle: the target's own choices. eagle1.generate can run it."""

    def __init__(self, target, t, skew=lambda z: z, ranks=None):
        self.twin, self.t, self.skew, self.ranks = copy.deepcopy(target), t, skew, ranks
        self.twin._forward_hooks.clear()  # its passes are nobody's business
        self.taps, self.nodes, self.memory = list(range(target.config.n_layer + 1)), len(t.parent), {}

    def reset(self, session):
        self.text, self.h, self.session = [], [], session

    def absorb(self, target, new):
        n = new.n.item()
        assert len(self.text) == new.start
        self.text += new.tokens[:n].tolist()
        self.h.append([x[:n] for x in new.h])

    def z(self, text):
        if text not in self.memory:
            fits = text[:self.twin.config.max_seq_len]  # what lies beyond is cut in any case
            self.memory[text] = self.twin(torch.tensor([fits]))[0][0, -1]
        return self.memory[text]

    def draft(self, target, anchor, probs=None):
        t = self.t
        parent, path = t.parent.tolist(), [(*self.text, *anchor.tolist())]
        q = torch.zeros(len(parent), target.config.vocab_size, dtype=torch.float64)
        for i, a in list(enumerate(parent))[1:]:
            z = self.skew(self.z(path[a]))
            order = z.argsort(descending=True).tolist()
            seen = [path[j][-1] for j in range(1, i) if parent[j] == a]
            if probs and t.drawn[i]:
                w = q[a] = probs(z)
                w = w.index_fill(0, torch.tensor(seen, dtype=torch.long), 0)
                x = verify.sample(w).item() if w.sum() > 0 else 0
            else:
                x = order[self.ranks[i]] if self.ranks else next(x for x in order if x not in seen)
            path.append((*path[a], x))
        return Tree(torch.tensor([p[-1] for p in path]), t, q if probs and t.drawn.any() else None)


# ---- Laws of whole generations ----
@torch.inference_mode()
def target_law(target, prompt, n, *controls):
    """Exact law of the first n new tokens, (V,)*n, from uncached passes; controls: temperature, top_k, top_p."""
    V, P = target.config.vocab_size, []
    for d in range(n):
        text = torch.tensor([prompt + list(tokens) for tokens in product(range(V), repeat=d)])
        P.append(verify.probs(target(text)[0][:, -1], *controls).view((V,) * (d + 1)))
    return joint(P)


def p_value(counts, law):
    """Chi-square of counts against a law, both flat; the rarest cells are one, so that 10 are expected in every cell,
    and the impossible has p = 0. The law may be the mean of those drawn from: large values are then rarer still."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected, order = (law / law.sum() * counts.sum()).sort()
    rare = int((expected.cumsum(0) < 10).sum()) + 1
    e, c = (torch.cat([x[:rare].sum()[None], x[rare:]]) for x in (expected, counts[order]))
    half, df = ((c - e) ** 2 / e).sum() / 2, torch.tensor(len(e) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(df / 2, half).item() if df else 1.0


def outcomes(rule, p, tree):
    """What a rule may return for one draft: probabilities, results (path, n, bonus)."""
    q, one = tree.q if tree.q is None else tree.q[None], torch.ones(1, dtype=torch.float64)
    *columns, _ = branches(rule, tree.topology, tree.tokens[None], p[None], q, one)
    merged = {}
    for path, n, bonus, w in zip(*(x.tolist() for x in columns)):
        result = (*path[:n], *path[n - 1:n] * (len(path) - n)), n, bonus
        merged[result] = merged.get(result, 0.0) + w
    return list(merged.values()), [tuple(map(torch.tensor, result)) for result in merged]


def every_run(run, *modules, limit=5000):
    """Calls run() once for every outcome of its random decisions, depth first -> yields (probability, result). Those
    that are certain do not branch. All have to be made by verify's rules, accepts and sample, under whatever name
    verify or `modules` call them; anything else that draws is an error, as are more than `limit` runs."""
    script, at, weight, count, state = [], 0, 1.0, 0, torch.get_rng_state()

    def decide(find, *what):
        nonlocal at, weight
        if at == len(script):
            chances, results = find(*what)
            script.append(([i for i, c in enumerate(chances) if c > 0], chances, results))
        (outcome, *_), chances, results = script[at]
        at, weight = at + 1, weight * chances[outcome]
        return results[outcome]

    def accepts(p, q):
        chance = chance_to_accept(p, q).flatten().tolist()
        return torch.tensor([decide(lambda c: ([1 - c, c], [False, True]), c) for c in chance]).view(q.shape)

    def sample(w):
        rows = (w / w.sum(-1, keepdim=True)).view(-1, w.shape[-1]).tolist()
        return torch.tensor([decide(lambda row: (row, range(len(row))), row) for row in rows]).view(w.shape[:-1])

    rules = [verify.verify_chain, verify.verify_block, verify.verify_tree]
    fakes = {id(rule): partial(decide, outcomes, rule) for rule in rules}
    fakes |= {id(verify.accepts): accepts, id(verify.sample): sample}
    found = [(m, name, fakes[id(f)]) for m in (verify, *modules) for name, f in vars(m).items() if id(f) in fakes]
    found.append((Session, "chain_rule", fakes[id(Session.chain_rule)]))
    while True:
        at, weight, count = 0, 1.0, count + 1
        assert count <= limit, f"more than {limit} outcomes: its smallest draft is too large to enumerate"
        with contextlib.ExitStack() as stack:
            for patch in found:
                stack.enter_context(mock.patch.object(*patch))
            result = run()
        assert torch.equal(state, torch.get_rng_state()), "drawn, but not with verify.accepts or verify.sample"
        yield weight, result
        while script and len(script[-1][0]) == 1:
            script.pop()
        if not script:
            return
        script[-1][0].pop(0)


# ---- The methods: every file in the root that has a Drafter, and those of pytest --method FILE ----
ROOT = Path(__file__).parent.parent
METHODS = sorted(f.stem for f in ROOT.glob("*.py") if "\nclass Drafter" in f.read_text(encoding="utf-8"))


def build(name, way, target, seed=0):
    """(module, drafter in fp64 with large random weights)."""
    module = importlib.import_module(name)
    torch.manual_seed(seed)
    drafter = module.Drafter(target.config, module.Args(**{"device": "cpu", "dtype": "float64"} | way)).double().eval()
    for p in drafter.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return module, drafter


def drafting_flags(name):
    """({boolean: default}, {small integer: (default, values 0 to 9 that its type admits)}) of a method's own flags."""
    def admits(f, n):
        with contextlib.suppress(ValueError):
            return (f.metadata.get("type") or train.number(int, 1))(str(n)) == n

    common = {f.name for f in dataclasses.fields(train.CommonArgs)} | {"steps", "batch_size", "seq_len"}
    own = [f for f in dataclasses.fields(importlib.import_module(name).Args) if f.name not in common]
    booleans = {f.name: f.default for f in own if isinstance(f.default, bool)}
    integers = [f for f in own if f.name not in booleans and isinstance(f.default, int) and f.default <= 16]
    fits = [(f, [n for n in range(10) if admits(f, n)]) for f in integers]
    return booleans, {f.name: (f.default, fit) for f, fit in fits if fit}


def ways(name):
    """The settings in which a method drafts: the default; every boolean flipped, alone and in pairs; every small
    integer at its least, one more, and its most up to 9; all at their least, and all at their most."""
    booleans, integers = drafting_flags(name)
    flips = [{flag: not default} for flag, default in booleans.items()]
    found = [{}, *flips, *(a | b for a, b in combinations(flips, 2))]
    for flag, (default, fit) in integers.items():
        found += [{flag: n} for n in dict.fromkeys(fit[:2] + fit[-1:]) if n != default]
    return found + [{flag: fit[end] for flag, (_, fit) in integers.items()} for end in (0, -1) if len(integers) > 1]


def small_ways(name):
    """Settings with drafts small enough to enumerate: integers at most 2, or their least; every boolean flipped, every
    integer that may be 0 switched off, or on."""
    booleans, integers = drafting_flags(name)
    small = {f: max([n for n in fit if n <= min(default, 2)] or fit[:1]) for f, (default, fit) in integers.items()}
    switched = [{flag: not default} for flag, default in booleans.items()]
    switched += [{flag: 0 if default else min(3, fit[-1])} for flag, (default, fit) in integers.items() if 0 in fit]
    return [small | way for way in ({}, *switched)]


def a_round(name, target, prompt=(1, 2, 3, 4), device="cpu", temperature=0.0, drafter=None, **settings):
    """(session, drafter, draft, verify) of a method after prefill, as its generate composes them (None: plain)."""
    method = name and importlib.import_module(name)
    if name and drafter is None:
        drafter = method.Drafter(target.config, method.Args(**settings)).to(device, target.wte.weight.dtype).eval()
    found = []

    def run(session, draft, verify_):
        found.extend((session, drafter, draft, verify_))
        return session.record

    with mock.patch.object(Session, "run", run):
        generate = partial(method.generate, target, drafter) if name else partial(verify.autoregressive, target)
        generate(list(prompt), target.config.max_seq_len, temperature)
    return found


class Operations(TorchDispatchMode):
    """Counts the operations that a GPU runs: those that write, or return a storage of their own. Views are none."""
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old, new = ({t.untyped_storage()._cdata for t in tree_leaves(x) if isinstance(t, torch.Tensor)}
                    for x in ((args, kwargs), out))
        self.n += bool(new - old) or any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        return out


@torch.inference_mode()
def operations(name, target, temperature=0.0, drafter=None):
    """(of a draft, of the rest of the round) as CUDA captures it; name None: plain decoding."""
    with mock.patch.object(Session, "worth", lambda self, chance: len(chance)):
        _, _, draft, check = a_round(name, target, drafter=drafter, temperature=temperature)
        check(draft() if draft else None)  # what is made once is there now
        with Operations() as first:
            tree = draft() if draft else None
        with Operations() as second:
            check(tree)
    return first.n, second.n
