"""Decoding speed of the "fast" coder: `python -m benchmarks.decode --json [--weights FILE] [--seconds 2]`.

Rows: the rANS kernel alone, one coded stream, and entire files through `birdie.load` to int8, bfloat16 and float32, on
one thread and on two. Weights are Gaussian with a scale per row, at about 3.3 and 5 bits, or the int8 tensors of FILE,
repeated until there are enough. Kernels are warm; the time is the best of the runs that fit into `seconds`. Peak memory
is that of a process that only loads the file, minus that of a process that only imports birdie.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import birdie
from benchmarks import symbols
from benchmarks.command import command_parser, report
from benchmarks.memory import python_peak
from benchmarks.timing import take_turns
from birdie.artifact.container import Reader
from birdie.compress.log_scales import scales_of
from birdie.compress.schemes.grid import Grid
from birdie.entropy import coder, static

State = dict[str, Tensor]
Row = dict[str, Any]

MIN_WEIGHTS = 10_000_000
ROWS, COLUMNS = 1024, 2048
_LOAD = "import sys, birdie; load = birdie.load; sys.argv[1:] and load(sys.argv[1], workers=int(sys.argv[2]))"


def gaussian(bits: float, seed: int) -> State:
    """Return at least `MIN_WEIGHTS` weights in int8 matrices, with an entropy of about `bits` per weight."""
    rng = np.random.default_rng(seed)
    scale = 2 ** (bits - 0.5 * np.log2(2 * np.pi * np.e))
    state = {}
    for index in range(-(-MIN_WEIGHTS // (ROWS * COLUMNS))):
        rows = scale * np.exp(rng.normal(0, 0.3, (ROWS, 1)))
        values = np.rint(rng.standard_normal((ROWS, COLUMNS), np.float32) * rows).clip(-127, 127)
        state[f"layers.{index}.weight"] = torch.from_numpy(values.astype(np.int8))
    return state


def repeated(path: Path) -> State:
    """Return the int8 tensors of a file, repeated to at least `MIN_WEIGHTS` weights."""
    tensors = {name: tensor for name, tensor in symbols.stored(path).tensors.items() if tensor.dtype is torch.int8}
    count = sum(tensor.numel() for tensor in tensors.values())
    if not count:
        raise SystemExit(f"{path} has no int8 tensors; give a quantized checkpoint")
    return {f"{i}.{name}": t.clone() for i in range(-(-MIN_WEIGHTS // count)) for name, t in tensors.items()}


def best(work: Callable[[], Any], seconds: float) -> float:
    """Return the shortest duration of `work`, of at least three runs with warm kernels."""
    return min(take_turns({"": work}, seconds=seconds)[""])


def kernel_and_stream(name: str, path: Path, seconds: float) -> list[Row]:
    """Return a row for the stream of the largest tensor without its file, and one for the kernel without the stream."""
    calls: list[tuple[Any, ...]] = []
    with Reader(path) as reader:
        entry = reader.read(max(reader.names, key=lambda name: reader.table()[name]))
    stream, rows, columns = entry.streams[0], entry.shape[0], int(np.prod(entry.shape[1:]))

    def decode_stream() -> None:
        coder.decode(stream.coder, stream.payload, rows, columns, dtype=np.int8, threads=1)

    decode = static._decode_chunk
    try:
        static._decode_chunk = lambda *arguments: calls.append(arguments)
        decode_stream()
    finally:
        static._decode_chunk = decode
    count = rows * columns
    return [
        row(f"{name}: kernel", count, 1, best(lambda: [decode(*call) for call in calls], seconds)),
        row(f"{name}: stream", count, 1, best(decode_stream, seconds)),
    ]


def files(name: str, path: Path, expected: State, dtype: str, seconds: float) -> list[Row]:
    """Return the rows of `birdie.load` of a file on one thread and on two."""
    count = sum(tensor.numel() for tensor in expected.values())
    decoded = birdie.load(path)
    exact = all(torch.equal(decoded[key], tensor) for key, tensor in expected.items())
    size = sum(tensor.nbytes for tensor in decoded.values())
    rows, idle = [], python_peak(_LOAD)
    for threads in (1, 2):
        load = best(lambda threads=threads: birdie.load(path, workers=threads), seconds)  # type: ignore[misc]
        memory = {"decoded_mb": size / 1e6, "peak_mb": python_peak(_LOAD, str(path), str(threads)) - idle}
        rows.append(row(f"{name}: file to {dtype}", count, threads, load) | memory | {"exact": exact})
    return rows


def row(name: str, count: int, threads: int, seconds: float) -> Row:
    """Return one row, without memory and exactness."""
    rate = {"weights": count, "threads": threads, "seconds": seconds, "M/s": count / seconds / 1e6}
    return {"what": name} | rate | {"decoded_mb": None, "peak_mb": None, "exact": None}


def measure(name: str, state: State, folder: Path, seconds: float) -> list[Row]:
    """Return all rows of one set of int8 tensors; the grids of float files have nearly the same symbols."""
    path = folder / "int8.birdie"
    birdie.save(state, path, lossless=True, coder="fast")
    rows = kernel_and_stream(name, path, seconds) + files(name, path, state, "int8", seconds)
    for dtype in (torch.bfloat16, torch.float32):
        path = folder / f"{dtype}.birdie"
        grids = {key: Grid(sigma=1 / max(tensor.float().std().item(), 0.1)) for key, tensor in state.items()}
        floats = {key: tensor.to(dtype) for key, tensor in state.items()}
        birdie.save(floats, path, scheme=list(grids.items()), coder="fast")
        expected = {key: dequantized(grids[key], weight) for key, weight in floats.items()}
        rows += files(name, path, expected, str(dtype).removeprefix("torch."), seconds)
    return rows


def dequantized(grid: Grid, weight: Tensor) -> Tensor:
    """Return the tensor that `weight` must decode to, computed with torch."""
    encoded = grid.encode("weight", weight)
    levels, indices = (torch.from_numpy(stream.astype(np.int32)) for stream in encoded.streams)
    return (levels.float() * torch.from_numpy(scales_of(indices.numpy()))).to(weight.dtype).reshape(weight.shape)


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a .safetensors or .ptz file with int8 tensors")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each measurement (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the Gaussian weights (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = {f"{bits} bits": gaussian(bits, options.seed) for bits in (3.3, 5.0)}
    if options.weights is not None:
        sets[options.weights.stem] = repeated(options.weights)
    rows = []
    for name, state in sets.items():
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, state, Path(folder), options.seconds)
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
