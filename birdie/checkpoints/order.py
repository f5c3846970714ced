"""Order of names: of the tensors of a state dict, of the keys of a dict in a tree, of the tensors in a file of a chain.

The entries of a .birdie file are sorted by name, so each of these is kept as what it differs from a natural order.

Names nest: all that begin with "h.0." stand together in a state dict, and those of "h.1." are in the same order. So of
each set of parts that follow the same beginning a file has, once, the moves from the natural order, in which numbers
rise, to the order of the state dict:

    wte.weight, h.0.weight, h.0.bias, h.1.weight, h.1.bias, …, h.10.weight, h.10.bias  ◄──►  [".", [1], [], [1]]

Where one set has several orders, or the names of one beginning do not stand together, all names are one set.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from os.path import commonprefix
from typing import Any

from birdie.errors import ArtifactError

Json = Any
MOST_PARTS = 32  # of a name
_LONGEST = 8  # characters of a cut
_PIECES = re.compile("([^0-9]*)([0-9]*)")

Arrange = Callable[[list[str], Iterable[str]], list[str]]
"""Members of a set, and the same in the order of the names → the members in the order of the state dict."""


def in_order(names: Iterable[str], order: Json, where: str) -> list[str]:
    """Return names in the order of the state dict.

    Args:
        names: in any order.
        order: the field; [] for names that are sorted.
        where: what has the field, for error messages.

    Raises:
        ArtifactError: the field is no order of them.
    """
    if order == []:
        return sorted(names)
    if not is_order(order):
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

    ordered = arranged(names, cut, arrange)
    if waiting:
        raise ArtifactError(f"the order of tensors in {where} is of more than the file holds; the file is damaged")
    return ordered


def extra_in(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of extra states in the metadata of a file, which are keys of the state dict as tensors are."""
    return list(fields.get("state", {}).get("extra", {}))


def is_order(order: Json) -> bool:
    """Return whether a value looks like the field: marks, and lists of moves."""
    if not isinstance(order, list) or not order or type(order[0]) is not str or len(order[0]) > _LONGEST:
        return False
    return all(isinstance(moves, list) and all(type(move) is int for move in moves) for moves in order[1:])


def arranged(names: Iterable[str], cut: str, arrange: Arrange) -> list[str]:
    """Return names in order, every distinct set of two or more by `arrange`.

    A set comes before those below its members, and these come in the natural order of the members.
    """
    known: dict[tuple[str, ...], list[str]] = {}

    def walk(group: list[str], start: int, count: int) -> list[str]:
        """Return names that begin with the same `count` parts, of `start` characters."""
        shared = commonprefix([min(group), max(group)])  # noqa: RUF071 (of characters, as it is)
        while count < MOST_PARTS - 1 and (end := _cut(shared, cut, start)):
            start, count = end, count + 1
        inner: dict[str, list[str]] = {}
        for name in group:
            end = _cut(name, cut, start) if count < MOST_PARTS - 1 else 0
            inner.setdefault(name[start : end or None], []).append(name)
        members = sorted(inner, key=_natural)
        key = tuple(members)
        if key not in known:
            known[key] = arrange(members, inner)
        below = {
            member: walk(inner[member], start + len(member), count + 1) if len(inner[member]) > 1 else inner[member]
            for member in members
        }
        return [name for member in known[key] for name in below[member]]

    names = list(names)
    return walk(names, 0, 0) if len(names) > 1 else names


def _cut(name: str, cut: str, start: int) -> int:
    """Return where the part of a name ends that begins at `start`; 0 if it is the last."""
    return min((end for mark in cut if (end := name.find(mark, start) + 1)), default=0)


def _natural(part: str) -> tuple[tuple[str, int, str, int], ...]:
    """Return the key of the natural order: digits are compared as numbers, then by how many zeros lead them."""
    return tuple(
        (text, len(digits.lstrip("0")), digits.lstrip("0"), len(digits)) for text, digits in _PIECES.findall(part)
    )


def _moved(members: list[str], moves: list[int]) -> list[str]:
    left, at, order = [*members], 0, list[str]()
    for move in moves:
        at = (at + move) % len(left)
        order.append(left.pop(at))
    return [*order, *left[at:], *left[:at]]
