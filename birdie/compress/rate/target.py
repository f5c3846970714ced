"""Target of compression: a byte budget, bits per weight, a largest KL from the float model, or lossless."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from birdie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """Target of compression: at most one field is set; without any, schemes keep the precision of their options.

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
        targets = [name for name in ("budget", "bits", "quality") if getattr(self, name) is not None]
        if len(targets) > 1:
            raise ConfigError("budget, bits and quality each set the size; give one of them")
        if targets and self.lossless:
            raise ConfigError(f"lossless keeps every bit, so it takes no {targets[0]}; drop one of the two")
        if self.bits is not None and not _is_number(self.bits, 64):
            raise ConfigError(f"bits={self.bits!r} per weight is out of range; choose more than 0 and at most 64")
        if self.quality is not None and not _is_number(self.quality, math.inf):
            raise ConfigError(
                f"quality={self.quality!r} is out of range; choose a positive number of nats or a share, such as 0.01"
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
