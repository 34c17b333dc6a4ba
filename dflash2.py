"""DFlash-2: the block stays parallel, but its slots see their neighbours: a conv in every layer, a path at the end.

Paper: DFlash 2: Keep Drafting Parallel (Inco AI 2026, inco.ai/blog/dflash2)
Code:  the released inference code; departure: the training objective is unpublished, the selector's here is ours.

One round, block size B = 5:

    target's features of every committed position          block: the anchor, then masks
      h[l1] .. h[lm]  ─► W_c ─► RMSNorm ─► H                  [fox] [m] [m] [m] [m]
                                           │                    │ ↘ │ ↘ │ ↘ │ ↘ │     conv of x_t and x_{t-1}
          K, V of every draft layer  ◄─────┴── attend ◄─────  n layers, bidirectional in the block
                                                                    │   │   │   │
                                                  LM head (frozen)  U_1 U_2 U_3 U_4      logits of 4 tokens in one pass
                                            path selector     fox ──► b ─► b ─► b ─► b     walk, K candidates a slot
    verify ─► accepted tokens + bonus ─► the bonus is the next anchor

Glossary
    H_t = RMSNorm(W_c [h^(l1); ...; h^(lm)]_t)     Drafter.context
    K = [W_k H ; W_k x], V likewise                Layer.inject, blockwise, Drafter.cached: injected into every layer
    anchor, slot k                                 at position pos+k: a mask says the token there, not the next
    conv(x)_t = Σ_o (base_o + D_t,o) ⊙ x_{t-o}     DynamicConv: o = 0, 1; D of the input, one value per 16 channels
    S_t(a,b) = U_t(b) + <A(a) ⊙ W_h h_t, B(b)>     Drafter.pair_scores is the second term; a the token before

Run it with --prompt TEXT, --train or --bench (--help has the rest). Left out: serving many requests at once.
Both additions start as no-ops: untrained, it drafts as a DFlash with the same weights does.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from model import init_weights, rope_angles, rotate
from train import CommonArgs, Optimizer, Run, arg, get_target, launch, number
from verify import Session, Tree, acceptance, chain, normalize, sample


@dataclass
class Args(CommonArgs):
    steps: int = arg(500, "optimizer steps")
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
    n_candidates: int = arg(16, "K: tokens kept per slot")
    rank: int = arg(32, "r: width of the selector's tables")


def heads(x, n, n_head):
    """(b, T, n*d) -> n tensors in one, (n, b, n_head, T, d/n_head)."""
    return x.unflatten(-1, (n, n_head, -1)).permute(2, 0, 3, 1, 4)


class DynamicConv(nn.Module):
    """The two-tap conv around one sublayer: kernels for both sides come from the sublayer's input."""

    def __init__(self, d):
        super().__init__()
        assert d % 16 == 0, f"{d} is not a multiple of 16"
        self.base = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(2, 1, d))  # (side, tap, d)
        self.dynamic = nn.Linear(d, 4 * d // 16, bias=False)  # W_p

    def kernels(self, h):
        """h (b, T, d) -> the kernels before and after the sublayer, 2 x (2 taps, b, T, d)."""
        D = self.dynamic(h).unflatten(-1, (2, 2, -1)).repeat_interleave(16, -1)
        return (self.base + D).permute(2, 3, 0, 1, 4)

    def forward(self, x, kernel, B):
        """x (b, T, d), whole blocks of B. Slot 0 has no predecessor in its block, slot 1 reads the anchor."""
        before = F.pad(x.unflatten(1, (-1, B))[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
        return torch.addcmul(kernel[0] * x, kernel[1], before)


class Layer(nn.Module):
    """One draft layer: queries from the block only, keys and values from the context and the block."""

    def __init__(self, c):
        super().__init__()
        d, hd = c.n_embd, c.n_embd // c.n_head
        self.convs = nn.ModuleList([DynamicConv(d) for _ in range(2)])
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

    def forward(self, x, angles, attend, B):
        """x (b, T, d), whole blocks; angles of its positions; attend: q, k, v (b, n_head, T, hd) -> its output."""
        b, T, d = x.shape
        y = self.ln_1(x)
        before, after = self.convs[0].kernels(y)
        y = self.convs[0](y, before, B)
        qkv = heads(self.qkv(y), 3, self.n_head)
        qk = F.layer_norm(qkv[:2], qkv.shape[-1:]) * self.qk_norm
        y = attend(*rotate(qk, angles), qkv[2])
        y = self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        x = x + self.convs[0](y, after, B)
        y = self.ln_2(x)
        before, after = self.convs[1].kernels(y)
        y = self.convs[1](y, before, B)
        y = self.mlp_proj(F.relu(self.fc(y)).square())
        return x + self.convs[1](y, after, B)


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
    name = "dflash2"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        self.args, self.config, d, L = args, config, config.n_embd, config.n_layer
        # Departure: published h[2] .. h[L-2]. Distinct ones for every L.
        n = min(args.n_taps, L)
        self.taps = [1 + round(i * (L - 1) / max(1, n - 1)) for i in range(n)]
        self.nodes = args.block_size
        self.fuse = nn.Linear(n * d, d, bias=False)  # W_c
        self.fuse_norm = nn.RMSNorm(d)
        # Departure: MASK is a learned vector; published is an unused entry of the vocabulary.
        self.mask = nn.Parameter(torch.randn(d) * 0.02)
        self.layers = nn.ModuleList([Layer(config) for _ in range(args.n_draft_layer)])
        self.norm = nn.LayerNorm(d, bias=False)
        self.A = nn.Embedding(config.vocab_size, args.rank)
        self.B = nn.Embedding(config.vocab_size, args.rank)
        self.gate = nn.Linear(d, args.rank, bias=False)  # W_h
        init_weights(self, args.n_draft_layer)
        nn.init.normal_(self.A.weight)
        for no_op in [self.B, *(conv.dynamic for layer in self.layers for conv in layer.convs)]:
            nn.init.zeros_(no_op.weight)

    def pair_scores(self, h, candidates, before):
        """<A(a) ⊙ W_h h, B(b)> for h (..., d), a in before (..., n), b in candidates (..., K) -> (..., n, K)."""
        return (self.A(before) * self.gate(h)[..., None, :]) @ self.B(candidates).mT

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
            x = layer(x, angles, partial(blockwise, context, mask, B), B)
        x = self.norm(x).unflatten(1, (A, B))[:, :, 1:]  # slot 0 is the anchor itself
        log_q = target.head(x).float().log_softmax(-1)  # (b, A, B-1, V)
        # Departure: published are hard labels on text of the target. Here p, after position a+k-1, is the label.
        p = logits.float().softmax(-1)[torch.arange(b, device=device)[:, None, None], slots[:, :, :-1]]
        before = idx[:, None].expand(-1, A, -1).gather(2, slots[:, :, :-1])
        loss = -(p * log_q).sum(-1) + self.selector_loss(x, log_q, p, before)
        # w_k = exp(-(k-1)/γ_w): an early rejection voids all that follows. γ_w of the paper.
        gamma_w = {16: 7.0, 10: 5.0, 8: 4.0}.get(B, B / 2)
        w = torch.exp(-torch.arange(B - 1, device=device) / gamma_w)
        return (loss * w).sum() / (w.sum() * b * A)

    def selector_loss(self, h, U, p, before):
        """Cross-entropy among the K candidates of every slot, given the true token before (b, A, B-1); the rest of p is
        skipped. h (b, A, B-1, d), U and p (b, A, B-1, V) -> (b, A, B-1)."""
        U, candidates = U.topk(min(self.args.n_candidates, U.shape[-1]))
        S = self.pair_scores(h, candidates, before[..., None])
        S = U + S[..., 0, :].float()
        return -(p.gather(-1, candidates) * S.log_softmax(-1)).sum(-1)

    def reset(self, session):
        """An empty context cache for a new text, and the mask of a block, which sees all of itself."""
        c, B, device = self.config, self.args.block_size, session.device
        self.T = max(session.temperature, 1e-30)
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
            x = layer(x, angles, partial(self.cached, l, slots, mask), len(slots))
        h = self.norm(x[0, 1:])
        logits = target.head(h)  # (B-1, V)
        q = logits.softmax(-1) if probs is None else probs(logits)
        n = self.session.worth(acceptance(q).cumprod(0))  # Departure: published is the whole block.
        q = q[:n]
        h, (U, candidates) = h[:n], logits[:n].topk(min(self.args.n_candidates, logits.shape[-1]))
        if probs is None:
            before = torch.cat([anchor.expand(1, U.shape[1]), candidates[:-1]])
            S = U[:, None] + self.pair_scores(h, candidates, before)
            tokens = candidates.gather(1, self.walk(S.argmax(-1))[1:, None])[:, 0]
            return Tree(torch.cat([anchor, tokens]), chain(n, anchor.device))
        # Departure: published are candidates alone, which loses what p holds outside them. Here the selector rescores
        # the candidates, other tokens keep their probability, and one of them, drawn once per slot, stands for all.
        rest = q.scatter(1, candidates, 0)
        others = normalize(rest, q)
        tokens = torch.cat([candidates, sample(others)[:, None]], 1)  # (n, K+1)
        before = torch.cat([anchor.expand(1, tokens.shape[1]), tokens[:-1]])
        S = F.pad(self.pair_scores(h, candidates, before) / self.T, (0, 1))
        prior = torch.cat([q.gather(1, candidates), rest.sum(1, True)], 1)
        w = (prior.log()[:, None] + S).softmax(-1)  # (n, K+1, K+1)
        row = self.walk(sample(w))
        w = w[self.cache.index[:len(w)], row[:-1]]  # given the path
        q = (others * w[:, -1:]).scatter(1, candidates, w[:, :-1])
        tokens = tokens.gather(1, row[1:, None])[:, 0]
        return Tree(torch.cat([anchor, tokens]), chain(n, anchor.device), F.pad(q, (0, 0, 0, 1)))

    def walk(self, next_row):
        """The rows (n+1,) on the way from the anchor: next_row (n, rows), in every slot, given the row before."""
        rows = [self.cache.index[:1]]
        for slot in next_row:
            rows.append(slot.index_select(0, rows[-1]))
        return torch.cat(rows)


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
