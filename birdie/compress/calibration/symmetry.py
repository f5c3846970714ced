"""Sorting of interchangeable units, which makes files smaller and does not change the function of the network.

    symmetry = (member, member, …)                 the slices of tensors that are permuted together
    member   = (name, axis, block)                 the complete axis of tensor `name`, in units of `block`
             | (name, axis, block, start, stop)    entries start … stop - 1 of it only

All members of a symmetry have the same number of units. The declaration states that the function of the network does
not change if the units of every member are permuted alike. Several independent permutations of one axis (the value
channels within each head) are several symmetries with separate ranges. Symmetries are plain tuples, so that a model can
declare them without importing this module: see `birdie.gpt.model.gpt.GPT.symmetries`.

Hidden units can be permuted: Hecht-Nielsen, "On the algebraic structure of feedforward network weight spaces" (1990);
such freedom can save bits: Kunze et al., "Entropy coding of unordered data structures" (2024). Here it saves bits by
making scales monotone: side information shrinks to a few bytes and the coder's contexts predict better. No permutation
is stored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.compress.state import without_ties
from birdie.errors import ConfigError

Floats = NDArray[np.float64]
Order = NDArray[np.int64]
Symmetry = tuple[tuple[Any, ...], ...]
Orders = Mapping[str, Mapping[int, Order]]  # name → axis → previous index of each entry; only axes that changed


@dataclass(frozen=True, slots=True)
class _Member:
    """Entries start … stop - 1 of one axis, counted from the front, of one tensor, in units of `block`."""

    name: str
    axis: int
    block: int
    start: int
    stop: int

    @property
    def units(self) -> int:
        return (self.stop - self.start) // self.block

    def squares(self, weight: Tensor) -> Floats:
        """Return the sum of squares of each unit."""
        part = weight.detach().narrow(self.axis, self.start, self.stop - self.start).movedim(self.axis, 0)
        return np.asarray(np.square(part.reshape(self.units, -1).to("cpu", torch.float64).numpy()).sum(1))

    def sums(self, values: Tensor, order: Order | None, size: int) -> Floats:
        """Return the sum over each unit of `values` of an axis of `size` entries, once these are in `order`.

        A convolution has a value for each weight of a kernel.
        """
        numbers = values.detach().to("cpu", torch.float64).numpy()
        if order is not None:
            numbers = numbers[_variables(order, len(numbers))]
        taps = len(numbers) // size
        return np.asarray(numbers[self.start * taps : self.stop * taps].reshape(self.units, -1).sum(1))

    def spread(self, unit_order: Order, size: int) -> Order:
        """Return the order of all `size` entries of the axis that puts the units in `unit_order`."""
        order = np.arange(size)
        inside = unit_order[:, None] * self.block + np.arange(self.block)
        order[self.start : self.stop] = self.start + inside.reshape(-1)
        return order


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


def sort_units(
    state: Mapping[str, Tensor],
    symmetries: Iterable[Symmetry],
    sensitivities: Mapping[str, Sensitivity],
) -> tuple[dict[str, Tensor], Orders]:
    """Return an equivalent state with sorted units, and its orders.

    The symmetries are applied one after the other. Tensors that no symmetry changes stay the same objects, and tied
    names stay tied.

    Args:
        state: name → tensor of any dtype; never changed.
        symmetries: of the module that the state belongs to.
        sensitivities: name → sensitivity of `state`, by which units are sorted; of those that it leaves out, norms.

    Raises:
        ConfigError: a symmetry does not fit the state, or would move a tensor that shares memory with another.
    """
    owners, ties = without_ties(state)
    aliases = _aliases(owners, ties)
    sorted_state, orders = dict(state), dict[str, dict[int, Order]]()
    for symmetry in symmetries:
        members = _members_of(symmetry, state)
        _require_consistent(members, aliases)
        unit_order = np.argsort(_sort_keys(members, sorted_state, sensitivities, orders), kind="stable")
        if not bool((unit_order != np.arange(unit_order.size)).any()):
            continue
        for member in members:
            weight = sorted_state[member.name]
            order, axes = member.spread(unit_order, weight.shape[member.axis]), orders.setdefault(member.name, {})
            axes[member.axis] = axes[member.axis][order] if member.axis in axes else order
            if member.name not in ties:
                index = torch.from_numpy(order).to(weight.device)
                sorted_state[member.name] = weight.detach().index_select(member.axis, index)
        for member in members:
            sorted_state[member.name] = sorted_state[ties.get(member.name, member.name)]
    return sorted_state, orders


def _sort_keys(
    members: list[_Member], state: Mapping[str, Tensor], sensitivities: Mapping[str, Sensitivity], orders: Orders
) -> Floats:
    """Return log2 of row Fisher · input power of each unit, (units,); of one if the other is unknown, else of norms.

    If scales follow the Fisher information, these are the factors of the producer's rows and of the consumer's columns,
    and sorting by these saves more bits than sorting by the norms of the weights: of the units' rows in matrices, or of
    all members if there are none. Units of zeros come first (-inf), NaN last.
    """
    fisher, power = list[Floats](), list[Floats]()
    for member in members:
        known = sensitivities.get(member.name) if member.axis < 2 else None
        values = None if known is None else known.input_power() if member.axis else known.row_fisher
        if values is not None:
            order, size = orders.get(member.name, {}).get(member.axis), state[member.name].shape[member.axis]
            (power if member.axis else fisher).append(member.sums(values, order, size))
    factors = [np.maximum(np.stack(part).sum(0), np.finfo(np.float64).tiny) for part in (fisher, power) if part]
    if factors:
        return np.asarray(np.log2(factors).sum(0))
    producers = [member for member in members if member.axis == 0 and state[member.name].ndim > 1]
    squares = np.zeros(members[0].units)
    for member in producers or members:
        squares += member.squares(state[member.name])
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(squares) / 2)


def permute_sensitivity(name: str, sensitivity: Sensitivity, orders: Orders) -> Sensitivity:
    """Return the sensitivity of tensor `name` after `sort_units` from the one before: it is not calibrated again."""
    rows, columns = (orders.get(name, {}).get(axis) for axis in (0, 1))
    if rows is not None:
        sensitivity = replace(
            sensitivity,
            row_fisher=_permuted(sensitivity.row_fisher, rows),
            output=_permuted(sensitivity.output, rows),
        )
    if columns is not None:
        blocks = sensitivity.blocks
        if blocks is not None:
            index = torch.from_numpy(np.argsort(_variables(columns, blocks.columns.numel())))
            blocks = BlockDiagonal(index.to(blocks.columns.device)[blocks.columns], blocks.blocks)
        sensitivity = replace(sensitivity, hessian=_permuted(sensitivity.hessian, columns), blocks=blocks)
    return sensitivity


def _permuted(moments: Tensor | None, order: Order) -> Tensor | None:
    """Return second moments, (n, n) or their diagonal (n,), of variables in another order."""
    if moments is None:
        return None
    index = torch.from_numpy(_variables(order, len(moments))).to(moments.device)
    return moments[index] if moments.ndim == 1 else moments[index][:, index]


def _variables(order: Order, count: int) -> Order:
    """Return the order of `count` variables: of a convolution an entry is a kernel, with a variable for each weight."""
    if count % order.size:
        raise ConfigError(f"a sensitivity of {count} variables is not one of {order.size} units; recalibrate")
    taps = count // order.size
    return (order[:, None] * taps + np.arange(taps)).reshape(-1)


def _members_of(symmetry: Symmetry, state: Mapping[str, Tensor]) -> list[_Member]:
    """Return the members of `symmetry`, checked against `state`."""
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


def _member(declaration: Any, state: Mapping[str, Tensor]) -> _Member:
    if (
        not isinstance(declaration, tuple | list)
        or len(declaration) not in (3, 5)
        or not isinstance(declaration[0], str)
    ):
        raise ConfigError(f"symmetry member {declaration!r} is not (name, axis, block[, start, stop]); rewrite it")
    name, *numbers = declaration
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"symmetry member {declaration!r} holds values that are not plain ints; give plain ints")
    if name not in state:
        raise ConfigError(f"a symmetry names tensor {name!r}, which the state lacks; check it against the state dict")
    shape = tuple(state[name].shape)
    axis, block = numbers[:2]
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"a symmetry names axis {axis} of {name!r}, whose shape is {shape}; choose one it has")
    start, stop = numbers[2:] or (0, shape[axis])
    if block < 1 or not 0 <= start < stop <= shape[axis] or (stop - start) % block:
        raise ConfigError(
            f"a symmetry cuts entries {start} to {stop} of {name!r} axis {axis} ({shape[axis]} entries) into blocks of "
            f"{block}; choose a range within the axis and a block that divides it"
        )
    return _Member(name, axis % len(shape), block, start, stop)


def _aliases(owners: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, set[str]]:
    """Return name → all names of the same tensor; an empty set if it overlaps the memory of another tensor."""
    twins = {name: {name} for name in owners}
    for name, target in ties.items():
        twins[target].add(name)
    memory, overlapping = dict[object, list[tuple[int, int, str]]](), set[str]()
    for name, weight in owners.items():
        if weight.numel():
            first = int(weight.storage_offset()) * weight.itemsize
            reach = sum(
                (int(size) - 1) * int(stride) for size, stride in zip(weight.shape, weight.stride(), strict=True)
            )
            storage = (weight.device, weight.untyped_storage().data_ptr())
            memory.setdefault(storage, []).append((first, first + (reach + 1) * weight.itemsize, name))
    for spans in memory.values():
        last, owner = -1, ""
        for first, end, name in sorted(spans):
            if first < last:
                overlapping |= {name, owner}
            if end > last:
                last, owner = end, name
    every = {**{name: name for name in owners}, **ties}
    return {name: set() if owner in overlapping else twins[owner] for name, owner in every.items()}


def _require_consistent(members: list[_Member], aliases: Mapping[str, set[str]]) -> None:
    """Raise ConfigError if a symmetry moves a tensor under only one of its names, or memory that tensors share."""
    moves: dict[str, set[_Member]] = {}
    for member in members:
        moves.setdefault(member.name, set()).add(replace(member, name=""))
    for name, members_of_name in moves.items():
        if not aliases[name]:
            raise ConfigError(f"tensor {name!r} shares part of its memory with another; clone it, or drop the symmetry")
        for twin in aliases[name]:
            if moves.get(twin) != members_of_name:
                raise ConfigError(
                    f"tensor {name!r} is tied to {twin!r}, which the symmetry does not move likewise; "
                    "name both, or drop the symmetry"
                )
