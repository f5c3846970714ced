"""NNCodec or ZipNN on tensors, inside the environment `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python rival_worker.py nncodec|zipnn TENSORS.npz    →    one JSON object on stdout

The arrays of the .npz are int8, int16, float32, or bfloat16 as the uint16 of its bits (names then end in "|bf16").
Each rival is tried in several forms, the smallest is reported, and what it decodes to is compared value by value.
"""

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np

BF16 = "|bf16"
_KEPT: list[Any] = []


def main() -> None:
    """Measure the rival named first on the arrays named second."""
    with np.load(sys.argv[2]) as archive:
        arrays = {name: archive[name] for name in archive.files}
    with contextlib.redirect_stdout(sys.stderr):
        tries = list({"nncodec": nncodec_tries, "zipnn": zipnn_tries}[sys.argv[1]](arrays))
    best = min(tries, key=lambda row: row["bytes"])
    exact = all(row["exact"] for row in tries)
    print(json.dumps({**best, "exact": exact, "version": metadata.version(sys.argv[1])}))


def nncodec_tries(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The integers as they are, no quantizer: both scans, short and long unary codes, rows of zeros skipped or not."""
    compression = _nncodec()
    if any(array.dtype.kind == "f" or name.endswith(BF16) for name, array in arrays.items()):
        raise SystemExit("NNCodec rounds floats")
    plain = {f"t{index}": array.astype(np.int32) for index, array in enumerate(arrays.values())}
    turned = {name: np.ascontiguousarray(array.reshape(array.shape[0], -1).T) for name, array in plain.items()}
    given = {"rows": plain, "columns": turned}

    def attempt(form: str, unary: int, skipping: bool) -> dict[str, Any]:
        start = time.perf_counter()
        stream = compression.compress(
            {name: array.copy() for name, array in given[form].items()},
            bitstream_path=None,
            row_skipping=skipping,
            cabac_unary_length_minus1=unary,
            return_bitstream=True,
        )
        middle = time.perf_counter()
        decoded = compression.decompress(bytearray(stream))
        end = time.perf_counter()
        exact = all(np.array_equal(decoded[name], array) for name, array in given[form].items())
        words = f"{form}, unary {unary}{', rows skipped' if skipping else ''}"
        return _row(len(stream), middle - start, end - middle, exact, words)

    tries = {(form, unary): attempt(form, unary, False) for form in given for unary in (10, 30)}
    yield from tries.values()
    form, unary = min(tries, key=lambda key: tries[key]["bytes"])
    yield attempt(form, unary, True)


def _nncodec() -> Any:
    """NNCodec's coder. It imports torchvision for its demos, whose wheel is built for CUDA: beside the CPU build of
    torch its operators do not load, and its Python stumbles over two it takes for granted. Nothing of it is used.
    """
    library = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    try:
        return importlib.import_module("nncodec.nnc.compression")
    finally:
        _KEPT.append(library)  # its end would take the declarations back


def zipnn_tries(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All tensors as one, on one thread, by each of its methods; symbols as the bytes of floats: it knows no other."""
    torch, zipnn = importlib.import_module("torch"), importlib.import_module("zipnn")
    flat = np.concatenate([array.ravel() for array in arrays.values()])
    if all(name.endswith(BF16) for name in arrays):
        forms = [("torch", "bfloat16", torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16))]
    elif flat.dtype == np.float32:
        forms = [("torch", "float32", torch.from_numpy(flat))]
    else:
        data = flat.tobytes() + bytes(-flat.nbytes % 4)
        forms = [("byte", kind, bytearray(data)) for kind in ("float16", "bfloat16", "float32")]
    for form, kind, given in forms:
        for method in ("AUTO", "HUFFMAN", "ZSTD"):
            settings = {"method": method, "input_format": form, "bytearray_dtype": kind, "threads": 1}
            copy = given.clone() if form == "torch" else bytearray(given)  # it changes what it is given
            start = time.perf_counter()
            packed = zipnn.ZipNN(**settings).compress(copy)
            middle = time.perf_counter()
            decoded = zipnn.ZipNN(**settings).decompress(packed)
            end = time.perf_counter()
            exact = _bytes(decoded) == _bytes(given)
            yield _row(len(packed), middle - start, end - middle, exact, f"{kind}, {method}")


def _bytes(data: Any) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    return bytes(data.contiguous().view(importlib.import_module("torch").uint8).numpy().tobytes())


def _row(size: int, encode_s: float, decode_s: float, exact: bool, form: str) -> dict[str, Any]:
    return {"bytes": size, "encode_s": encode_s, "decode_s": decode_s, "exact": bool(exact), "form": form}


if __name__ == "__main__":
    main()
