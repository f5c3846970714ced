"""Units of a network that can be permuted together, their sort keys and their scales.

    symmetry = (member, member, …)                          the slices of tensors that are permuted together
    member   = (name, axis, block)                          the complete axis of tensor `name`, in units of `block`
             | (name, axis, block, start, stop)             entries start … stop - 1 of it only
             | (name, axis, block, start, stop, power)      multiplied by a^power when the unit is multiplied by a

All members of a symmetry have the same number of units. The declaration states that the function of the network does
not change if the units of every member are permuted alike, nor if unit i of every member is multiplied by a_i^power,
for any a_i > 0. Without powers it is about order alone. Several independent permutations of one axis (the value
channels within each head) are several symmetries with separate ranges. Symmetries are plain tuples, so that a model can
declare them without importing this module: see `birdie.model.gpt.GPT.symmetries`.

`norms` and `fisher` are sort keys, `level_rows` and `level_columns` are scales for
`birdie.compress.calibration.symmetry.canonical`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError

Floats = NDArray[np.float64]
Order = NDArray[np.int64]
Symmetry = tuple[tuple[Any, ...], ...]
UnitValues = Callable[[Symmetry, Mapping[str, Tensor], Mapping[str, Sensitivity]], Floats | None]


@dataclass(frozen=True, slots=True)
class Member:
    """Entries start … stop - 1 of one axis of one tensor, in units of `block`; `power` as in the module's docstring."""

    name: str
    axis: int
    block: int
    start: int
    stop: int
    power: float = 0.0

    @property
    def units(self) -> int:
        """Return the number of units."""
        return (self.stop - self.start) // self.block

    def matrix(self, weight: Tensor) -> Floats:
        """Return the numbers of each unit as a row: (units, block · size of the other axes), float64."""
        part = weight.detach().narrow(self.axis, self.start, self.stop - self.start).movedim(self.axis, 0)
        rows: Floats = part.reshape(self.units, -1).to("cpu", torch.float64).numpy()
        return rows

    def spread(self, unit_order: Order, size: int) -> Order:
        """Return the order of all `size` entries of the axis that puts the units in `unit_order`."""
        order = np.arange(size)
        inside = unit_order[:, None] * self.block + np.arange(self.block)
        order[self.start : self.stop] = self.start + inside.reshape(-1)
        return order

    def factors(self, unit_scale: Floats, size: int) -> Floats:
        """Return the factors of all `size` entries of the axis if unit i is multiplied by unit_scale[i]."""
        factors = np.ones(size)
        factors[self.start : self.stop] = np.repeat(unit_scale**self.power, self.block)
        return factors


def symmetries_of(module: nn.Module) -> tuple[Symmetry, ...]:
    """Return the symmetries that a module, or its parts under their names, declare by a method `symmetries()`."""
    declared: dict[str, tuple[Symmetry, ...]] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in declared)
        if not inside and callable(getattr(part, "symmetries", None)):
            declared[name] = tuple(part.symmetries())
    return tuple(
        tuple((f"{name}.{member[0]}" if name else member[0], *member[1:]) for member in symmetry)
        for name, symmetries in declared.items()
        for symmetry in symmetries
    )


def members_of(symmetry: Symmetry, state: Mapping[str, Tensor]) -> list[Member]:
    """Return the members of `symmetry`, checked against `state`, with axes counted from the front."""
    if not isinstance(symmetry, tuple | list) or not symmetry:  # models declare symmetries without this module's types
        raise ConfigError(f"symmetry {symmetry!r} is no tuple of members; write ((name, axis, block), …)")
    members = [_member(member, state) for member in symmetry]
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


def _member(declaration: Any, state: Mapping[str, Tensor]) -> Member:
    if (
        not isinstance(declaration, tuple | list)
        or len(declaration) not in (3, 5, 6)
        or not isinstance(declaration[0], str)
    ):
        raise ConfigError(
            f"symmetry member {declaration!r} is not (name, axis, block[, start, stop[, power]]); rewrite it"
        )
    name, *numbers = declaration
    integers = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers[:4])
    power = numbers[4] if len(numbers) == 5 else 0.0
    if not integers or not isinstance(power, int | float) or not math.isfinite(power):
        raise ConfigError(f"symmetry member {declaration!r} holds values that are not plain ints; give plain ints")
    if name not in state:
        raise ConfigError(f"a symmetry names tensor {name!r}, which the state lacks; check it against the state dict")
    shape = tuple(state[name].shape)
    axis, block = numbers[:2]
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"a symmetry names axis {axis} of {name!r}, whose shape is {shape}; choose one it has")
    start, stop = numbers[2:4] if len(numbers) > 2 else (0, shape[axis])
    if block < 1 or not 0 <= start < stop <= shape[axis] or (stop - start) % block:
        raise ConfigError(
            f"a symmetry cuts entries {start} to {stop} of {name!r} axis {axis} ({shape[axis]} entries) into blocks of "
            f"{block}; choose a range within the axis and a block that divides it"
        )
    return Member(name, axis % len(shape), block, start, stop, float(power))


def norms(symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]) -> Floats:  # noqa: ARG001
    """Return log2 of the norm of each unit's producers, (units,): its rows in matrices with the symmetry on axis 0.

    If there are no such matrices, all members count. Units of zeros come first (-inf), NaN last.
    """
    members = members_of(symmetry, state)
    producers = [member for member in members if member.axis == 0 and state[member.name].ndim > 1]
    squares = np.zeros(members[0].units)
    for member in producers or members:
        squares += np.square(member.matrix(state[member.name])).sum(1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(squares) / 2)


def fisher(symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]) -> Floats:
    """Return log2 of row Fisher · input power of each unit, (units,); of one if the other is unknown, else `norms`.

    If scales follow the Fisher information, these are the factors of the producer's rows and of the consumer's columns,
    and sorting by these saves more bits than sorting by the norms of the weights.
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
    """Return scales, (units,), that give every unit the same row Fisher at its producer; None if that is unknown.

    The producer's row factors then become one number and cost nothing; the consumer's column factors hold all the
    information. Dead units keep their scale. Apply a floor to the sensitivities before this, not after: the column
    factors spread wider, and a floor would then raise columns that are small for good reason.
    """
    members = members_of(symmetry, state)
    power = max(member.power for member in members)
    if power <= 0:
        return None
    return _leveled(_row_fisher([member for member in members if member.power == power], sensitivities), 2 * power)


def level_columns(
    symmetry: Symmetry, state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]
) -> Floats | None:
    """Return scales, (units,), that give every unit the same mean square at its consumer; None if that is unknown.

    It is `level_rows` with the sides exchanged, and spreads the factors of squared ReLUs half as far.
    """
    members = members_of(symmetry, state)
    power = min(member.power for member in members)
    if power >= 0:
        return None
    return _leveled(_power([member for member in members if member.power == power], state, sensitivities), 2 * power)


def _leveled(squares: Floats | None, power: float) -> Floats | None:
    """Return a for each unit such that squares / a^power are all equal, with a geometric mean of 1."""
    if squares is None:
        return None
    alive = squares > np.finfo(np.float64).tiny
    logs = np.log(squares)
    return np.asarray(np.exp(np.where(alive, logs - logs[alive].mean(), 0) / power)) if alive.any() else None


def _row_fisher(members: list[Member], sensitivities: Mapping[str, Sensitivity]) -> Floats | None:
    """Return the row Fisher of each unit, summed over its producers; None if no sensitivity has it."""
    parts = []
    for member in members:
        known = sensitivities[member.name].row_fisher if member.axis == 0 and member.name in sensitivities else None
        if known is not None:
            parts.append(_summed(known, member, 1))
    return _total(parts)


def _power(
    members: list[Member], state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity]
) -> Floats | None:
    """Return the mean square of each unit as an input, summed over its consumers; None if no sensitivity has it."""
    parts = []
    for member in members:
        known = sensitivities[member.name].input_power() if member.axis == 1 and member.name in sensitivities else None
        if known is not None:  # a convolution has a variable for each weight of a kernel
            parts.append(_summed(known, member, len(known) // state[member.name].shape[1]))
    return _total(parts)


def _summed(values: Tensor, member: Member, size: int) -> Floats:
    part = values.detach().to("cpu", torch.float64).numpy()[member.start * size : member.stop * size]
    return np.asarray(part.reshape(member.units, -1).sum(1))


def _total(parts: list[Floats]) -> Floats | None:
    if not parts:
        return None
    total: Floats = np.stack(parts).sum(0)
    return np.asarray(np.maximum(total, np.finfo(np.float64).tiny))  # the caller takes the logarithm
