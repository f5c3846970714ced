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

import math
import os
from collections import ChainMap
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.coding import Quantized
from birdie.compress.prior import prior_in_units_of
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.job import (
    WIDEST,
    Fixed,
    Free,
    Job,
    Numbers,
    Searched,
    Steered,
    Transformed,
    as_encoded,
)
from birdie.compress.row_blocks import (
    deviation,
)
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.trellis import is_pruned
from birdie.compress.small_tensors import small_scheme
from birdie.compress.state import EncodedState
from birdie.compress.tensors import count_reals, finite_rows, planes, rows_columns
from birdie.compress.trellis.feedback import BlockFeedback, Feedback, feedback
from birdie.system.distributed import World, share_out
from birdie.system.threads import Room

if TYPE_CHECKING:
    from birdie.compress.spectral.transforms import Transform

# The finest exponent is about eighteen bits per weight, the most that symbols exact in float32 allow for a row with
# outliers. At the coarsest hardly any symbol is left that is not zero.
FINEST, COARSEST = -16.0, 9.0
_BEYOND = 3.6  # octaves that the coarsest exponent is above a scale of one deviation, for every matrix
RESERVE_SHARE = 6  # long vectors stay in 16 bits if they take at most this fraction (1/6) of a budget
IN_FLIGHT = 1 << 25  # weights that are encoded at a time; each takes about a dozen bytes
LONG_KERNEL = 32  # taps from which transforms are tried
_TRANSFORMED = 0.8  # share of the bytes of a plain grid that a transform must reach: trellis and feedback gain as well

_DEAD = 1e-12  # of the typical energy of a row, with its sensitivity: it is in no unit


class _Shared(TypedDict):
    """Arguments that all jobs of searched tensors have."""

    numbers: Numbers
    sensitivities: Mapping[str, Sensitivity]
    factors: Feedback
    log_deviation: float
    mean_log_deviation: float


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a file."""

    assignment: Assignment  # of the tensors
    by_name: Mapping[str, Job]  # name → job
    coarsest: float  # the largest exponent; the least is `FINEST`

    @property
    def searched(self) -> list[Job]:
        """Jobs that the exponent changes."""
        return [job for job in self.by_name.values() if isinstance(job.alone, Free)]

    @property
    def settled(self) -> list[Job]:
        """Jobs that the exponent does not change."""
        return [job for job in self.by_name.values() if not isinstance(job.alone, Free)]

    @property
    def rules(self) -> list[Job]:
        """Jobs whose scheme a rule or the default names."""
        return [job for name, job in self.by_name.items() if name in self.assignment.settled]

    @property
    def free(self) -> list[Free]:
        """Searched jobs without regard to bases."""
        return [job.alone for job in self.by_name.values() if isinstance(job.alone, Free)]

    @property
    def weights(self) -> int:
        """Elements that the exponent changes."""
        return sum(job.weight.numel() for job in self.searched)

    def state(self, tensors: Mapping[str, Quantized]) -> EncodedState:
        """Return all tensors of the file in its order."""
        return EncodedState({name: tensors[name] for name in self.assignment.tensors}, self.assignment.ties)

    def lossless(self) -> list[Job]:
        """Return the jobs without a rule, each lossless."""
        return [job.lossless() for name, job in self.by_name.items() if name not in self.assignment.settled]

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
        some = {job.name: job.sample(every, rows) for job in self.free}
        factors = {name: self.by_name[name].weight.numel() / job.weight.numel() for name, job in some.items()}
        return replace(self, by_name={**self.by_name, **some}), factors

    def normalized(self, count: int) -> NDArray[np.float32]:
        """Return about `count` weights of the searched matrices, divided by their scales at exponent 0, flat."""
        share = min(1.0, count / self.weights)
        return np.concatenate([job.normalized(share) for job in self.free])


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
        down_columns: as of `Searched`.
        workers: threads; None uses every core.
        world: ranks that share the factors of calibrated matrices out, and all see those that are kept.
    """
    trellis, ties = assignment.trellis, assignment.ties
    known = {} if sensitivities is None else sensitivities
    if not ties.keys().isdisjoint(known):
        known = {ties.get(name, name): item for name, item in known.items()}
    chosen = {**assignment.settled, **assignment.small}
    jobs: dict[str, Job] = {}
    numbers: dict[str, Numbers] = {}
    searched = {*assignment.free}
    for name, tensor in assignment.tensors.items():
        by_size = name not in searched and name not in chosen
        scheme = assignment.steered if name in searched else small_scheme(tensor) if by_size else chosen[name]
        one = Numbers(name, tensor, as_encoded(tensor, scheme, known.get(name)))
        if name in assignment.bases:
            one, scheme = assignment.bases[name](one, scheme)
        if name in searched:
            numbers[name] = one
        elif scheme is not None:
            by_size = by_size and not one.is_delta
            jobs[name] = one.job(Fixed(numbers=one, sensitivities=known, scheme=scheme, by_size=by_size))
    matrices = {name: numbers[name].weight for name in assignment.free}
    uncalibrated = [numbers[name] for name in matrices if name not in known]
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        fed = _factors_of(assignment, matrices, known, factors, trellis.output, pool, world or World())
        transforms = dict(zip([one.name for one in uncalibrated], pool.map(_transform, uncalibrated), strict=True))
    deviations = {}
    for name in matrices:
        deviation = _log_deviation(numbers[name], fed[name])
        if deviation is not None:  # else it did not change
            deviations[name] = deviation
    # The mean makes the exponent log2 of the typical scale in standard deviations: it is the mean, over weights,
    # of log2 (deviation · root of the Fisher information that remains after feedback).
    total = sum(deviation * matrices[name].numel() for name, deviation in deviations.items())
    mean = total / max(sum(matrices[name].numel() for name in deviations), 1)
    for name, one in numbers.items():
        shared: _Shared = {
            "numbers": one,
            "sensitivities": known,
            "factors": fed[name],
            "log_deviation": deviations.get(name, mean),
            "mean_log_deviation": mean,
        }
        jobs[name] = one.job(_free(assignment, transforms.get(name), down_columns, **shared))
    coarsest = COARSEST
    if deviations:  # matrices of low sensitivity lower the mean, and the others must still reach their coarsest
        zeros_help = known or any(one.is_delta for one in numbers.values())
        coarsest = max(deviations.values()) - mean + (_BEYOND if zeros_help else math.log2(WIDEST))
        coarsest = max(coarsest, COARSEST) if zeros_help else coarsest
    return Jobs(assignment, {name: jobs[name] for name in assignment.tensors}, coarsest)


def _free(assignment: Assignment, transform: "Transform | None", down_columns: bool, **shared: Unpack[_Shared]) -> Free:
    """Return the job of a searched tensor: by the scheme that is steered, by its transform, or by a trellis."""
    if assignment.steered is not None:
        return Steered(**shared, scheme=assignment.steered)
    if transform is not None:
        return Transformed(**shared, transform=transform)
    return Searched(**shared, trellis=assignment.trellis, down_columns=down_columns)


def _log_deviation(numbers: Numbers, factors: Feedback) -> float | None:
    """Return log2 of the deviation and of the root of the sensitivity; None for a difference of zeros."""
    weights = np.log2(factors.row_weight)
    columns = float(np.log2(factors.column_weight).mean())
    # the sensitivity goes by the size of rows
    if not isinstance(factors.columns, BlockFeedback) and not numbers.is_delta:
        equal = np.ones(1) if factors.equal is None else factors.equal
        squares = np.concatenate([np.square(rows / equal).mean(axis=1) for rows in numbers.matrices()])
        typical = np.median((squares * factors.row_weight)[squares > 0]) if squares.any() else 0.0
        used = squares * factors.row_weight > _DEAD * typical
        if used.any():
            return float((np.log2(squares[used]) + weights[used] + columns + 2 * np.log2(equal).mean()).mean()) / 2
    spread = deviation(numbers.matrices()) or (0.0 if numbers.is_delta else 1.0)
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


def _transform(numbers: Numbers) -> "Transform | None":
    """Return the transform of a long kernel without calibration, if it saves far more than a trellis does."""
    weight = numbers.weight
    if numbers.is_delta or weight.ndim < 3 or prod(weight.shape[2:]) < LONG_KERNEL:
        return None
    if is_pruned(finite_rows(numbers.name, weight)):  # a transform keeps no zeros
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
