"""Inner tensors: tensors inside the streams of another scheme, described by its number, parameter count, parameters.

They are decoded to float32; the outer scheme sums in float64, in a fixed order, and casts once. Which schemes may be
inside is what their decoders say (`Decoder.inner`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, Integers, StreamLayout
from birdie.compress.schemes import decoders, number_of, numbers
from birdie.compress.tensors import kernel
from birdie.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """An inner tensor of a file: its decoder, shape, parameters, and the layout of its streams."""

    decoder: Decoder
    shape: tuple[int, ...]
    params: tuple[int, ...]
    layout: tuple[StreamLayout, ...]

    def decode(self, streams: Sequence[Integers]) -> Tensor:
        """Return the float32 tensor of this part from its streams."""
        return self.decoder.decode(Encoded("", self.shape, torch.float32, self.params, tuple(streams)))


def inner_decoder(name: str, *, by_rows: bool = False) -> Decoder | None:
    """Return the decoder of a scheme that may be inside another one; None if it may not.

    Args:
        by_rows: whether the outer scheme decodes some rows at a time.
    """
    decoder = decoders().get(name)
    return decoder if decoder and decoder.inner in (("rows",) if by_rows else ("rows", "tensor")) else None


def inner_names(*, by_rows: bool = False) -> str:
    """Return the names of the schemes that may be inside another one, for messages; arguments as `inner_decoder`."""
    return ", ".join(name for name in decoders() if inner_decoder(name, by_rows=by_rows))


def take_part(
    shape: tuple[int, ...], params: Sequence[int], *, by_rows: bool = False
) -> tuple[InnerTensor, tuple[int, ...]]:
    """Return the inner tensor of `shape` that `params` begin with, and the parameters after it."""
    number, count = (*params, -1, -1)[:2]
    inner = tuple(params[2 : 2 + max(count, 0)])
    decoder = inner_decoder(numbers().get(number, ""), by_rows=by_rows)
    if decoder is None or len(inner) != count:
        raise ArtifactError(f"an inner tensor has scheme number {number}, unknown here; the file is corrupt or newer")
    return InnerTensor(decoder, shape, inner, decoder.layout(shape, torch.float32, inner)), tuple(params[2 + count :])


def with_kernel(part: InnerTensor) -> tuple[StreamLayout, ...]:
    """Return the part's layout, with the kernel size as a coder hint if the part has the shape of a convolution."""
    symbols = part.layout[0]
    hints = replace(symbols.hints, kernel=kernel(part.shape, symbols.columns))
    return replace(symbols, hints=hints), *part.layout[1:]


def part_params(part: Encoded) -> tuple[int, ...]:
    """Return the parameters that describe `part` in a file."""
    return number_of(part.scheme), len(part.params), *part.params
