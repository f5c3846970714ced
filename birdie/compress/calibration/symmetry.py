"""Units of a network in the order that makes the file smaller; the function stays what it was.

    state, symmetries ─► scale every unit ─► sort the units by a key ─► state, report
                          (on request)        (units.norms, units.fisher, or yours)

What symmetries look like, `symmetry_units` says. That hidden units commute is as old as Hecht-Nielsen, "On the
algebraic structure of feedforward network weight spaces" (1990); that such freedom can pay for bits, Kunze et al.,
"Entropy coding of unordered data structures" (2024). Here it pays by making scales monotone: side information
shrinks to a few bytes and the coder's contexts fit better; no permutation is ever stored.
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
from birdie.compress.scheme import Sensitivity
from birdie.compress.state import without_ties
from birdie.errors import ConfigError, WeightsError

SCALABLE = (torch.float32, torch.float64)  # dtypes whose rounding a multiplication may spend


@dataclass(frozen=True, slots=True)
class Sorted:
    """What became of one symmetry.

    Attributes:
        symmetry: as it was given.
        units: how many there are.
        moved: how many of them are elsewhere now.
        scaled: whether they were multiplied.
    """

    symmetry: Symmetry
    units: int
    moved: int
    scaled: bool

    @property
    def bits(self) -> float:
        """Freedom the order had: log2(units!)."""
        return math.lgamma(self.units + 1) / math.log(2)


@dataclass(frozen=True, slots=True)
class Report:
    """What `canonical` did.

    Attributes:
        groups: one for each symmetry.
        orders: name → axis → where each entry of the axis came from; only what changed places.
        scales: name → axis → what each entry, where it is now, was multiplied by; only what changed value.
    """

    groups: tuple[Sorted, ...]
    orders: dict[str, dict[int, Order]] = field(default_factory=dict)
    scales: dict[str, dict[int, Floats]] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """log2 of the number of models that are all this one."""
        return sum(group.bits for group in self.groups)

    def sorted_axes(self, name: str) -> tuple[int, ...]:
        """The axes of tensor `name` whose entries were reordered: 0 for rows, 1 for columns."""
        return tuple(sorted(self.orders.get(name, ())))


def canonical(
    state: Mapping[str, Tensor],
    symmetries: Iterable[Symmetry],
    *,
    key: UnitValues | None = None,
    scale: UnitValues | None = None,
    sensitivities: Mapping[str, Sensitivity] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """The same function with its units in ascending order of `key`.

    The symmetries are applied one after the other. `scale` sees state and sensitivities as the symmetries before left
    them, `key` as `scale` left them. What no symmetry changes stays the very tensor it was, and names that share a
    tensor go on sharing one.

    Args:
        state: name → tensor of any dtype; never changed.
        symmetries: as the module says; those of `GPT.symmetries()`, of `find_symmetries`, or your own.
        key: (symmetry, state, sensitivities) → what to sort its units by, (units,); None leaves their order. Default:
            `units.fisher` where sensitivities are given, else `units.norms`.
        scale: (symmetry, state, sensitivities) → what to multiply its units by, (units,), all positive; None leaves
            them. By default nothing is multiplied. Nor is anything in a symmetry without powers, or with a tensor that
            is neither float32 nor float64: products are rounded to the dtype, where permutations keep every bit.
        sensitivities: name → what calibration found for `state`, for `key` and `scale`.

    Raises:
        ConfigError: a symmetry does not fit the state, or would move a tensor whose memory others use differently.
        WeightsError: a product is beyond the dtype.
    """
    aliases = _aliases(state)
    progress = _Progress(dict(state), sensitivities or {}, aliases)
    if key is None:
        key = fisher if sensitivities else norms
    groups = []
    for symmetry in symmetries:
        members = members_of(symmetry, state)
        _require_whole(members, aliases)
        units = members[0].units
        times = None if scale is None else _unit_scale(members, state, progress.asked(scale, symmetry))
        if times is not None:
            progress.multiply(members, times)
        order = _unit_order(members, progress.asked(key, symmetry))
        moved = int((order != np.arange(units)).sum())
        if moved:
            progress.reorder(members, order)
        groups.append(Sorted(symmetry, units, moved, times is not None))
    orders = {
        name: kept for name, axes in progress.orders.items() if (kept := {a: o for a, o in axes.items() if _moves(o)})
    }
    return progress.state, Report(tuple(groups), orders, progress.scales)


class _Progress:
    """A state on its way: what it is by now, and how it came from the one that was given."""

    def __init__(
        self,
        state: dict[str, Tensor],
        sensitivities: Mapping[str, Sensitivity],
        aliases: Mapping[str, frozenset[str]],
    ) -> None:
        self.state, self.sensitivities, self.aliases = state, sensitivities, aliases
        self.orders: dict[str, dict[int, Order]] = {}
        self.scales: dict[str, dict[int, Floats]] = {}

    def asked(self, values: UnitValues, symmetry: Symmetry) -> Floats | None:
        """What `values` says about the units as they are by now."""
        so_far = Report((), self.orders, self.scales)
        names = {str(each[0]) for each in symmetry} & self.sensitivities.keys()
        known = {name: carried(name, self.sensitivities[name], so_far) for name in names}
        return values(symmetry, self.state, known)

    def multiply(self, members: list[Member], unit_scale: Floats) -> None:
        """Scale every unit of every member."""
        members = [member for member in members if member.power]
        for member in members:
            size = self.state[member.name].shape[member.axis]
            scales = self.scales.setdefault(member.name, {})
            scales[member.axis] = scales.get(member.axis, np.ones(size)) * member.factors(unit_scale, size)
        self._replace(
            members,
            lambda member, weight: _times(
                member.name, weight, member.axis, member.factors(unit_scale, weight.shape[member.axis])
            ),
        )

    def reorder(self, members: list[Member], unit_order: Order) -> None:
        """Put the units of every member in another order."""
        for member in members:
            size = self.state[member.name].shape[member.axis]
            order, orders = member.spread(unit_order, size), self.orders.setdefault(member.name, {})
            orders[member.axis] = orders.get(member.axis, np.arange(size))[order]
            if member.axis in (scales := self.scales.get(member.name, {})):
                scales[member.axis] = scales[member.axis][order]
        self._replace(
            members,
            lambda member, weight: _taken(weight, member.axis, member.spread(unit_order, weight.shape[member.axis])),
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
    """Undo `canonical`: every entry divided by what it was multiplied by, and back in its place."""
    owners, ties = without_ties(state)
    new = dict(owners)
    for name in owners:
        for axis, scales in report.scales.get(name, {}).items():
            new[name] = _times(name, new[name], axis, 1 / scales)
        for axis, order in report.orders.get(name, {}).items():
            new[name] = _taken(new[name], axis, np.argsort(order))
    return {name: new[ties.get(name, name)] for name in state}


def carried(name: str, sensitivity: Sensitivity, report: Report) -> Sensitivity:
    """The sensitivity of tensor `name` after `canonical`, given that before: no second calibration is needed.

    Where weights are multiplied by s, inputs are divided by s as far as columns go, and gradients as far as rows go.
    """
    orders, scales = report.orders.get(name, {}), report.scales.get(name, {})
    rows, columns = (orders.get(0), scales.get(0)), (orders.get(1), scales.get(1))
    return replace(
        sensitivity,
        hessian=_moved(sensitivity.hessian, *columns),
        row_fisher=_moved(sensitivity.row_fisher, *rows),
        output=_moved(sensitivity.output, *rows),
    )


def _moved(moments: Tensor | None, order: Order | None, scales: Floats | None) -> Tensor | None:
    """Second moments, (n, n) or their diagonal (n,), once their variables are reordered and then divided by `scales`.

    Entries that are whole kernels of a convolution have as many variables as a kernel has weights.
    """
    if moments is None:
        return None
    for found in (order, scales):
        if found is not None and len(moments) % found.size:
            raise ConfigError(
                f"a sensitivity of {len(moments)} variables is not one of {found.size} units; recalibrate"
            )
    if order is not None:
        size = len(moments) // order.size
        index = torch.from_numpy((order[:, None] * size + np.arange(size)).reshape(-1)).to(moments.device)
        moments = moments[index] if moments.ndim == 1 else moments[index][:, index]
    if scales is not None:
        over = torch.from_numpy(np.repeat(scales, len(moments) // scales.size)).to(moments)
        moments = moments / over**2 if moments.ndim == 1 else moments / over[:, None] / over
    return moments


def _aliases(state: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """name → the names of the same tensor; an empty set if its memory partly is that of another."""
    owners, ties = without_ties(state)
    twins: dict[str, set[str]] = {name: {name} for name in owners}
    for name, target in ties.items():
        twins[target].add(name)
    found = {name: frozenset(twins[ties.get(name, name)]) for name in state}
    memory: dict[object, list[tuple[int, int, str]]] = {}
    for name, weight in owners.items():
        if weight.numel():
            first = int(weight.storage_offset()) * weight.itemsize
            reach = sum(
                (int(size) - 1) * int(stride) for size, stride in zip(weight.shape, weight.stride(), strict=True)
            )
            where = (weight.device, weight.untyped_storage().data_ptr())
            memory.setdefault(where, []).append((first, first + (reach + 1) * weight.itemsize, name))
    for spans in memory.values():
        last, holder = -1, ""
        for first, end, name in sorted(spans):
            if first < last:
                for shared in (name, holder):
                    found.update(dict.fromkeys(twins[shared], frozenset[str]()))
            if end > last:
                last, holder = end, name
    return found


def _require_whole(members: list[Member], aliases: Mapping[str, frozenset[str]]) -> None:
    """Refuse to move a tensor under one of its names only, or memory that others see in another way."""
    moves: dict[str, set[Member]] = {}
    for member in members:
        moves.setdefault(member.name, set()).add(replace(member, name=""))
    for name, own in moves.items():
        if not aliases[name]:
            raise ConfigError(f"tensor {name!r} shares part of its memory with another; clone it, or drop the symmetry")
        for twin in aliases[name]:
            if moves.get(twin) != own:
                raise ConfigError(
                    f"tensor {name!r} is tied to {twin!r}, which the symmetry does not move likewise; "
                    "name both, or drop the symmetry"
                )


def _unit_order(members: list[Member], wanted: Floats | None) -> Order:
    units = members[0].units
    if wanted is None:
        return np.arange(units)
    values = np.asarray(wanted, np.float64)
    if values.shape != (units,):
        raise ConfigError(
            f"the key gave {values.shape} for the {units} units of {members[0].name!r}; give one for each"
        )
    return np.argsort(values, kind="stable")


def _unit_scale(members: list[Member], state: Mapping[str, Tensor], wanted: Floats | None) -> Floats | None:
    powers = [member for member in members if member.power]
    if wanted is None or not powers or any(state[member.name].dtype not in SCALABLE for member in powers):
        return None
    values = np.asarray(wanted, np.float64)
    if values.shape != (members[0].units,) or not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"a unit of {members[0].name!r} has no positive scale; give one positive number for each")
    return None if (values == 1).all() else values


def _taken(weight: Tensor, axis: int, order: Order) -> Tensor:
    return weight.detach().index_select(axis, torch.from_numpy(order).to(weight.device))


def _times(name: str, weight: Tensor, axis: int, factors: Floats) -> Tensor:
    shape = [-1 if at == axis else 1 for at in range(weight.ndim)]
    wide = weight.detach().double()
    product = (wide * torch.from_numpy(factors).to(weight.device).reshape(shape)).to(weight.dtype)
    if bool((torch.isfinite(wide) & ~torch.isfinite(product)).any()):
        raise WeightsError(f"tensor {name!r} times the scales of its units is beyond {weight.dtype}; give no scale")
    return product


def _moves(order: Order) -> bool:
    return bool((order != np.arange(order.size)).any())
