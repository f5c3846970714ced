"""Cast scheme: floats rounded to 16 bits, then stored as the bit planes of float16 or bfloat16.

cast   params (0,): float16, (1,): bfloat16; streams as those of lossless
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from birdie.compress.scheme import Cost, Decoder, Encoded, Scheme, Sensitivity, Spec, StreamLayout
from birdie.compress.schemes.lossless import Lossless, encode_planes, join_planes, plane_layout
from birdie.compress.tensors import finite_rows
from birdie.errors import ArtifactError, ConfigError, WeightsError

CAST_DTYPES = (torch.float16, torch.bfloat16)
SIXTEEN_BIT: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _cast_dtype(params: tuple[int, ...]) -> torch.dtype:
    if len(params) != 1 or not 0 <= params[0] < len(CAST_DTYPES):
        raise ArtifactError(f"scheme cast has parameters {params}; the file is corrupt or newer")
    return CAST_DTYPES[params[0]]


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the planes of the 16-bit words."""
    if dtype not in (torch.float32, torch.float64):
        raise ArtifactError(f"scheme cast cannot hold a tensor of {dtype}; the file is corrupt")
    return plane_layout(shape, _cast_dtype(params))


def decode(encoded: Encoded) -> Tensor:
    """Return the 16-bit numbers in the dtype of the tensor."""
    return join_planes(encoded, _cast_dtype(encoded.params)).to(encoded.dtype)


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:  # noqa: ARG001
    """Return the cost of decoding 16-bit words and of the cast."""
    count = prod(shape)
    return Cost(2 * count, (2 + dtype.itemsize) * count)


DECODER = Decoder("cast", 3, layout, decode, cost, inner="tensor")


@dataclass(frozen=True, slots=True)
class Cast(Scheme):
    """Rounds float32 and float64 to a 16-bit float, stored losslessly; narrower tensors are stored unchanged."""

    decoder = DECODER
    specs = (
        Spec("fp16", "rounded to float16", lambda: Cast("fp16")),
        Spec("bf16", "rounded to bfloat16", lambda: Cast("bf16")),
    )
    quantizes = False

    to: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.to not in SIXTEEN_BIT:
            raise ConfigError(f"cast to {self.to!r} is unknown; choose fp16 or bf16")

    @property
    def by_rows(self) -> bool:
        """Return True: every row is stored as it is."""
        return True

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002 (rounding is to the nearest)
    ) -> Encoded:
        """Round `weight` to the nearest 16-bit float, ties to even, and split the result into bit planes.

        Raises:
            WeightsError: values are NaN or infinite, or become so when rounded.
        """
        if weight.dtype not in (torch.float32, torch.float64):
            return Lossless().encode(name, weight)
        finite_rows(name, weight)
        target = SIXTEEN_BIT[self.to]
        rounded = weight.detach().cpu().to(target)
        if not bool(torch.isfinite(rounded).all()):
            raise WeightsError(f"tensor {name!r} holds values beyond {self.to}; use bf16 or lossless for it")
        return encode_planes(name, "cast", weight, rounded, (CAST_DTYPES.index(target),))
