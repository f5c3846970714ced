"""Calibrations in files while a file is written: from one block of the module at a time, or from an earlier call.

calibration=(module, batches, loss), blockwise=… ──► BlockwiseResult ──► tensors are coded as soon as they are
                                                                         encoded, and decoded one by one
"""

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from birdie.artifact.writer import CodedTensor
from birdie.compress import registry
from birdie.compress.calibration.blockwise import (
    BlockwiseResult,
    calibrate_in_blocks,
    refit_error,
    work_folder,
)
from birdie.compress.calibration.result import CalibrationResult, calibrated_state, held_out_batches
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.state import ModelState, named_tensors
from birdie.compress.wrappers import unwrapped
from birdie.entropy import coder as entropy
from birdie.errors import ConfigError
from birdie.runtime.callbacks import Progress, reporting
from birdie.runtime.distributed import World
from birdie.runtime.mapped import releasing
from birdie.runtime.outputs import Source, require_path


@torch.inference_mode(False)  # the caller may be in it, and then nothing has gradients
def calibrate(
    module: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    blockwise: bool | Source = False,
    blocks: Collection[str] | None = None,
    symmetries: bool = True,
    world: World | None = None,
    progress: Progress | bool | None = None,
) -> CalibrationResult:
    """Calibrate a module for several files: pass the result to `birdie.save` as its `calibration`.

    Args:
        module: whose weights will be compressed; it is neither trained nor changed.
        batches: tens of thousands of tokens or thousands of images; a fifth is held out to measure files on.
        loss: (module, batch) → any differentiable number, or a criterion such as `nn.CrossEntropyLoss()` with
            (inputs, targets) batches; at `F.cross_entropy` labels are not used.
        blockwise: calibrate one block of the module at a time and keep what is measured in files, so that memory is
            that of a block: in this folder, where a calibration that was stopped resumes, or in a temporary one (True).
        blocks: names of the modules to take as blocks, with `blockwise`; None: the members of `nn.ModuleList`,
            `nn.Sequential` and `nn.ModuleDict`.
        symmetries: whether units whose order is arbitrary may be sorted, which saves bits.
        world: ranks that share the batches out, with `blockwise`; all call this with the same arguments.
        progress: True shows a progress bar on stderr or in the notebook; or a function, which is called with (done,
            total) in batches.

    Raises:
        ConfigError: the loss does not depend on the weights; with `blockwise`, a block cannot be run alone, or the
            folder is of another calibration.
        DataError: there are no batches, or activations are not finite.
        WeightsError: a weight is not finite.
        OutputError: the folder cannot be written.
    """
    batches = batches if isinstance(batches, Sequence) else list(batches)
    state, calibration = named_tensors(unwrapped(module)), (module, batches, loss)
    if blockwise is False and (blocks is not None or (world is not None and world.size > 1)):
        raise ConfigError("blocks and ranks are for a calibration one block at a time; add blockwise=True")
    folder = None if isinstance(blockwise, bool) else blockwise
    with reporting(progress, "calibrating", "batches") as update:

        def report(done: int) -> None:
            if update is not None:
                update(done, len(batches) - held_out_batches(len(batches)))

        if blockwise is False:
            return CalibrationResult.of(state, calibration, symmetries=symmetries, progress=report)
        return calibrate_in_blocks(
            state, calibration, folder=folder, blocks=blocks, symmetries=symmetries, world=world, progress=report
        )


@contextmanager
def calibrated_files(
    state: ModelState,
    calibration: Any,
    path: Source | BytesIO,
    *,
    blockwise: bool | Source,
    symmetries: bool,
    world: World | None,
) -> Iterator[tuple[ModelState, CalibrationResult | None]]:
    """Yield the state in its calibrated order and the calibration result, whose temporary files are removed afterwards.

    Args:
        state: the tensors to compress.
        calibration: data, a result, or None.
        path: of the file, beside which temporary files are; those of a file in memory are in the temporary folder.
        blockwise: whether data are calibrated on one block at a time, or the folder for it.
        symmetries, world: as in `calibrate`.
    """
    beside = Path(tempfile.gettempdir(), "model") if isinstance(path, BytesIO) else path
    with work_folder(beside, blockwise, world) as folder:
        if folder is not None:
            calibration = calibrate_in_blocks(
                state.by_name, calibration, folder=folder, symmetries=symmetries, world=world
            )
        if isinstance(calibration, BlockwiseResult):
            calibration = replace(calibration, opened=opened)
        with releasing(calibration.files if isinstance(calibration, BlockwiseResult) else ()):
            yield calibrated_state(state, calibration, symmetries=symmetries)


def opened(encoded: Encoded) -> Encoded:
    """Return an encoded tensor with its integers, decoded if they are coded already."""
    if isinstance(encoded, Blocks):
        return replace(encoded, parts=tuple(map(opened, encoded.parts)))
    if not isinstance(encoded, CodedTensor):
        return encoded
    layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    streams = tuple(
        entropy.decode(one.coder, one.payload, kind.rows, kind.columns, kind.hints, kind.dtype)
        for one, kind in zip(encoded.coded, layout, strict=True)
    )
    return Encoded(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, streams)


def require_blockwise(blockwise: Any, calibration: Any, refit: int) -> None:
    """Check the argument `blockwise` of `birdie.save`, and that no refit follows a calibration in files."""
    if not isinstance(blockwise, bool):
        require_path(blockwise)
    if blockwise is not False and not isinstance(calibration, tuple | list):
        raise ConfigError("blockwise is for calibration data; give calibration=(module, batches, loss)")
    if refit and (blockwise is not False or isinstance(calibration, BlockwiseResult)):
        raise refit_error()
