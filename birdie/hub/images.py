"""Calibration of a Hugging Face folder of an image classifier on a folder of images; no labels are needed.

images ──image processor of the folder──► pixels ─┐
folder ──from_pretrained──► model in float32 ─────┴──► CalibrationResult, by the names of the tensors on disk
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.result import CalibrationResult
from birdie.errors import ConfigError, DataError
from birdie.hub.calibration import calibrate_module, load_model
from birdie.hub.loading import load_part
from birdie.hub.names_on_disk import NamesOnDisk
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.runtime.outputs import Source
from birdie.runtime.regular import files_below

IMAGES = 512  # of a larger folder, so many from all over it
_KINDS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
_BATCH = 16
_LEAST_BATCHES = 5  # one of them is held out
_LEAST = 2


def images_in(folder: Path) -> list[Path]:
    """Return the images of a folder and of the folders in it, at most `IMAGES`, in a fixed order that mixes them."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in files_below(folder) if path.suffix.lower() in _KINDS)
    chosen = np.unique(np.linspace(0, max(len(paths) - 1, 0), min(IMAGES, len(paths))).astype(int)).tolist()
    # permuted, so that the held-out batches, which are the last, come from all folders as well
    return [paths[chosen[index]] for index in np.random.default_rng(0).permutation(len(chosen))]


def calibrate_on_images(
    folder: Path,
    state: Mapping[str, Tensor],
    images: Sequence[Path],
    *,
    device: torch.device | None = None,
    work: Source | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Calibrate the image classifier of a folder, in float32, by the KL of its predictions.

    Args:
        folder: with configuration, image processor and weights.
        state: its tensors, by their names on disk.
        images: files; a fifth is held out.
        device, work, world: as in `birdie.hub.calibration.calibrate_folder`.
        progress: called with (done, total) in images.
    """
    if len(images) < _LEAST:
        raise DataError(f"{len(images)} images are too few to calibrate on; give hundreds")
    if find_spec("PIL") is None:
        raise ConfigError("calibration on images needs Pillow, which is not installed; pip install Pillow")
    processor = load_part(folder, "AutoImageProcessor", "image processor")
    pixels = [_pixels(processor, path) for path in images]
    model = load_model(folder, "AutoModelForImageClassification", "image classifier", blockwise=work is not None)
    count = max(-(-len(pixels) // _BATCH), min(_LEAST_BATCHES, len(pixels)))
    batches = list(torch.tensor_split(torch.stack(pixels), count))
    module = NamesOnDisk(model, state, folder)
    return calibrate_module(
        module, state, batches, class_loss, device=device, work=work, world=world, progress=progress
    )


def class_loss(module: nn.Module, pixels: Tensor) -> Tensor:
    """Return a cross-entropy of (images, 3, height, width), whose curvature does not depend on the labels."""
    weight = next(module.parameters())
    logits = module(pixels.to(weight.device, weight.dtype)).logits.float()
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="sum")


def _pixels(processor: Any, path: Path) -> Tensor:
    """Return the pixels of an image as the model takes them, (3, height, width)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels: Tensor = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not an image that can be read ({error}); remove it") from error
    return pixels
