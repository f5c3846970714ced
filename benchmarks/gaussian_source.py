"""Distance of a scheme from the rate–distortion bound: `python -m benchmarks.gaussian_source --schemes sigma:{step}`.

A million independent normal numbers have no structure, so only the quantizer and the overhead of the coder matter. At
mean squared error D, no code needs fewer than ½ log₂(σ² / D) bits per number. A row has the excess of the entire file,
with D measured on the decoded numbers. A scalar grid with an ideal coder has an excess of 0.25 bit at high rates.

A scheme is a spec of birdie with {step} in place of the step in standard deviations. Files have steps in sixteenths of
an octave; for each rate, the step with the closest file size is used. Rows between two such steps differ in step, which
costs up to 0.0007 bit. The matrix is 1,000 × 1,000; names, shapes and row scales count.
"""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_parser, errors_as_exit, report
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.log_scales import PER_OCTAVE
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Scheme

SIDE = 1000
RATES = (3.0, 4.0, 5.0)
TOLERANCE = 0.04  # bits per number from the target rate
ROUNDS = 8
TABLE = ("scheme", "bytes", "bits", "gap", "step", "encode_s", "decode_s")  # further keys are in --json
Row = dict[str, Any]


def normal(side: int = SIDE, seed: int = 0) -> Tensor:
    """Return (side, side) standard normal numbers."""
    return torch.randn(side, side, generator=torch.Generator().manual_seed(seed))


def bound(variance: float, distortion: float) -> float:
    """Return the minimum bits per number of a normal source: max(0, ½ log₂(variance / distortion))."""
    return max(0.0, math.log2(variance / distortion) / 2)


def coded(scheme: Scheme, source: Tensor, label: str) -> Row:
    """Return the row of one file: its rate, its distortion, and its distance from the bound.

    Args:
        scheme: scheme with its step.
        source: (rows, columns) float32.
        label: name of the row.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.birdie"
        start = time.perf_counter()
        save({"x": source}, path, scheme=scheme)
        middle = time.perf_counter()
        decoded = load(path)["x"]
        end = time.perf_counter()
        size = path.stat().st_size
    distortion = float((decoded.double() - source.double()).square().mean())
    variance = float(source.double().square().mean())
    bits = 8 * size / source.numel()
    return {
        "scheme": label,
        "bytes": size,
        "bits": bits,
        "distortion": distortion,
        "bound": bound(variance, distortion),
        "gap": bits - bound(variance, distortion),
        "encode_s": middle - start,
        "decode_s": end - middle,
    }


def at_rate(scheme: Callable[[float], Scheme], rate: float, source: Tensor, label: str) -> Row:
    """Return the row of the step whose file has `rate` bits per number, within `TOLERANCE`.

    Args:
        scheme: step in standard deviations → scheme.
        rate: bits per number, above 1.
        source: (rows, columns) float32.
        label: name of the row.
    """
    log_step = math.log2(4.13) - rate  # entropy of a normal number on a fine grid: ½ log₂ 2πe − log₂ step
    row: Row = {}
    for _ in range(ROUNDS):
        log_step = round(log_step * PER_OCTAVE) / PER_OCTAVE
        row = coded(scheme(2.0**log_step), source, f"{label} at {rate:g} bits")
        if abs(row["bits"] - rate) <= TOLERANCE:
            break
        log_step += row["bits"] - rate
    return {**row, "step": 2.0**log_step}


def scheme_of_step(spec: str) -> Callable[[float], Scheme]:
    """Return the function step → scheme of a spec with {step} in it, such as "sigma:{step}"."""
    return lambda step: parse_spec(spec.replace("{step}", f"{step:.6g}"))


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--schemes", nargs="+", default=["sigma:{step}"], help="specs with {step} in them")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="bits per number (default: 3 4 5)")
    parser.add_argument("--side", type=int, default=SIDE, help="rows and columns (default: 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = normal(options.side, options.seed)
    with errors_as_exit():
        rows = [at_rate(scheme_of_step(spec), rate, source, spec) for spec in options.schemes for rate in options.rates]
    report(rows if options.json else [{key: row[key] for key in TABLE} for row in rows], as_json=options.json)


if __name__ == "__main__":
    main()
