"""The target: a small GPT (GPT-2's layout), its KV cache, and taps on its hidden states.

What is here and nowhere else:
  GPT.forward   one pass over tokens: a plain sequence, a continuation of a cache, or a tree of drafted tokens
  KVCache       preallocated keys and values; accepting a path of a tree moves rows, nothing is encoded twice
  rotate        rotary positions, which the drafters use (the target's own positions are learned)

Notation: L layers, d = n_embd, V = vocab_size, nh = n_head, hd = d / nh, N nodes in a draft.
  h[0] = embedding, h[l] = output of block l, h[L] = after the final norm: the direct input of the LM head.
Sources: GPT-2 (Radford et al. 2019), nanoGPT; tree attention: SpecInfer (arXiv 2305.09781, section 4.2).
"""
import functools
import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    max_seq_len: int = 256  # the context: positions 0..255
    vocab_size: int = 512
    n_layer: int = 24       # deep and narrow: a draft layer has to be cheap beside the target
    n_head: int = 2
    n_embd: int = 128
    bias: bool = False      # GPT-2 has biases in every Linear and LayerNorm
    gelu: bool = False      # GPT-2's activation; relu² (So et al. 2109.08668) takes a fraction of its time


def rope_angles(positions, head_dim, dtype=torch.float32, base=10000.0):
    """Rotary positions (Su et al. 2104.09864), for rotate: (..., T) -> cos and signed sin, (2, ..., T, hd)."""
    half = head_dim // 2
    angle = positions[..., None] * base ** (-torch.arange(half, device=positions.device) / half)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(dtype)


def rotate(x, angles):
    """x (..., T, hd) turned to its positions by the angles of rope_angles."""
    return torch.addcmul(x * angles[0], x.roll(x.shape[-1] // 2, -1), angles[1])


@functools.lru_cache
def causal(n, device, dtype):
    """(n, n) additive mask: 0 at and below the diagonal, -inf above."""
    return torch.full((n, n), -math.inf, device=device, dtype=dtype).triu(1)


class KVCache:
    """Keys and values of `pos` committed tokens, in buffers whose shape never changes.

    kv (n_layer, 2, 1, nh, slots, hd); pos, a 0-d tensor on the device. Rows at and beyond pos are rejected or
    unwritten: they are masked, and overwritten by the next pass. A pass attends to the first `attended` slots: on CUDA
    to all (static shapes, so that a pass can be captured in a graph), on a CPU only to as many as the text needs.
    """

    def __init__(self, n_layer, n_head, head_dim, slots, device=None, dtype=None):
        slots = (slots + 63) // 64 * 64  # attention copies masks of other widths on every call
        self.kv = torch.zeros(n_layer, 2, 1, n_head, slots, head_dim, device=device, dtype=dtype)
        self.pos = torch.zeros((), dtype=torch.long, device=device)
        self.index = torch.arange(slots + 1, device=device)
        self.attend_up_to(1 if self.kv.is_cpu else slots)

    def attend_up_to(self, n):
        """Lets passes attend to the first n slots at least (rounded up, so that shapes change rarely)."""
        self.attended = (n + 63) // 64 * 64
        self.views = [kv[:, :, :, :self.attended].unbind() for kv in self.kv]

    def append(self, layer, slots, kv):
        """Writes kv (2, 1, nh, T, hd) at slots (T,); returns all keys and values, (1, nh, attended, hd) each."""
        self.kv[layer].index_copy_(3, slots, kv)
        return self.views[layer]

    def mask(self, ancestors):
        """ancestors (R, T): 0 where row i may see row j behind pos, -inf elsewhere -> (R, attended): the committed
        prefix is visible to every row; what lies beyond those T rows, to none."""
        T = ancestors.shape[-1]
        if self.kv.is_cpu and self.attended < int(self.pos) + T:
            self.attend_up_to(int(self.pos) + T)
        padded = F.pad(ancestors, (1, 1), value=-math.inf)  # column 0 prefix, 1..T new rows, T+1 beyond
        padded[:, 0] = 0
        column = (self.index[1:self.attended + 1] - self.pos).clamp_(0, T + 1)
        return padded.index_select(1, column)

    def commit_path(self, path, n):
        """Commits n rows: moves those of path (P,), node numbers of the last pass, to pos, pos+1, ... and advances pos
        by n (0-d tensor, n <= P); path is padding from n on. Rows are read before any is written: they overlap."""
        rows = self.kv.index_select(4, self.pos + path)
        self.kv.index_copy_(4, self.pos + self.index[:len(path)], rows)
        self.pos += n


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c):
        super().__init__()
        d = c.n_embd
        self.n_head, self.gelu = c.n_head, c.gelu
        self.ln_1 = nn.LayerNorm(d, bias=c.bias)
        self.c_attn = nn.Linear(d, 3 * d, bias=c.bias)
        self.attn_proj = nn.Linear(d, d, bias=c.bias)
        self.ln_2 = nn.LayerNorm(d, bias=c.bias)
        self.c_fc = nn.Linear(d, 4 * d, bias=c.bias)
        self.mlp_proj = nn.Linear(4 * d, d, bias=c.bias)

    def forward(self, x, layer=0, cache=None, slots=None, mask=None):
        B, T, d = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hd)
        k, v = qkv[1:] if cache is None else cache.append(layer, slots, qkv[1:])
        y = F.scaled_dot_product_attention(qkv[0], k, v, attn_mask=mask, is_causal=cache is None)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, d))
        y = self.c_fc(self.ln_2(x))
        y = F.gelu(y, approximate="tanh") if self.gelu else F.relu(y).square()
        return x + self.mlp_proj(y)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        assert c.n_embd % c.n_head == 0, "n_head has to divide n_embd"
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.max_seq_len, c.n_embd)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd, bias=c.bias)
        init_weights(self, c.n_layer)
        # Learned positions that start as sinusoids: heads that look one token back form in fewer steps.
        cos, sin = rope_angles(torch.arange(c.max_seq_len), c.n_embd)
        self.wpe.weight.data.copy_(0.02 * 2 ** 0.5 * torch.where(torch.arange(c.n_embd) < c.n_embd // 2, cos, sin))

    def head(self, h):
        """The LM head, tied to the token embedding: h (..., d) -> logits (..., V)."""
        return F.linear(h, self.wte.weight)

    def new_cache(self, extra=0):
        """An empty cache for the whole context and `extra` rows, so that a draft at its end still fits."""
        c, w = self.config, self.wte.weight
        return KVCache(c.n_layer, c.n_head, c.n_embd // c.n_head, c.max_seq_len + extra, w.device, w.dtype)

    def forward(self, idx, cache=None, tree=None, taps=()):
        """idx (B, T) -> logits (B, T, V), [h[l] (B, T, d) for l in taps].

        Without a cache: a plain causal pass over positions 0..T-1.
        With a cache (B = 1): the T tokens follow the cache.pos committed ones, and their keys and values are
        written behind them; pos does not move (Session does). With a tree (verify.Topology of T nodes) token i
        stands at slot pos+i and at position pos+depth[i], and sees the committed prefix and its own ancestors.
        Positions beyond the context are clamped: a rule may accept such nodes, Session.record_tokens cuts them off.
        """
        T, limit = idx.shape[1], self.config.max_seq_len
        slots = mask = None
        if cache is None:
            assert T <= limit, f"{T} tokens do not fit a context of {limit}"
            positions = torch.arange(T, device=idx.device)
        else:
            slots, dtype = cache.pos + cache.index[:T], cache.kv.dtype
            mask = cache.mask(causal(T, idx.device, dtype) if tree is None else tree.ancestors.to(dtype))
            positions = (slots if tree is None else cache.pos + tree.depth).clamp(max=limit - 1)
        h = [self.wte(idx) + self.wpe(positions)]
        for l, block in enumerate(self.blocks):
            h.append(block(h[-1], l, cache, slots, mask))
        h[-1] = self.ln_f(h[-1])
        return self.head(h[-1]), [h[l] for l in taps]


def init_weights(module, n_layer):
    """GPT-2's initialisation; the projections into the residual stream of n_layer layers start smaller."""
    for name, p in module.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("proj.weight") else 0.02
            nn.init.normal_(p, std=std)


def column_major(module):
    """Stores the matrices of a module's Linear layers column by column, as GPT-2's own files do; shapes stay. On a
    CPU a few rows times such a matrix take about three quarters of the time. Returns the module."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            m.weight.data = m.weight.data.mT.contiguous().mT
    return module


def load_gpt2(weights):
    """A GPT from published GPT-2 weights: {name: tensor}, with or without the prefix "transformer."; there projections
    are (in, out) and heads 64 wide. Raises KeyError (a missing name), ValueError (no layers), RuntimeError (shapes)."""
    w = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    n_layer = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    V, d = w["wte.weight"].shape
    model = GPT(GPTConfig(len(w["wpe.weight"]), V, n_layer, d // 64, d, bias=True, gelu=True))
    ours = {}
    for name, tensor in w.items():
        if name.startswith("h.") and tensor.dim() == 2:
            tensor = tensor.t()
        name = re.sub(r"^h\.", "blocks.", name).replace("mlp.c_fc", "c_fc").replace("attn.c_attn", "c_attn")
        ours[re.sub(r"(attn|mlp)\.c_proj", r"\1_proj", name)] = tensor
    model.load_state_dict({name: ours[name] for name in model.state_dict()})
    return model
