"""Copies of one network in a checkpoint: an average beside it, a student and its teacher, an earlier state.

Two dicts of tensors are copies if they have the same names and shapes, and values that are alike: those of two networks
that were trained apart have nothing in common. An average often lacks the buffers, and may have its names without dots;
counters beside it say nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import combinations, islice, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from birdie.compress.wrappers import without_prefixes

T = TypeVar("T")
_AVERAGES = {"ema", "avg", "average", "shadow", "swa", "target"}
_ALIKE = 0.5  # correlation of values
_SAMPLED, _MATRICES = 1 << 16, 8  # values of a matrix, and matrices of a network
_COMPARED = 16  # networks; of more, as experts and layers are, the first


def is_average(key: Any) -> bool:
    """Return whether a key is called as averages of weights are."""
    return any(word in _AVERAGES or word.rstrip("ds") in _AVERAGES for word in re.split(r"[^a-z]+", str(key).lower()))


def pairs(networks: Iterable[T]) -> Iterator[tuple[T, T]]:
    """Yield the pairs of networks that are compared."""
    return combinations(islice(networks, _COMPARED), 2)


def are_copies(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor], *, whatever_values: bool = False) -> bool:
    """Return whether two networks are one twice.

    Args:
        one: name → tensor.
        whatever_values: let names and shapes decide.
    """
    shapes = [{(name, tensor.shape) for name, tensor in state.items() if tensor.ndim} for state in (one, other)]
    common = shapes[0] & shapes[1]
    if len(common) < min(map(len, shapes)) or 2 * len(common) <= max(map(len, shapes)):
        return False
    matrices = [(one[name], other[name]) for name, _ in common if one[name].ndim > 1]
    return whatever_values or _are_alike(sorted(matrices, key=lambda pair: -pair[0].numel())[:_MATRICES])


def _are_alike(matrices: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the values of matrices correlate, or cannot be compared."""
    product = squares = other_squares = 0.0
    for pair in matrices:
        with suppress(RuntimeError, NotImplementedError):  # sparse, quantized and meta tensors
            one, other = (_centered(matrix) for matrix in pair)
            product += float(one @ other)
            squares, other_squares = squares + float(one @ one), other_squares + float(other @ other)
    return not product < _ALIKE * (squares * other_squares) ** 0.5


def _centered(matrix: Tensor) -> Tensor:
    """Return some values of a matrix without their mean."""
    values = matrix.detach().reshape(-1)[:_SAMPLED]
    values = torch.view_as_real(values.resolve_conj()).reshape(-1) if values.is_complex() else values.float()
    return values - values.mean()


def copies_inside(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield two prefixes of names, "model." and "ema_model.", below each of which a dict holds the same network."""
    first, last = min(state, default=""), max(state, default="")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    start = first[: first[:common].rfind(".") + 1]
    waiting = [(start, {name.removeprefix(start): tensor for name, tensor in state.items()}, True)]
    while waiting:
        at, tensors, is_top = waiting.pop()
        children: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            first, dot, rest = name.partition(".")
            if dot and rest and not first.isdigit():  # layers with numbers are no copies of one another
                children.setdefault(first, {})[rest] = tensor
        networks = {key: part for key, part in children.items() if any(tensor.ndim > 1 for tensor in part.values())}
        plain = {key: _without_dots(part) for key, part in networks.items()}
        for one, other in pairs(networks):
            by_name = is_average(one) != is_average(other)
            if are_copies(plain[one], plain[other], whatever_values=by_name) and not _are_tied(
                networks[one], networks[other]
            ):
                yield f"{at}{one}.", f"{at}{other}."
        if is_top:
            waiting += [(f"{at}{key}.", part, False) for key, part in networks.items()]


def _without_dots(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".", ""): tensor for name, tensor in without_prefixes(state).items()}


def _are_tied(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two networks share their largest tensor, as tied layers do."""
    memories = []
    for state in (one, other):
        largest = max(state.values(), key=lambda tensor: tensor.numel())
        try:
            memories.append(largest.data_ptr())
        except (RuntimeError, NotImplementedError):
            return False
    return memories[0] == memories[1]
