"""NF4 scheme: the sixteen levels of QLoRA's NormalFloat, quantiles of a Gaussian, times a scale (arXiv 2305.14314).

    nf4   params (group_size,); streams: numbers of levels −7 … 8 (rows, columns), scale indices (rows, groups)

Number 0 is the level 0. The largest weight of a group of columns is the outermost level.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import covering_indices, scales_of, stored_indices
from birdie.compress.scheme import Cost, Decoder, Encoded, Scheme, Sensitivity, Spec, StreamLayout, in_blocks
from birdie.compress.schemes.grid import grouped_layout
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import real_rows, tensor_of_blocks, underflows
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError

_BELOW = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004)
_ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
LEVELS = np.array([*_BELOW, 0, *_ABOVE], np.float32).astype(np.float64)
ZERO = len(_BELOW)  # position of the level 0


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of numbers and scale indices."""
    if len(params) != 1:
        raise ArtifactError(f"scheme nf4 takes one parameter but the file gives {len(params)}")
    return grouped_layout(shape, dtype, params[0], np.dtype(np.int8))


def decode(encoded: Encoded) -> Tensor:
    """Return level · scale of its group."""
    numbers, indices = encoded.streams
    if int(numbers.min()) < -ZERO or int(numbers.max()) > len(LEVELS) - 1 - ZERO:
        raise ArtifactError("a number is beyond the sixteen levels of nf4; the file is corrupt")
    (group_size,) = encoded.params

    def values(block: Block) -> NDArray[np.float64]:
        columns = np.arange(numbers.shape[1])[block[1]]
        return np.asarray(LEVELS[numbers[block] + ZERO] * scales_of(indices[block[0]][:, columns // group_size]))

    return tensor_of_blocks(encoded.shape, encoded.dtype, values)


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:  # noqa: ARG001
    """Return the cost of decoding: two look-ups and a product for each element."""
    return in_blocks(shape, dtype, 32)


DECODER = Decoder("nf4", 63, layout, decode, cost, inner="rows")


@dataclass(frozen=True, slots=True)
class Nf4(Scheme):
    """Quantiles of a Gaussian over the range of a group.

    Attributes:
        group_size: columns that share a scale, at least 1.
    """

    decoder = DECODER
    specs = (Spec("nf4", "sixteen quantiles of a Gaussian over the range of a group (QLoRA)"),)

    group_size: int = 64

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"nf4 group_size={self.group_size} is out of range; choose 1 or more columns")

    @property
    def by_rows(self) -> bool:
        """Return True: each row has scales of its own."""
        return True

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002 (levels are the nearest)
    ) -> Encoded:
        """Take the nearest levels; losslessly if scales are too small.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        width = min(self.group_size, rows.shape[1])
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(len(rows), -1, width)
        largest = np.abs(padded).max(axis=2)
        indices = stored_indices(largest, largest > 0, covering_indices)
        if indices is None or underflows(weight, rows):
            return Lossless().encode(name, weight)
        relative = padded / scales_of(indices).astype(np.float64)[:, :, None]
        numbers = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, relative) - ZERO
        numbers = numbers.reshape(len(rows), -1)[:, : rows.shape[1]].astype(np.int8)
        return Encoded("nf4", tuple(weight.shape), weight.dtype, (width,), (numbers, indices))
