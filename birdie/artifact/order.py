"""Order of the tensors of a file: that of the state dict that was saved. The entries of the file are sorted by name.

Names nest: all that begin with "h.0." stand together in a state dict, and those of "h.1." are in the same order. So of
each set of parts that follow the same beginning a file has, once, the moves from the natural order, in which numbers
rise, to the order of the state dict:

    wte.weight, h.0.weight, h.0.bias, h.1.weight, h.1.bias, …, h.10.weight, h.10.bias  ◄──►  [".", [1], [], [1]]

Where one set has several orders, or the names of one beginning do not stand together, all names are one set.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from birdie.errors import ArtifactError

Json = Any
MOST_PARTS = 32  # of a name
_CUTS = (".", "./", "")  # characters after which names are cut
_LONGEST = 8  # characters of a cut
_PIECES = re.compile("([^0-9]*)([0-9]*)")

# (set, its members in the order of the names) → the members in the order of the state dict
_Arrange = Callable[[list[str], Iterable[str]], list[str]]


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
    """Return the order of names, in as few characters as possible."""
    letters = set().union(*names)
    fields = (_field(names, cut) for cut in _CUTS if not cut or letters & {*cut})
    return min(filter(None, fields), key=lambda field: len(json.dumps(field)))


def in_order(names: Iterable[str], order: Json, where: str) -> list[str]:
    """Return names in the order of the state dict.

    Args:
        names: in any order.
        order: the field.
        where: what has the field, for error messages.

    Raises:
        ArtifactError: the field is no order of them.
    """
    if not _is_sound(order):
        raise ArtifactError(f"the order of tensors in {where} is not what birdie writes; the file is damaged")
    cut, *waiting = order
    waiting.reverse()

    def arrange(members: list[str], _: Iterable[str]) -> list[str]:
        moves = waiting.pop() if waiting else []
        if len(moves) >= len(members) or any(abs(move) >= len(members) - i for i, move in enumerate(moves)):
            raise ArtifactError(
                f"the order of tensors in {where} is no permutation of their names; the file is damaged"
            )
        return _moved(members, moves)

    arranged = _arranged(names, cut, arrange)
    if waiting:
        raise ArtifactError(f"the order of tensors in {where} is of more than the file holds; the file is damaged")
    return arranged


def extra_in(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of extra states in the metadata of a file, which are keys of the state dict as tensors are."""
    about = fields.get("state")
    extra = about.get("extra") if isinstance(about, dict) else None
    return list(extra) if isinstance(extra, dict) else []


def _is_sound(order: Json) -> bool:
    if not isinstance(order, list) or not order or type(order[0]) is not str or len(order[0]) > _LONGEST:
        return False
    return all(isinstance(moves, list) and all(type(move) is int for move in moves) for moves in order[1:])


def _field(names: Sequence[str], cut: str) -> Json | None:
    """Return the field that cuts names at some characters; None if it cannot say the order of these."""
    field: list[Json] = [cut]

    def arrange(members: list[str], wanted: Iterable[str]) -> list[str]:
        order = list(wanted)
        field.append(_moves(members, order))
        return order

    if _arranged(names, cut, arrange) != list(names):
        return None
    while field[-1] == []:
        field.pop()
    return field


def _arranged(names: Iterable[str], cut: str, arrange: _Arrange) -> list[str]:
    """Return names in order, every distinct set of two or more by `arrange`.

    A set comes before those below its members, and these come in the natural order of the members.
    """
    marks = re.compile(f"([{re.escape(cut)}])") if cut else None
    known: dict[tuple[str, ...], list[str]] = {}

    def walk(group: list[tuple[list[str], str]], depth: int) -> list[str]:
        inner: dict[str, list[tuple[list[str], str]]] = {}
        for item in group:
            inner.setdefault(item[0][depth], []).append(item)
        members = sorted(inner, key=_natural)
        key = tuple(members)
        if key not in known:
            known[key] = arrange(members, inner) if len(members) > 1 else members
        below = {
            member: walk(inner[member], depth + 1) if len(inner[member]) > 1 else [inner[member][0][1]]
            for member in members
        }
        return [name for member in known[key] for name in below[member]]

    parts = [(_parts(name, marks), name) for name in names]
    return walk(parts, 0)


def _parts(name: str, marks: re.Pattern[str] | None) -> list[str]:
    """Return the parts of a name, each with the character after which it was cut; the last, without, may be empty."""
    if marks is None:
        return [name]
    pieces = marks.split(name, MOST_PARTS - 1)
    return [*map("".join, zip(pieces[::2], pieces[1::2], strict=False)), pieces[-1]]


def _natural(part: str) -> tuple[tuple[str, int, str, int], ...]:
    """Return the key of the natural order: digits are compared as numbers, then by how many zeros lead them."""
    return tuple(
        (text, len(digits.lstrip("0")), digits.lstrip("0"), len(digits)) for text, digits in _PIECES.findall(part)
    )


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


def _moved(members: list[str], moves: list[int]) -> list[str]:
    left, at, order = [*members], 0, list[str]()
    for move in moves:
        at = (at + move) % len(left)
        order.append(left.pop(at))
    return [*order, *left[at:], *left[:at]]
