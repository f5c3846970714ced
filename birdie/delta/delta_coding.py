"""Delta to a tensor of another checkpoint, the base: of a fine-tune, or of the next step of a run.

    delta   params (digest, 0)                            the base's tensor, unchanged
            params (digest, 1, bytes)                     one stream of coded bytes: every bit (birdie.entropy.deltas)
            params (digest, 2, 0, inner tensor)           base + inner tensor
            params (digest, 2, rank, two inner tensors)   base + Σ left(k) ⊗ right(k)
    streams of the last two: those of the inner tensors; left (rank, rows), right (rank, columns)

Sums are in float64, over k from 0, and rounded once.

The digest is that of the base's tensor, so a wrong base is an error and never another tensor. It is what BLAKE2b (RFC
7693) gives for the name of the dtype and the little-endian words, in 64 bits: enough to tell files apart, and no
signature.
"""

import hashlib
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress import registry
from birdie.compress.inner_tensors import InnerTensor, part_params, take_part, with_kernel
from birdie.compress.scheme import DELTA, Cost, Decoder, Encoded, StreamLayout, elementwise, in_blocks
from birdie.compress.tensors import FORMATS, from_bits, real_matrix, rows_columns, tensor_of_blocks, to_bits
from birdie.entropy import deltas
from birdie.entropy.hints import Hints
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError

SAME, CODED, NEAR = 0, 1, 2
_MOST = 1 << 40  # bytes of a stream
_OPERATIONS = 1200  # of an element
_BLOCK = 1 << 14  # elements that are summed at a time


def digest(tensor: Tensor) -> int:
    """Return the digest of a tensor: a signed integer of 64 bits."""
    words = to_bits(tensor)
    if sys.byteorder == "big":
        words = words.astype(words.dtype.newbyteorder("<"))
    hashed = hashlib.blake2b(str(tensor.dtype).encode(), digest_size=8)
    hashed.update(np.ascontiguousarray(words).view(np.uint8).data)
    return int.from_bytes(hashed.digest(), "little", signed=True)


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the coded bytes, if there are any."""
    if params[1:] == (SAME,) and dtype in FORMATS:
        return ()
    if params[1:2] == (NEAR,):
        return tuple(stream for part in _parts(shape, dtype, params) for stream in with_kernel(part))
    if len(params) == 3 and params[1] == CODED and 0 < params[2] < _MOST and dtype in FORMATS and 0 not in shape:
        return (StreamLayout(1, params[2], Hints(role="mantissa"), np.dtype(np.uint8)),)
    raise ArtifactError(f"a delta has parameters {params}; the file is corrupt or newer")


def decode(encoded: Encoded) -> Tensor:
    """Return the tensor.

    Raises:
        ArtifactError: there is no base, or it is another one.
    """
    base = encoded.base
    if base is None:
        raise ArtifactError("is stored as a delta to another checkpoint; give that as base=… (--base)")
    if digest(base) != encoded.params[0]:
        raise ArtifactError("is a delta to other values than the base has; give the checkpoint it was made with")
    if encoded.params[1] == NEAR:
        return tensor_of_blocks(encoded.shape, encoded.dtype, _Sum(encoded), _BLOCK)
    if encoded.params[1] == SAME:
        return from_bits(to_bits(base).copy(), encoded.shape, encoded.dtype)
    words = deltas.decode(encoded.streams[0].tobytes(), to_bits(base), FORMATS[encoded.dtype][0])
    return from_bits(words, encoded.shape, encoded.dtype)


def _parts(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> list[InnerTensor]:
    """Return the inner tensors of a delta that is near: one of the shape, or two factors."""
    rows, columns = real_matrix(shape, dtype)
    rank, rest = (*params[2:3], -1)[0], params[3:]
    parts: list[InnerTensor] = []
    for inner in (shape,) if rank == 0 else ((rank, rows), (rank, columns)):
        if not 0 <= rank <= min(rows, columns):
            raise ArtifactError(f"a delta of {rows} rows and {columns} columns has rank {rank}; the file is corrupt")
        part, rest = take_part(inner, rest)
        parts.append(part)
    if rest:
        raise ArtifactError(f"a delta has parameters {params}; the file is corrupt or newer")
    return parts


class _Sum:
    """The sum of a base and inner tensors, block by block, in float64."""

    def __init__(self, encoded: Encoded) -> None:
        assert encoded.base is not None
        shape = rows_columns(encoded.shape)
        self._base = encoded.base.reshape(shape)
        tensors, streams = [], list(encoded.streams)
        for part in _parts(encoded.shape, encoded.dtype, encoded.params):
            tensors.append(part.decode(streams[: len(part.layout)]).numpy())
            del streams[: len(part.layout)]
        self._added = tensors[0].reshape(shape) if len(tensors) == 1 else None
        self._factors = [factor.astype(np.float64) for factor in tensors] if len(tensors) == 2 else []

    def __call__(self, block: Block) -> NDArray[np.float64]:
        """Return some rows and columns."""
        total: NDArray[np.float64] = self._base[block].to(torch.float64, copy=True).numpy()
        if self._added is not None:
            return np.asarray(total + self._added[block])
        left, right = self._factors
        product = np.empty_like(total)
        for row, column in zip(left[:, block[0]], right[:, block[1]], strict=True):
            total += np.multiply(row[:, None], column, out=product)
        return total


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    """Return the cost of decoding; the temporaries of a chunk do not count."""
    size = elementwise(shape, dtype, params)
    if params[1] == NEAR:
        inner = [part.decoder.cost(part.shape, torch.float32, part.params) for part in _parts(shape, dtype, params)]
        summed = in_blocks(shape, dtype, 4 + 4 * params[2])
        parts = sum(part.operations for part in inner), sum(part.bytes for part in inner)
        return Cost(summed.operations + parts[0], summed.bytes + parts[1] + size.bytes)
    operations = 1 if params[1] == SAME else _OPERATIONS * FORMATS[dtype][1]
    return Cost(operations * size.operations, 2 * size.bytes)


DECODER = registry.add_form(Decoder(DELTA, 0, layout, decode, cost))


def encode(weight: Tensor, base: Tensor) -> Encoded:
    """Return the delta of a tensor, not empty, to a base of its shape and dtype."""
    known, shape, dtype = digest(base), tuple(weight.shape), weight.dtype
    words, others = to_bits(weight), to_bits(base)
    if np.array_equal(words, others):
        return Encoded(DELTA, shape, dtype, (known, SAME), (), base)
    payload = deltas.encode(words, others, FORMATS[dtype][0])
    return Encoded(DELTA, shape, dtype, (known, CODED, len(payload)), (np.frombuffer(payload, np.uint8)[None],), base)


def near(weight: Tensor, base: Tensor, *inner: Encoded) -> Encoded:
    """Return the sum of a base and of an inner tensor, or of the product of two: (rank, rows) and (rank, columns).

    Args:
        weight: of whose shape and dtype the sum is.
        inner: float32.
    """
    rank = inner[0].shape[0] if len(inner) == 2 else 0
    params = (digest(base), NEAR, rank, *(number for part in inner for number in part_params(part)))
    streams = tuple(stream for part in inner for stream in part.streams)
    return Encoded(DELTA, tuple(weight.shape), weight.dtype, params, streams, base)
