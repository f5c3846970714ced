"""The static scan is fair: what may be legal is a doubt and no failure, and its illegal twin is a failure still."""

import pytest

from birdie.golf.audit.scan import scan
from tests.golf.audit.scripts import Snippet, snippets

START = """
import argparse, glob, math, os, socket, time, zlib
import numpy as np, torch
from concurrent.futures import ThreadPoolExecutor
from scipy.optimize import minimize_scalar
import torch.nn.functional as F
def shard(path):
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))
held = shard("data/fineweb_val_000000.bin")
seen = shard("data/fineweb_train_000000.bin")
net, twin = torch.nn.Embedding(16, 16), torch.nn.Embedding(16, 16)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
one, sizes, pool, warmup_steps = torch.ones(64), torch.ones(16), ThreadPoolExecutor(1), 20
def learn(piece):
    opt.zero_grad(); F.cross_entropy(net(piece[:-1]), piece[1:]).backward(); opt.step()
def judge(piece):
    with torch.no_grad():
        return F.cross_entropy(net(piece[:-1]), piece[1:], reduction="sum").item()
def measure(data):
    return sum(judge(data[k : k + 65]) for k in range(0, len(data), 64)) / math.log(2)
def nll(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")
"""
GO = """
def go(text, size=64):
    total = 0.0
    {}
    return total / math.log(2)
print("val_bpb", go(held))
"""
SLOT = """
def fitted(val_tokens):
    bias, x, y = torch.zeros(16, requires_grad=True), val_tokens[:-1], val_tokens[1:]
    o = torch.optim.Adam([bias])
    F.cross_entropy(net(x) + bias, y).backward(); o.step()
    return F.cross_entropy(net(x) + bias, y).item() / math.log(2)
"""


def broken(source: str) -> set[str]:
    """Rules that fail."""
    found = scan(source.encode(), "x.py")
    assert not any("parsed" in each.evidence for each in found), "the snippet is no Python"
    return {each.rule.name for each in found if each.verdict == "fail"}


def doubted(source: str) -> set[str]:
    """Rules of which a line is doubted."""
    return {each.rule.name for each in scan(source.encode(), "x.py") if each.verdict == "unknown" and each.line}


def wrong(*rules: str) -> set[str]:
    return {each for each in rules if each}


@pytest.mark.parametrize("one", [*snippets("order"), *snippets("shapes")], ids=str)
def test_order_is_judged_by_what_is_surely_the_same(one: Snippet) -> None:
    """Orders of learning and scoring, and their shapes, as the body of a function that gives a score."""
    body = one.body.replace("\n", "\n    ")
    assert broken(START + GO.format(body)) == wrong(one.wrong)


@pytest.mark.parametrize("one", snippets("names"), ids=str)
def test_names_alone_accuse_nobody(one: Snippet) -> None:
    assert broken(START + one.body) == wrong(one.wrong)


@pytest.mark.parametrize("one", snippets("switches"), ids=str)
def test_what_does_not_run_by_itself_is_a_doubt(one: Snippet) -> None:
    head, _, change = one.body.partition("\n")
    assert broken(START + SLOT + change) == set()
    assert doubted(START + SLOT + change) == {"score-first"}
    off, on = head.removeprefix("# ").split(" -> ")
    assert off in change
    assert broken(START + SLOT + change.replace(off, on)) == {"score-first"}


def test_one_of_a_table_of_functions_is_a_doubt() -> None:
    source = START + SLOT + "print('val_bpb', {'plain': measure, 'fit': fitted}[os.environ['WAY']](held))\n"
    assert broken(source) == set()
    assert doubted(source) == {"score-first"}


def test_a_library_is_judged_by_all_it_has() -> None:
    library = START[: START.index("held =")] + SLOT.replace("net(x)", "torch.nn.Embedding(16, 16)(x)")
    assert broken(library) == {"score-first"}


READER = """
class Loader:
    def __init__(self):
        self.ids = shard("data/fineweb_train_000001.bin")
def {inner}():
    ids = Loader().ids
    opt.zero_grad(); F.cross_entropy(net(ids[:64]), ids[1:65]).backward(); opt.step()
def {outer}():
    {inner}()
    print("val_bpb", measure(held))
{outer}()
"""


@pytest.mark.parametrize(
    ("outer", "inner", "rule"),
    [
        ("train_and_eval", "fit", ""),
        ("run_train_eval", "fit", ""),
        ("train_and_score", "fit", ""),
        ("train_and_validate", "train_model", ""),
        ("evaluate", "fit", "self-contained"),
        ("train_and_eval", "evaluate", "self-contained"),
    ],
)
def test_who_trains_and_evaluates_may_read_training_data(outer: str, inner: str, rule: str) -> None:
    """The innermost function that evaluates counts, and not if its name says that it trains as well."""
    assert broken(START + READER.format(outer=outer, inner=inner)) == wrong(rule)


@pytest.mark.parametrize(
    "choice",
    [
        "min((at(DATA, t), t) for t in (0.9, 1.0))[1]",
        "sorted([(at(DATA, t), t) for t in (0.9, 1.0)])[0][1]",
        "minimize_scalar(lambda t: at(DATA, t), bounds=(0.8, 1.2)).x",
    ],
)
def test_choices_by_the_loss(choice: str) -> None:
    source = START + (
        "def at(data, t):\n    return F.cross_entropy(net(data[:-1]) / t, data[1:]).item()\n"
        f"best = {choice}\nprint('val_bpb', at(held, best) / math.log(2))\n"
    )
    assert broken(source.replace("DATA", "held")) == {"validation-unseen"}
    assert broken(source.replace("DATA", "seen")) == set()
