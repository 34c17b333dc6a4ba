"""EAGLE-2: the same drafter as EAGLE-1 on a tree that follows the context: sure drafts go deep, doubtful ones go wide.

Paper: EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (Li et al. 2024, arXiv 2406.16858).

One round. The drafter's confidence c is close to the probability of being accepted, so the value of a node, the product of
the confidences on its path, estimates the chance that the whole path is accepted. Nothing is trained anew.

    committed slots (f_j, t_{j+1})  ─► FC ─► layer ─► f̂ ─► LM head (frozen) ─► k children of the anchor, V = c
                                          ▲                                          │
    expand                                └──── the m nodes of the level with the best V ◄─┘   `depth` times, k children each:
                                                                                         V(child) = V(parent) c(child)
    rerank       the N - 1 best V of all levels, and the anchor: always connected, because V falls along a path
    verify ─► accepted path + bonus; the accepted slots are rewritten with the target's features

Glossary
    f_j = h[L] at position j               the feature, the direct input of the LM head
    f̂_{j+1} = layer(FC([E(t_{j+1}); f_j])) Drafter.advance; slot j holds (f_j, t_{j+1})
    c, V = Π c                             siblings' log_c, and value, their sum along the path (section 4.1)
    k, m, depth, N                         width, beam, depth, n_nodes
    p, q                                   target and draft distribution

    python eagle2.py --train               trains what eagle1.py --train trains: the two share checkpoints
    python eagle2.py --prompt "def "       continues a text, drafted and accepted tokens marked
    python eagle2.py --bench --json        measurements only

At T > 0 a deterministic tree wastes its draft where the target is uncertain. Here the first child of an expanded node is drawn
from q, the tree goes on behind drawn children only, and the best of the others are its leaves. A drawn child is never pruned:
which of them survive would depend on what was drawn, and the output would no longer have the target's law.

Read next: diff eagle2.py eagle3.py. Left out: serving many requests at once.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import causal, rope_angles, rotate
from train import CommonArgs, Optimiser, command, drafter_run, flag, get_target, launch
from verify import Session, Topology, Tree, norm, sample

ALPHA = 0.8   # share of drawn children that are accepted, roughly
GREEDY = 2.5  # at T = 0 the likeliest child is accepted more often than its probability says: confidences are sharpened


@dataclass
class Args(CommonArgs):
    steps: int = flag(1800, "optimiser steps")
    batch_size: int = flag(4, "sequences per step")
    seq_len: int = flag(256, "tokens per sequence")
    text: str = flag("mixed", "to train on: corpus, greedy or sampled text of the target, or mixed, a third each (published: a fixed corpus)")
    lr: float = flag(0.02, "learning rate of Muon (published: AdamW, 3e-5)")
    noise: float = flag(0.1, "uniform noise on the input features (published: 0.1)")
    w_cls: float = flag(0.1, "weight of the cross-entropy beside the feature loss (published: 0.1)")
    no_token: bool = flag(False, "ablation: features alone, without the token that followed")
    width: int = flag(4, "k: children of an expanded node (published: 10)", trained=False)
    beam: int = flag(2, "m: nodes expanded per level, at most k (published: k); at T > 0 of the drawn ones", trained=False)
    depth: int = flag(5, "levels expanded below the first (published: 5 to 7)", trained=False)
    n_nodes: int = flag(10, "N: nodes of the tree after reranking, the anchor included (published: 60); at T > 0 at least what was "
                           "drawn", trained=False)
    drawn: int = flag(1, "at T > 0 draw this many of a node's children from q, the first ones, and choose the likeliest of the rest; "
                         "0: a deterministic tree (published), --width or more: all drawn", trained=False, least=0)


class Layer(nn.Module):
    """A decoder layer without its input norm: the FC in front has mixed the scales already."""

    def __init__(self, c):
        super().__init__()
        d = c.n_embd
        self.n_head = c.n_head
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attn_proj = nn.Linear(d, d, bias=False)
        self.ln_2 = nn.LayerNorm(d, bias=False)
        self.fc = nn.Linear(d, 4 * d, bias=False)
        self.mlp_proj = nn.Linear(4 * d, d, bias=False)

    def forward(self, x, angles, attend):
        """x (b, T, d) and the angles of its positions; attend: a function from q, k, v, each (b, n_head, T, hd), to the
        attention's output."""
        b, T, d = x.shape
        qkv = self.qkv(x).view(b, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
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


class Drafter(nn.Module):
    kind = "eagle1"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d = args, config, config.n_embd
        self.taps = [config.n_layer]                                          # f = h[L]
        self.width = min(args.width, config.vocab_size)
        self.beam = min(args.beam, self.width)
        drawn = min(args.drawn, self.width)
        self.size = max(args.n_nodes, 1 + drawn * (1 + args.depth * (1 if drawn == 1 else self.beam)))  # of a tree at T > 0
        self.nodes = max(self.size, 2 + args.depth * self.beam)                                         # or rows while expanding
        self.fc = nn.Linear(2 * d, d)
        self.layer = Layer(config)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / 2 ** 0.5 if name.endswith("proj.weight") else 0.02)

    def angles(self, positions):
        return rope_angles(positions, self.config.n_embd // self.config.n_head, self.fc.weight.dtype)

    def advance(self, target, f, tokens, angles, attend):
        """One pass: features f (b, T, d), the tokens (b, T) that followed them, and the angles of their positions -> f̂ (b, T, d), one
        position further."""
        e = target.embed(tokens)
        if self.args.no_token:
            e = torch.zeros_like(e)
        return self.layer(self.fc(torch.cat([e, f], -1)), angles, attend)

    def read(self, target, f_hat):
        """Draft logits of states (..., d)."""
        return target.head(f_hat)

    def forward(self, target, idx):
        """The training loss on sequences idx (b, T): slot j sees (f_j, t_{j+1}) and should say f_{j+1}, hence p_{j+2}."""
        with torch.no_grad():
            logits, (f,) = target(idx, taps=self.taps)
        noisy = f[:, :-1] + (torch.rand_like(f[:, :-1]) * 2 - 1) * self.args.noise
        tokens = idx[:, 1:]
        angles = self.angles(torch.arange(tokens.shape[1], device=idx.device))
        f_hat = self.advance(target, noisy, tokens, angles, partial(F.scaled_dot_product_attention, is_causal=True))
        p = logits[:, 1:].float().softmax(-1)
        loss_cls = -(p * self.read(target, f_hat).float().log_softmax(-1)).sum(-1).mean()
        return F.smooth_l1_loss(f_hat.float(), f[:, 1:].float()) + self.args.w_cls * loss_cls

    def reset(self, session):
        """Buffers for a new text."""
        c, device = self.config, session.device
        self.cache = session.new_cache(1, c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        self.state = torch.zeros(1, c.n_embd, device=device, dtype=self.cache.kv.dtype)  # f̂ at the anchor
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
        there. The last position gives f̂ at the anchor."""
        P = len(new.tokens) - 1
        slots = new.start + self.cache.index[:P]
        sees = causal(P, self.state.device, self.state.dtype)
        f_hat = self.advance(target, new.h[0][None], new.tokens[None, 1:], self.table.index_select(1, slots), self.cached(slots, sees))
        self.cache.pos += new.n
        self.state.copy_(f_hat[0].index_select(0, new.n[None] - 1))

    def step(self, target, state, tokens, depth, sees):
        """One pass over m drafted nodes, `depth` below the anchor: the states (m, d) of their parents -> f̂ (m, d). sees (m, R): which of
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
