"""How every command talks: tables and answers on stdout, progress and remarks on stderr, errors in one sentence.

With `--json` stdout carries exactly one JSON object, an error included, and everything else goes to stderr.
"""

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FrameType
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from birdie.errors import BirdieError, ConfigError
from birdie.run.recipe_file import explain

Json = Annotated[bool, Parameter(name="--json", negative=(), help="One JSON object on stdout, all else on stderr.")]

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def version() -> str:
    """birdie's version."""
    return metadata.version("birdie")


def run(build: Callable[[Sequence[str]], tuple[App, list[str]]], tokens: Sequence[str]) -> int:
    """Run one command; returns the exit code."""

    def command() -> None:
        app, arguments = build(tokens)
        app(arguments, exit_on_error=False, print_error=False)

    return guarded(command, as_json=any(token.partition("=")[0] == "--json" for token in tokens))


def guarded(command: Callable[[], None], *, as_json: bool = False) -> int:
    """Call `command`; returns 0, 1 after an error in one sentence, or 130 after Ctrl-C.

    Under torchrun all ranks meet the same error: each says it on stderr, and rank 0 alone writes JSON.
    """
    as_json = as_json and os.environ.get("RANK", "0") == "0"
    try:
        command()
    except KeyboardInterrupt:
        if as_json:
            emit({"error": {"type": "KeyboardInterrupt", "message": "stopped by Ctrl-C"}})
        stderr.print("Stopped by Ctrl-C.")
        return 130
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except CycloptsError as error:
        return _fail(ConfigError(explain(error)), as_json)
    except Exception as error:
        foreseen = isinstance(error, BirdieError | OSError | MemoryError) or _out_of_memory(error)
        if not foreseen:  # a defect of ours: say so, and where
            traceback.print_exc(file=sys.stderr)
        return _fail(error, as_json)
    return 0


def _out_of_memory(error: Exception) -> bool:
    # torch's, unimported; on a CPU it says so in words alone
    torch_s = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and torch_s)


def _fail(error: Exception, as_json: bool) -> int:
    if _out_of_memory(error):
        message = "out of memory; use a smaller model, batch or file"
    elif isinstance(error, OSError) and not isinstance(error, BirdieError):
        message = f"{error.filename or 'a file'}: {(error.strerror or str(error)).lower()}"
    else:
        message = " ".join(str(error).split())
    if as_json:
        emit({"error": {"type": type(error).__name__, "message": message}})
    else:
        stderr.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    return 1


def remark(text: str) -> None:
    """One line on stderr."""
    stderr.print(text, soft_wrap=True, markup=False)


@contextmanager
def compiling_told() -> Iterator[None]:
    """Around a command that codes: one line on stderr if kernels have to be compiled; under torchrun rank 0 says it."""
    from birdie.runtime.kernels import on_compiling  # not above: numba takes longer to import than --help may

    told = os.environ.get("RANK", "0") == "0"
    with on_compiling(
        lambda: remark("Compiling the coder's kernels, once: this takes some seconds.") if told else None
    ):
        yield


def emit(answer: Mapping[str, Any]) -> None:
    """The one JSON object of a `--json` run; NaN, which JSON lacks, becomes null."""
    sys.stdout.write(json.dumps(_finite(answer), default=str) + "\n")  # ASCII, whatever the terminal's encoding
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def show(table: Table) -> None:
    """A table on stdout."""
    stdout.print(table)


def say(text: str) -> None:
    """A line on stdout, never wrapped: it may be a path somebody copies."""
    stdout.print(text, soft_wrap=True, markup=False)


class RateColumn(ProgressColumn):
    """Work per second, in the task's own unit."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{quantity(task.speed)} {task.fields.get('unit', '')}/s", style="cyan")


@contextmanager
def progress_bar(description: str, unit: str) -> Iterator[Callable[[float, float | None], None]]:
    """A bar on stderr; yields `update(done, total)`. Silent when stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(description, total=None, unit=unit)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def quantity(value: float) -> str:
    """1,234,567 → "1.23M"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def plain(name: str) -> Text:
    """A name from a file as it is: no markup in it counts, and what could steer a terminal is shown instead of sent."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name))


def size(value: int) -> str:
    """Bytes with thousands separators and unit."""
    return f"{value:,} B"


@contextmanager
def ctrl_c_asks(*, shown: bool = True, after: str = "this step") -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that long work asks between its steps; the second one stops at once."""
    asked = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if shown:
            remark(f"Stopping after {after} (Ctrl-C again stops at once and saves nothing)")

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
