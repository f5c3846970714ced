"""Calibration of a run's model, on its training data or on its own samples.

    run folder or recipe.toml ─► recipe ─► GPT with these weights ─┬─► CalibrationResult
                                    ├─► sequences of the shards ───┤
                                    └─► or samples of that GPT ────┘

The result holds the sensitivity of the loss to each weight. Samples of the model itself need no data; the challenge's
records drew 64 sequences at temperature 0.8 (parameter-golf#1019, github.com/openai/parameter-golf/pull/1019).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from birdie.compress import CalibrationResult, Where, calibrate_module
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.gpt.data.dataset import Dataset
from birdie.gpt.data.shards import read_shard
from birdie.gpt.data.tokenizer import Tokenizer, load_tokenizer
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe_settings import CalibrationSettings, Recipe
from birdie.gpt.run.run_data import open_shards
from birdie.system.callbacks import no_progress
from birdie.system.outputs import Source

_BATCH_TOKENS = 4096  # bounds memory: the activations of one batch are held at a time
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration result of a run, with its cost.

    Attributes:
        result: what `birdie.save` takes as its calibration.
        tokens: of all batches, calibrated and held out.
        seconds: in total, sampling included.
    """

    result: CalibrationResult
    tokens: int
    seconds: float


def calibrate_gpt(
    recipe: Recipe,
    state: Mapping[str, Tensor],
    settings: CalibrationSettings,
    *,
    symmetries: bool = True,
    **where: Unpack[Where],
) -> Calibration:
    """Calibrate the recipe's GPT with the weights `state`, in float32, or with `offload` without a copy of them.

    Args:
        settings: source and number of tokens; the calibration settings of `recipe` are ignored.
        symmetries: whether units may be permuted, which saves bits.
        where: see `birdie.compress.calibration.calibrate.Where`; the progress is in tokens sampled and calibrated.
    """
    start = time.perf_counter()
    model = _model(recipe, state, where.get("offload")).eval().to(where.get("device"))
    progress = where.get("progress") or no_progress
    sampled = 0

    def report_sampling(done: int) -> None:
        nonlocal sampled
        sampled = done
        progress(done, 2 * settings.tokens)

    def report_batches(done: float, total: float | None) -> None:
        progress(sampled + done, sampled + (total or 0))

    batches = calibration_batches(recipe, model, settings, report_sampling)
    sizes = [ids.numel() for ids, _ in batches]
    where["progress"] = report_batches
    result = calibrate_module(state, (model, batches, loss), sizes, symmetries=symmetries, **where)
    return Calibration(result, sum(sizes), time.perf_counter() - start)


def _model(recipe: Recipe, state: Mapping[str, Tensor], folder: Source | None) -> GPT:
    """Return the recipe's GPT with a float32 copy of the weights, or, with a folder, with the very weights."""
    remedy = "give the run or the recipe that these weights came from"
    if folder is None:
        weights = {name: weight.float() for name, weight in state.items()}
        model = GPT(recipe.model)
        if weights.keys() == model.state_dict().keys():
            model.load_state_dict(weights)
            return model
        from birdie.compress import fill

        return fill(model, weights, "the checkpoint", remedy)  # type: ignore[return-value]
    with torch.device("meta"):  # no initial weights
        model = GPT(dataclasses.replace(recipe.model, overtone_init=False, orthogonal_init=False))
    model.config = recipe.model
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        raise WeightsError(f"the checkpoint does not fit the recipe's model ({problem}); {remedy}") from error
    return model


def calibration_batches(
    recipe: Recipe, model: GPT, settings: CalibrationSettings, sampled: Callable[[int], None] | None = None
) -> list[Batch]:
    """Return batches of (ids, targets), in sequences as long as those of training; deterministic.

    Args:
        model: the source of samples, if the settings ask for its own.
        sampled: called with the number of tokens sampled so far.
    """
    length = recipe.train.train_seq_len
    if settings.data == "train":
        return training_sequences(open_shards(recipe.data), length, settings.tokens)
    if settings.data == "own":
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise WeightsError(
                    f"tensor {name!r} holds NaN or infinite values, so the model cannot be sampled; "
                    "give a checkpoint with finite weights"
                )
        from birdie.gpt.model.sampling import sample_sequences

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
        return _batches(rows, length)
    raise ConfigError("there is nothing to calibrate on; choose calibration data train or own")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed loss of a batch of (ids, targets), in nats."""
    device = next(model.parameters()).device
    ids, targets = (tensor.to(device) for tensor in batch)
    nats: Tensor = model.loss(ids, targets, reduction="none").sum()  # type: ignore[operator]
    return nats


def training_sequences(dataset: Dataset, length: int, tokens: int) -> list[Batch]:
    """Return about `tokens` training tokens in sequences of `length`, spread evenly over all shards, in fixed order."""
    shards = [read_shard(path) for path in dataset.train]
    starts = [(shard, offset) for shard in shards for offset in range(0, len(shard) - length, length)]
    if not starts:
        raise DataError(f"the training shards hold no sequence of {length} tokens to calibrate on; give more text")
    count = min(max(2, tokens // length), len(starts))
    chosen = [starts[i] for i in np.unique(np.linspace(0, len(starts) - 1, count).astype(int))]
    # permuted, so that the held-out batches, which are the last, come from all shards as well
    chosen = [chosen[i] for i in np.random.default_rng(0).permutation(len(chosen))]
    rows = np.stack([np.asarray(shard[offset : offset + length + 1]).astype(np.int64) for shard, offset in chosen])
    return _batches(torch.from_numpy(rows), length)


def _batches(rows: Tensor, length: int) -> list[Batch]:
    """Split rows (n, length + 1) into batches of (ids, targets), each (rows of a batch, length)."""
    parts = torch.split(rows, rows_per_batch(length))
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def rows_per_batch(length: int) -> int:
    """Return the number of sequences of `length` tokens in a calibration batch."""
    return max(1, _BATCH_TOKENS // length)


def artifact_metadata(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata that an artifact of the recipe's model needs to be scored and sampled."""
    facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    return {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": facts}
