"""Integers back to tensors: the decoding half of every scheme, and nothing of the encoders.

    lossless   bit planes of any dtype                              params ()
               integers as half bytes, values or differences        params (code of integers.DTYPES,)
               floats as numbers in the list of their magnitudes    params (integers.LISTED, length of the list)
    cast       lossless planes of a float rounded to 16 bits        params (code of CAST_DTYPES,)
    grid, trellis, ternary, codebook, rotation, lowrank, spectral, tucker in modules of their own

Every decoder is a pure function in fixed order, so a file decodes to the same bits on every machine.
"""

import torch
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes import integers
from birdie.compress.schemes.decode_codebook import CODEBOOK
from birdie.compress.schemes.decode_lowrank import LOWRANK
from birdie.compress.schemes.decode_rotation import ROTATION
from birdie.compress.schemes.decode_spectral import SPECTRAL
from birdie.compress.schemes.decode_trellis import TRELLIS
from birdie.compress.schemes.decode_tucker import TUCKER
from birdie.compress.schemes.dequantize import GRID, TERNARY
from birdie.compress.tensors import FORMATS, from_bits, rows_columns
from birdie.entropy.planes import join, plane_dtypes, plane_hints, word_dtype
from birdie.errors import ArtifactError

CAST_DTYPES = (torch.float16, torch.bfloat16)


def _plane_layout(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StreamLayout, ...]:
    rows, columns = rows_columns(shape)
    if rows * columns == 0:
        return ()
    word, words = FORMATS[dtype]
    kinds = zip(plane_hints(word), plane_dtypes(word), strict=True)
    return tuple(StreamLayout(rows, columns * words, hints, kind) for hints, kind in kinds)


def _join_planes(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """The tensor of `dtype` whose bit planes are the streams of `encoded`."""
    if not encoded.streams:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)[:0].reshape(encoded.shape)
    form = FORMATS[dtype][0]
    (kind, *more), first = plane_dtypes(form), encoded.streams[0]
    if more or dtype is torch.bool or not (first.dtype == kind and first.flags.c_contiguous and first.flags.writeable):
        return from_bits(join(encoded.streams, form), encoded.shape, dtype)
    return from_bits(first.view(word_dtype(form)), encoded.shape, dtype)  # one plane is the tensor itself


def _lossless_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    return integers.layout(shape, dtype, params) if params else _plane_layout(shape, dtype)


def _lossless_decode(encoded: Encoded) -> Tensor:
    if encoded.params:
        return integers.decode(encoded.streams, encoded.params, encoded.shape, encoded.dtype)
    return _join_planes(encoded, encoded.dtype)


def _cast_dtype(params: tuple[int, ...]) -> torch.dtype:
    if len(params) != 1 or not 0 <= params[0] < len(CAST_DTYPES):
        raise ArtifactError(f"scheme cast has parameters {params}, none of ours; the file is corrupt or newer")
    return CAST_DTYPES[params[0]]


def _cast_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    if dtype not in (torch.float32, torch.float64):
        raise ArtifactError(f"scheme cast cannot hold a tensor of {dtype}; the file is corrupt")
    return _plane_layout(shape, _cast_dtype(params))


def _cast_decode(encoded: Encoded) -> Tensor:
    return _join_planes(encoded, _cast_dtype(encoded.params)).to(encoded.dtype)


LOSSLESS, CAST = Decoder(_lossless_layout, _lossless_decode), Decoder(_cast_layout, _cast_decode)

# In the order of their numbers in the file, from 1. Never change it; new ones go at the end.
DECODERS: dict[str, Decoder] = {
    "lossless": LOSSLESS,
    "grid": GRID,
    "cast": CAST,
    "trellis": TRELLIS,
    "ternary": TERNARY,
    "codebook": CODEBOOK,
    "rotation": ROTATION,
    "lowrank": LOWRANK,
    "spectral": SPECTRAL,
    "tucker": TUCKER,
}


def decode(encoded: Encoded) -> Tensor:
    """The tensor that `encoded` stands for."""
    return DECODERS[encoded.scheme].decode(encoded)
