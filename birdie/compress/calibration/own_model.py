"""Calibration of a module of the user's own, for a checkpoint of it: its code builds the module and loads the data.

make() ──► module ◄── tensors of the checkpoint
batches: an iterable, a loader, a file of inputs, ─┬─ with a loss ──► gradients of the loss
         or a folder of images                     └─ without ──────► the outputs alone
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Unpack

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from birdie.compress.calibration.calibrate import Where, calibrate_module
from birdie.compress.calibration.image_files import (
    BATCH_IMAGES,
    CHANNELS,
    batched,
    pixels_of,
    read_image,
    require_images,
)
from birdie.compress.calibration.result import CalibrationResult, listed
from birdie.compress.calibration.sensitivity import Loss
from birdie.compress.calibration.synthetic import (
    accepts_images,
    batches_of,
    calibrate_on_inputs,
    image_channels,
    image_edge,
)
from birdie.compress.filling import fill
from birdie.errors import ConfigError, DataError

SUFFIXES = (".npz", ".npy", ".safetensors", ".pt", ".pth")
"""Suffixes of files of inputs."""
_ROWS = 32  # of a batch that is cut from a file
_LISTED = 4  # arrays in an error
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


def inputs_in(path: Path) -> tuple[list[Any], str]:
    """Return the inputs in a file as batches, an array each, or several; and a sentence on how many they are.

    Args:
        path: .npy, or .npz, .safetensors and .pt (what torch.save writes) of one array or of several of as many rows,
            which are a dict of a batch, or a list if they have no names; float64 becomes float32.

    Raises:
        DataError: the file is damaged, or its arrays have not as many rows as one another.
    """
    try:
        arrays = {
            name: torch.as_tensor(np.array(np.atleast_1d(value)[: MOST_ROWS + 1]))
            for name, value in _arrays(path).items()
        }
    except (OSError, ValueError, TypeError, IndexError, KeyError, RuntimeError, UnpicklingError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"{path} holds no arrays of numbers ({reason}); save inputs, one a row, as .npz") from error
    if len({len(array) for array in arrays.values()}) != 1:
        shapes = [f"{name} {tuple(array.shape)}" for name, array in arrays.items()]
        text = ", ".join([*shapes[:_LISTED], *([f"{len(shapes) - _LISTED} more"] if len(shapes) > _LISTED else [])])
        raise DataError(f"the arrays in {path} have not as many rows as one another: {text or 'there are none'}")
    arrays = {name: array.float() if array.dtype == torch.float64 else array for name, array in arrays.items()}
    rows = len(next(iter(arrays.values())))
    note = f"calibrated on {rows:,} rows of {path}"
    if rows > MOST_ROWS:
        rows, note = MOST_ROWS, f"calibrated on the first {MOST_ROWS:,} rows of {path}; the others are left out"
    arrays = {name: array[:rows] for name, array in arrays.items()}
    starts = range(0, rows, _ROWS)
    parts = [{name: array[start : start + _ROWS] for name, array in arrays.items()} for start in starts]
    if len(arrays) == 1:
        return [next(iter(part.values())) for part in parts], note
    if all(isinstance(name, str) for name in arrays):
        return list(parts), note
    return [list(part.values()) for part in parts], note


def images_for(
    module: nn.Module, folder: Path, paths: Sequence[Path], size: tuple[int, int] | None = None
) -> tuple[list[Tensor], str]:
    """Return images as batches for a module, and a sentence on how they were made.

    Channels are those of its first convolution. Values are 0 to 1: nothing tells which ones it was trained on.

    Args:
        folder: of the images, for messages.
        paths: of the images.
        size: height and width; None: that of the images if all have the same and the module accepts it, else the only
            one that the module accepts.

    Raises:
        ConfigError: the size is not known, or Pillow is not installed.
        DataError: an image cannot be decoded, or they are too few.
    """
    require_images(paths)
    shapes = {read_image(path, lambda image: (image.height, image.width, len(image.getbands()))) for path in paths}
    sizes = {shape[:2] for shape in shapes}
    channels = image_channels(module) or (1 if max(shape[2] for shape in shapes) < 3 else 3)
    if channels not in CHANNELS:
        raise ConfigError(
            f"{type(module).__name__} takes {channels} channels, which no image has; return inputs from a function, "
            "--data data.py:batches"
        )
    if size is None:
        size = _size_for(module, folder, channels, sizes)
    height, width = size
    resized = "" if sizes == {size} else ", resized"
    note = (
        f"calibrated on {len(paths):,} images of {folder} as {channels}×{height}×{width}{resized}, values 0 to 1; if "
        "the model was trained on others (normalized, cropped), write a function for them: --data data.py:batches"
    )
    return batched(pixels_of(paths, channels, size), BATCH_IMAGES), note


def _size_for(module: nn.Module, folder: Path, channels: int, sizes: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Return the size of images in a folder for a module: their own, or the only one that it accepts."""
    common = next(iter(sizes)) if len(sizes) == 1 else None
    if common is not None and accepts_images(module, channels, common):
        return common
    edge = image_edge(module, channels)
    if edge is not None and not accepts_images(module, channels, (2 * edge, 2 * edge)):
        return edge, edge
    kinds = f"{len(sizes)} sizes" if common is None else f"{common[0]}×{common[1]} pixels"
    takes = "does not accept images of usual sizes" if edge is None else "accepts images of several sizes"
    raise ConfigError(
        f"the images in {folder} have {kinds}, and {type(module).__name__} {takes}; add --image-size HEIGHTxWIDTH as "
        "in training, or a function that returns inputs, --data data.py:batches"
    )


def _arrays(path: Path) -> Mapping[Any, Any]:
    """Return the arrays in a file by their names, or by their positions."""
    if path.suffix == ".safetensors":
        return {name: tensor.numpy() for name, tensor in load_file(path).items()}
    if path.suffix in (".pt", ".pth"):
        value = torch.load(path, map_location="cpu", weights_only=True)
        values = (
            value if isinstance(value, Mapping) else dict(enumerate([value] if isinstance(value, Tensor) else value))
        )
        return {name: tensor.detach().numpy() for name, tensor in values.items()}
    loaded = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    return {"inputs": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
