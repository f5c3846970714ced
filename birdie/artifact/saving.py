"""Saving of a model as one .birdie file.

    model ──► state ──► calibrated state ──► assignment ──► encoded tensors ──► payloads ──► model.birdie
              names,    sorted units,        scheme of      integers; for a     entropy
              ties      sensitivities        each tensor    target, by search   coded

The same tensors give the same bytes, whatever the number of threads; in another order, the same but for a field of the
metadata. The format is in docs/format.md.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast

import torch
from torch import Tensor, nn

from birdie.artifact import kept_files
from birdie.artifact.base import Base
from birdie.artifact.coded_file import write_coded
from birdie.artifact.container import KIND
from birdie.artifact.content import Content
from birdie.artifact.inspection import inspect
from birdie.artifact.options import SaveOptions
from birdie.artifact.resume import Resume
from birdie.artifact.summary import Summary
from birdie.checkpoints.views import not_kept
from birdie.compress.calibration.result import CalibrationResult, calibrated_state
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.calibration.synthetic import synthetic_calibration
from birdie.compress.exact import Roles
from birdie.compress.rate.assignment import Assignment, assign
from birdie.compress.rate.control import Control
from birdie.compress.rate.groups import group_tiny_tensors, merge_copies
from birdie.compress.state import EncodedState
from birdie.compress.wrappers import unwrapped, without_prefixes
from birdie.delta.delta_job import relative
from birdie.delta.twins import twins
from birdie.entropy.hints import effort_for
from birdie.errors import ConfigError
from birdie.system.callbacks import reporting
from birdie.system.distributed import World, run_on_main
from birdie.system.file_objects import Output, is_writable, require_room, write_all
from birdie.system.keywords import keywords
from birdie.system.mapped import releasing, require_complete
from birdie.system.outputs import Source, require_output, require_writable

P = ParamSpec("P")
Model = nn.Module | Mapping[str, Tensor]

_ON_DISK = 1_000_000_000  # weights from which coded tensors are kept on disk


class Save(Protocol[P]):
    """Type of `save`: options are the fields of a dataclass."""

    def __call__(self, model: Model, path: Output, *args: P.args, **kwargs: P.kwargs) -> Summary: ...


def _takes(kind: Callable[P, SaveOptions]) -> Callable[[Callable[[Model, Output, SaveOptions], Summary]], Save[P]]:
    return keywords(kind)


@_takes(SaveOptions)
def save(model: Model, path: Output, options: SaveOptions) -> Summary:
    """Compress `model` into one .birdie file.

    Args:
        model: a module or its state dict; never changed. Extra state and versions of modules are kept as well, and
            names are those without wrappers (torch.compile, DataParallel, AveragedModel, …). Weights that
            `birdie.spectral` wrapped are stored as they were trained, under plain names, unless a rule names them.
        path: the file to write, which appears complete or not at all, also in place of another .birdie file; or an
            empty `io.BytesIO`; or another binary file object, at whose position all bytes are written at the end.

    Raises:
        ConfigError: options contradict one another, or a spec or pattern is wrong.
        WeightsError: a tensor holds NaN or infinite values and is not kept losslessly, or cannot be stored at all.
        BudgetError: nothing fits the budget.
        OutputError: the file cannot be written, or something else is there.
    """
    return write_model(model, path, options)


@torch.inference_mode(False)  # the caller may be in it, and then nothing has gradients
def write_model(
    model: Model,
    path: Output,
    options: SaveOptions | None = None,
    *,
    overwrite: bool | None = None,
    files: Mapping[str, bytes] | None = None,
    tree: Any = None,
    link: Mapping[str, Any] | None = None,
    onnx: Sequence[Any] | None = None,
    roles: Roles | None = None,
    check: Callable[[Path], None] | None = None,
    world: World | None = None,
) -> Summary:
    """Compress `model` into one .birdie file, as `save` does.

    Args:
        model, path, options: as for `save`.
        overwrite: replace a file of another kind, too; a link then stands for its file. None: the caller has no such
            option that an error could name.
        files: name → content of files to keep beside the tensors (configuration, tokenizer, license); they count.
        tree: how the tensors nest (birdie.checkpoints.pytree).
        link: facts about a link of a chain (birdie.artifact.links).
        onnx: where the tensors of an ONNX model lie in its files (birdie.checkpoints.onnx_file).
        roles: as of `ModelState.of`.
        check: called with the path of the complete file before it has its name; its error keeps it from that.
        world: ranks that share the tensors out, if there is no calibration or one in blocks. All call this with the
            same arguments; rank 0 writes the file, and its bytes are those of one process.
    """
    options = options or SaveOptions()
    target, calibration, world = options.target, options.calibration, world or World()
    model = unwrapped(model)
    if isinstance(model, Mapping) and isinstance(calibration, CalibrationResult | tuple | list):
        model = _under_calibrated_names(model, calibration)
    absence: Control | None = None
    if isinstance(calibration, str):
        _output(path, overwrite)  # refuses here, before long work
        calibration, absence = _on_made_up_inputs(model, options)
    if options.tune and isinstance(calibration, CalibrationResult):
        calibration.measured()  # raises here, before long work
    rebase = calibration is None and options.base is None and not target.lossless
    content = Content.of(model, options.metadata, files, tree, link, rebase=rebase, onnx=onnx, roles=roles)
    state = content.state
    assignment = assign(state, options.scheme, target, measured=calibration is not None)
    base = None if options.base is None else Base.open(options.base)
    parts, renamed = ({}, {}) if base is None else base.matching(assignment.tensors)
    if base is not None and not parts:
        base.close()
        raise ConfigError(f"no tensor of {base.where} has the name, the shape and the kind of one of the model's")
    about_base: dict[str, Any] | None = None if base is None else {"of": base.name, "names": renamed}
    if base is not None and link is None and onnx is None:  # whose other bytes are no files of their own
        theirs = base.kept()
        same = {name: data for name, data in content.files.items() if theirs.get(name) == data}
        content, about_base = content.without_files(same), {**(about_base or {}), **kept_files.of_base(same)}
    assignment = replace(assignment, bases=relative(parts))
    if calibration is None:  # with data each copy has the precision that its own use needs
        assignment = merge_copies(assignment)
        if target.lossless and base is None and link is None and (near := twins(assignment.tensors)):
            assignment = replace(
                assignment, bases=relative(Base.of("", assignment.tensors).pairs(near, assignment.tensors))
            )
            about_base = {"of": "", "names": near, "inside": True}
        assignment = group_tiny_tensors(assignment)
    effort = effort_for(options.effort, assignment.weights)
    beside = content.beside(assignment, effort, target.in_bytes(assignment.weights), about_base)
    destination = _output(path, overwrite)
    with (
        reporting(options.progress, "compressing", "tensors") as update,
        releasing((calibration.files or ()) if isinstance(calibration, CalibrationResult) else ()),
        nullcontext() if base is None else base.mapped(),
    ):
        if base is not None and isinstance(calibration, CalibrationResult):
            calibration = calibration.unsorted(state)
        state, known = calibrated_state(state, calibration, symmetries=base is None)
        if known is not None:
            assignment = replace(assignment, tensors=state.tensors)
        resuming = _resume(destination, world) if known is None and assignment.weights >= _ON_DISK else nullcontext()
        with resuming as resume:

            def write(encoded: EncodedState) -> None:
                if resume is not None and world.size > 1:
                    encoded = replace(encoded, tensors=resume.collect(world, encoded.tensors))
                require_complete()
                run_on_main(world, torch.device("cpu"), lambda: beside.write(destination, encoded, check))

            fitted = write_coded(
                assignment,
                target,
                known,
                beside,
                write,
                effort,
                tune=options.tuning,
                workers=options.workers or _threads(world),
                world=world,
                records=resume,
                progress=update,
            )
        file = destination.getvalue() if isinstance(destination, BytesIO) else destination
        summary = world.broadcast(inspect(file) if world.is_main else Summary(str(path), 0, None, 0, (), {}))
        if isinstance(file, bytes) and world.is_main:
            write_all(path, file)
        beside_values = not_kept(content.state.by_name) if target.lossless and tree is None and onnx is None else ()
        otherwise = _otherwise(summary, assignment)
        summary = replace(summary, effort=effort, otherwise=otherwise, not_kept=beside_values, control=absence)
        if known is None:
            return summary
        error = fitted.divergence
        if error is None and known.held_out is not None:
            error = known.divergence(fitted.encoded)
        return replace(
            summary,
            uncalibrated=tuple(known.unreached),
            error=error,
            untuned=fitted.untuned,
            nothing_to_tune=fitted.nothing_to_tune,
            fuller=fitted.fuller,
            control=fitted.control,
        )


def _on_made_up_inputs(model: Model, options: SaveOptions) -> tuple[CalibrationResult | None, Control | None]:
    """Calibrate a module on inputs that are made up; or return None, and why a file is not calibrated."""
    if not isinstance(model, nn.Module):
        raise ConfigError("made-up inputs are for a module; give the module instead of its state dict")
    try:
        return synthetic_calibration(model), None
    except ConfigError as error:
        if options.tune:
            raise
        logging.getLogger("birdie").warning("not calibrated: %s", error)
        return None, Control("assumed", {}, f"not calibrated: {error}")


def _otherwise(summary: Summary, assignment: Assignment) -> tuple[str, ...]:
    """Return the names of tensors that were to be quantized and are not; none if a budget has room for every bit."""
    meant = [row for row in summary.tensors if row.name in assignment.meant]
    kept = tuple(row.name for row in meant if row.scheme in ("lossless", "fp16", "bf16"))
    return () if assignment.free and len(kept) == len(meant) else kept


def _threads(world: World) -> int | None:
    """Return the threads of a rank: its share of those of its machine."""
    return None if world.size == 1 else max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _under_calibrated_names(
    model: Mapping[str, Tensor], calibration: Calibration | CalibrationResult
) -> Mapping[str, Tensor]:
    """Return a state dict without the prefixes of wrappers, if the calibrated module has other names than it."""
    known = calibration.state if isinstance(calibration, CalibrationResult) else unwrapped(calibration[0]).state_dict()
    if not all(isinstance(name, str) for name in model) or model.keys() <= known.keys():
        return model
    return without_prefixes(model)


def _resume(path: Source | BytesIO, world: World) -> AbstractContextManager[Resume | None]:
    """Return where finished work is kept until the file is complete; None for memory."""
    return nullcontext() if isinstance(path, BytesIO) else Resume(Path(path), world.rank)


def _output(path: Output, overwrite: bool | None) -> Source | BytesIO:
    """Return the file to write if that is possible, before long work; memory for what goes to a file object."""
    if is_writable(path):
        require_room(path)
        return BytesIO()
    file = require_output(cast(Source, path), kind=KIND, overwrite=overwrite)
    require_writable(file.parent)
    return file
