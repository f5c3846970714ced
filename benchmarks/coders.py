"""Bytes and speed of each coder of birdie.entropy, and of loading whole files: `python -m benchmarks.coders [--json]`.

One row per coder and array, on one thread, with warm kernels; times are the best of as many runs as fit into `seconds`.

    weights   1,024 × 512 integers, Gaussian; rows and columns differ in scale
    scales    1,024 × 1 log2 indices of row scales, which vary smoothly
    noise     1,024 × 512 uniform bytes, like the low bits of a mantissa

`--files 10_000_000` saves so many Gaussian weights of about 3.3 and 5 bits (with `--weights FILE` the int8 tensors of a
file) with the "fast" coder instead, and loads them by `birdie.load` to int8, bfloat16 and float32, on one thread and on
two.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import birdie
from benchmarks.command import Row, command_parser, errors_as_exit, report
from benchmarks.processes import take_turns
from benchmarks.symbols import stored
from birdie.compress.log_scales import scales_of
from birdie.compress.schemes.grid import Grid
from birdie.entropy import coder, mixed, numbers, raw, static

Integers = NDArray[np.integer]
State = dict[str, Tensor]
ROWS, COLUMNS = 1024, 2048


def arrays(rows: int, seed: int) -> dict[str, Integers]:
    """Return the arrays by name."""
    rng = np.random.default_rng(seed)
    scales = 3 * np.exp(0.5 * rng.normal(size=(rows, 1)) + 0.3 * rng.normal(size=512))
    return {
        "weights": np.rint(rng.normal(size=(rows, 512)) * scales).clip(-127, 127).astype(np.int32),
        "scales": np.cumsum(np.rint(rng.normal(0, 2, (rows, 1))), 0).astype(np.int32),
        "noise": rng.integers(0, 256, (rows, 512)).astype(np.int32),
    }


def encoders(values: Integers) -> dict[int, Callable[[], bytes | None]]:
    """Return for each coder that takes `values` the function that encodes them."""
    low, high = int(values.min()), int(values.max())
    known: dict[int, Callable[[], bytes | None]] = {
        coder.PACKED: lambda: raw.encode_packed(values, low, high),
        coder.NUMBERS: lambda: numbers.encode(values),
        coder.STATIC: lambda: static.encode(values, (1, 1)),
        coder.LANES: lambda: static.encode(values, (1, 1), 1, 64 if values.shape[1] > 64 else 4),
        coder.MIXED: lambda: mixed.encode(values, (1, 1)),
    }
    return known | ({coder.BYTES: lambda: values.astype(np.uint8).tobytes()} if low >= 0 and high < 256 else {})


def best(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest duration of `work`, of at least three runs with warm kernels."""
    return min(take_turns({"": work}, seconds=seconds)[""])


def coder_rows(rows: int, seed: int, seconds: float) -> Iterator[Row]:
    """Yield a row for each coder and array that it takes."""
    for name, values in arrays(rows, seed).items():
        for code, encode in encoders(values).items():
            if (payload := encode()) is None:
                continue

            def decode(code: int = code, payload: bytes = payload, values: Integers = values) -> Integers:
                return coder.decode(code, payload, values.shape[0], values.shape[1], threads=1)

            yield {
                "array": name,
                "coder": coder.NAMES[code],
                "bytes": len(payload),
                "bits per value": 8 * len(payload) / values.size,
                "encode M/s": values.size / best(encode, seconds) / 1e6,
                "decode M/s": values.size / best(decode, seconds) / 1e6,
                "exact": bool((decode() == values).all()),
            }


def gaussian(bits: float, weights: int, seed: int) -> State:
    """Return at least so many weights in int8 matrices, with an entropy of about `bits` per weight."""
    rng = np.random.default_rng(seed)
    scale = 2 ** (bits - 0.5 * np.log2(2 * np.pi * np.e))
    state = {}
    for index in range(-(-weights // (ROWS * COLUMNS))):
        rows = scale * np.exp(rng.normal(0, 0.3, (ROWS, 1)))
        values = np.rint(rng.standard_normal((ROWS, COLUMNS), np.float32) * rows).clip(-127, 127)
        state[f"layers.{index}.weight"] = torch.from_numpy(values.astype(np.int8))
    return state


def repeated(path: Path, weights: int) -> State:
    """Return the int8 tensors of a file, repeated to at least so many weights."""
    tensors = {name: tensor for name, tensor in stored(path).tensors.items() if tensor.dtype is torch.int8}
    count = sum(tensor.numel() for tensor in tensors.values())
    if not count:
        raise SystemExit(f"{path} has no int8 tensors; give a quantized checkpoint")
    return {f"{i}.{name}": t.clone() for i in range(-(-weights // count)) for name, t in tensors.items()}


def file_rows(name: str, state: State, seconds: float) -> Iterator[Row]:
    """Yield rows of `birdie.load` of int8 tensors, and of floats whose grids have nearly the same symbols."""
    grids = {key: Grid(sigma=1 / max(tensor.float().std().item(), 0.1)) for key, tensor in state.items()}
    count = sum(tensor.numel() for tensor in state.values())
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.int8, torch.bfloat16, torch.float32):
            path, source = Path(folder) / "x.birdie", {key: tensor.to(dtype) for key, tensor in state.items()}
            if dtype == torch.int8:
                birdie.save(source, path, lossless=True, coder="fast")
                expected = source
            else:
                birdie.save(source, path, scheme=list(grids.items()), coder="fast")
                expected = {key: dequantized(grids[key], weight) for key, weight in source.items()}
            decoded = birdie.load(path)
            exact = all(torch.equal(decoded[key], tensor) for key, tensor in expected.items())
            for threads in (1, 2):
                load = best(partial(birdie.load, path, workers=threads), seconds)
                row = {"file": name, "to": str(dtype).removeprefix("torch."), "threads": threads, "weights": count}
                yield row | {"load M/s": count / load / 1e6, "exact": exact}


def dequantized(grid: Grid, weight: Tensor) -> Tensor:
    """Return the tensor that `weight` must decode to, computed with torch."""
    encoded = grid.encode("weight", weight)
    levels, indices = (torch.from_numpy(stream.astype(np.int32)) for stream in encoded.streams)
    return (levels.float() * torch.from_numpy(scales_of(indices.numpy()))).to(weight.dtype).reshape(weight.shape)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrays (default: 0)")
    parser.add_argument("--rows", type=int, default=1024, help="of the arrays (default: 1,024)")
    parser.add_argument("--files", type=int, metavar="WEIGHTS", help="load files of so many weights, 10_000_000")
    parser.add_argument("--weights", type=Path, help="a .safetensors or .ptz file with int8 tensors")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.files is None:
        report(list(coder_rows(options.rows, options.seed, options.seconds)), as_json=options.json)
        return
    sets = {f"{bits} bits": gaussian(bits, options.files, options.seed) for bits in (3.3, 5.0)}
    with errors_as_exit():
        if options.weights is not None:
            sets = {options.weights.stem: repeated(options.weights, options.files)}
        rows = [row for name, state in sets.items() for row in file_rows(name, state, options.seconds)]
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
