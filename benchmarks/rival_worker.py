"""Coders of other projects, in the environment that `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python rival_worker.py lossless TENSORS.npz                      →  one JSON object on stdout
    .venv-rivals/bin/python rival_worker.py encode TENSORS.npz OUT QP                        weights → one file
    .venv-rivals/bin/python rival_worker.py decode FILE OUT.npz                              file → weights
    .venv-rivals/bin/python rival_worker.py images FOLDER OUT.npz                     CIFAR-10's pixels, by Pillow

All but the images are NNCodec. Lossless: arrays are int8 or int16; the smallest of several forms is reported, and the
decoded values are compared. Lossy: NNCodec has its trellis on, else the defaults of
nncodec.nn.encode; the smaller of short and long unary codes counts.
"""

import contextlib
import importlib
import io
import json
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

NONWEIGHT_QP = -75
_LIBRARIES: list[Any] = []  # see `import_nncodec`


def main() -> None:
    """Do what the first argument says with the others."""
    verbs: dict[str, Any] = {"lossless": lossless, "encode": encode, "decode": decode, "images": images}
    with contextlib.redirect_stdout(sys.stderr):
        result = verbs[sys.argv[1]](*sys.argv[2:])
    if result is not None:
        print(json.dumps(result))


def lossless(source: str) -> dict[str, Any]:
    """Return the row of a coder on the arrays of a .npz."""
    with np.load(source) as archive:
        arrays = {name: archive[name] for name in archive.files}
    forms = list(nncodec_forms(arrays))
    best, exact = min(forms, key=lambda row: row["bytes"]), all(row["exact"] for row in forms)
    return {**best, "exact": exact, "version": metadata.version("nncodec")}


def encode(source: str, out: str, qp: str) -> None:
    """Write the weights of a .npz as the smaller of two bitstreams at one step size."""
    with np.load(source) as archive:
        weights = {name: archive[name].astype(np.float32) for name in archive.files}
    settings: dict[str, Any] = {
        "qp": int(qp),
        "nonweight_qp": NONWEIGHT_QP,
        "use_dq": True,
        "param_opt": True,
        "row_skipping": True,
    }
    settings |= {"bitstream_path": None, "return_bitstream": True}
    compress = import_nncodec().compress
    streams = []
    for unary in (10, 30):
        copies = {name: array.copy() for name, array in weights.items()}
        streams.append(bytes(compress(copies, cabac_unary_length_minus1=unary, **settings)))
    Path(out).write_bytes(min(streams, key=len))


def decode(source: str, out: str) -> None:
    """Write the weights of a bitstream as a .npz."""
    with Path(out).open("wb") as file:
        np.savez(file, **import_nncodec().decompress(bytearray(Path(source).read_bytes())))  # type: ignore[arg-type, unused-ignore]


def nncodec_forms(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of coding integers without quantizer: both scans, unary codes, rows of zeros skipped or not."""
    compression = import_nncodec()
    plain = {f"t{index}": array.astype(np.int32) for index, array in enumerate(arrays.values())}
    transposed = {name: np.ascontiguousarray(array.reshape(array.shape[0], -1).T) for name, array in plain.items()}
    scans = {"rows": plain, "columns": transposed}

    def attempt(form: str, unary: int, skipping: bool) -> dict[str, Any]:
        start = time.perf_counter()
        stream = compression.compress(
            {name: array.copy() for name, array in scans[form].items()},
            bitstream_path=None,
            row_skipping=skipping,
            cabac_unary_length_minus1=unary,
            return_bitstream=True,
        )
        middle = time.perf_counter()
        decoded = compression.decompress(bytearray(stream))
        end = time.perf_counter()
        exact = all(np.array_equal(decoded[name], array) for name, array in scans[form].items())
        label = f"{form}, unary {unary}{', rows skipped' if skipping else ''}"
        return _row(len(stream), middle - start, end - middle, exact, label)

    rows = {(form, unary): attempt(form, unary, False) for form in scans for unary in (10, 30)}
    yield from rows.values()
    form, unary = min(rows, key=lambda key: rows[key]["bytes"])
    yield attempt(form, unary, True)


def import_nncodec() -> Any:
    """Return NNCodec's coder, imported with a workaround.

    NNCodec imports torchvision for its demos. The torchvision wheel is built for CUDA, so with the CPU build of torch
    its operators do not load, and its import fails for two missing ones. They are declared here; nothing uses them.
    """
    library = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    try:
        return importlib.import_module("nncodec.nnc.compression")
    finally:
        _LIBRARIES.append(library)  # garbage collection of the library would remove the declarations


def _row(size: int, encode_s: float, decode_s: float, exact: bool, form: str) -> dict[str, Any]:
    return {"bytes": size, "encode_s": encode_s, "decode_s": decode_s, "exact": bool(exact), "form": form}


def images(source: str, out: str) -> None:
    """Write test, test_labels and train of a folder.

    The test images are the JPEGs of a zip, labeled by their folder. They alternate between the classes, so the first N
    are balanced for any N. The two training batches are lossless PNGs with one image per row.
    """
    folder = Path(source)
    with zipfile.ZipFile(folder / "cifar10_test_jpeg.zip") as archive:
        names = sorted(archive.namelist(), key=lambda name: (name.split("/")[2], name.split("/")[1]))
        classes = sorted({name.split("/")[1] for name in names})
        test = np.stack([_pixels(io.BytesIO(archive.read(name))) for name in names])
        labels = np.array([classes.index(name.split("/")[1]) for name in names])
    batches = [_pixels(path) for path in sorted(folder.glob("cifar10_train_batch_*.png"))]
    train = np.concatenate([batch.reshape(-1, 32, 32, 3) for batch in batches])
    with Path(out).open("wb") as file:
        np.savez(file, test=test, test_labels=labels, train=train)


def _pixels(source: io.BytesIO | Path) -> "np.ndarray":
    with importlib.import_module("PIL.Image").open(source) as image:
        return np.asarray(image.convert("RGB"))


if __name__ == "__main__":
    main()
