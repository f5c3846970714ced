"""Units: what of a network can change places together, and what a unit weighs.

    symmetry = (member, member, …)                          what moves together
    member   = (name, axis, block)                          the whole axis of tensor `name`, cut into units of `block`
             | (name, axis, block, start, stop)             entries start … stop - 1 of it only
             | (name, axis, block, start, stop, power)      which times a^power, when the unit is multiplied by a

All members of a symmetry have the same number of units. The declaration says that the function stays what it is when
the units of every member are reordered alike, and when unit i of every member is multiplied by a_i^power, for any
a_i > 0. Without powers it is about order alone. Several independent permutations of one axis (the value channels within
each head) are several symmetries with ranges of their own. These are plain tuples, so that a model can declare its
symmetries without knowing this module: see `birdie.model.gpt.GPT.symmetries`.

`norms`, `fisher`, `level_rows` and `level_columns` say how large the units are and how large they may be made: the keys
and scales of `birdie.compress.calibration.symmetry.canonical`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError

Floats = NDArray[np.float64]
Order = NDArray[np.int64]
Symmetry = tuple[tuple[Any, ...], ...]
UnitValues = Callable[[Symmetry, Mapping[str, Tensor], Mapping[str, Sensitivity]], Floats | None]


@dataclass(frozen=True, slots=True)
class Member:
    """Entries start … stop - 1 of one axis of one tensor, as units of `block`; `power` as the module says."""

    name: str
    axis: int
    block: int
    start: int
    stop: int
    power: float = 0.0

    @property
    def units(self) -> int:
        """How many units there are."""
        return (self.stop - self.start) // self.block

    def matrix(self, weight: Tensor) -> Floats:
        """The numbers of each unit as a row: (units, block · everything but the axis), float64."""
        part = weight.detach().narrow(self.axis, self.start, self.stop - self.start).movedim(self.axis, 0)
        rows: Floats = part.reshape(self.units, -1).to("cpu", torch.float64).numpy()
        return rows

    def spread(self, unit_order: Order, size: int) -> Order:
        """The order of all `size` entries of the axis that puts the units in `unit_order`."""
        order = np.arange(size)
        inside = unit_order[:, None] * self.block + np.arange(self.block)
        order[self.start : self.stop] = self.start + inside.reshape(-1)
        return order

    def factors(self, unit_scale: Floats, size: int) -> Floats:
        """What each of `size` entries of the axis is multiplied by when unit i is by unit_scale[i]."""
        factors = np.ones(size)
        factors[self.start : self.stop] = np.repeat(unit_scale**self.power, self.block)
        return factors


def members_of(symmetry: Symmetry, state: Mapping[str, Tensor]) -> list[Member]:
    """`symmetry` checked against `state`, axes counted from the front.

    Raises:
        ConfigError: a member is malformed, names no tensor or entries that are not there, has another number of units
            than the first, or moves what another moves.
    """
    if not isinstance(symmetry, tuple | list) or not symmetry:  # whoever declares it may not know the type
        raise ConfigError(f"symmetry {symmetry!r} is no tuple of members; write ((name, axis, block), …)")
    members = [_member(each, state) for each in symmetry]
    first = members[0]
    for index, member in enumerate(members):
        if member.units != first.units:
            raise ConfigError(
                f"a symmetry moves {first.units} units of {first.name!r} but {member.units} of {member.name!r}; "
                "correct a block or a range"
            )
        for other in members[:index]:
            same = (other.name, other.axis) == (member.name, member.axis)
            if same and other.start < member.stop and member.start < other.stop:
                raise ConfigError(f"a symmetry moves entries of {member.name!r} axis {member.axis} twice; drop one")
    return members


def _member(each: Any, state: Mapping[str, Tensor]) -> Member:
    if not isinstance(each, tuple | list) or len(each) not in (3, 5, 6) or not isinstance(each[0], str):
        raise ConfigError(f"symmetry member {each!r} is not (name, axis, block[, start, stop[, power]]); rewrite it")
    name, *numbers = each
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers[:4])
    power = numbers[4] if len(numbers) == 5 else 0.0
    if not whole or not isinstance(power, int | float) or not math.isfinite(power):
        raise ConfigError(f"symmetry member {each!r} holds what is not a number of entries; give plain ints")
    if name not in state:
        raise ConfigError(f"a symmetry names tensor {name!r}, which is not there; check it against the state dict")
    shape = tuple(state[name].shape)
    axis, block = numbers[:2]
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"a symmetry names axis {axis} of {name!r}, whose shape is {shape}; choose one it has")
    start, stop = numbers[2:4] if len(numbers) > 2 else (0, shape[axis])
    if block < 1 or not 0 <= start < stop <= shape[axis] or (stop - start) % block:
        raise ConfigError(
            f"a symmetry cuts entries {start} to {stop} of {name!r} axis {axis} ({shape[axis]} entries) into blocks of "
            f"{block}; choose a range that is there and a block that divides it"
        )
    return Member(name, axis % len(shape), block, start, stop, float(power))


def norms(symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]) -> Floats:  # noqa: ARG001
    """log2 of the norm of what produces each unit, (units,): its rows of all matrices the symmetry cuts along axis 0.

    Where there are none, all members count. Units of zeros come first (-inf), NaN last.
    """
    members = members_of(symmetry, state)
    producers = [member for member in members if member.axis == 0 and state[member.name].ndim > 1]
    squares = np.zeros(members[0].units)
    for member in producers or members:
        squares += np.square(member.matrix(state[member.name])).sum(1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(squares) / 2)


def fisher(symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]) -> Floats:
    """log2 of row Fisher times input power of each unit, (units,); of one where the other is unknown, else `norms`.

    Where steps follow the Fisher information these are the factors of the producer's rows and the consumer's columns,
    and to have those in order saves more than to have the weights so.
    """
    members = members_of(symmetry, state)
    known = [
        values
        for values in (_row_fisher(members, sensitivities), _power(members, state, sensitivities))
        if values is not None
    ]
    if not known:
        return norms(symmetry, state, sensitivities)
    return np.asarray(np.log2(known).sum(0))


def level_rows(
    symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]
) -> Floats | None:
    """Scales, (units,), that give every unit the same row Fisher at its producer; None where that is unknown.

    The producer's row factors are then one number and cost nothing; the consumer's column factors say all there is to
    say. Of dead units nothing follows: they keep their scale. Floor the sensitivities before, if at all: levelled
    ones spread wider on the other side, and a floor there would hold up what it should not.
    """
    members = members_of(symmetry, state)
    power = max(member.power for member in members)
    if power <= 0:
        return None
    return _leveled(_row_fisher([member for member in members if member.power == power], sensitivities), 2 * power)


def level_columns(
    symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]
) -> Floats | None:
    """Scales, (units,), that give every unit the same mean square at its consumer; None where that is unknown.

    As `level_rows` with the sides changed. It spreads the factors of squared ReLUs half as far.
    """
    members = members_of(symmetry, state)
    power = min(member.power for member in members)
    if power >= 0:
        return None
    return _leveled(_power([member for member in members if member.power == power], state, sensitivities), 2 * power)


def _leveled(squares: Floats | None, power: float) -> Floats | None:
    """a for each unit such that squares / a^power are all alike, with a geometric mean of 1."""
    if squares is None:
        return None
    alive = squares > np.finfo(np.float64).tiny
    logs = np.log(squares)
    return np.asarray(np.exp(np.where(alive, logs - logs[alive].mean(), 0) / power)) if alive.any() else None


def _row_fisher(members: list[Member], sensitivities: Mapping[str, Sensitivity]) -> Floats | None:
    """Row Fisher of each unit, summed over what produces it; None if nothing is known of that."""
    found = []
    for member in members:
        known = sensitivities[member.name].row_fisher if member.axis == 0 and member.name in sensitivities else None
        if known is not None:
            found.append(_summed(known, member, 1))
    return _total(found)


def _power(
    members: list[Member], state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]
) -> Floats | None:
    """Mean square of each unit as an input, summed over what consumes it; None if nothing is known of that."""
    found = []
    for member in members:
        known = sensitivities[member.name].hessian if member.axis == 1 and member.name in sensitivities else None
        if known is not None:  # of a convolution, it has a variable for each weight of a kernel
            found.append(_summed(known.diagonal(), member, len(known) // state[member.name].shape[1]))
    return _total(found)


def _summed(values: Tensor, member: Member, size: int) -> Floats:
    part = values.detach().to("cpu", torch.float64).numpy()[member.start * size : member.stop * size]
    return np.asarray(part.reshape(member.units, -1).sum(1))


def _total(found: list[Floats]) -> Floats | None:
    if not found:
        return None
    total: Floats = np.stack(found).sum(0)
    return np.asarray(np.maximum(total, np.finfo(np.float64).tiny))  # they are about to have a logarithm
