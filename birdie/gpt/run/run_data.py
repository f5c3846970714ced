"""Data of a run: its shards, its tokenizer, and the validation tokens with their byte counts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from birdie.errors import ConfigError
from birdie.gpt.data.byte_sidecar import byte_counts
from birdie.gpt.data.dataset import INFO_NAME, Dataset, check_tokenizer, open_dataset
from birdie.gpt.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.accumulator import Text
from birdie.system.callbacks import Notify


@dataclass(frozen=True, slots=True)
class RunData:
    """Data that a run reads.

    Attributes:
        dataset: the shards.
        tokenizer: the tokenizer that made the shards.
        text: the validation split, or its beginning.
    """

    dataset: Dataset
    tokenizer: Tokenizer
    text: Text


def open_run_data(recipe: Recipe, notify: Notify) -> RunData:
    """Open the shards and the tokenizer of `recipe`; `notify` gets warnings about them."""
    dataset = open_shards(recipe.data)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    _check_vocabulary(recipe, tokenizer)
    for warning in check_tokenizer(dataset, tokenizer):
        notify(warning)
    limit = recipe.validation.max_tokens
    val_tokens = dataset.validation_tokens(limit + 1 if limit else None)
    counts = byte_counts(dataset.val, tokenizer, val_tokens, recipe.model.vocab_size)
    if isinstance(counts, np.ndarray):
        total = int(counts.sum(dtype=np.int64))
        notify(f"the byte sidecar counts {total:,} bytes of validation text, for {len(val_tokens):,} tokens")
    return RunData(dataset, tokenizer, Text(val_tokens, counts, tokenizer.bos_id))


def open_shards(data: DataSettings) -> Dataset:
    """Open the shards that the settings name, or those in their folder."""
    if data.train or data.val:
        return open_dataset(train=data.train, val=data.val)
    return open_dataset(data.path)


def data_files(data: DataSettings, *, shards: bool = True) -> list[Path]:
    """Return the files that the settings name: the tokenizer's and, with `shards`, those of the data set."""
    files = [] if data.tokenizer in BYTES else [Path(data.tokenizer)]
    if shards:
        dataset = open_shards(data)
        paths = (*dataset.train, *dataset.val)
        files += (*paths, *{path.parent / INFO_NAME for path in paths})
    return files


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer} has {tokenizer.vocab_size} pieces but the model's vocab_size is "
            f"{recipe.model.vocab_size}; set --model.vocab-size {tokenizer.vocab_size}"
        )
