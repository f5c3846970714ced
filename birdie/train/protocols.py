"""What the training loop asks of a model and of a loader."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Trainable(Protocol):
    """What `fit` asks of a model."""

    compute_dtype: torch.dtype

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats (0-d) of targets, (batch, length), after ids, (batch, length)."""
        ...

    def to(self, device: torch.device) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


class Preparation(Protocol):
    """A technique that lives inside training, such as quantization-aware training."""

    def before_step(self, step: int, share: float, multiplier: float) -> None:
        """Told before each step: finished steps (-1 while priming), share of the run done, factor on the rates."""
        ...

    def penalty(self) -> Tensor | None:
        """What to add to the loss of this step (0-d), or None."""
        ...


class Documents(Protocol):
    """What finds the documents of a micro-batch, for attention that keeps them apart."""

    packed: bool
    """Whether rows are longer than a sequence: they are then cut by the bounds alone."""

    def __call__(self, ids: Tensor, longest: int) -> Any:
        """What the model's loss takes as `bounds` for ids, (rows, length) on the CPU, in pieces of up to `longest`."""
        ...


class Batches(Protocol):
    """What `fit` asks of a loader. Its state is a position in the whole stream, the same on every rank."""

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one micro-step of this rank, each (sequences, length) int64 on the CPU."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as what JSON can hold."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position."""
        ...
