"""Images in a folder: those of them that a calibration takes, and their pixels."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from birdie.errors import ConfigError, DataError
from birdie.system.regular import files_below

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = 512  # of a larger folder, so many from all over it
BATCH_IMAGES = 16
LEAST_BATCHES = 5  # one of them is held out
_LEAST_IMAGES = 2
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
CHANNELS = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # kinds of images as Pillow names them


def images_in(folder: Path) -> list[Path]:
    """Return the images of a folder and of the folders in it, at most `IMAGES`, in a fixed order that mixes them."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in files_below(folder) if path.suffix.lower() in _SUFFIXES)
    chosen = np.unique(np.linspace(0, max(len(paths) - 1, 0), min(IMAGES, len(paths))).astype(int)).tolist()
    # permuted, so that the held-out batches, which are the last, come from all folders as well
    return [paths[chosen[index]] for index in np.random.default_rng(0).permutation(len(chosen))]


def require_images(paths: Sequence[Path]) -> None:
    """Check that there are enough images, and what decodes them."""
    if len(paths) < _LEAST_IMAGES:
        raise DataError(f"too few images to calibrate on: {len(paths)}; give hundreds")
    if find_spec("PIL") is None:
        raise ConfigError("calibration on images needs Pillow, which is not installed; pip install Pillow")


def read_image(path: Path, convert: "Callable[[Image], Any]") -> Any:
    """Return what a function makes of an image.

    Raises:
        DataError: it cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return convert(_in_eight_bits(image))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not an image that can be read ({error}); remove it") from error


def _in_eight_bits(image: "Image") -> "Image":
    """Return an image of 16 bits a pixel in 8; Pillow would make everything above 255 white.

    Raises:
        ValueError: it has 32 bits, integers or floats, which do not tell what white is.
    """
    if image.mode.startswith("I;16"):
        from PIL import Image

        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, and it does not tell which value is white; give arrays")
    return image


def pixels_of(paths: Sequence[Path], channels: int, size: tuple[int, int]) -> Tensor:
    """Return images as (images, channels, height, width), values 0 to 1, of which those of another size are resized.

    Args:
        channels: 1 (gray) to 4 (red, green, blue, opacity).
        size: height and width.
    """
    kind, (height, width) = CHANNELS[channels], size

    def convert(image: "Image") -> Tensor:
        shaped = image.convert(kind)
        shaped = shaped if shaped.size == (width, height) else shaped.resize((width, height))
        values = np.asarray(shaped, np.float32).reshape(height, width, channels) / 255
        return torch.from_numpy(values).permute(2, 0, 1)

    return torch.stack([read_image(path, convert) for path in paths])


def batched(rows: Tensor, size: int) -> list[Tensor]:
    """Return batches of at most `size` rows, as many as can be held out in part."""
    return list(torch.tensor_split(rows, max(-(-len(rows) // size), min(LEAST_BATCHES, len(rows)))))
