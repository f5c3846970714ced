"""Groups of tiny tensors, as adapters and hypernetworks have thousands of: those of one kind are coded as one tensor.

    64 or more tensors of one shape, dtype and scheme ──► one below the other ──► an entry that they share
    scale b.weight, scale c.weight, …                                             (artifact/container.py: members)

A coder that starts anew for a few hundred numbers takes milliseconds for its tables and hardly learns anything. Only
schemes that encode rows without regard to others are grouped, so every value is what it would be alone.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from birdie.compress.rate.assignment import Assignment, Group
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import small_scheme
from birdie.compress.tensors import planes

LEAST = 64  # tensors of a group
TINY = 1 << 10  # elements of a tensor, at most
MOST = 1 << 17  # elements of a group, about: one tensor of it can be read alone, but all are decoded for that
_LARGEST = 2.0**15  # magnitudes above may be beyond a scheme, whose error must name the tensor


def group_tiny_tensors(assignment: Assignment) -> Assignment:
    """Return the assignment with tiny tensors of one kind as one tensor."""
    tensors = assignment.tensors
    alike: dict[Hashable, list[str]] = {}
    for name, tensor in tensors.items():
        if 0 < tensor.numel() <= TINY and name not in assignment.bases:
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(name)
    kind = _kinds(assignment) if any(len(names) >= LEAST for names in alike.values()) else {}
    groups: dict[str, Group] = {}
    stacked: dict[str, Tensor] = {}
    kinds: dict[str, _GroupKind] = {}
    for names in alike.values():
        for key, members in _by(names, [kind.get(name) for name in names]):
            if key is None:
                continue
            for some in _parts(members, tensors, key):
                group = f"\0group{len(groups)}"
                groups[group] = Group(tuple(some), tuple(tensors[some[0]].shape))
                parts = [tensors[name].detach() for name in some]
                stacked[group] = torch.cat(parts) if parts[0].ndim > 1 else torch.stack(parts)
                kinds[group] = key
    if not groups:
        return assignment
    owner = {name: group for group, one in groups.items() for name in one.names}

    def unique(items: Mapping[str, Any]) -> dict[str, Any]:
        return {name: item for name, item in items.items() if name not in owner}

    def joined(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(owner.get(name, name) for name in names))

    schemes = {group: one.scheme for group, one in kinds.items() if one.scheme is not None}
    return replace(
        assignment,
        tensors={**unique(assignment.tensors), **stacked},
        settled={**unique(assignment.settled), **schemes},
        small=unique(assignment.small),
        free=joined(assignment.free),
        reserve=joined(assignment.reserve),
        exact=frozenset(joined(sorted(assignment.exact))),
        quantized=frozenset(joined(sorted(assignment.quantized))),
        groups=groups,
    )


@dataclass(frozen=True, slots=True)
class _GroupKind:
    """Properties that the tensors of a group share, beside shape and dtype.

    Attributes:
        scheme: that is settled; None for those of a search.
        searched: whether a search chooses the precision at first, or only if the budget is tight.
        is_exact: whether the tensor is no weight.
        otherwise: the scheme of a tensor that a search may coarsen and does not.
    """

    scheme: Scheme | None
    searched: bool = False
    is_exact: bool = False
    otherwise: Scheme | None = None


def _kinds(assignment: Assignment) -> dict[str, _GroupKind]:
    """Return name → kind of the tensors that can be in a group."""
    steered = assignment.steered
    kinds = {
        name: _GroupKind(scheme, is_exact=name in assignment.exact)
        for name, scheme in {**assignment.settled, **assignment.small}.items()
        if scheme.by_rows
    }
    if steered is None or (steered.by_rows and not steered.by_axes):
        kinds |= dict.fromkeys(assignment.free, _GroupKind(None, searched=True))
        for name in assignment.reserve:
            if assignment.tensors[name].numel() <= TINY:
                kinds[name] = _GroupKind(None, otherwise=small_scheme(planes(assignment.tensors[name])))
    return kinds


def _parts(names: Sequence[str], tensors: Mapping[str, Tensor], kind: _GroupKind) -> Iterator[list[str]]:
    """Yield the groups of tensors of one kind, none of which is too large."""
    runs = [list(names)]
    if not isinstance(kind.scheme, Lossless):
        values = torch.stack([planes(tensors[name].detach()).reshape(-1) for name in names])
        if values.dtype == torch.float64:
            return
        values = values.float()
        usable = (values.abs().amax(1) < _LARGEST).tolist()  # False for NaN
        sizes = dict(zip(names, values.square().mean(1).sqrt().tolist(), strict=True))
        runs = [[name for name, good in zip(names, usable, strict=True) if good]]
        if kind.scheme is None:  # a search takes one scale for a group
            runs = list(_of_one_size(sorted(runs[0], key=lambda name: sizes[name]), sizes))
    most = max(LEAST, MOST // tensors[names[0]].numel())
    for run in runs:
        if len(run) >= LEAST:
            count = math.ceil(len(run) / most)
            cuts = [len(run) * index // count for index in range(count + 1)]
            yield from (sorted(run)[start:end] for start, end in pairwise(cuts))


def _of_one_size(names: Sequence[str], sizes: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield tensors whose root mean squares are within a factor of two, from the smallest."""
    run: list[str] = []
    for name in names:
        if run and sizes[name] > 2 * sizes[run[0]]:
            yield run
            run = []
        run.append(name)
    yield run


def _by(names: Sequence[str], keys: Sequence[Any]) -> list[tuple[Any, list[str]]]:
    """Return the names of each key, in order, where there are enough of them."""
    by_key: dict[Any, list[str]] = {}
    for name, key in zip(names, keys, strict=True):
        by_key.setdefault(key, []).append(name)
    return [(key, members) for key, members in by_key.items() if len(members) >= LEAST]
