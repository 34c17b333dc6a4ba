"""The target: a small GPT (GPT-2's, whose biases and GELU are options), its KV cache, and taps on its hidden states.

What is here and nowhere else:
  GPT.forward   one pass over tokens: a plain sequence, a continuation of a cache, or a tree of drafted tokens
  KVCache       preallocated keys and values; accepting a path of a tree moves rows, nothing is encoded twice
  rotate        rotary positions, which the drafters use (the target's own positions are learned)

Notation: L layers, d = n_embd, V = vocab_size, S = slots in the cache, N = nodes in a draft.
  h[0] = embedding, h[l] = output of block l, h[L] = after the final norm, the direct input of the LM head.

Sources: GPT-2 (Radford et al. 2019), the layout of nanoGPT; tree attention: SpecInfer (arXiv 2305.09781, sec. 4.2).
"""
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

torch.set_flush_denormal(True)  # confident softmax tails are denormal numbers, and a CPU computes with those 50 times slower


@dataclass
class GPTConfig:
    max_seq_len: int = 256  # the context: learned positions 0..255
    vocab_size: int = 512
    n_layer: int = 24       # deep and narrow: a draft layer has to be cheap beside the target
    n_head: int = 3
    n_embd: int = 96
    bias: bool = False      # GPT-2 has biases in every Linear and LayerNorm
    gelu: bool = False      # GPT-2's activation (by tanh); relu² (So et al. 2109.08668) takes a fraction of its time


def rope_angles(positions, head_dim, dtype=torch.float32, base=10000.0):
    """Rotary positions (Su et al. 2104.09864): positions (..., T) -> cos and signed sin, (2, ..., T, head_dim), for rotate."""
    half = head_dim // 2
    angle = positions[..., None] * base ** (-torch.arange(half, device=positions.device) / half)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(dtype)


def rotate(x, angles):
    """x (..., T, hd), angles from rope_angles -> x at its positions, the same shape."""
    return torch.addcmul(x * angles[0], x.roll(x.shape[-1] // 2, -1), angles[1])


@functools.lru_cache
def causal(n, device, dtype):
    """(n, n) additive mask: 0 at and below the diagonal, -inf above."""
    return torch.full((n, n), -math.inf, device=device, dtype=dtype).triu(1)


class KVCache:
    """Keys and values of `pos` committed tokens, in buffers whose shape never changes.

    kv (n_layer, 2, B, n_head, slots, head_dim); pos, a 0-d tensor on the device. Rows at and beyond pos are rejected or
    unwritten: they are masked, and overwritten by the next pass. `span` is the number of slots a pass attends to: all of
    them on CUDA (static shapes, so that a pass can be captured in a graph), on a CPU only as many as the text needs.
    """

    def __init__(self, n_layer, n_head, head_dim, slots, device=None, dtype=None, batch=1):
        self.kv = torch.zeros(n_layer, 2, batch, n_head, slots, head_dim, device=device, dtype=dtype)
        self.pos = torch.zeros((), dtype=torch.long, device=device)
        self.reserve(slots)
        self.index = torch.arange(slots + 1, device=device)

    def reserve(self, n):
        """Lets the next passes attend to the first n slots at least (rounded up, so that shapes change rarely)."""
        slots = self.kv.shape[4]
        self.span = slots if self.kv.is_cuda else min((n + 63) // 64 * 64, slots)
        self.layers = [(kv, kv[0, :, :, :self.span], kv[1, :, :, :self.span]) for kv in self.kv]  # views, made once

    def append(self, layer, slots, kv):
        """Writes kv (2, B, n_head, T, head_dim) at slots (T,); returns the keys and values (B, n_head, span, head_dim)."""
        buffer, keys, values = self.layers[layer]
        buffer.index_copy_(3, slots, kv)
        return keys, values

    def mask(self, ancestors):
        """ancestors (R, T), 0 where row i may see row j behind pos and -inf elsewhere -> (R, span): the committed prefix is
        visible to every row, whatever lies beyond those T rows to none."""
        T = ancestors.shape[-1]
        padded = F.pad(ancestors, (1, 1), value=-math.inf)  # prefix | new rows | beyond
        padded[:, 0] = 0
        return padded.index_select(1, (self.index[1:self.span + 1] - self.pos).clamp_(0, T + 1))

    def keep(self, path, n):
        """Commits n rows: moves the rows of path (P,), node numbers of the last pass, to pos, pos+1, ... and advances pos
        by n (0-d tensor, n <= P). Entries of path at and after n are padding. All rows are read before one is written."""
        rows = self.kv.index_select(4, self.pos + path)
        self.kv.index_copy_(4, self.pos + self.index[:len(path)], rows)
        self.pos += n


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c):
        super().__init__()
        self.n_head, self.gelu = c.n_head, c.gelu
        self.ln_1 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.attn_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.mlp_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x, layer=0, cache=None, slots=None, mask=None):
        B, T, d = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hd)
        k, v = qkv[1:] if cache is None else cache.append(layer, slots, qkv[1:])  # (B, nh, T or span, hd)
        y = F.scaled_dot_product_attention(qkv[0], k, v, attn_mask=mask, is_causal=cache is None)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, d))
        y = self.c_fc(self.ln_2(x))
        return x + self.mlp_proj(F.gelu(y, approximate="tanh") if self.gelu else F.relu(y).square())


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        assert c.n_embd % c.n_head == 0, "n_head has to divide n_embd"
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.max_seq_len, c.n_embd)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd, bias=c.bias)
        for name, p in self.named_parameters():  # GPT-2's initialisation; projections into the residual stream start smaller
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.n_layer) if name.endswith("proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        # Learned positions that start as sinusoids: heads that look one token back form in fewer steps.
        cos, sin = rope_angles(torch.arange(c.max_seq_len), c.n_embd)
        self.wpe.weight.data.copy_(0.02 * 2 ** 0.5 * torch.where(torch.arange(c.n_embd) < c.n_embd // 2, cos, sin))

    def embed(self, tokens):
        """Token embeddings, without positions: tokens (...) -> (..., d)."""
        return F.embedding(tokens, self.wte.weight)

    def head(self, h):
        """The LM head, tied to the token embedding: h (..., d) -> logits (..., V)."""
        return F.linear(h, self.wte.weight)

    def new_cache(self, extra=0, batch=1):
        """An empty cache for the whole context and `extra` slots, so that a draft at the end of the context still fits (or fewer
        slots where texts stay shorter). Decoding has a batch of 1; more texts of one length can be continued side by side."""
        c, w = self.config, self.wte.weight
        return KVCache(c.n_layer, c.n_head, c.n_embd // c.n_head, c.max_seq_len + extra, w.device, w.dtype, batch)

    def forward(self, idx, cache=None, tree=None, taps=()):
        """idx (B, T) -> logits (B, T, V), [h[l] (B, T, d) for l in taps].

        Without a cache: a plain causal pass over positions 0..T-1.
        With a cache (of batch B): the T tokens follow the cache.pos committed ones and their keys and values are written behind
        them; pos does not move (KVCache.keep commits). With a tree (verify.Topology of T nodes) token i stands at slot
        pos+i and at position pos+depth[i], and sees the committed prefix and its own ancestors.
        Positions beyond the context are clamped: such nodes compute rubbish that decoding never accepts.
        """
        T = idx.shape[1]
        slots = mask = None
        if cache is None:
            assert T <= self.config.max_seq_len, f"{T} tokens do not fit a context of {self.config.max_seq_len}"
            positions = torch.arange(T, device=idx.device)
        else:
            slots = cache.pos + cache.index[:T]
            if tree is None:
                positions, mask = slots, cache.mask(causal(T, idx.device, cache.kv.dtype))
            else:
                positions, mask = cache.pos + tree.depth, cache.mask(tree.ancestors.to(cache.kv.dtype))
            positions = positions.clamp(max=self.config.max_seq_len - 1)
        h = self.embed(idx) + self.wpe(positions)
        kept = {0: h}
        for l, block in enumerate(self.blocks):
            h = kept[l + 1] = block(h, l, cache, slots, mask)
        h = kept[len(self.blocks)] = self.ln_f(h)
        return self.head(h), [kept[l] for l in taps]


def by_columns(module):
    """Stores the matrices of a module's Linear layers column by column, as GPT-2's own files do; shapes stay. A few rows times such
    a matrix take about three quarters of the time on a CPU. Returns the module."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            m.weight.data = m.weight.data.mT.contiguous().mT
    return module


def load_gpt2(weights):
    """A GPT from GPT-2 weights in the published layout.

    weights: dict of name -> tensor, with or without the prefix "transformer.". The published projections are Conv1D, that
    is (in, out): they are transposed here. Raises KeyError for a name that is missing, ValueError without
    any layer, RuntimeError for a shape that does not fit.
    """
    w = {k.removeprefix("transformer."): v for k, v in weights.items()}
    n_layer = 1 + max(int(k.split(".")[1]) for k in w if k.startswith("h."))
    V, d = w["wte.weight"].shape
    config = GPTConfig(w["wpe.weight"].shape[0], V, n_layer, n_head=max(1, d // 64), n_embd=d, bias=True, gelu=True)
    names = {"ln_1": "ln_1", "attn.c_attn": "c_attn", "attn.c_proj": "attn_proj", "ln_2": "ln_2",
             "mlp.c_fc": "c_fc", "mlp.c_proj": "mlp_proj"}
    ours = {k: w[k] for k in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
    for l in range(n_layer):
        for theirs, name in names.items():
            weight = w[f"h.{l}.{theirs}.weight"]
            ours[f"blocks.{l}.{name}.weight"] = weight.t() if weight.dim() == 2 else weight
            ours[f"blocks.{l}.{name}.bias"] = w[f"h.{l}.{theirs}.bias"]
    model = GPT(config)
    model.load_state_dict(ours)
    return model
