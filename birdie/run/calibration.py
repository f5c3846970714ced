"""What a run's model minds, learnt from its own training data or from what it writes itself.

    RUN folder or recipe.toml ─► recipe ─► GPT with these weights ─┬─► CalibrationResult
                                    ├─► spread over the shards ────┤
                                    └─► or sampled from that GPT ──┘

Samples of the model's own need no data at all. The challenge's records drew 64 sequences at temperature 0.8 (#1019).
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birdie.compress.calibration.result import CalibrationResult, held_out_batches
from birdie.compress.state import fill
from birdie.data.dataset import Dataset, open_dataset
from birdie.data.shards import read_shard
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.model.gpt import GPT
from birdie.model.sample import sample_sequences
from birdie.run.recipe import CalibrationSettings, DataSettings, Recipe, load_recipe
from birdie.runtime.callbacks import Progress

_BATCH_TOKENS = 4096  # bounds memory: activations of so many are kept at a time
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What calibration found out, and what it took.

    Attributes:
        knowledge: what `birdie.save` takes as its calibration.
        tokens: calibrated on or held back for judging.
        seconds: all of it, sampling included.
    """

    knowledge: CalibrationResult
    tokens: int
    seconds: float


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
    settings: CalibrationSettings,
    progress: Progress | None = None,
    *,
    device: torch.device | None = None,
) -> Calibrated:
    """Calibrate the recipe's GPT with the weights `state`, in float32.

    Args:
        settings: which tokens, and how many; the recipe's own are not looked at.
        progress: called with (done, total), in tokens sampled and calibrated on.
        device: where to work; None is the CPU.

    Raises:
        ConfigError: the settings ask for no calibration.
        DataError: there are no training shards, or they are shorter than one sequence.
        WeightsError: the weights are not those of the recipe's model.
    """
    began = time.perf_counter()
    model = GPT(recipe.model)
    weights = {name: weight.float() for name, weight in state.items()}
    fill(model, weights, "the checkpoint", "give the run or the recipe that these weights came from").eval().to(device)
    sampled = 0

    def told(done: int) -> None:
        nonlocal sampled
        sampled = done
        if progress is not None:
            progress(done, 2 * settings.tokens)

    batches = calibration_batches(recipe, model, settings, told)
    sizes = [ids.numel() for ids, _ in batches]
    total = sampled + sum(sizes[: used(len(sizes))])

    def counted(done: int) -> None:
        if progress is not None:
            progress(sampled + sum(sizes[:done]), total)

    known = CalibrationResult.of(dict(state), (model, batches, loss), progress=counted)
    return Calibrated(known, sum(sizes), time.perf_counter() - began)


def used(batches: int) -> int:
    """How many of so many batches are calibrated on; the others are held back for judging."""
    return batches - held_out_batches(batches)


def calibration_batches(
    recipe: Recipe, model: GPT, settings: CalibrationSettings, sampled: Callable[[int], None] | None = None
) -> list[Batch]:
    """(ids, targets) to calibrate on, in sequences as long as those of training, the same each time.

    Args:
        model: writes them where they are to be its own.
        sampled: called with the number of tokens written so far.

    Raises:
        ConfigError: the settings ask for no calibration.
        DataError: there are no training shards, or they are shorter than one sequence.
        WeightsError: weights that are not finite cannot write.
    """
    length = recipe.train.train_seq_len
    if settings.data == "train":
        return sequences(dataset(recipe.data), length, settings.tokens)
    if settings.data == "own":
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise WeightsError(
                    f"tensor {name!r} holds NaN or infinite values, so the model writes nothing; mend the checkpoint"
                )
        tokenizer = load_tokenizer(recipe.data.tokenizer)
        rows = sample_sequences(
            model,
            max(2, settings.tokens // length),
            length + 1,
            first=tokenizer.bos_id,
            temperature=settings.temperature,
            vocab_size=min(tokenizer.vocab_size, recipe.model.vocab_size),
            seed=settings.seed,
            progress=sampled,
        )
        return _cut(rows, length)
    raise ConfigError("there is nothing to calibrate on; choose calibration data train or own")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch of (ids, targets)."""
    place = next(model.parameters()).device
    ids, targets = (part.to(place) for part in batch)
    nats: Tensor = model.loss(ids, targets, reduction="none").sum()  # type: ignore[operator]
    return nats


def dataset(data: DataSettings) -> Dataset:
    """The shards the settings name."""
    return open_dataset(train=data.train, val=data.val) if data.train or data.val else open_dataset(data.path)


def sequences(shards: Dataset, length: int, tokens: int) -> list[Batch]:
    """About `tokens` training tokens in sequences of `length`, evenly spread over all shards, in a fixed order.

    Raises:
        DataError: there are too few.
    """
    parts = [read_shard(path) for path in shards.train]
    starts = [(part, at) for part in parts for at in range(0, len(part) - length, length)]
    if not starts:
        raise DataError(f"the training shards hold no sequence of {length} tokens to calibrate on; give more text")
    wanted = min(max(2, tokens // length), len(starts))
    picked = [starts[i] for i in np.unique(np.linspace(0, len(starts) - 1, wanted).astype(int))]
    picked = [picked[i] for i in np.random.default_rng(0).permutation(len(picked))]
    rows = np.stack([np.asarray(part[at : at + length + 1]).astype(np.int64) for part, at in picked])
    return _cut(torch.from_numpy(rows), length)


def _cut(rows: Tensor, length: int) -> list[Batch]:
    """Sequences of `length` tokens and one more, (n, length + 1), as batches."""
    cut = torch.split(rows, rows_in_batch(length))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in cut]


def rows_in_batch(length: int) -> int:
    """How many sequences of `length` tokens are calibrated on together."""
    return max(1, _BATCH_TOKENS // length)


def described(recipe: Recipe) -> dict[str, Any]:
    """What an artifact must say of the recipe so that it can be scored and sampled."""
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    return {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": facts}
