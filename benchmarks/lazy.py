"""What lazy loading saves: `python -m benchmarks.lazy --json [--layers 64] [--width 2048]`.

A float32 model of equal square layers with random weights, by default 1.07 GB, saved once by `--scheme` with the fast
coder into the folder `--cache`. Each way of loading it runs in a process of its own: built on the meta device (and
given memory where the way needs it), loaded, and run twice on a batch; "assigned" puts the decoded tensors in the place
of the module's own, which are otherwise copied into. Rows: the most memory above that of the imports and
kernels (the kernel's high-water mark, reset there), as a share of eager loading's; seconds to load and for each pass;
whether the output is that of eager loading bit for bit.
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
from benchmarks.report import report
from birdie.artifact import container
from birdie.artifact.container import Reader

BATCH = 32
DISTINCT = 4


def build(layers: int, width: int) -> nn.Sequential:
    """The model: linear layers with ReLU between them."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def saved(folder: Path, layers: int, width: int, scheme: str) -> Path:
    """The file, made if it is not there: `DISTINCT` layers coded, and their bytes again under the names of the rest."""
    path = folder / f"{layers}x{width}-{scheme}.birdie"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in build(min(layers, DISTINCT), width).state_dict().items()}
    state = {name: torch.randn(shape) * (2 / width) ** 0.5 for name, shape in shapes.items()}
    birdie.save(state, path, scheme=[("*.weight", scheme)], coder="fast")
    with Reader(path) as reader:
        entries, about = [reader.read(name) for name in reader.names], bytes(reader.metadata)
    again = {}
    for entry in entries:
        index, _, kind = entry.name.partition(".")
        for layer in range(int(index) // 2, layers, DISTINCT):
            again[layer, kind] = replace(entry, name=f"{2 * layer}.{kind}")
    container.write(path, again.values(), about)
    return path


def resident(key: str) -> float:
    """A line of this process's status, `VmRSS` or `VmHWM`, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def warm(folder: Path) -> None:
    """Load the kernels of coder and scheme by a file of one small layer."""
    small = saved(folder, 1, 512, "int4")
    for lazy in (False, True):
        birdie.load(small, into=build(1, 512), lazy=lazy)(torch.ones(1, 512))


def one(path: Path, layers: int, width: int, way: str, cache_mb: float | None) -> dict[str, Any]:
    """Load and run in this process."""
    torch.set_num_threads(1)
    warm(path.parent)
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, start = resident("VmRSS"), time.perf_counter()
    with torch.device("meta"):
        model = build(layers, width)
    if way == "eager":
        birdie.load(path, into=model.to_empty(device="cpu"))
    elif way == "eager, assigned":
        model.load_state_dict(birdie.load(path), assign=True)
    else:
        room = None if cache_mb is None else int(cache_mb * 1e6)
        birdie.load(path, into=model, lazy=True, cache_bytes=room)
    times = [time.perf_counter()]
    with torch.inference_mode():
        for _ in range(2):
            y = model.eval()(x)
            times.append(time.perf_counter())
    return {
        "peak_mb": resident("VmHWM") - before,
        "load_s": times[0] - start,
        "first_s": times[1] - times[0],
        "second_s": times[2] - times[1],
        "output": hashlib.sha256(y.numpy().tobytes()).hexdigest(),
    }


def measure(path: Path, layers: int, width: int) -> list[dict[str, Any]]:
    """A row for each way."""
    decoded = layers * (width * width + width) * 4 / 1e6
    ways: list[tuple[str, float | None]] = [
        ("eager", None),
        ("eager, assigned", None),
        ("lazy", None),
        ("lazy, half cached", decoded / 2),
    ]
    rows: list[dict[str, Any]] = []
    for way, cache in ways:
        own = [sys.executable, "-m", "benchmarks.lazy", "--one", way, "--file", str(path)]
        size = ["--layers", str(layers), "--width", str(width), "--room", str(cache or 0)]
        done = subprocess.run([*own, *size], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        first = rows[0] if rows else None
        exact = found.pop("output")
        share = found["peak_mb"] / (first["peak_mb"] if first else found["peak_mb"])
        row = {"way": way, "decoded_mb": decoded, "file_mb": path.stat().st_size / 1e6} | found
        rows.append(row | {"of_eager": share, "output": exact})
    for row in rows[1:]:
        row["exact"] = row.pop("output") == rows[0]["output"]
    rows[0].pop("output")
    rows[0]["exact"] = True
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--cache", type=Path, default=Path("runs/lazy"), help="folder of the file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = one(options.file, options.layers, options.width, options.one, options.room or None)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    path = saved(options.cache, options.layers, options.width, options.scheme)
    report(measure(path, options.layers, options.width), as_json=options.json)


if __name__ == "__main__":
    main()
