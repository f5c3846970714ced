"""Batches of synthetic tokens, for benchmarks of speed: they take no time to load and need no file."""

from typing import Any

import torch
from torch import Tensor

from birdie.train.settings import TrainSettings


class StatelessLoader:
    """Base of loaders that a checkpoint stores nothing of."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""
        del state


DOCUMENT = 1000  # tokens of a document, about as many as FineWeb's have


class RepeatedTokens(StatelessLoader):
    """Loader of one random chunk, the same in every micro-step: the values of tokens do not change the speed."""

    def __init__(
        self, settings: TrainSettings, vocab_size: int = 1024, seed: int = 0, bos_id: int | None = None
    ) -> None:
        rows = settings.train_batch_tokens // settings.accumulation // settings.train_seq_len
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(vocab_size, (rows, settings.train_seq_len + 1), generator=generator)
        if bos_id is not None:
            self._rows.view(-1)[::DOCUMENT] = bos_id

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        return self._rows[:, :-1], self._rows[:, 1:]
