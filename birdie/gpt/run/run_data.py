"""Data of a run: its shards, its tokenizer, and the validation tokens with their byte counts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from birdie.errors import ConfigError, DataError
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
    text = validation_text(recipe, dataset, tokenizer)
    if isinstance(text.bytes, np.ndarray):
        total = int(text.bytes.sum(dtype=np.int64))
        notify(f"the byte sidecar counts {total:,} bytes of validation text, for {len(text.tokens):,} tokens")
    return RunData(dataset, tokenizer, text)


def validation_text(recipe: Recipe, dataset: Dataset, tokenizer: Tokenizer) -> Text:
    """Return the validation tokens that the recipe asks for, with their bytes."""
    limit, vocabulary = recipe.validation.max_tokens, recipe.model.vocab_size
    tokens = dataset.validation_tokens(limit + 1 if limit else None)
    if (largest := int(tokens.max(initial=0))) >= vocabulary:
        raise DataError(
            f"the text has token {largest}, but the model's vocabulary is 0 to {vocabulary - 1}; score shards made "
            "with the model's own tokenizer"
        )
    return Text(tokens, byte_counts(dataset.val, tokenizer, tokens, vocabulary), tokenizer.bos_id)


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
