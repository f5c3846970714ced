"""Coding: the integers of a tensor to coded streams, and back.

Encoded ──code──► Coded ──opened──► Encoded
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress import registry
from birdie.compress.scheme import Blocks, Encoded, Parameters, Shape
from birdie.compress.tensors import kernel
from birdie.entropy import coder as entropy
from birdie.entropy.hints import Effort, Hints, Stream


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor whose integers are coded: all that a file holds of it."""

    # scheme, shape, dtype, params: as of `Encoded`
    scheme: str
    shape: Shape
    dtype: torch.dtype
    params: Parameters
    streams: tuple[Stream, ...]  # coded, in the order of the decoder's layout
    crc: int | None = None  # CRC-32 of their payloads, one after the other, if it is known
    parts: tuple["Coded", ...] = ()  # coded parts of a tensor that is cut (`Blocks`), which has no streams then
    # its integers, where these are kept because the tensor will be decoded soon
    encoded: Encoded | None = field(default=None, compare=False, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(stream.length for stream in self.streams) + sum(part.bytes for part in self.parts)


Quantized = Encoded | Coded


def code(encoded: Encoded, effort: Effort, *, keep: bool = False) -> Coded:
    """Code the integers of a tensor.

    Args:
        encoded: the tensor.
        effort: of the entropy coder.
        keep: whether the result keeps the integers.
    """
    if isinstance(encoded, Blocks):
        return join_parts(encoded.shape, encoded.dtype, [code(part, effort, keep=keep) for part in encoded.parts])
    streams = tuple(entropy.encode(values, hints, effort) for values, hints in _hinted(encoded))
    kept = encoded if keep else None
    return Coded(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, streams, encoded=kept)


def join_parts(shape: Shape, dtype: torch.dtype, parts: Sequence[Coded]) -> Coded:
    """Return the tensor of `shape` that these parts make up; the only one as it is if it is that tensor."""
    if len(parts) == 1 and (parts[0].shape, parts[0].dtype) == (shape, dtype):
        return parts[0]
    return Coded("blocks", shape, dtype, (), (), parts=tuple(parts))


def estimate(tensor: Quantized) -> tuple[float, float]:
    """Return about the bytes of effort "fast": of the weights, in proportion to their rows, and of what describes them.

    Of coded integers that are not kept it is the bytes they take.
    """
    if isinstance(tensor, Coded) and tensor.encoded is None and not tensor.parts:
        return float(tensor.bytes), 0.0
    if isinstance(tensor, Blocks) or (isinstance(tensor, Coded) and tensor.parts):
        data, tables = zip(*map(estimate, tensor.parts), strict=True)
        return sum(data), sum(tables)
    encoded = tensor if isinstance(tensor, Encoded) else tensor.encoded
    assert encoded is not None
    parts = [entropy.estimate(values, hints) for values, hints in _hinted(encoded)]
    return sum(data for data, _ in parts), sum(tables for _, tables in parts)


def with_integers(tensor: Quantized) -> Encoded:
    """Return a tensor with its integers, decoded from the streams if they are not kept."""
    if isinstance(tensor, Encoded):
        return tensor
    if tensor.parts:
        return Blocks.of(tensor.shape, tensor.dtype, tuple(map(with_integers, tensor.parts)))
    if tensor.encoded is not None:
        return tensor.encoded
    layout = registry.decoder(tensor.scheme).layout(tensor.shape, tensor.dtype, tensor.params)
    integers = tuple(
        entropy.decode(stream.coder, b"".join(stream.pieces()), kind.rows, kind.columns, kind.hints, kind.dtype)
        for stream, kind in zip(tensor.streams, layout, strict=True)
    )
    return Encoded(tensor.scheme, tensor.shape, tensor.dtype, tensor.params, integers)


def decode(tensor: Quantized) -> Tensor:
    """Return the tensor that a file of this one decodes to."""
    return registry.decode(with_integers(tensor))


def _hinted(encoded: Encoded) -> Iterator[tuple[NDArray[np.integer], Hints]]:
    """Yield each stream with the facts that help to code it."""
    layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    for values, expected in zip(encoded.streams, layout, strict=True):
        taps = kernel(encoded.shape, expected.columns)
        yield values, expected.hints if taps == (1, 1) else replace(expected.hints, kernel=taps)
