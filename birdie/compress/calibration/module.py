"""Calibration of a module on data: as a whole, or one block at a time in a folder."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult, held_out_batches
from birdie.compress.calibration.sensitivity import Calibration
from birdie.system.callbacks import Progress
from birdie.system.distributed import World
from birdie.system.outputs import Source


class Where(TypedDict, total=False):
    """Means of a calibration, each of which may be absent or None.

    Attributes:
        device: to compute on; None is the CPU.
        work: folder to calibrate in, one block of the model at a time; None: the complete model.
        world: ranks that share the batches of a blockwise calibration.
        progress: called with (done, total), in tokens, images or batches.
    """

    device: torch.device | None
    work: Source | None
    world: World | None
    progress: Progress | None


def calibrate_module(
    state: Mapping[str, Tensor],
    calibration: Calibration,
    sizes: Sequence[int],
    *,
    symmetries: bool = True,
    device: torch.device | None = None,
    work: Source | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Calibrate a module as a whole, or in a folder one block at a time.

    Args:
        state: tensors to compress, by the names of the module.
        calibration: the module, a list of batches, and the loss.
        sizes: of the batches, in units of the progress.
        symmetries: whether units may be permuted, which saves bits.
        device, work, world, progress: see `Where`.
    """
    module, batches, loss = calibration
    used = sizes[: len(sizes) - held_out_batches(len(sizes))]

    def report(done: int) -> None:
        if progress is not None:
            progress(sum(used[:done]), sum(used))

    calibration = module.to(device), batches, loss
    if work is None:
        return CalibrationResult.of(dict(state), calibration, symmetries=symmetries, progress=report)
    from birdie.compress.calibration.blockwise import calibrate_in_blocks

    return calibrate_in_blocks(state, calibration, folder=work, symmetries=symmetries, world=world, progress=report)
