"""How near a scheme comes to the rate–distortion bound: `python -m benchmarks.gaussian_source --schemes sigma:{step}`.

A million independent normal numbers have no structure, so nothing but the shape of the quantizer and the coder's
overhead decides. At mean squared error D no code can take fewer than ½ log₂(σ² / D) bits a number; a row is how many
more the whole file takes, with D measured on what the file decodes to. A scalar grid with an ideal coder takes 0.25 bit
more at any high rate.

A scheme is a spec of birdie with {step} where the step in standard deviations goes. The step of each rate is the
sixteenth of an octave, as files have them, that comes near it by bytes: between two of them rows differ in step, which
costs up to 0.0007 bit. The matrix is 1,000 × 1,000; names, shapes and steps of rows are counted.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.log_scales import PER_OCTAVE
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Scheme
from birdie.errors import BirdieError

SIDE = 1000
RATES = (3.0, 4.0, 5.0)
NEAR = 0.04  # bits a number from the rate asked for
ROUNDS = 8
TABLE = ("scheme", "bytes", "bits", "gap", "step", "encode_s", "decode_s")  # the rest is in --json
Row = dict[str, Any]


def normal(side: int = SIDE, seed: int = 0) -> Tensor:
    """(side, side) standard normal numbers."""
    return torch.randn(side, side, generator=torch.Generator().manual_seed(seed))


def bound(variance: float, distortion: float) -> float:
    """Fewest bits a number for a normal source at this mean squared error: max(0, ½ log₂(variance / distortion))."""
    return max(0.0, math.log2(variance / distortion) / 2)


def coded(scheme: Scheme, source: Tensor, label: str) -> Row:
    """One file: its rate, its distortion, and its distance from the bound.

    Args:
        scheme: settings of a scheme, its step included.
        source: (rows, columns) float32.
        label: for the row.
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
    """The row of a step whose file takes `rate` bits a number, to within `NEAR`.

    Args:
        scheme: step in standard deviations → settings.
        rate: bits a number, above 1.
        source: (rows, columns) float32.
        label: for the row.
    """
    log_step = math.log2(4.13) - rate  # entropy of a normal number on a fine grid: ½ log₂ 2πe − log₂ step
    found: Row = {}
    for _ in range(ROUNDS):
        log_step = round(log_step * PER_OCTAVE) / PER_OCTAVE
        found = coded(scheme(2.0**log_step), source, f"{label} at {rate:g} bits")
        if abs(found["bits"] - rate) <= NEAR:
            break
        log_step += found["bits"] - rate
    return {**found, "step": 2.0**log_step}


def spelled(spec: str) -> Callable[[float], Scheme]:
    """A spec with {step} in it, such as "sigma:{step}", as a function of the step."""
    return lambda step: parse_spec(spec.replace("{step}", f"{step:.6g}"))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=["sigma:{step}"], help="specs with {step} in them")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="bits a number (default: 3 4 5)")
    parser.add_argument("--side", type=int, default=SIDE, help="rows and columns (default: 1,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = normal(options.side, options.seed)
    try:
        rows = [at_rate(spelled(spec), rate, source, spec) for spec in options.schemes for rate in options.rates]
    except BirdieError as error:
        raise SystemExit(str(error)) from error
    report(rows if options.json else [{key: row[key] for key in TABLE} for row in rows], as_json=options.json)


if __name__ == "__main__":
    main()
