"""Calibration of a module of the user's own, for a checkpoint of it: its code builds the module and loads the data.

make() ──► module ◄── tensors of the checkpoint
batches: an iterable, a loader, or a file of inputs ─┬─ with a loss ──► gradients of the loss
                                                     └─ without ──────► the outputs alone
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from birdie.compress.calibration.calibrate import Where, calibrate_module
from birdie.compress.calibration.result import CalibrationResult, listed
from birdie.compress.calibration.sensitivity import Loss
from birdie.compress.calibration.synthetic import batches_of, calibrate_on_inputs
from birdie.compress.filling import fill
from birdie.errors import ConfigError, DataError

SUFFIXES = (".npz", ".npy", ".safetensors")
"""Suffixes of files of inputs."""
_ROWS = 32  # of a batch that is cut from a file
MOST_ROWS = 4096
"""Rows that are read of a file: more tell little."""


def calibrate_own(
    module: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    state: Mapping[str, Tensor],
    source: str,
    **where: Unpack[Where],
) -> CalibrationResult:
    """Calibrate a module on batches, with the weights of a checkpoint.

    Args:
        module: takes the weights.
        batches: for the loss; without one, inputs of the module, as `example_inputs` of `birdie.calibrate`.
        loss: (module, batch) → a differentiable number, or a criterion; None: outputs are compared.
        state: tensors of the checkpoint, whose names the module has.
        source: of them, for errors.
        where: see `Where`.

    Raises:
        ConfigError: the module is none, or does not accept the inputs; or an offloaded calibration has no loss.
        WeightsError: names or shapes of the checkpoint are not those of the module.
        DataError: there are no batches.
    """
    device, progress = where.get("device"), where.get("progress")
    fill(module, state, source)
    module = module if device is None else module.to(device)
    if loss is not None:
        samples = listed(batches)
        return calibrate_module(state, (module, samples, loss), [1] * len(samples), **where)
    if where.get("offload") is not None:
        raise ConfigError("--offload is for a calibration with a loss; add --loss FILE.py:NAME, or drop it")
    # a pair is inputs and labels, as of a loader, and not two arguments
    inputs = batches_of(module, [list(batch) if isinstance(batch, tuple) else batch for batch in listed(batches)])
    return calibrate_on_inputs(
        module,
        inputs,
        made_up=False,
        progress=None if progress is None else lambda done: progress(done, len(inputs)),
    )


def inputs_in(path: Path) -> list[Any]:
    """Return the inputs in a file as batches: an array each, or a dict of those that the file names.

    Args:
        path: .npy, or .npz and .safetensors of one array or of several of as many rows; float64 becomes float32.

    Raises:
        DataError: the file is damaged, or its arrays have not as many rows as one another.
    """
    try:
        arrays = {name: torch.as_tensor(np.array(value[:MOST_ROWS])) for name, value in _arrays(path).items()}
    except (OSError, ValueError, TypeError, IndexError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} holds no arrays of numbers ({reason}); save inputs, one a row, as .npz") from error
    if len({len(array) for array in arrays.values()}) != 1:
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        raise DataError(f"the arrays in {path} have not as many rows as one another: {shapes or 'there are none'}")
    arrays = {name: array.float() if array.dtype == torch.float64 else array for name, array in arrays.items()}
    starts = range(0, len(next(iter(arrays.values()))), _ROWS)
    parts = [{name: array[start : start + _ROWS] for name, array in arrays.items()} for start in starts]
    return [next(iter(part.values())) for part in parts] if len(arrays) == 1 else list(parts)


def _arrays(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        return {name: tensor.numpy() for name, tensor in load_file(path).items()}
    loaded = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    return {"inputs": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
