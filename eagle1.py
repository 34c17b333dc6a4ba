"""EAGLE-1: draft the target's next feature instead of its next token, and read the token off with its LM head.

Paper: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (Li et al. 2024, arxiv.org/abs/2401.15077)
Code:  github.com/SafeAILab/EAGLE

One round. Features are smooth enough for one layer to extrapolate, but the next feature depends on which token was
sampled: so the layer sees the feature f_j and the token t_{j+1} that followed it.

    committed slots (f_j, t_{j+1})  ─► FC ─► layer ─► f̂ ─► LM head (frozen) ─► q ─► children of the anchor
                                          ▲                                          │
                                          └──── (f̂ of the parent, child) ◄───────────┘   level by level
                 anchor
             ┌─────┴┬──────┐
             0      1      2        level 1
            ┌┴┐     │
            0 1     0               level 2     ... 2, 1 and 1 below: 10 nodes, the same for every context
    verify ─► accepted path + bonus; the accepted slots are rewritten with the target's features

Glossary
    f_j = h[L] at position j                the feature, the direct input of the LM head
    f̂_{j+1} = layer(FC([E(t_{j+1}); f_j]))  Drafter.advance (section 3.1); slot j holds (f_j, t_{j+1}); here "state"
    SmoothL1(f̂, f) + 0.1 CE(p, q)           Drafter.forward (w_cls = 0.1); noise U(-0.1, 0.1) on the input features
    p, q                                    target and draft distribution

Run it with --prompt TEXT, --train or --bench (--help has the rest).
At T > 0 the first child of a node is drawn from q, and the others are the likeliest of the rest.
Read next: the diff to the next EAGLE. Left out: serving many requests at once.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import causal, init_weights, rope_angles, rotate
from train import CommonArgs, Optimizer, Run, arg, get_target, launch, number
from verify import Session, Topology, Tree, siblings

# The tree, level by level: for every node the place of its parent in the level above. Siblings are ordered.
# Departure: published are 0000 00011223 00011223 000 00, 25 nodes: a pass over so many takes twice as long here.
TREE = ((0, 0, 0), (0, 0, 1), (0, 0), (0,), (0,))


@dataclass
class Args(CommonArgs):
    steps: int = arg(2500, "optimizer steps")
    batch_size: int = arg(4, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence", number(int, 64))
    # Departure: published AdamW, 3e-5.
    lr: float = arg(0.02, "learning rate of Muon", number(float, 1e-9))
    noise: float = arg(0.1, "uniform noise on the features", number(float, 0))
    w_cls: float = arg(0.1, "weight of the cross-entropy", number(float, 0))
    # Departure: EAGLE-1 draws all children, EAGLE-2 none.
    drawn: int = arg(1, "drawn children of a node at T > 0", number(int, 0, 3))


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
        """x (b, T, d); angles of its positions; attend: q, k, v, each (b, n_head, T, hd) -> attention's output."""
        b, T, d = x.shape
        qkv = self.qkv(x).view(b, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = attend(*rotate(qkv[:2], angles), qkv[2])
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        return x + self.mlp_proj(F.relu(self.fc(self.ln_2(x))).square())


class Drafter(nn.Module):
    name = "eagle1"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d = args, config, config.n_embd
        self.taps = [config.n_layer]  # f = h[L]
        self.width = max(rows.count(parent) for rows in TREE for parent in rows)
        self.beam, self.nodes = 1 + max(map(max, TREE)), 1 + sum(map(len, TREE))
        self.fc = nn.Linear(2 * d, d)
        self.layer = Layer(config)
        init_weights(self, 1)

    def angles(self, positions):
        c = self.config
        return rope_angles(positions, c.n_embd // c.n_head, self.fc.weight.dtype)

    def advance(self, target, state, tokens, angles, attend):
        """One pass: features (b, T, d), the tokens (b, T) that followed them, the angles of their positions -> f̂
        (b, T, d), one position further."""
        x = self.fc(torch.cat([target.wte(tokens), state], -1))
        return self.layer(x, angles, attend)

    def read(self, target, state):
        """Draft logits of states (..., d)."""
        return target.head(state)

    def forward(self, target, idx):
        """The training loss on sequences idx (b, T): slot j sees (f_j, t_{j+1}), should say f_{j+1}: p of t_{j+2}."""
        with torch.no_grad():
            logits, (f,) = target(idx, taps=self.taps)
        noisy = f[:, :-1] + (torch.rand_like(f[:, :-1]) * 2 - 1) * self.args.noise
        tokens = idx[:, 1:]
        angles = self.angles(torch.arange(tokens.shape[1], device=idx.device))
        attend = partial(F.scaled_dot_product_attention, is_causal=True)
        f_hat = self.advance(target, noisy, tokens, angles, attend)
        p = logits[:, 1:].float().softmax(-1)
        log_q = self.read(target, f_hat).float().log_softmax(-1)
        loss_cls = -(p * log_q).sum(-1).mean()
        loss_reg = F.smooth_l1_loss(f_hat.float(), f[:, 1:].float())
        return loss_reg + self.args.w_cls * loss_cls

    def reset(self, session):
        """Buffers for a new text."""
        c, m = self.config, self.beam
        self.cache = session.new_cache(1, c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        like = {"device": session.device, "dtype": self.cache.kv.dtype}
        self.state = torch.zeros(1, c.n_embd, **like)  # at the anchor
        self.self_mask = torch.full((m, m), -math.inf, **like).fill_diagonal_(0)
        self.drawn = self.args.drawn if session.temperature else 0
        self.levels, parent, first = [], [-1], 0
        for rows in TREE:
            rank = [rows[:i].count(row) for i, row in enumerate(rows)]  # among siblings
            self.levels.append(torch.tensor([rows, rank], device=session.device))
            parent += [first + row for row in rows]
            first = len(parent) - len(rows)
        drawn = F.pad(torch.cat(self.levels, 1)[1] < self.drawn, (1, 0))
        self.expanded = torch.tensor(sorted(set(parent[1:])), device=session.device)
        parent = torch.tensor(parent, device=session.device)
        self.shape = Topology(parent, len(TREE), drawn, self.drawn)

    def cached(self, slots, visible):
        """Attention of rows written to the cache at slots (T,); visible (T, R): of the R rows behind cache.pos."""
        mask = self.cache.mask(visible)

        def attend(q, k, v):
            k, v = self.cache.append(0, slots, torch.stack([k, v]))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attend

    def absorb(self, target, new):
        """Takes in committed positions (verify.Committed) with the target's features, over what drafting left
        there. The last position gives the state at the anchor."""
        P = len(new.tokens) - 1
        slots = new.start + self.cache.index[:P]
        attend = self.cached(slots, causal(P, self.state.device, self.state.dtype))
        angles, features = self.table.index_select(1, slots), new.h[0][None]
        state = self.advance(target, features, new.tokens[None, 1:], angles, attend)
        self.cache.pos += new.n
        self.state.copy_(state[0].index_select(0, new.n[None] - 1))

    def step(self, target, state, tokens, depth, visible):
        """One pass over m drafted nodes, `depth` below the anchor: their parents' states (m, d) -> theirs (m, d).
        visible (m, R): which of the R rows drafted so far, its own included, a node may see, behind cache.pos."""
        m, R = visible.shape
        slots = self.cache.pos + self.cache.index[R - m:R]
        angles = self.table.index_select(1, (self.cache.pos + depth - 1)[None])
        attend = self.cached(slots, visible)
        return self.advance(target, state[None], tokens[None], angles, attend)[0]

    def draft(self, target, anchor, probs=None):
        """The tree for an anchor (1,). probs: logits -> the distribution to draw from, or None."""
        state, visible = self.state, self.self_mask[:1, :0]
        tokens, laws = [anchor], []
        for depth, (row, rank) in enumerate(self.levels, 1):
            logits = self.read(target, state)
            children, q = siblings(logits, self.width, self.drawn, probs)
            tokens.append(children[row, rank])
            laws.append(logits if q is None else q)
            if depth < len(TREE):
                m = max(TREE[depth]) + 1  # the first m nodes of this level have children
                row = row[:m]             # their parents in state
                visible = torch.cat([visible[row], self.self_mask[:m, :m]], 1)
                state = self.step(target, state[row], tokens[-1][:m], depth, visible)
        q, tokens = torch.cat(laws), torch.cat(tokens)
        q = q.new_zeros(len(tokens), q.shape[1]).index_copy(0, self.expanded, q)
        return Tree(tokens, self.shape, q if self.drawn else None)


def train(args):
    target, data = get_target(args)
    torch.manual_seed(args.seed)
    drafter = Drafter(target.config, args).to(args.device)
    optimizer = Optimizer(drafter, args.lr, args.steps)
    run = Run(args, drafter, optimizer, {"target": target.fingerprint})
    for step in run:
        idx = run.batch(data, step)
        with run.autocast():
            loss = run.parallel(target, idx)
        loss.backward()
        optimizer.step(step)
        run.losses.append(loss.detach())


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

    return s.run(lambda: drafter.draft(target, s.anchor, s.probs if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    main()
