"""Allocation of bits to matrices: the scales of all of them as a function of one global exponent.

    assignment, sensitivities ──► Allocation ──► encode(exponent): every tensor of the file

Minimizing the total loss under a total number of bits means minimizing loss + λ · bits with one Lagrange multiplier λ
for all matrices: at the optimum one bit less costs the same loss everywhere (Shoham & Gersho 1988; at high rate this is
reverse water-filling). For calibrated matrices λ fixes every scale (`birdie.compress.schemes.trellis`), and the
exponent is log2 √λ up to a constant. The size falls and the loss rises monotonically with the exponent, so a one-
dimensional search meets any budget (`birdie.compress.rate.budget`).

Matrices without calibration take the sensitivity that their kind and size let expect (`birdie.compress.prior`); long
kernels that are smooth, as filters of sound are, take a transform in place of a trellis. The exponent is log2 of the
typical scale in standard deviations.
"""

import copy
import hashlib
import math
import os
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.prior import assumed
from birdie.compress.rate.assignment import Assignment
from birdie.compress.row_blocks import deviation, encoded_blocks, every_nth_row
from birdie.compress.scheme import Blocks, Encoded, Scheme, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.spectral import Spectral, best_transform
from birdie.compress.schemes.trellis import Trellis, is_pruned
from birdie.compress.small_tensors import small_scheme
from birdie.compress.spectral.transforms import Transform
from birdie.compress.stacks import as_matrix, with_rows
from birdie.compress.state import EncodedState
from birdie.compress.tensors import count_reals, finite_rows, planes, rows_columns, to_bits
from birdie.compress.trellis.feedback import Feedback, feedback
from birdie.runtime.mapped import release
from birdie.runtime.room import Room

# The finest exponent is about eighteen bits per weight, the most that symbols exact in float32 allow for a row with
# outliers. At the coarsest hardly any symbol is left that is not zero.
FINEST, COARSEST = -16.0, 9.0
# Without calibration no matrix takes scales of more deviations: beyond, it is practically zero, which is no useful fit.
WIDEST = 3.0
_BEYOND = 3.6  # octaves that the coarsest exponent is above a scale of one deviation, for every matrix
RESERVE_SHARE = 6  # long vectors stay in 16 bits if they take at most this fraction (1/6) of a budget
_IN_FLIGHT = 1 << 25  # weights that are encoded at a time; each takes about a dozen bytes
LONG_KERNEL = 32  # taps from which transforms are tried
_TRANSFORMED = 0.8  # share of the bytes of a plain grid that a transform must reach: trellis and feedback gain as well


Part = tuple[str, int]
"""A tensor and the number of a block of its rows (compress/row_blocks.py)."""
Share = Callable[[Mapping[Any, int], Callable[[Sequence[Any]], dict[Any, Any]]], dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Handling of encoded tensors, and the process that encodes each. No file depends on it.

    Attributes:
        coded: called with each part of a tensor as soon as it is encoded, and with its key; the result is kept instead.
        estimated: the same for parts of a sample, of which only the size counts.
        recalled: key → what `coded` returned for it in a process that died, or None; None: nothing has a key. A key is
            a digest of the weights and of all settings.
        share: does work on parts of tensors (part → size) that is shared out over processes; None does it here.
    """

    coded: Callable[[Encoded, str], Encoded] | None = None
    estimated: Callable[[Encoded, str], Encoded] | None = None
    recalled: Callable[[str], Encoded | None] | None = None
    share: Share | None = None


@dataclass(slots=True)
class Allocation:
    """The tensors of a file with their sensitivities; encodes all of them at any exponent.

    Attributes:
        assignment: settled schemes, and the free matrices.
        sensitivities: name → sensitivity, under either name of a tie; names without a tensor are ignored. Other
            matrices take the prior.
        scheme: trellis of the free matrices.
        plain: whether paths of matrices without calibration run down the columns only, which decodes faster.
        workers: threads; None uses every core.
        hooks: what becomes of tensors that are encoded, and which process encodes them.
        factors: name → factors of error feedback of calibrated matrices, where these are kept; those that it does not
            have are added.
        fixed: name → tensor encoded for good (`continued`).
        matrices: name → weight that the exponent changes, a stack as one matrix; weights: how many elements they have.
        finest, coarsest: the range of exponents.
    """

    assignment: Assignment
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)
    scheme: Trellis = field(default_factory=Trellis)
    plain: bool = True
    workers: int | None = None
    hooks: Hooks = field(default_factory=Hooks)
    factors: MutableMapping[str, Feedback] | None = None
    fixed: Mapping[str, Encoded] = field(init=False, default_factory=dict)
    matrices: dict[str, Tensor] = field(init=False)
    weights: int = field(init=False, default=0)
    finest: float = field(init=False, default=FINEST)
    coarsest: float = field(init=False, default=COARSEST)
    _factors: MutableMapping[str, Feedback] = field(init=False)
    _transforms: dict[str, Transform] = field(init=False, default_factory=dict)
    _levels: dict[str, float] = field(init=False, default_factory=dict)
    _unit: float = field(init=False, default=0.0)
    _settled: dict[str, Encoded] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        ties = self.assignment.ties
        if not ties.keys().isdisjoint(self.sensitivities):
            self.sensitivities = {ties.get(name, name): item for name, item in self.sensitivities.items()}
        self.matrices = {name: self._matrix(name, self.assignment.steered) for name in self.assignment.free}
        with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
            self._factors = factors_of(self, pool)
            transforms = pool.map(self._transform, self.matrices)
            self._transforms = {
                name: transform
                for name, transform in zip(self.matrices, transforms, strict=True)
                if transform is not None
            }
        for name in self.matrices:
            item = self._factors[name]
            spread = deviation(name, self.matrices[name]) or 1.0
            typical = float(np.log2(item.row_weight).mean() + np.log2(item.column_weight).mean()) / 2
            self._levels[name] = math.log2(spread) + typical
        self.weights = sum(weight.numel() for weight in self.matrices.values())
        # The unit makes the exponent mean log2 of the typical scale in standard deviations: it is the mean, over
        # weights, of log2 (deviation · root of the Fisher information that remains after feedback).
        total = sum(level * self.matrices[name].numel() for name, level in self._levels.items())
        self._unit = total / max(self.weights, 1)
        if self._levels:  # matrices of low sensitivity lower the mean, and the others must still reach their coarsest
            beyond = _BEYOND if self.sensitivities else math.log2(WIDEST)
            self.coarsest = max(self._levels.values()) - self._unit + beyond
        if self.sensitivities:
            self.coarsest = max(self.coarsest, COARSEST)

    def encode(self, exponent: float, draft: bool = False) -> EncodedState:
        """Encode every tensor, the free matrices at `exponent`.

        Args:
            exponent: log2 of the typical scale in standard deviations.
            draft: estimate the size in a fraction of the time: plain rounding in place of trellises.
        """
        return self._ordered(self._encode_matrices(list(self.matrices), exponent, draft))

    def encode_part(self, names: Sequence[str], exponent: float) -> dict[str, Encoded]:
        """Encode some tensors: free matrices at `exponent`, others by their schemes."""
        chosen = {**self.assignment.settled, **self.assignment.small}
        settled = {name: chosen[name] for name in names if name not in self.matrices}
        free = [name for name in names if name in self.matrices]
        return self._encode_by(settled) | self._encode_matrices(free, exponent, draft=False)

    def continued(self, fixed: Mapping[str, Encoded], tensors: Mapping[str, Tensor]) -> "Allocation":
        """Return this allocation with more tensors encoded for good and others changed; exponents mean the same.

        Args:
            fixed: name → encoded tensor.
            tensors: name → new values.
        """
        other = copy.copy(self)
        other.assignment = replace(self.assignment, tensors={**self.assignment.tensors, **tensors})
        other.fixed = {**self.fixed, **fixed}
        other.matrices = {
            name: other._matrix(name, self.assignment.steered) for name in self.matrices if name not in fixed
        }
        other.weights = sum(weight.numel() for weight in other.matrices.values())
        other._settled = None
        return other

    def encode_lossless(self) -> EncodedState:
        """Encode every tensor: losslessly, but by its scheme where a rule names one."""
        names = [name for name in self.assignment.tensors if name not in self.assignment.settled]
        return self._ordered(self._encode_by(dict.fromkeys(names, Lossless())))

    def encode_settled(self) -> EncodedState:
        """Encode every tensor if none is free."""
        return self._ordered({})

    def sample(self, count: int) -> NDArray[np.float32]:
        """Return about `count` weights of the free matrices, divided by their scales at exponent 0, flat."""
        share = min(1.0, count / sum(weight.numel() for weight in self.matrices.values()))
        return np.concatenate([self._normalized(name, share) for name in self.matrices])

    def _encode_matrices(self, names: Sequence[str], exponent: float, draft: bool) -> dict[str, Encoded]:
        """Encode free matrices."""
        steered = self.assignment.steered

        def by_rows(name: str) -> bool:
            if steered is not None:
                return steered.by_rows
            return name not in self._transforms and self._factors[name].rows.size == 0

        def settings(name: str, rows: slice) -> str:
            factors, transform = self._factors[name].of_rows(rows), self._transforms.get(name)
            chosen = steered or self.scheme, transform, self.plain, exponent + self._unit - self._levels[name]
            return f"{chosen} {digest(factors.row_weight, factors.column_weight)}"

        tensors = {name: self.matrices[name] for name in names}
        return self._encode_each(
            tensors, by_rows, lambda name, rows: self._encode_matrix(name, rows, exponent, draft), settings
        )

    def _matrix(self, name: str, scheme: Scheme | None) -> Tensor:
        """Return a tensor as `scheme` encodes it: a stack of matrices as one matrix, unless its dimensions count.

        Complex numbers are real ones, unless they are kept as they are.
        """
        weight = self.assignment.tensors[name]
        if not isinstance(scheme, Lossless):
            weight = planes(weight)
        if scheme is not None and scheme.by_axes:
            return weight
        return with_rows(weight, self.sensitivities[name]) if name in self.sensitivities else as_matrix(weight)

    def _encode_matrix(self, name: str, rows: slice, exponent: float, draft: bool) -> Encoded:
        weight = self.matrices[name][rows]
        sigma = min(2.0 ** (exponent + self._unit - self._levels[name]), WIDEST)
        if self.assignment.steered is not None:
            steered = self.assignment.steered.at_scale(sigma)
            assert steered is not None
            return steered.encode(name, weight, sensitivity=self._sensitivity(name, rows))
        if weight.ndim < 2:  # the rate of a single row is too uneven for a search that counts bits
            return Grid(sigma=sigma).encode(name, weight)
        if name in self._transforms:
            return Spectral(self._transforms[name], sigma, "none" if draft else "auto").encode(name, weight)
        scheme, exponent = self.scheme, exponent + self._unit
        if name not in self.sensitivities:
            scheme = replace(self.scheme, along=not self.plain)
            exponent = min(exponent, self._levels[name] + math.log2(WIDEST))
        return scheme.encode_with(name, weight, self._factors[name].of_rows(rows), 2.0**exponent, draft=draft)

    def _sensitivity(self, name: str, rows: slice) -> Sensitivity | None:
        """Return the sensitivity of a block of rows, if it was calibrated."""
        sensitivity = self.sensitivities.get(name)
        return None if sensitivity is None else sensitivity.of_rows(rows)

    def settled(self) -> EncodedState:
        """Return the tensors that the exponent does not change, alone."""
        return EncodedState(self._encode_settled(), {})

    def part(self, share: float) -> tuple[list[str], float]:
        """Return the smallest free matrices that hold at least this share of the weights, and their share."""
        names: list[str] = []
        count = 0
        for name in sorted(self.matrices, key=lambda name: self.matrices[name].numel()):
            if count >= share * self.weights:
                break
            names.append(name)
            count += self.matrices[name].numel()
        return names, count / self.weights

    def sampled(self, count: int, rows: int) -> "tuple[Allocation, dict[str, float]]":
        """Return an allocation of some rows of every free matrix, about `count` weights, and how many times fewer each.

        Exponents mean the same in both. What is encoded can be measured, not decoded. `rows` are the least of a matrix.
        """
        self._encode_settled()  # for both
        other = copy.copy(self)
        other.hooks = replace(self.hooks, coded=self.hooks.estimated, recalled=None)
        every = self.weights // max(count, 1)
        if every < 2 or self.assignment.steered is not None:
            return other, {}
        other.matrices, other._factors = {}, {}
        other.plain = False  # paths down columns that are cut short would look costly
        for name, weight in self.matrices.items():
            step = max(1, min(every, len(weight) // rows))
            if weight.ndim < 2 or name in self._transforms:
                step = 1
            first, factors = min(step // 2, len(weight) - 1), self._factors[name]
            row_weight = factors.row_weight if step == 1 else factors.row_weight[first::step]
            other.matrices[name] = every_nth_row(weight, first, step) if step > 1 else weight
            other._factors[name] = replace(factors, rows=np.zeros((0, 0), np.float32), row_weight=row_weight)
        other.assignment = replace(self.assignment, tensors={**self.assignment.tensors, **other.matrices})
        return other, {name: weight.numel() / other.matrices[name].numel() for name, weight in self.matrices.items()}

    def _encode_settled(self) -> dict[str, Encoded]:
        """Encode the tensors that the exponent does not change, once for all rounds of a search."""
        if self._settled is None:
            known = self.matrices.keys() | self.fixed.keys()
            tensors = {name: tensor for name, tensor in self.assignment.tensors.items() if name not in known}
            chosen = {**self.assignment.settled, **self.assignment.small}
            encoded = self._encode_by(
                {name: chosen.get(name) or small_scheme(tensor) for name, tensor in tensors.items()}
            )
            self._settled = {**self.fixed, **encoded}
        return self._settled

    def _encode_by(self, schemes: Mapping[str, Scheme]) -> dict[str, Encoded]:
        """Encode each named tensor by its scheme."""

        def by_rows(name: str) -> bool:
            sensitivity, scheme = self.sensitivities.get(name), schemes[name]
            alone = scheme.by_rows and (tensors[name].ndim > 1 or not scheme.quantizes)  # a vector is one row
            return alone and (sensitivity is None or sensitivity.output is None)

        def encode(name: str, rows: slice) -> Encoded:
            weight = _rows_of(tensors[name], rows)
            return schemes[name].encode(name, weight, sensitivity=self._sensitivity(name, rows))

        tensors = {name: self._matrix(name, scheme) for name, scheme in schemes.items()}
        return self._encode_each(tensors, by_rows, encode, lambda name, _: repr(schemes[name]))

    def _encode_each(
        self,
        tensors: Mapping[str, Tensor],
        by_rows: Callable[[str], bool],
        encode: Callable[[str, slice], Encoded],
        settings: Callable[[str, slice], str],
    ) -> dict[str, Encoded]:
        """Encode tensors, several at a time, but not so many that their copies take much memory.

        Args:
            tensors: name → tensor, a stack as one matrix.
            by_rows: whether a tensor may be encoded in blocks of rows.
            encode: encodes some rows of a tensor.
            settings: what the result depends on besides these rows.
        """
        room, blocks = Room(_IN_FLIGHT), {}
        for name, weight in tensors.items():
            tensor = self.assignment.tensors[name]
            shape = tuple((weight if tensor.dtype != weight.dtype else tensor).shape)
            blocks[name] = encoded_blocks(weight, shape, by_rows=by_rows(name))
        rows = {(name, index): block for name in tensors for index, block in enumerate(blocks[name])}
        sizes = {part: _rows_of(tensors[part[0]], block).numel() for part, block in rows.items()}

        def complete(part: Part) -> Encoded:
            name, weight, key = part[0], _rows_of(tensors[part[0]], rows[part]), ""
            with room.taken(sizes[part]):
                if self.hooks.recalled is not None:
                    key = digest(settings(name, rows[part]), weight)
                    if (known := self.hooks.recalled(key)) is not None:
                        return known
                encoded = encode(name, rows[part])
                release(weight)
                return encoded if self.hooks.coded is None else self.hooks.coded(encoded, key)

        def encode_all(parts: Sequence[Part]) -> dict[Part, Encoded]:
            with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
                return dict(zip(parts, pool.map(complete, parts), strict=True))

        encoded = encode_all(list(rows)) if self.hooks.share is None else self.hooks.share(sizes, encode_all)
        joined = {}
        for name in tensors:
            tensor, parts = self.assignment.tensors[name], [encoded[name, index] for index in range(len(blocks[name]))]
            joined[name] = Blocks.of(tuple(tensor.shape), tensor.dtype, parts)
        return joined

    def _ordered(self, encoded: Mapping[str, Encoded]) -> EncodedState:
        """Return `encoded` and the tensors that the exponent does not change, in the order of the assignment."""
        every = self._encode_settled() | dict(encoded)
        return EncodedState({name: every[name] for name in self.assignment.tensors}, self.assignment.ties)

    def compute_factors(self, name: str, sensitivity: Sensitivity) -> Feedback:
        """Return the factors of error feedback of a free matrix."""
        weight = self.matrices[name]
        return feedback(sensitivity, *rows_columns(tuple(weight.shape)), output=self.scheme.output)

    def _transform(self, name: str) -> Transform | None:
        """Return the transform of a long kernel without calibration, if it saves far more than a trellis does."""
        weight = self.matrices[name]
        if weight.ndim < 3 or name in self.sensitivities or prod(weight.shape[2:]) < LONG_KERNEL:
            return None
        if is_pruned(finite_rows(name, weight)):  # a transform keeps no zeros
            return None
        transform = best_transform(weight, _TRANSFORMED)
        return None if transform.kind == "identity" else transform

    def _normalized(self, name: str, share: float) -> NDArray[np.float32]:
        """Return a share of the rows of a matrix, divided by their scales at exponent 0, flat."""
        weight = self.matrices[name]
        step = max(1, round(1 / share))
        rows = finite_rows(name, every_nth_row(weight.detach(), 0, step) if weight.ndim > 1 else weight)
        factors = self._factors[name]
        unit = (
            np.outer(factors.row_weight[:: step if weight.ndim > 1 else 1] ** 0.5, factors.column_weight**0.5)
            * 2.0**-self._unit
        )
        return np.asarray(rows * unit, dtype=np.float32).reshape(-1)


def digest(*parts: str | Tensor | NDArray[np.float64]) -> str:
    """Return a digest of texts and of the bytes of arrays."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        elif isinstance(part, Tensor):
            total.update(f"{part.dtype} {tuple(part.shape)}".encode())
            total.update(np.ascontiguousarray(to_bits(part)).data)
        else:
            total.update(np.ascontiguousarray(part).data)
    return total.hexdigest()


def _rows_of(weight: Tensor, rows: slice) -> Tensor:
    return weight[rows] if weight.ndim else weight


def factors_of(allocation: Allocation, pool: ThreadPoolExecutor) -> MutableMapping[str, Feedback]:
    """Return name → factors of error feedback of the free matrices, computed by `pool` where nobody has before."""
    matrices, tensors, room = allocation.matrices, allocation.assignment.tensors, Room(_IN_FLIGHT)
    counts = {
        name: len(tensors[name])
        for name, weight in matrices.items()
        if weight.ndim < tensors[name].ndim and not tensors[name].is_complex()
    }
    counts |= {name: len(group.names) for name, group in allocation.assignment.groups.items() if name in matrices}
    real = {name: tensor for name, tensor in tensors.items() if not tensor.is_complex()}
    prior = assumed(allocation.sensitivities, matrices, counts, real, allocation.assignment.embeddings)
    kept: MutableMapping[str, Feedback] = {} if allocation.factors is None else allocation.factors

    def compute(name: str) -> Feedback:
        with room.taken(matrices[name].numel()):
            return allocation.compute_factors(name, prior.get(name) or allocation.sensitivities[name])

    def keep(name: str) -> None:
        if name not in kept:
            kept[name] = compute(name)

    def keep_all(names: Sequence[str]) -> dict[str, Any]:
        return dict(zip(names, pool.map(keep, names), strict=True))

    calibrated = {name: weight.numel() for name, weight in matrices.items() if name not in prior}
    if allocation.hooks.share is None:
        keep_all(list(calibrated))
    else:  # every rank sees what the others keep, and when it does is a matter of chance: so all of them are shared out
        allocation.hooks.share(calibrated, keep_all)
    return ChainMap(dict(zip(prior, pool.map(compute, prior), strict=True)), kept)


def assignments(assignment: Assignment, budget: int | None) -> list[Assignment]:
    """Return the assignments to try for a budget, the preferred one first.

    What stays in 16 bits must not take too much of the budget: if it is more than a sixth of it, or if the budget
    cannot be met with it, it is coarsened as well.
    """
    if budget is None or not assignment.reserve:
        return [assignment]
    reserve = [assignment.tensors[name] for name in assignment.reserve]
    freed = {*assignment.free, *assignment.reserve}
    every = replace(assignment, free=tuple(name for name in assignment.tensors if name in freed), reserve=())
    kept = RESERVE_SHARE * sum(count_reals(tensor) * min(tensor.itemsize, 2) for tensor in reserve) <= budget
    return [*([assignment] if kept else []), every]
