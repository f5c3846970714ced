"""What a run's own training data say about its weights: the recipe names the model and the shards.

RUN folder or recipe.toml ─► recipe ─► GPT with these weights, sequences spread over the training shards ─► Knowledge
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birdie.compress.knowledge import Knowledge
from birdie.compress.state import fill
from birdie.data.dataset import Dataset, open_dataset
from birdie.data.shards import read_shard
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ConfigError, DataError
from birdie.model.gpt import GPT
from birdie.recipe import DataSettings, Recipe, load_recipe

CALIBRATION_TOKENS = 65_536
_BATCH_TOKENS = 4096  # bounds memory: activations of so many are kept at a time
Batch = tuple[Tensor, Tensor]


def run_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a run folder, or in a file.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    place = Path(path)
    file = place / "recipe.toml" if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(f"{place} is neither a run folder with a recipe.toml nor a recipe; give one of the two")
    return load_recipe(file)


def calibrated(
    recipe: Recipe,
    state: Mapping[str, Tensor],
    tokens: int = CALIBRATION_TOKENS,
    progress: Callable[[float, float | None], None] | None = None,
) -> Knowledge:
    """Calibrate the recipe's GPT with the weights `state` on `tokens` tokens of its training data.

    Raises:
        ConfigError: `tokens` is not positive.
        DataError: there are no training shards, or they are shorter than one sequence.
        WeightsError: the weights are not those of the recipe's model.
    """
    model = fill(GPT(recipe.model), {name: weight.float() for name, weight in state.items()}, "the checkpoint").eval()
    batches = sequences(dataset(recipe.data), recipe.train.train_seq_len, tokens)

    def told(done: int) -> None:
        if progress is not None:
            progress(done, len(batches))

    return Knowledge.of(dict(state), (model, batches, loss), progress=told)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch of (ids, targets)."""
    nats: Tensor = model.loss(*batch, reduction="none").sum()  # type: ignore[operator]
    return nats


def dataset(data: DataSettings) -> Dataset:
    """The shards the settings name."""
    return open_dataset(train=data.train, val=data.val) if data.train or data.val else open_dataset(data.path)


def sequences(shards: Dataset, length: int, tokens: int) -> list[Batch]:
    """About `tokens` training tokens in sequences of `length`, evenly spread over all shards, in a fixed order.

    Raises:
        ConfigError: `tokens` is not positive.
        DataError: there are too few.
    """
    if tokens < 1:
        raise ConfigError(f"calibration on {tokens} tokens is none at all; give tens of thousands")
    parts = [read_shard(path) for path in shards.train]
    starts = [(part, at) for part in parts for at in range(0, len(part) - length, length)]
    if not starts:
        raise DataError(f"the training shards hold no sequence of {length} tokens to calibrate on; give more text")
    wanted = min(max(2, tokens // length), len(starts))
    picked = [starts[i] for i in np.unique(np.linspace(0, len(starts) - 1, wanted).astype(int))]
    picked = [picked[i] for i in np.random.default_rng(0).permutation(len(picked))]
    rows = np.stack([np.asarray(part[at : at + length + 1]).astype(np.int64) for part, at in picked])
    batch = max(1, _BATCH_TOKENS // length)
    cut = [torch.from_numpy(rows[at : at + batch]) for at in range(0, len(rows), batch)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in cut]


def described(recipe: Recipe) -> dict[str, Any]:
    """What an artifact must say of the recipe so that it can be scored and sampled."""
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    return {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": facts}
