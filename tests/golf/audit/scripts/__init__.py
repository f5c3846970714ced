"""Scripts for the audit: illegal ones and legal ones, each a miniature of what people submit.

A comment `# wrong: RULE …` names the rules that are broken: at the end of a line the first of them is broken there, and
the rules after it (or all of them, on a line of its own) are for the probes. `snippets/` has more in a few lines each,
in pairs where possible: `== name: legal`, or the rule that is broken.
"""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_WRONG = re.compile(r"^(?P<code>.*?)# wrong: (?P<rules>[a-z\- ]+)$")


@dataclass(frozen=True, slots=True)
class Script:
    """One script, with (line, rule) of what is broken in its code, and the rules that probes must find broken."""

    path: Path
    broken: tuple[tuple[int, str], ...]
    probed: tuple[str, ...]

    def __str__(self) -> str:
        return self.path.stem

    @property
    def callable(self) -> bool:
        """True if the script offers an entry point to probe."""
        text = self.path.read_text()
        return "\ndef score(" in text or "\ndef scorer(" in text


@dataclass(frozen=True, slots=True)
class Snippet:
    """A few lines, completed to a script, and the rule that they break; "" for none."""

    name: str
    broken: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.broken or 'legal'}"


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


def _snippets(name: str) -> tuple[Snippet, ...]:
    _, *blocks = (FOLDER / "snippets" / f"{name}.txt").read_text().split("\n== ")
    snippets = []
    for block in blocks:
        head, body = block.split("\n", 1)
        title, rule = head.rsplit(": ", 1)
        body = body.strip("\n")
        if name in ("order", "shapes"):  # bodies of a function that returns a score
            body = GO.format(body.replace("\n", "\n    "))
        elif name == "switches":  # their first line names the change that makes them illegal
            body = SLOT + body.partition("\n")[2]
        snippets.append(Snippet(f"{name}, {title}", "" if rule == "legal" else rule, START + body))
    return tuple(snippets)


def _script(path: Path) -> Script:
    broken: list[tuple[int, str]] = []
    probed: list[str] = []
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if match := _WRONG.match(text):
            rules = match["rules"].split()
            in_code = 1 if match["code"].strip() else 0
            broken += [(line, rule) for rule in rules[:in_code]]
            probed += rules[in_code:]
    return Script(path, tuple(broken), tuple(probed))


ILLEGAL = tuple(_script(path) for path in sorted((FOLDER / "illegal").glob("*.py")))
LEGAL = tuple(_script(path) for path in sorted((FOLDER / "legal").glob("*.py")))
SNIPPETS = tuple(snippet for name in ("order", "shapes", "names", "switches") for snippet in _snippets(name))
