"""Command line that all benchmarks share: flags in, progress on stderr, rows on stdout as a table or as JSON.

main(arguments) ──► parser ──► rows ──► report: the table, or --json with versions, machine and commit
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from birdie.errors import BirdieError, ConfigError
from birdie.system import provenance

Row = dict[str, Any]
T = TypeVar("T")


def command_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flag --json, whose description is the first line of the module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def comma_separated(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the argparse type of a comma-separated list with at least one value."""

    def parse(text: str) -> list[T]:
        values = [convert(part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise argparse.ArgumentTypeError("the list is empty; separate values by commas")
        return values

    return parse


def one_of(names: Sequence[str], kind: str) -> Callable[[str], str]:
    """Return an argparse type that accepts only `names`; `kind` names them in the error message."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text} is no {kind}; choose from {', '.join(names)}")
        return text

    return parse


def log(line: str) -> None:
    """Print a progress line on stderr."""
    print(line, file=sys.stderr, flush=True)


def shared_data() -> Path:
    """Return the folder of the shared data.

    Raises:
        ConfigError: BIRDIE_DATA is unset.
    """
    if not os.environ.get("BIRDIE_DATA"):
        raise ConfigError("this benchmark needs the shared data; set BIRDIE_DATA to its folder")
    return Path(os.environ["BIRDIE_DATA"])


@contextmanager
def errors_as_exit(*types: type[Exception]) -> Iterator[None]:
    """Turn birdie's errors, and further `types`, inside the block into one line on stderr and exit code 1."""
    caught: tuple[type[Exception], ...] = (BirdieError, *types)
    try:
        yield
    except caught as error:
        raise SystemExit(str(error)) from error


def report(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print `rows` on stdout: a table, or one JSON object with versions, machine and commit."""
    if as_json:
        head = {"versions": provenance.versions(), "machine": provenance.machine(), "commit": provenance.commit()}
        sys.stdout.write(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n")
        return
    table = Table()
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        is_text = isinstance(rows[0].get(key), str)
        table.add_column(key, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None of a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
