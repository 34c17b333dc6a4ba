"""Mutation check, run on demand: applies small faults one at a time to a copy of the repository and asks whether the tests notice.

    python tests/mutate.py                 all faults, about half an hour on two cores
    python tests/mutate.py verify dflash   those in files whose names begin like this
    python tests/mutate.py --list          only checks that every fault still applies

All are meant to change behaviour: a fault that survives shows a missing test.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_methods.py", "tests/test_model.py", "tests/test_verify.py"]

FAULTS = [  # file, what stands there (once), the fault
    # positions, masks, cache
    ("model.py", "positions, mask = cache.pos + tree.depth, cache", "positions, mask = slots, cache"),
    ("model.py", "positions.clamp(max=self.config.max_seq_len - 1)", "positions.clamp(max=self.config.max_seq_len)"),
    ("model.py", "padded[:, 0] = 0", "padded[:, 0] = -math.inf"),
    ("model.py", "self.index[1:self.span + 1] - self.pos)", "self.index[:self.span] - self.pos)"),
    ("model.py", "F.pad(ancestors, (1, 1), value=-math.inf)", "F.pad(ancestors, (1, 1), value=0.0)"),
    ("model.py", "self.pos += n", "self.pos += n - 1"),
    ("model.py", "rows = self.kv.index_select(4, self.pos + path)", "rows = self.kv.index_select(4, self.pos + self.index[:len(path)])"),
    ("model.py", "self.kv.index_copy_(4, self.pos + self.index[:len(path)], rows)", "self.kv.index_copy_(4, self.pos + 1 + self.index[:len(path)], rows)"),
    ("model.py", ".triu(1)", ".triu(2)"),
    ("model.py", "(n + 63) // 64 * 64", "n // 64 * 64"),
    ("model.py", "h = kept[l + 1] = block(", "h = kept[l] = block("),
    ("model.py", "h = kept[len(self.blocks)] = self.ln_f(h)", "h = self.ln_f(h)"),
    ("model.py", "slots = cache.pos + cache.index[:T]", "slots = cache.pos + 1 + cache.index[:T]"),
    ("model.py", "x.roll(x.shape[-1] // 2, -1)", "x.roll(1, -1)"),
    ("model.py", "weight.t() if weight.dim() == 2 else weight", "weight"),
    # the rules
    ("verify.py", "* q < p) & (q > 0)", "* q < p)"),
    ("verify.py", "* q < p) & (q > 0)", "* q <= p) & (q > 0)"),
    ("verify.py", "u, right=True)", "u)"),
    ("verify.py", "residual = norm((p[:-1] - q).clamp_min(0), p[:-1])\n    return path", "residual = p[:-1]\n    return path"),
    ("verify.py", "index_select(0, n[None] - 1))[0]", "index_select(0, n[None] - 2))[0]"),
    ("verify.py", "(weight[:-1, None] * p[1:-1] - q[1:])", "(p[1:-1] - q[1:])"),
    ("verify.py", "(steps - steps.cummax(0).values.clamp_min(0)).exp()", "steps.exp().clamp_max(1)"),
    ("verify.py", "surplus + (1 - weight[:-1])", "surplus"),
    ("verify.py", "residual = norm((scale * p[:-1] - q).clamp_min(0), p[:-1])", "residual = norm((p[:-1] - q).clamp_min(0), p[:-1])"),
    ("verify.py", "torch.arange(1, len(x) + 1, device=x.device), 0).amax()", "torch.arange(1, len(x) + 1, device=x.device), 0).amin()"),
    ("verify.py", "norm((r - q).clamp_min(0), r), r)", "r, r)"),
    ("verify.py", "norm((r - q).clamp_min(0), r), r)", "(r - q).softmax(-1), r)"),
    ("verify.py", "if not tree.replacement:", "if tree.replacement:"),
    ("verify.py", "                q = norm(q, q)\n", ""),
    ("verify.py", "trying = (child > 0) & (step == t.node)", "trying = (child > 0)"),
    ("verify.py", "& (step[t.parent] == t.parent) & chosen", "& chosen"),
    ("verify.py", "else ~t.drawn & (t.node > 0)", "else (t.node > 0)"),
    ("verify.py", "y.index_select(0, path[-1:])[0]", "y[0]"),
    ("verify.py", "n = 1 + accepted.long().cumprod(0).sum()", "n = 1 + accepted.long().sum()"),
    ("verify.py", "for _ in range(tree.topology.max_depth):", "for _ in range(tree.topology.max_depth - 1):"),
    ("verify.py", "logits < logits.topk(top_k)", "logits <= logits.topk(top_k)"),
    ("verify.py", "ordered.cumsum(-1) - ordered >= top_p", "ordered.cumsum(-1) >= top_p"),
    ("verify.py", "self.depth = reach.sum(1).long() - 1", "self.depth = reach.sum(1).long()"),
    ("verify.py", "& (self.node < self.node[:, None])", "& (self.node > self.node[:, None])"),
    # the loop
    ("verify.py", "path, n, bonus = rule(self.law(logits), tree)", "path, n, bonus = rule(logits.softmax(-1), tree)"),
    ("verify.py", "logits.argmax(-1) if self.temperature == 0 else sample(self.law(logits))",
     "logits.argmax(-1) if self.temperature == 0 else sample(logits.softmax(-1))"),
    ("verify.py", "self.cache.pos += n                            #", "self.cache.pos += n - 1                        #"),
    ("verify.py", "h = [x.index_select(0, path) for x in h]", "pass"),
    ("verify.py", "kept = kept[:i + 1]", "kept = kept[:i]"),
    ("verify.py", "kept = new[:self.room - len(self.record.tokens)]", "kept = new"),
    ("verify.py", "[t for t in new if t >= 0]", "[t for t in new if t > 0]"),
    ("verify.py", "self.room = min(max_new_tokens, limit - len(prompt))", "self.room = max_new_tokens"),
    ("verify.py", "if len(kept) == len(new) else None", "if kept else None"),
    ("verify.py", "reached = [sum(a >= i and d > i", "reached = [sum(d > i"),
    # EAGLE
    ("eagle1.py", "tokens = idx[:, 1:]", "tokens = idx[:, :-1]"),
    ("eagle1.py", "new.tokens[None, 1:]", "new.tokens[None, :-1]"),
    ("eagle1.py", "(self.cache.pos + depth - 1)[None]", "(self.cache.pos + depth)[None]"),
    ("eagle1.py", "f_hat[0].index_select(0, new.n[None] - 1)", "f_hat[0][-1:]"),
    ("eagle1.py", "self.cache.pos += new.n", "self.cache.pos += new.n - 1"),
    ("eagle1.py", "sees = torch.cat([sees.index_select(0, parent), self", "sees = torch.cat([sees.index_select(0, parent * 0), self"),
    ("eagle1.py", "index_copy(0, self.expanded, laws)", "index_copy(0, torch.arange(len(laws)), laws)"),
    ("eagle1.py", "p = logits[:, 1:].float()", "p = logits[:, :-1].float()"),
    ("eagle2.py", "row = best // some", "row = best % some"),
    ("eagle2.py", "best = row * k + best % some", "best = row * some + best % some"),
    ("eagle2.py", "children_value = value[:, None] + log_c", "children_value = log_c"),
    ("eagle2.py", "some = self.drawn or k", "some = k"),
    ("eagle2.py", "logits.scatter(1, torch.cat(first, 1), float(\"-inf\")).topk", "logits.topk"),
    ("eagle2.py", "values = values.masked_fill(drawn, math.inf)", "pass"),
    ("eagle2.py", "values.sort(descending=True, stable=True).indices[:N - 1] + 1",
     "len(values) - values.flip(0).sort(descending=True, stable=True).indices[:N - 1]"),  # of equals the last
    ("eagle2.py", "frontier, number = number + best, number + children_value.numel()", "frontier, number = number + best, number + len(row)"),
    ("eagle2.py", "index_copy(0, place[expanded], laws)", "index_copy(0, torch.arange(len(laws)), laws)"),
    ("eagle3.py", "self.angles(torch.arange(i, i + n", "self.angles(torch.arange(0, n"),
    ("eagle3.py", "idx[:, 1 + i:], angles", "idx[:, 1:1 + n], angles"),
    ("eagle3.py", "prefix = causal(n, q.device, q.dtype)", "prefix = torch.zeros(n, n, dtype=q.dtype)"),
    ("eagle3.py", "[itself] * (len(keys) - 1)", "[prefix] * (len(keys) - 1)"),
    ("eagle3.py", "p[:, 1 + i:] * log_q", "p[:, i:-1] * log_q"),
    ("eagle3.py", "return target.head(self.norm(a))", "return target.head(a)"),
    ("eagle3.py", "[F.layer_norm(x, x.shape[-1:]) for x in h]", "h"),
    ("eagle3.py", "max(self.size, 2 + args.depth * self.beam)", "self.size"),
    ("eagle2.py", "1 + drawn * (1 +", "drawn * (1 +"),
    # DFlash
    ("dflash.py", ">= anchor.repeat_interleave", "> anchor.repeat_interleave"),
    ("dflash.py", "x.unflatten(2, (-1, B))", "x.unflatten(2, (B, -1)).transpose(2, 3)"),
    ("dflash.py", "idx[:, None].expand(-1, A, -1).gather(2, slots[:, :, 1:])", "idx[:, None].expand(-1, A, -1).gather(2, slots[:, :, :-1])"),
    ("dflash.py", "self.cache.pos.copy_(new.start + new.n)", "self.cache.pos.copy_(new.start + new.n - 1)"),
    ("dflash.py", "angles, mask = self.table.index_select(1, slots), self", "angles, mask = self.table.index_select(1, slots + 1), self"),
    ("dflash.py", "sample(q)])", "q.argmax(-1)])"),
    ("dflash.py", "heapq.heappush(heap, (cost - score[slot + 1][0], slot + 1, 0, len(tokens)))",
     "heapq.heappush(heap, (cost - score[slot + 1][0], slot + 1, 0, above))"),
    ("dflash2.py", "before = F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)", "before = F.pad(x[:, :-1], (0, 0, 1, 0))"),
    ("dflash2.py", "before = torch.cat([anchor.expand(1, K), candidates[:-1]])", "before = candidates"),
    ("dflash2.py", "w = w[self.cache.index[:len(w)], path[:, 0]]", "w = w[self.cache.index[:len(w)], path[:, 0].roll(-1)]"),
    ("dflash2.py", "step[s:].gather(1, step[:-s])", "step[:-s].gather(1, step[s:])"),
    ("dflash2.py", "self.convs[0](y, after)", "self.convs[0](y, before)"),
    ("dflash2.py", "F.pad(step[:-1, :1], (0, 0, 1, 0))", "torch.zeros_like(step[:, :1])"),
    ("dflash2.py", "others * w[:, K:]", "rest * w[:, K:]"),
    ("dflash2.py", "torch.cat([anchor.expand(1, K + 1), tokens[:-1]])", "torch.cat([anchor.expand(1, K + 1), tokens[1:]])"),
    ("dflash2.py", "candidates, before) / T", "candidates, before)"),
    ("dflash2.py", "torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)", "torch.cat([p, p.sum(-1, keepdim=True)], -1)"),
]


def main():
    chosen = [a for a in sys.argv[1:] if not a.startswith("-")]
    faults = [f for f in FAULTS if not chosen or any(f[0].startswith(c) for c in chosen)]
    for file, old, _ in faults:
        assert (ROOT / file).read_text().count(old) == 1, f"{file}: {old!r} does not stand there once"
    if "--list" in sys.argv:
        print(f"{len(faults)} faults apply")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for copy in (copies := [Path(folder) / name for name in "ab"]):
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", "__pycache__", ".pytest_cache"))
        killed = list(pool.map(lambda fault: tested(copies, *fault), faults))
    print(f"{sum(killed)} of {len(faults)} killed")
    sys.exit(not all(killed))


def fails(copy, tests):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=900, check=False).returncode not in (0, 5)
    except subprocess.TimeoutExpired:
        return True


def tested(copies, file, old, new):
    """Whether the tests notice a fault, in one of the copies that are free."""
    copy = copies.pop()
    source = (copy / file).read_text()
    (copy / file).write_text(source.replace(old, new))
    stem = file.split(".")[0]
    everything = sorted(TESTS, key=lambda t: stem not in t)
    nearest = everything[:1] if stem in everything[0] else [TESTS[0], "-k", stem]  # the likeliest to notice first
    killed = any(fails(copy, tests) for tests in (nearest, everything))
    (copy / file).write_text(source)
    copies.append(copy)
    print(f"{'killed  ' if killed else 'SURVIVED'} {file}: {old!r} -> {new!r}", flush=True)
    return killed


if __name__ == "__main__":
    main()
