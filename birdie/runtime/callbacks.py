"""Callback types by which long work reports progress and messages, and can be stopped. The defaults do nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[float, float | None], None]
"""Called with (done, total) in the unit of the work; total is None while it is unknown."""

Notify = Callable[[str], None]
"""Called with one line for the log, without a newline."""

Stop = Callable[[], bool]
"""Called between units of work; True ends the work early."""


class StepHook(Protocol):
    """Participant in training steps: a technique of the model, quantization-aware training, or a report.

    It may also have `changes`: fractions of the run at which another graph begins to run, which warm-up visits.
    """

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Prepare the next step.

        Args:
            step: finished steps; -1 during warm-up.
            fraction: of the run that is done. What the hook does must depend on it alone, so that resuming is exact.
            multiplier: factor of the schedule on the learning rates.
        """
        ...

    def penalty(self) -> "Tensor | None":
        """Return the term to add to the loss of this step (0-d), or None."""
        ...


def reporting(progress: Progress | bool | None, description: str, unit: str) -> AbstractContextManager[Progress | None]:
    """Return a context that yields the callback of an argument `progress` of the Python API, or None.

    Args:
        progress: a callback; True: that of a progress bar on stderr, or in the notebook; False or None: nothing.
        description: of the work, beside the bar.
        unit: of the work, for its rate.
    """
    if progress is not True:
        return nullcontext(progress or None)
    from birdie.runtime.progress import bar  # imported late: rich is for those who look

    return bar(description, unit)


def no_progress(_done: float, _total: float | None) -> None:
    """Ignore the progress."""


def no_message(_line: str) -> None:
    """Ignore the message."""


def never() -> bool:
    """Return False: the work runs to its end."""
    return False
