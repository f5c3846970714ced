"""History of a run's validations: the file `history.jsonl` in the run folder, one JSON object a line, by step.

    {"step": 1000, "train_ms": 43415.0, "bpb": 1.3805}

A new entry replaces all entries of the same or a later step, so that a run resumed from an earlier checkpoint has one
entry per step.
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
    """Result of one validation.

    Attributes:
        step: number of finished training steps.
        train_ms: training time of these steps.
        bpb: bits per byte of the float model.
    """

    step: int
    train_ms: float
    bpb: float


def read(folder: Path) -> list[Entry]:
    """Return the validations of the run in `folder`, by step; an empty list if there is no history file.

    Raises:
        DataError: the file is not a history.
    """
    path = folder / NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        entries = [
            Entry(int(values["step"]), float(values["train_ms"]), float(values["bpb"]))
            for values in map(json.loads, lines)
        ]
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it, and the run starts a new history") from error
    if any(entry.step >= following.step for entry, following in itertools.pairwise(entries)):
        raise DataError(f"the steps in {path} do not increase; delete it, and the run starts a new history")
    return entries


def record(folder: Path, entry: Entry) -> None:
    """Add `entry`, and drop all entries of the same or a later step.

    Raises:
        DataError: the file exists and is not a history.
        OutputError: the file cannot be written.
    """
    _write(folder, [*(earlier for earlier in read(folder) if earlier.step < entry.step), entry])


def truncate(folder: Path, step: int) -> None:
    """Drop all entries later than `step`, from which a run starts or resumes.

    Raises:
        OutputError: the file cannot be written.
    """
    if not (folder / NAME).is_file():
        return
    try:
        entries = [entry for entry in read(folder) if entry.step <= step]
    except DataError:  # a damaged history must not stop the run
        entries = []
    _write(folder, entries)


def _write(folder: Path, entries: list[Entry]) -> None:
    write_bytes(folder / NAME, "".join(json.dumps(asdict(entry)) + "\n" for entry in entries).encode())
