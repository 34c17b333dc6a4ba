"""What the tests share: tiny targets, the enumeration of all branches, drafters that know the target, and the methods."""
import contextlib
import copy
import dataclasses
import importlib
import math
from functools import partial
from itertools import combinations, product
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

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
            p.data *= 0.2 * scale if name.endswith("bias") else scale
            p.data += 1 if "ln_" in name and name.endswith("weight") else 0
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
    law = P[0]
    for table in P[1:]:
        law = law[..., None] * table
    return law


def at_nodes(T, code, depth):
    """Rows of the tables at every node: code (M, N) numbers the path to a node -> (M, N, V)."""
    V = T[0].shape[-1]
    return torch.stack([T[d].view(-1, V)[code[:, i]] for i, d in enumerate(depth)], 1)


def drafts(t, Q, independent=False):
    """All drafts of topology t: drawn nodes come from the tables Q, without replacement among siblings (or wrongly, each
    on its own), others are the likeliest token that no earlier sibling has. -> tokens, code (M, N), probability (M,)."""
    V, depth = Q[0].shape[-1], t.depth.tolist()
    tokens, weight = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    code = tokens
    for i in range(1, len(t.parent)):
        above = t.parent[i].item()
        law = Q[depth[above]].view(-1, V)[code[:, above]]  # (M, V)
        older = [j for j in range(1, i) if t.parent[j] == above]
        seen = F.one_hot(tokens[:, older], V).sum(1) > 0
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
    decisions of different nodes are independent, and one node of each depth at most is on the path: so nodes of one depth
    share an outcome, and only those on the path count. -> path (K, D+1), n, bonus, weight, draft (K,).
    """
    V, D, children = p.shape[-1], t.max_depth, [] if q is None else t.children
    used = [(s, d) for s, child in enumerate(children) for d in range(D) if (child > 0)[t.depth == d].any()]
    all_bits = torch.zeros(2 ** len(used), max(1, len(children)), D + 1, dtype=torch.bool)
    for i, (s, d) in enumerate(used):
        all_bits[:, s, d] = torch.arange(len(all_bits)) >> i & 1 == 1
    one_draw = rule is not verify_tree and q is not None  # chain rules draw once, after their decision
    ys = torch.tensor(list(product(range(V), repeat=1 if one_draw else D + 1)))
    m, b, y = torch.meshgrid(*(torch.arange(len(x)) for x in (tokens, all_bits, ys)), indexing="ij")

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

    m, b, y = m.flatten(), b.flatten(), y.flatten()
    given = p if q is None else q
    run = torch.vmap(lambda tokens, p, x, bits, y: one(tokens, p, None if q is None else x, bits, y))
    path, n, bonus, chance = run(tokens[m], p[m], given[m], all_bits[b], ys[y])
    assert not chance.isnan().any()
    return path, n, bonus, weight[m] * chance, m


def output_law(rule, t, P, Q, one_hot=False, independent=False, drawn_from=None, p_seen=None, change=None):
    """Exact joint law of the D+1 tokens after the anchor when one round is run with `rule` and the rest comes from the
    target. P, Q: tables of target and draft; one_hot: the draft reports no q.

    For wrong variants: independent, see drafts; drawn_from, the tables that drafts truly come from; p_seen, what the rule
    is told of the target; change(tokens, code, weight) -> (topology, tokens, code, weight), tampers with the drafts.
    Returns (law (V,)*(D+1), expected number of accepted tokens).
    """
    V, D = P[0].shape[-1], t.max_depth
    tokens, code, weight = drafts(t, drawn_from or Q, independent)
    if change:
        t, tokens, code, weight = change(tokens, code, weight)
    depth = t.depth.tolist()
    p, q = at_nodes(p_seen or P, code, depth), None if one_hot else at_nodes(Q, code, depth)
    path, n, bonus, weight, m = branches(rule, t, tokens, p, q, weight)
    end = code[m].gather(1, path.gather(1, n[:, None] - 1))[:, 0] * V + bonus  # numbers the tokens that were committed
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
    return Topology(torch.tensor(parent), max(depth), torch.tensor([i in drawn for i in range(len(parent))]), most)


class Informed:
    """Drafts from the target's own logits z after every node, so that drafts can be as good or as bad as a test needs.

    Drawn nodes come from q = probs(skew(z)); chosen ones have the token of rank ranks[i] (default: the best that no
    earlier sibling has). A chain without ranks is the oracle: the target's own choices.
    """

    def __init__(self, target, t, skew=lambda z: z, ranks=None, one_hot=False):
        self.twin, self.t, self.skew, self.ranks, self.one_hot = copy.deepcopy(target), t, skew, ranks, one_hot
        self.taps, self.nodes, self.memory = list(range(target.config.n_layer + 1)), len(t.parent), {}

    def reset(self, session):
        self.text, self.h = [], []

    def absorb(self, new):
        n = new.n.item()
        assert len(self.text) == new.start
        self.text += new.tokens[:n].tolist()
        self.h.append([x[:n] for x in new.h])

    def z(self, text):
        if text not in self.memory:
            fits = len(text) <= self.twin.config.max_seq_len
            zeros = torch.zeros(self.twin.config.vocab_size, dtype=torch.float64)
            self.memory[text] = self.twin(torch.tensor([text]))[0][0, -1] if fits else zeros
        return self.memory[text]

    def draft(self, target, anchor, probs=None):
        t, parent, path = self.t, self.t.parent.tolist(), [(*self.text, *anchor.tolist())]
        q = torch.zeros(self.nodes, target.config.vocab_size, dtype=torch.float64)
        drawing = probs and t.drawn.any() and not self.one_hot
        for i, a in list(enumerate(parent))[1:]:
            z = self.skew(self.z(path[a]))
            order = z.argsort(descending=True).tolist()
            seen = [path[j][-1] for j in range(1, i) if parent[j] == a]
            if drawing and t.drawn[i]:
                q[a] = probs(z)
                w = q[a].clone()
                w[seen] = 0
                x = verify.sample(w).item() if w.sum() > 0 else 0
            else:
                x = order[self.ranks[i]] if self.ranks else next(x for x in order if x not in seen)
            path.append((*path[a], x))
        return Tree(torch.tensor([p[-1] for p in path]), t, q if drawing else None)


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    """The loop that every method has."""
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    drafter.reset(s)
    drafter.absorb(s.committed)

    def check(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.probs if temperature else None), check)


# ---- Laws of whole generations ----
@torch.inference_mode()
def target_law(target, prompt, n, *controls):
    """Exact joint law of the first n new tokens, flat (V**n,), from uncached passes; controls: temperature, ..."""
    law = torch.ones(1, dtype=torch.float64)
    for d in range(n):
        rest = product(range(target.config.vocab_size), repeat=d)
        text = torch.tensor([prompt + list(tokens) for tokens in rest])
        law = (law[:, None] * verify.probs(target(text)[0][:, -1], *controls)).flatten()
    return law


def p_value(counts, law):
    """Chi-square of counts against a law, both flat. The rarest cells are one, so that 5 are expected in every cell: where that
    leaves a single cell the test says nothing. 0 if the impossible happened."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected, order = (law / law.sum() * counts.sum()).sort()
    rare = int((expected.cumsum(0) < 5).sum()) + 1
    e = torch.cat([expected[:rare].sum()[None], expected[rare:]])
    c = torch.cat([counts[order[:rare]].sum()[None], counts[order[rare:]]])
    statistic = ((c - e) ** 2 / e).sum()
    half_dof = torch.tensor((len(e) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_dof, statistic / 2).item() if len(e) > 1 else 1.0


def outcomes(rule, p, tree):
    """What a rule may return for one draft: probabilities, results (path, n, bonus)."""
    q, one = tree.q if tree.q is None else tree.q[None], torch.ones(1, dtype=torch.float64)
    path, n, bonus, weight, _ = branches(rule, tree.topology, tree.tokens[None], p[None], q, one)
    merged = {}
    for path, n, bonus, w in zip(path.tolist(), n.tolist(), bonus.tolist(), weight.tolist()):
        result = (*path[:n], *path[n - 1:n] * (len(path) - n)), n, bonus
        merged[result] = merged.get(result, 0.0) + w
    return list(merged.values()), [tuple(map(torch.tensor, result)) for result in merged]


def every_run(run, *modules, limit=50_000):
    """Calls run() once for every outcome of its random decisions, depth first -> yields (probability, result). Decisions
    that are certain do not branch. All have to be made by verify's rules, accepts and sample, under whatever name verify
    or `modules` call them; anything else that draws is an error, as are more than `limit` runs."""
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
    found = [(m, name, fakes.get(id(f))) for m in (verify, *modules) for name, f in vars(m).items()]
    found.append((Session, "chain_rule", fakes[id(Session.chain_rule)]))
    while True:
        at, weight, count = 0, 1.0, count + 1
        assert count <= limit, f"more than {limit} outcomes: its smallest draft is too large to enumerate"
        with contextlib.ExitStack() as stack:
            for module, name, fake in found:
                if fake:
                    stack.enter_context(mock.patch.object(module, name, fake))
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
MIXED = [{"tree": 3, "block_size": 8}, {"width": 9, "beam": 9, "depth": 3, "n_nodes": 40},
         {"drawn": 0, "width": 9, "beam": 9, "n_nodes": 40}, {"drawn": 0, "n_nodes": 2, "depth": 6}]


def build(name, way, target, seed=0):
    """(module, drafter in fp64 with large random weights)."""
    module = importlib.import_module(name)
    torch.manual_seed(seed)
    drafter = module.Drafter(target.config, module.Args(**{"device": "cpu", "dtype": "float64"} | way)).double().eval()
    for p in drafter.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return module, drafter


def drafting_flags(name):
    """({boolean: default}, {integer: (default, values 0 to 9 that its type admits)}) of what a method adds to the common
    flags."""
    def admits(f, n):
        try:
            return (f.metadata.get("type") or train.number(int, 1))(str(n)) == n
        except ValueError:
            return False

    common = {f.name for f in dataclasses.fields(train.CommonArgs)} | {"steps", "batch_size", "seq_len"}
    own = [f for f in dataclasses.fields(importlib.import_module(name).Args) if f.name not in common]
    booleans = {f.name: f.default for f in own if isinstance(f.default, bool)}
    integers = [f for f in own if isinstance(f.default, int) and f.default <= 16 and f.name not in booleans]
    return booleans, {f.name: (f.default, [n for n in range(10) if admits(f, n)]) for f in integers}


def ways(name):
    """The settings in which a method drafts: the default; every boolean flipped, alone and in pairs; every small integer
    at its least, one more, and at most 9; and mixtures that are tight or wide."""
    booleans, integers = drafting_flags(name)
    flips = [{flag: not default} for flag, default in booleans.items()]
    found = [{}, *flips, *(a | b for a, b in combinations(flips, 2))]
    for flag, (default, fit) in integers.items():
        found += [{flag: n} for n in dict.fromkeys(fit[:2] + fit[-1:]) if n != default]
    return found + [way for way in MIXED if way.keys() <= integers.keys()]


def small_ways(name):
    """Settings with drafts small enough to enumerate: integers at most 2, or their least; every boolean flipped, every
    integer that may be 0 switched off, or on."""
    booleans, integers = drafting_flags(name)
    small = {flag: max([n for n in fit if n <= min(default, 2)] or fit[:1]) for flag, (default, fit) in integers.items()}
    switched = [{flag: not default} for flag, default in booleans.items()]
    switched += [{flag: 0 if default else fit[-1] if fit[-1] < 3 else 3} for flag, (default, fit) in integers.items() if 0 in fit]
    return [small | way for way in ({}, *switched)]


def a_round(name, target, prompt=(1, 2, 3, 4), device="cpu", temperature=0.0, drafter=None, **settings):
    """(session, drafter, draft, verify) of a method after prefill, as its generate composes them."""
    method = importlib.import_module(name)
    if drafter is None:
        drafter = method.Drafter(target.config, method.Args(**settings)).to(device, target.wte.weight.dtype).eval()
    found = []

    def run(session, draft, verify_):
        found.extend((session, drafter, draft, verify_))
        return session.record

    with mock.patch.object(Session, "run", run):
        method.generate(target, drafter, list(prompt), target.config.max_seq_len, temperature)
    return found
