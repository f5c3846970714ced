"""Interfaces that the training loop expects of a model, a loader, and what takes part in its steps."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Trainable(Protocol):
    """Interface of a model that `fit` trains."""

    compute_dtype: torch.dtype

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats (0-d) of targets, (batch, length), after ids, (batch, length)."""
        ...

    def to(self, device: torch.device) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class DeclaresGroups(Protocol):
    """Interface of a model that says which optimizer group each of its parameters belongs to."""

    def parameter_groups(self) -> Mapping[str, str]:
        """Return the optimizer group of each parameter by name."""
        ...


class StepHook(Protocol):
    """Technique that takes part in training steps, such as quantization-aware training."""

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Prepare the next step.

        Args:
            step: finished steps; -1 during warm-up.
            fraction: of the run that is done.
            multiplier: factor on the learning rates.
        """
        ...

    def penalty(self) -> Tensor | None:
        """Return the term to add to the loss of this step (0-d), or None."""
        ...


class DocumentFinder(Protocol):
    """Finds the documents of a micro-batch, for attention that isolates them."""

    packed: bool
    """True if rows are longer than a sequence, so that only the bounds separate documents."""

    def __call__(self, ids: Tensor, longest: int) -> Any:
        """Return `bounds` for the model's loss: ids, (rows, length) on the CPU, in segments of at most `longest`."""
        ...


class Batches(Protocol):
    """Interface of a loader. Its state is a position in the stream of all ranks, the same on every rank."""

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank's next chunk of a step, each (sequences, length) int64 on the CPU."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position."""
        ...
