"""Memory saved by lazy loading, and its cost: `python -m benchmarks.lazy --json [--layers 64] [--width 2048]`.

A float32 model of equal square layers with random weights (by default 1.07 GB) is saved once by `--scheme` with the
fast coder, into the folder `--cache`. Each way of loading it runs in a new process: the model is built on the meta
device (and gets memory if the way needs it), loaded, and run twice on a batch. "assigned" replaces the parameters of
the module by the decoded tensors; the other ways copy into them. Rows: peak memory above that of imports and kernels,
and as a share of eager loading's; seconds to load and of each pass; whether the output is bit-identical to that of
eager loading.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import birdie
from benchmarks.command import command_parser, report
from benchmarks.memory import reset_peak, resident
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
    birdie.save(state, path, scheme=[("*.weight", scheme)], coder="fast")
    with Reader(path) as reader:
        entries, metadata = [reader.read(name) for name in reader.names], bytes(reader.metadata)
    copies = {}
    for entry in entries:
        index, _, kind = entry.name.partition(".")
        for layer in range(int(index) // 2, layers, DISTINCT):
            copies[layer, kind] = replace(entry, name=f"{2 * layer}.{kind}")
    container.write(path, copies.values(), metadata)
    return path


def warm(folder: Path) -> None:
    """Load the kernels of coder and scheme with a file of one small layer."""
    small = saved(folder, 1, 512, "int4")
    for lazy in (False, True):
        birdie.load(small, into=build(1, 512), lazy=lazy)(torch.ones(1, 512))


def measure_way(path: Path, layers: int, width: int, way: str, cache_mb: float | None) -> dict[str, Any]:
    """Load and run the model in this process, and return memory, seconds and the digest of the output."""
    torch.set_num_threads(1)
    warm(path.parent)
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
        cache_bytes = None if cache_mb is None else int(cache_mb * 1e6)
        birdie.load(path, into=model, lazy=True, cache_bytes=cache_bytes)
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


def measure(path: Path, layers: int, width: int) -> list[dict[str, Any]]:
    """Return a row for each way of loading."""
    decoded = layers * (width * width + width) * 4 / 1e6
    ways: list[tuple[str, float | None]] = [
        ("eager", None),
        ("eager, assigned", None),
        ("lazy", None),
        ("lazy, half cached", decoded / 2),
    ]
    rows: list[dict[str, Any]] = []
    for way, cache in ways:
        command = [sys.executable, "-m", "benchmarks.lazy", "--one", way, "--file", str(path)]
        size = ["--layers", str(layers), "--width", str(width), "--room", str(cache or 0)]
        process = subprocess.run([*command, *size], check=True, capture_output=True, text=True)
        result = json.loads(process.stdout)
        eager = rows[0] if rows else result
        output = result.pop("output")
        row = {"way": way, "decoded_mb": decoded, "file_mb": path.stat().st_size / 1e6} | result
        rows.append(row | {"of_eager": result["peak_mb"] / eager["peak_mb"], "output": output})
    eager_output = rows[0]["output"]
    for row in rows:
        row["exact"] = row.pop("output") == eager_output
    return rows


def main() -> None:
    """Measure and print the table; with --one, print the result of one process."""
    parser = command_parser(__doc__)
    parser.add_argument("--layers", type=int, default=64, help="(default: 64)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of a layer (default: 2048)")
    parser.add_argument("--scheme", default="int4", help="(default: int4)")
    parser.add_argument("--cache", type=Path, default=Path("runs/lazy"), help="folder of the file (default: runs/lazy)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = measure_way(options.file, options.layers, options.width, options.one, options.room or None)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    path = saved(options.cache, options.layers, options.width, options.scheme)
    report(measure(path, options.layers, options.width), as_json=options.json)


if __name__ == "__main__":
    main()
