"""Fewer tensors to code: equal ones are stored once, and tiny ones of one kind are coded as one tensor.

    a head that was written untied from the embedding ──► an alias, in a list of those that are copies: `birdie.load`
                                                          returns independent tensors for them
    64 or more tensors of one shape, dtype and scheme ──► one below the other ──► an entry that they share
    scale b.weight, scale c.weight, …                                             (artifact/container.py: members)

Tensors with different schemes stay apart, since rules named them apart. Adapters and hypernetworks have thousands of
tiny tensors: a coder that starts anew for a few hundred numbers takes milliseconds for its tables and hardly learns
anything. Only schemes that encode rows without regard to others are grouped, so every value is what it would be alone.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.compress.rate.assignment import Assignment, Group
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import small_scheme
from birdie.compress.tensors import parts, planes, to_bits

LEAST = 64  # tensors of a group
TINY = 1 << 10  # elements of a tensor, at most
MOST = 1 << 17  # elements of a group, about: one tensor of it can be read alone, but all are decoded for that
_LARGEST = 2.0**15  # magnitudes above may be beyond a scheme, whose error must name the tensor
LEAST_BYTES = 1 << 10  # of a tensor; an alias takes some bytes, too
_SAMPLE = 64  # elements that are compared before all of them are hashed, about so many


def merge_copies(assignment: Assignment) -> Assignment:
    """Return the assignment with equal tensors of one scheme only under the first of their names."""
    tensors = {name: tensor for name, tensor in assignment.tensors.items() if tensor.nbytes >= LEAST_BYTES}
    schemes = {**assignment.settled, **assignment.small}

    def kind(name: str) -> Hashable:
        tensor = tensors[name]
        part = next(parts(tensor)).reshape(-1)
        sample = part[:: 1 + len(part) // _SAMPLE].resolve_conj().resolve_neg().cpu().contiguous()
        return tensor.dtype, tensor.shape, bytes(sample.view(torch.uint8).numpy())

    tied, copies = {*assignment.ties.values()}, dict[str, str]()
    for alike in _alike(tensors, kind, 2).values():
        for equal in _alike(alike, lambda name: (repr(schemes.get(name)), _digest(tensors[name])), 2).values():
            # One with several names comes first, and a second such stays apart: its names share one tensor when loaded.
            first, *others = sorted(equal, key=lambda name: name not in tied)
            others = [name for name in others if name not in tied]
            if others and not _is_constant(tensors[first]):  # a constant takes fewer bytes than an alias
                copies |= dict.fromkeys(others, first)
    if not copies:
        return assignment

    def unique(items: Mapping[str, Any]) -> dict[str, Any]:
        return {name: item for name, item in items.items() if name not in copies}

    return replace(
        assignment,
        tensors=unique(assignment.tensors),
        ties={**assignment.ties, **copies},
        settled=unique(assignment.settled),
        small=unique(assignment.small),
        free=tuple(name for name in assignment.free if name not in copies),
        reserve=tuple(name for name in assignment.reserve if name not in copies),
        exact=assignment.exact - copies.keys(),
        quantized=assignment.quantized - copies.keys(),
        copies=frozenset(copies),
    )


def _digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of the bits of a tensor."""
    total = hashlib.sha256()
    for part in parts(tensor):
        total.update(np.ascontiguousarray(to_bits(part.reshape(-1))).data)
    return total.digest()


def _is_constant(tensor: Tensor) -> bool:
    bits = to_bits(tensor)
    return bool((bits == bits[0, 0]).all())


def group_tiny_tensors(assignment: Assignment) -> Assignment:
    """Return the assignment with tiny tensors of one kind as one tensor."""
    tensors = assignment.tensors
    tiny = [name for name, tensor in tensors.items() if 0 < tensor.numel() <= TINY and name not in assignment.bases]
    alike = _alike(tiny, lambda name: (tensors[name].shape, tensors[name].dtype, tensors[name].device), LEAST)
    kind = _kinds(assignment) if alike else {}
    groups: dict[str, Group] = {}
    stacked: dict[str, Tensor] = {}
    kinds: dict[str, _GroupKind] = {}
    for names in alike.values():
        for key, members in _alike(names, kind.get, LEAST).items():
            if key is None:
                continue
            for some in _parts(members, tensors, key):
                group = f"\0group{len(groups)}"
                groups[group] = Group(tuple(some), tuple(tensors[some[0]].shape))
                rows = [tensors[name].detach() for name in some]
                stacked[group] = torch.cat(rows) if rows[0].ndim > 1 else torch.stack(rows)
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
    """Properties that the tensors of a group share, beside shape and dtype."""

    scheme: Scheme | None  # that is settled; None for those of a search
    searched: bool = False  # whether a search chooses the precision at first, or only if the budget is tight
    is_exact: bool = False  # whether the tensor is no weight
    otherwise: Scheme | None = None  # the scheme of a tensor that a search may coarsen and does not


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


def _alike(names: Iterable[str], key: Callable[[str], Any], least: int) -> dict[Any, list[str]]:
    """Return the names of each key, in order, where there are enough; the keys of too few names are not computed."""
    by_key: dict[Any, list[str]] = {}
    if len(names := list(names)) >= least:
        for name in names:
            by_key.setdefault(key(name), []).append(name)
    return {one: members for one, members in by_key.items() if len(members) >= least}
