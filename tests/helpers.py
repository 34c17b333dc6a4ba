"""What the tests share: tiny targets, drafters that are good or wrong on purpose, and the enumeration of all branches."""
import contextlib
import copy
import dataclasses
import importlib
import math
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

import verify
from model import GPT, GPTConfig
from verify import Session, Topology, Tree


def tiny(vocab_size=7, max_seq_len=24, n_layer=2, seed=0, scale=0.5):
    """A target in fp64 with large random weights: every row of logits is different, and its text does not stand still (small
    biases and a final norm of random signs keep the tied head from repeating its input)."""
    g = torch.Generator().manual_seed(seed)
    target = GPT(GPTConfig(max_seq_len, vocab_size, n_layer, n_head=2, n_embd=16, bias=True)).double().eval()
    for name, p in target.named_parameters():
        noise = torch.randn(p.shape, generator=g, dtype=p.dtype)
        p.data = noise if name == "ln_f.weight" else 1 + scale * noise if "ln_" in name and name.endswith("weight") else (
            0.2 if name.endswith("bias") else 1) * scale * noise
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Enumeration: the real rules, on every branch of their random decisions, for every draft
# ---------------------------------------------------------------------------------------------------------------------
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


def at_nodes(table, code, depth):
    """Rows of the tables at every node: code (M, N) numbers the path to a node -> (M, N, V)."""
    V = table[0].shape[-1]
    return torch.stack([table[d].view(-1, V)[code[:, i]] for i, d in enumerate(depth)], 1)


def drafts(t, Q, replacement=False):
    """All drafts of topology t: nodes marked drawn come from the tables Q, with or without replacement among siblings; others are
    the likeliest token that no earlier sibling has. -> tokens (M, N), code (M, N), probability (M,)."""
    V, depth = Q[0].shape[-1], t.depth.tolist()
    tokens, weight = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    code = tokens
    for i in range(1, len(t.parent)):
        above = t.parent[i].item()
        law = Q[depth[above]].view(-1, V)[code[:, above]]                               # (M, V)
        older = [j for j in range(1, i) if t.parent[j] == above]
        seen = F.one_hot(tokens[:, older], V).sum(1) > 0 if older else torch.zeros_like(law, dtype=torch.bool)
        if not t.drawn[i]:
            law = F.one_hot((law - 2.0 * seen).argmax(-1), V).double()
        elif not replacement:
            law = law.masked_fill(seen, 0)
            empty = law.sum(-1, keepdim=True) == 0                                      # nothing left to draw: any token will do
            law = torch.where(empty, F.one_hot(torch.tensor(V - 1), V).double(), law / law.sum(-1, keepdim=True))
        m, x = (law > 0).nonzero(as_tuple=True)
        tokens, weight = torch.cat([tokens[m], x[:, None]], 1), weight[m] * law[m, x]
        code = torch.cat([code[m], code[m, above, None] * V + x[:, None]], 1)
    return tokens, code, weight


def branches(rule, t, tokens, p, q, weight, replacement=False):
    """Runs the real rule on every branch: one batch over drafts (M of them) x outcomes of all random decisions.

    verify.accepts and verify.sample are replaced by given outcomes, whose probabilities are collected. In a tree the decisions
    of different nodes are independent, and one node of each depth at most is on the path: so nodes of one depth share an
    outcome, and only those on the path count. -> path (K, D+1), n (K,), bonus (K,), weight (K,).
    """
    V, N, tree_rule = p.shape[-1], p.shape[1], rule is verify.verify_tree
    group = t.depth if tree_rule else torch.arange(N)
    calls, groups = (t.max_drawn if tree_rule else 1) if q is not None else 0, int(group.max()) + 1
    used = [(s, d) for s in range(calls) for d in range(groups - 1)
            if not tree_rule or (t.children[s] > 0)[t.depth == d].any()]  # decisions that somebody takes
    all_bits = torch.zeros(2 ** len(used), max(1, calls), groups, dtype=torch.bool)
    for i, (s, d) in enumerate(used):
        all_bits[:, s, d] = torch.arange(len(all_bits)) >> i & 1 == 1
    last_only = not tree_rule and q is not None               # chain rules draw once, after their decision
    ys = torch.tensor(list(product(range(V), repeat=1 if last_only else groups)))
    m, b, y = (x.flatten() for x in torch.meshgrid(*(torch.arange(len(x)) for x in (tokens, all_bits, ys)), indexing="ij"))

    def one(tokens, p, q, bits, y):
        chances, draws = [], []

        def accepts(p, q):
            outcome = bits[len(chances)][group[:len(q)]].view(q.shape)
            chance = torch.where(q > 0, (p / q).clamp(max=1), 0)
            chances.append(torch.where(outcome, chance, 1 - chance).flatten())
            return outcome

        def sample(w):
            w = w[:1] if last_only else w                     # vmap repeats the row that index_select takes with a 0-d index
            outcome = y[group[:len(w)]]
            draws.append((w / w.sum(-1, keepdim=True)).gather(1, outcome[:, None])[:, 0])
            return outcome

        with mock.patch.multiple(verify, accepts=accepts, sample=sample):
            path, n, bonus = rule(p, Tree(tokens, t, q, replacement))
        if tree_rule:
            on = (t.node[:, None] == path).any(-1)
            chances = [torch.where(on & (child > 0), 2 * c, 1.0) for c, child in zip(chances, t.children if chances else [])]
            draws = [torch.where(on, V * d, 1.0) for d in draws]
            draws.append(torch.full((1,), 1.0 / (len(all_bits) * len(ys)), dtype=torch.float64))  # idle outcomes were uniform
        return path, n, bonus, torch.stack([c.prod() for c in chances + draws]).prod()

    q = p if q is None else q
    given = q is not p
    run = torch.vmap(lambda tokens, p, q, bits, y: one(tokens, p, q if given else None, bits, y))
    path, n, bonus, chance = run(tokens[m], p[m], q[m], all_bits[b], ys[y])
    assert not chance.isnan().any()
    return path, n, bonus, weight[m] * chance, m


def output_law(rule, t, P, Q, replacement=False, one_hot=False, drawn_from=None, p_seen=None, told=None, change=None):
    """Exact joint law of the D+1 tokens after the anchor when one round is run with `rule` and the rest comes from the target.

    P, Q: tables of target and draft. For wrong variants: drawn_from, the tables that drafts truly come from; p_seen, what the
    rule is told of the target; told, what it is told of replacement; change(tokens, code, weight) -> (topology, tokens, code,
    weight), tampers with the drafts. Returns (law (V,)*(D+1), expected number of accepted tokens).
    """
    V, D, depth = P[0].shape[-1], t.max_depth, t.depth.tolist()
    tokens, code, weight = drafts(t, drawn_from or Q, replacement)
    if change:
        t, tokens, code, weight = change(tokens, code, weight)
        depth = t.depth.tolist()
    p, q = at_nodes(p_seen or P, code, depth), None if one_hot else at_nodes(Q, code, depth)
    path, n, bonus, weight, m = branches(rule, t, tokens, p, q, weight, replacement if told is None else told)
    end = code[m].gather(1, path.gather(1, n[:, None] - 1))[:, 0] * V + bonus      # numbers the tokens that were committed
    law = torch.ones(1, dtype=torch.float64) * 0
    for d in range(1, D + 2):
        mass = torch.zeros(V ** d, dtype=torch.float64).index_add(0, end[n == d], weight[n == d])
        law = (law[:, None] * P[d - 1].view(-1, V)).flatten() + mass if d > 1 else mass
    return law.view((V,) * (D + 1)), ((n - 1) * weight).sum().item()


def tv(a, b):
    """Total variation between two laws."""
    return ((a - b).abs().sum() / 2).item()


# ---------------------------------------------------------------------------------------------------------------------
# Drafters that know the target
# ---------------------------------------------------------------------------------------------------------------------
def topology(parent, drawn=()):
    """A topology from plain lists: parent of every node, numbers of the nodes that are drawn."""
    depth = [0]
    for a in parent[1:]:
        depth.append(depth[a] + 1)
    most = max([0] + [sum(parent[i] == a for i in drawn) for a in range(len(parent))])
    return Topology(torch.tensor(parent), max(depth), torch.tensor([i in drawn for i in range(len(parent))]), most)


class Informed:
    """Drafts from the target's own logits z after every node, so that drafts can be as good or as bad as a test needs.

    Drawn nodes come from q = law(skew(z)); chosen ones have the token of rank ranks[i] (default: the best that no earlier
    sibling has). A chain without ranks is the oracle: the target's own choices.
    """

    def __init__(self, target, t, skew=lambda z: z, ranks=None, replacement=False, one_hot=False):
        self.twin, self.t, self.skew, self.ranks = copy.deepcopy(target), t, skew, ranks
        self.twin._forward_hooks.clear()  # its passes are nobody's business
        self.replacement, self.one_hot = replacement, one_hot
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
            self.memory[text] = self.twin(torch.tensor([text]))[0][0, -1] if fits else torch.zeros(
                self.twin.config.vocab_size, dtype=torch.float64)
        return self.memory[text]

    def draft(self, target, anchor, law=None):
        t, parent, path = self.t, self.t.parent.tolist(), [tuple(self.text) + tuple(anchor.tolist())]
        q = torch.zeros(self.nodes, target.config.vocab_size, dtype=torch.float64)
        for i, a in list(enumerate(parent))[1:]:
            z = self.skew(self.z(path[a]))
            seen = [path[j][-1] for j in range(1, i) if parent[j] == a]
            if law and t.drawn[i] and not self.one_hot:
                q[a] = law(z)
                w = q[a].clone()
                w[seen if not self.replacement else []] = 0
                x = verify.sample(w).item() if w.sum() > 0 else 0
            elif self.ranks:
                x = z.argsort(descending=True)[self.ranks[i]].item()
            else:
                x = next(x for x in z.argsort(descending=True).tolist() if x not in seen)
            path.append(path[a] + (x,))
        tokens = torch.tensor([p[-1] for p in path])
        return Tree(tokens, t, q if law and t.max_drawn and not self.one_hot else None, self.replacement)


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=(), rule=None):
    """The loop that every method has."""
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    s.chain_rule = rule or s.chain_rule
    drafter.reset(s)
    drafter.absorb(s.committed)

    def check(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.law if temperature else None), check)


# ---------------------------------------------------------------------------------------------------------------------
# Laws of whole generations
# ---------------------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def target_law(target, prompt, n, temperature=1.0, top_k=None, top_p=None):
    """Exact joint law of the first n new tokens, (V,)*n, from uncached passes."""
    V = target.config.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    for d in range(n):
        text = torch.tensor([prompt + list(c) for c in product(range(V), repeat=d)])
        law = (law[:, None] * verify.probs(target(text)[0][:, -1], temperature, top_k, top_p)).flatten()
    return law


def p_value(counts, law):
    """Chi-square of counts against a law, both flat; cells with fewer than 5 expected are one cell. 0 if the impossible happened."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    e = torch.cat([expected[~small], expected[small].sum()[None]])
    c = torch.cat([counts[~small], counts[small].sum()[None]])
    c, e = c[e > 0], e[e > 0]
    statistic = ((c - e) ** 2 / e).sum()
    return torch.special.gammaincc(torch.tensor((len(e) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def every_run(run, *modules):
    """Calls run() once for every outcome of its random decisions, depth first -> yields (probability, result). All of them
    have to go through accepts and sample of verify, or of modules that imported them. Decisions that are certain do not branch."""
    script = []  # [[outcome, probability of outcome 0, 1, ...]]
    while True:
        at, weight = 0, 1.0

        def decide(chances):
            nonlocal at, weight
            if at == len(script):
                script.append([next(i for i, c in enumerate(chances) if c > 0), chances])
            outcome, chances = script[at]
            at, weight = at + 1, weight * chances[outcome]
            return outcome

        def accepts(p, q):
            chance = torch.where(q > 0, (p / q).clamp(max=1), 0).flatten().tolist()
            return torch.tensor([bool(decide([1 - c, c])) for c in chance]).view(q.shape)

        def sample(w):
            rows = (w / w.sum(-1, keepdim=True)).view(-1, w.shape[-1]).tolist()
            return torch.tensor([decide(row) for row in rows]).view(w.shape[:-1])

        with contextlib.ExitStack() as stack:
            for module in (verify, *modules):
                for name, fake in (("accepts", accepts), ("sample", sample)):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, fake))
            yield_now = run()
        yield weight, yield_now
        while script:
            outcome, chances = script.pop()
            later = [i for i in range(outcome + 1, len(chances)) if chances[i] > 0]
            if later:
                script.append([later[0], chances])
                break
        if not script:
            return


def counted(law_shape, V, outputs):
    """Weights of outputs (weight, tokens), tokens all equally long -> flat law."""
    law = torch.zeros(law_shape, dtype=torch.float64)
    for weight, tokens in outputs:
        law[sum(t * V ** i for i, t in enumerate(reversed(tokens)))] += weight
    return law


# ---------------------------------------------------------------------------------------------------------------------
# The methods: every file in the root that has a Drafter
# ---------------------------------------------------------------------------------------------------------------------
ROOT = Path(__file__).parent.parent
METHODS = sorted(f.stem for f in ROOT.glob("*.py") if "\nclass Drafter" in f.read_text(encoding="utf-8"))
SMALL = {"block_size": 4, "n_draft_layer": 2, "n_taps": 2, "depth": 2, "n_nodes": 12, "device": "cpu", "dtype": "float64"}
WAYS = [{}, {"argmax": True}, {"tree": 9}, {"tree": 3, "block_size": 8}, {"drawn": 0}, {"drawn": 9}, {"n_candidates": 2},
        {"width": 9, "beam": 2, "depth": 3}, {"width": 4, "beam": 4, "depth": 5, "n_nodes": 3}, {"drawn": 0, "n_nodes": 2, "depth": 6}]


def ways():
    """(method, settings) for all the ways of drafting that each method's Args knows."""
    found = []
    for name in METHODS:
        known = {f.name: f.default for f in dataclasses.fields(importlib.import_module(name).Args)}
        found += [(name, way) for way in WAYS if way.keys() <= known.keys() and all(known[k] != v for k, v in way.items())]
    return found


def build(name, way, target, seed=0):
    """(module, drafter in fp64 with large random weights)."""
    module = importlib.import_module(name)
    known = {f.name for f in dataclasses.fields(module.Args)}
    torch.manual_seed(seed)
    drafter = module.Drafter(target.config, module.Args(**{k: v for k, v in {**SMALL, **way}.items() if k in known})).double().eval()
    for p in drafter.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return module, drafter
