"""Equal tensors of a state, such as a head that was written untied from the embedding: they are stored once.

A file has a copy as an alias, like a tied tensor, and a list of those aliases that are copies: `birdie.load` returns
independent tensors for them. Tensors with different schemes stay apart, since rules named them apart.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.compress.rate.assignment import Assignment
from birdie.compress.tensors import parts, to_bits

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
    for alike in _groups(tensors, kind):
        for equal in _groups(alike, lambda name: (repr(schemes.get(name)), _digest(tensors[name]))):
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


def _groups(names: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    """Return the groups of two names or more with one key; the key of a single name is not computed."""
    groups: dict[Hashable, list[str]] = {}
    if len(names := list(names)) > 1:
        for name in names:
            groups.setdefault(key(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of the bits of a tensor."""
    total = hashlib.sha256()
    for part in parts(tensor):
        total.update(np.ascontiguousarray(to_bits(part.reshape(-1))).data)
    return total.digest()


def _is_constant(tensor: Tensor) -> bool:
    bits = to_bits(tensor)
    return bool((bits == bits[0, 0]).all())
