"""DFlash: a whole block is drafted in one pass, by a small model whose every layer reads the target's features.

Paper: DFlash: Block Diffusion for Flash Speculative Decoding (Chen et al. 2026, arxiv.org/abs/2602.06036)
Code:  github.com/z-lab/dflash

One round, block size B = 5:

    target's features of every committed position          block: the anchor, then masks
      h[l1] .. h[lm]  ─► W_c ─► RMSNorm ─► H                  [fox] [m] [m] [m] [m]
                                           │                    │   │   │   │   │
          K, V of every draft layer  ◄─────┴── attend ◄─────  n layers, bidirectional in the block
                                                                    │   │   │   │
                                                  LM head (frozen)  U_1 U_2 U_3 U_4      logits of 4 tokens in one pass
    verify ─► accepted tokens + bonus ─► the bonus is the next anchor

Glossary
    H_t = RMSNorm(W_c [h^(l1); ...; h^(lm)]_t)     Drafter.context
    K = [W_k H ; W_k x], V likewise                Layer.inject, blockwise, Drafter.cached: injected into every layer
    anchor, slot k                                 at position pos+k: a mask says the token there, not the next

Run it with --prompt TEXT, --train or --bench (--help has the rest). Left out: serving many requests at once.
--tree 24 drafts a best-first tree over the same pass (DDTree, arxiv.org/abs/2604.12989). Read next: dflash2.py.
"""
import heapq
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import init_weights, rope_angles, rotate
from train import CommonArgs, Optimizer, Run, arg, get_target, launch, number
from verify import Session, Topology, Tree, acceptance, chain, sample


@dataclass
class Args(CommonArgs):
    steps: int = arg(650, "optimizer steps")
    batch_size: int = arg(8, "sequences per step")
    seq_len: int = arg(256, "tokens per sequence", number(int, 64))
    # Departure: published AdamW, 6e-4.
    lr: float = arg(0.02, "learning rate of Muon", number(float, 1e-9))
    block_size: int = arg(16, "B: anchor and masks", number(int, 2, 32))
    # Departure: published 5, for targets with 36 layers and more.
    n_draft_layer: int = arg(3, "draft layers")
    n_taps: int = arg(5, "target layers whose features are fused")
    n_anchors: int = arg(32, "blocks per training sequence")
    # Departure: published 1. Shorter blocks leave room for more anchors; most drafts end in slot 1 or 2.
    n_lengths: int = arg(3, "lengths of training blocks: B, B/4, B/16 ...")
    tree: int = arg(0, "rows of a best-first tree, at least 2; 0: a chain", number(int, 0))


def heads(x, n, n_head):
    """(b, T, n*d) -> n tensors in one, (n, b, n_head, T, d/n_head)."""
    return x.unflatten(-1, (n, n_head, -1)).permute(2, 0, 3, 1, 4)


class Layer(nn.Module):
    """One draft layer: queries from the block only, keys and values from the context and the block."""

    def __init__(self, c):
        super().__init__()
        d, hd = c.n_embd, c.n_embd // c.n_head
        self.n_head = c.n_head
        self.ln_1 = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.qk_norm = nn.Parameter(torch.ones(2, 1, 1, 1, hd))  # scales
        self.attn_proj = nn.Linear(d, d, bias=False)
        self.ln_2 = nn.LayerNorm(d, bias=False)
        self.fc = nn.Linear(d, 4 * d, bias=False)
        self.mlp_proj = nn.Linear(4 * d, d, bias=False)

    def inject(self, H, angles):
        """Keys and values of the context, H (b, T, d) -> (2, b, n_head, T, hd): no input norm, no query, no MLP."""
        k, v = heads(F.linear(H, self.qkv.weight[H.shape[-1]:]), 2, self.n_head)
        k = F.layer_norm(k, k.shape[-1:]) * self.qk_norm[1]
        return torch.stack([rotate(k, angles), v])

    def forward(self, x, angles, attend):
        """x (b, T, d), whole blocks; angles of its positions; attend: q, k, v (b, n_head, T, hd) -> its output."""
        b, T, d = x.shape
        y = self.ln_1(x)
        qkv = heads(self.qkv(y), 3, self.n_head)
        qk = F.layer_norm(qkv[:2], qkv.shape[-1:]) * self.qk_norm
        y = attend(*rotate(qk, angles), qkv[2])
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        y = self.ln_2(x)
        return x + self.mlp_proj(F.relu(self.fc(y)).square())


def blockwise(context, mask, B, q, k, v):
    """Attention of many blocks at once in training: q, k, v (b, n_head, A*B, hd), context (2, b, n_head, T, hd), mask
    (b, 1, A*B, T), additive. A slot sees the context that the mask leaves it, and all of its own block of B."""
    def blocks(x):
        return x.unflatten(2, (-1, B))

    q = q * q.shape[3] ** -0.5
    own = (blocks(q) @ blocks(k).mT).flatten(2, 3)  # (b, n_head, A*B, B)
    w = torch.cat([q @ context[0].mT + mask, own], -1).softmax(-1)
    w, w_own = w.split([mask.shape[-1], B], -1)
    return w @ context[1] + (blocks(w_own) @ blocks(v)).flatten(2, 3)


class Drafter(nn.Module):
    name = "dflash"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d, L = args, config, config.n_embd, config.n_layer
        # Departure: published h[2] .. h[L-2]. Distinct ones for every L.
        n = min(args.n_taps, L)
        self.taps = [1 + round(i * (L - 1) / max(1, n - 1)) for i in range(n)]
        self.nodes = max(args.tree, args.block_size)
        self.fuse = nn.Linear(n * d, d, bias=False)  # W_c
        self.fuse_norm = nn.RMSNorm(d)
        # Departure: MASK is a learned vector; published is an unused entry of the vocabulary.
        self.mask = nn.Parameter(torch.randn(d) * 0.02)
        self.layers = nn.ModuleList([Layer(config) for _ in range(args.n_draft_layer)])
        self.norm = nn.LayerNorm(d, bias=False)
        init_weights(self, args.n_draft_layer)

    def context(self, h):
        """The fused features H (b, T, d) of taps h, each (b, T, d); shared by all layers."""
        return self.fuse_norm(self.fuse(torch.cat(h, -1)).to(self.mask.dtype))

    def angles(self, positions):
        return rope_angles(positions, self.config.n_embd // self.config.n_head, self.mask.dtype)

    def block(self, target, anchors, B):
        """Block inputs [anchor, MASK, ...]: anchors (...,) -> (..., B, d)."""
        masks = self.mask.expand(*anchors.shape, B - 1, -1)
        return torch.cat([target.wte(anchors)[..., None, :].to(masks.dtype), masks], -2)

    def forward(self, target, idx):
        """The training loss. Random anchors in every sequence idx (b, T), all blocks in one pass: a block sees the
        context strictly before its anchor and itself, nothing of other blocks. Slot k at anchor a says token a+k."""
        (b, T), device = idx.shape, idx.device
        B = max(2, self.args.block_size // 4 ** int(torch.randint(self.args.n_lengths, ())))
        A = min(self.args.n_anchors * self.args.block_size // B, T - B)
        with torch.no_grad():
            logits, h = target(idx, taps=self.taps)
        anchor = 1 + torch.rand(b, T - B, device=device).argsort(1)[:, :A]  # (b, A), in 1 .. T-B
        slots = anchor[:, :, None] + torch.arange(B, device=device)  # (b, A, B)
        position = torch.arange(T, device=device)
        hidden = position >= anchor.repeat_interleave(B, 1)[:, None, :, None]  # (b, 1, A*B, T)
        mask = torch.zeros_like(hidden, dtype=torch.float).masked_fill(hidden, -math.inf)
        x, H = self.block(target, idx.gather(1, anchor), B).flatten(1, 2), self.context(h)
        angles = self.angles(slots.flatten(1)[:, None])
        for layer in self.layers:
            context = layer.inject(H, self.angles(position))
            x = layer(x, angles, partial(blockwise, context, mask, B))
        x = self.norm(x).unflatten(1, (A, B))[:, :, 1:]  # slot 0 is the anchor itself
        log_q = target.head(x).float().log_softmax(-1)  # (b, A, B-1, V)
        # Departure: published are hard labels on text of the target. Here p, after position a+k-1, is the label.
        p = logits.float().softmax(-1)[torch.arange(b, device=device)[:, None, None], slots[:, :, :-1]]
        loss = -(p * log_q).sum(-1)
        # w_k = exp(-(k-1)/γ_w): an early rejection voids all that follows. γ_w of the paper.
        gamma_w = {16: 7.0, 10: 5.0, 8: 4.0}.get(B, B / 2)
        w = torch.exp(-torch.arange(B - 1, device=device) / gamma_w)
        return (loss * w).sum() / (w.sum() * b * A)

    def reset(self, session):
        """An empty context cache for a new text, and the mask of a block, which sees all of itself."""
        c, B, device = self.config, self.args.block_size, session.device
        self.cache = session.new_cache(len(self.layers), c.n_head, c.n_embd // c.n_head)
        self.table = self.angles(self.cache.index)
        self.session = session
        self.block_mask = torch.zeros(1, B, device=device, dtype=self.cache.kv.dtype)

    def absorb(self, new):
        """Takes in verify.Committed: its fused features become keys and values of all layers."""
        H = self.context([x[None] for x in new.h])
        slots = new.start + self.cache.index[:H.shape[1]]
        angles = self.table.index_select(1, slots)
        for l, layer in enumerate(self.layers):
            self.cache.append(l, slots, layer.inject(H, angles))
        self.cache.pos.copy_(new.start + new.n)

    def cached(self, l, slots, mask, q, k, v):
        """Attention of a block that is written to the cache of layer l at slots (B,), under an additive mask."""
        k, v = self.cache.append(l, slots, torch.stack([k, v]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def draft(self, target, anchor, probs=None):
        """One pass over [anchor, MASK, ...], anchor (1,); its keys and values, beyond cache.pos, are overwritten by the
        next context. probs: logits -> the distribution to draw from, or None."""
        slots = self.cache.pos + self.cache.index[:self.args.block_size]
        angles, mask = self.table.index_select(1, slots), self.cache.mask(self.block_mask)
        x = self.block(target, anchor, len(slots))
        for l, layer in enumerate(self.layers):
            x = layer(x, angles, partial(self.cached, l, slots, mask))
        h = self.norm(x[0, 1:])
        logits = target.head(h)  # (B-1, V)
        if self.args.tree:
            return self.best_first(anchor, logits)
        q = logits.softmax(-1) if probs is None else probs(logits)
        n = self.session.worth(acceptance(q).cumprod(0))  # Departure: published is the whole block.
        q = q[:n]
        if probs is None:
            return Tree(torch.cat([anchor, q.argmax(-1)]), chain(n, anchor.device))
        return Tree(torch.cat([anchor, sample(q)]), chain(n, anchor.device), F.pad(q, (0, 0, 0, 1)))

    def best_first(self, anchor, logits):
        """DDTree: the likeliest prefixes under the product of the slots' q, with a heap: pop the best node, push its
        next-ranked sibling and its own first child. Chosen, so verified without q."""
        top = logits.float().log_softmax(-1).topk(min(self.args.tree, logits.shape[-1]))
        score, token = top.values.tolist(), top.indices.tolist()
        tokens, parent, heap = [], [-1], [(-score[0][0], 0, 0, 0)]  # (-Σ log q, slot, rank, parent)
        while len(tokens) < self.args.tree - 1 and heap:
            cost, slot, rank, above = heapq.heappop(heap)
            tokens.append(token[slot][rank])
            parent.append(above)
            if rank + 1 < len(score[slot]):
                heapq.heappush(heap, (cost + score[slot][rank] - score[slot][rank + 1], slot, rank + 1, above))
            if slot + 1 < len(score):
                heapq.heappush(heap, (cost - score[slot + 1][0], slot + 1, 0, len(tokens)))
        tokens, parent = (torch.tensor(x, device=anchor.device).long() for x in (tokens, parent))
        return Tree(torch.cat([anchor, tokens]), Topology(parent, len(score)))


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
    s.capture &= not drafter.args.tree  # its heap lives on the host
    drafter.reset(s)
    drafter.absorb(s.committed)

    def verify(tree):
        logits, h = target(tree.tokens[None], s.cache, tree.topology, drafter.taps)
        s.verify(tree, logits[0], [x[0] for x in h])
        drafter.absorb(s.committed)

    return s.run(lambda: drafter.draft(target, s.anchor, s.probs if temperature else None), verify)


def main():
    launch(sys.modules[__name__])


if __name__ == "__main__":
    main()
