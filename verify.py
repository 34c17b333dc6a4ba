"""Verification: what all methods agree on. A drafter proposes, the target disposes, and the output keeps the target's law.

    python verify.py                    the exact one-node table: rule, acceptance, total variation from p

Every round of every method is the same:

                  ┌─ drafter.draft(anchor)      ─► Tree(tokens, topology, q)
    committed ────┤
                  └─ target(tree.tokens, tree)  ─► p at every node: always exactly one pass
    Session.verify    ─► path of accepted nodes, and one bonus token; rows of the path moved into place in the target's cache
    drafter.absorb    ─► features of the path

Notation: p target, q draft, N nodes (node 0 is the anchor, the newest committed token), D greatest depth of a tree,
  γ = D for a chain, V vocabulary, r the residual, τ tokens committed per target pass.

The lemma behind everything (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draw x ~ q, accept it with probability
min(1, p(x)/q(x)), otherwise draw from norm((p - q)+); the result has law p.
"""
import functools
import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


# ---------------------------------------------------------------------------------------------------------------------
# The two random decisions. Everything random in verification goes through them, so that tests can enumerate all branches.
# ---------------------------------------------------------------------------------------------------------------------
def accepts(p, q):
    """True with probability min(1, p/q), elementwise; never where p is 0, and never where q is 0 (nothing was drawn there)."""
    return (torch.rand(q.shape, dtype=torch.float64, device=q.device) * q < p) & (q > 0)


def sample(w):
    """Draws from weights w (..., V), not necessarily normalised -> (...). A token of weight 0 is never drawn."""
    cdf = w.double().cumsum(-1)
    u = torch.rand(cdf[..., -1:].shape, dtype=torch.float64, device=w.device) * cdf[..., -1:]
    return torch.searchsorted(cdf, u, right=True)[..., 0]


def probs(logits, temperature=1.0, top_k=None, top_p=None):
    """logits (..., V) -> the law that is sampled from: softmax at a temperature > 0, cut to the top_k tokens (and those that tie
    with the last of them) and then to the smallest set of mass top_p, renormalised."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)  # the largest is 0: nothing overflows
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        p = torch.zeros_like(p).scatter(-1, index, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p


def norm(w, otherwise):
    """w (..., V) >= 0 divided by its sum; `otherwise` where the sum is zero."""
    total = w.sum(-1, keepdim=True)
    return torch.where(total > 0, w / total.clamp_min(torch.finfo(w.dtype).tiny), otherwise)


# ---------------------------------------------------------------------------------------------------------------------
# Drafts
# ---------------------------------------------------------------------------------------------------------------------
class Topology:
    """The shape of a draft of N nodes: parent (N,), parent[0] = -1 and parent[i] < i otherwise.

    max_depth: no node is deeper; known without looking (shapes depend on it).
    drawn (N,) bool: which nodes were drawn from q rather than chosen; max_drawn: the most drawn children of one node.
    Derived: depth (N,); ancestors (N, N), 0 where row i may see column j (an ancestor or itself) and -inf elsewhere;
    children (max_drawn, N): row s, column i is the s-th drawn child of node i, or 0 (the root is nobody's child).
    """

    def __init__(self, parent, max_depth, drawn=None, max_drawn=0):
        N, device = len(parent), parent.device
        self.parent, self.max_depth, self.max_drawn = parent, max_depth, max_drawn
        self.node = torch.arange(N, device=device)
        self.is_chain = False
        reach = torch.eye(N, device=device) + (parent[:, None] == self.node).float()
        for _ in range(math.ceil(math.log2(max(2, max_depth)))):
            reach = (reach @ reach).clamp_(max=1)
        self.depth = reach.sum(1).long() - 1
        self.ancestors = torch.where(reach > 0, 0.0, -math.inf)
        self.drawn = torch.zeros(N, dtype=torch.bool, device=device) if drawn is None else drawn
        if max_drawn:
            older = (parent[:, None] == parent) & self.drawn & (self.node < self.node[:, None])  # drawn siblings before me
            place = torch.where(self.drawn, older.sum(1) * N + parent, max_drawn * N)
            table = torch.zeros(max_drawn * N + 1, dtype=torch.long, device=device)
            self.children = table.scatter(0, place, self.node)[:-1].view(max_drawn, N)


@functools.lru_cache
def chain(n, device=None):
    """The topology of an anchor followed by n drafted tokens."""
    t = Topology(torch.arange(-1, n, device=device), n, torch.arange(n + 1, device=device) > 0, 1)
    t.is_chain = True
    return t


@dataclass
class Tree:
    """A draft: tokens (N,), its topology, and for drafts that were drawn q (N, V): row i is the law from which the drawn
    children of node i came, the draft's counterpart of p[i]. q is None where every token was chosen deterministically.
    replacement: siblings were drawn independently (True) or without replacement (False)."""
    tokens: torch.Tensor
    topology: Topology
    q: torch.Tensor | None = None
    replacement: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# The rules. Each returns path (D+1,): node 0 and the accepted nodes, then padding; n (): how many of them count, the root
# included; bonus (): the token after the last of them.
# ---------------------------------------------------------------------------------------------------------------------
def greedy(y, tree):
    """Temperature 0: y (N,) is the target's own choice at every node; follow it while it was drafted."""
    if tree.topology.is_chain:
        return first_rejection(tree.tokens[1:] == y[:-1], tree, y)
    return follow(descend(y, tree, tree.topology.node, tree.topology.node > 0), tree, y)


def verify_chain(p, tree):
    """The lemma, position by position (Leviathan et al. 2211.17192, algorithm 1). p (γ+1, V)."""
    tokens, q = tree.tokens, tree.q
    if q is None:  # a one-hot q: accepting with probability p(x) is to draw from p and compare
        return greedy(sample(p), tree)
    q = q[:-1]
    accepted = accepts(p[:-1].gather(1, tokens[1:, None]), q.gather(1, tokens[1:, None]))[:, 0]
    path, n, _ = first_rejection(accepted, tree)
    residual = norm((p[:-1] - q).clamp_min(0), p[:-1])
    return path, n, sample(torch.cat([residual, p[-1:]]).index_select(0, n[None] - 1))[0]


def verify_block(p, tree):
    """Block verification (Sun et al. 2403.10444): accepts the longest prefix that it may, jointly; never worse than
    verify_chain in expectation, and equally exact. p (γ+1, V); the letters are the paper's."""
    tokens, q = tree.tokens, tree.q
    if q is None:
        return greedy(sample(p), tree)
    q, x = q[:-1], tokens[1:, None]
    steps = (p[:-1].gather(1, x) / q.gather(1, x))[:, 0].log().cumsum(0)
    weight = (steps - steps.cummax(0).values.clamp_min(0)).exp()          # p_i = min(1, p_{i-1} P(x_i)/Q(x_i))
    surplus = (weight[:-1, None] * p[1:-1] - q[1:]).clamp_min(0).sum(-1)  # S_i, 0 < i < γ
    h = torch.cat([surplus, weight[-1:]])
    accepted = accepts(h, torch.cat([surplus + (1 - weight[:-1]), torch.ones_like(weight[-1:])]))
    count = torch.where(accepted, torch.arange(1, len(x) + 1, device=x.device), 0).amax()  # the largest i with u_i < h_i
    scale = torch.cat([torch.ones_like(weight[:1]), weight])[:-1, None]
    residual = norm((scale * p[:-1] - q).clamp_min(0), p[:-1])
    return tree.topology.node, count + 1, sample(torch.cat([residual, p[-1:]]).index_select(0, count[None]))[0]


def verify_tree(p, tree):
    """Multi-round speculative sampling over a tree, all nodes at once. p (N, V).

    At a node, r = p. Its drawn children are tried in order: accept x with probability min(1, r(x)/q(x)), otherwise
    r <- norm((r - q)+), and without replacement q <- norm(q without x) (SpecInfer 2305.09781; recursive rejection,
    2402.14160). What is left is one draw y ~ r: where y is a chosen child, descend to it; otherwise y is the bonus. That is
    the same rule with a one-hot q for each chosen child, in a single draw. Decisions at different nodes are independent, so
    they are made for all nodes and then followed from the root.
    """
    t, r = tree.topology, p
    step = t.node                                               # the child to go on to; a node itself where the walk ends
    if tree.q is not None:
        q = tree.q
        for child in t.children:                                # (N,): one drawn child of every node that has that many
            x = tree.tokens[child][:, None]
            trying = (child > 0) & (step == t.node)
            accepted = trying & accepts(r.gather(1, x), q.gather(1, x))[:, 0]
            step = torch.where(accepted, child, step)
            r = torch.where((trying & ~accepted)[:, None], norm((r - q).clamp_min(0), r), r)
            if not tree.replacement:
                q = q.scatter(1, x, 0)
                q = norm(q, q)
    y = sample(r)
    chosen = (t.node > 0) if tree.q is None else ~t.drawn & (t.node > 0)
    return follow(descend(y, tree, step, chosen), tree, y)


def descend(y, tree, step, chosen):
    """Goes from every undecided node i to its child with token y[i] among the chosen (N,) nodes, where there is one."""
    t = tree.topology
    hit = (tree.tokens == y[t.parent]) & (step[t.parent] == t.parent) & chosen
    N = len(y)
    return torch.cat([step, step[:1]]).scatter(0, torch.where(hit, t.parent, N), t.node)[:N]


def follow(step, tree, y):
    """The path from the root along step (N,), which ends at a node that points to itself."""
    path = [tree.topology.node[:1]]
    for _ in range(tree.topology.max_depth):
        path.append(step.index_select(0, path[-1]))
    path = torch.cat(path)
    n = 1 + (path[1:] != path[:-1]).sum()
    return path, n, y.index_select(0, path[-1:])[0]


def first_rejection(accepted, tree, y=None):
    """A chain's path: accepted (γ,) up to the first False; y (N,), if given, has the bonus for every length."""
    n = 1 + accepted.long().cumprod(0).sum()
    return tree.topology.node, n, None if y is None else y.index_select(0, n[None] - 1)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Committed:
    """What a drafter absorbs: n more positions have entered the target's cache, from `start` on. All tensors have P >= n rows,
    rows at and after n are padding. tokens (P+1,): tokens[i] is the input at position start+i, tokens[n] the new anchor, which
    is in no cache yet; h: for every tap (P, d), the target's features at these positions; start, n: 0-d tensors."""
    tokens: torch.Tensor
    h: list
    start: torch.Tensor
    n: torch.Tensor


@dataclass
class Record:
    """One generation. tokens: the new ones, at most max_new_tokens, the first stop token included; from_draft: which of them
    were drafted and accepted; rounds: (greatest depth of the draft's shape, accepted) per target pass, prefill excluded; committed: tokens kept per
    round; nodes: verified in all rounds; seconds: "prefill", "draft", "verify", and "rounds", the wall time of all rounds, whatever
    it was spent on."""
    tokens: list = field(default_factory=list)
    from_draft: list = field(default_factory=list)
    rounds: list = field(default_factory=list)
    committed: list = field(default_factory=list)
    nodes: int = 0
    seconds: dict = field(default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "rounds": 0.0})

    @property
    def tau(self):
        """Tokens committed per target pass, the prefill and its token left out."""
        return sum(self.committed) / max(1, len(self.committed))


class Session:
    """One generation: the target's cache, the newest token (anchor), the sampling law, and the loop around a method's two
    functions. Prefills on construction.

    prompt: non-empty list of token ids that fits the context. taps: which hidden states the drafter wants; nodes: the most rows
    that its trees or its own passes put behind the committed ones. After prefill a round touches the host once, to read `report`: the tokens committed, then -1.
    """

    chain_rule = staticmethod(verify_block)  # for drawn chains; verify_chain is the classical rule

    def __init__(self, target, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=(), taps=(), nodes=1):
        limit = target.config.max_seq_len
        assert 0 < len(prompt) <= limit, f"a prompt has 1 to {limit} tokens, this one {len(prompt)}"
        self.stop = frozenset(stop)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.room = min(max_new_tokens, limit - len(prompt))
        self.nodes, self.length, self.record = nodes, len(prompt), Record()
        self.device = target.wte.weight.device
        self.cache = target.new_cache(nodes)
        self.caches = [self.cache]
        started = self.stamp()
        idx = torch.tensor([prompt], device=self.device)
        self.cache.reserve(len(prompt))
        logits, h = target(idx, self.cache, taps=taps)
        self.anchor = self.choose(logits[0, -1:])  # (1,), written in place from here on
        n = torch.tensor(len(prompt), device=self.device)
        self.committed = Committed(torch.cat([idx[0], self.anchor]), [x[0] for x in h], torch.zeros_like(n), n)
        self.cache.pos += n
        self.report = self.anchor
        self.capture = self.device.type == "cuda"
        self.done = self.room <= 0
        if not self.done:
            self.take(self.report.tolist(), drafted=None)
        self.stamps = {"prefill": [(started, self.stamp())], "draft": [], "verify": []}

    def new_cache(self, n_layer, n_head, head_dim):
        """A drafter's cache with as many slots as the target's."""
        kv = self.cache.kv
        cache = type(self.cache)(n_layer, n_head, head_dim, kv.shape[4], kv.device, kv.dtype)
        cache.reserve(self.length + self.nodes)
        self.caches.append(cache)
        return cache

    def law(self, logits):
        """The user's sampling controls, which define p: logits (..., V) -> probabilities."""
        return probs(logits, self.temperature, self.top_k, self.top_p)

    def choose(self, logits):
        """One token per row: logits (..., V) -> (...)."""
        return logits.argmax(-1) if self.temperature == 0 else sample(self.law(logits))

    def verify(self, tree, logits, h):
        """logits (N, V) and features h of the pass over the tree -> commits the accepted path. In place, without the host."""
        if self.temperature == 0:
            path, n, bonus = greedy(logits.argmax(-1), tree)
        else:
            rule = self.chain_rule if tree.topology.is_chain else verify_tree
            path, n, bonus = rule(self.law(logits), tree)
        tokens = torch.cat([tree.tokens.index_select(0, path), bonus[None]])
        tokens = tokens.scatter(0, n[None], bonus[None])  # anchor, accepted tokens, bonus, padding
        start = self.cache.pos.clone()
        if tree.topology.is_chain:
            self.cache.pos += n                            # a chain's rows stand where they belong
        else:
            self.cache.keep(path, n)
            h = [x.index_select(0, path) for x in h]
        self.committed = Committed(tokens, h, start, n)
        self.anchor.copy_(bonus)
        self.report = torch.where(self.cache.index[:len(path)] < n, tokens[1:], -1)

    def take(self, new, drafted):
        """The host's side of a round: appends to the record, cuts at the first stop token and at the room left."""
        new = [t for t in new if t >= 0]
        kept = new[:self.room - len(self.record.tokens)]
        for i, t in enumerate(kept):
            if t in self.stop:
                kept = kept[:i + 1]
                self.done = True
                break
        self.record.tokens += kept
        self.length += len(new)
        self.done = self.done or len(self.record.tokens) >= self.room
        self.record.from_draft += [drafted is not None and i < len(new) - 1 for i in range(len(kept))]
        if drafted is not None:
            self.record.committed.append(len(kept))
            # a round that was cut says nothing about how much would have been accepted
            self.record.rounds.append((drafted, len(new) - 1 if len(kept) == len(new) else None))

    def stamp(self):
        """A point in time: seconds on a CPU, an event in the stream on CUDA, which waits for nothing."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, draft, verify):
        """Rounds until done: draft() -> Tree, verify(tree) commits. Returns the Record.

        On CUDA both are captured as graphs after two rounds, which have warmed everything up, and replayed from then on: what
        passes from one round to the next (anchor, caches, the drafter's state) is written in place.
        """
        started = time.perf_counter()
        while not self.done:
            for cache in self.caches:
                if cache.span < self.length + self.nodes:
                    cache.reserve(self.length + self.nodes)
            t0 = self.stamp()
            tree = draft()
            t1 = self.stamp()
            verify(tree)
            new = self.report.tolist()  # the one synchronisation of a round
            self.stamps["draft"].append((t0, t1))
            self.stamps["verify"].append((t1, self.stamp()))
            self.take(new, tree.topology.max_depth if tree is not None else 0)
            self.record.nodes += len(tree.tokens) if tree is not None else 1
            if self.capture and len(self.record.committed) == 2 and not self.done:
                draft, tree = capture(draft)
                verify, _ = capture(verify, tree)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.record.seconds["rounds"] = time.perf_counter() - started
        for stage, pairs in self.stamps.items():
            self.record.seconds[stage] = sum(b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in pairs)
        return self.record


def capture(function, *args):
    """Captures function(*args), which has run before, in a CUDA graph. Returns (replay, outputs): replay(...) ignores its
    arguments, runs the graph on the buffers of the capture, and returns the same outputs, rewritten in place."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*args)

    def replay(*_):
        graph.replay()
        return outputs
    return replay, outputs


@torch.inference_mode()
def autoregressive(target, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    """Plain decoding, the opponent of every method: the same cache and the same forward, one token per pass."""
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop)

    def step(_):
        logits, _ = target(s.anchor[None], s.cache)
        s.anchor.copy_(s.choose(logits[0]))
        s.cache.pos += 1
        s.report = s.anchor

    return s.run(lambda: None, step)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------------------------------------------------
def n_alpha(rounds):
    """Acceptance rate at every draft position among the rounds that accepted all positions before it (rounds that were cut by
    a stop token or by the length are left out). In a tree a position counts as accepted when any of its nodes is, and as rejected where there is none."""
    rounds = [(d, a) for d, a in rounds if a is not None]
    depth = max((d for d, _ in rounds), default=0)
    reached = [sum(a >= i and d > i for d, a in rounds) for i in range(depth)]
    passed = [sum(a > i for _, a in rounds) for i in range(depth)]
    return [round(a / b, 3) for a, b in zip(passed, reached) if b]


def repetition(tokens, n=8):
    """Share of the n-grams of a text that occurred in it before."""
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def quartiles(values):
    """The three quartiles of some numbers, each one of them, rounded."""
    v = sorted(values)
    return [round(v[int(f * (len(v) - 1) + 0.5)], 2) for f in (0.25, 0.5, 0.75)]


def measure(target, generate, prompts, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=(), seed=0, progress=iter):
    """One interleaved run of a method and of plain decoding.

    generate(prompt, max_new_tokens, temperature, top_k, top_p, stop) -> Record. prompts: [[token]]. Speeds are those of
    decoding: new tokens after the first over the wall time of all rounds. Returns (numbers, [(record, plain record)]).
    """
    knobs, pairs = (max_new_tokens, temperature, top_k, top_p, stop), []
    for i, prompt in enumerate(progress(prompts)):
        torch.manual_seed(seed + i)
        plain = autoregressive(target, prompt, *knobs) if i % 2 else None  # the order alternates
        torch.manual_seed(seed + i)
        record = generate(prompt, *knobs)
        torch.manual_seed(seed + i)
        pairs.append((record, plain or autoregressive(target, prompt, *knobs)))

    def total(which, *keys):
        return sum(pair[which].seconds[k] for pair in pairs for k in keys)

    def speed(record):
        return max(0, len(record.tokens) - 1) / max(1e-9, record.seconds["rounds"])

    rounds = [r for record, _ in pairs for r in record.rounds]
    plain_rounds = sum(len(plain.rounds) for _, plain in pairs)
    new = sum(sum(record.committed) for record, _ in pairs)
    tok_s = new / max(1e-9, total(0, "rounds"))
    ar_tok_s = plain_rounds / max(1e-9, total(1, "rounds"))
    numbers = {
        "prompts": len(pairs), "new_tokens": sum(len(r.tokens) for r, _ in pairs), "target_passes": len(rounds),
        "tau": round(new / max(1, len(rounds)), 3), "nodes": round(sum(r.nodes for r, _ in pairs) / max(1, len(rounds)), 1), "n_alpha": n_alpha(rounds),
        "tok_s": round(tok_s, 1), "ar_tok_s": round(ar_tok_s, 1), "speedup": round(tok_s / max(1e-9, ar_tok_s), 3),
        "speedup_quartiles": quartiles([speed(r) / max(1e-9, speed(a)) for r, a in pairs if len(r.tokens) > 1 < len(a.tokens)] or [0]),
        "repetition": round(sum(repetition(r.tokens) for r, _ in pairs) / max(1, len(pairs)), 3),
        "draft_ms": round(1e3 * total(0, "draft") / max(1, len(rounds)), 3),
        "verify_ms": round(1e3 * total(0, "verify") / max(1, len(rounds)), 3),
        "ar_ms": round(1e3 * total(1, "rounds") / max(1, plain_rounds), 3),
        "equal": sum(r.tokens == a.tokens for r, a in pairs),
    }
    return numbers, pairs


# ---------------------------------------------------------------------------------------------------------------------
# The demonstration
# ---------------------------------------------------------------------------------------------------------------------
def one_node(p, q, kind, k=3):
    """Exact law of the token after one node, and the probability that it was drafted, for one way of drafting k siblings:
    all drafts are enumerated, and at each the rule (verify_tree's, for a single node) is carried out on the laws themselves."""
    V = len(p)
    law, accepted = torch.zeros(V, dtype=p.dtype), 0.0
    top = q.argsort(descending=True).tolist()

    def drafts():  # (probability of the draft, [(token, the law it counts as drawn from)])
        if kind == "top-k":
            yield 1.0, [(x, F.one_hot(torch.tensor(x), V).to(p)) for x in top[:k]]
        elif kind == "top-(k-1) + 1 drawn from the rest":
            rest = norm(q.index_fill(0, torch.tensor(top[:k - 1]), 0), q)
            for x in top[k - 1:]:
                yield rest[x].item(), [(x, rest)] + [(t, F.one_hot(torch.tensor(t), V).to(p)) for t in top[:k - 1]]
        elif kind == "1 drawn + top-(k-1) of the rest":
            for x in range(V):
                rest = [t for t in top if t != x][:k - 1]
                yield q[x].item(), [(x, q)] + [(t, F.one_hot(torch.tensor(t), V).to(p)) for t in rest]
        else:
            def extend(weight, seen, law_now):
                if len(seen) == (1 if kind == "chain" else k):
                    yield weight, seen
                    return
                for x in range(V):
                    if law_now[x] > 0:
                        after = law_now if kind == "i.i.d." else norm(law_now.scatter(0, torch.tensor(x), 0), law_now * 0)
                        yield from extend(weight * law_now[x].item(), seen + [(x, law_now)], after)
            yield from extend(1.0, [], q)

    for weight, siblings in drafts():
        r, left = p, weight
        for x, qx in siblings:
            a = min(1.0, (r[x] / qx[x]).item())
            law[x] += left * a
            accepted += left * a
            left *= 1 - a
            r = norm((r - qx).clamp_min(0), r)
        law += left * r
    return law, accepted


def main():
    print("One node, V = 6, k = 3 siblings, 60 random pairs (p, q), exact enumeration in fp64\n")
    print(f"{'how the siblings are drafted':36}{'accepted':>9}{'TV from p':>12}")
    g = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(60):  # a draft that resembles its target, as a trained one does
        z = 1.5 * torch.randn(6, generator=g, dtype=torch.float64)
        pairs.append((z.softmax(0), (z + torch.randn(6, generator=g, dtype=torch.float64)).softmax(0)))
    for kind in ("chain", "top-k", "i.i.d.", "without replacement", "1 drawn + top-(k-1) of the rest",
                 "top-(k-1) + 1 drawn from the rest"):
        rows = [(one_node(p, q, kind), p) for p, q in pairs]
        acceptance = sum(a for (_, a), _ in rows) / len(rows)
        tv = max(((law - p).abs().sum() / 2).item() for (law, _), p in rows)
        print(f"{kind + (' (a single one)' if kind == 'chain' else ''):36}{acceptance:9.3f}{tv:12.1e}")


if __name__ == "__main__":
    main()
