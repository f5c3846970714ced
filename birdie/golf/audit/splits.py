"""The challenge's validation split in numbers: what a whole scoring counts, whatever the tokenizer.

The text is that of the first 50,000 documents, which every tokenizer cuts into its own number of tokens. Totals are
those of published logs (openai/parameter-golf); windows cut up to one context off them.
"""

import math
from dataclasses import dataclass

TEXT_BYTES = 151_073_604
"""UTF-8 bytes of the decoded validation text."""

DOCUMENTS = 50_000
TRAIN_SHARDS = 80
SHARDS_OF_SMALL_SPLIT = 1_499
"""Training shards of a CaseOps preparation that held out 10,000 documents instead of 50,000 (#2127)."""

LONGEST_CONTEXT = 8_192
"""Targets that a scoring may leave out at the end: less than one context."""


@dataclass(frozen=True, slots=True)
class Split:
    """One tokenizer's cut of the validation text.

    Attributes:
        vocabulary: as logs spell it: "1024", "8192 caseops".
        targets: of the whole split.
        bytes_per_token: of text.
    """

    vocabulary: str
    targets: int
    bytes_per_token: float


SPLITS = (
    Split("1024", 62_021_632, 2.436),
    Split("1024", 63_779_840, 2.443),  # an older export, of other text
    Split("4096", 45_508_608, 3.320),
    Split("4096", 45_514_752, 3.320),
    Split("8192", 40_540_160, 3.727),
    Split("8192 caseops", 47_853_343, 3.157),
)


def whole(targets: float) -> Split | None:
    """The split of which `targets` is all, but for less than a context; None: of none."""
    near = [split for split in SPLITS if -LONGEST_CONTEXT < targets - split.targets < LONGEST_CONTEXT]
    return min(near, key=lambda split: abs(split.targets - targets), default=None)


def of_vocabulary(vocabulary: str) -> tuple[Split, ...]:
    """The splits a tokenizer of that name can have cut; none if it is unknown."""
    return tuple(split for split in SPLITS if split.vocabulary == vocabulary)


def bytes_of(targets: float, loss: float, bpb: float) -> float:
    """The bytes that a score was divided by: it is nats · targets / ln 2 / bytes."""
    return targets * loss / (math.log(2) * bpb)
