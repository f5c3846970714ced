"""Decoding speed of two checkouts: `python -m benchmarks.decode_commits FOLDER [--runs 10] [--json]`.

The same files, written by this checkout, are loaded by this one and by that in FOLDER, in processes that take turns, on
one thread. Kernels are warm; a run is the shortest of several loads. Rows are the medians of the runs, in CPU seconds,
which other load on the machine changes little, and by the clock; a ratio is this checkout over the other.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import birdie
from benchmarks.command import command_parser, log, report
from birdie.entropy.hints import Effort

ROOT = Path(__file__).resolve().parents[1]
FILES: dict[str, tuple[str, Effort, int]] = {  # spec, coder, matrices
    "int6": ("int6", "fast", 8),
    "int6 max": ("int6", "max", 1),
    "trellis": ("trellis:sigma=0.3", "fast", 8),
    "trellis max": ("trellis:sigma=0.3", "max", 1),
    "lossless": ("lossless", "fast", 8),
    "lossless max": ("lossless", "max", 1),
    "rotation": ("rotation:bits=4", "fast", 4),
    "low rank": ("lowrank:rank=4,base=int6", "fast", 2),
    "spectral": ("spectral:identity,sigma=0.3", "fast", 8),
    "spectral dct": ("spectral:dct,edge=8,sigma=0.3", "fast", 4),
    "codebook": ("codebook:k=16", "fast", 8),
}
_LOAD = """
import json, sys, time, torch, birdie
torch.set_num_threads(1)
rows = {}
for path in sys.argv[1:]:
    birdie.load(path, workers=1)
    runs = []
    for _ in range(7):
        cpu, clock = time.process_time(), time.perf_counter()
        birdie.load(path, workers=1)
        runs.append((time.process_time() - cpu, time.perf_counter() - clock))
    rows[path] = [min(part) for part in zip(*runs)]
print(json.dumps({"birdie": birdie.__file__, "rows": rows}))
"""


def weights(matrices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return Gaussian matrices (512, 1024) of a GPT, rows of different deviations."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(0.3 * torch.randn(512, 1, generator=generator))
    return {
        f"blocks.{index}.mlp.weight": (0.02 * scales * torch.randn(512, 1024, generator=generator)).to(dtype)
        for index in range(matrices)
    }


def load(checkout: Path, paths: list[Path]) -> dict[str, list[float]]:
    """Return seconds of the processor and of the clock by path, in a new process of `checkout`."""
    command = [sys.executable, "-c", _LOAD, *map(str, paths)]
    done = json.loads(subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout)
    if Path(done["birdie"]).resolve().parents[1] != checkout.resolve():
        raise SystemExit(f"{checkout} runs {done['birdie']}; give the folder of a checkout")
    rows: dict[str, list[float]] = done["rows"]
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("other", type=Path, metavar="FOLDER", help="the checkout to compare with")
    parser.add_argument("--runs", type=int, default=10, help="of each checkout (default: 10)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, (spec, effort, matrices) in FILES.items():
            paths.append(Path(folder) / f"{name}.birdie")
            birdie.save(weights(matrices, getattr(torch, options.dtype)), paths[-1], scheme=spec, coder=effort)
        runs: dict[Path, list[dict[str, list[float]]]] = {ROOT: [], options.other: []}
        for index in range(options.runs + 1):  # the first compiles
            log(f"run {index} of {options.runs}")
            for checkout, durations in runs.items():
                durations.append(load(checkout, paths))
    rows: list[dict[str, Any]] = []
    for name, path in zip(FILES, map(str, paths), strict=True):
        row: dict[str, Any] = {"file": name}
        for index, clock in enumerate(("cpu", "clock")):
            medians = [statistics.median(run[path][index] for run in of_one[1:]) for of_one in runs.values()]
            this, other = medians
            row |= {f"{clock}_s": this, f"{clock}_s_other": other, f"{clock}_ratio": this / other}
        rows.append(row)
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
