"""CIFAR-10 pixels as one .npz, in the environment that `make rivals` builds (Pillow); imports nothing of birdie.

    .venv-rivals/bin/python image_worker.py FOLDER OUT    writes test, test_labels and train

The test images are the JPEGs of a zip, labeled by their folder. They alternate between the classes, so the first N
images are balanced for any N. The two training batches are lossless PNGs with one image per row.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    """Read the folder of the first argument, and write the file of the second."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    with zipfile.ZipFile(folder / "cifar10_test_jpeg.zip") as archive:
        names = sorted(archive.namelist(), key=lambda name: (name.split("/")[2], name.split("/")[1]))
        classes = sorted({name.split("/")[1] for name in names})
        test = np.stack([_pixels(io.BytesIO(archive.read(name))) for name in names])
        labels = np.array([classes.index(name.split("/")[1]) for name in names])
    batches = [_pixels(path) for path in sorted(folder.glob("cifar10_train_batch_*.png"))]
    train = np.concatenate([batch.reshape(-1, 32, 32, 3) for batch in batches])
    with out.open("wb") as file:
        np.savez(file, test=test, test_labels=labels, train=train)


def _pixels(source: io.BytesIO | Path) -> "np.ndarray":
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB"))


if __name__ == "__main__":
    main()
