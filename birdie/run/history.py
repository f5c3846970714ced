"""The validations of a run, in a file of its folder: `history.jsonl`, a line each, by step.

    {"step": 1000, "train_ms": 43415.0, "bpb": 1.3805}

Every entry replaces those of its own step and later ones, so that a run that goes on from a checkpoint tells its story
once.
"""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from birdie.errors import DataError
from birdie.runtime.files import write_bytes

NAME = "history.jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """One validation.

    Attributes:
        step: steps done.
        train_ms: training time they took.
        bpb: bits per byte of the float model.
    """

    step: int
    train_ms: float
    bpb: float


def read(folder: Path) -> list[Entry]:
    """What the run in `folder` validated so far, by step; nothing if it never did.

    Raises:
        DataError: the file is not a history.
    """
    path = folder / NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        entries = [
            Entry(int(each["step"]), float(each["train_ms"]), float(each["bpb"])) for each in map(json.loads, lines)
        ]
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it, and the run goes on with a new one") from error
    if any(one.step >= other.step for one, other in itertools.pairwise(entries)):
        raise DataError(f"the steps of {path} do not rise; delete it, and the run goes on with a new one")
    return entries


def record(folder: Path, entry: Entry) -> None:
    """Add `entry`, and drop what is not before it.

    Raises:
        DataError: the file is there and is not a history.
        OutputError: it cannot be written.
    """
    _write(folder, [*(each for each in read(folder) if each.step < entry.step), entry])


def cut(folder: Path, step: int) -> None:
    """Drop what comes after `step`: a run begins, or goes on, from there.

    Raises:
        OutputError: the file cannot be written.
    """
    if not (folder / NAME).is_file():
        return
    try:
        kept = [each for each in read(folder) if each.step <= step]
    except DataError:  # the run matters more than its story
        kept = []
    _write(folder, kept)


def _write(folder: Path, entries: list[Entry]) -> None:
    write_bytes(folder / NAME, "".join(json.dumps(asdict(each)) + "\n" for each in entries).encode())
