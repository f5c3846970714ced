"""History of a run's validations: the file `history.jsonl` in the run folder, one JSON object a line, by step.

    {"step": 1000, "train_ms": 43415.0, "bpb": 1.3805}

A new entry replaces all entries of the same or a later step, so that a run resumed from an earlier checkpoint has one
entry per step.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from birdie.errors import DataError
from birdie.system.callbacks import Notify, no_message
from birdie.system.files import write_bytes
from birdie.system.structured import read_steps, rewrite_steps

NAME = "history.jsonl"
VALUES = ("train_ms", "bpb")
"""Names that every line has beside the step."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Result of one validation.

    Attributes:
        step: number of finished training steps.
        train_ms: training time of these steps.
        bpb: bits per byte of the float model.
    """

    step: int
    train_ms: float
    bpb: float


def read(folder: Path) -> list[HistoryEntry]:
    """Return the validations of the run in `folder`, by step; an empty list if there is no history file."""
    lines, damage = read_steps(folder / NAME, VALUES)
    if damage:
        raise DataError(f"{damage}; delete it, and the run starts a new history")
    return [HistoryEntry(int(line["step"]), float(line["train_ms"]), float(line["bpb"])) for line in lines]


def record(folder: Path, entry: HistoryEntry, notify: Notify = no_message) -> None:
    """Add `entry`, and drop all entries of the same or a later step.

    Args:
        notify: called with a warning if the file is damaged; what is damaged is kept in a copy.
    """
    rewrite_steps(folder / NAME, VALUES, entry.step - 1, notify, [asdict(entry)])


def truncate(folder: Path, step: int, notify: Notify = no_message) -> None:
    """Drop all entries later than `step`, from which a run starts or resumes; a run that does not resume gives -1.

    Args:
        notify: as for `record`.
    """
    if not (folder / NAME).exists():
        return
    if step < 0:
        write_bytes(folder / NAME, b"")
    else:
        rewrite_steps(folder / NAME, VALUES, step, notify)
