"""The challenge's validation split in numbers: what scoring all of it counts, by tokenizer.

The text is that of the first 50,000 documents, which every tokenizer cuts into its own number of tokens. Totals are
those of published logs (openai/parameter-golf).
"""

import math
from typing import NamedTuple

TEXT_BYTES = 151_073_604
"""UTF-8 bytes of the decoded validation text."""
LONGEST_CONTEXT = 8_192
"""Targets that scoring may leave out at the end: windows drop less than one context."""


class Split(NamedTuple):
    """One tokenizer's cut of the validation text."""

    vocabulary: str
    targets: int


OLD_EXPORT = Split("1024", 63_779_840)
"""An older export, of other text: its bytes are not known to the byte."""
SPLITS = (
    Split("1024", 62_021_632),
    OLD_EXPORT,
    Split("4096", 45_508_608),
    Split("4096", 45_514_752),
    Split("8192", 40_540_160),
    Split("8192 caseops", 47_853_343),
)


def complete_split(targets: float) -> Split | None:
    """Return the split that `targets` cover but for less than a context; None if they cover none."""
    near = [split for split in SPLITS if abs(targets - split.targets) < LONGEST_CONTEXT]
    return min(near, key=lambda split: abs(split.targets - targets), default=None)


def scored_bytes(targets: float, loss: float, bpb: float) -> float:
    """Return the bytes that a score was divided by: nats · targets / (ln 2 · bits per byte)."""
    return targets * loss / (math.log(2) * bpb)
