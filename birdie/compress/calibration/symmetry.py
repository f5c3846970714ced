"""Sorting of interchangeable units, which makes files smaller and does not change the function of the network.

    state, symmetries ─► scale every unit ─► sort the units by a key ─► state, report
                          (on request)        (units.norms, units.fisher, or yours)

`symmetry_units` describes how symmetries are declared. Hidden units can be permuted: Hecht-Nielsen, "On the algebraic
structure of feedforward network weight spaces" (1990); such freedom can save bits: Kunze et al., "Entropy coding of
unordered data structures" (2024). Here it saves bits by making scales monotone: side information shrinks to a few bytes
and the coder's contexts predict better. No permutation is stored.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from birdie.compress.calibration.symmetry_units import (
    Floats,
    Member,
    Order,
    Symmetry,
    UnitValues,
    fisher,
    members_of,
    norms,
)
from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.compress.state import without_ties
from birdie.errors import ConfigError, WeightsError

SCALABLE = (torch.float32, torch.float64)  # dtypes in which the rounding error of a multiplication does not matter


@dataclass(frozen=True, slots=True)
class SortedUnits:
    """Result of sorting the units of one symmetry.

    Attributes:
        symmetry: the argument.
        units: number of units.
        moved: number of units whose index changed.
        scaled: whether the units were multiplied.
    """

    symmetry: Symmetry
    units: int
    moved: int
    scaled: bool

    @property
    def bits(self) -> float:
        """Bits of the freedom of order: log2(units!)."""
        return math.lgamma(self.units + 1) / math.log(2)


@dataclass(frozen=True, slots=True)
class Report:
    """Permutations and scales that `canonical` applied.

    Attributes:
        groups: one for each symmetry.
        orders: name → axis → previous index of each entry of the axis; only axes that changed.
        scales: name → axis → factor of each entry, in the new order; only axes that changed.
    """

    groups: tuple[SortedUnits, ...]
    orders: dict[str, dict[int, Order]] = field(default_factory=dict)
    scales: dict[str, dict[int, Floats]] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Return log2 of the number of equivalent models."""
        return sum(group.bits for group in self.groups)

    def sorted_axes(self, name: str) -> tuple[int, ...]:
        """Return the axes of tensor `name` whose entries were reordered: 0 for rows, 1 for columns."""
        return tuple(sorted(self.orders.get(name, ())))


def canonical(
    state: Mapping[str, Tensor],
    symmetries: Iterable[Symmetry],
    *,
    key: UnitValues | None = None,
    scale: UnitValues | None = None,
    sensitivities: Mapping[str, Sensitivity] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """Return an equivalent state with units in ascending order of `key`, and a report of the changes.

    The symmetries are applied one after the other. `scale` gets state and sensitivities after all earlier symmetries,
    `key` gets them after `scale`. Tensors that no symmetry changes stay the same objects, and tied names stay tied.

    Args:
        state: name → tensor of any dtype; never changed.
        symmetries: those of `GPT.symmetries()`, or your own (`symmetry_units`).
        key: (symmetry, state, sensitivities) → sort key of its units, (units,); None keeps their order. Default:
            `units.fisher` with sensitivities, else `units.norms`.
        scale: (symmetry, state, sensitivities) → factors of its units, (units,), all positive; None leaves them. By
            default nothing is multiplied. A symmetry without powers is never scaled, nor one with a tensor that is
            neither float32 nor float64: products are rounded to the dtype, whereas permutations keep every bit.
        sensitivities: name → sensitivity of `state`, for `key` and `scale`.

    Raises:
        ConfigError: a symmetry does not fit the state, or would move a tensor that shares memory with another.
        WeightsError: a product is beyond the range of the dtype.
    """
    aliases = _aliases(state)
    progress = _Progress(dict(state), sensitivities or {}, aliases)
    if key is None:
        key = fisher if sensitivities else norms
    groups = []
    for symmetry in symmetries:
        members = members_of(symmetry, state)
        _require_consistent(members, aliases)
        units = members[0].units
        times = None if scale is None else _unit_scale(members, state, progress.unit_values(scale, symmetry))
        if times is not None:
            progress.multiply(members, times)
        order = _unit_order(members, progress.unit_values(key, symmetry))
        moved = int((order != np.arange(units)).sum())
        if moved:
            progress.reorder(members, order)
        groups.append(SortedUnits(symmetry, units, moved, times is not None))
    orders = {
        name: kept for name, axes in progress.orders.items() if (kept := {a: o for a, o in axes.items() if _moves(o)})
    }
    return progress.state, Report(tuple(groups), orders, progress.scales)


class _Progress:
    """State while symmetries are applied, with the permutations and scales applied so far."""

    def __init__(
        self,
        state: dict[str, Tensor],
        sensitivities: Mapping[str, Sensitivity],
        aliases: Mapping[str, frozenset[str]],
    ) -> None:
        self.state, self.sensitivities, self.aliases = state, sensitivities, aliases
        self.orders: dict[str, dict[int, Order]] = {}
        self.scales: dict[str, dict[int, Floats]] = {}

    def unit_values(self, values: UnitValues, symmetry: Symmetry) -> Floats | None:
        """Return `values` of the units in the current state, with sensitivities to match."""
        so_far = Report((), self.orders, self.scales)
        names = {str(member[0]) for member in symmetry} & self.sensitivities.keys()
        sensitivities = {name: carried(name, self.sensitivities[name], so_far) for name in names}
        return values(symmetry, self.state, sensitivities)

    def multiply(self, members: list[Member], unit_scale: Floats) -> None:
        """Scale every unit of every member."""
        members = [member for member in members if member.power]
        for member in members:
            size = self.state[member.name].shape[member.axis]
            scales = self.scales.setdefault(member.name, {})
            scales[member.axis] = scales.get(member.axis, np.ones(size)) * member.factors(unit_scale, size)
        self._replace(
            members,
            lambda member, weight: _scaled(
                member.name, weight, member.axis, member.factors(unit_scale, weight.shape[member.axis])
            ),
        )

    def reorder(self, members: list[Member], unit_order: Order) -> None:
        """Permute the units of every member."""
        for member in members:
            size = self.state[member.name].shape[member.axis]
            order, orders = member.spread(unit_order, size), self.orders.setdefault(member.name, {})
            orders[member.axis] = orders.get(member.axis, np.arange(size))[order]
            if member.axis in (scales := self.scales.get(member.name, {})):
                scales[member.axis] = scales[member.axis][order]
        self._replace(
            members,
            lambda member, weight: _permuted(weight, member.axis, member.spread(unit_order, weight.shape[member.axis])),
        )

    def _replace(self, members: list[Member], change: Callable[[Member, Tensor], Tensor]) -> None:
        for name in {member.name: None for member in members}:
            twins = self.aliases[name]
            if name != min(twins):
                continue
            weight = self.state[name]
            for member in members:
                if member.name == name:
                    weight = change(member, weight)
            self.state.update(dict.fromkeys(twins, weight))


def restore(state: Mapping[str, Tensor], report: Report) -> dict[str, Tensor]:
    """Return the state before `canonical`: every entry divided by its scale and moved back to its index."""
    owners, ties = without_ties(state)
    new = dict(owners)
    for name in owners:
        for axis, scales in report.scales.get(name, {}).items():
            new[name] = _scaled(name, new[name], axis, 1 / scales)
        for axis, order in report.orders.get(name, {}).items():
            new[name] = _permuted(new[name], axis, np.argsort(order))
    return {name: new[ties.get(name, name)] for name in state}


def carried(name: str, sensitivity: Sensitivity, report: Report) -> Sensitivity:
    """Return the sensitivity of tensor `name` after `canonical` from the one before: no second calibration is needed.

    If columns of a weight are multiplied by s, its inputs are divided by s; if rows are, its output gradients are.
    """
    orders, scales = report.orders.get(name, {}), report.scales.get(name, {})
    rows, columns = (orders.get(0), scales.get(0)), (orders.get(1), scales.get(1))
    return replace(
        sensitivity,
        hessian=_moved(sensitivity.hessian, *columns),
        blocks=_moved_blocks(sensitivity.blocks, *columns),
        row_fisher=_moved(sensitivity.row_fisher, *rows),
        output=_moved(sensitivity.output, *rows),
    )


def _moved(moments: Tensor | None, order: Order | None, scales: Floats | None) -> Tensor | None:
    """Return second moments, (n, n) or their diagonal (n,), of variables that are permuted and divided by `scales`.

    For convolutions an entry is a kernel, with as many variables as the kernel has weights.
    """
    if moments is None:
        return None
    for values in (order, scales):
        if values is not None and len(moments) % values.size:
            raise ConfigError(
                f"a sensitivity of {len(moments)} variables is not one of {values.size} units; recalibrate"
            )
    if order is not None:
        size = len(moments) // order.size
        index = torch.from_numpy((order[:, None] * size + np.arange(size)).reshape(-1)).to(moments.device)
        moments = moments[index] if moments.ndim == 1 else moments[index][:, index]
    if scales is not None:
        over = torch.from_numpy(np.repeat(scales, len(moments) // scales.size)).to(moments)
        moments = moments / over**2 if moments.ndim == 1 else moments / over[:, None] / over
    return moments


def _moved_blocks(moments: BlockDiagonal | None, order: Order | None, scales: Floats | None) -> BlockDiagonal | None:
    """Return second moments in blocks of variables that are permuted and divided by `scales`, as in `_moved`."""
    if moments is None:
        return None
    count = moments.columns.numel()
    columns, blocks = moments.columns, moments.blocks
    if order is not None:
        size = count // order.size
        source = (order[:, None] * size + np.arange(size)).reshape(-1)
        columns = torch.from_numpy(np.argsort(source)).to(columns.device)[columns]
    if scales is not None:
        over = torch.from_numpy(np.repeat(scales, count // scales.size)).to(blocks)[columns]
        blocks = blocks / over[:, :, None] / over[:, None]
    return BlockDiagonal(columns, blocks)


def _aliases(state: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return name → all names of the same tensor; an empty set if it overlaps the memory of another tensor."""
    owners, ties = without_ties(state)
    twins: dict[str, set[str]] = {name: {name} for name in owners}
    for name, target in ties.items():
        twins[target].add(name)
    aliases = {name: frozenset(twins[ties.get(name, name)]) for name in state}
    memory: dict[object, list[tuple[int, int, str]]] = {}
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
                for shared in (name, owner):
                    aliases.update(dict.fromkeys(twins[shared], frozenset[str]()))
            if end > last:
                last, owner = end, name
    return aliases


def _require_consistent(members: list[Member], aliases: Mapping[str, frozenset[str]]) -> None:
    """Raise ConfigError if a symmetry moves a tensor under only one of its names, or memory that tensors share."""
    moves: dict[str, set[Member]] = {}
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


def _unit_order(members: list[Member], keys: Floats | None) -> Order:
    units = members[0].units
    if keys is None:
        return np.arange(units)
    values = np.asarray(keys, np.float64)
    if values.shape != (units,):
        raise ConfigError(
            f"the key gave shape {values.shape} for {units} units of {members[0].name!r}; return one number per unit"
        )
    return np.argsort(values, kind="stable")


def _unit_scale(members: list[Member], state: Mapping[str, Tensor], scales: Floats | None) -> Floats | None:
    powers = [member for member in members if member.power]
    if scales is None or not powers or any(state[member.name].dtype not in SCALABLE for member in powers):
        return None
    values = np.asarray(scales, np.float64)
    if values.shape != (members[0].units,) or not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"a unit of {members[0].name!r} has no positive scale; return one positive number per unit")
    return None if (values == 1).all() else values


def _permuted(weight: Tensor, axis: int, order: Order) -> Tensor:
    return weight.detach().index_select(axis, torch.from_numpy(order).to(weight.device))


def _scaled(name: str, weight: Tensor, axis: int, factors: Floats) -> Tensor:
    shape = [-1 if at == axis else 1 for at in range(weight.ndim)]
    wide = weight.detach().double()
    product = (wide * torch.from_numpy(factors).to(weight.device).reshape(shape)).to(weight.dtype)
    if bool((torch.isfinite(wide) & ~torch.isfinite(product)).any()):
        raise WeightsError(
            f"tensor {name!r} times the scales of its units is beyond {weight.dtype}; use smaller scales"
        )
    return product


def _moves(order: Order) -> bool:
    return bool((order != np.arange(order.size)).any())
