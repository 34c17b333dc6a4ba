"""Data, tokenizer, optimizer, checkpoints: what they promise, and one line where something is wrong."""
import dataclasses
import json
import random
import re
import subprocess
import sys

import pytest
import tiktoken
import torch
from helpers import ROOT, tiny

import train
import verify

ENC = train.encoding({"ranks": [chr(b) for b in range(256)]})  # bytes alone


# ---- Data ----
def test_problems_are_right():
    """Every calculation that a solution states is true, and its answer is its last number."""
    for question, solution, answer in train.math_texts(600, 5, False):
        for left, right in re.findall(r"((?:-?\d+ [-+*/] )+\d+) = (-?\d+)", solution):
            assert eval(left) == int(right), (question, left, right)
        assert train.answer_of(solution) == answer == re.findall(r"-?\d+", solution)[-1]
        assert solution.endswith(f"\nAnswer: {answer}\n")
    assert train.answer_of("no end") is None


def test_problems_are_split():
    """No question stands on both sides; every kind of problem occurs on both."""
    sides = [[q for q, _, _ in train.math_texts(n, 3, held)] for n, held in ((3000, False), (300, True))]
    assert not set(sides[0]) & set(sides[1]) and len(set(sides[1])) == 300
    for start in ("Add", "Multiply", "Solve", "What is", "A sequence"):
        assert all(any(q.startswith(f"Problem: {start}") for q in side) for side in sides)


def test_corpus_is_split_by_file(monkeypatch):
    """No document of code or prose is on both sides, and held-out problems are not among those trained on."""
    corpus = train.read_corpus()
    assert list(corpus) == ["math", "code", "prose"]
    for domain, least in (("math", 300), ("code", 20), ("prose", 50)):
        held = set(corpus[domain]["held"])
        assert len(held) > least and len(corpus[domain]["train"]) > 3 * len(held)
        shared = held & set(corpus[domain]["train"])
        assert all(len(text) < 400 for text in shared) or domain == "prose"
        assert domain == "prose" or not shared - {""}


def test_no_sources(monkeypatch, tmp_path, capsys):
    """A standard library without sources is said on stderr."""
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(train.read_corpus()) == ["math"] and "no Python sources" in capsys.readouterr().err


def test_data_option(tmp_path):
    """A file is cut at 7/8, a folder split by file; bytes that are no UTF-8 are replaced; nothing to read ends in one line."""
    one = tmp_path / "one.txt"
    one.write_bytes(b"abcdefg\xff" * 10)
    corpus = train.read_corpus(one)
    assert len(corpus["text"]["train"][0]) == 70 and "\ufffd" in corpus["text"]["train"][0]
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"text {i}", encoding="utf-8")
    assert len(train.read_corpus(tmp_path)["text"]["held"]) == 2
    one.write_text(" \n", encoding="utf-8")
    for path, message in ((one, "holds no text"), (tmp_path / "none", "No such file")):
        with pytest.raises(SystemExit, match=message):
            train.read_corpus(path)


def text_data(seq_len=16, n=400):
    words = [random.Random(i).choice(("one two\n", "three\n", "four five six\n")) for i in range(n)]
    return train.Data({"text": {"train": words[:-40], "held": words[-40:]}}, ENC, seq_len)


def test_batches_are_a_function_of_the_step():
    data = text_data()
    assert torch.equal(data.batch(3, 4), data.batch(3, 4)) and data.batch(3, 4).shape == (4, 16)
    assert not torch.equal(data.batch(3, 4), data.batch(4, 4))
    assert not torch.equal(data.batch(3, 4, side="held"), data.batch(3, 4))
    with pytest.raises(SystemExit, match="fewer than one sequence"):
        text_data(seq_len=5000)


def test_long_runs_of_one_character():
    assert len(train.Data({"text": {"train": [" " * 1_000_001], "held": ["abc " * 99]}}, ENC, 16).tokens["text", "train"]) > 99


# ---- Tokenizer ----
def test_bpe_merges_the_most_frequent_pair():
    """Against a count over the whole text, merge by merge; any bytes survive a round trip."""
    text = "low lower lowest newer new wide 1234 \u00fc\u4f60 " * 3
    ranks = train.train_bpe(text, 280)
    words = [[bytes([b]) for b in w.encode()] for w in re.findall(train.PATTERN, text)]
    for piece, rank in list(ranks.items())[256:]:
        pairs = {}
        for w in words:
            for pair in zip(w, w[1:]):
                pairs[pair] = pairs.get(pair, 0) + 1
        assert piece in {a + b for (a, b), n in pairs.items() if n == max(pairs.values())} and rank == ranks[piece]
        for w in words:
            i = 0
            while i < len(w) - 1:
                if w[i] + w[i + 1] == piece:
                    w[i:i + 2] = [piece]
                i += 1
    enc = train.encoding({"ranks": [p.decode("latin-1") for p in ranks]})
    assert enc.n_vocab == len(ranks) + 1 and enc.eot_token == len(ranks)
    for sample in (text, "\x00\ud7ff\t \n\n  x", "def f(x):\n    return x  # ok\n"):
        assert enc.decode(enc.encode_ordinary(sample)) == sample


# ---- Optimizer ----
def test_muon_orthogonalises():
    """The first update has singular values near 1, whatever the gradient's are; decay shrinks the weights."""
    torch.manual_seed(0)
    for shape in ((8, 24), (24, 8), (8, 8)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape) @ torch.diag(torch.logspace(0, -1, shape[1]))
        train.Muon([p], lr=1.0).step()
        s = torch.linalg.svdvals(p.data) / max(1, shape[0] / shape[1]) ** 0.5
        assert 0.5 < s.min() and s.max() < 1.3
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.zeros(4, 4)
    train.Muon([p], lr=0.1, decay=0.5).step()
    assert torch.allclose(p.data, torch.full((4, 4), 0.95))


def test_schedule():
    """Warmup over 4 %, then linear decay to 10 %; matrices go to Muon, embeddings and norms to Adam."""
    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = train.Optimizer(net, 0.6, 100)
    assert [len(part.param_groups[0]["params"]) for part, _ in optimizer.parts] == [1, 4]
    rates = []
    for step in range(100):
        net(torch.tensor([1])).sum().backward()
        optimizer.step(step)
        rates.append([part.param_groups[0]["lr"] for part, _ in optimizer.parts])
    muon, adam = zip(*rates)
    assert muon[:4] == pytest.approx([0.15, 0.3, 0.45, 0.6]) and muon[-1] == pytest.approx(0.06, abs=0.01)
    assert [m / a for m, a in rates] == pytest.approx([6] * 100)


# ---- Checkpoints ----
def written(tmp_path, **more):
    target = tiny(300, 64).float()
    path = tmp_path / "target.pt"
    checkpoint = {"name": "target", "model": target.state_dict(), "config": dataclasses.asdict(target.config), "args": {}, "step": 0,
                  "tokenizer": {"ranks": [chr(b) for b in range(256)]}, "optimizer": []}
    train.save(path, {**checkpoint, **more})
    return target, path


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    _, path = written(tmp_path)
    before = path.read_bytes()

    def full(_, file):
        with open(file, "wb") as f:
            f.write(b"half")
        raise RuntimeError("[enforce fail] No space left on device\nand more")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match="could not be written: .*No space left on device$"):
        train.save(path, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_foreign_checkpoints(tmp_path):
    """Missing, cut short, foreign, another name, unfinished, of another network: one line each."""
    _, path = written(tmp_path)
    short, foreign = tmp_path / "short.pt", tmp_path / "foreign.pt"
    short.write_bytes(path.read_bytes()[:2000])
    torch.save({"weights": 1}, foreign)
    for call, message in ((lambda: train.load(tmp_path / "none.pt", "target"), "no checkpoint"),
                          (lambda: train.load(short, "target"), "cut short"),
                          (lambda: train.load(foreign, "target"), "not a .*checkpoint of this project"),
                          (lambda: train.load(path, "dflash"), "holds a target checkpoint"),
                          (lambda: train.load_target(written(tmp_path, args={"steps": 9})[1], "cpu"), "--resume"),
                          (lambda: train.load_target(written(tmp_path, model={})[1], "cpu"), "another version")):
        with pytest.raises(SystemExit, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_export_halves_and_loads(tmp_path):
    target, path = written(tmp_path)
    train.export(path, tmp_path / "half.pt", "target")
    loaded = train.load_target(tmp_path / "half.pt", "cpu")
    assert (tmp_path / "half.pt").stat().st_size < 0.6 * path.stat().st_size
    for a, b in zip(target.parameters(), loaded.parameters()):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)
    assert loaded.fingerprint != train.load_target(path, "cpu").fingerprint == train.load_target(path, "cpu").fingerprint


def test_a_drafter_names_its_target(tmp_path):
    """A drafter of another target, and one of another shape, are refused."""
    import dflash
    _, path = written(tmp_path)
    target, args = train.load_target(path, "cpu"), dflash.Args(block_size=4, ckpt=str(tmp_path / "dflash.pt"))
    args.name = "dflash"
    drafter = dflash.Drafter(target.config, args)
    for named, layers, message in ((target.fingerprint, 3, None), ("0" * 16, 3, "another target"), (target.fingerprint, 2, "settings")):
        train.save(args.ckpt, {"name": "dflash", "model": drafter.state_dict(), "target": named, "args": {}, "step": 1})
        args.n_draft_layer = layers
        if message is None:
            train.load_drafter(dflash, args, target)
        else:
            with pytest.raises(SystemExit, match=message):
                train.load_drafter(dflash, args, target)


def test_gpt2_files(tmp_path, monkeypatch):
    """Weights in the published layout; the number of heads is config.json's, and is not guessed."""
    d, V, w = 128, 257, {}
    shapes = {"ln_1": (d,), "attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "ln_2": (d,), "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    for name, shape in shapes.items():
        w |= {f"h.0.{name}.weight": torch.randn(shape), f"h.0.{name}.bias": torch.randn(shape[-1])}
    w |= {"wte.weight": torch.randn(V, d), "wpe.weight": torch.randn(32, d), "ln_f.weight": torch.ones(d), "ln_f.bias": torch.ones(d)}
    torch.save({"transformer." + k: v for k, v in w.items()}, tmp_path / "weights.bin")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: ENC)
    args = train.Args(init=str(tmp_path / "weights.bin"), ckpt=str(tmp_path / "target.pt"))
    with pytest.raises(SystemExit, match="config.json"):
        train.init_target(args)
    (tmp_path / "config.json").write_text('{"n_head": 4}', encoding="utf-8")
    train.init_target(args)
    target = train.load_target(args.ckpt, "cpu")
    assert target.config.n_head == 4 and target.config.gelu and target.config.bias
    assert torch.equal(target.blocks[0].c_fc.weight, w["h.0.mlp.c_fc.weight"].T)


# ---- Training ----
def run_of(tmp_path, steps, resume=False, lr=0.02, stop_after=None, name="mine.pt"):
    """A tiny training of a toy, by its own train."""
    import toy
    _, target = written(tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five\n" * 200, encoding="utf-8")
    args = toy.Args(steps=steps, batch_size=2, seq_len=16, lr=lr, target=str(target), ckpt=str(tmp_path / name), resume=resume,
                    data=str(tmp_path / "text.txt"))
    args.name = "toy"
    toy.train(args)
    return torch.load(args.ckpt, weights_only=True)


def test_resume_goes_on_exactly(tmp_path, monkeypatch):
    """Interrupted after step 4 and resumed: the weights of a run that was not."""
    whole = run_of(tmp_path, 9, name="whole.pt")
    real, handlers = train.signal.signal, []
    monkeypatch.setattr(train.signal, "signal", lambda which, handler: handlers.append(handler))
    log = train.Run.log
    monkeypatch.setattr(train.Run, "log", lambda self, loss: (log(self, loss), handlers[0]() if len(self.losses) == 4 else None))
    with pytest.raises(SystemExit, match="interrupted after step 4"):
        run_of(tmp_path, 9)
    monkeypatch.undo()
    assert train.signal.signal is real and torch.load(tmp_path / "mine.pt", weights_only=True)["step"] == 4
    resumed = run_of(tmp_path, 9, resume=True)
    assert resumed["step"] == 9 and all(torch.equal(resumed["model"][k], w) for k, w in whole["model"].items())
    with pytest.raises(SystemExit, match="ask for more"):
        run_of(tmp_path, 9, resume=True)


def test_a_loss_that_is_no_number_is_not_saved(tmp_path, monkeypatch):
    run_of(tmp_path, 3)
    before = (tmp_path / "mine.pt").read_bytes()
    monkeypatch.setattr(train.Run, "log", lambda self, loss: self.losses.append(loss.detach() * float("nan")))
    with pytest.raises(SystemExit, match="smaller --lr"):
        run_of(tmp_path, 12, resume=True)
    assert (tmp_path / "mine.pt").read_bytes() == before


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """torchrun with two gloo processes: the weights of one process on the whole batch, up to rounding."""
    one = run_of(tmp_path, 3, name="one.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "tests" / "toy.py"),
               "--train", "--steps", "3", "--batch_size", "2", "--seq_len", "16", "--target", str(tmp_path / "target.pt"),
               "--ckpt", str(tmp_path / "two.pt"), "--data", str(tmp_path / "text.txt"), "--prompts", "1", "--max_new_tokens", "2"]
    env = {**train.os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    assert all(torch.allclose(two["model"][k], w, atol=1e-4) for k, w in one["model"].items())


# ---- What is shown ----
def record_of(text, accepted):
    tokens = ENC.encode_ordinary(text)
    rounds, at = [], 1
    while at < len(tokens):
        kept = min(accepted + 1, len(tokens) - at)
        rounds.append(verify.Round(accepted, accepted + 1, accepted, kept))
        at += kept
    return verify.Record(tokens, rounds)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_marked_text_is_the_decoded_text(accepted):
    """Characters of several tokens stay whole, drafted and supplied tokens alternating inside them; a cut one is replaced."""
    for text in ("Gr\u00fc\u00dfe, \u4f60\u597d", "abc"):
        shown = train.marked(record_of(text, accepted), ENC)
        assert shown.replace("[", "").replace("]", "") == text and ("[" in shown) == (accepted > 0)
    cut = record_of("\u4f60\u597d", accepted)
    cut.tokens.pop()
    assert train.marked(cut, ENC).replace("[", "").replace("]", "") == "\u4f60\ufffd"


def test_draw(capsys):
    """The accepted path of a tree is marked, depth first."""
    a, b, c, d = (ENC.encode_ordinary(x)[0] for x in "abcd")
    draft = [0, a, b, c, d], [-1, 0, 0, 1, 1]
    train.draw(verify.Record([0, a, d, b], [verify.Round(2, 5, 2, 3, draft)]), ENC)
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if "'" in x][-4:] == ["+ 'a'", "    'c'", "  + 'd'", "  'b'"]


def test_report(tmp_path):
    """The numbers are those of the records, greedy equality among them, and they fit into one line of JSON."""
    import toy
    _, path = written(tmp_path)
    target = train.load_target(path, "cpu", torch.float64)
    args = toy.Args(prompts=2, max_new_tokens=5)
    args.method = "toy"
    drafter = toy.Drafter(target.config, args).double()
    n = train.benchmark(lambda *a, **kw: toy.generate(target, drafter, *a, **kw), args, target, text_data(64))
    greedy, sampled = n["results"]
    assert greedy["equal"] == [2, 2] and (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert greedy["domains"]["text"]["tau"] >= 1 and "\n" not in json.dumps(n)
