"""JSON and TOML files of runs, read without belief: whatever a file holds, the result is values or one sentence.

A file may be cut, have flipped bits or another kind of content, or be no file at all: a named pipe under its name would
block whoever opens it. A damaged file is never replaced in silence: `keep_damaged` leaves a copy beside it and says so.
"""

import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from birdie.errors import DataError
from birdie.system.callbacks import Notify
from birdie.system.files import write_bytes
from birdie.system.parsing import parse_object, to_json
from birdie.system.regular import open_regular

_MOST = 2**53
"""Integers from here on are not exact as float64."""
_BEGIN = b'{"step": '
_UNREADABLE = (ValueError, RecursionError)
"""Raised by parsers: wrong syntax, text that is not UTF-8, integers of thousands of digits; nesting."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    try:
        with open_regular(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({(error.strerror or str(error)).lower()})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return _parsed(path, parse_object)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    return _parsed(path, lambda data: tomllib.loads(data.decode()))


def _parsed(path: Path, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
    data = read_bytes(path)
    try:
        return parse(data)
    except _UNREADABLE as error:
        raise DataError(f"{path} is damaged ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]


class StepLines(NamedTuple):
    """A log of steps, one JSON object of numbers a line, such as `metrics.jsonl`."""

    lines: list[dict[str, float]]  # up to the first damaged one; their steps increase
    damage: str  # what is wrong with the file, and from which line on; empty if nothing is


def read_steps(path: Path, required: Sequence[str]) -> StepLines:
    """Read a log of steps as far as it is sound. A last line that a killed process left unfinished is no damage.

    Args:
        path: of the file, which need not exist.
        required: names that every line has beside "step".
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return StepLines([], "")
    except DataError as error:
        return StepLines([], str(error))
    lines: list[dict[str, float]] = []
    *texts, unfinished = data.split(b"\n")
    for number, text in enumerate([*texts, unfinished] if unfinished else texts, 1):
        try:
            line = _step_line(parse_object(text), required)
            if lines and line["step"] <= lines[-1]["step"]:
                raise ValueError(f"step {line['step']} follows step {lines[-1]['step']}")
        except ValueError as error:
            if number > len(texts) and _is_cut(text):
                break
            return StepLines(lines, f"{path} is damaged from line {number} on ({_reason(error)})")
        lines.append(line)
    return StepLines(lines, "")


def _is_cut(text: bytes) -> bool:
    """Return whether `text` is the beginning of a line, as a process leaves it that is killed while it writes."""
    return text[: len(_BEGIN)] == _BEGIN[: len(text)] and text.isascii() and text.decode().isprintable()


def _step_line(values: dict[str, Any], required: Sequence[str]) -> dict[str, float]:
    for name in ("step", *required):
        if name not in values:
            raise ValueError(f"{name} is missing")
    for name, value in values.items():
        if not is_number(value) or (name == "step" and not (isinstance(value, int) and value >= 0)):
            raise ValueError(f"{name} is {str(value)[:40]}")
    return values


def is_number(value: object) -> bool:
    """Return whether a value of JSON or TOML is a finite number that float64 holds."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def rewrite_steps(
    path: Path, required: Sequence[str], last: int, notify: Notify, added: Sequence[Mapping[str, float]] = ()
) -> None:
    """Drop all lines of a log later than step `last`, then append `added`. What is damaged is kept in a copy."""
    log = read_steps(path, required)
    if log.damage:
        keep_damaged(path, log.damage, notify)
    lines = [*(line for line in log.lines if line["step"] <= last), *added]
    write_bytes(path, "".join(to_json(line) + "\n" for line in lines).encode())


def keep_damaged(path: Path, damage: str, notify: Notify) -> None:
    """Copy a damaged file that is about to be replaced to an unused name beside it, and warn."""
    copy = unused_path(path.with_name(f"{path.name}.damaged"))
    write_bytes(copy, read_bytes(path))
    notify(f"warning: {damage}; what is sound is used, and the damaged file is kept as {copy.name}")


def unused_path(path: Path) -> Path:
    """Return `path`, with a number appended if something has that name."""
    candidate, number = path, 1
    while os.path.lexists(candidate):
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate
