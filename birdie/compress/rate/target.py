"""Target of compression: a byte budget, bits per weight, a largest KL, or lossless; and sizes written as 16MB.

Units are decimal unless binary: 16MB is 16,000,000; 16MiB is 16,777,216.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from birdie.errors import ConfigError
from birdie.system.parsing import whole_number

_WORST = 20  # nats, or a share, of difference: a uniform guess among 2^28 tokens; 90 is meant as per cent


@dataclass(frozen=True, slots=True)
class Target:
    """Target of compression, one of its fields; without any, schemes keep the precision of their options.

    Attributes:
        budget: bytes the file may have.
        bits: the same budget as bits per weight, everything included.
        quality: largest mean KL from the float model's predictions, in nats per token or sample, or largest relative
            error for losses without probabilities.
        lossless: whether every bit of every tensor is kept.
    """

    budget: int | None = None
    bits: float | None = None
    quality: float | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        if self.bits is not None and not _is_number(self.bits, 64):
            raise ConfigError(f"bits={self.bits!r} per weight is out of range; choose more than 0 and at most 64")
        if self.quality is not None and not _is_number(self.quality, _WORST):
            raise ConfigError(
                f"quality={self.quality!r} is out of range: it is the difference from the float model, in nats or as a "
                f"share, and the lower the better; choose above 0 and at most {_WORST}, such as 0.01"
            )

    @property
    def searched(self) -> bool:
        """True if a search chooses the precision of tensors without a rule."""
        return not (self.budget is None and self.bits is None and self.quality is None)

    def in_bytes(self, weights: int) -> int | None:
        """Return the bytes that a file of `weights` weights may have; None if the size is not the target."""
        return self.budget if self.bits is None else int(self.bits * weights / 8)


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, Real) and 0 < float(value) <= most and float(value) < math.inf


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of "16MB", "1.5 MiB" or "250000", rounded down."""
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].lower() not in UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes (250000) or a unit: kB, MB, GB, KiB, MiB, GiB")
    size = int(Decimal(re.sub("[_,]", "", match[1])) * UNITS[match[2].lower()])
    if not 1 <= size < 2**63:
        raise ConfigError(f"size {text[:40]!r} is out of range; give one above zero and below 2^63 bytes")
    return size


def size_of(name: str, value: int | str | None) -> int | None:
    """Return the bytes of an option, a whole number or a text such as "16MB"; None stays None."""
    return parse_size(value) if isinstance(value, str) else whole_number(name, value)
