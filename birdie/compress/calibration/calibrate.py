"""Calibration of a module for `birdie.save`: on data, in memory or with files in place of it, or on made-up inputs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from birdie.compress.calibration.result import CalibrationResult, held_out_batches, listed, require_triple
from birdie.compress.calibration.sensitivity import Batch, Calibration, Loss
from birdie.compress.state import named_tensors
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.system.callbacks import Progress, reporting
from birdie.system.distributed import World
from birdie.system.outputs import Source, require_path


class Where(TypedDict, total=False):
    """Means of a calibration, each of which may be absent or None.

    Attributes:
        device: to compute on; None is the CPU.
        offload: folder for temporary files in place of memory; None: all is in memory.
        world: ranks that share the batches of a calibration with such files.
        progress: called with (done, total), in tokens, images or batches.
    """

    device: torch.device | None
    offload: Source | None
    world: World | None
    progress: Progress | None


@torch.inference_mode(False)  # the caller may be in it, and then nothing has gradients
def calibrate(
    module: nn.Module,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    *,
    example_inputs: Any = None,
    symmetries: bool = True,
    offload: bool | Source = False,
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
            dict, or a list or `DataLoader` of these, of whose batches up to 64 are taken. A dict is given as keyword
            arguments or whole, and of a loader's lists the inputs alone, as the module accepts it (the log says which).
        symmetries: sort units whose order is arbitrary, which saves bits; the function is unchanged.
        offload: keep activations and what is measured in temporary files, so that memory is that of one layer: in this
            folder, or in that of the system (True). Files then cannot be tuned.
        world: ranks that share the batches out, with `offload`; all call this with the same arguments.
        progress: True shows a progress bar on stderr or in the notebook; or a function, which is called with (done,
            total) in batches.

    Raises:
        ConfigError: arguments contradict one another, the loss does not depend on the weights, or inputs cannot be made
            up.
        DataError: there are no batches, or activations are not finite.
        WeightsError: a weight is not finite.
        OutputError: the folder cannot be written.
    """
    if not isinstance(offload, bool):
        require_path(offload)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the model is a {type(module).__name__}, not a module; a calibration runs it")
    if batches is not None and example_inputs is not None:
        raise ConfigError("example_inputs and calibration data are two sources of inputs; drop one of the two")
    if (batches is None) != (loss is None):
        raise ConfigError(
            "batches and loss belong together; give both, or example_inputs=batches for inputs without a loss"
        )
    if offload is False and world is not None and world.size > 1:
        raise ConfigError("ranks share a calibration by files; add offload=True")
    if batches is None or loss is None:
        if offload is not False:
            raise ConfigError("offload is for calibration data; give batches and a loss")
        from birdie.compress.calibration.synthetic import synthetic_calibration

        return synthetic_calibration(unwrapped(module), example_inputs, symmetries=symmetries)
    require_triple((module, batches, loss))
    batches = listed(batches)
    with reporting(progress, "calibrating", "batches") as update:
        return calibrate_module(
            named_tensors(unwrapped(module)),
            (module, batches, loss),
            [1] * len(batches),
            symmetries=symmetries,
            offload=offload,
            world=world,
            progress=update,
        )


def calibrate_module(
    state: Mapping[str, Tensor],
    calibration: Calibration,
    sizes: Sequence[int],
    *,
    symmetries: bool = True,
    device: torch.device | None = None,
    offload: bool | Source | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Calibrate a module on data.

    Args:
        state: tensors to compress, by the names of the module.
        calibration: the module, a list of batches, and the loss.
        sizes: of the batches, in units of the progress.
        symmetries: whether units may be permuted, which saves bits.
        device, offload, world, progress: see `Where`.
    """
    module, batches, loss = calibration
    used = sizes[: len(sizes) - held_out_batches(len(sizes))]

    def report(done: int) -> None:
        if progress is not None:
            progress(sum(used[:done]), sum(used))

    calibration = (module if device is None else module.to(device)), batches, loss
    if offload is None or offload is False:
        return CalibrationResult.of(state, calibration, symmetries=symmetries, progress=report)
    from birdie.compress.calibration.offload import calibrate_offloaded

    folder = None if offload is True else offload
    return calibrate_offloaded(state, calibration, folder=folder, symmetries=symmetries, world=world, progress=report)
