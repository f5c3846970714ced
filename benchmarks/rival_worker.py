"""Coders of other projects, in the environment that `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python rival_worker.py lossless nncodec|zipnn TENSORS.npz        →  one JSON object on stdout
    .venv-rivals/bin/python rival_worker.py encode nncodec|entropack TENSORS.npz OUT QP|BITS     weights → one file
    .venv-rivals/bin/python rival_worker.py decode nncodec|entropack FILE OUT.npz                file → weights
    .venv-rivals/bin/python rival_worker.py images FOLDER OUT.npz                     CIFAR-10's pixels, by Pillow

Lossless: arrays are int8, int16, float32, or bfloat16 as 16-bit words (names then end in "|bf16"); the smallest of
several forms is reported, and the decoded values are compared. Lossy: NNCodec has its trellis on, else the defaults of
nncodec.nn.encode; the smaller of short and long unary codes counts. EntroPack gives matrices of at least 1,024 elements
the target rate, with its refinement of rows; other tensors are float16, and zstd -22 compresses its JSON headers.
"""

import contextlib
import importlib
import io
import json
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

BF16 = "|bf16"
NONWEIGHT_QP = -75
SWEEPS = 8  # of EntroPack's refinement, the most it takes
LEAST = 1024  # elements
_LIBRARIES: list[Any] = []  # see `import_nncodec`


def main() -> None:
    """Do what the first argument says with the others."""
    verbs: dict[str, Any] = {"lossless": lossless, "encode": encode, "decode": decode, "images": images}
    with contextlib.redirect_stdout(sys.stderr):
        result = verbs[sys.argv[1]](*sys.argv[2:])
    if result is not None:
        print(json.dumps(result))


def lossless(package: str, source: str) -> dict[str, Any]:
    """Return the row of a coder on the arrays of a .npz."""
    with np.load(source) as archive:
        arrays = {name: archive[name] for name in archive.files}
    forms = list({"nncodec": nncodec_forms, "zipnn": zipnn_forms}[package](arrays))
    best, exact = min(forms, key=lambda row: row["bytes"]), all(row["exact"] for row in forms)
    return {**best, "exact": exact, "version": metadata.version(package)}


def encode(package: str, source: str, out: str, setting: str) -> None:
    """Write the weights of a .npz as one file."""
    with np.load(source) as archive:
        weights = {name: archive[name].astype(np.float32) for name in archive.files}
    coder = {"nncodec": nncodec_encode, "entropack": entropack_encode}[package]
    Path(out).write_bytes(coder(weights, float(setting)))


def decode(package: str, source: str, out: str) -> None:
    """Write the weights of a file as a .npz."""
    coder = {"nncodec": nncodec_decode, "entropack": entropack_decode}[package]
    with Path(out).open("wb") as file:
        np.savez(file, **coder(Path(source).read_bytes()))  # type: ignore[arg-type, unused-ignore]


def nncodec_forms(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of coding integers without quantizer: both scans, unary codes, rows of zeros skipped or not."""
    compression = import_nncodec()
    if any(array.dtype.kind == "f" or name.endswith(BF16) for name, array in arrays.items()):
        raise SystemExit("NNCodec rounds floats")
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


def zipnn_forms(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results for all tensors together on one thread, by each method; integers are passed as float bytes."""
    torch, zipnn = importlib.import_module("torch"), importlib.import_module("zipnn")
    flat = np.concatenate([array.ravel() for array in arrays.values()])
    if all(name.endswith(BF16) for name in arrays):
        forms = [("torch", "bfloat16", torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16))]
    elif flat.dtype == np.float32:
        forms = [("torch", "float32", torch.from_numpy(flat))]
    else:
        data = flat.tobytes() + bytes(-flat.nbytes % 4)
        forms = [("byte", kind, bytearray(data)) for kind in ("float16", "bfloat16", "float32")]
    for form, kind, content in forms:
        for method in ("AUTO", "HUFFMAN", "ZSTD"):
            settings = {"method": method, "input_format": form, "bytearray_dtype": kind, "threads": 1}
            copy = content.clone() if form == "torch" else bytearray(content)  # ZipNN modifies its input
            start = time.perf_counter()
            packed = zipnn.ZipNN(**settings).compress(copy)
            middle = time.perf_counter()
            decoded = zipnn.ZipNN(**settings).decompress(packed)
            end = time.perf_counter()
            exact = _bytes(decoded) == _bytes(content)
            yield _row(len(packed), middle - start, end - middle, exact, f"{kind}, {method}")


def _bytes(data: Any) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    return bytes(data.contiguous().view(importlib.import_module("torch").uint8).numpy().tobytes())


def _row(size: int, encode_s: float, decode_s: float, exact: bool, form: str) -> dict[str, Any]:
    return {"bytes": size, "encode_s": encode_s, "decode_s": decode_s, "exact": bool(exact), "form": form}


def nncodec_encode(weights: "dict[str, np.ndarray]", qp: float) -> bytes:
    """Return the smaller of two bitstreams at one step size."""
    compression = import_nncodec()
    streams = [
        bytes(
            compression.compress(
                {name: array.copy() for name, array in weights.items()},
                bitstream_path=None,
                qp=int(qp),
                nonweight_qp=NONWEIGHT_QP,
                use_dq=True,
                param_opt=True,
                row_skipping=True,
                cabac_unary_length_minus1=unary,
                return_bitstream=True,
            )
        )
        for unary in (10, 30)
    ]
    return min(streams, key=len)


def nncodec_decode(data: bytes) -> "dict[str, np.ndarray]":
    """Return the weights of a bitstream."""
    return dict(import_nncodec().decompress(bytearray(data)))


def entropack_encode(weights: "dict[str, np.ndarray]", bits: float) -> bytes:
    """Return a header of names, shapes and lengths, and the tensors after it."""
    import entropack  # type: ignore[import-not-found, unused-ignore]
    import torch
    import zstandard  # type: ignore[import-not-found, unused-ignore]

    config = entropack.EntroPackLossyConfig(target_bpp=bits, row_rdo_iterations=SWEEPS)
    header: list[tuple[str, list[int], int]] = []
    parts = []
    for name, array in weights.items():
        if array.ndim >= 2 and array.size >= LEAST:
            rows = torch.from_numpy(array.reshape(len(array), -1))
            part = entropack.compress(rows, config).entropack_quant_state.numpy().tobytes()
        else:
            part = array.astype(np.float16).tobytes()
        header.append((name, list(array.shape), len(part)))
        parts.append(part)
    text = json.dumps(header).encode()
    plain = struct.pack("<I", len(text)) + text + b"".join(parts)
    return bytes(zstandard.ZstdCompressor(level=22).compress(plain))


def entropack_decode(data: bytes) -> "dict[str, np.ndarray]":
    """Return the weights of such a file."""
    import entropack  # type: ignore[import-not-found, unused-ignore]
    import torch
    import zstandard  # type: ignore[import-not-found, unused-ignore]

    config = entropack.EntroPackLossyConfig()
    plain = zstandard.ZstdDecompressor().decompress(data)
    (length,) = struct.unpack_from("<I", plain)
    start = 4 + length
    weights: dict[str, Any] = {}
    for name, shape, size in json.loads(plain[4:start]):
        part = plain[start : start + size]
        start += size
        if len(shape) >= 2 and np.prod(shape) >= LEAST:
            state = torch.from_numpy(np.frombuffer(part, np.uint8).copy())
            rows = entropack.decompress(entropack.CompressedTensor.unpack(state), config)
            weights[name] = rows.numpy().reshape(shape)
        else:
            weights[name] = np.frombuffer(part, np.float16).astype(np.float32).reshape(shape)
    return weights


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
