"""Memory saved by lazy loading, and its cost: `python -m benchmarks.lazy --json [--layers 64] [--width 2048]`.

A float32 model of equal square layers with random weights (by default 1.07 GB) is saved once by `--scheme` with the
fast coder, into the folder `--cache`. Each way of loading it runs in a new process: the model is built on the meta
device (and gets memory if the way needs it), loaded, and run twice on a batch. "assigned" replaces the parameters of
the module by the decoded tensors; the other ways copy into them. Rows: peak memory above that of imports and kernels,
and as a share of eager loading's; seconds to load and of each pass; whether the output is bit-identical to that of
eager loading.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import birdie
from benchmarks.command import Row, command_parser, report
from benchmarks.processes import apart, reset_peak, resident
from birdie.artifact import container
from birdie.artifact.container import Reader

BATCH = 32
DISTINCT = 4  # layers that are coded; the others repeat their bytes


def build(layers: int, width: int) -> nn.Sequential:
    """Return the model: linear layers with ReLU between them."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def saved(folder: Path, layers: int, width: int, scheme: str) -> Path:
    """Return the file of the model, written first if necessary."""
    path = folder / f"{layers}x{width}-{scheme}.birdie"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in build(min(layers, DISTINCT), width).state_dict().items()}
    state = {name: torch.randn(shape) * (2 / width) ** 0.5 for name, shape in shapes.items()}
    birdie.save(state, path, scheme=[("*.weight", scheme)], effort="fast")
    with Reader(path) as reader:
        entries, metadata = [reader.read(name) for name in reader.names], bytes(reader.metadata)
    copies = {}
    for entry in entries:
        index, _, kind = entry.name.partition(".")
        for layer in range(int(index) // 2, layers, DISTINCT):
            copies[layer, kind] = replace(entry, name=f"{2 * layer}.{kind}")
    container.write(path, copies.values(), metadata)
    return path


def measure_way(file: str, layers: int, width: int, way: str) -> dict[str, Any]:
    """Load and run the model in this process, and return memory, seconds and the digest of the output."""
    path = Path(file)
    small = saved(path.parent, 1, 512, "int4")
    for lazy in (False, True):  # loads the kernels
        birdie.load(small, into=build(1, 512), lazy=lazy)(torch.ones(1, 512))
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1))
    reset_peak()
    idle_mb, start = resident("VmRSS"), time.perf_counter()
    with torch.device("meta"):
        model = build(layers, width)
    if way == "eager":
        birdie.load(path, into=model.to_empty(device="cpu"))
    elif way == "eager, assigned":
        model.load_state_dict(birdie.load(path), assign=True)
    else:
        half = layers * (width + 1) * width * 2
        birdie.load(path, into=model, lazy=True, cache_bytes=half if way == "lazy, half cached" else None)
    times = [time.perf_counter()]
    with torch.inference_mode():
        for _ in range(2):
            y = model.eval()(x)
            times.append(time.perf_counter())
    return {
        "peak_mb": resident("VmHWM") - idle_mb,
        "load_s": times[0] - start,
        "first_s": times[1] - times[0],
        "second_s": times[2] - times[1],
        "output": hashlib.sha256(y.numpy().tobytes()).hexdigest(),
    }


def measure(path: Path, layers: int, width: int) -> list[Row]:
    """Return a row for each way of loading."""
    rows: list[Row] = []
    for way in ("eager", "eager, assigned", "lazy", "lazy, half cached"):
        result = apart(measure_way, str(path), layers, width, way)
        eager = rows[0] if rows else result
        shares = {"of_eager": result["peak_mb"] / eager["peak_mb"], "exact": result["output"] == eager["output"]}
        sizes = {"decoded_mb": layers * (width + 1) * width * 4 / 1e6, "file_mb": path.stat().st_size / 1e6}
        rows.append({"way": way} | sizes | result | shares)
    return [{key: value for key, value in row.items() if key != "output"} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--layers", type=int, default=64, help="(default: 64)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of a layer (default: 2048)")
    parser.add_argument("--scheme", default="int4", help="(default: int4)")
    parser.add_argument("--cache", type=Path, default=Path("runs/lazy"), help="folder of the file (default: runs/lazy)")
    options = parser.parse_args(arguments)
    path = saved(options.cache.resolve(), options.layers, options.width, options.scheme)
    report(measure(path, options.layers, options.width), as_json=options.json)


if __name__ == "__main__":
    main()
