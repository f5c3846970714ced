"""Saving of a model as one .birdie file.

    model ──► state ──► calibrated state ──► assignment ──► encoded tensors ──► payloads ──► model.birdie
              names,    sorted units,        scheme of      integers; for a     entropy
              ties      sensitivities        each tensor    target, by search   coded

The same tensors in any order give the same bytes, whatever the number of threads. The format is in docs/format.md.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from birdie.artifact import kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.calibrated import calibrated_files, require_blockwise
from birdie.artifact.container import KIND
from birdie.artifact.inspect import inspect
from birdie.artifact.resume import Resume
from birdie.artifact.state_dict import kept_beside
from birdie.artifact.summary import Summary
from birdie.artifact.writer import Meter, Writer, lossless_entries
from birdie.compress.calibration.result import CalibrationResult, require_triple
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.calibration.synthetic import closer, synthetic_calibration
from birdie.compress.rate.allocation import Hooks
from birdie.compress.rate.assignment import Schemes, assign
from birdie.compress.rate.copies import merged
from birdie.compress.rate.encoding import encode_state
from birdie.compress.rate.groups import grouped
from birdie.compress.rate.target import Target
from birdie.compress.scheme import Scheme
from birdie.compress.state import EncodedState, ModelState
from birdie.compress.wrappers import unwrapped, without_prefixes
from birdie.entropy.hints import Effort
from birdie.errors import ConfigError
from birdie.runtime.blas import one_thread
from birdie.runtime.callbacks import Progress, reporting
from birdie.runtime.distributed import World, run_on_main, share_out
from birdie.runtime.mapped import require_complete
from birdie.runtime.outputs import Source, require_output, require_path, require_writable
from birdie.runtime.parsing import whole_number

_ON_DISK = 1 << 26  # weights from which coded tensors are kept on disk
_COMPARED = 1_000_000  # weights up to which a file by made-up inputs is compared with one by assumptions alone
_ROUNDS = 4  # times that a budget search usually codes the model: only the progress bar relies on it


@torch.inference_mode(False)  # the caller may be in it, and then nothing has gradients
def save(
    model: nn.Module | Mapping[str, Tensor],
    path: Source | BytesIO,
    *,
    scheme: Schemes | None = None,
    budget: int | None = None,
    bits: float | None = None,
    quality: float | None = None,
    coder: Effort = "max",
    calibration: Calibration | CalibrationResult | Literal["synthetic"] | None = None,
    example_inputs: Any = None,
    symmetries: bool = True,
    refit: int = 0,
    blockwise: bool | Source = False,
    lossless: bool = False,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    tree: Any = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    world: World | None = None,
) -> Summary:
    """Compress `model` into one .birdie file.

    Args:
        model: a module or its state dict; never changed. Extra state and versions of modules are kept as well, and
            names are those without wrappers (torch.compile, DataParallel, AveragedModel, …). Weights that
            `birdie.spectral` wrapped are stored as they were trained, under plain names, unless a rule names them.
        path: the file to write, which appears complete or not at all, also in place of another .birdie file; or an
            empty `io.BytesIO`.
        scheme: how to store the matrices: a spec ("int6"), a `birdie.schemes` object, or (pattern, spec) rules of which
            the first that matches a name wins. Default: "feedback:bits=8", eight bits over the range of each row, with
            small tensors in 16 bits or lossless.
        budget: bytes the file may have; the precision of tensors without a rule is chosen so that the file lands just
            under it.
        bits: the same budget as bits per weight, everything included.
        quality: largest mean difference from the float model, measured on batches held out from calibration, which it
            needs. Losses of probabilities (cross-entropy, NLL, binary cross-entropy): the KL in nats per target (token,
            image, element). Losses of values (squared, absolute, Huber, margin): relative squared error of the
            predictions, Σ ‖decoded − float‖² / Σ ‖float − mean‖². Losses that call no function of
            `torch.nn.functional`: relative difference of the loss.
        coder: "max" for the smallest file, "fast" for the least time.
        calibration: (module, batches, loss): the module whose weights these are, tens of thousands of tokens or
            thousands of images in batches, and loss(module, batch) → any differentiable number, or a criterion such as
            `nn.CrossEntropyLoss()` with (inputs, targets) batches; at `F.cross_entropy` labels are not used.
            Quantization scales then follow the sensitivity of the loss; from few data they are combined with what the
            kinds of weights let expect. Or a `CalibrationResult`, for several files from one calibration. Or
            "synthetic": inputs are made up for the module, random tokens for a language model, noise for an image
            network; this and no calibration are compared on made-up inputs kept apart.
        example_inputs: inputs to calibrate a module on, by its outputs alone: a tensor, a tuple of arguments, a dict of
            keyword arguments, or a list of these.
        symmetries: with calibration, sort units whose order is arbitrary, which saves bits; the function is unchanged.
        refit: with calibration, number of Adam steps (one batch each; a few dozen pay) after each of eight parts of the
            model is encoded, which tune all that is not encoded yet; the result is kept if the KL on the held-out
            batches is lower.
        blockwise: calibrate one block of the module at a time and keep what is measured in files, so that memory is
            that of a block: in this folder, where a calibration that was stopped resumes, or in a temporary one beside
            the file (True). It excludes `refit`.
        lossless: keep every bit of every tensor.
        overwrite: replace a file of another kind, too; a link then stands for its file.
        metadata: JSON to store in the file.
        files: name → content of files to keep beside the tensors (configuration, tokenizer, license); they count.
        tree: how the tensors nest (birdie.artifact.pytree); birdie.artifact.repack passes it.
        progress: True shows a progress bar on stderr or in the notebook; or a function, which is called with (done,
            total) as tensors are coded.
        workers: threads; None uses every core. The bytes do not depend on it.
        world: ranks (`birdie.runtime.distributed`) that share the tensors out if there is no calibration, or a
            blockwise one, whose batches they share as well. All call this with the same arguments; rank 0 writes the
            file, and its bytes are those of one process, up to the rounding of sums over batches.

    Raises:
        ConfigError: settings contradict one another, or a spec or pattern is wrong.
        WeightsError: a tensor holds NaN or infinite values and is not kept losslessly, or cannot be stored at all.
        BudgetError: nothing fits the budget.
        OutputError: the file cannot be written, or something else is there.
    """
    target = Target(whole_number("budget", budget), bits, quality, lossless)
    workers = whole_number("workers", workers)
    made_up = calibration == "synthetic" or example_inputs is not None
    _require_arguments(path, scheme, coder, metadata, target, calibration, refit, blockwise)
    if made_up:
        _require_module(model, calibration, example_inputs, target)
    # Wrong metadata, specs and patterns raise before a folder is created and before any calibration.
    file_metadata.to_bytes(metadata, tree=tree)
    hidden = [kept_files.entry_of(files)] if files else []
    model = unwrapped(model)
    if isinstance(model, Mapping) and isinstance(calibration, CalibrationResult | tuple):
        model = _under_calibrated_names(model, calibration)
    state = ModelState.of(model)
    extra, about_state = kept_beside(model)
    assignment = assign(state, scheme, target)
    path = _require_target(path, overwrite)

    if made_up and isinstance(model, nn.Module):
        calibration = synthetic_calibration(model, example_inputs, symmetries=symmetries)
    assert not isinstance(calibration, str)
    world = world or World()
    share = None if world.size == 1 else partial(share_out, world)
    if share is not None and workers is None:
        workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with (
        reporting(progress, "compressing", "tensors") as update,
        calibrated_files(state, calibration, path, blockwise=blockwise, symmetries=symmetries, world=world) as (
            state,
            calibrated,
        ),
    ):
        # With data each copy has the precision that its own use needs.
        assignment = grouped(merged(assignment)) if calibrated is None else assign(state, scheme, target)
        fields = {
            "metadata": metadata,
            "budget": target.in_bytes(assignment.weights),
            "tree": tree,
            "files": kept_files.sizes_of(files or {}),
            "copies": file_metadata.copies_of(assignment.ties, assignment.copies),
            "state": about_state,
        }
        resume = None if calibrated is not None else _resume(path, assignment.weights, world)
        with one_thread(), resume or nullcontext(), ThreadPoolExecutor(workers or os.cpu_count()) as pool:

            def coded(done: float, total: float | None) -> None:
                require_complete()
                if update is not None:
                    update(done, total)

            hidden += lossless_entries(extra, pool, coder)
            meter = Meter(coded, _ROUNDS if target.searched and calibrated is not None else 1)
            meter.begin(len(assignment.tensors))
            writer = Writer(pool, coder, fields, meter, resume, hidden, assignment.groups)
            in_files = calibrated is None or calibrated.factors is not None
            recalled = None if resume is None else writer.recalled
            hooks = Hooks(writer.coded, writer.estimated, recalled, share) if in_files else None

            def encode(calibration: CalibrationResult | None) -> EncodedState:
                return encode_state(
                    assignment,
                    target,
                    writer.size,
                    rough=writer.estimate,
                    hooks=hooks,
                    calibration=calibration,
                    refit=refit,
                    plain=coder == "fast",
                    workers=workers,
                )

            encoded = encode(calibrated)
            is_guess = calibrated is not None and calibrated.synthetic and assignment.weights < _COMPARED
            if calibrated is not None and is_guess and target.searched and target.quality is None:
                encoded = closer(calibrated, encoded, encode(None))
            encoded = writer.collected(encoded, world)
            require_complete()
            run_on_main(world, torch.device("cpu"), lambda: writer.write(path, encoded))
            meter.finish()
        summary = world.broadcast(inspect(path) if world.is_main else Summary(str(path), 0, None, 0, (), {}))
        if calibrated is None:
            return summary
        summary = replace(summary, uncalibrated=tuple(calibrated.unreached))
        if calibrated.held_out is None:
            return summary
        return replace(summary, error=calibrated.divergence(encoded))


def _under_calibrated_names(
    model: Mapping[str, Tensor], calibration: Calibration | CalibrationResult
) -> Mapping[str, Tensor]:
    """Return a state dict without the prefixes of wrappers, if the calibrated module has other names than it."""
    known = calibration.state if isinstance(calibration, CalibrationResult) else unwrapped(calibration[0]).state_dict()
    if not all(isinstance(name, str) for name in model) or model.keys() <= known.keys():
        return model
    return without_prefixes(model)


def _resume(path: Source | BytesIO, weights: int, world: World) -> Resume | None:
    """Return where coded tensors are kept until the file is complete; None for memory."""
    return None if isinstance(path, BytesIO) or weights < _ON_DISK else Resume(Path(path), world.rank)


def _require_target(path: Source | BytesIO, overwrite: bool) -> Source | BytesIO:
    """Return the file to write if that is possible, before long work."""
    if isinstance(path, BytesIO):
        return path
    file = require_output(path, kind=KIND, overwrite=overwrite)
    require_writable(file.parent)
    return file


def _require_arguments(
    path: Any,
    scheme: Any,
    coder: Any,
    metadata: Any,
    target: Target,
    calibration: Any,
    refit: Any,
    blockwise: Any,
) -> None:
    """Check the types of the arguments and that they do not contradict one another; specs are parsed elsewhere."""
    if not isinstance(path, BytesIO):
        require_path(path)
    elif path.getbuffer().nbytes:
        raise ConfigError(f"the buffer holds {path.getbuffer().nbytes:,} bytes already; give an empty io.BytesIO")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata is a {type(metadata).__name__}; give a dict")
    if coder not in get_args(Effort):
        raise ConfigError(f"coder {coder!r} is unknown; choose max or fast")
    if target.lossless and (scheme is not None or calibration is not None):
        excluded = "scheme" if scheme is not None else "calibration"
        raise ConfigError(f"lossless keeps every bit, so it takes no {excluded}; drop one of the two")
    if target.quality is not None and (calibration is None or isinstance(calibration, str)):
        raise ConfigError("quality is measured on data; give calibration=(module, batches, loss), or a budget instead")
    if isinstance(calibration, str) and calibration != "synthetic":
        raise ConfigError(f"calibration {calibration!r} is unknown; give (module, batches, loss) or 'synthetic'")
    if calibration is not None and not isinstance(calibration, CalibrationResult | str):
        require_triple(calibration)
    if not isinstance(refit, int) or refit < 0 or (refit and calibration is None):
        raise ConfigError(f"refit={refit!r} is not a number of steps with calibration to take them on")
    require_blockwise(blockwise, calibration, refit)
    if scheme is None or _is_spec(scheme):
        return
    rules = list(scheme.items()) if isinstance(scheme, Mapping) else scheme
    for rule in rules if isinstance(rules, list | tuple) else [rules]:
        pair = isinstance(rule, list | tuple) and len(rule) == 2
        if not (pair and isinstance(rule[0], str) and _is_spec(rule[1])):
            raise ConfigError(f"scheme {rule!r} is neither spec nor rule; write 'int6' or [('blocks.*', 'int6')]")


def _require_module(model: Any, calibration: Any, example_inputs: Any, target: Target) -> None:
    """Raise ConfigError unless `model` is a module that may be calibrated on made-up inputs or on examples."""
    if not isinstance(model, nn.Module):
        raise ConfigError("made-up and example inputs are for a module; give the module instead of its state dict")
    if example_inputs is not None and calibration not in (None, "synthetic"):
        raise ConfigError("example_inputs and calibration data are two sources of inputs; drop one of the two")
    if target.lossless:
        raise ConfigError("lossless keeps every bit, so it takes no example_inputs; drop one of the two")


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, str | Scheme)
