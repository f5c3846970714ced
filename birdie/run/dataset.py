"""The text of a run: its shards, its tokenizer, and the stream it is scored on with the bytes of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.data.byte_accounting import ByteTable
from birdie.data.byte_sidecar import byte_counts
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ConfigError
from birdie.run.recipe import DataSettings, Recipe


@dataclass(frozen=True, slots=True)
class Text:
    """What a run reads.

    Attributes:
        dataset: its shards.
        tokenizer: they were made with.
        val_tokens: what is scored: the whole validation text, or its beginning.
        byte_counts: of it, as `birdie.score.bpb` takes them.
    """

    dataset: Dataset
    tokenizer: Tokenizer
    val_tokens: NDArray[np.uint16]
    byte_counts: ByteTable | NDArray[np.uint16]


def read(recipe: Recipe, notify: Callable[[str], None]) -> Text:
    """Open what `recipe` names; doubts about it go to `notify`.

    Raises:
        DataError, ConfigError: shards, tokenizer and model do not fit together.
    """
    dataset = _open(recipe.data)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    _check_vocabulary(recipe, tokenizer)
    for warning in check_tokenizer(dataset, tokenizer):
        notify(warning)
    val_tokens = _validation_stream(dataset, recipe)
    counts = byte_counts(dataset.val, tokenizer, val_tokens, recipe.model.vocab_size)
    if isinstance(counts, np.ndarray):
        total = int(counts.sum(dtype=np.int64))
        notify(f"the byte sidecar counts {total:,} bytes of validation text, for {len(val_tokens):,} tokens")
    return Text(dataset, tokenizer, val_tokens, counts)


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer} has {tokenizer.vocab_size} pieces but the model's vocab_size is "
            f"{recipe.model.vocab_size}; set --model.vocab-size {tokenizer.vocab_size}"
        )


def _open(data: DataSettings) -> Dataset:
    if data.train or data.val:
        return open_dataset(train=data.train, val=data.val)
    return open_dataset(data.path)


def _validation_stream(dataset: Dataset, recipe: Recipe) -> NDArray[np.uint16]:
    tokens = dataset.validation_tokens()
    limit = recipe.validation.max_tokens
    return tokens[: limit + 1] if limit else tokens
