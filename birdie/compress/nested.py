"""Tensors that a scheme holds inside another: each as its scheme's code, its number of parameters and these.

They are decoded to float32; what is built on them sums in float64, in a fixed order, and casts once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, Integers, StreamLayout
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
        """Return the tensor of this part from its own streams, float32."""
        return self.decoder.decode(Encoded("", self.shape, torch.float32, self.params, tuple(streams)))


def take_part(
    decoders: Mapping[int, Decoder], shape: tuple[int, ...], params: Sequence[int]
) -> tuple[Part, tuple[int, ...]]:
    """Return the inner tensor of `shape` that `params` begin with, and the parameters after it.

    Raises:
        ArtifactError: it has another scheme than `decoders` (by code) has, or its parameters are impossible.
    """
    code, count = (*params, -1, -1)[:2]
    inner = tuple(params[2 : 2 + max(count, 0)])
    if code not in decoders or len(inner) != count:
        raise ArtifactError(f"a tensor inside another has scheme {code}, unknown here; the file is corrupt or newer")
    layout = decoders[code].layout(shape, torch.float32, inner)
    return Part(decoders[code], shape, inner, layout), tuple(params[2 + count :])


def with_kernel(part: Part) -> tuple[StreamLayout, ...]:
    """Return the part's layout, its symbols hinted as the weights of a convolution if the part's shape is one's."""
    symbols = part.layout[0]
    hints = replace(symbols.hints, kernel=kernel(part.shape, symbols.columns))
    return replace(symbols, hints=hints), *part.layout[1:]


def part_params(codes: Mapping[str, int], part: Encoded) -> tuple[int, ...]:
    """Return the parameters by which a file describes `part`, whose scheme is one of `codes` (by name)."""
    return codes[part.scheme], len(part.params), *part.params
