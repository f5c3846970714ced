"""Inner tensors: tensors inside the streams of another scheme, described by scheme code, parameter count, parameters.

They are decoded to float32; the outer scheme sums in float64, in a fixed order, and casts once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, Integers, StreamLayout
from birdie.compress.schemes import NAMES
from birdie.compress.tensors import kernel
from birdie.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Part:
    """An inner tensor of a file: its decoder, shape, parameters, and the layout of its streams."""

    decoder: Decoder
    shape: tuple[int, ...]
    params: tuple[int, ...]
    layout: tuple[StreamLayout, ...]

    def decode(self, streams: Sequence[Integers]) -> Tensor:
        """Return the float32 tensor of this part from its streams."""
        return self.decoder.decode(Encoded("", self.shape, torch.float32, self.params, tuple(streams)))


def take_part(
    decoders: Mapping[str, Decoder], shape: tuple[int, ...], params: Sequence[int]
) -> tuple[Part, tuple[int, ...]]:
    """Return the inner tensor of `shape` that `params` begin with, and the parameters after it."""
    by_code = {NAMES.index(name) + 1: decoder for name, decoder in decoders.items()}
    code, count = (*params, -1, -1)[:2]
    inner = tuple(params[2 : 2 + max(count, 0)])
    if code not in by_code or len(inner) != count:
        raise ArtifactError(f"an inner tensor has scheme code {code}, unknown here; the file is corrupt or newer")
    layout = by_code[code].layout(shape, torch.float32, inner)
    return Part(by_code[code], shape, inner, layout), tuple(params[2 + count :])


def with_kernel(part: Part) -> tuple[StreamLayout, ...]:
    """Return the part's layout, with the kernel size as a coder hint if the part has the shape of a convolution."""
    symbols = part.layout[0]
    hints = replace(symbols.hints, kernel=kernel(part.shape, symbols.columns))
    return replace(symbols, hints=hints), *part.layout[1:]


def part_params(part: Encoded) -> tuple[int, ...]:
    """Return the parameters that describe `part` in a file."""
    return NAMES.index(part.scheme) + 1, len(part.params), *part.params
