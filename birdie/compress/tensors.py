"""Tensors as 2-D arrays: of their numbers or of their bit patterns.

Rows are the first dimension and columns everything else, flattened; vectors and scalars are a single row. Entropy
coding and quantization work on this form only.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import BLOCK
from birdie.entropy.planes import Block, blocks, word_dtype
from birdie.errors import ArtifactError, WeightsError
from birdie.system.kernels import njit
from birdie.system.mapped import release

Bits = NDArray[np.unsignedinteger[Any]]

# Layout of each dtype for `birdie.entropy.planes`: (format of one word, words per element). Complex numbers are pairs
# of floats.
FORMATS: dict[torch.dtype, tuple[str, int]] = {
    torch.bool: ("bool", 1),
    torch.uint8: ("uint8", 1),
    torch.int8: ("int8", 1),
    torch.uint16: ("uint16", 1),
    torch.int16: ("int16", 1),
    torch.uint32: ("uint32", 1),
    torch.int32: ("int32", 1),
    torch.uint64: ("uint64", 1),
    torch.int64: ("int64", 1),
    torch.float16: ("float16", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.float32: ("float32", 1),
    torch.float64: ("float64", 1),
    torch.complex32: ("float16", 2),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
    torch.float8_e4m3fn: ("float8_e4m3fn", 1),
    torch.float8_e4m3fnuz: ("float8_e4m3fnuz", 1),
    torch.float8_e5m2: ("float8_e5m2", 1),
    torch.float8_e5m2fnuz: ("float8_e5m2fnuz", 1),
    torch.float8_e8m0fnu: ("float8_e8m0fnu", 1),
    torch.float4_e2m1fn_x2: ("float4_e2m1fn_x2", 1),
}

_PART = 1 << 22
# A weight below both is dust: there is no normal float32 scale of which it is a few million, as symbols may be, and
# beside the tensor's largest weight float32 loses it.
_DUST, _DUST_SHARE = 2.0**-106, 2.0**-24
_APART = 2.0**24  # times the largest weight of a row that float32 loses beside one of another
REAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rows_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor of `shape`: the first dimension against the rest; one row below two."""
    if len(shape) < 2:
        return 1, shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def planes(weight: Tensor) -> Tensor:
    """Return a complex tensor as real numbers, the real parts before the imaginary ones; others and empty ones as is.

    Of a tensor of two dimensions and more they are a matrix of twice the rows, so that no row has both: what is a
    dimension of taps elsewhere is one of frequencies, whose neighbors are unrelated. Of others they are a vector.
    """
    if not weight.is_complex() or not weight.numel():
        return weight
    parts = torch.view_as_real(weight.detach().resolve_conj().resolve_neg()).movedim(-1, 0)
    rows, columns = rows_columns(tuple(weight.shape))
    return parts.reshape((2 * rows, columns) if weight.ndim > 1 else -1)


def from_planes(parts: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the complex tensor of these real numbers: the inverse of `planes`."""
    pairs = parts.new_empty((*shape, 2))
    return torch.view_as_complex(pairs.copy_(parts.reshape(2, *shape).movedim(0, -1)))


def count_reals(weight: Tensor) -> int:
    """Return the number of elements of a tensor; complex ones are two."""
    return (2 if weight.is_complex() else 1) * weight.numel()


def to_bits(weight: Tensor) -> Bits:
    """Return the bit patterns of `weight`, (rows, columns · words), unsigned integers of the word's width."""
    rows, columns = rows_columns(tuple(weight.shape))
    plain = weight.detach().cpu().resolve_conj().resolve_neg()
    if plain.itemsize == 1:
        plain = plain.view(torch.uint8)  # torch cannot copy every dtype of a byte
    flat = plain.contiguous().reshape(-1)
    words = flat.view(torch.uint8).numpy().view(word_dtype(FORMATS[weight.dtype][0]))
    return words.reshape(rows, columns * FORMATS[weight.dtype][1])


def from_bits(bits: Bits, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor of these bit patterns: the inverse of `to_bits`."""
    if dtype is torch.bool and bits.size and int(bits.max()) > 1:
        raise ArtifactError("a boolean tensor holds a byte that is neither 0 nor 1; the file is corrupt")
    data = np.ascontiguousarray(bits, dtype=word_dtype(FORMATS[dtype][0])).reshape(-1).view(np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU that is not filled; numpy asks for large pages, so that writing to it is faster."""
    count = math.prod(shape)
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype).reshape(shape)


def kernel(shape: tuple[int, ...], columns: int) -> tuple[int, int]:
    """Return height and width of the kernels of a convolution's weights (output, input, …), in a matrix of `columns`.

    (1, 1) for other tensors, and if the matrix does not have the columns of the tensor.
    """
    if len(shape) not in (3, 4) or columns != rows_columns(shape)[1]:
        return (1, 1)
    return (shape[2], shape[3]) if len(shape) == 4 else (1, shape[2])


def parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in parts of about 4 M elements, for checks that make copies; mapped pages are released."""
    flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach()
    if flat.numel() <= _PART:
        yield flat.reshape(-1)
        release(flat)
        return
    for part in torch.split(flat, max(1, _PART * len(flat) // max(flat.numel(), 1))):
        yield part
        release(part)


def has_nonfinite(weight: Tensor) -> bool:
    """Return whether floats hold NaN or infinite values; every other dtype is stored losslessly anyway."""
    is_float = weight.dtype in REAL_DTYPES or weight.is_complex()
    return is_float and not all(bool(part.isfinite().all()) for part in parts(weight))


def finite_rows(name: str, weight: Tensor) -> NDArray[np.float32]:
    """Return the numbers of `weight` as float32, (rows, columns); a view of it if it is float32 already."""
    values = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
    rows = values.to(torch.float32).reshape(rows_columns(tuple(weight.shape)))
    if rows.numel() and not all(bool(torch.isfinite(bound)) for bound in torch.aminmax(rows)):
        bad = values.numel() - int(torch.isfinite(values).sum())
        if not bad:
            raise WeightsError(f"tensor {name!r} holds values beyond float32; {_rule(name)}")
        raise WeightsError(f"tensor {name!r} holds {bad:,} NaN or infinite values of {values.numel():,}; {_rule(name)}")
    array: NDArray[np.float32] = rows.numpy()
    return array


def _rule(name: str) -> str:
    return f"the rule {name}=lossless (--scheme {name}=lossless) keeps it as it is"


def real_rows(name: str, weight: Tensor) -> NDArray[np.float32]:
    """Return the numbers of `weight` as float32, (rows, columns), for a scheme that quantizes: dust is zero.

    Float32 has no scale for a row of dust, such as weight decay leaves of a dead channel, and beside the other weights
    it is nothing. Rows above it have a scale, however far they are below the others.
    """
    if weight.dtype not in REAL_DTYPES or weight.numel() == 0:
        raise WeightsError(
            f"tensor {name!r} ({weight.dtype}, {weight.numel()} elements) cannot be quantized; {_rule(name)}"
        )
    rows = finite_rows(name, weight)
    limit = np.float32(min(_DUST, _DUST_SHARE * max(float(rows.max()), -float(rows.min()))))
    return np.where(np.abs(rows) < limit, np.float32(0), rows) if _has_dust(rows, limit) else rows


def _has_dust(rows: NDArray[np.float32], limit: np.float32) -> bool:
    parts = (rows[block] for block in blocks(*rows.shape))
    return any(bool(((np.abs(part) < limit) & (part != 0)).any()) for part in parts)


def rows_are_apart(rows: NDArray[np.float32]) -> bool:
    """Return whether a row is so far above the others that they would be lost at one scale for all."""
    most = np.maximum(rows.max(axis=1), -rows.min(axis=1)).astype(np.float64)
    return bool(float(most.max()) > _APART * float(np.median(most[most > 0]))) if most.any() else False


def row_sums(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sums of rows and of their squares, both (rows,), the same for any number of threads."""
    sums, squares = np.empty(len(rows)), np.empty(len(rows))
    _add_up(rows, np.empty((2, 8)), sums, squares)
    return sums, squares


@njit(nogil=True, cache=True, _nrt=False)
def _add_up(rows, sixteen, sums, squares):  # type: ignore[no-untyped-def]
    count = rows.shape[1]
    total, square = sixteen[0], sixteen[1]  # eight of each at a time: one processor instruction
    for i in range(rows.shape[0]):
        values = rows[i]
        for k in range(8):
            total[k] = square[k] = 0
        for start in range(0, count - 7, 8):
            for k in range(8):
                value = np.float64(values[start + k])
                total[k] += value
                square[k] += value * value
        for j in range(count & ~7, count):
            total[0] += values[j]
            square[0] += np.float64(values[j]) * np.float64(values[j])
        sums[i] = squares[i] = 0
        for k in range(8):
            sums[i] += total[k]
            squares[i] += square[k]


@njit(nogil=True, cache=True, _nrt=False)
def count_words(words, counts):  # type: ignore[no-untyped-def]
    """Add the occurrences of each of `words` (n,), unsigned integers, to `counts`."""
    for word in words:
        counts[word] += 1


def underflows(weight: Tensor, rows: NDArray[np.float32]) -> bool:
    """Return whether a float64 tensor that is not zero became all zeros in its float32 `rows`."""
    return weight.dtype is torch.float64 and not rows.any() and bool(weight.detach().any())


def real_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return (rows, columns) of a tensor in a file that holds quantized real numbers."""
    rows, columns = rows_columns(shape)
    if dtype not in REAL_DTYPES or rows * columns == 0:
        raise ArtifactError(f"a tensor of {dtype} and shape {shape} cannot be quantized; the file is corrupt")
    return rows, columns


def tensor_of_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, values: Callable[[Block], NDArray[np.float64]], size: int = BLOCK
) -> Tensor:
    """Return the tensor whose parts `values` computes: slices of rows and of columns → their values, without NaN.

    Values are clipped to the finite range of float32 and of the dtype, rounded to float32 and cast once. Blocks of at
    most `size` elements are computed one after the other, so that there is never a second copy of the tensor; a size of
    `columns` or more leaves rows whole.
    """
    rows, columns = rows_columns(shape)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    out = torch.empty(rows, columns, dtype=dtype, device="cpu")
    for block in blocks(rows, columns, size):
        out[block] = torch.from_numpy(np.clip(values(block), -limit, limit).astype(np.float32))
    return out.reshape(shape)


def repeats_memory(tensor: Tensor) -> bool:
    """Return whether several elements are one in memory, as of an expanded tensor, to which torch does not write."""
    strided = tensor.layout is torch.strided
    return strided and any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True))
