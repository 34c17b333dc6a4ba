"""EAGLE-1: draft the target's next feature instead of its next token, and read the token off with the target's own LM head.

Paper: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (Li et al. 2024, arXiv 2401.15077).

One round. Features are smooth enough for one layer to extrapolate, but the next feature depends on which token was sampled:
so the layer sees the feature f_j and the token t_{j+1} that followed it.

    committed slots (f_j, t_{j+1})  ─► FC ─► layer ─► f̂ ─► LM head (frozen) ─► q ─► 4 children of the anchor
                                          ▲                                          │
                                          └──── (f̂ of the parent, child) ◄───────────┘   4 times: 5 levels
                 anchor
         ┌───────┬──┴────┬───────┐
         0       1       2       3         level 1
       ┌─┼─┐    ┌┴┐     ┌┴┐      │
       0 1 2    0 1     0 1      0         level 2     ... 8, 3 and 2 below: 25 nodes, the same for every context
    verify ─► accepted path + bonus; the accepted slots are rewritten with the target's features

Glossary
    f_j = h[L] at position j               the feature, the direct input of the LM head
    f̂_{j+1} = layer(FC([E(t_{j+1}); f_j])) Drafter.advance; slot j holds (f_j, t_{j+1})
    L = SmoothL1(f̂, f) + 0.1 CE(p, p̂)      Drafter.forward (w_cls = 0.1); noise U(-0.1, 0.1) on the input features
    p, q                                   target and draft distribution

    python eagle1.py --train               target (where missing) and drafter, then measurements
    python eagle1.py --prompt "def "       continues a text, drafted and accepted tokens marked
    python eagle1.py --bench --json        measurements only
    python eagle1.py --train --no_token    the paper's ablation: a drafter that does not see the sampled token

At T > 0 the first child of a node is drawn from q and the others are the likeliest of the rest (--drawn). The shape of the tree
is the same whatever is drawn, so that the output keeps the target's law.

Read next: diff eagle1.py eagle2.py. Left out: serving many requests at once.
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

# The children of every expanded node by level, best parent first (the published tree of 25 nodes: levels 4/8/8/3/2). The
# parents of a level are the first nodes of the level above.
TREE = ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,))


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
    drawn: int = flag(1, "at T > 0 draw this many of a node's children from q, the first ones, and choose the likeliest of the rest; "
                         "0: a deterministic tree, 4 or more: all drawn (published)", trained=False, least=0)


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
    are the likeliest of the rest. Returns tokens (m, k), and q (m, V) or None."""
    if drawn == 0:
        return logits.topk(k).indices, None
    q = left = law(logits)
    first = []
    for _ in range(min(drawn, k)):
        if first:  # where nothing is left, any token will do
            left = norm(left.scatter(1, first[-1], 0), torch.ones_like(left))
        first.append(sample(left)[:, None])
    first = torch.cat(first, 1)
    rest = logits.scatter(1, first, float("-inf")).topk(k - first.shape[1]).indices
    return torch.cat([first, rest], 1), q


class Drafter(nn.Module):
    kind = "eagle1"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d = args, config, config.n_embd
        self.taps = [config.n_layer]                                          # f = h[L]
        self.nodes = 1 + sum(map(sum, TREE))
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
        """Buffers for a new text, and the shape of the tree, which never changes."""
        c, device = self.config, session.device
        self.cache = session.new_cache(1, c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        self.state = torch.zeros(1, c.n_embd, device=device, dtype=self.cache.kv.dtype)  # f̂ at the anchor
        widest = max(map(len, TREE))
        self.itself = torch.full((widest, widest), -math.inf, device=device, dtype=self.cache.kv.dtype).fill_diagonal_(0)
        self.drawn = self.args.drawn if session.temperature else 0
        parent, rank, above, self.pick, expanded = [-1], [math.inf], [0], [], []
        for counts in TREE:
            expanded += above[:len(counts)]
            self.pick.append(torch.tensor([i * max(counts) + r for i, n in enumerate(counts) for r in range(n)], device=device))
            parent += [node for node, n in zip(above, counts) for _ in range(n)]
            rank += [r for n in counts for r in range(n)]
            above = range(len(parent) - sum(counts), len(parent))
        drawn = torch.tensor(rank, device=device) < self.drawn
        self.shape = Topology(torch.tensor(parent, device=device), len(TREE), drawn, min(self.drawn, max(map(max, TREE))))
        self.expanded = torch.tensor(expanded, device=device)

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
        """The tree for an anchor (1,), level by level. law: logits -> the distribution to draw from, or None."""
        f, sees, tokens, laws = self.state, self.itself[:1, :0], [anchor], []
        for depth, counts in enumerate(TREE, 1):
            level, q = siblings(self.read(target, f), max(counts), law, self.drawn)
            laws.append(q)
            tokens.append(level.flatten().index_select(0, self.pick[depth - 1]))
            if depth < len(TREE):
                m = len(TREE[depth])                                    # the first m nodes of this level have children
                parent = self.pick[depth - 1][:m] // max(counts)        # row of their parents in f
                sees = torch.cat([sees.index_select(0, parent), self.itself[:m, :m]], 1)
                f = self.step(target, f.index_select(0, parent), tokens[-1][:m], depth, sees)
        if not self.drawn:
            return Tree(torch.cat(tokens), self.shape)
        laws = torch.cat(laws)
        return Tree(torch.cat(tokens), self.shape, laws.new_zeros(self.nodes, laws.shape[1]).index_copy(0, self.expanded, laws))


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
