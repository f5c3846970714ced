"""The last stages of all that write a .birdie file: tensors coded for a target, and the file that holds them.

assignment, calibration ──► Encoder ──► fit ──► coded tensors ──► Beside ──► model.birdie
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits
from torch import nn

from birdie.artifact.metadata import copies_of
from birdie.artifact.write import Beside
from birdie.checkpoints.stored_order import order_field
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.assignment import Assignment, Schemes, assign
from birdie.compress.rate.encoding import Encoder, Meter, Records
from birdie.compress.rate.fit import fit
from birdie.compress.rate.groups import group_tiny_tensors, merge_copies
from birdie.compress.rate.search import Fit
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState, ModelState, keys_of
from birdie.entropy.hints import Effort
from birdie.system.callbacks import Progress
from birdie.system.distributed import World

_ROUNDS = 4  # times that a budget search usually codes the model: only the progress relies on it


def write_parameters(
    model: nn.Module,
    path: Path,
    rules: Schemes,
    calibration: CalibrationResult | None = None,
    *,
    budget: int | None = None,
    effort: Effort = "max",
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the tensors of a module as one file, with nothing beside them but metadata; return its bytes.

    This is `birdie.save` for who has checked all of it, and can be packed into a script.

    Args:
        rules: (pattern, spec) of tensors.
        calibration: of the module.
        budget: maximum bytes of the file; tensors that the rules name keep their schemes.
        effort: of the entropy coder.
        progress: called with (done, total).
    """
    state, target = ModelState.of(model, rebase=calibration is None), Target(budget=budget)
    assignment = assign(state, rules, target, measured=calibration is not None)
    if calibration is None:
        assignment = group_tiny_tensors(merge_copies(assignment))
    else:
        assignment = replace(assignment, tensors=calibration.ordered(state).tensors)
    copies = copies_of(assignment.ties, assignment.copies)
    about = {"metadata": metadata, "budget": budget, "copies": copies, "order": order_field(keys_of(model))}
    beside = Beside(about, groups=assignment.groups)
    write_coded(
        assignment, target, calibration, beside, lambda state: beside.write(path, state), effort, progress=progress
    )
    return path.stat().st_size


def write_coded(
    assignment: Assignment,
    target: Target,
    calibration: CalibrationResult | None,
    beside: Beside,
    write: Callable[[EncodedState], None],
    effort: Effort,
    *,
    tune: float = 0.0,
    workers: int | None = None,
    world: World | None = None,
    records: Records | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Code tensors so that their file meets a target, write it, and return how it was met.

    Args:
        assignment: of the tensors, which are in the order of the calibration.
        beside: what the file has beside them, which its size includes.
        write: writes the file that holds these tensors.
        tune: as of `fit`.
        workers, world, records: as of `Encoder`; ranks do not share out what is decoded to measure it.
        progress: called with (done, total).
    """
    in_memory = calibration is not None and calibration.factors is None
    encoder = Encoder(
        effort,
        beside.size,
        workers,
        keeps_integers=in_memory,
        world=World() if in_memory or world is None else world,
        records=records,
        meter=Meter(progress, _ROUNDS if target.searched and calibration is not None else 1),
    )
    # BLAS hands small products to threads that go on spinning between them: more processor time than everything
    # else takes.
    with threadpool_limits(1, user_api="blas"):
        encoder.meter.begin(len(assignment.tensors))
        fitted = fit(assignment, target, encoder, calibration, tune=tune)
        write(fitted.encoded)
    encoder.meter.finish()
    return fitted
