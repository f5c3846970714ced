"""The model that several benchmarks compress: `python -m benchmarks.bench_model` trains it once and prints its path.

The recipe is recipes/bench.toml; the text is the challenge's FineWeb smoke shard and public-domain books, with the
challenge's tokenizer of 1,024 pieces. The model is cached by a digest of the recipe's settings for model, training,
optimizer and data order, and of the contents of the data files. Paths do not count, nor do the settings for validation,
export and logging. `--longer 4` trains a second model on the same data for four times as many steps: a model nearer to
the end of its training is harder to compress.
"""

import hashlib
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.command import command_parser, errors_as_exit, log, shared_data
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import Layout, prepare
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.events import Started, Validated
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.train.loop import Step
from birdie.gpt.train.training_checkpoint import checkpoint_paths, load_checkpoint
from birdie.system.context import Context
from birdie.system.device import choose_device
from birdie.system.files import atomic_path

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "bench.toml"
_DIGEST_TABLES = ("model", "train", "optimizer")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Sources:
    """Data files of the shared model."""

    tokenizer: Path
    train: Path
    val: Path
    books: tuple[Path, ...]

    @classmethod
    def under(cls, data: Path) -> "Sources":
        """Return the sources in the folder of the shared data.

        Raises:
            ConfigError: a file is missing.
        """
        text = data / "text"
        sources = cls(
            data / "tokenizers" / "fineweb_1024_bpe.model",
            text / "fineweb" / "fineweb_train_000000_smoke_sp1024.bin",
            text / "fineweb" / "fineweb_val_head_sp1024.bin",
            tuple(sorted((text / "books").glob("*.md"))),
        )
        missing = [path for path in (sources.tokenizer, sources.train, sources.val) if not path.is_file()]
        if missing or not sources.books:
            raise ConfigError(
                f"the benchmark model needs {(missing or [text / 'books'])[0]}; set BIRDIE_DATA or --data"
            )
        return sources


def bench_model(
    run_root: Path = Path("runs"), data: Path | None = None, *, train: bool = True, longer: int = 1
) -> Path:
    """Return the path of the shared model's float weights (.safetensors), training it first if necessary.

    Args:
        run_root: folder of runs; the model's folder in it is `bench-DIGEST`.
        data: folder of the shared data; default: BIRDIE_DATA.
        train: allow training, which takes most of an hour on two cores.
        longer: factor on the recipe's steps.

    Raises:
        ConfigError: data are missing, or there is no trained model and `train` is False.
    """
    sources = Sources.under(shared_data() if data is None else data)
    folder = run_root / f"bench-{digest(sources, longer=longer)}"
    weights = folder / "model.safetensors"
    if weights.is_file():
        return weights
    steps = longer * load_recipe(RECIPE).train.iterations
    if not _finished(folder, steps):
        if not train:
            command = "python -m benchmarks.bench_model" + (f" --longer {longer}" if longer > 1 else "")
            raise ConfigError(f"{folder} has no trained model; run {command}")
        _train(sources, folder, steps)
    state = load_checkpoint(folder / "checkpoints").weights
    with atomic_path(weights) as path:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return weights


def digest(sources: Sources, recipe: Path = RECIPE, longer: int = 1) -> str:
    """Return eight hex digits that depend on the recipe's settings, the factor on its steps and the data's contents."""
    key = {
        "settings": _settings(tomllib.loads(recipe.read_text())) | ({"longer": longer} if longer > 1 else {}),
        "tokenizer": _contents(sources.tokenizer),
        "train": _contents(sources.train),
        "books": {path.name: _contents(path) for path in sources.books},
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {table: recipe.get(table, {}) for table in _DIGEST_TABLES} | {"order": recipe.get("data", {}).get("order")}


def _contents(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha256.update(block)
    return sha256.hexdigest()


def _finished(folder: Path, steps: int) -> bool:
    """Return whether the checkpoint of the last step exists."""
    if not checkpoint_paths(folder / "checkpoints"):
        return False
    return load_checkpoint(folder / "checkpoints").step >= steps


def _train(sources: Sources, folder: Path, steps: int) -> None:
    shards = _shards(sources, folder)
    settings = [
        "--data.path",
        str(shards),
        "--data.tokenizer",
        str(sources.tokenizer),
        "--train.iterations",
        str(steps),
    ]
    recipe = load_recipe(RECIPE, settings)
    run = Run(recipe, folder, Context(choose_device(recipe.device), notify=log))
    for event in run.train(resume=True):
        if isinstance(event, Started):
            log(f"training {event.parameters:,} parameters on {event.train_tokens:,} tokens into {folder}")
        elif isinstance(event, Step) and event.number % 20 == 0:
            log(f"step {event.number}  loss {event.loss:.4f}  {event.train_ms / 1000:.0f} s")
        elif isinstance(event, Validated):
            log(f"step {event.step}  {event.score.bpb:.4f} bits per byte")


def _shards(sources: Sources, folder: Path) -> Path:
    """Return a folder with the shards: FineWeb first, then the training part of the books."""
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sources.train, shards / "fineweb_train_000000.bin")
    shutil.copyfile(sources.val, shards / "fineweb_val_000000.bin")
    root = folder / "books"
    books = file_corpus([str(path) for path in sources.books])
    for _ in prepare(books, sources.tokenizer, root):
        pass
    prepared = Layout.of(root, books.name, load_tokenizer(sources.tokenizer).name).folder
    for index, path in enumerate(sorted(prepared.glob("*_train_*.bin")), start=1):
        shutil.copyfile(path, shards / f"fineweb_train_{index:06d}.bin")
    return shards


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model if necessary, and print the path of its weights."""
    parser = command_parser(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--data", type=Path, help="folder of the shared data (default: BIRDIE_DATA)")
    parser.add_argument("--longer", type=int, default=1, help="factor on the steps of training (default: 1)")
    options = parser.parse_args(arguments)
    with errors_as_exit():
        print(bench_model(options.runs, options.data, longer=options.longer))


if __name__ == "__main__":
    main()
