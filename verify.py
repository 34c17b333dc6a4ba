"""Verification: what all methods agree on. A drafter proposes, the target disposes, the output keeps its law.

    python verify.py    one node: ways to draft its children, how often one is accepted, distance of the output from p

Notation: p target, q draft, N nodes (node 0 is the anchor, the newest committed token), D greatest depth of a tree,
  γ = D for a chain, V vocabulary, r the residual, τ tokens committed per target pass.

The lemma (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draw x ~ q, accept it with probability min(1, p/q)(x),
otherwise draw from (p - q)+, normalized. What comes out has the law q(z) min(1, p/q)(z) + (p - q)+(z) = p(z): the
chance of a rejection is the sum of (p - q)+, so normalizing cancels.

The premise. A child is drawn, sampled from q, or chosen, whatever way. A drawn child must be tried whenever it was
drawn; which chosen children are kept, and which nodes are expanded, may depend on anything. Example: p = q = (0.7,
0.3). Drop the drawn child where its q is below 0.5 and draw from p instead: token 0 now comes out with 0.7 + 0.3 * 0.7
= 0.91, not 0.7.
"""
import functools
import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F


# ---- The two random decisions. All of verification goes through them, so that tests can enumerate every branch. ----
def accepts(p, q):
    """True with probability min(1, p/q), elementwise; never where p is 0, nor where q is 0 (nothing was drawn)."""
    u = torch.rand(q.shape, dtype=torch.float64, device=q.device)
    return (u * q < p) & (q > 0)


def sample(weights):
    """Draws from weights (..., V), not necessarily normalized -> (...). A token of weight 0 is never drawn."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    u = torch.rand(cdf[..., -1:].shape, dtype=torch.float64, device=cdf.device)
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True)[..., 0]


def probs(logits, temperature=1.0, top_k=None, top_p=None):
    """logits (..., V) -> the distribution that is sampled from: softmax at a temperature > 0, cut to the top_k tokens
    (and those that tie with the last of them), then to the smallest set of mass top_p, never empty."""
    logits = logits.float() if logits.element_size() == 2 else logits
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)  # nothing overflows
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= max(top_p, 1e-30)
        p = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(outside, 0))
        p = p / p.sum(-1, keepdim=True)
    return p


def normalize(weights, fallback):
    """weights (..., V) >= 0 divided by their sum; `fallback` where the sum is zero."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), fallback)


# ---- Drafts ----
class Topology:
    """The shape of a draft of N nodes: parent (N,), parent[0] = -1 and parent[i] < i otherwise (is_chain: i - 1).

    max_depth: no node is deeper. drawn (N,) bool: nodes drawn from q, not chosen; max_drawn: most such siblings.
    Derived: depth (N,); ancestors (N, N), 0 where row i may see column j (an ancestor or itself) and -inf elsewhere;
    children (max_drawn, N): row s, column i is the s-th drawn child of node i, or 0 (the root is nobody's child).
    """

    def __init__(self, parent, max_depth, drawn=None, max_drawn=0, is_chain=False):
        N, device = len(parent), parent.device
        self.parent, self.max_depth, self.max_drawn, self.is_chain = parent, max_depth, max_drawn, is_chain
        self.node = torch.arange(N, device=device)
        reach = torch.eye(N, device=device) + (parent[:, None] == self.node)
        for _ in range(math.ceil(math.log2(max(2, max_depth)))):
            reach = (reach @ reach).clamp_(max=1)
        self.depth = reach.sum(1).long() - 1
        self.ancestors = torch.where(reach > 0, 0.0, -math.inf)
        self.drawn = torch.zeros_like(self.node, dtype=torch.bool) if drawn is None else drawn
        if max_drawn:
            siblings = (parent[:, None] == parent) & self.drawn
            rank = (siblings & (self.node < self.node[:, None])).sum(1)
            place = torch.where(self.drawn, rank * N + parent, max_drawn * N)
            table = torch.zeros(max_drawn * N + 1, dtype=torch.long, device=device)
            self.children = table.scatter(0, place, self.node)[:-1].view(max_drawn, N)


@functools.lru_cache
def chain(n, device=None):
    """The topology of an anchor followed by n drafted tokens: a tree in which every node has one child."""
    parent = torch.arange(-1, n, device=device)
    return Topology(parent, n, parent >= 0, 1, True)


@dataclass
class Tree:
    """A draft: tokens (N,), its topology, and for drafts that were drawn q (N, V): row i is the distribution that the
    drawn children of node i came from, the draft's counterpart of p[i]. q is None where every token was chosen."""
    tokens: torch.Tensor
    topology: Topology
    q: torch.Tensor | None = None

    def __post_init__(self):
        t, N = self.topology, len(self.tokens)
        assert len(t.parent) == N, f"{N} tokens, anchor included, for {len(t.parent)} nodes"
        assert self.q is None or (t.max_drawn and len(self.q) == N), "q (N, V) goes with drawn nodes"


def acceptance(q):
    """How often a token drawn from q (..., V) is accepted, Σ min(p, q), as measured: max q, and at least 0.5."""
    return q.amax(-1).clamp_min(0.5)


def siblings(logits, k, n_drawn=0, probs=None):
    """k children for every row of logits (m, V): the first n_drawn are drawn from q = probs(logits) without
    replacement, the others are the likeliest of the rest. -> tokens (m, k), and q (m, V) or None."""
    if not n_drawn:
        return logits.topk(k).indices, None
    left = q = probs(logits)
    tokens = [sample(q)[:, None]]
    for _ in range(n_drawn - 1):
        left = left.scatter(1, tokens[-1], 0)
        left = normalize(left, torch.ones_like(left))  # nothing left: any token
        tokens.append(sample(left)[:, None])
    rest = logits.scatter(1, torch.cat(tokens, 1), -math.inf).topk(k - n_drawn).indices
    return torch.cat([*tokens, rest], 1), q


# ---- The rules. Each returns (path, n, bonus) ----
# path (D+1,): node 0 and the accepted nodes, then padding; n (): how many of them count, the root included;
# bonus (): the token after the last of them.
def greedy(y, tree):
    """Temperature 0: y (N,) is the target's own choice at every node; follow it while it was drafted."""
    t = tree.topology
    if t.is_chain:  # up to the first that was not drafted
        n = 1 + (tree.tokens[1:] == y[:-1]).long().cumprod(0).sum()
        return t.node, n, y.index_select(0, n[None] - 1)[0]
    return follow(y, tree, t.node, t.node > 0)


def verify_chain(p, tree):
    """The lemma, position by position (2211.17192, algorithm 1), for a drawn chain. p (γ+1, V)."""
    q, x = tree.q[:-1], tree.tokens[1:, None]
    accepted = accepts(p[:-1].gather(1, x), q.gather(1, x))[:, 0]
    n = 1 + accepted.long().cumprod(0).sum()  # up to the first that is not
    residual = normalize((p[:-1] - q).clamp_min(0), p[:-1])
    return tree.topology.node, n, sample(torch.cat([residual, p[-1:]]).index_select(0, n[None] - 1))[0]


def verify_block(p, tree):
    """Block verification (Sun et al. 2403.10444): decides for all of a drawn chain at once. p (γ+1, V).

    Exact: P, Q being rows of p and q, p_i a number, p_0 = 1: given x_1..x_i, at least i tokens are accepted with
    probability p_i = min(1, p_{i-1} P/Q), and the residual of a stop at i is (p_i P - Q)+. Never worse: p_i is at least
    the product of min(1, P/Q), a chain's chance.
    """
    q, x = tree.q[:-1], tree.tokens[1:, None]
    walk = (p[:-1].gather(1, x) / q.gather(1, x))[:, 0].log().cumsum(0)
    weight = (walk - walk.cummax(0).values.clamp_min(0)).exp()  # p_i: its log is a walk reflected at 0
    surplus = (weight[:-1, None] * p[1:-1] - q[1:]).clamp_min(0).sum(-1)  # S_i, 0 < i < γ
    one = torch.ones_like(weight[:1])
    above, below = torch.cat([surplus, weight[-1:]]), torch.cat([surplus + (1 - weight[:-1]), one])
    accepted = accepts(above, below)  # with S_i / (S_i + 1 - p_i), the last with p_γ
    n = 1 + F.pad(torch.where(accepted, tree.topology.node[1:], 0), (1, 0)).amax()  # the largest i that accepts
    scale = torch.cat([one, weight[:-1]])[:, None]
    residual = normalize((scale * p[:-1] - q).clamp_min(0), p[:-1])
    return tree.topology.node, n, sample(torch.cat([residual, p[-1:]]).index_select(0, n[None] - 1))[0]


def verify_tree(p, tree):
    """Multi-round speculative sampling over a tree, all nodes at once. p (N, V).

    At a node, r = p. Its drawn children are tried in order: accept x with probability min(1, r/q)(x), otherwise
    r <- (r - q)+ and q <- q without x, normalized (SpecInfer 2305.09781; without replacement, 2402.14160). What is
    left is one draw y ~ r: where y is a chosen child, descend to it; otherwise y is the bonus. No q: all are chosen.

    Exact: the token z after a node has the law q(z) min(1, p/q)(z) + (p - q)+(z) = p(z), and further drawn children
    repeat this on r. Chosen children decide whether z is walked through or is the bonus, not which z it is.
    Nodes decide independently, so all decide at once, and the decisions are followed from the root.
    """
    t, r, q = tree.topology, p, tree.q
    next_node = t.node  # the child to go on to; itself: the end
    if q is not None:
        for child in t.children:  # (N,): one of every node's drawn children
            x = tree.tokens[child][:, None]
            trying = (child > 0) & (next_node == t.node)
            accepted = trying & accepts(r.gather(1, x), q.gather(1, x))[:, 0]
            next_node = torch.where(accepted, child, next_node)
            residual = normalize((r - q).clamp_min(0), r)
            r = torch.where((trying & ~accepted)[:, None], residual, r)
            q = q.scatter(1, x, 0)
            q = normalize(q, q)
    y = sample(r)
    chosen = t.node > 0 if tree.q is None else ~t.drawn & (t.node > 0)
    return follow(y, tree, next_node, chosen)


def follow(y, tree, next_node, chosen):
    """From the root along next_node (N,): the accepted child of every node, or the node itself. From such a node i on
    to its child with token y[i] among the chosen nodes (N,), if there is one. If there is none, y[i] is the bonus."""
    t, N = tree.topology, len(y)
    hit = (tree.tokens == y[t.parent]) & (next_node[t.parent] == t.parent) & chosen
    next_node = torch.cat([next_node, next_node[:1]]).scatter(0, torch.where(hit, t.parent, N), t.node)
    path = [t.node[:1]]
    for _ in range(t.max_depth):
        path.append(next_node.index_select(0, path[-1]))
    path = torch.cat(path)
    n = 1 + (path[1:] != path[:-1]).sum()
    return path, n, y.index_select(0, path[-1:])[0]


# ---- Decoding ----
class Committed(NamedTuple):
    """What a drafter absorbs: n more positions in the target's cache, from `start` on. P >= n rows, padding
    from n on. tokens (P+1,): tokens[i] is the input at position start+i, tokens[n] the new anchor, which is in
    no cache yet; h: for every tap (P, d), the target's features at these positions; start, n: 0-d tensors."""
    tokens: torch.Tensor
    h: list
    start: torch.Tensor
    n: torch.Tensor


class Round(NamedTuple):
    """One target pass: greatest depth of the draft, nodes verified, drafted tokens accepted, tokens that entered the
    text (not all of them where it was cut), and with Session.keep_drafts the draft, (tokens, parents)."""
    depth: int
    nodes: int
    accepted: int
    kept: int
    draft: tuple | None = None


@dataclass
class Record:
    """One generation. tokens: the prefill's one, then the rounds', at most max_new_tokens, a stop token included;
    seconds: wall time of rounds[warm_up:]."""
    tokens: list = field(default_factory=list)
    rounds: list = field(default_factory=list)
    seconds: float = 0.0
    warm_up: int = 0


class Session:
    """One generation: prefills the prompt, [token], and has the target's cache, the newest token (anchor), and the loop
    around a method's two functions. taps: the hidden states that the drafter wants; nodes: the most rows that its trees
    or its own passes put behind the committed ones. A round touches the host once, to read `new_tokens`: the tokens
    committed, then -1. capture: rounds become CUDA graphs; drafts made on the host unset it."""
    chain_rule = staticmethod(verify_block)  # verify_chain is the classical rule
    keep_drafts = False  # costs a synchronisation
    least_chance = 0.1  # of a token worth drafting, on a CPU

    def __init__(self, target, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=(), taps=(),
                 nodes=1):
        limit = target.config.max_seq_len
        assert 0 < len(prompt) <= limit, f"{len(prompt)} tokens; a prompt has 1 to {limit}"
        self.temperature, self.stop = temperature, frozenset(stop)
        self.probs = functools.partial(probs, temperature=temperature, top_k=top_k, top_p=top_p)
        self.token_budget, self.record = min(max_new_tokens, limit - len(prompt)), Record()
        self.device = target.wte.weight.device
        self.capture = self.device.type == "cuda"
        self.cache = target.new_cache(nodes)
        idx = torch.tensor([prompt], device=self.device)
        logits, h = target(idx, self.cache, taps=taps)
        self.anchor = self.new_tokens = self.choose(logits[0, -1:])  # (1,), rewritten in place
        n = torch.tensor(len(prompt), device=self.device)
        self.committed = Committed(torch.cat([idx[0], self.anchor]), [x[0] for x in h], torch.zeros_like(n), n)
        self.cache.pos += n
        self.record_tokens(self.anchor.tolist())

    def new_cache(self, n_layer, n_head, head_dim):
        """A drafter's cache with as many slots as the target's."""
        kv = self.cache.kv
        return type(self.cache)(n_layer, n_head, head_dim, kv.shape[4], kv.device, kv.dtype)

    def choose(self, logits):
        """One token per row: logits (..., V) -> (...)."""
        return logits.argmax(-1) if self.temperature == 0 else sample(self.probs(logits))

    def verify(self, tree, logits, h):
        """Commits the accepted path, given logits (N, V) and features h of the tree's pass. Never asks the host."""
        if self.temperature == 0:
            path, n, bonus = greedy(logits.argmax(-1), tree)
        else:
            rule = self.chain_rule if tree.topology.is_chain and tree.q is not None else verify_tree
            path, n, bonus = rule(self.probs(logits), tree)
        tokens = torch.cat([tree.tokens.index_select(0, path), bonus[None]])
        tokens = tokens.scatter(0, n[None], bonus[None])  # anchor, accepted, bonus, padding
        start = self.cache.pos.clone()
        if tree.topology.is_chain:
            self.cache.pos += n  # a chain's rows stand where they belong
        else:
            self.cache.commit_path(path, n)
            h = [x.index_select(0, path) for x in h]
        self.committed = Committed(tokens, h, start, n)
        self.anchor.copy_(bonus)
        self.new_tokens = torch.where(self.cache.index[:len(path)] < n, tokens[1:], -1)

    def record_tokens(self, new):
        """The host's side of a round: appends to the record, up to a stop token and the token budget. Returns how many
        drafted tokens were accepted, and how many tokens kept."""
        new = [t for t in new if t >= 0]
        kept = new[:max(0, self.token_budget - len(self.record.tokens))]
        end = next((i for i, t in enumerate(kept, 1) if t in self.stop), None)
        self.record.tokens += kept[:end]
        self.done = end is not None or len(self.record.tokens) >= self.token_budget
        return len(new) - 1, len(kept[:end])

    def worth(self, chance):
        """How many tokens are worth drafting: chance (n,) is how likely each is accepted with all before it. Exact, as
        long as none that is dropped was drawn already. On CUDA all of them: fixed shapes."""
        return int((chance >= self.least_chance).sum()) if self.device.type == "cpu" else len(chance)

    def run(self, draft, verify):
        """Rounds until done: draft() -> Tree (draft None: plain decoding), verify(tree) commits. Returns the Record. On
        CUDA both become graphs after two rounds, which have warmed everything up and are not timed: what a round leaves
        to the next (anchor, caches, drafter's state) is written in place."""
        record, tree, started = self.record, None, time.perf_counter()
        while not self.done:
            if draft:
                tree = draft() or tree
            verify(tree)
            accepted, kept = self.record_tokens(self.new_tokens.tolist())  # the one synchronisation
            depth, nodes = (tree.topology.max_depth, len(tree.tokens)) if tree else (0, 1)
            drafted = (tree.tokens.tolist(), tree.topology.parent.tolist()) if tree and self.keep_drafts else None
            record.rounds.append(Round(depth, nodes, accepted, kept, drafted))
            if self.capture and len(record.rounds) == 2 and not self.done:
                if draft:
                    draft, tree = capture(draft)
                verify, _ = capture(verify, tree)
                torch.cuda.synchronize()
                record.warm_up, started = 2, time.perf_counter()
        record.seconds = time.perf_counter() - started
        return record


def capture(function, *args):
    """A CUDA graph of function(*args), which has run before -> (replay, outputs): replay(...) ignores its arguments,
    runs the graph on the buffers of the capture, and rewrites the outputs in place."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*args)
    return lambda *_: graph.replay(), outputs


@torch.inference_mode()
def autoregressive(target, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    """Plain decoding, the baseline of every method: the same cache and the same forward, one token per pass."""
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop)

    def step(_):
        logits, _ = target(s.anchor[None], s.cache)
        s.anchor.copy_(s.choose(logits[0]))  # s.new_tokens is the same tensor
        s.cache.pos += 1

    return s.run(None, step)


# ---- Measurements ----
def n_alpha(rounds):
    """Acceptance rate at every draft position among the rounds that accepted all positions before it, cut rounds left
    out. In a tree a position counts as accepted when any of its nodes is, and as rejected where there is none."""
    rounds = [r for r in rounds if r.kept > r.accepted]
    rates = []
    while reached := sum(min(r.accepted, r.depth - 1) >= len(rates) for r in rounds):
        rates.append(sum(r.accepted > len(rates) for r in rounds) / reached)
    return rates


def speed(records):
    """Tokens per second of decoding: tokens over the wall time of all timed rounds."""
    kept = sum(r.kept for record in records for r in record.rounds[record.warm_up:])
    return kept / max(1e-9, sum(record.seconds for record in records))


def measure(target, generate, prompts, max_new_tokens, *sampling, seed=0):
    """A method and plain decoding side by side, each going first on every other prompt, [token].
    generate(prompt, max_new_tokens, *sampling) -> Record. Returns (numbers, [(record, plain record)])."""
    both, pairs = (generate, functools.partial(autoregressive, target)), []
    for i, prompt in enumerate(prompts):
        pair = [None, None]
        for which in (i % 2, 1 - i % 2):
            torch.manual_seed(seed + i)
            pair[which] = both[which](prompt, max_new_tokens, *sampling)
        pairs.append(pair)
    records, plain = zip(*pairs)
    rounds = [r for record in records for r in record.rounds]
    passes = max(1, len(rounds))
    return {
        "prompts": len(pairs), "new_tokens": sum(len(r.tokens) for r in records), "target_passes": len(rounds),
        "tau": sum(r.kept for r in rounds) / passes, "nodes": sum(r.nodes for r in rounds) / passes,
        "n_alpha": n_alpha(rounds), "tok_s": speed(records), "ar_tok_s": speed(plain),
        "speedup": speed(records) / max(1e-9, speed(plain)), "equal": sum(a.tokens == b.tokens for a, b in pairs),
    }, pairs


# ---- The demonstration ----
def main(n=4000, k=3):
    torch.manual_seed(0)
    z = 1.5 * torch.randn(6, dtype=torch.float64)
    p, logits = z.softmax(-1).expand(k + 1, -1), z + torch.randn(6, dtype=torch.float64)  # resembles p
    node = torch.arange(k + 1)  # the root and its children
    print(f"One node, V = 6, k = {k} children, {n} drafts each: noise of TV about 0.012\n\n"
          f"{'how the children are drafted':36}{'accepted':>9}{'TV from p':>12}")
    for name, n_drawn, told in (("top-k", 0, 0), ("first drawn, then top-(k-1)", 1, 1),
                                ("all drawn, without replacement", k, k), ("WRONG: top-k verified as if drawn", 0, k)):
        shape = Topology((node > 0).long() - 1, 1, (node > 0) & (node <= told), told)
        q, accepted, count = logits.softmax(-1).expand(k + 1, -1) if told else None, 0, torch.zeros(6)
        for _ in range(n):
            children, _ = siblings(logits[None], k, n_drawn, probs)
            tree = Tree(F.pad(children[0], (1, 0)), shape, q)
            path, length, bonus = verify_tree(p, tree)
            count[tree.tokens[path[1]] if length > 1 else bonus] += 1
            accepted += (length > 1).item() / n
        print(f"{name:36}{accepted:9.3f}{(count / n - p[0]).abs().sum() / 2:12.3f}")


if __name__ == "__main__":
    main()
