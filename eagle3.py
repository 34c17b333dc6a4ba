"""EAGLE-3: stop imitating the feature; train the draft as it is used, and let it read low, middle and high features.

Paper: EAGLE-3: Scaling up ... via Training-Time Test (Li et al. 2025, arxiv.org/abs/2503.01840)
Code:  github.com/SafeAILab/EAGLE

One round. What the layer hands on, a, is free: only LMHead(norm(a)) has to match the target. So it has to be trained
on its own outputs, step after step, exactly as drafting feeds them back: the training-time test.

    committed slots (FC([l; m; h])_j, t_{j+1}) ─► layer ─► a ─► norm ─► LM head (frozen) ─► q ─► children of the anchor
                                          ▲                                          │
                                          └──── (a of the parent, child) ◄───────────┘   level by level
    expand       `depth` times: the m nodes of the level with the best V get k children, V(child) = V(parent) c(child)
    rerank       the N best V of all levels: always connected, because V falls along a path
    verify ─► accepted path + bonus; the accepted slots are rewritten with the target's features

Glossary
    l, m, h = h[2], h[L//2], h[L-3]         Drafter.taps: low, middle and high features
    g = FC([l; m; h])                       Drafter.fuse (section 3.1): the state of verified positions
    a                                       Drafter.advance: the state of drafted ones, before the final norm
    L = Σ_i 0.8^i CE(p, q_i)                Drafter.forward: over the steps of the training-time test; no feature loss
    c, V = Π c; k, m, N                     confidence, value (section 4.1), as logarithms; width, beam, n_nodes
    p, q                                    target and draft distribution

Run it with --prompt TEXT, --train or --bench (--help has the rest).
At T > 0 the first child of a node is drawn from q, and the others are the likeliest of the rest.
The tree goes on behind drawn children only, and what is drawn is never pruned (the premise in verify.py).
Read next: dflash.py. Left out: the LM head of its own over a reduced vocabulary, which the official code trains.
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
from verify import Session, Topology, Tree, acceptance, siblings


@dataclass
class Args(CommonArgs):
    steps: int = arg(1200, "optimizer steps")
    batch_size: int = arg(4, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence", number(int, 64))
    # Departure: published AdamW, 5e-5.
    lr: float = arg(0.02, "learning rate of Muon", number(float, 1e-9))
    # Departure: published 7.
    ttt: int = arg(5, "steps of the training-time test", number(int, 1, 16))
    # Departure: published k = m = 10, N = 60, depth 5 to 7, for targets of 7 B parameters.
    width: int = arg(4, "k: children of an expanded node")
    beam: int = arg(2, "m: nodes expanded per level, at most k")
    depth: int = arg(7, "levels expanded below the first")
    n_nodes: int = arg(10, "N: rows, the anchor included; at least the drawn", number(int, 2))
    # Departure: EAGLE-1 draws all children, EAGLE-2 none.
    drawn: int = arg(1, "drawn children of a node at T > 0", number(int, 0, 1))


class Layer(nn.Module):
    """A decoder layer that reads [norm(E(t)); norm(state)]; the residual stream is the state itself."""

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

    def forward(self, x, e, angles, attend):
        """States x and embedded tokens e (b, T, d); angles, attend: q, k, v, each (b, n_head, T, hd) -> its output."""
        b, T, d = x.shape
        y = torch.cat([self.token_norm(e), self.state_norm(x)], -1)
        qkv = self.qkv(y).view(b, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = attend(*rotate(qkv[:2], angles), qkv[2])
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        return x + self.mlp_proj(F.relu(self.fc(self.ln_2(x))).square())


def unrolled(keys, values, q, k, v):
    """Attention of one step of the training-time test: q, k, v (b, n_head, n, hd). Slot t sees rows 0..t of the first
    step, as a drafted node sees the committed prefix, and of every later step its own slot alone, as it sees its
    ancestors. Appends k and v to keys and values, which hold the steps so far."""
    keys.append(k)
    values.append(v)
    n = q.shape[2]
    prefix = causal(n, q.device, q.dtype)
    own = torch.full_like(prefix, -math.inf).fill_diagonal_(0)
    mask = torch.cat([prefix] + [own] * (len(keys) - 1), 1)
    k, v = (torch.cat([step[:, :, :n] for step in steps], 2) for steps in (keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Drafter(nn.Module):
    name = "eagle3"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d, L = args, config, config.n_embd, config.n_layer
        small = [max(1, L // 3), max(1, L // 2), L]
        self.taps = [2, L // 2, L - 3] if L >= 7 else small  # official
        self.width = min(args.width, config.vocab_size)
        self.beam = min(args.beam, self.width)
        self.nodes = max(args.n_nodes, args.depth + 2, args.depth * self.beam)
        self.fc = nn.Linear(3 * d, d, bias=False)
        self.layer = Layer(config)
        self.norm = nn.LayerNorm(d, bias=False)
        init_weights(self, 1)

    def angles(self, positions):
        c = self.config
        return rope_angles(positions, c.n_embd // c.n_head, self.fc.weight.dtype)

    def fuse(self, h):
        """g (b, T, d) of the three taps, each (b, T, d)."""
        return self.fc(torch.cat(h, -1))

    def advance(self, target, state, tokens, angles, attend):
        """One pass: states g or a (b, T, d), the tokens (b, T) that followed them, the angles of their positions -> a
        (b, T, d), one position further."""
        return self.layer(state, target.wte(tokens), angles, attend)

    def read(self, target, state):
        """Draft logits of states (..., d)."""
        return target.head(self.norm(state))

    def forward(self, target, idx):
        """The training loss on sequences idx (b, T): the training-time test. Step i = 0, 1, ... continues every prefix
        at once: slot t holds what drafting computes in its pass i when positions 0..t are committed. Its state is the
        output of step i-1 at the same slot, its token the true one, t+1+i, its position t+i; it says token t+2+i.
        Drafting makes up to three passes more than the default ttt, which it is not trained for. 0.8: official code."""
        with torch.no_grad():
            logits, h = target(idx, taps=self.taps)
            p = logits.float().softmax(-1)
        state, keys, values, loss = self.fuse(h), [], [], 0.0
        for i in range(self.args.ttt):
            n = idx.shape[1] - 1 - i
            angles = self.angles(torch.arange(i, i + n, device=idx.device))
            attend = partial(unrolled, keys, values)
            state = self.advance(target, state[:, :n], idx[:, 1 + i:], angles, attend)
            log_q = self.read(target, state).float().log_softmax(-1)
            loss = loss - 0.8 ** i * (p[:, 1 + i:] * log_q).sum(-1).mean()
        return loss / sum(0.8 ** i for i in range(self.args.ttt))

    def reset(self, session):
        """Buffers for a new text."""
        c, m = self.config, self.beam
        self.cache = session.new_cache(1, c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        like = {"device": session.device, "dtype": self.cache.kv.dtype}
        self.state = torch.zeros(1, c.n_embd, **like)  # at the anchor
        self.self_mask = torch.full((m, m), -math.inf, **like).fill_diagonal_(0)
        self.drawn = self.args.drawn if session.temperature else 0
        self.session, self.first = session, self.cache.index[:self.drawn]

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
        angles, features = self.table.index_select(1, slots), self.fuse([x[None] for x in new.h])
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
        return self.rerank(*self.expand(target, anchor, probs))

    def expand(self, target, anchor, probs):
        """Candidates, numbered level by level from the anchor, 0: tokens, parent, log V (n,), infinite where a node
        has to be kept; the nodes that were expanded (e,) and their q (e, V)."""
        n_expandable = 1 if self.drawn else self.width
        state, visible = self.state, self.self_mask[:1, :0]
        node, v, first = torch.zeros_like(anchor), state.new_zeros(1), 1
        levels, expanded = [(anchor, node, v + math.inf)], []
        for depth in range(1, self.args.depth + 2):
            logits = self.read(target, state)
            children, q = siblings(logits, self.width, self.drawn, probs)
            expanded.append((node, logits if q is None else q))
            values = v[:, None] + self.confidence(logits, q, children)
            parent = node.repeat_interleave(self.width)
            levels.append((children.flatten(), parent, values.index_fill(1, self.first, math.inf).flatten()))
            values = values[:, :n_expandable].flatten()
            m = min(self.beam, self.session.worth(values.exp() / 2))  # Departure: published m. A level costs two rows.
            if depth > self.args.depth or not m:
                break
            v, best = values.topk(m)
            row = best // n_expandable  # parents in state
            child = row * self.width + best % n_expandable  # place in this level
            node, first = first + child, first + children.numel()
            visible = torch.cat([visible[row], self.self_mask[:m, :m]], 1)
            state = self.step(target, state[row], levels[-1][0][child], depth, visible)
        return [torch.cat(x) for x in (*zip(*levels), *zip(*expanded))]

    def confidence(self, logits, q, children):
        """log c of the children (m, k): how often each is accepted; a chosen one, if the drawn one was not."""
        if not self.drawn:
            return logits.float().log_softmax(-1).gather(1, children)
        c = acceptance(q)[:, None]
        return torch.cat([c, (1 - c) * q.gather(1, children[:, 1:])], 1).log()

    def rerank(self, tokens, parent, v, expanded, q):
        """The tree of the N candidates with the best V; of equal ones the first, so that a parent precedes."""
        N = max(self.args.n_nodes, self.drawn * (self.args.depth + 2))
        keep = v.sort(descending=True, stable=True).indices[:N].sort().values
        new_id = torch.zeros_like(parent).scatter(0, keep, self.cache.index[:len(keep)])
        parent = new_id[parent[keep]].masked_fill(keep == 0, -1)
        drawn = (v[keep] == math.inf) & (keep > 0)
        topology = Topology(parent, self.args.depth + 1, drawn, self.drawn)
        q = q.new_zeros(len(keep), q.shape[1]).index_copy(0, new_id[expanded], q)
        return Tree(tokens[keep], topology, q if self.drawn else None)


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
