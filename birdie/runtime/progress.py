"""A progress bar on stderr, for the command line and for `progress=True` in Python; in a notebook, below the cell."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from birdie.runtime import callbacks


class RateColumn(ProgressColumn):
    """Column with the work per second, in the unit of the task."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{quantity(task.speed)} {task.fields.get('unit', '')}/s", style="cyan")


@contextmanager
def bar(description: str, unit: str, console: Console | None = None) -> Iterator["callbacks.Progress"]:
    """Show a progress bar and yield `update(done, total)`; show nothing without a terminal, or on ranks but the first.

    Args:
        description: of the work.
        unit: of the work, for its rate.
        console: to show it on, so that log lines of the same console appear above it; None: stderr.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        RateColumn(),
        TimeRemainingColumn(),
    )
    console = console or Console(stderr=True)
    visible = (console.is_terminal or console.is_jupyter) and os.environ.get("RANK", "0") == "0"
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = progress.add_task(description, total=None, unit=unit)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def quantity(value: float) -> str:
    """Return a number with three digits and a suffix: 1,234,567 → "1.23M"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
