"""Callbacks by which long work reports progress and messages, and can be stopped: types, defaults, a progress bar."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[float, float | None], None]
"""Called with (done, total) in the unit of the work; total is None while it is unknown."""

Notify = Callable[[str], None]
"""Called with one line for the log, without a newline."""

Stop = Callable[[], bool]
"""Called between units of work; True ends the work early."""

LONGEST_SILENCE = 15.0
"""Seconds after which long work without a progress bar says how far it is."""


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


def reporting(progress: Progress | bool | None, description: str, unit: str) -> AbstractContextManager[Progress | None]:
    """Return a context that yields the callback of an argument `progress` of the Python API, or None.

    Args:
        progress: a callback; True: that of a progress bar on stderr, or in the notebook; False or None: nothing.
    """
    return bar(description, unit) if progress is True else nullcontext(progress or None)


def in_lines(notify: Notify, description: str, unit: str, clock: Callable[[], float] = monotonic) -> Progress:
    """Return a callback that says in a line how far long work is, after each long silence.

    Args:
        notify: called with the line.
        description, unit: of the work.
        clock: seconds.
    """
    last = clock()

    def update(done: float, total: float | None) -> None:
        nonlocal last
        if clock() - last >= LONGEST_SILENCE:
            last = clock()
            notify(f"{description}: {done:,.0f}{'' if total is None else f' of {total:,.0f}'} {unit}")

    return update


def no_progress(_done: float, _total: float | None) -> None:
    """Ignore the progress."""


def no_message(_line: str) -> None:
    """Ignore the message."""


def never() -> bool:
    """Return False: the work runs to its end."""
    return False


@contextmanager
def bar(description: str, unit: str, console: "Console | None" = None) -> Iterator[Progress]:
    """Show a progress bar, in a notebook below the cell, and yield `update(done, total)`.

    Nothing is shown without a terminal, or on ranks but the first.

    Args:
        description: of the work.
        unit: of the work, for its rate.
        console: to show it on, so that log lines of the same console appear above it; None: stderr.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter) or os.environ.get("RANK", "0") != "0":
        yield no_progress
        return
    from rich import progress  # imported late: for those who look
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        """Work per second, in the unit of the task."""

        def render(self, task: progress.Task) -> Text:
            return Text(f"{quantity(task.speed)} {unit}/s" if task.speed else "", style="cyan")

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TextColumn("{task.percentage:>3.0f}%"),
        Rate(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as shown:
        number = shown.add_task(description, total=None)
        task = shown.tasks[0]

        def update(done: float, total: float | None) -> None:
            # `update` would forget the rate at a new total, such as an estimate of the steps of a run, and take a bar
            # that was full once for finished
            task.total, task.finished_time = total, None
            shown.update(number, completed=done)

        yield update


def quantity(value: float) -> str:
    """Return a number with three digits and a suffix: 1,234,567 → "1.23M"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
