"""Schemes that keep bits: every bit of any tensor, or every bit of a float rounded to 16 bits first."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from birdie.compress.decoders import CAST_DTYPES
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.tensors import FORMATS, finite_rows, to_bits
from birdie.entropy.planes import split
from birdie.errors import ConfigError, WeightsError

SIXTEEN_BIT: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _planes(name: str, scheme: str, weight: Tensor, stored: Tensor, params: tuple[int, ...]) -> Encoded:
    """`Encoded` of `weight` by the bit planes of `stored`, the same numbers in the dtype that is written."""
    if stored.dtype not in FORMATS:
        raise WeightsError(f"tensor {name!r} has dtype {stored.dtype}, which birdie cannot store; convert it first")
    streams = split(to_bits(stored), FORMATS[stored.dtype][0]) if stored.numel() else ()
    return Encoded(scheme, tuple(weight.shape), weight.dtype, params, tuple(streams))


@dataclass(frozen=True, slots=True)
class Lossless:
    """Every bit of a tensor of any dtype: NaN payloads, signed zeros and infinities included."""

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002  the contract's; nothing to weigh here
        lam: float = 0.0,  # noqa: ARG002
    ) -> Encoded:
        """Split `weight` into bit planes.

        Raises:
            WeightsError: the dtype is not one of `FORMATS`.
        """
        return _planes(name, "lossless", weight, weight, ())


@dataclass(frozen=True, slots=True)
class Cast:
    """float32 and float64 rounded to a 16-bit float, then lossless; narrower tensors are lossless as they are."""

    to: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        """Refuse unknown targets."""
        if self.to not in SIXTEEN_BIT:
            raise ConfigError(f"cast to {self.to!r} is unknown; choose fp16 or bf16")

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,
        lam: float = 0.0,
    ) -> Encoded:
        """Round `weight` to the nearest 16-bit float, ties to even, and split the result into bit planes.

        Raises:
            WeightsError: values are NaN or infinite, or become so when rounded.
        """
        if weight.dtype not in (torch.float32, torch.float64):
            return Lossless().encode(name, weight, sensitivity=sensitivity, lam=lam)
        finite_rows(name, weight)
        target = SIXTEEN_BIT[self.to]
        rounded = weight.detach().cpu().to(target)
        if not bool(torch.isfinite(rounded).all()):
            raise WeightsError(f"tensor {name!r} holds values beyond {self.to}; use bf16 or lossless for it")
        return _planes(name, "cast", weight, rounded, (CAST_DTYPES.index(target),))
