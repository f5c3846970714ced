"""Decoding speed of two checkouts: `python -m benchmarks.decode_commits FOLDER [--runs 10] [--json]`.

The same files, written by this checkout, are loaded by this one and by that in FOLDER, in processes that take turns
file by file, on one thread. Kernels are warm; a run is the shortest of several loads. Rows are the medians of the runs,
in CPU seconds, which other load on the machine changes little, and by the clock; a ratio is this checkout over the
other.
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
from birdie.artifact.container import Reader
from birdie.entropy import coder
from birdie.entropy.hints import Effort

ROOT = Path(__file__).resolve().parents[1]
FILES: dict[str, tuple[str, Effort, int]] = {  # spec, coder, matrices
    "int6": ("int6", "fast", 8),
    "int6 max": ("int6", "max", 1),
    "trellis": ("trellis:sigma=0.3", "fast", 8),
    "trellis max": ("trellis:sigma=0.3", "max", 1),
    "lossless": ("lossless", "fast", 8),
    "lossless max": ("lossless", "max", 1),
    "rotation": ("rotation:bits=4", "fast", 8),
    "low rank": ("lowrank:rank=4,base=int6", "fast", 4),
    "spectral": ("spectral:identity,sigma=0.3", "fast", 8),
    "spectral dct": ("spectral:dct,edge=8,sigma=0.3", "fast", 8),
    "codebook": ("codebook:k=16", "fast", 8),
}
_LOADS = 7  # of a file by each checkout in a run
_LOAD = """
import json, sys, time, torch, birdie
torch.set_num_threads(1)
print(birdie.__file__, flush=True)
for line in sys.stdin:
    cpu, clock = time.process_time(), time.perf_counter()
    birdie.load(line.strip(), workers=1)
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - clock]), flush=True)
"""


def weights(matrices: int, dtype: torch.dtype, textured: bool) -> dict[str, Tensor]:
    """Return Gaussian matrices (512, 1024) of a GPT, rows of different deviations.

    Deviations of textured ones also change smoothly along rows, which context mixing alone learns.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(0.3 * torch.randn(512, 1, generator=generator))
    if textured:
        steps = 0.15 * torch.randn(512, 1024, generator=generator)
        scales = scales * torch.exp(steps.cumsum(1) - steps.cumsum(1).mean(1, keepdim=True))
    return {
        f"blocks.{index}.mlp.weight": (0.02 * scales * torch.randn(512, 1024, generator=generator)).to(dtype)
        for index in range(matrices)
    }


class Checkout:
    """A process that loads files with the birdie in a folder.

    Raises:
        SystemExit: another birdie runs there.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOAD], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        tree = Path(self._line()).resolve().parents[1]
        if tree != folder.resolve():
            raise SystemExit(f"{folder} runs {tree}; give the folder of a checkout")

    def load(self, path: Path) -> list[float]:
        """Return seconds of the processor and of the clock that one load takes."""
        assert self._process.stdin is not None
        print(path, file=self._process.stdin, flush=True)
        seconds: list[float] = json.loads(self._line())
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def run(folders: tuple[Path, Path], paths: list[Path]) -> dict[Path, list[list[float]]]:
    """Return, by path, the least seconds of the processor and of the clock in each of two new processes.

    They load a file in turns, so that whatever slows the machine down slows both.
    """
    checkouts = [Checkout(folder) for folder in folders]
    rows = {}
    for path in paths:
        for checkout in checkouts:
            checkout.load(path)  # fills caches
        loads = [[checkout.load(path) for checkout in checkouts] for _ in range(_LOADS)]
        rows[path] = [[min(part) for part in zip(*of_one, strict=True)] for of_one in zip(*loads, strict=True)]
    for checkout in checkouts:
        checkout.close()
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
            birdie.save(
                weights(matrices, getattr(torch, options.dtype), effort == "max"), paths[-1], scheme=spec, coder=effort
            )
        runs = []
        for index in range(options.runs + 1):  # the first compiles
            log(f"run {index} of {options.runs}")
            runs.append(run((ROOT, options.other), paths))
        coders = [_coders(path) for path in paths]
    rows: list[dict[str, Any]] = []
    for name, path, used in zip(FILES, paths, coders, strict=True):
        row: dict[str, Any] = {"file": name, "coders": used}
        for index, clock in enumerate(("cpu", "clock")):
            this, other = (statistics.median(of_run[path][which][index] for of_run in runs[1:]) for which in (0, 1))
            row |= {f"{clock}_s": this, f"{clock}_s_other": other, f"{clock}_ratio": this / other}
        rows.append(row)
    report(rows, as_json=options.json)


def _coders(path: Path) -> str:
    with Reader(path) as reader:
        codes = {stream.coder for name in reader.names for stream in reader.entry(name).streams}
    return ", ".join(coder.NAMES[code] for code in sorted(codes))


if __name__ == "__main__":
    main()
