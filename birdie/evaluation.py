"""From an artifact to a score: the model it holds, rebuilt from its bytes alone, and its bits per byte.

    model.birdie ── load_gpt ──► GPT, recipe ── evaluate ──► Evaluation

Only what was decoded is ever scored, and scoring opens validation shards alone. An int8 export of the challenge that
was compressed whole (birdie.repack) is scored as well: dequantized as the challenge does it, its model's shape read off
its tensors, the rest of its settings the challenge's defaults.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birdie import artifact
from birdie.compress import baseline
from birdie.compress.state import fill
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.sidecar import byte_counts
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.device import choose_device, choose_dtype
from birdie.distributed import World
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.model.gpt import GPT
from birdie.model.shape import config_of
from birdie.recipe import DataSettings, Recipe
from birdie.repack import load_object
from birdie.score.bpb import Score, bits_per_byte

Progress = Callable[[float, float | None], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decoded artifact's score and where the time went.

    Attributes:
        sidecar: whether a byte sidecar counted the text, not the tokenizer's table.
        seconds: decode, compile, score, adapt.
        warnings: doubts about shards or tokenizer that did not stop the scoring.
    """

    score: Score
    bytes: int
    sidecar: bool
    seconds: dict[str, float]
    warnings: tuple[str, ...]


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, Recipe, Mapping[str, Any]]:
    """Rebuild the model an artifact holds: (model in evaluation mode, the recipe it was trained by, metadata).

    Raises:
        ArtifactError: the file is corrupt, or is not a birdie GPT.
        WeightsError: it is an export of a model other than the challenge's GPT.
    """
    summary = artifact.inspect(path)
    metadata = summary.metadata
    if summary.tree is not None:
        return *_load_export(path, device), metadata
    if metadata.get("model") != "gpt":
        raise ArtifactError(
            f"{path} does not hold a birdie GPT; only artifacts of `birdie train` can be scored or sampled"
        )
    try:
        recipe = Recipe.from_dict(metadata["recipe"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} describes its model in a way this version does not know: {error}") from error
    model = GPT(recipe.model)
    artifact.load(path, into=model)
    return model.to(device).eval(), recipe, metadata


def _load_export(path: Path | str, device: torch.device) -> tuple[GPT, Recipe]:
    """The GPT in a challenge's int8 export that was compressed whole, and the recipe its shape tells of."""
    state = baseline.dequantize(load_object(path))
    recipe = Recipe(model=config_of(state))
    model = GPT(recipe.model)
    fill(model, state, str(path))
    return model.to(device).eval(), recipe


def evaluate(
    path: Path | str,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    batch_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode an artifact and score it; what is left out comes from the recipe in the artifact.

    Raises:
        ArtifactError: the file is corrupt.
        DataError: shards or tokenizer are missing, or not those the model was trained with.
    """
    if seq_len is not None and seq_len < 1:
        raise ConfigError(f"seq_len is {seq_len}; a window needs at least one token")
    if max_tokens is not None and max_tokens < 0:
        raise ConfigError(f"max_tokens is {max_tokens}; give a number of tokens, or 0 for all")
    world = world or World()
    place = choose_device(device, world.local_rank)
    began = time.perf_counter()
    model, recipe, metadata = load_gpt(path, place)
    model.compute_dtype = choose_dtype(dtype or recipe.train.compute_dtype, place)
    decode_s = time.perf_counter() - began
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer or recipe.data.tokenizer)
    dataset = _open_validation(data, recipe.data)
    warnings = (*check_tokenizer(dataset, pieces), *_doubts(metadata))
    limit = recipe.validation.max_tokens if max_tokens is None else max_tokens
    tokens = dataset.validation_tokens()
    tokens = tokens[: limit + 1] if limit else tokens
    counts = byte_counts(dataset.val, pieces, tokens, recipe.model.vocab_size)
    seq_len = recipe.train.train_seq_len if seq_len is None else seq_len
    score = bits_per_byte(
        model,
        tokens,
        counts,
        seq_len=seq_len,
        batch_tokens=batch_tokens or recipe.validation.batch_tokens,
        bos_id=pieces.bos_id,
        device=place,
        world=world,
        progress=progress,
    )
    seconds = {"decode": decode_s, "compile": 0.0, "score": score.seconds, "adapt": 0.0}
    return Evaluation(score, Path(path).stat().st_size, isinstance(counts, np.ndarray), seconds, warnings)


def _open_validation(given: str | None, data: DataSettings) -> Dataset:
    """What to score on: a folder of shards, or validation shards by name or glob; left out, that of the training."""
    if given is None and data.val:
        return open_dataset(val=data.val)
    place = data.path if given is None else given
    return open_dataset(place, splits=["val"]) if given is None or Path(place).is_dir() else open_dataset(val=place)


def _doubts(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """What a score rests on that the file does not say."""
    if metadata.get("model") == "gpt":
        return ()
    return ("the export does not say how its model computes: it is scored as the challenge's baseline GPT",)


def check_same_tokenizer(tokenizer: Tokenizer, trained_with: Mapping[str, Any] | None, given: str) -> None:
    """Refuse a tokenizer other than the one in the artifact's metadata: its ids would mean other text; None: unknown.

    Raises:
        DataError: the two differ.
    """
    if trained_with is not None and tokenizer.digest != trained_with["sha256"]:
        raise DataError(
            f"the model was trained with tokenizer {trained_with['kind']} {trained_with['sha256'][:12]}, "
            f"but {given} is {tokenizer.kind} {tokenizer.digest[:12]}; give the one it was trained with (--tokenizer)"
        )
