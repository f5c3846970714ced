"""Jobs: a tensor of a file each, with all that its encoding depends on but one exponent, which all of them share.

    assignment, sensitivities ──► Jobs ──► Job.encode(rows, exponent): integers

Minimizing the total loss under a total number of bits means minimizing loss + λ · bits with one Lagrange multiplier λ
for all matrices: at the optimum one bit less costs the same loss everywhere (Shoham & Gersho 1988; at high rate this is
reverse water-filling). For calibrated matrices λ fixes every scale (`birdie.compress.schemes.trellis`), and the
exponent is log2 √λ up to a constant. The size falls and the loss rises monotonically with the exponent, so a one-
dimensional search meets any budget (`birdie.compress.rate.search`).

Matrices without calibration take the sensitivity that their kind and size let expect (`birdie.compress.prior`); long
kernels that are smooth, as filters of sound are, take a transform in place of a trellis. The exponent is log2 of the
typical scale in standard deviations.
"""

import hashlib
import math
import os
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.coding import Quantized
from birdie.compress.prior import prior_in_units_of
from birdie.compress.rate.assignment import Assignment
from birdie.compress.row_blocks import (
    as_matrix,
    deviation,
    encoded_blocks,
    every_nth_row,
    folded,
    row_blocks,
    with_rows,
)
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.trellis import Trellis, is_pruned
from birdie.compress.small_tensors import SMALL, small_scheme
from birdie.compress.state import EncodedState
from birdie.compress.tensors import count_reals, finite_rows, planes, rows_columns, to_bits
from birdie.compress.trellis.feedback import BlockFeedback, Feedback, feedback
from birdie.system.distributed import World, share_out
from birdie.system.mapped import release
from birdie.system.threads import Room

if TYPE_CHECKING:
    from birdie.compress.near import Components
    from birdie.compress.spectral.transforms import Transform

# The finest exponent is about eighteen bits per weight, the most that symbols exact in float32 allow for a row with
# outliers. At the coarsest hardly any symbol is left that is not zero.
FINEST, COARSEST = -16.0, 9.0
# Without calibration no matrix takes scales of more deviations: beyond, it is practically zero, which is no useful fit.
WIDEST = 3.0
_BEYOND = 3.6  # octaves that the coarsest exponent is above a scale of one deviation, for every matrix
RESERVE_SHARE = 6  # long vectors stay in 16 bits if they take at most this fraction (1/6) of a budget
IN_FLIGHT = 1 << 25  # weights that are encoded at a time; each takes about a dozen bytes
LONG_KERNEL = 32  # taps from which transforms are tried
_TRANSFORMED = 0.8  # share of the bytes of a plain grid that a transform must reach: trellis and feedback gain as well

Role = Literal["rule", "small", "reserve", "searched"]
_DEAD = 1e-12  # of the typical energy of a row, with its sensitivity: it is in no unit
_NO_ROWS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor of a file.

    Attributes:
        name, tensor: of the file.
        role: why it is encoded as it is. rule: a rule or the default names its scheme; small: too small for a search;
            reserve: in 16 bits unless a budget is too tight for that; searched: the exponent sets its scales.
        scheme: that encodes it; of a searched tensor the one whose scale is set, None for what suits the tensor.
        weight: as the scheme encodes it: a stack as one matrix, a long vector as rows without its tail, complex numbers
            as real ones.
        sensitivities: name → sensitivity by calibration; may read files, so it is asked when it is needed.
        factors: of error feedback; of a searched tensor.
        transform: of a long kernel, in place of a trellis.
        trellis: that a searched tensor takes.
        down_columns: whether paths of a trellis run down the columns only without calibration, which decodes faster.
        level: log2 of the deviation and of the root of the sensitivity; unit: the mean of all levels.
        base: elements → these of the tensor to which the difference is stored.
        components: of that difference, if it may be stored as a product.
    """

    name: str
    tensor: Tensor
    role: Role
    scheme: Scheme | None
    weight: Tensor
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)
    factors: Feedback | None = None
    transform: "Transform | None" = None
    trellis: Trellis = field(default_factory=Trellis)
    down_columns: bool = True
    level: float = 0.0
    unit: float = 0.0
    base: Callable[[slice], Tensor] | None = None
    components: "Callable[[], Components] | None" = None

    @property
    def is_near(self) -> bool:
        """Return whether the difference to a base is encoded in place of the weight, not to the last bit."""
        return self.base is not None and not isinstance(self.scheme, Lossless)

    @property
    def sensitivity(self) -> Sensitivity | None:
        """Sensitivity by calibration, if there is one."""
        return self.sensitivities.get(self.name)

    @property
    def tail(self) -> Tensor | None:
        """Numbers of a vector behind its rows, which are kept in 16 bits or losslessly."""
        if self.tensor.ndim != 1 or self.weight.ndim != 2:
            return None
        return planes(self.tensor)[self.weight.numel() :] if self.weight.numel() < count_reals(self.tensor) else None

    @property
    def blocks(self) -> list[slice]:
        """Rows of the weight that are encoded, and coded, alone; last, behind all rows, the tail of a vector."""
        weight, scheme = self.weight, self.scheme
        if self.role != "searched":
            assert scheme is not None
            by_rows = scheme.by_rows and (weight.ndim > 1 or not scheme.quantizes)  # a vector is one row
            if by_rows and (known := self.sensitivity) is not None:
                by_rows = known.output is None
        elif scheme is not None:
            by_rows = scheme.by_rows
        else:
            by_rows = self.transform is None and self._fed.rows.size == 0
        shape = (weight if self.tensor.dtype != weight.dtype else self.tensor).shape
        blocks = encoded_blocks(weight, tuple(shape), by_rows=by_rows)
        return blocks if self.tail is None else [*blocks, slice(len(weight), len(weight) + 1)]

    def rows(self, rows: slice) -> Tensor:
        """Return some rows of the weight, or the tail."""
        if self._is_tail(rows):
            assert self.tail is not None
            return self.tail
        return self.weight[rows] if self.weight.ndim else self.weight

    def values(self, rows: slice = slice(None)) -> Tensor:
        """Return the numbers of some rows that are encoded: of the weight, or the difference to its base."""
        some = self.rows(rows)
        if not self.is_near:
            return some
        base = self.base_of(rows)
        difference = some.detach().float() - base.float()
        release(base)
        return difference

    def _is_tail(self, rows: slice) -> bool:
        return rows.start is not None and self.weight.ndim > 1 and rows.start >= len(self.weight)

    def numbers(self) -> Iterator[NDArray[np.float32]]:
        """Yield what is encoded in blocks of rows, (rows, columns); their pages of a mapped file are released."""
        for rows in row_blocks(self.weight):
            yield finite_rows(self.name, self.values(rows))
            release(self.rows(rows))

    def encode(self, rows: slice, exponent: float, *, draft: bool = False) -> Encoded:
        """Encode some rows.

        Args:
            rows: one of `blocks`.
            exponent: log2 of the typical scale in standard deviations; counts for a searched tensor.
            draft: for the size alone, in a fraction of the time: plain rounding in place of trellises.
        """
        if self.base is None:
            return self.alone(self.rows(rows), rows, exponent, draft=draft)
        from birdie.compress.rate import based

        return based.encode(self, rows, exponent, draft=draft)

    def alone(self, weight: Tensor, rows: slice, exponent: float, *, draft: bool) -> Encoded:
        """Encode numbers without regard to a base."""
        if self._is_tail(rows):
            return small_scheme(weight).encode(self.name, weight)
        sigma = min(2.0 ** (exponent + self.unit - self.level), WIDEST)
        if self.scheme is not None:
            scheme = self.scheme.at_scale(sigma) if self.role == "searched" else self.scheme
            assert scheme is not None
            known = self.sensitivity
            return scheme.encode(self.name, weight, sensitivity=None if known is None else known.of_rows(rows))
        if self.transform is not None:
            from birdie.compress.schemes.spectral import Spectral

            return Spectral(self.transform, sigma, "none" if draft else "auto").encode(self.name, weight)
        exponent += self.unit
        if self.name not in self.sensitivities and self.base is None:
            exponent = min(exponent, self.level + math.log2(WIDEST))
        return self.own_trellis.encode_with(self.name, weight, self._fed.of_rows(rows), 2.0**exponent, draft=draft)

    def key(self, rows: slice, exponent: float) -> str:
        """Return a digest of the rows and of all settings that their encoding depends on."""
        settings = repr(self.scheme)
        if self.base is not None:
            settings += digest(self.base_of(rows))
        if self.role == "searched":
            factors = self._fed.of_rows(rows)
            chosen = self.scheme or self.trellis, self.transform, self.down_columns, exponent + self.unit - self.level
            settings = f"{chosen} {digest(factors.row_weight, factors.column_weight)}"
        return digest(settings, self.rows(rows))

    def normalized(self, share: float) -> NDArray[np.float32]:
        """Return a share of the rows, divided by their scales at exponent 0, flat."""
        weight, factors, step = self.weight, self._fed, max(1, round(1 / share))
        some = self._every_nth_row(0, step) if weight.ndim > 1 else self.values()
        row_weight = factors.row_weight[:: step if weight.ndim > 1 else 1]
        unit = np.outer(row_weight**0.5, factors.column_weight**0.5) * 2.0**-self.unit
        return np.asarray(finite_rows(self.name, some) * unit, dtype=np.float32).reshape(-1)

    def sample(self, every: int, least: int) -> "Job":
        """Return the job of every n-th row, of at least so many rows: it can be measured, not decoded."""
        weight, step = self.weight, max(1, min(every, len(self.weight) // least))
        if weight.ndim < 2 or self.transform is not None:
            step = 1
        first, factors = min(step // 2, len(weight) - 1), self._fed
        row_weight = factors.row_weight if step == 1 else factors.row_weight[first::step]
        some = self._every_nth_row(first, step) if step > 1 else self.values()
        factors = replace(factors, rows=_NO_ROWS, row_weight=row_weight)
        # paths down columns that are cut short would look costly
        return replace(self, tensor=some, weight=some, factors=factors, down_columns=False, base=None, components=None)

    def cut(self, parts: Sequence[slice]) -> "Job":
        """Return the job of some rows, one below the other: it can be measured."""
        some = torch.cat([self.rows(rows).detach() for rows in parts])
        factors = self.factors
        if factors is not None:
            row_weight = np.concatenate([factors.row_weight[rows] for rows in parts])
            factors = replace(factors, rows=_NO_ROWS, row_weight=row_weight)
        return replace(self, tensor=some, weight=some, factors=factors, down_columns=False)

    def lossless(self) -> "Job":
        """Return the job that keeps every bit."""
        weight = as_encoded(self.tensor, Lossless(), self.sensitivity)
        return replace(self, role="small", scheme=Lossless(), weight=weight)

    def with_tensor(self, tensor: Tensor) -> "Job":
        """Return the job of other values; exponents mean the same."""
        scheme = small_scheme(tensor) if self.role == "reserve" and self.base is None else self.scheme
        job = replace(self, tensor=tensor, scheme=scheme, weight=as_encoded(tensor, scheme, self.sensitivity))
        if self.components is None:
            return job
        from birdie.compress.rate import based

        return based.with_components(job)

    def base_of(self, rows: slice) -> Tensor:
        assert self.base is not None
        some, width = self.rows(rows), self.weight[:1].numel() if self.weight.ndim else 1
        start = (rows.start or 0) * width
        return self.base(slice(start, start + some.numel())).reshape(some.shape)

    def _every_nth_row(self, first: int, n: int) -> Tensor:
        """Return a copy of the values of rows `first`, `first` + n, …"""
        if not self.is_near:
            return every_nth_row(self.weight.detach(), first, n)
        blocks = row_blocks(self.weight)
        return torch.cat([self.values(rows)[(first - (rows.start or 0)) % n :: n] for rows in blocks])

    @property
    def own_trellis(self) -> Trellis:
        """Trellis of this tensor."""
        return self.trellis if self.name in self.sensitivities else replace(self.trellis, along=not self.down_columns)

    @property
    def _fed(self) -> Feedback:
        assert self.factors is not None
        return self.factors


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a file.

    Attributes:
        assignment: of the tensors.
        by_name: name → job.
        coarsest: the largest exponent; the least is `FINEST`.
    """

    assignment: Assignment
    by_name: Mapping[str, Job]
    coarsest: float

    @property
    def searched(self) -> list[Job]:
        """Jobs that the exponent changes."""
        return [job for job in self.by_name.values() if job.role == "searched"]

    @property
    def settled(self) -> list[Job]:
        """Jobs that the exponent does not change."""
        return [job for job in self.by_name.values() if job.role != "searched"]

    @property
    def weights(self) -> int:
        """Elements that the exponent changes."""
        return sum(job.weight.numel() for job in self.searched)

    def state(self, tensors: Mapping[str, Quantized]) -> EncodedState:
        """Return all tensors of the file in its order."""
        return EncodedState({name: tensors[name] for name in self.assignment.tensors}, self.assignment.ties)

    def lossless(self) -> list[Job]:
        """Return the jobs without a rule, each lossless."""
        return [job.lossless() for job in self.by_name.values() if job.role != "rule"]

    def continued(self, tensors: Mapping[str, Tensor]) -> "Jobs":
        """Return the jobs with new values of tensors, by name; exponents mean the same."""
        changed = {name: self.by_name[name].with_tensor(tensor) for name, tensor in tensors.items()}
        assignment = replace(self.assignment, tensors={**self.assignment.tensors, **tensors})
        return replace(self, assignment=assignment, by_name={**self.by_name, **changed})

    def smallest(self, share: float) -> tuple[list[Job], float]:
        """Return the smallest searched jobs that hold at least this share of the weights, and their share."""
        jobs, weights = [], self.weights
        count = 0
        for job in sorted(self.searched, key=lambda job: job.weight.numel()):
            if count >= share * weights:
                break
            jobs.append(job)
            count += job.weight.numel()
        return jobs, count / weights

    def sampled(self, count: int, rows: int) -> tuple["Jobs", dict[str, float]]:
        """Return jobs of some rows of every searched matrix, about `count` weights, and how many times fewer each.

        Exponents mean the same in both. `rows` are the least of a matrix.
        """
        every = self.weights // max(count, 1)
        if every < 2 or self.assignment.steered is not None:
            return self, {}
        some = {job.name: job.sample(every, rows) for job in self.searched}
        factors = {name: self.by_name[name].weight.numel() / job.weight.numel() for name, job in some.items()}
        return replace(self, by_name={**self.by_name, **some}), factors

    def normalized(self, count: int) -> NDArray[np.float32]:
        """Return about `count` weights of the searched matrices, divided by their scales at exponent 0, flat."""
        share = min(1.0, count / self.weights)
        return np.concatenate([job.normalized(share) for job in self.searched])


def jobs_of(
    assignment: Assignment,
    sensitivities: Mapping[str, Sensitivity] | None = None,
    factors: MutableMapping[str, Feedback] | None = None,
    *,
    down_columns: bool = True,
    workers: int | None = None,
    world: World | None = None,
) -> Jobs:
    """Return the jobs of an assignment.

    Args:
        assignment: settled schemes, and the matrices that a search may coarsen.
        sensitivities: name → sensitivity, under either name of a tie; names without a tensor are ignored. Other
            matrices take the prior.
        factors: name → factors of error feedback of calibrated matrices, where these are kept for other files; those
            that it does not have are added.
        down_columns: as of `Job`.
        workers: threads; None uses every core.
        world: ranks that share the factors of calibrated matrices out, and all see those that are kept.
    """
    trellis, ties = assignment.trellis, assignment.ties
    known = {} if sensitivities is None else sensitivities
    if not ties.keys().isdisjoint(known):
        known = {ties.get(name, name): item for name, item in known.items()}
    chosen = {**assignment.settled, **assignment.small}
    jobs: dict[str, Job] = {}
    searched = {*assignment.free}
    for name, tensor in assignment.tensors.items():
        role: Role = "searched" if name in searched else "rule" if name in assignment.settled else "small"
        scheme = assignment.steered if role == "searched" else chosen.get(name)
        if role == "small" and scheme is None:
            role, scheme = "reserve", small_scheme(tensor)
        weight = as_encoded(tensor, scheme, known.get(name))
        job = Job(name, tensor, role, scheme, weight, known, trellis=trellis, down_columns=down_columns)
        if name in assignment.bases:
            from birdie.compress.rate import based

            job = based.with_base(job, assignment.bases[name])
        jobs[name] = job
    matrices = {name: jobs[name].weight for name in assignment.free}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        fed = _factors_of(assignment, matrices, known, factors, trellis.output, pool, world or World())
        transforms = dict(zip(matrices, pool.map(lambda name: _transform(jobs[name]), matrices), strict=True))
    levels = {}
    for name in matrices:
        level = _level(jobs[name], fed[name])
        if level is not None:  # else it did not change
            levels[name] = level
    # The unit makes the exponent mean log2 of the typical scale in standard deviations: it is the mean, over weights,
    # of log2 (deviation · root of the Fisher information that remains after feedback).
    total = sum(level * matrices[name].numel() for name, level in levels.items())
    unit = total / max(sum(matrices[name].numel() for name in levels), 1)
    for name in matrices:
        level = levels.get(name, unit)
        jobs[name] = replace(jobs[name], factors=fed[name], transform=transforms[name], level=level, unit=unit)
        if jobs[name].is_near:
            from birdie.compress.rate import based

            jobs[name] = based.with_components(jobs[name])
    coarsest = COARSEST
    if levels:  # matrices of low sensitivity lower the mean, and the others must still reach their coarsest
        zeros_help = known or any(jobs[name].is_near for name in matrices)
        coarsest = max(levels.values()) - unit + (_BEYOND if zeros_help else math.log2(WIDEST))
        coarsest = max(coarsest, COARSEST) if zeros_help else coarsest
    return Jobs(assignment, jobs, coarsest)


def _level(job: Job, factors: Feedback) -> float | None:
    """Return log2 of the deviation and of the root of the sensitivity; None for a difference of zeros."""
    weights = np.log2(factors.row_weight)
    columns = float(np.log2(factors.column_weight).mean())
    if not isinstance(factors.columns, BlockFeedback) and not job.is_near:  # sensitivity goes by the size of rows
        equal = np.ones(1) if factors.equal is None else factors.equal
        squares = np.concatenate([np.square(rows / equal).mean(axis=1) for rows in job.numbers()])
        typical = np.median((squares * factors.row_weight)[squares > 0]) if squares.any() else 0.0
        used = squares * factors.row_weight > _DEAD * typical
        if used.any():
            return float((np.log2(squares[used]) + weights[used] + columns + 2 * np.log2(equal).mean()).mean()) / 2
    spread = deviation(job.numbers()) or (0.0 if job.is_near else 1.0)
    return math.log2(spread) + float(weights.mean() + columns) / 2 if spread else None


def assignments(assignment: Assignment, budget: int | None) -> list[Assignment]:
    """Return the assignments to try for a budget, the preferred one first.

    What stays in 16 bits must not take too much of the budget: if it is more than a sixth of it, or if the budget
    cannot be met with it, it is coarsened as well. So are weights that are quantized already, as the last resort.
    """
    options = [assignment]
    if budget is not None and assignment.reserve:
        reserve = [assignment.tensors[name] for name in assignment.reserve]
        kept = RESERVE_SHARE * sum(count_reals(tensor) * min(tensor.itemsize, 2) for tensor in reserve) <= budget
        every = _freed(assignment, {*assignment.reserve})
        options = [assignment, every] if kept else [every]
    if budget is not None and assignment.quantized:
        options.append(_freed(options[-1], assignment.quantized))
    return options


def _freed(assignment: Assignment, names: Collection[str]) -> Assignment:
    """Return the assignment in which a search may coarsen these tensors, too."""
    freed = {*assignment.free, *names}
    return replace(
        assignment,
        settled={name: scheme for name, scheme in assignment.settled.items() if name not in freed},
        free=tuple(name for name in assignment.tensors if name in freed),
        reserve=tuple(name for name in assignment.reserve if name not in freed),
        quantized=assignment.quantized - freed,
    )


def as_encoded(tensor: Tensor, scheme: Scheme | None, sensitivity: Sensitivity | None) -> Tensor:
    """Return a tensor as `scheme` encodes it: a stack of matrices as one matrix, unless its dimensions count.

    Long vectors that are quantized are rows. Complex numbers are real ones, unless they are kept as they are.
    """
    weight = tensor if isinstance(scheme, Lossless) else planes(tensor)
    if scheme is not None and scheme.by_axes:
        return weight
    if weight.ndim == 1:
        return folded(weight) if (scheme is None or scheme.quantizes) and len(weight) >= SMALL else weight
    return as_matrix(weight) if sensitivity is None else with_rows(weight, sensitivity)


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


def _transform(job: Job) -> "Transform | None":
    """Return the transform of a long kernel without calibration, if it saves far more than a trellis does."""
    weight = job.weight
    if job.is_near or weight.ndim < 3 or job.name in job.sensitivities or prod(weight.shape[2:]) < LONG_KERNEL:
        return None
    if is_pruned(finite_rows(job.name, weight)):  # a transform keeps no zeros
        return None
    from birdie.compress.schemes.spectral import best_transform  # long kernels alone need it

    transform = best_transform(weight, _TRANSFORMED)
    return None if transform.kind == "identity" else transform


def _factors_of(
    assignment: Assignment,
    matrices: Mapping[str, Tensor],
    known: Mapping[str, Sensitivity],
    factors: MutableMapping[str, Feedback] | None,
    output: bool,
    pool: ThreadPoolExecutor,
    world: World,
) -> Mapping[str, Feedback]:
    """Return name → factors of error feedback of the searched matrices, computed where nobody has before."""
    tensors, room = assignment.tensors, Room(IN_FLIGHT)
    counts = {
        name: len(tensors[name])
        for name, weight in matrices.items()
        if weight.ndim < tensors[name].ndim and not tensors[name].is_complex()
    }
    counts |= {name: len(group.names) for name, group in assignment.groups.items() if name in matrices}
    real = {name: planes(tensor) for name, tensor in tensors.items() if tensor.ndim < 2 or not tensor.is_complex()}
    prior = prior_in_units_of(known, matrices, counts, real, assignment.embeddings)
    kept: MutableMapping[str, Feedback] = {} if factors is None else factors

    def compute(name: str) -> Feedback:
        with room.taken(matrices[name].numel()):
            sensitivity = prior[name] if name in prior else known[name]
            return feedback(sensitivity, *rows_columns(tuple(matrices[name].shape)), output=output)

    def keep(name: str) -> None:
        if name not in kept:
            kept[name] = compute(name)

    def keep_all(names: Sequence[str]) -> dict[str, None]:
        return dict(zip(names, pool.map(keep, names), strict=True))

    # Every rank sees what the others keep, and when it does is a matter of chance: so all of them are shared out.
    share_out(world, {name: weight.numel() for name, weight in matrices.items() if name not in prior}, keep_all)
    return ChainMap(dict(zip(prior, pool.map(compute, prior), strict=True)), kept)
