"""What the entropy coder may know about an array besides its integers."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["symbols", "scales", "sign", "exponent", "mantissa", "bytes"]
Effort = Literal["max", "fast"]


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts a probability model can use; both sides derive them from the tensor's scheme, so they cost no bytes.

    Attributes:
        role: what the integers are: quantized `symbols`, per-row `scales` (log2 indices, smooth in the row),
            one plane of a float (`sign`, `exponent`, `mantissa`), or plain `bytes`.
        kernel: height and width of the convolution whose weights lie in the columns, (1, 1) for a matrix.
        states: of the trellis whose paths run down the columns (`birdie.entropy.trellis`), minus so many where one
            path runs along the rows, 1 for a plain grid.
    """

    role: Role = "symbols"
    kernel: tuple[int, int] = (1, 1)
    states: int = 1
