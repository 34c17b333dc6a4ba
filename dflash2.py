"""DFlash-2: the block stays parallel, but its slots hear of their neighbours: a two-tap conv in every layer, a path at the end.

Source: DFlash 2: Keep Drafting Parallel (Inco AI 2026, inco.ai/blog/dflash2) and the released inference code; the training
objective is unpublished, so the one here is ours.

One round, block size B = 5:

    target's features of every committed position          block: the anchor, then masks
      h[l1] .. h[lm]  ─► W_c ─► RMSNorm ─► H                  [fox] [m] [m] [m] [m]
                                           │                    │ ↘ │ ↘ │ ↘ │ ↘ │     dynamic conv: slot t reads x_t and x_{t-1},
          K, V of every draft layer  ◄─────┴── attend ◄─────  n layers, bidirectional      before and after attention and MLP
                                                                    │   │   │   │
                                                  LM head (frozen)  U_1 U_2 U_3 U_4    keep the K likeliest of each slot
                                            path selector     fox ──► b ─► b ─► b ─► b     S_t(a, b) for all pairs at once,
                                                                                       then walk, each step given the last
    verify ─► accepted tokens + bonus ─► the bonus is the next anchor

Glossary
    H_t = RMSNorm(W_c [h^(l1); ...; h^(lm)]_t)     Drafter.context
    K = [W_k H ; W_k x], V likewise                Layer.inject, blockwise, Drafter.cached: KV injection into every layer
    anchor, slot k                                 slot k stands at position pos+k and gives the token there: no shift
    MASK                                           a learned vector here (the published models reserve a vocabulary entry)
    w_k = exp(-(k-1)/γ_w)                          the loss weight of slot k: an early rejection voids all that follows
    B, γ = B - 1                                   block_size, drafted tokens
    conv(x)_t = Σ_o (base_o + D_t,o) ⊙ x_{t-o}     DynamicConv: o = 0, 1; D depends on the input, one value per 16 channels
    S_t(a,b) = U_t(b) + <A(a) ⊙ H(h_t), B(b)>      Drafter.pair_scores: U the LM head's logit, a the token before

    python dflash2.py --train                      target (where missing) and drafter, then measurements
    python dflash2.py --prompt "def "              continues a text, drafted and accepted tokens marked
    python dflash2.py --bench --json               measurements only
    python dflash2.py --bench --tree 24            a best-first tree over the selector's scores (DDTree, arXiv 2604.12989)

Both additions start as no-ops: an untrained DFlash-2 drafts the chains, greedy or drawn, of the DFlash that it is started from
(--init_from out/dflash.pt).

Left out: the published models' vocabulary entry for MASK, serving many requests at once.
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
    load,
)
from verify import Session, Topology, Tree, chain, norm, sample


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
    argmax: bool = flag(False, "at T > 0 draft the likeliest path, not a sample", trained=False)
    n_candidates: int = flag(16, "K: tokens kept per slot (published: 16)", redraft=True)
    rank: int = flag(32, "r: width of the selector's tables")
    no_conv: bool = flag(False, "ablation: without the convolutions")
    no_selector: bool = flag(False, "ablation: without the path selector")
    outside: str = flag("outcome", "to the selector's loss a true token outside the K is one more outcome, skipped (skip), or "
                                   "replaces the last of them (insert)")
    init_from: str = flag(None, "start from this DFlash checkpoint")
    tree: int = flag(0, "draft a best-first tree of this many nodes; 0: a chain", trained=False, least=0)


def heads(x, n, n_head):
    """(b, T, n*d) -> n tensors in one, (n, b, n_head, T, d/n_head)."""
    b, T, _ = x.shape
    return x.view(b, T, n, n_head, -1).permute(2, 0, 3, 1, 4)


class DynamicConv(nn.Module):
    """The two-tap conv around one sublayer: kernels for both sides come from the sublayer's input."""

    def __init__(self, d, block_size, group=16):
        super().__init__()
        self.block_size, self.group = block_size, group
        self.base = nn.Parameter(torch.tensor([1.0, 0.0])[:, None].repeat(2, 1, d))  # (side, tap, d): the identity
        self.dynamic = nn.Linear(d, 4 * d // group, bias=False)                      # W_p

    def kernels(self, h):
        """h (b, T, d) -> the kernels before and after the sublayer, 2 x (2 taps, b, T, d)."""
        D = self.dynamic(h).unflatten(-1, (2, 2, -1, 1)).expand(-1, -1, -1, -1, -1, self.group).flatten(-2)
        return (self.base + D).permute(2, 3, 0, 1, 4)

    def forward(self, x, kernel):
        """x (b, T, d), whole blocks. Slot 0 has no predecessor in its block, slot 1 reads the anchor."""
        blocks = x.unflatten(1, (-1, self.block_size))
        before = F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
        return torch.addcmul(kernel[0] * x, kernel[1], before)


class Layer(nn.Module):
    """One draft layer: queries from the block only, keys and values from the context and the block."""

    def __init__(self, c, args):
        super().__init__()
        d = c.n_embd
        self.convs = nn.ModuleList([] if args.no_conv else [DynamicConv(d, args.block_size) for _ in range(2)])
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
        y = self.ln_1(x)
        if self.convs:
            before, after = self.convs[0].kernels(y)
            y = self.convs[0](y, before)
        qkv = heads(self.qkv(y), 3, self.n_head)
        y = attend(*rotate(F.layer_norm(qkv[:2], qkv.shape[-1:]) * self.qk_norm, angles), qkv[2])
        y = self.attn_proj(y.transpose(1, 2).reshape(b, T, d))
        x = x + (self.convs[0](y, after) if self.convs else y)
        y = self.ln_2(x)
        if self.convs:
            before, after = self.convs[1].kernels(y)
            y = self.convs[1](y, before)
        y = self.mlp_proj(F.relu(self.fc(y)).square())
        return x + (self.convs[1](y, after) if self.convs else y)


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
    kind = "dflash2"  # of its checkpoints

    def __init__(self, config, args):
        super().__init__()
        if not 2 <= args.block_size < args.seq_len:
            raise UserError(f"--block_size {args.block_size}: it has to be at least 2, and smaller than --seq_len {args.seq_len}")
        if config.n_embd % 16 and not args.no_conv:
            raise UserError(f"the convs work on groups of 16 channels, and this target has {config.n_embd}: use --no_conv")
        if args.outside not in ("outcome", "skip", "insert"):
            raise UserError(f"--outside {args.outside}: has to be outcome, skip or insert")
        self.args, self.config, d, L = args, config, config.n_embd, config.n_layer
        n = min(args.n_taps, L)
        self.taps = [1 + round(i * (L - 1) / (n - 1)) for i in range(n)] if n > 1 else [L]  # distinct, first block to last
        self.nodes = max(args.tree, args.block_size)
        self.fuse = nn.Linear(n * d, d, bias=False)                   # W_c
        self.fuse_norm = nn.RMSNorm(d)
        self.mask = nn.Parameter(torch.randn(d) * 0.02)
        self.layers = nn.ModuleList([Layer(config, args) for _ in range(args.n_draft_layer)])
        self.norm = nn.LayerNorm(d, bias=False)
        if not args.no_selector:
            self.A = nn.Embedding(config.vocab_size, args.rank)
            self.B = nn.Embedding(config.vocab_size, args.rank)
            self.gate = nn.Linear(d, args.rank, bias=False)           # W_h
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * args.n_draft_layer) ** 0.5 if name.endswith("proj.weight") else 0.02)
            if name == "B.weight" or name.endswith("dynamic.weight"):
                nn.init.zeros_(p)                                     # no-ops to start with
            if name == "A.weight":
                nn.init.normal_(p)

    def pair_scores(self, h, U, candidates, before):
        """S_t(a, b) for b among the candidates (..., K) with logits U (..., K), a in before (..., n), h (..., d) -> (..., n, K)."""
        S = U[..., None, :].expand(*before.shape, -1)
        if self.args.no_selector:
            return S
        gated = self.A(before) * self.gate(h)[..., None, :]
        return S + gated @ self.B(candidates).mT

    def start_from(self, path, target):
        """Takes the weights of a DFlash checkpoint for the same target; convs and selector stay the no-ops they are."""
        checkpoint = load(path, "dflash")
        own = self.state_dict()
        added = {name for name in own if ".convs." in name or name in ("A.weight", "B.weight", "gate.weight")}
        theirs = {name: w.shape for name, w in checkpoint["model"].items()}
        if checkpoint["target"] != target.fingerprint:
            raise UserError(f"--init_from {path}: was trained for another target")
        if theirs != {name: w.shape for name, w in own.items() if name not in added}:
            raise UserError(f"--init_from {path}: holds a drafter of another shape")
        self.load_state_dict(checkpoint["model"], strict=False)

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
        label = idx[:, None].expand(-1, A, -1).gather(2, slots)                              # the true tokens, anchor first
        if self.args.hard:
            p = F.one_hot(label[:, :, 1:], log_q.shape[-1])
        else:                                                                                # p after position a+k-1
            p = logits.float().softmax(-1)[torch.arange(b, device=idx.device)[:, None, None], slots[:, :, :-1]]
        loss = -(p * log_q).sum(-1)
        if not self.args.no_selector:
            loss = loss + self.selector_loss(x, log_q, p, label)
        gamma_w = {16: 7.0, 10: 5.0, 8: 4.0}.get(B, B / 2)                                   # the paper's values
        w = torch.exp(-torch.arange(B - 1, device=idx.device) / gamma_w)
        return (loss * w).sum() / (w.sum() * b * A)

    def selector_loss(self, h, U, p, label):
        """Cross-entropy over the K candidates of every slot and (--outside) one outcome for all other tokens, given the true token before:
        h (b, A, B-1, d), log-probabilities U and p (b, A, B-1, V), label (b, A, B) -> (b, A, B-1)."""
        U_top, candidates = U.topk(min(self.args.n_candidates, U.shape[-1]))
        if self.args.outside == "insert":
            gold = label[:, :, 1:, None]
            missing = (candidates != gold).all(-1, keepdim=True)
            candidates = torch.cat([candidates[..., :-1], torch.where(missing, gold, candidates[..., -1:])], -1)
            U_top = U.gather(-1, candidates)
        S, p = self.pair_scores(h, U_top, candidates, label[:, :, :-1, None])[..., 0, :].float(), p.gather(-1, candidates)
        if self.args.outside == "outcome":
            S = torch.cat([S, (1 - U_top.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()], -1)
            p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
        return -(p * S.log_softmax(-1)).sum(-1)

    def reset(self, session):
        """An empty context cache for a new text."""
        c, device, self.T = self.config, session.device, session.temperature
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
        h = self.norm(x[0, 1:])
        logits = target.head(h)                                                              # (B-1, V)
        U, candidates = logits.topk(min(self.args.n_candidates, logits.shape[-1]))
        K = U.shape[1]
        if law is None or self.args.argmax or self.args.tree:
            before = torch.cat([anchor.expand(1, K), candidates[:-1]])                       # what slot t may follow
            S = self.pair_scores(h, U, candidates, before)
            if self.args.tree:
                return self.best_first(anchor, S, candidates)
            best = S.argmax(-1)                                                              # (B-1, K): the best successors
            tokens = candidates.gather(1, best).gather(1, self.walk(best))
            return Tree(torch.cat([anchor, tokens[:, 0]]), self.chain)
        # Any token may be drawn, or what p holds outside the candidates is lost: the selector rescores the candidates, and what
        # else a slot may hold keeps its law and its mass. One draw of the latter per slot is enough: all paths can share it.
        q = law(logits)                                                                      # (B-1, V)
        rest = q.scatter(1, candidates, 0)
        others = norm(rest, q)
        tokens = torch.cat([candidates, sample(others)[:, None]], 1)                         # (B-1, K+1): what a slot may hold
        T, before = max(self.T, 1e-30), torch.cat([anchor.expand(1, K + 1), tokens[:-1]])
        S = self.pair_scores(h, q.gather(1, candidates).log() * T, candidates, before) / T
        w = torch.cat([S, rest.sum(1).log()[:, None, None].expand(-1, K + 1, 1)], 2).softmax(-1)  # (B-1, K+1, K+1)
        after = sample(w)
        path = self.walk(after)
        w = w[self.cache.index[:len(w)], path[:, 0]]                                         # the conditional that was drawn from
        q = (others * w[:, K:]).scatter(1, candidates, w[:, :K])
        return Tree(torch.cat([anchor, tokens.gather(1, after.gather(1, path))[:, 0]]), self.chain, F.pad(q, (0, 0, 0, 1)))

    def walk(self, step):
        """The rows that the walk from the anchor passes: step (n, rows) says for every row of a slot which row of the next slot
        follows -> (n, 1). In log n steps: all walks at once, each time twice as long."""
        for s in (2 ** i for i in range((len(step) - 1).bit_length())):
            step = torch.cat([step[:s], step[s:].gather(1, step[:-s])])
        return F.pad(step[:-1, :1], (0, 0, 1, 0))                                            # all rows of slot 1 follow the anchor

    def best_first(self, anchor, S, candidates):
        """DDTree (2604.12989) on the selector's scores: the N - 1 likeliest paths, with a heap: pop the best node, push its
        next-ranked sibling and its own first child. Deterministic, so verified with the one-hot rule."""
        N, K = self.args.tree, S.shape[-1]
        top = S.float().log_softmax(-1).sort(descending=True, stable=True)
        score, order, token = top.values.tolist(), top.indices.tolist(), candidates.tolist()
        tokens, parent = [], [-1]
        heap = [(-score[0][0][0], 0, 0, 0, 0)]                                                # (-Σ log q, slot, a, rank, parent)
        while len(tokens) < N - 1 and heap:
            cost, slot, a, rank, above = heapq.heappop(heap)
            b = order[slot][a][rank]
            tokens.append(token[slot][b])
            parent.append(above)
            if rank + 1 < K:
                heapq.heappush(heap, (cost + score[slot][a][rank] - score[slot][a][rank + 1], slot, a, rank + 1, above))
            if slot + 1 < len(score):
                heapq.heappush(heap, (cost - score[slot + 1][b][0], slot + 1, b, 0, len(tokens)))
        device = anchor.device
        return Tree(torch.cat([anchor, torch.tensor(tokens, dtype=torch.long, device=device)]),
                    Topology(torch.tensor(parent, device=device), len(score)))


def train(args):
    target, data = get_target(args, args.text)
    torch.manual_seed(args.seed)
    drafter = Drafter(target.config, args).to(args.device)
    if args.init_from and not args.resume:
        drafter.start_from(args.init_from, target)
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
