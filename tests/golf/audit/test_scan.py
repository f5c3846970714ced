"""The static scan: finds what is wrong in the corpus where it is, whatever it is called, and accuses nobody else."""

import ast
import base64
import lzma
from pathlib import Path

import pytest

from birdie.golf.audit.rules import BYTES, NORMALISED, ONE_PASS, SCORE_FIRST, VALIDATION, Finding
from birdie.golf.audit.scan import JUDGED, scan
from birdie.golf.audit.unpack import unpacked
from birdie.golf.code_size import source_files
from tests.golf.audit.scripts import ILLEGAL, LEGAL, Script

ROOT = Path(__file__).resolve().parents[3]


def failures(source: str | bytes) -> list[Finding]:
    data = source.encode() if isinstance(source, str) else source
    return [each for each in scan(data, "x.py") if each.verdict == "fail"]


def test_the_corpus_is_what_it_should_be() -> None:
    assert len(ILLEGAL) >= 12
    assert len(LEGAL) >= 8
    assert all(each.scanned or each.probed for each in ILLEGAL)
    assert not any(each.scanned or each.probed for each in LEGAL)
    assert {rule for each in ILLEGAL for _, rule in each.scanned} >= {rule.name for rule in JUDGED}


@pytest.mark.parametrize("script", [each for each in ILLEGAL if each.scanned], ids=lambda each: each.path.stem)
def test_what_is_wrong_is_found_where_it_is(script: Script) -> None:
    found = failures(script.path.read_bytes())
    for line, rule in script.scanned:
        where = [each.line for each in found if each.rule.name == rule]
        assert any(abs(each - line) <= 1 for each in where), f"{rule} is broken at {line}, found at {where}"
        assert all(each.path == "x.py" and each.by == "scan" for each in found)


@pytest.mark.parametrize("script", LEGAL, ids=lambda each: each.path.stem)
def test_what_is_legal_is_not_accused(script: Script) -> None:
    assert failures(script.path.read_bytes()) == []


@pytest.mark.parametrize("script", LEGAL, ids=lambda each: each.path.stem)
def test_nothing_found_is_no_proof(script: Script) -> None:
    found = scan(script.path.read_bytes(), "x.py")
    assert {each.verdict for each in found} == {"unknown"}
    assert {each.rule for each in found} >= set(JUDGED)


@pytest.mark.slow
def test_our_own_code_is_not_accused() -> None:
    parts = ("score", "train", "data", "evaluation.py", "pipeline.py", "train_gpt.py", "calibration.py")
    ours = [path for path in source_files(ROOT / "train_gpt.py") if any(part in path.parts for part in parts)]
    assert len(ours) > 25
    for path in ours:
        assert failures(path.read_bytes()) == [], path


def test_packed_scripts_are_looked_through() -> None:
    inner = next(each for each in ILLEGAL if each.path.stem == "slot")
    packed = base64.b85encode(lzma.compress(inner.path.read_bytes())).decode()
    wrapped = f"import lzma as L,base64 as B\nexec(L.decompress(B.b85decode('{packed}')))\n"
    (found,) = [each for each in failures(wrapped) if each.rule == SCORE_FIRST]
    assert found.line == inner.scanned[0][0]
    assert found.evidence.startswith("in the source it unpacks")


@pytest.mark.parametrize("source", [b"def (", b"\x00", b"x = '\xff'", b"(" * 5000, b"-" * 200_000 + b"1"])
def test_what_is_not_python_is_not_judged(source: bytes) -> None:
    assert {each.verdict for each in scan(source, "x.py")} == {"unknown"}


DEEP = {
    "sum": "x = a" + "+a" * 400,
    "calls": "x = a" + ".b()" * 400,
    "test": "if a" + "+a" * 500 + ": x = 1",
    "measured": "def f(piece):\n    x = len((piece" + "+a" * 500 + ").encode())",
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_deep_expressions_could_not_be_told(source: str) -> None:
    found = scan(f"sp.id_to_piece(1)\n{source}\n".encode(), "x.py")
    assert {each.verdict for each in found} == {"unknown"}
    assert {each.rule for each in found} >= set(JUDGED)


def test_what_was_found_before_the_scan_stopped_is_told() -> None:
    (found,) = failures("MAX_WALLCLOCK_SECONDS = 900\n" + DEEP["test"])
    assert (found.rule.name, found.line) == ("train-time", 1)
    assert failures("MAX_WALLCLOCK_SECONDS = 600\n" + DEEP["test"]) == []


def test_a_track_without_a_cap_has_no_clock() -> None:
    found = scan(b"MAX_WALLCLOCK_SECONDS = 14400\n", "x.py", unlimited=True)
    assert {each.verdict for each in found} == {"unknown"}
    assert failures("MAX_WALLCLOCK_SECONDS = 14400\n") != []


def test_many_calls_of_exec_are_looked_into_once() -> None:
    """Each would be asked for all strings of the script."""
    inner = "import os\ndef f():\n    return 1\n" * 20
    assert unpacked(ast.parse("exec(a)\n" * 20_000 + f"x = {inner!r}")) == inner.encode()
    assert unpacked(ast.parse("exec(a)\n" * 20_000)) is None


# Variants: the same sins and virtues under other names and in other shapes.

LOADER = """
import glob, math
import numpy as np, torch
import torch.nn.functional as func
from torch.nn.functional import cross_entropy as xe
def shard(where):
    return torch.from_numpy(np.fromfile(glob.glob(where)[0], dtype=np.uint16).astype(np.int64))
held = shard("data/fineweb_val_*.bin")
seen = shard("data/fineweb_train_*.bin")
"""

RENAMED_TTT = (
    LOADER
    + """
def learn(net, o, piece):
    o.zero_grad()
    xe(net(piece[:-1]), piece[1:]).backward()
    o.step()
def lose(net, piece):
    with torch.no_grad():
        return xe(net(piece[:-1]), piece[1:], reduction="sum").item()
def run(net, stream):
    o = torch.optim.SGD(net.parameters(), lr=0.1)
    total = 0.0
    for k in range(0, len(stream) - 1, 64):
        piece = stream[k : k + 65]
        {order}
    return total / len(stream) / math.log(2)
net = torch.nn.Embedding(16, 16)
print("val_bpb", run(net, {data}))
"""
)
LEARN_THEN_LOSE = "learn(net, o, piece); total += lose(net, piece)"
LOSE_THEN_LEARN = "total += lose(net, piece); learn(net, o, piece)"


@pytest.mark.parametrize(
    ("order", "data", "wrong"),
    [
        (LEARN_THEN_LOSE, "held", {"score-first"}),
        (LOSE_THEN_LEARN, "held", set()),
        (LEARN_THEN_LOSE, "seen", set()),
        (
            "before = lose(net, piece); learn(net, o, piece); total += min(before, lose(net, piece))",
            "held",
            {"score-first"},
        ),
    ],
)
def test_order_decides_in_helpers(order: str, data: str, wrong: set[str]) -> None:
    found = failures(RENAMED_TTT.format(order=order, data=data))
    assert {each.rule.name for each in found} == wrong


CLASS_TTT = (
    LOADER
    + """
class Judge:
    def __init__(self, net, stream):
        self.net, self.stream, self.sum = net, stream, 0.0
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    def pieces(self):
        return self.stream.split(64)
    def fit(self, a, b):
        self.opt.zero_grad(); func.cross_entropy(self.net(a), b).backward(); self.opt.step()
    def judge(self, a, b):
        self.sum += func.cross_entropy(self.net(a), b, reduction="sum").item()
    def go(self):
        at = 0
        while at + 65 < self.stream.numel():
            a, b = self.stream[at : at + 64], self.stream[at + 1 : at + 65]
            {order}
            at += 64
        val_bpb = self.sum / math.log(2)
        return val_bpb
Judge(torch.nn.Embedding(16, 16), held).go()
"""
)


@pytest.mark.parametrize(
    ("order", "wrong"),
    [("self.fit(a, b); self.judge(a, b)", {"score-first"}), ("self.judge(a, b); self.fit(a, b)", set())],
)
def test_order_decides_in_methods(order: str, wrong: set[str]) -> None:
    assert {each.rule.name for each in failures(CLASS_TTT.format(order=order))} == wrong


MANUAL_SGD = """
import torch
import torch.nn.functional as F
def score(tokens):
    w = torch.zeros(16, 16, requires_grad=True)
    out = []
    for i in range(0, len(tokens) - 1, 8):
        x, y = tokens[i : i + 8], tokens[i + 1 : i + 9]
        {first}
        {second}
    return out
"""
STEP = (
    "g = torch.autograd.grad(F.cross_entropy(w[x], y), [w])[0]\n        with torch.no_grad():\n            w -= 0.1 * g"
)
NOTE = "out.append(F.cross_entropy(w[x], y, reduction='none').detach())"


@pytest.mark.parametrize(("first", "second", "wrong"), [(STEP, NOTE, True), (NOTE, STEP, False)])
def test_a_step_written_out_is_a_step(first: str, second: str, wrong: bool) -> None:
    found = failures(MANUAL_SGD.format(first=first, second=second))
    assert bool(found) is wrong
    assert all(each.rule == SCORE_FIRST for each in found)


SWITCH = (
    LOADER
    + """
import os
class Settings:
    adapt = bool(int(os.environ.get("ADAPT", "{default}")))
def adapt(net, stream):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(9):
        func.cross_entropy(net(stream[i * 8 : i * 8 + 8]), stream[i * 8 + 1 : i * 8 + 9]).backward()
        opt.step()
def main():
    s, net = Settings(), torch.nn.Embedding(16, 16)
    if s.adapt:
        adapt(net, held)
    val_loss = func.cross_entropy(net(held[:-1]), held[1:])
    print(f"val_bpb {{val_loss}}")
main()
"""
)


@pytest.mark.parametrize(("default", "verdict"), [("1", "fail"), ("0", "unknown")])
def test_a_switch_that_is_off_is_doubt_not_proof(default: str, verdict: str) -> None:
    found = [each for each in scan(SWITCH.format(default=default).encode(), "x.py") if each.line]
    assert {(each.rule, each.verdict) for each in found} == {(SCORE_FIRST, verdict)}


def test_weights_that_are_put_back_have_learned_nothing() -> None:
    saved = SWITCH.format(default="1").replace(
        "    if s.adapt:\n        adapt(net, held)\n",
        "    kept = {k: v.clone() for k, v in net.state_dict().items()}\n"
        "    adapt(net, held)\n    net.load_state_dict(kept)\n",
    )
    assert failures(saved) == []


def test_a_temperature_may_be_chosen_by_key() -> None:
    source = LOADER + (
        "net = torch.nn.Embedding(16, 16)\n"
        "def loss(data, t):\n    return func.cross_entropy(net(data[:-1]) / t, data[1:])\n"
        "best = min((0.9, 1.0, 1.1), key=lambda t: loss({data}, t))\n"
        "print('val_bpb', loss(held, best) / math.log(2))\n"
    )
    assert {each.rule for each in failures(source.replace("{data}", "held"))} == {VALIDATION}
    assert failures(source.replace("{data}", "seen")) == []


def test_gates_in_arrays() -> None:
    source = """
import numpy as np
def score(tokens):
    p = np.full(len(tokens) - 1, 0.1)
    guess = np.roll(tokens, 1)[:-1]
    y = tokens[1:]
    hit = guess == y
    {change}
    return -np.log(p)
"""
    for change in ("p = np.where(hit, p + 0.5 * (1 - p), p)", "p[hit] = 0.9"):
        assert bool(failures(source.replace("{change}", change))), change


def test_hash_keys_in_methods() -> None:
    source = """
import math
class Cache:
    def __init__(self):
        self.t, self.c = {}, {}
    def key(self, ctx, tok):
        return (hash(ctx) * 31 + tok * 7919) % 1024
    def p(self, ctx, tok):
        return self.t.get(self.key(ctx, tok), 0) / max(1, self.c.get(ctx, 0))
def score(tokens):
    cache, out = Cache(), []
    for i in range(len(tokens) - 1):
        target = tokens[i + 1]
        slot = ((tokens[i] * 31) ^ (target * 7919)) % 1024
        mixed = 0.9 / 16 + 0.1 * cache.t[slot]
        out.append(-math.log(mixed))
    return out
"""
    assert {each.rule for each in failures(source)} == {NORMALISED}


def test_a_cache_filled_in_a_pass_of_its_own() -> None:
    source = LOADER + (
        "from collections import defaultdict\n"
        "table = defaultdict(lambda: [0.1] * 16)\n"
        "ids = held.tolist()\n"
        "for i in range(1, len(ids)):\n    table[ids[i - 1]][ids[i]] += 1\n"
        "nats = 0.0\n"
        "for i in range(1, len(ids)):\n"
        "    row = table[ids[i - 1]]\n    nats += -math.log(row[ids[i]] / sum(row))\n"
        "val_bpb = nats / math.log(2)\n"
    )
    assert {each.rule for each in failures(source)} == {ONE_PASS}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("1 if sp.is_byte(i) else len(sp.id_to_piece(i).replace('▁', ' ').encode())", False),
        ("3 if sp.is_byte(i) else len(sp.id_to_piece(i).replace('▁', ' ').encode())", True),
        ("1 if sp.is_byte(i) else len(sp.id_to_piece(i).encode())", True),
        ("len(sp.id_to_piece(i).replace('▁', ' ').encode())", True),
        ("len(sp.decode([i]).encode())", True),
        ("1 if sp.is_byte(i) else len(sp.decode([i]).encode())", False),
    ],
)
def test_byte_counts_in_one_line(body: str, wrong: bool) -> None:
    found = failures(f"def sizes(sp):\n    return [{body} for i in range(sp.vocab_size())]\n")
    assert bool(found) is wrong
    assert all(each.rule == BYTES for each in found)


DOCUMENTS = (
    LOADER
    + """
def documents(ids):
    at = (ids == 1).nonzero().flatten().tolist()
    return list(zip(at, at[1:], strict=False))
def span(k, long, size):
    stop = long if k == long // size else (k + 1) * size
    return k * size, stop
def note(losses, y, begin, total, count, sizes, size_sum):
    total += losses[begin:].double().sum()
    count += len(losses) - begin
    size_sum += sizes[y].sum()
def evaluate(net, lora, sizes):
    total, count, size_sum = torch.zeros(()), torch.zeros(()), torch.zeros(())
    opt = torch.optim.Adam(lora.parameters(), lr=0.01)
    for first, last in documents(held):
        for k in range((last - first) // 32):
            begin, stop = span(k, last - first, 32)
            x, y = torch.zeros(stop, dtype=torch.int64), torch.zeros(stop, dtype=torch.int64)
            piece = held[first + begin : first + stop + 1]
            x[: len(piece) - 1] = piece[:-1]
            y[: len(piece) - 1] = piece[1:]
            {order}
    return total.item() / math.log(2.0) / size_sum.item()
print("val_bpb", evaluate(torch.nn.Embedding(16, 16), torch.nn.Linear(16, 16), torch.zeros(16)))
"""
)
LOSE = "losses = xe(lora(net(x)), y, reduction='none'); note(losses, y, 0, total, count, sizes, size_sum)"
FIT = "opt.zero_grad(); xe(lora(net(x)), y).backward(); opt.step()"


@pytest.mark.parametrize(("order", "wrong"), [(f"{LOSE}; {FIT}", set()), (f"{FIT}; {LOSE}", {"score-first"})])
def test_losses_that_a_helper_adds_up(order: str, wrong: set[str]) -> None:
    """Sums that are tensors are added to in place, and where documents begin is not what they say."""
    assert {each.rule.name for each in failures(DOCUMENTS.format(order=order))} == wrong


MIXER = (
    LOADER
    + """
class Table:
    def __init__(self):
        self.mask = 255
        self.of_context, self.of_all = torch.zeros(256), torch.zeros(256)
    def keys(self, x, y):
        h = torch.zeros_like(x)
        h.bitwise_xor_(x * 36313)
        return h & self.mask, (h ^ (y * 27191)) & self.mask
    def update(self, ids):
        context, whole = self.keys(ids[:-1], ids[1:])
        self.of_context.scatter_add_(0, context, torch.ones(len(context)))
        self.of_all.scatter_add_(0, whole, torch.ones(len(whole)))
    def p(self, x, y):
        context, whole = self.keys(x, y)
        return self.of_all[whole] / self.of_context[context].clamp(min=1.0)
def evaluate(net, table):
    total = 0.0
    for k in range(0, len(held) - 1, 64):
        x, y = held[k : k + 64], held[k + 1 : k + 65]
        p = torch.softmax(net(x), -1).gather(-1, y[:, None])[:, 0]
        total += {loss}
        {after}
    return total / math.log(2.0)
net, table = torch.nn.Embedding(16, 16), Table()
{before}
print("val_bpb", evaluate(net, table))
"""
)


@pytest.mark.parametrize(
    ("loss", "before", "after", "wrong"),
    [
        ("-torch.log(0.9 * p + 0.1 * table.p(x, y)).sum()", "pass", "table.update(held[k : k + 65])", {"normalised"}),
        ("-torch.log(p).sum()", "pass", "table.update(held[k : k + 65])", set()),
    ],
)
def test_hashed_tables_of_tensors(loss: str, before: str, after: str, wrong: set[str]) -> None:
    found = failures(MIXER.format(loss=loss, before=before, after=after))
    assert {each.rule.name for each in found} == wrong


def test_training_data_may_be_read_again_after_a_warm_up() -> None:
    source = LOADER + (
        "net = torch.nn.Embedding(16, 16)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "kept = {k: v.clone() for k, v in net.state_dict().items()}\n"
        "xe(net(seen[:64]), seen[1:65]).backward(); opt.step()\nnet.load_state_dict(kept)\n"
        "more = shard('data/fineweb_train_*.bin')\n"
    )
    assert failures(source) == []
