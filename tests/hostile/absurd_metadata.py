"""Absurd metadata in an honest file of a tiny GPT: each is refused in one sentence, or does not change the score.

`python -m tests.hostile.absurd_metadata [--random N] [--seed S]` scores the table below, then N random edits of the
honest metadata, in this one process with limits of address space and of time for each file. A random edit may also
change the score: a rotary base of 9,999 is not absurd.
"""

import argparse
import itertools
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from birdie.artifact import container
from birdie.artifact.inspection import inspect
from birdie.artifact.repack import load_object
from birdie.artifact.saving import save
from birdie.errors import BirdieError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.settings import TrainSettings
from tests.tiny_run import tiny_model

SECONDS, ADDRESS_SPACE = 10, 12 << 30
LONG, DEEP = "x" * 100_000, "[" * 100_000
Fields = dict[str, Any]

MODEL: dict[str, tuple[Any, ...]] = {
    "num_layers": (10**9, 2**40, 10**400, -1, 0, "3", 3.5, None, True, [3], {}),
    "vocab_size": (2**40, 2**62, -5, 1, "32"),
    "model_dim": (2**40, 34, 0),
    "num_heads": (10**12, 3, [4]),
    "mlp_mult": (1e300, 1e-300, -1.0, "2"),
    "num_loops": (10**9, 10**18),
    "rope_base": (0, -1.0, "x"),
    "rope_dims": (2**40, 3),
    "bigram_vocab_size": (2**50, 8),
    "embed_dim": (2**62, 1),
    "value_embed_layers": ([10**9], ["0"], 3, "012"),
    "activation": ("gelu", 3),
    "attention": ("no such function", 7),
    "bos_id": (-1, None),
    "tie_embeddings": ("yes", 1),
    LONG: (1,),
}
"""Absurd values of the recipe's table of the model; each is refused."""

REFUSED: dict[str, str] = {
    "not an object": "[]",
    "a number": "7",
    "no UTF-8": "\udcff",
    "NaN": '{"metadata": {"x": NaN}}',
    "Infinity": '{"budget": Infinity}',
    "a key twice": '{"budget": 7, "budget": 8}',
    "deep": DEEP,
    "deep objects": '{"metadata":' * 100_000,
    "deep tree": '{"tree":' + DEEP + "]" * 100_000 + "}",
    "wide": '{"metadata": {"x": [' + "0," * 5_000_000 + "0]}}",
    "long number": '{"budget": ' + "9" * 100_000 + "}",
    "budget below zero": '{"budget": -1}',
    "budget as text": '{"budget": "16MB"}',
    "budget true": '{"budget": true}',
    "schemes a list": '{"schemes": ["x"]}',
    "schemes numbers": '{"schemes": {"128": 5}}',
    "metadata a list": '{"metadata": []}',
    "no recipe": '{"metadata": {"model": "gpt"}}',
    "another model": '{"metadata": {"model": "bert"}}',
}
"""Complete metadata that are refused."""

TREES: dict[str, Any] = {
    "number": 3,
    "object": {"a": 1},
    "unknown kind": ["nothing", 1],
    "nothing used": ["list"],
    "twice": ["list", ["tensor"], ["tensor"]],
    "wide": ["list", *[1] * 2_000_000],
    "deep": "deep",
    "keys that refer to none": ["dict", 10**30, []],
    "permutation": ["tensors", [10**18]],
    "flag": ["tensors", [], 10**9],
    "size": ["dict", [["size", *[2**62] * 50]], [0]],
    "device": ["device", "cuda:99999999"],
    "bytes": ["bytes", "%%%"],
}
"""Trees that are refused."""


def data_folder(root: Path) -> Path:
    """Return a folder of shards of this file's text, as bytes."""
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return next((root / "datasets").iterdir())


def honest_file(path: Path, data: Path) -> Path:
    """Write the GPT of `tests.tiny_run` over bytes with the metadata that `birdie train` writes."""
    model = tiny_model(vocab_size=260)
    recipe = Recipe(
        data=DataSettings(path=str(data), tokenizer="bytes"),
        model=GPTConfig(**asdict(model.config)),
        train=TrainSettings(train_batch_tokens=256, train_seq_len=32, accumulation=1, compute_dtype="float32"),
        validation=ValidationSettings(max_tokens=128),
    )
    metadata = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    save(model, path, lossless=True, effort="fast", metadata=metadata)
    return path


class Rewriter:
    """Copies of a file with other metadata."""

    def __init__(self, path: Path, target: Path) -> None:
        with container.Reader(path) as reader:
            self.entries = [reader.read(name) for name in reader.names]
            self.fields: Fields = json.loads(bytes(reader.metadata))
        self.target = target

    def write(self, metadata: str) -> Path:
        """Write the copy with `metadata`; lone surrogates become bytes that are no UTF-8."""
        self.target.write_bytes(container.to_bytes(self.entries, metadata.encode(errors="surrogateescape")))
        return self.target

    def edited(self, keys: tuple[str, ...], value: Any) -> str:
        """Return the honest metadata with `value` at the path `keys`."""
        fields: Fields = json.loads(json.dumps(self.fields))
        table = fields
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value
        return json.dumps(fields)


def absurdities(rewriter: Rewriter) -> Iterator[tuple[str, str]]:
    """Yield (name, metadata) of files that must be refused."""
    yield from REFUSED.items()
    for setting, values in MODEL.items():
        for value in values:
            name = f"{setting[:20]} {str(value)[:20]}"
            yield name, rewriter.edited(("metadata", "recipe", "model", setting), value)
    for table in ("model", "train", "data"):
        for value in (None, 3, [], "x"):
            yield f"{table} {value}", rewriter.edited(("metadata", "recipe", table), value)
    for value in (3, [], {}, {"sha256": 1, "kind": "x"}, "bytes", {"kind": "bytes", "sha256": "0"}):
        yield f"tokenizer {value}", rewriter.edited(("metadata", "tokenizer"), value)
    for value in ("no such tokenizer", "/dev/zero", "a\0b", LONG, 7):
        yield f"data.tokenizer {str(value)[:20]!r}", rewriter.edited(("metadata", "recipe", "data", "tokenizer"), value)
    for value in (-1, 0, 2**63, "32", 2**62):
        yield f"train_seq_len {value}", rewriter.edited(("metadata", "recipe", "train", "train_seq_len"), value)
    for name, tree in TREES.items():
        nested = '["list",' * 5000 + "1" + "]" * 5000 if tree == "deep" else json.dumps(tree)
        yield f"tree {name}", f'{{"tree": {nested}}}'


def irrelevant(rewriter: Rewriter) -> Iterator[tuple[str, str]]:
    """Yield (name, metadata) of files that score as the honest file."""
    recipe = ("metadata", "recipe")
    yield "a budget", rewriter.edited(("budget",), 2**70)
    yield "a comment", rewriter.edited(("metadata", "comment"), LONG)
    yield "another seed", rewriter.edited((*recipe, "train", "seed"), 99)
    yield "settings of evaluation of another version", rewriter.edited((*recipe, "evaluation"), {"x": 1})
    yield "evaluation is a number", rewriter.edited((*recipe, "evaluation"), 3)


def random_edit(rng: random.Random, fields: Fields) -> str:
    """Return `fields` with one to three values replaced, removed or renamed, anywhere."""
    fields = json.loads(json.dumps(fields))
    odd: tuple[Any, ...] = (
        0,
        -1,
        1,
        2**31,
        2**40,
        2**63,
        10**30,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        LONG,
        None,
        True,
        [],
        {},
        [[]],
        [0, -1],
    )
    for _ in range(rng.randint(1, 3)):
        table: Any = fields
        while True:
            keys = list(table) if isinstance(table, dict) else list(range(len(table)))
            key = rng.choice(keys)
            if not isinstance(table[key], dict | list) or not table[key] or rng.random() < 0.1:
                break
            table = table[key]
        if rng.random() < 0.1 and isinstance(table, dict):
            table[f"{key}_"] = table.pop(key)
        elif rng.random() < 0.1:
            del table[key]
        else:
            table[key] = json.loads(json.dumps(rng.choice(odd)))  # else edits of edits change `odd`
        if not fields:
            break
    return json.dumps(fields)


class TooSlow(BaseException):
    """A file took longer than `SECONDS`."""


def outcome(path: Path, data: Path) -> float | str:
    """Return the loss of a file, or the sentence that refuses it; raise whatever else happens."""

    def late(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        if inspect(path).tree is not None:
            load_object(path)
        own_tokenizer = EvaluationRequest(data=str(data), device="cpu", max_tokens=128)
        return evaluate(path, own_tokenizer).score.val_loss
    except BirdieError as error:
        return str(error)
    finally:
        signal.alarm(0)


def fault(expected: str, result: float | str, honest: float) -> str:
    """Return what is wrong with an outcome; "" if nothing is."""
    if isinstance(result, str):
        if expected == "scored":
            return f"was refused: {result}"
        return "" if len(result) < 1500 else f"has a message of {len(result):,} characters"
    if expected == "refused":
        return "was scored"
    return "" if expected == "either" or result == honest else f"changed the score to {result}"


def campaign(count: int, seed: int, every: int = 1) -> tuple[Counter[str], list[str]]:
    """Score every N-th file of the table and `count` random edits; return counts of outcomes, and a line a fault."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = data_folder(root / "data")
        rewriter = Rewriter(honest_file(root / "honest.birdie", data), root / "absurd.birdie")
        honest = outcome(root / "honest.birdie", data)
        assert isinstance(honest, float), honest
        counts: Counter[str] = Counter()
        faults: list[str] = []
        rng = random.Random(seed)
        edits = ((f"edit {i} of seed {seed}", random_edit(rng, rewriter.fields)) for i in range(count))
        cases = (("refused", absurdities(rewriter)), ("scored", irrelevant(rewriter)), ("either", edits))
        for expected, files in cases:
            for name, metadata in itertools.islice(files, 0, None, every if expected == "refused" else 1):
                try:
                    result = outcome(rewriter.write(metadata), data)
                    wrong = fault(expected, result, honest)
                    counts["refused" if isinstance(result, str) else "scored"] += 1
                except (Exception, TooSlow) as error:
                    frames = traceback.extract_tb(error.__traceback__)[-3:]
                    lines = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
                    wrong = f"raised {type(error).__name__}: {str(error)[:200]} ({lines})"
                if wrong:
                    faults.append(f"{name}: {wrong}")
        return counts, faults


def run(count: int, seed: int) -> str:
    """Run a campaign in a process of its own and return its last line; raises CalledProcessError if it fails."""
    arguments = ["--random", str(count), "--seed", str(seed)]
    command = [sys.executable, "-m", "tests.hostile.absurd_metadata", *arguments]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, check=True, timeout=280 + count, cwd=root, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    totals, at_fault = campaign(chosen.random, chosen.seed)
    sys.stdout.write("\n".join([*at_fault, f"{totals['refused']} refused, {totals['scored']} scored"]) + "\n")
    sys.exit(bool(at_fault))
