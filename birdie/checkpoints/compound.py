"""Compound values of a nested checkpoint, taken apart into plain tensors and plain values, and put together.

    sparse tensor ◄──► [indices, values, size, …]          quantized tensor ◄──► [integers, scale, …]

The parts come from a file, so whatever torch would take for a position in memory is checked.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.storage import TypedStorage

from birdie.checkpoints import numpy_values
from birdie.checkpoints.leaves import damaged

_MOST = 1 << 48  # elements that a shape may have without memory for them
_FEWEST_BITS = 2  # of a quantized number


class CompoundKind(NamedTuple):
    """A kind of compound values."""

    holds: Callable[[Any], bool]  # whether a value is one
    apart: Callable[[Any], list[Any]]  # value → its parts, which a tree holds
    together: Callable[..., Any]  # those parts → the value


def kind_of(value: Any) -> str | None:
    """Return the kind of a compound value; None for all others."""
    if isinstance(value, Tensor) and type(value) not in (Tensor, Parameter) and not _is_jagged(value):
        return None
    return next((name for name, kind in KINDS.items() if kind.holds(value)), None)


def _layout(layout: torch.layout) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Tensor) and value.layout is layout and not value.is_meta


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.jagged


def _is_compressed(value: Any) -> bool:
    return isinstance(value, Tensor) and str(value.layout) in _COMPRESSED and not value.is_meta


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _require(is_sound: bool, what: str) -> None:
    if not is_sound:
        raise damaged(f"has {what} whose parts do not make it up")


def _of_sparse(value: Tensor) -> list[Any]:
    return [value._indices(), value._values(), value.shape, value.is_coalesced()]


def _sparse(indices: Tensor, values: Tensor, size: torch.Size, is_coalesced: bool) -> Tensor:
    _require(prod(filter(None, size)) <= _MOST, "a sparse tensor")
    loose = torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=False)
    if not is_coalesced:
        return loose
    _require(torch.equal(loose.coalesce()._indices(), indices), "a sparse tensor")
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=True)


# Layout → the methods that return the compressed and the plain indices.
_COMPRESSED = {
    f"torch.sparse_{form}": (Tensor.crow_indices, Tensor.col_indices)
    if form.endswith("r")
    else (Tensor.ccol_indices, Tensor.row_indices)
    for form in ("csr", "csc", "bsr", "bsc")
}


def _of_compressed(value: Tensor) -> list[Any]:
    compressed, plain = _COMPRESSED[str(value.layout)]
    return [value.layout, compressed(value), plain(value), value.values(), value.shape]


def _compressed(layout: torch.layout, compressed: Tensor, plain: Tensor, values: Tensor, size: torch.Size) -> Tensor:
    _require(str(layout) in _COMPRESSED and prod(filter(None, size)) <= _MOST, "a sparse tensor")
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def _of_quantized(value: Tensor) -> list[Any]:
    integers, about = value.int_repr(), [value.dtype, value.shape]
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [integers, *about, value.q_scale(), value.q_zero_point()]
    channels = value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()
    return [integers, *about, *channels]


def _quantized(
    integers: Tensor,
    dtype: torch.dtype,
    size: torch.Size,
    scale: Any,
    zero_point: Any,
    axis: int | None = None,
) -> Tensor:
    what = "a quantized tensor"
    _require(prod(size) * _FEWEST_BITS <= 8 * integers.nbytes, what)
    if axis is None:
        empty = torch._empty_affine_quantized(size, scale=scale, zero_point=zero_point, dtype=dtype)
    else:
        _require(0 <= axis < len(size) and scale.shape == zero_point.shape == (size[axis],), what)
        empty = torch._empty_per_channel_affine_quantized(
            size, scales=scale, zero_points=zero_point, axis=axis, dtype=dtype
        )
    like = empty.int_repr()
    _require((like.shape, like.dtype) == (integers.shape, integers.dtype), what)
    stride = integers.stride() if like.shape == empty.shape else empty.stride()
    return empty.set_(_typed(_memory(integers), dtype), 0, size, stride)


def _typed(memory: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    typed: Any = TypedStorage
    storage: TypedStorage = typed(wrap_storage=memory, dtype=dtype, _internal=True)
    return storage


def _memory(tensor: Tensor) -> UntypedStorage:
    """Return memory of its own for a dense tensor, in its layout."""
    return tensor.clone().untyped_storage()


def _of_nested(value: Tensor) -> list[Any]:
    return [*value.unbind()]


def _nested(*tensors: Tensor) -> Tensor:
    _require(len({(tensor.ndim, tensor.dtype) for tensor in tensors}) <= 1, "a nested tensor")
    return torch.nested.nested_tensor(list(tensors), dtype=tensors[0].dtype if tensors else None)


def _of_jagged(value: Any) -> list[Any]:
    return [value._values, value._offsets, value._lengths, value._ragged_idx]


def _jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, axis: int) -> Tensor:
    what = "a nested tensor"
    _require(1 <= axis <= values.ndim and offsets.ndim == 1 and offsets.numel() > 0, what)
    _require(not offsets.is_floating_point() and (lengths is None or lengths.dtype == offsets.dtype), what)
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    _require(bool((offsets >= 0).all()) and bool((ends >= offsets[:-1]).all()), what)
    _require(int(torch.cat([offsets, ends]).max()) <= values.shape[axis - 1], what)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=axis)


def _of_storage(value: UntypedStorage | TypedStorage) -> list[Any]:
    untyped = value if isinstance(value, UntypedStorage) else value._untyped_storage
    dtype = torch.uint8 if isinstance(value, UntypedStorage) else value.dtype
    return [dtype, torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)]


def _storage(dtype: torch.dtype, content: Tensor) -> UntypedStorage | TypedStorage:
    """Return the storage; that of bytes untyped: torch.load makes no difference between the two."""
    _require(content.dtype is torch.uint8 and content.nbytes % dtype.itemsize == 0, "a storage")
    untyped = _memory(content)
    return untyped if dtype is torch.uint8 else _typed(untyped, dtype)


def _of_meta(value: Tensor) -> list[Any]:
    return [value.dtype, value.shape, value.stride()]


def _meta(dtype: torch.dtype, size: torch.Size, stride: Sequence[int]) -> Tensor:
    _require(prod(filter(None, size)) <= _MOST, "a meta tensor")
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


KINDS = {
    "array": CompoundKind(
        lambda value: numpy_values.tensor_of(value) is not None,
        lambda value: [numpy_values.tensor_of(value)],
        lambda tensor: tensor.numpy(),
    ),
    "storage": CompoundKind(lambda value: isinstance(value, UntypedStorage | TypedStorage), _of_storage, _storage),
    "jagged": CompoundKind(_is_jagged, _of_jagged, _jagged),
    "sparse": CompoundKind(_layout(torch.sparse_coo), _of_sparse, _sparse),
    "compressed": CompoundKind(_is_compressed, _of_compressed, _compressed),
    "nested": CompoundKind(lambda value: _is_strided(value) and value.is_nested, _of_nested, _nested),
    "quantized": CompoundKind(lambda value: _is_strided(value) and value.is_quantized, _of_quantized, _quantized),
    "meta": CompoundKind(lambda value: _is_strided(value) and value.is_meta, _of_meta, _meta),
    "conjugate": CompoundKind(
        lambda value: _is_strided(value) and value.is_conj(), lambda value: [value.conj()], Tensor.conj
    ),
    "negative": CompoundKind(
        lambda value: _is_strided(value) and value.is_neg(), lambda value: [value._neg_view()], Tensor._neg_view
    ),
}
