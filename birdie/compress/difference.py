"""Difference to a tensor of another checkpoint, the base: every bit of a fine-tune or of the next step of a run.

    difference   params (digest, 0)          the base's tensor, unchanged
                 params (digest, 1, bytes)   one stream of coded bytes (birdie.entropy.differences)

The digest is that of the base's tensor, so a wrong base is an error and never another tensor. It is what BLAKE2b (RFC
7693) gives for the name of the dtype and the little-endian words, in 64 bits: enough to tell files apart, and no
signature.
"""

import hashlib
import sys

import numpy as np
import torch
from torch import Tensor

from birdie.compress.scheme import DIFFERENCE, Cost, Decoder, Encoded, StreamLayout, elementwise
from birdie.compress.tensors import FORMATS, from_bits, to_bits
from birdie.entropy import differences
from birdie.entropy.hints import Hints
from birdie.errors import ArtifactError

SAME, CODED = 0, 1
_MOST = 1 << 40  # bytes of a stream
_OPERATIONS = 1200  # of an element


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
    if len(params) == 3 and params[1] == CODED and 0 < params[2] < _MOST and dtype in FORMATS and 0 not in shape:
        return (StreamLayout(1, params[2], Hints(role="mantissa"), np.dtype(np.uint8)),)
    raise ArtifactError(f"a difference has parameters {params}; the file is corrupt or newer")


def decode(encoded: Encoded) -> Tensor:
    """Return the tensor.

    Raises:
        ArtifactError: there is no base, or it is another one.
    """
    base = encoded.base
    if base is None:
        raise ArtifactError("is stored as a difference to another checkpoint; give that as base=… (--base)")
    if digest(base) != encoded.params[0]:
        raise ArtifactError("is a difference to other values than the base has; give the checkpoint it was made with")
    if encoded.params[1] == SAME:
        return from_bits(to_bits(base).copy(), encoded.shape, encoded.dtype)
    words = differences.decode(encoded.streams[0].tobytes(), to_bits(base), FORMATS[encoded.dtype][0])
    return from_bits(words, encoded.shape, encoded.dtype)


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    """Return the cost of decoding; the temporaries of a chunk do not count."""
    size = elementwise(shape, dtype, params)
    operations = 1 if params[1] == SAME else _OPERATIONS * FORMATS[dtype][1]
    return Cost(operations * size.operations, 2 * size.bytes)


DECODER = Decoder(DIFFERENCE, layout, decode, cost)


def encode(weight: Tensor, base: Tensor) -> Encoded:
    """Return the difference of a tensor, not empty, to a base of its shape and dtype."""
    known, shape, dtype = digest(base), tuple(weight.shape), weight.dtype
    words, others = to_bits(weight), to_bits(base)
    if np.array_equal(words, others):
        return Encoded(DIFFERENCE, shape, dtype, (known, SAME), (), base)
    payload = differences.encode(words, others, FORMATS[dtype][0])
    return Encoded(
        DIFFERENCE, shape, dtype, (known, CODED, len(payload)), (np.frombuffer(payload, np.uint8)[None],), base
    )
