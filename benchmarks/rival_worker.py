"""NNCodec or ZipNN on tensors, in the environment that `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python rival_worker.py nncodec|zipnn TENSORS.npz    →    one JSON object on stdout

The arrays of the .npz are int8, int16, float32, or bfloat16 as 16-bit words (names then end in "|bf16"). Each coder is
tried in several forms; the smallest is reported, and the decoded values are compared.
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
_LIBRARIES: list[Any] = []  # see `import_nncodec`


def main() -> None:
    """Measure the coder of the first argument on the arrays of the second."""
    with np.load(sys.argv[2]) as archive:
        arrays = {name: archive[name] for name in archive.files}
    with contextlib.redirect_stdout(sys.stderr):
        forms = list({"nncodec": nncodec_forms, "zipnn": zipnn_forms}[sys.argv[1]](arrays))
    best = min(forms, key=lambda row: row["bytes"])
    exact = all(row["exact"] for row in forms)
    print(json.dumps({**best, "exact": exact, "version": metadata.version(sys.argv[1])}))


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


if __name__ == "__main__":
    main()
