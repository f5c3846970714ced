"""Sizes of made-up arguments as the layers of a model expect them.

    forward fails in a layer ──► the size that its weight has ──► the argument that had another ──► Fit

An argument is recognized by its memory, by its size, or by a size that divides that of the layer's input, as where
patches are cut. Where several have the same size, they get different ones first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LABELS = (11, 13, 17, 19, 23, 29, 31, 37)  # sizes that tell arguments apart: none divides another
_LONGER = 8  # times as long
_IDS = 0  # axis of a fit that is about values


@dataclass(frozen=True, slots=True)
class Fit:
    """Size of a made-up argument along an axis; axis 0, that of samples, stands for the number of different ids."""

    name: str
    axis: int
    size: int


class Failure(TorchFunctionMode):
    """Keeps the arguments of the function of torch that raised the last exception."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.name = ""
        self.arguments: tuple[Any, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        try:
            return func(*args, **keywords)
        except Exception as error:
            if error is not self.error:  # the innermost function
                self.error, self.name = error, getattr(func, "__name__", "")
                self.arguments = (*args, *keywords.values())
            raise


def fitted(value: Any, fit: Fit, generator: torch.Generator) -> Any:
    """Return an argument with the size of a fit; what is new of it is random."""
    if not isinstance(value, Tensor) or fit.axis >= value.ndim:
        return value
    if fit.axis == _IDS:
        return value % fit.size
    shape = list(value.shape)
    if shape[fit.axis] < fit.size:
        shape[fit.axis] = fit.size - shape[fit.axis]
        if value.is_floating_point():
            more = torch.randn(shape, generator=generator, device="cpu") * (value.std() if value.numel() > 1 else 1)
        else:
            more = torch.randint(
                0, int(value.max()) + 1 if value.numel() else 1, shape, generator=generator, device="cpu"
            )
        value = torch.cat((value, more.to(value)), fit.axis)
    return value.narrow(fit.axis, 0, fit.size).contiguous()


def corrections(failure: Failure, keywords: Mapping[str, Any]) -> list[Fit]:
    """Return the fits after which a function that failed may run; none if its arguments tell nothing.

    Args:
        failure: of a forward pass.
        keywords: its arguments.
    """
    tensors = {name: value for name, value in keywords.items() if isinstance(value, Tensor) and value.ndim}
    if "ernel size" in str(failure.error) or "adding size" in str(failure.error):  # too short for convolutions
        name = max(tensors, key=lambda name: tensors[name].numel())
        return [Fit(name, tensors[name].ndim - 1, _LONGER * tensors[name].shape[-1])]
    for tensor, axis, size in _expected(failure):
        if axis is None:
            for name, value in tensors.items():
                if not value.is_floating_point() and value.numel() and int(value.max()) == int(tensor.max()) >= size:
                    return [Fit(name, _IDS, size)]
        elif fits := _of_argument(tensor, axis, size, tensors):
            return fits
    return []


def _expected(failure: Failure) -> Iterator[tuple[Tensor, int | None, int]]:
    """Yield inputs of a function, an axis, and the size that the function expects there."""
    name, values = failure.name.strip("_"), failure.arguments
    if len(values) < 2 or not isinstance(first := values[0], Tensor):
        return
    second = values[1]
    weight = list(second.shape) if isinstance(second, Tensor) else []
    if name == "linear" and len(weight) == 2:
        yield first, first.ndim - 1, weight[1]
    elif name.startswith("conv") and len(weight) == first.ndim:
        groups = values[6] if len(values) > 6 and isinstance(values[6], int) else 1
        yield first, 1, weight[0] if "transpose" in name else weight[1] * groups
    elif name in ("layer_norm", "rms_norm"):
        shape = tuple(second)
        yield first, first.ndim - 1, shape[-1]
    elif name == "embedding" and isinstance(second, Tensor):
        for tensor, table in ((first, second), (second, first)):  # F.embedding and torch.embedding
            if not tensor.is_floating_point() and table.ndim == 2:
                yield tensor, None, len(table)
    elif name in ("batch_norm", "group_norm"):
        scale = next((one for one in values[1:] if isinstance(one, Tensor) and one.ndim == 1), None)
        if scale is not None:
            yield first, 1, len(scale)
    elif name in ("matmul", "bmm", "mm", "rmatmul") and len(weight) >= 2:
        yield first, first.ndim - 1, weight[-2]
    elif name in ("add", "mul", "sub", "iadd", "radd", "rmul", "imul") and weight:
        yield from _broadcast(first, second)


def _broadcast(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    for back in range(1, min(first.ndim, second.ndim) + 1):
        one, other = first.shape[-back], second.shape[-back]
        if one != other and 1 not in (one, other):
            yield first, first.ndim - back, other
            yield second, second.ndim - back, one


def _of_argument(tensor: Tensor, axis: int, size: int, tensors: Mapping[str, Tensor]) -> list[Fit]:
    """Return the fit of the argument from which an input of a layer comes."""
    actual = tensor.shape[axis]
    axes = [(name, index) for name, value in tensors.items() for index in range(1, value.ndim)]
    memory = tensor.untyped_storage().data_ptr()
    same = [(name, index) for name, index in axes if tensors[name].untyped_storage().data_ptr() == memory]
    equal = [(name, index) for name, index in axes if tensors[name].shape[index] == actual]
    for candidates in ([one for one in equal if one in same], equal):
        if len(candidates) > 1 and (name_axis := [one for one in candidates if one[1] == axis]):
            candidates = name_axis
        if len(candidates) == 1:
            return [Fit(*candidates[0], size)]
        if candidates:
            return _labels(candidates, tensors)
    parts = [(name, index) for name, index in axes if _is_part(tensors[name].shape[index], actual, size)]
    if len(parts) == 1:
        name, index = parts[0]
        return [Fit(name, index, size * tensors[name].shape[index] // actual)]
    return _labels(parts, tensors)


def _is_part(size: int, actual: int, expected: int) -> bool:
    return size > 1 and actual > size and actual % size == 0 and expected % (actual // size) == 0


def _labels(axes: list[tuple[str, int]], tensors: Mapping[str, Tensor]) -> list[Fit]:
    """Return different sizes for axes that cannot be told apart."""
    used = {size for value in tensors.values() for size in value.shape}
    free = [label for label in _LABELS if label not in used]
    return [Fit(*one, label) for one, label in zip(axes, free, strict=False)]
