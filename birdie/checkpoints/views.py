"""Layout of tensors in memory: the order of their dimensions, and views of memory that several tensors share.

    w, w[2:4], w[0].expand(9, 5) ──► w, and of the others their offset, sizes and strides in w

Views that overlap are views of one tensor again: what is written to one is read from the others. Views without a common
element, such as the parts of one vector of all parameters, become tensors with memory of their own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from birdie.checkpoints.leaves import damaged

_MOST = 1 << 48  # elements of a view


class View(NamedTuple):
    """A tensor as a part of another one."""

    base: Tensor  # the other one, contiguous
    offset: int  # the first element there
    is_new: bool  # whether the base is a vector made for its views


Key = tuple[object, ...]


def key_of(tensor: Tensor) -> Key:
    """Return what is the same for two names of one view of one memory."""
    memory = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory; empty for row-major order, or with gaps."""
    if tensor.is_contiguous() and tensor.stride() == _strides(tensor.shape, range(tensor.ndim)):
        return []
    order = sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride()[axis], axis))
    return order if tensor.numel() and tensor.stride() == _strides(tensor.shape, order) else []


def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor whose dimensions lie in this order in memory."""
    if sorted(order) != list(range(tensor.ndim)):
        raise damaged("has a tensor whose dimensions lie in no order")
    return torch.empty_strided(tensor.shape, _strides(tensor.shape, order), dtype=tensor.dtype).copy_(tensor)


def view_of(base: Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a view of a contiguous tensor, after a check that it lies within."""
    numbers = [offset, *size, *stride]
    end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    count: int = prod(numbers[1 : len(size) + 1])
    if not all(type(number) is int and number >= 0 for number in numbers) or count > _MOST:
        raise damaged("has a view of no shape")
    if not base.is_contiguous() or (count and end >= base.numel()):
        raise damaged("has a view beyond its tensor")
    return base.detach().as_strided(list(size), list(stride), base.storage_offset() + offset)


def views_in(tensors: Iterable[Tensor]) -> dict[Key, View]:
    """Return the views among plain tensors: those that have elements in common with others, or with themselves."""
    memories: dict[Key, dict[Key, Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = key_of(tensor)
            memories.setdefault(key[:2], {}).setdefault(key, tensor)
    views: dict[Key, View] = {}
    for members in memories.values():
        for group in _groups(members.values()):
            if len({tensor.dtype for tensor in group}) == 1 and _overlap(group):
                views |= _based(group)
    return views


def not_kept(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return what a file of tensors alone loses of them, and a complete object keeps."""
    attributes = sorted({str(key) for tensor in tensors.values() for key in vars(tensor)})
    turned = sum(bool(order_in_memory(tensor)) for tensor in tensors.values())
    views = len(views_in(tensors.values()))
    return (
        *([f"attributes of tensors ({', '.join(attributes)[:80]})"] if attributes else []),
        *([f"the order of dimensions in memory of {turned:,} tensors (channels last, transposed)"] if turned else []),
        *([f"the shared memory of {views:,} tensors that are views"] if views else []),
    )


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one memory whose ranges there meet."""
    group: list[Tensor] = []
    end = -1
    for tensor in sorted(tensors, key=lambda tensor: _start(tensor) * tensor.itemsize):
        if group and _start(tensor) * tensor.itemsize >= end:
            yield group
            group, end = [], -1
        group.append(tensor)
        end = max(end, _end(tensor) * tensor.itemsize)
    if group:
        yield group


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return _start(tensor) + sum((size - 1) * stride for size, stride in sizes) + 1


def _range(group: Sequence[Tensor]) -> tuple[int, int]:
    return min(map(_start, group)), max(map(_end, group))


def _marks(group: Sequence[Tensor]) -> Tensor:
    """Return which elements of the range of a group are some tensor's."""
    start, end = _range(group)
    marks = torch.zeros(end - start, dtype=torch.bool)
    for tensor in group:
        sizes = [size if step else 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        marks.as_strided(sizes, tensor.stride(), _start(tensor) - start).fill_(True)
    return marks


def _overlap(group: Sequence[Tensor]) -> bool:
    """Return whether tensors have elements in common, or one has the same element at several positions."""
    if len(group) == 1 and (group[0].is_contiguous() or order_in_memory(group[0])):
        return False
    return int(_marks(group).sum()) < sum(tensor.numel() for tensor in group)


def _based(group: Sequence[Tensor]) -> dict[Key, View]:
    """Return the views of a group: its first contiguous tensor that has all elements is the base, or else a vector."""
    start, end = _range(group)
    complete = (tensor for tensor in group if tensor.is_contiguous() and tensor.numel() == end - start)
    base = next(complete, None)
    if is_new := base is None:
        memory = torch.empty(0, dtype=group[0].dtype, device=group[0].device)
        base = memory.set_(group[0].untyped_storage(), start, (end - start,)).detach().cpu().clone()  # type: ignore[call-overload]
        base.view(torch.uint8).view(end - start, -1)[~_marks(group)] = 0  # what is no tensor's stays with the caller
    return {key_of(tensor): View(base, _start(tensor) - start, is_new) for tensor in group if tensor is not base}


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)
