"""The model that benchmarks share: `python -m benchmarks.bench_model` trains recipes/bench.toml once and prints where.

It learns from the challenge's FineWeb smoke shard and public-domain books, all under its tokenizer of 1,024 pieces.
What it is cached by: the settings the recipe names for model, training and optimizer, the order of the data, and the
contents of the data files. Where any of these lie does not matter, nor what is validated, exported or logged.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from birdie.data.corpus import file_corpus
from birdie.data.prepare import Layout, prepare
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ConfigError
from birdie.run.events import Started, Validated
from birdie.run.pipeline import Run
from birdie.run.recipe import load_recipe
from birdie.runtime.files import atomic_path
from birdie.train.checkpoint import POINTER, load_checkpoint
from birdie.train.loop import Step

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "bench.toml"
_KEYED = ("model", "train", "optimizer")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Sources:
    """The files the model is made from."""

    tokenizer: Path
    train: Path
    val: Path
    books: tuple[Path, ...]

    @classmethod
    def under(cls, data: Path) -> "Sources":
        """The sources in the shared data folder.

        Raises:
            ConfigError: one is missing.
        """
        text = data / "text"
        found = cls(
            data / "tokenizers" / "fineweb_1024_bpe.model",
            text / "fineweb" / "fineweb_train_000000_smoke_sp1024.bin",
            text / "fineweb" / "fineweb_val_head_sp1024.bin",
            tuple(sorted((text / "books").glob("*.md"))),
        )
        missing = [path for path in (found.tokenizer, found.train, found.val) if not path.is_file()]
        if missing or not found.books:
            raise ConfigError(
                f"the benchmark model needs {(missing or [text / 'books'])[0]}; set BIRDIE_DATA or --data"
            )
        return found


def bench_model(run_root: Path = Path("runs"), data: Path | None = None, *, train: bool = True) -> Path:
    """The float weights of the shared model as .safetensors, trained first if that was never done.

    Args:
        run_root: folder of runs; the model's is `bench-DIGEST` in it.
        data: the shared data; default: the folder BIRDIE_DATA names.
        train: whether it may be trained, which takes most of an hour on two cores.

    Raises:
        ConfigError: there is no data, or no model and `train` is False.
    """
    if data is None:
        if not os.environ.get("BIRDIE_DATA"):
            raise ConfigError("the benchmark model is made from the shared data; set BIRDIE_DATA to its folder")
        data = Path(os.environ["BIRDIE_DATA"])
    sources = Sources.under(data)
    folder = run_root / f"bench-{digest(sources)}"
    weights = folder / "model.safetensors"
    if weights.is_file():
        return weights
    if not _finished(folder):
        if not train:
            raise ConfigError(f"{folder} holds no trained model; run python -m benchmarks.bench_model")
        _train(sources, folder)
    state = load_checkpoint(folder / "checkpoints").weights
    with atomic_path(weights) as path:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return weights


def digest(sources: Sources, recipe: Path = RECIPE) -> str:
    """Eight hex digits that change with the recipe's settings and the data's contents, and with nothing else."""
    key = {
        "settings": _settings(tomllib.loads(recipe.read_text())),
        "tokenizer": _contents(sources.tokenizer),
        "train": _contents(sources.train),
        "books": {path.name: _contents(path) for path in sources.books},
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {table: recipe.get(table, {}) for table in _KEYED} | {"order": recipe.get("data", {}).get("order")}


def _contents(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _finished(folder: Path) -> bool:
    """Whether the last step's checkpoint is there."""
    if not (folder / "checkpoints" / POINTER).is_file():
        return False
    return load_checkpoint(folder / "checkpoints").step >= load_recipe(RECIPE).train.iterations


def _train(sources: Sources, folder: Path) -> None:
    shards = _shards(sources, folder)
    places = ["--data.path", str(shards), "--data.tokenizer", str(sources.tokenizer)]
    run = Run(load_recipe(RECIPE, places), folder, notify=_say)
    for event in run.train(resume=True):
        if isinstance(event, Started):
            _say(f"training {event.parameters:,} parameters on {event.train_tokens:,} tokens into {folder}")
        elif isinstance(event, Step) and event.number % 20 == 0:
            _say(f"step {event.number}  loss {event.loss:.4f}  {event.train_ms / 1000:.0f} s")
        elif isinstance(event, Validated):
            _say(f"step {event.step}  {event.score.bpb:.4f} bits per byte")


def _shards(sources: Sources, folder: Path) -> Path:
    """FineWeb first, then the books the split leaves for training, as one folder of shards."""
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sources.train, shards / "fineweb_train_000000.bin")
    shutil.copyfile(sources.val, shards / "fineweb_val_000000.bin")
    root = folder / "books"
    for _ in prepare(file_corpus([str(path) for path in sources.books]), sources.tokenizer, root):
        pass
    prepared = Layout.of(root, load_tokenizer(sources.tokenizer).name).folder
    for index, path in enumerate(sorted(prepared.glob("*_train_*.bin")), start=1):
        shutil.copyfile(path, shards / f"fineweb_train_{index:06d}.bin")
    return shards


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    """Train if need be; print the path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--data", type=Path, help="the shared data (default: the folder BIRDIE_DATA names)")
    options = parser.parse_args()
    print(bench_model(options.runs, options.data))


if __name__ == "__main__":
    main()
