"""The challenge's validation split in numbers: what scoring all of it counts, by tokenizer.

The text is that of the first 50,000 documents, which every tokenizer cuts into its own number of tokens. Totals are
those of published logs (openai/parameter-golf).
"""

import math
from typing import NamedTuple

TEXT_BYTES = 151_073_604
"""UTF-8 bytes of the decoded validation text."""
TRAIN_SHARDS = 80
SHARDS_OF_SMALL_SPLIT = 1_499
"""Training shards of a CaseOps preparation that held out 10,000 documents instead of 50,000 (parameter-golf#2127)."""
LONGEST_CONTEXT = 8_192
"""Targets that scoring may leave out at the end: windows drop less than one context."""


class Split(NamedTuple):
    """One tokenizer's cut of the validation text; the vocabulary as logs spell it ("1024", "8192 caseops")."""

    vocabulary: str
    targets: int
    bytes_per_token: float


OLD_EXPORT = Split("1024", 63_779_840, 2.443)
"""An older export, of other text: its bytes are not known to the byte."""
SPLITS = (
    Split("1024", 62_021_632, 2.436),
    OLD_EXPORT,
    Split("4096", 45_508_608, 3.320),
    Split("4096", 45_514_752, 3.320),
    Split("8192", 40_540_160, 3.727),
    Split("8192 caseops", 47_853_343, 3.157),
)


def complete_split(targets: float) -> Split | None:
    """Return the split that `targets` cover but for less than a context; None if they cover none."""
    near = [split for split in SPLITS if abs(targets - split.targets) < LONGEST_CONTEXT]
    return min(near, key=lambda split: abs(split.targets - targets), default=None)


def splits_of(vocabulary: str) -> tuple[Split, ...]:
    """Return the splits that a tokenizer of that vocabulary may have cut; none if it is unknown."""
    return tuple(split for split in SPLITS if split.vocabulary == vocabulary)


def scored_bytes(targets: float, loss: float, bpb: float) -> float:
    """Return the bytes that a score was divided by: nats · targets / (ln 2 · bits per byte)."""
    return targets * loss / (math.log(2) * bpb)
