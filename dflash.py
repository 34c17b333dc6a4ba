"""DFlash: a whole block is drafted in one parallel pass, by a small model that reads the target's mind in every layer.

Paper: DFlash: Block Diffusion for Flash Speculative Decoding (Chen et al. 2026, arXiv 2602.06036).

One round, block size B = 5:

    target's features of every committed position          block: the anchor, then masks
      h[l1] .. h[lm]  ─► W_c ─► RMSNorm ─► H                  [fox] [m] [m] [m] [m]
                                           │                    │   │   │   │   │
          K, V of every draft layer  ◄─────┴── attend ◄─────  n layers, bidirectional in the block
                                                                    │   │   │   │
                                                  LM head (frozen)  q_1 q_2 q_3 q_4      one pass, 4 drafted tokens
    verify ─► accepted tokens + bonus ─► the bonus is the next anchor

Glossary
    H_t = RMSNorm(W_c [h^(l1); ...; h^(lm)]_t)     Drafter.context
    K = [W_k H ; W_k x], V likewise                Layer.inject, blockwise, Drafter.cached: KV injection into every layer
    anchor, slot k                                 slot k stands at position pos+k and gives the token there: no shift
    MASK                                           a learned vector here (the published models reserve a vocabulary entry)
    w_k = exp(-(k-1)/γ_w)                          the loss weight of slot k: an early rejection voids all that follows
    B, γ = B - 1                                   block_size, drafted tokens

    python dflash.py --train                       target (where missing) and drafter, then measurements
    python dflash.py --prompt "def "               continues a text, drafted and accepted tokens marked
    python dflash.py --bench --json                measurements only
    python dflash.py --bench --tree 24             a best-first tree over the same pass (DDTree, arXiv 2604.12989)

Read next: diff dflash.py dflash2.py. Left out: the published models' vocabulary entry for MASK, serving many requests at once.
"""
import heapq
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import rope_angles, rotate
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
from verify import Session, Topology, Tree, chain, sample


@dataclass
class Args(CommonArgs):
    steps: int = flag(700, "optimiser steps")
    batch_size: int = flag(8, "sequences per step")
    seq_len: int = flag(256, "tokens per sequence")
    text: str = flag("mixed", "to train on: corpus, greedy or sampled text of the target, or mixed, a third each (DFlash's paper: the target's)")
    lr: float = flag(0.02, "learning rate of Muon (DFlash's paper: AdamW, 6e-4)")
    block_size: int = flag(16, "B: anchor and masks, B - 1 drafted tokens (published: 16)", redraft=True)
    n_draft_layer: int = flag(3, "draft layers (published: 5, of targets with 36 and more)")
    n_taps: int = flag(5, "target layers whose features are fused (published: 5)")
    n_anchors: int = flag(32, "blocks per training sequence")
    hard: bool = flag(False, "train on the tokens themselves (as DFlash's paper does) rather than on the target's distribution")
    argmax: bool = flag(False, "at T > 0 draft the likeliest token of each slot, not a sample", trained=False)
    tree: int = flag(0, "draft a best-first tree of this many nodes; 0: a chain", trained=False, least=0)


def heads(x, n, n_head):
    """(b, T, n*d) -> n tensors in one, (n, b, n_head, T, d/n_head)."""
    b, T, _ = x.shape
    return x.view(b, T, n, n_head, -1).permute(2, 0, 3, 1, 4)


class Layer(nn.Module):
    """One draft layer: queries from the block only, keys and values from the context and the block."""

    def __init__(self, c):
        super().__init__()
        d = c.n_embd
        self.n_head = c.n_head
        self.ln_1 = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.qk_norm = nn.Parameter(torch.ones(2, 1, 1, 1, d // c.n_head))  # scales of the norms of queries and keys
        self.attn_proj = nn.Linear(d, d, bias=False)
        self.ln_2 = nn.LayerNorm(d, bias=False)
        self.fc = nn.Linear(d, 4 * d, bias=False)
        self.mlp_proj = nn.Linear(4 * d, d, bias=False)

    def inject(self, H, angles):
        """Keys and values of the context, H (b, T, d) -> (2, b, n_head, T, hd): no input norm, no query, no MLP."""
        d = H.shape[-1]
        k, v = heads(F.linear(H, self.qkv.weight[d:]), 2, self.n_head)
        return torch.stack([rotate(F.layer_norm(k, k.shape[-1:]) * self.qk_norm[1], angles), v])

    def forward(self, x, angles, attend):
        """x (b, T, d), whole blocks, and the angles of its positions; attend: a function from the blocks' own q, k, v, each
        (b, n_head, T, hd), to the attention's output."""
        b, T, d = x.shape
        qkv = heads(self.qkv(self.ln_1(x)), 3, self.n_head)
        y = attend(*rotate(F.layer_norm(qkv[:2], qkv.shape[-1:]) * self.qk_norm, angles), qkv[2])
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        return x + self.mlp_proj(F.relu(self.fc(self.ln_2(x))).square())


def blockwise(context, mask, B, q, k, v):
    """Attention of many blocks at once in training: q, k, v (b, n_head, A*B, hd), context (2, b, n_head, T, hd), mask
    (b, 1, A*B, T), additive. A slot sees the context that the mask leaves it, and all of its own block of B."""
    def blocks(x):
        return x.unflatten(2, (-1, B))

    q = q * q.shape[3] ** -0.5
    own = (blocks(q) @ blocks(k).mT).flatten(2, 3)                                           # (b, n_head, A*B, B)
    w, w_own = torch.cat([q @ context[0].mT + mask, own], -1).softmax(-1).split([mask.shape[-1], B], -1)
    return w @ context[1] + (blocks(w_own) @ blocks(v)).flatten(2, 3)


class Drafter(nn.Module):
    kind = "dflash"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        if not 2 <= args.block_size < args.seq_len:
            raise UserError(f"--block_size {args.block_size}: it has to be at least 2, and smaller than --seq_len {args.seq_len}")
        self.args, self.config, d, L = args, config, config.n_embd, config.n_layer
        n = min(args.n_taps, L)
        self.taps = [1 + round(i * (L - 1) / (n - 1)) for i in range(n)] if n > 1 else [L]  # distinct, first block to last
        self.nodes = max(args.tree, args.block_size)
        self.fuse = nn.Linear(n * d, d, bias=False)                   # W_c
        self.fuse_norm = nn.RMSNorm(d)
        self.mask = nn.Parameter(torch.randn(d) * 0.02)
        self.layers = nn.ModuleList([Layer(config) for _ in range(args.n_draft_layer)])
        self.norm = nn.LayerNorm(d, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * args.n_draft_layer) ** 0.5 if name.endswith("proj.weight") else 0.02)

    def context(self, h):
        """The fused features H (b, T, d) of taps h, each (b, T, d); shared by all layers."""
        return self.fuse_norm(self.fuse(torch.cat(h, -1)))

    def angles(self, positions):
        return rope_angles(positions, self.config.n_embd // self.config.n_head, self.mask.dtype)

    def block(self, target, anchors):
        """Block inputs [anchor, MASK, ...]: anchors (...,) -> (..., B, d)."""
        masks = self.mask.expand(*anchors.shape, self.args.block_size - 1, -1)
        return torch.cat([target.embed(anchors)[..., None, :].to(masks.dtype), masks], -2)

    def forward(self, target, idx):
        """The training loss. Random anchors in every sequence idx (b, T), all blocks in one pass: a block sees the context
        strictly before its anchor and itself, nothing of other blocks. Slot k of a block at anchor a predicts token a+k."""
        b, T = idx.shape
        B, A = self.args.block_size, min(self.args.n_anchors, T - self.args.block_size)
        with torch.no_grad():
            logits, h = target(idx, taps=self.taps)
        anchor = 1 + torch.rand(b, T - B, device=idx.device).argsort(1)[:, :A]               # (b, A), in 1 .. T-B
        slots = anchor[:, :, None] + torch.arange(B, device=idx.device)                      # (b, A, B): absolute positions
        unseen = torch.arange(T, device=idx.device) >= anchor.repeat_interleave(B, 1)[:, None, :, None]  # (b, 1, A*B, T)
        mask = torch.zeros(unseen.shape, device=idx.device).masked_fill(unseen, -math.inf)
        x = self.block(target, idx.gather(1, anchor)).flatten(1, 2)                          # (b, A*B, d)
        H = self.context(h)
        at, ctx_at = self.angles(slots.flatten(1)[:, None]), self.angles(torch.arange(T, device=idx.device))
        for layer in self.layers:
            x = layer(x, at, partial(blockwise, layer.inject(H, ctx_at), mask, B))
        x = self.norm(x).unflatten(1, (A, B))[:, :, 1:]                                      # slot 0 is the anchor itself
        log_q = target.head(x).float().log_softmax(-1)                                       # (b, A, B-1, V)
        if self.args.hard:
            p = F.one_hot(idx[:, None].expand(-1, A, -1).gather(2, slots[:, :, 1:]), log_q.shape[-1])
        else:                                                                                # p after position a+k-1
            p = logits.float().softmax(-1)[torch.arange(b, device=idx.device)[:, None, None], slots[:, :, :-1]]
        loss = -(p * log_q).sum(-1)
        gamma_w = {16: 7.0, 10: 5.0, 8: 4.0}.get(B, B / 2)                                   # the paper's values
        w = torch.exp(-torch.arange(B - 1, device=idx.device) / gamma_w)
        return (loss * w).sum() / (w.sum() * b * A)

    def reset(self, session):
        """An empty context cache for a new text."""
        c, device = self.config, session.device
        self.cache = session.new_cache(len(self.layers), c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        self.chain = chain(self.args.block_size - 1, device)
        self.open = torch.zeros(1, self.args.block_size, device=device, dtype=self.cache.kv.dtype)  # a block sees all of itself

    def absorb(self, new):
        """Takes in committed positions (verify.Committed): their fused features become keys and values of every layer."""
        H = self.context([x[None] for x in new.h])
        slots = new.start + self.cache.index[:H.shape[1]]
        angles = self.table.index_select(1, slots)
        for l, layer in enumerate(self.layers):
            self.cache.append(l, slots, layer.inject(H, angles))
        self.cache.pos.copy_(new.start + new.n)

    def cached(self, l, slots, mask, q, k, v):
        """Attention of a block that is written to the cache of layer l at slots (B,), under an additive mask (1, slots)."""
        k, v = self.cache.append(l, slots, torch.stack([k, v]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def draft(self, target, anchor, law=None):
        """One pass over [anchor, MASK, ...]. anchor (1,); law: logits -> the distribution to sample, None for the likeliest
        tokens. The block's own keys and values lie beyond cache.pos and are overwritten by the next context."""
        slots = self.cache.pos + self.cache.index[:self.args.block_size]
        angles, mask = self.table.index_select(1, slots), self.cache.mask(self.open)
        x = self.block(target, anchor)
        for l, layer in enumerate(self.layers):
            x = layer(x, angles, partial(self.cached, l, slots, mask))
        logits = target.head(self.norm(x[0, 1:]))                                            # (B-1, V)
        if self.args.tree:
            return self.best_first(anchor, logits)
        if law is None or self.args.argmax:
            return Tree(torch.cat([anchor, logits.argmax(-1)]), self.chain)
        q = law(logits)
        return Tree(torch.cat([anchor, sample(q)]), self.chain, F.pad(q, (0, 0, 0, 1)))

    def best_first(self, anchor, logits):
        """DDTree (2604.12989): the N - 1 likeliest prefixes under the product of the slots' marginals, with a heap: pop the
        best node, push its next-ranked sibling and its own first child. Deterministic, so verified with the one-hot rule."""
        N, K = self.args.tree, min(self.args.tree, logits.shape[-1])
        top = logits.float().log_softmax(-1).topk(K)
        score, token = top.values.tolist(), top.indices.tolist()
        tokens, parent = [], [-1]
        heap = [(-score[0][0], 0, 0, 0)]                                                      # (-Σ log q, slot, rank, parent)
        while len(tokens) < N - 1 and heap:
            cost, slot, rank, above = heapq.heappop(heap)
            tokens.append(token[slot][rank])
            parent.append(above)
            if rank + 1 < K:
                heapq.heappush(heap, (cost + score[slot][rank] - score[slot][rank + 1], slot, rank + 1, above))
            if slot + 1 < len(score):
                heapq.heappush(heap, (cost - score[slot + 1][0], slot + 1, 0, len(tokens)))
        device = anchor.device
        return Tree(torch.cat([anchor, torch.tensor(tokens, dtype=torch.long, device=device)]),
                    Topology(torch.tensor(parent, device=device), len(score)))


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
    s.capture &= not drafter.args.tree  # its heap lives on the host
    drafter.absorb(s.committed)

    def verify(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.law if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    command(main)
