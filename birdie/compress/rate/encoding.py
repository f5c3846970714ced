"""Encoding of all tensors of a file: by the assigned schemes, or by a search for the target.

assignment ─► allocation ─► search for the target ─► checked ─► Encoded ──► the better of both ─► Encoded
     ▲                                                             │                 ▲
     └── part by part, the rest tuned to it ◄───────────── refit ──┴─────────────────┘
"""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.allocation import Allocation, Hooks, assignments
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.budget import Estimate, Fit, Size, fit_budget, fit_quality
from birdie.compress.rate.parts import refit_by_parts
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError

_REFITTED = 2**0.06  # with refit a quality is met with scales larger by this factor, about
_MENTIONED = 10  # exact tensors are named in a budget's error if they take this fraction (1/10) of it
_COARSER = 1 / 32  # octaves between a file and the neighbor it is compared with: a thirtieth of a bit a weight


def encode_state(
    assignment: Assignment,
    target: Target,
    size: Size,
    *,
    rough: Estimate | None = None,
    calibration: CalibrationResult | None = None,
    plain: bool = False,
    hooks: Hooks | None = None,
    workers: int | None = None,
) -> EncodedState:
    """Encode every tensor of `assignment` so that the file meets `target`.

    Args:
        assignment: settled schemes, and the matrices that the search may coarsen.
        target: byte budget, quality, or nothing to search for.
        size: bytes of the file that holds an encoded state.
        rough: fast estimate of `size`, for the beginning of a search.
        calibration: of the model.
        plain: whether files must load fast: paths of trellises run down the columns only.
        hooks: what becomes of encoded tensors, and which process encodes them; without calibration, or with a
            blockwise one.
        workers: threads; None uses every core.
    """
    budget = target.in_bytes(assignment.weights)

    def search(calibration: CalibrationResult | None) -> Searched:
        sensitivities = {} if calibration is None else calibration.sensitivities
        factors = None if calibration is None else calibration.factors

        def allocate(assignment: Assignment) -> Allocation:
            return Allocation(
                assignment, sensitivities, plain=plain, workers=workers, hooks=hooks or Hooks(), factors=factors
            )

        *preferred, last = assignments(assignment, budget)
        for option in preferred:
            allocation = allocate(option)
            with suppress(BudgetError):
                return Searched(allocation, fit_budget(allocation, size, budget or 0, rough))
        allocation = allocate(last)
        if target.quality is not None and calibration is not None:
            return Searched(allocation, fit_quality(allocation, size, target.quality, calibration.divergence))
        if budget is None:
            return Searched(allocation, Fit(allocation.encode_settled(), 0, None, 0))
        try:
            return Searched(allocation, fit_budget(allocation, size, budget, rough))
        except BudgetError as error:
            raise BudgetError(f"{error}{exact_share(allocation, size, budget)}") from error

    def finish(allocation: Allocation, calibration: CalibrationResult, steps: int, sigma: float) -> EncodedState:
        """Encode what `refit_by_parts` leaves."""
        if budget is not None:
            return fit_budget(allocation, size, budget, start=sigma).encoded
        if target.quality is not None:
            start = math.log2(sigma)
            return fit_quality(allocation, size, target.quality, calibration.divergence, start=start).encoded
        encoded = allocation.encode_settled()
        small = [name for name, tensor in encoded.tensors.items() if tensor.scheme == "cast"]
        tuned = calibration.refitted(encoded.decode(workers), small, steps)
        fixed = {name: tensor for name, tensor in encoded.tensors.items() if name not in tuned}
        return allocation.continued(fixed, tuned).encode_settled()

    searched = search(calibration)
    if calibration is None:
        return searched.fit.encoded
    encoded = checked(searched, calibration, size) if budget is not None else searched.fit.encoded
    # With a quality as the target both results meet it, so the smaller file wins; else the lower KL.
    loss = calibration.divergence if target.quality is None else size
    if calibration.refit and (searched.fit.sigma is not None or not target.searched):
        sigma = searched.fit.sigma or 1.0
        coarser = 1.0 if target.quality is None else _REFITTED
        with suppress(BudgetError):
            result, steps = calibration, calibration.refit
            refitted = refit_by_parts(
                searched.allocation,
                math.log2(sigma * coarser),
                result,
                steps,
                lambda rest: finish(rest, result, steps, sigma * coarser),
            )
            encoded = min((encoded, refitted), key=loss)
    return encoded


def exact_share(allocation: Allocation, size: Size, budget: int) -> str:
    """Return the end of an error: bytes of the tensors that stay exact and the largest of them, if they take much."""
    settled, exact, empty = allocation.settled().tensors, allocation.assignment.exact, size(EncodedState({}, {}))
    sizes = {name: size(EncodedState({name: settled[name]}, {})) - empty for name in exact}
    if sum(sizes.values()) * _MENTIONED < budget:
        return ""
    largest = max(sizes, key=lambda name: sizes[name])
    groups = allocation.assignment.groups
    first = groups[largest].names[0] if largest in groups else largest
    others = f" and {len(groups[largest].names) - 1} others like it" if largest in groups else ""
    return (
        f"; {sum(sizes.values()):,} bytes are of tensors that stay exact, the largest is {first!r}{others} with "
        f"{sizes[largest]:,} bytes: a rule of its full name may store it otherwise"
    )


@dataclass(frozen=True, slots=True)
class Searched:
    """Result of a search, and the allocation it was found with."""

    allocation: Allocation
    fit: Fit


def checked(searched: Searched, calibration: CalibrationResult, size: Size) -> EncodedState:
    """Return the encoding that the search found, or a slightly coarser one if that is closer to the float model.

    Rounding errors add up by chance. In small networks they can make a file worse than a smaller one, which nobody
    would notice; with calibration it is measured on the held-out batches, and logged.

    Args:
        searched: result of the search.
        calibration: of the model.
        size: bytes of the file; one that is larger than what was found may be over the budget.
    """
    fit = searched.fit
    if calibration.held_out is None or fit.sigma is None:
        return fit.encoded
    exponent = math.log2(fit.sigma) + _COARSER
    if exponent > searched.allocation.coarsest:
        return fit.encoded
    coarser = searched.allocation.encode(exponent)
    errors = calibration.divergence(fit.encoded), calibration.divergence(coarser)
    if errors[0] <= errors[1] or size(coarser) > fit.bytes:
        return fit.encoded
    logging.getLogger("birdie").info(
        "error %.3g on held-out inputs is out of line: a slightly smaller file has %.3g and is kept", *errors
    )
    return coarser
