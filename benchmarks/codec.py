"""Sizes and speeds of coders on the int8 tensors of a file: `python -m benchmarks.codec --weights FILE --json`.

birdie's own rows count every byte a decoder needs: the whole container with names, shapes and tables. The general
compressors get a torch.save of the same dict of tensors. Kernels are warm; times are of one thread.
"""

import argparse
import io
import time
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.report import report
from birdie import container
from birdie.entropy import coder
from birdie.entropy.general import GENERAL
from birdie.entropy.stream import Effort

Arrays = dict[str, NDArray[np.int8]]
Row = dict[str, Any]

MAX_UNPACKED = 1 << 30


def int8_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The int8 tensors of a .safetensors file or of a challenge artifact (.ptz: zlib of a torch.save dict)."""
    if path.suffix == ".safetensors":
        loaded = load_file(path)
    else:
        data = zlib.decompressobj().decompress(path.read_bytes(), MAX_UNPACKED)
        whole = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        loaded = whole.get("quantized", whole)
    return {name: tensor for name, tensor in loaded.items() if tensor.dtype == torch.int8}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def birdie_row(arrays: Arrays, effort: Effort) -> Row:
    """The container's size and the time to code and decode all tensors, payload checks included."""

    def encode() -> bytes:
        entries = []
        for name, values in arrays.items():
            coded = coder.encode(values.reshape(values.shape[0], -1), effort=effort)
            entries.append(
                container.Entry(name, 2, 0, values.shape, (), (container.Stream(coded.coder, coded.payload),))
            )
        return container.to_bytes(entries)

    def decode() -> Arrays:
        reader = container.Reader(data)
        out: Arrays = {}
        for name in reader.names:
            entry = reader.read(name)
            stream, rows = entry.streams[0], entry.shape[0]
            columns = int(np.prod(entry.shape[1:]))
            values = coder.decode(stream.coder, stream.payload, rows, columns, dtype=np.int8, threads=1)
            out[name] = values.reshape(entry.shape).astype(np.int8, copy=False)
        return out

    data, encode_s = timed(encode)
    decode()  # loads or compiles the kernels
    decoded, decode_s = timed(decode)
    exact = all((decoded[name] == values).all() for name, values in arrays.items())
    return row(f"birdie {effort}", len(data), arrays, encode_s, decode_s, exact, metadata.version("birdie"))


def general_row(name: str, arrays: Arrays, saved: bytes) -> Row:
    """A general compressor on torch.save's bytes, or what to install."""
    compressor = GENERAL[name]
    label = f"torch.save + {compressor.name}"
    if not compressor.installed:
        return row(label, None, arrays, None, None, None, f"not installed: pip install {compressor.package}")
    packed, encode_s = timed(lambda: compressor.compress(saved))
    unpacked, decode_s = timed(lambda: compressor.decompress(packed, len(saved)))
    return row(label, len(packed), arrays, encode_s, decode_s, unpacked == saved, compressor.version)


def row(
    codec: str,
    size: int | None,
    arrays: Arrays,
    encode_s: float | None,
    decode_s: float | None,
    exact: bool | None,
    version: str,
) -> Row:
    """One line of the table; None where there is nothing to say."""
    return {
        "codec": codec,
        "bytes": size,
        "symbol_bytes": sum(values.size for values in arrays.values()),
        "encode_s": encode_s,
        "decode_s": decode_s,
        "exact": None if exact is None else bool(exact),
        "version": version,
    }


def measure(path: Path) -> list[Row]:
    """All rows for one file."""
    tensors = int8_tensors(path)
    if not tensors:
        raise SystemExit(f"{path} holds no int8 tensors; give a quantized checkpoint")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    efforts: tuple[Effort, ...] = ("max", "fast")
    rows = [birdie_row(arrays, effort) for effort in efforts]
    return rows + [general_row(name, arrays, buffer.getvalue()) for name in GENERAL]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="a .safetensors or .ptz file with int8 tensors")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(measure(options.weights), as_json=options.json)


if __name__ == "__main__":
    main()
