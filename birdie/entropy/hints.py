"""Types of the coder's interface that need neither numpy nor numba: hints, how hard to try, and a coded array.

Encoder and decoder derive the same hints from the tensor's scheme, so hints cost no bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["symbols", "scales", "sign", "exponent", "mantissa", "bytes"]
Effort = Literal["max", "fast"]
"""Effort of the encoder: "max" for the fewest bytes, "fast" for what decodes fastest."""
EffortOption = Literal["auto", "max", "fast"]
LARGE = 1 << 26  # weights from which on "auto" is "fast": those of "max" take a core ten seconds


def effort_for(option: EffortOption, weights: int) -> Effort:
    """Return the effort for a model of so many weights."""
    return option if option != "auto" else "fast" if weights >= LARGE else "max"


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts about an array of integers that a probability model can use.

    Attributes:
        role: the kind of integers: quantized `symbols`, per-row `scales` (log2 indices, smooth in the row), one plane
            of a float (`sign`, `exponent`, `mantissa`), or plain `bytes`.
        kernel: height and width of the convolution whose weights lie in the columns, (1, 1) for a matrix.
        states: states of the trellis whose paths run down the columns (`trellis_states`), minus so many where
            one path runs along the rows, 1 for a plain grid.
    """

    role: Role = "symbols"
    kernel: tuple[int, int] = (1, 1)
    states: int = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """A coded array."""

    coder: int  # number of the coder in the file (0…255), a key of `birdie.entropy.coder.NAMES`
    payload: bytes  # the bytes it wrote

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)

    def pieces(self) -> Iterator[bytes]:
        """Yield the payload; a subclass may have it elsewhere than in memory."""
        yield self.payload
