"""Calibration of a module for `birdie.save`: on data, in memory or one block at a time, or on inputs without data."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from birdie.compress.calibration.blockwise import calibrate_in_blocks
from birdie.compress.calibration.result import CalibrationResult, held_out_batches, listed, require_triple
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.calibration.synthetic import synthetic_calibration
from birdie.compress.state import named_tensors
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.system.callbacks import Progress, reporting
from birdie.system.distributed import World
from birdie.system.outputs import Source, require_path


@torch.inference_mode(False)  # the caller may be in it, and then nothing has gradients
def calibrate(
    module: nn.Module,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    *,
    example_inputs: Any = None,
    symmetries: bool = True,
    blockwise: bool | Source = False,
    blocks: Collection[str] | None = None,
    world: World | None = None,
    progress: Progress | bool | None = None,
) -> CalibrationResult:
    """Calibrate a module: pass the result to `birdie.save` as its `calibration`, for one file or several.

    Args:
        module: whose weights will be compressed; it is neither trained nor changed.
        batches: tens of thousands of tokens or thousands of images; a fifth is held out to measure files on. From few
            data, sensitivities are combined with what the kinds of weights let expect. None: without data, on
            `example_inputs` or on inputs that are made up, random tokens for a language model and noise for an image
            network.
        loss: (module, batch) → any differentiable number, or a criterion such as `nn.CrossEntropyLoss()` with
            (inputs, targets) batches; at `F.cross_entropy` labels are not used.
        example_inputs: inputs to calibrate on by the outputs alone, without a loss: a tensor, a tuple of arguments, a
            dict of keyword arguments, or a list of these.
        symmetries: sort units whose order is arbitrary, which saves bits; the function is unchanged.
        blockwise: calibrate one block of the module at a time and keep what is measured in files, so that memory is
            that of a block: in this folder, where a calibration that was stopped resumes, or in a temporary one (True).
            Files then cannot be tuned.
        blocks: names of the modules to take as blocks, with `blockwise`; None: the members of `nn.ModuleList`,
            `nn.Sequential` and `nn.ModuleDict`.
        world: ranks that share the batches out, with `blockwise`; all call this with the same arguments.
        progress: True shows a progress bar on stderr or in the notebook; or a function, which is called with (done,
            total) in batches.

    Raises:
        ConfigError: arguments contradict one another, the loss does not depend on the weights, or inputs cannot be made
            up; with `blockwise`, a block cannot be run alone, or the folder is of another calibration.
        DataError: there are no batches, or activations are not finite.
        WeightsError: a weight is not finite.
        OutputError: the folder cannot be written.
    """
    if not isinstance(blockwise, bool):
        require_path(blockwise)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the model is a {type(module).__name__}, not a module; a calibration runs it")
    if batches is not None and example_inputs is not None:
        raise ConfigError("example_inputs and calibration data are two sources of inputs; drop one of the two")
    if (batches is None) != (loss is None):
        raise ConfigError("batches and loss belong together; give both, or neither for inputs without data")
    if blockwise is False and (blocks is not None or (world is not None and world.size > 1)):
        raise ConfigError("blocks and ranks are for a calibration one block at a time; add blockwise=True")
    if batches is None or loss is None:
        if blockwise is not False:
            raise ConfigError("blockwise is for calibration data; give batches and a loss")
        return synthetic_calibration(unwrapped(module), example_inputs, symmetries=symmetries)
    require_triple((module, batches, loss))
    batches = listed(batches)
    state, calibration = named_tensors(unwrapped(module)), (module, batches, loss)
    with reporting(progress, "calibrating", "batches") as update:

        def report(done: int) -> None:
            if update is not None:
                update(done, len(batches) - held_out_batches(len(batches)))

        if blockwise is False:
            return CalibrationResult.of(state, calibration, symmetries=symmetries, progress=report)
        return calibrate_in_blocks(
            state,
            calibration,
            folder=None if isinstance(blockwise, bool) else blockwise,
            blocks=blocks,
            symmetries=symmetries,
            world=world,
            progress=report,
        )
