"""The field of a file for the order of a state dict (birdie.checkpoints.order), as small as possible."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from birdie.checkpoints.order import arranged

Json = Any
_CUTS = (".", "./", "")  # characters after which names are cut


def order_field(keys: Sequence[str], extra: Mapping[str, Sequence[str]] | None = None) -> Json:
    """Return the field of a file's metadata for the order of a state dict; None for the order of a file without it.

    Args:
        keys: of the state dict.
        extra: name of each extra state in it → names of its tensors.
    """
    extra = extra or {}
    if [*keys] == sorted(keys) == sorted(keys, key=lambda key: (key in extra, key)):
        return None
    return order_of([name for key in keys for name in (key, *extra.get(key, ()))])


def order_of(names: Sequence[str]) -> Json:
    """Return the order of names, in as few characters as possible; [] if they are sorted."""
    if [*names] == sorted(names):
        return []
    letters = set().union(*names)
    fields = (_field(names, cut) for cut in _CUTS if not cut or letters & {*cut})
    return min(filter(None, fields), key=lambda field: len(json.dumps(field)))


def _field(names: Sequence[str], cut: str) -> Json | None:
    """Return the field that cuts names at some characters; None if it cannot say the order of these."""
    field: list[Json] = [cut]

    def arrange(members: list[str], wanted: Iterable[str]) -> list[str]:
        order = list(wanted)
        field.append(_moves(members, order))
        return order

    if arranged(names, cut, arrange) != list(names):
        return None
    while field[-1] == []:
        field.pop()
    return field


def _moves(members: list[str], order: list[str]) -> list[int]:
    """Return how far each member of an order lies from where the one before it was, among those that are left."""
    rank = {member: index for index, member in enumerate(members)}
    left, at, moves = [*rank.values()], 0, list[int]()
    for member in order:
        index = bisect_left(left, rank[member])
        move = (index - at) % len(left)
        moves.append(move if 2 * move <= len(left) else move - len(left))
        del left[index]
        at = index
    while moves and not moves[-1]:
        moves.pop()
    return moves
