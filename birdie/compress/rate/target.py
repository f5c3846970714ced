"""What a file is to be: at most so many bytes, so many bits a weight, so near to the float model, or lossless."""

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from birdie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """At most one of these; without any, schemes keep their own precision.

    Attributes:
        budget: bytes the file may have.
        bits: the same per weight, everything included.
        quality: mean KL from the float model's predictions that it may cost, in nats per token or sample.
        lossless: whether every bit of every tensor is kept.

    Raises:
        ConfigError: two are given, or one is out of range.
    """

    budget: int | None = None
    bits: float | None = None
    quality: float | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("budget", "bits", "quality") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("budget, bits and quality each set the size; give one of them")
        if given and self.lossless:
            raise ConfigError(f"lossless keeps every bit, so it takes no {given[0]}; drop one of the two")
        if self.bits is not None and not _is_number(self.bits, 64):
            raise ConfigError(f"bits={self.bits!r} per weight is out of range; choose more than 0 and at most 64")
        if self.quality is not None and not _is_number(self.quality, math.inf):
            raise ConfigError(
                f"quality={self.quality!r} is out of range; choose a positive number of nats of KL per target"
            )

    @property
    def searched(self) -> bool:
        """Whether a search chooses the precision of what no rule names."""
        return not (self.budget is None and self.bits is None and self.quality is None)

    def in_bytes(self, weights: int) -> int | None:
        """Return the bytes that a file of so many weights may have; None where its size is not the target."""
        return self.budget if self.bits is None else int(self.bits * weights / 8)


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, Real) and 0 < float(value) <= most and float(value) < math.inf


def whole_number(name: str, value: Any, least: int = 1) -> int | None:
    """Return `value` as an int (numpy's are taken, floats are not); None stays None.

    Raises:
        ConfigError: it is something else, or below `least`.
    """
    try:
        if value is None or (operator.index(value) >= least and not isinstance(value, bool)):
            return None if value is None else operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} {value!r} is not a whole number from {least} up; give an int")
