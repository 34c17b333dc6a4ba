"""EAGLE-3: stop imitating the feature; train the draft as it will be used, and let it read low, middle and high features.

Paper: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test (Li et al. 2025,
arXiv 2503.01840).

One round. What the layer hands on, a, is free: only LMHead(norm(a)) has to match the target. It therefore has to be trained on
its own outputs, step after step, exactly as drafting feeds them back: the training-time test.

    committed slots ([l; m; h]_j ─► FC ─► g_j, t_{j+1})  ─► layer ─► a ─► norm ─► LM head (frozen) ─► k children, V = c
                                          ▲                                          │
    expand                                └──── the m nodes of the level with the best V ◄─┘   `depth` times, k children each:
                       (a of the parent, child)                                          V(child) = V(parent) c(child)
    rerank       the N - 1 best V of all levels, and the anchor: always connected, because V falls along a path
    verify ─► accepted path + bonus; the accepted slots are rewritten with the target's features

Glossary
    l, m, h = h[2], h[L//2], h[L-3]        Drafter.taps: low, middle and high features
    g = FC([l; m; h]), each normed         Drafter.fuse; used at verified positions only
    a                                      the layer's output before the final norm; used at drafted positions (free latent)
    Σ_i 0.8^i CE(p, q_i)                   Drafter.forward: loss over the steps of the training-time test; no feature loss
    c, V = Π c                             siblings' log_c, and value, their sum along the path (section 4.1 of EAGLE-2)
    k, m, depth, N                         width, beam, depth, n_nodes
    p, q                                   target and draft distribution

    python eagle3.py --train               target (where missing) and drafter, then measurements
    python eagle3.py --prompt "def "       continues a text, drafted and accepted tokens marked
    python eagle3.py --bench --json        measurements only
    python eagle3.py --train --ttt 1       the ablation: no training-time test

At T > 0 a deterministic tree wastes its draft where the target is uncertain. Here the first child of an expanded node is drawn
from q, the tree goes on behind drawn children only, and the best of the others are its leaves. A drawn child is never pruned:
which of them survive would depend on what was drawn, and the output would no longer have the target's law.

Read next: dflash.py. Left out: the reduced draft vocabulary with an LM head of its own (the official code trains one; here the
head is the target's, frozen), serving many requests at once.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import causal, rope_angles, rotate
from train import (
    CommonArgs,
    Optimiser,
    UserError,
    command,
    drafter_run,
    flag,
    get_target,
    launch,
)
from verify import Session, Topology, Tree, norm, sample

ALPHA = 0.8   # share of drawn children that are accepted, roughly
GREEDY = 2.5  # at T = 0 the likeliest child is accepted more often than its probability says: confidences are sharpened


@dataclass
class Args(CommonArgs):
    steps: int = flag(1100, "optimiser steps")
    batch_size: int = flag(4, "sequences per step")
    seq_len: int = flag(256, "tokens per sequence")
    text: str = flag("mixed", "to train on: corpus, greedy or sampled text of the target, or mixed, a third each (published: the target's)")
    lr: float = flag(0.02, "learning rate of Muon (published: AdamW, 5e-5)")
    ttt: int = flag(5, "steps of the training-time test (published: 7); 1: none")
    width: int = flag(4, "k: children of an expanded node (published: 10)", trained=False)
    beam: int = flag(2, "m: nodes expanded per level, at most k (published: k); at T > 0 of the drawn ones", trained=False)
    depth: int = flag(5, "levels expanded below the first (published: 5 to 7)", trained=False)
    n_nodes: int = flag(10, "N: nodes of the tree after reranking, the anchor included (published: 60); at T > 0 at least what was "
                           "drawn", trained=False)
    drawn: int = flag(1, "at T > 0 draw this many of a node's children from q, the first ones, and choose the likeliest of the rest; "
                         "0: a deterministic tree (published), --width or more: all drawn", trained=False, least=0)


class Layer(nn.Module):
    """A decoder layer whose queries, keys and values read [norm(E(t)); norm(state)]; the residual stream is the state itself."""

    def __init__(self, c):
        super().__init__()
        d = c.n_embd
        self.n_head = c.n_head
        self.token_norm = nn.LayerNorm(d, bias=False)
        self.state_norm = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(2 * d, 3 * d, bias=False)
        self.attn_proj = nn.Linear(d, d, bias=False)
        self.ln_2 = nn.LayerNorm(d, bias=False)
        self.fc = nn.Linear(d, 4 * d, bias=False)
        self.mlp_proj = nn.Linear(4 * d, d, bias=False)

    def forward(self, x, tokens, angles, attend):
        """x (b, T, d), embedded tokens (b, T, d) and the angles of their positions; attend: a function from q, k, v, each
        (b, n_head, T, hd), to the attention's output."""
        b, T, d = x.shape
        qkv = self.qkv(torch.cat([self.token_norm(tokens), self.state_norm(x)], -1))
        qkv = qkv.view(b, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = attend(*rotate(qkv[:2], angles), qkv[2])
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        return x + self.mlp_proj(F.relu(self.fc(self.ln_2(x))).square())


def siblings(logits, k, law, drawn):
    """k children for every row of logits (m, V): the first `drawn` are drawn from q = law(logits) without replacement, the others
    are the likeliest of the rest. Returns tokens (m, k), their log-confidences log c (m, k), and q (m, V) or None. A drawn child
    is accepted about as often whatever it is: c is α for the first of s, α (1-α) for the second that is tried, and for the others,
    which are tried last, (1-α)^s q. Without q it is the draft's own probability, whatever the temperature."""
    if drawn == 0:
        top = ((GREEDY if law is None else 1) * logits.float()).log_softmax(-1).topk(k)
        return top.indices, top.values, None
    q = left = law(logits)
    first, log_a = [], []
    for s in range(min(drawn, k)):
        if first:  # where nothing is left, any token will do
            left = norm(left.scatter(1, first[-1], 0), torch.ones_like(left))
        first.append(sample(left)[:, None])
        log_a.append(q.new_full(first[-1].shape, math.log(ALPHA) + s * math.log(1 - ALPHA)))
    rest = logits.scatter(1, torch.cat(first, 1), float("-inf")).topk(k - len(first)).indices
    log_c = q.gather(1, rest).log() + len(first) * math.log(1 - ALPHA)
    return torch.cat([*first, rest], 1), torch.cat([*log_a, log_c], 1), q


def unrolled(keys, values, q, k, v):
    """Attention of one step of the training-time test: q, k, v (b, n_head, n, hd). Slot t sees the first step's rows 0..t, as a
    drafted node sees the committed prefix, and of every later step its own slot alone, as it sees its ancestors. Appends k and v
    to keys and values, which hold the steps so far."""
    keys.append(k)
    values.append(v)
    n = q.shape[2]
    prefix = causal(n, q.device, q.dtype)
    itself = torch.full_like(prefix, -math.inf).fill_diagonal_(0)
    mask = torch.cat([prefix] + [itself] * (len(keys) - 1), 1)
    k, v = (torch.cat([step[:, :, :n] for step in steps], 2) for steps in (keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Drafter(nn.Module):
    kind = "eagle3"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        if args.ttt > args.seq_len - 2:
            raise UserError(f"--ttt {args.ttt}: sequences of --seq_len {args.seq_len} allow at most {args.seq_len - 2} steps")
        self.args, self.config, d = args, config, config.n_embd
        L = config.n_layer
        self.taps = [2, L // 2, L - 3] if L >= 7 else [max(1, L // 3), max(1, L // 2), L]  # the official ones where distinct
        self.width = min(args.width, config.vocab_size)
        self.beam = min(args.beam, self.width)
        drawn = min(args.drawn, self.width)
        self.size = max(args.n_nodes, 1 + drawn * (1 + args.depth * (1 if drawn == 1 else self.beam)))  # of a tree at T > 0
        self.nodes = max(self.size, 2 + args.depth * self.beam)                                         # or rows while expanding
        self.fc = nn.Linear(3 * d, d, bias=False)
        self.layer = Layer(config)
        self.norm = nn.LayerNorm(d, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / 2 ** 0.5 if name.endswith("proj.weight") else 0.02)

    def fuse(self, h):
        """g (b, T, d) of the three taps h, each (b, T, d), and normed first, which the paper does not do: g is the layer's residual
        stream, and where features are large what the layer adds would drown in it."""
        return self.fc(torch.cat([F.layer_norm(x, x.shape[-1:]) for x in h], -1))

    def angles(self, positions):
        return rope_angles(positions, self.config.n_embd // self.config.n_head, self.fc.weight.dtype)

    def advance(self, target, state, tokens, angles, attend):
        """One pass: states g or a (b, T, d), the tokens (b, T) that followed them, and the angles of their positions -> a (b, T, d),
        one position further."""
        return self.layer(state, target.embed(tokens), angles, attend)

    def read(self, target, a):
        """Draft logits of states (..., d)."""
        return target.head(self.norm(a))

    def forward(self, target, idx):
        """The training loss on sequences idx (b, T): the training-time test. Step i = 0, 1, ... continues every prefix at once:
        slot t holds what drafting computes in its pass i when positions 0..t are committed. Its state is the output of step i-1
        at the same slot, its token the true one, t+1+i, its position t+i, and what it predicts is token t+2+i."""
        with torch.no_grad():
            logits, h = target(idx, taps=self.taps)
            p = logits.float().softmax(-1)
        state, keys, values, loss = self.fuse(h), [], [], 0.0
        for i in range(self.args.ttt):
            n = idx.shape[1] - 1 - i
            angles = self.angles(torch.arange(i, i + n, device=idx.device))
            state = self.advance(target, state[:, :n], idx[:, 1 + i:], angles, partial(unrolled, keys, values))
            log_q = self.read(target, state).float().log_softmax(-1)
            loss = loss - 0.8 ** i * (p[:, 1 + i:] * log_q).sum(-1).mean()
        return loss / sum(0.8 ** i for i in range(self.args.ttt))

    def reset(self, session):
        """Buffers for a new text."""
        c, device = self.config, session.device
        self.cache = session.new_cache(1, c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        self.state = torch.zeros(1, c.n_embd, device=device, dtype=self.cache.kv.dtype)  # a at the anchor
        m = self.beam
        self.itself = torch.full((m, m), -math.inf, device=device, dtype=self.cache.kv.dtype).fill_diagonal_(0)
        self.drawn = min(self.args.drawn, self.width) if session.temperature else 0

    def cached(self, slots, sees):
        """Attention of rows that are written to the cache at slots (T,); sees (T, R): which of the R rows behind cache.pos."""
        mask = self.cache.mask(sees)

        def attend(q, k, v):
            k, v = self.cache.append(0, slots, torch.stack([k, v]))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attend

    def absorb(self, target, new):
        """Takes in committed positions (verify.Committed) with the target's features, over whatever rows estimates have left
        there. The last position gives a at the anchor."""
        P = len(new.tokens) - 1
        slots = new.start + self.cache.index[:P]
        sees = causal(P, self.state.device, self.state.dtype)
        angles, g = self.table.index_select(1, slots), self.fuse([x[None] for x in new.h])
        a = self.advance(target, g, new.tokens[None, 1:], angles, self.cached(slots, sees))
        self.cache.pos += new.n
        self.state.copy_(a[0].index_select(0, new.n[None] - 1))

    def step(self, target, state, tokens, depth, sees):
        """One pass over m drafted nodes, `depth` below the anchor: the states (m, d) of their parents -> a (m, d). sees (m, R): which of
        the R rows drafted so far, its own included, a node may look at; rows are written behind cache.pos."""
        m, R = sees.shape
        slots = self.cache.pos + self.cache.index[R - m:R]
        angles = self.table.index_select(1, (self.cache.pos + depth - 1)[None])
        return self.advance(target, state[None], tokens[None], angles, self.cached(slots, sees))[0]

    def draft(self, target, anchor, law=None):
        """The tree for an anchor (1,): expand, then rerank. law: logits -> the distribution to draw from, or None. Candidates are
        numbered level by level, 0 is the anchor; value is log V."""
        k, m, device = self.width, self.beam, anchor.device
        some = self.drawn or k  # children of a node that may be expanded: where any are drawn, those
        f, sees, frontier, number = self.state, self.itself[:1, :0], anchor.new_zeros(1), 1
        value, tokens, parents, values, expanded, laws = self.state.new_zeros(1), [anchor], [frontier - 1], [], [], []
        for depth in range(1, self.args.depth + 2):
            children, log_c, q = siblings(self.read(target, f), k, law, self.drawn)             # (m, k), (m, k), (m, V)
            children_value = value[:, None] + log_c
            expanded.append(frontier)
            laws.append(q)
            tokens.append(children.flatten())
            values.append(children_value.flatten())
            parents.append(frontier.repeat_interleave(k))
            if depth <= self.args.depth:
                value, best = children_value[:, :some].flatten().topk(min(m, some * len(f)))      # the next to be expanded
                row = best // some                                                                # their parents in f
                best = row * k + best % some                                                      # among all children
                sees = torch.cat([sees.index_select(0, row), self.itself[:len(row), :len(row)]], 1)
                f = self.step(target, f.index_select(0, row), tokens[-1].index_select(0, best), depth, sees)
                frontier, number = number + best, number + children_value.numel()
        tokens, parents, values, expanded = (torch.cat(x) for x in (tokens, parents, values, expanded))
        drawn = torch.arange(k, device=device).lt(self.drawn).repeat(len(values) // k)    # the first children of every node
        if self.drawn:
            values = values.masked_fill(drawn, math.inf)                                  # what is drawn stays
        N = min(self.size if self.drawn else self.args.n_nodes, len(tokens))
        order = values.sort(descending=True, stable=True).indices[:N - 1] + 1             # of equals the first: a parent precedes
        kept = torch.cat([expanded[:1], order.sort().values])
        place = torch.zeros_like(tokens).scatter(0, kept, torch.arange(N, device=device)) # new numbers
        parent = torch.cat([parents[:1], place[parents[kept[1:]]]])
        drawn = F.pad(drawn, (1, 0))[kept]
        q = None
        if self.drawn:
            laws = torch.cat(laws)
            q = laws.new_zeros(N, laws.shape[1]).index_copy(0, place[expanded], laws)
        return Tree(tokens[kept], Topology(parent, self.args.depth + 1, drawn, self.drawn), q)


def train(args):
    target, data = get_target(args, args.text)
    torch.manual_seed(args.seed)
    drafter = Drafter(target.config, args).to(args.device)
    optimiser = Optimiser(drafter, args.lr, args.steps)
    run = drafter_run(args, target, data, drafter, optimiser, generate)
    for step in run:
        idx = run.batch(data, step)
        with run.autocast():
            loss = run.parallel(target, idx)
        loss.backward()
        optimiser.step(step)
        run.log(loss)


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=()):
    """Continues prompt (token ids) -> verify.Record; the output has exactly the target's law."""
    s = Session(target, prompt, max_new_tokens, temperature, top_k, top_p, stop, drafter.taps, drafter.nodes)
    drafter.reset(s)
    drafter.absorb(target, s.committed)

    def verify(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(target, s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.law if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    command(main)
