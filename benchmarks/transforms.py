"""What transforms and factors save of a layer at equal squared error: `python -m benchmarks.transforms [--json]`.

    python -m benchmarks.transforms                                          kernels of the CIFAR ResNets in BIRDIE_DATA
    python -m benchmarks.transforms --weights model.safetensors --tensors 'h.0.*' --sigma 0.3,1

Each row is a layer and a step of the plain grid, in deviations of the layer. The others take the step at which they
leave the error of that grid, and their coded symbols (coder "max") are divided by the grid's, read off between two
neighbouring steps: below 1 is better. Tucker is cut by several energies, each of which loses a share of the error to
the cut, and the best is shown with its ranks: on plain grids, and in tandem with a DCT of the core's taps (of a
matrix: of core and factors); no ratio where core and factors were more numbers than the layer.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.report import report
from birdie.artifact.checkpoints import read_state_dict
from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.spectral import Spectral
from birdie.compress.schemes.tucker import Tucker
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import kernel
from birdie.entropy import coder

SHARES = (0.1, 0.4, 0.8)  # of the error, lost to the cut
NETS = {
    "resnet20-12fca82f.th": ("*layer1.1.conv1.weight", "*layer2.1.conv2.weight", "*layer3.1.conv1.weight"),
    "resnet32-d509ac18.th": ("*layer1.2.conv2.weight", "*layer3.2.conv2.weight"),
}
_HALVINGS = 7
Row = dict[str, Any]


def error(weight: Tensor, found: Encoded) -> float:
    """‖w − ŵ‖² / ‖w‖²."""
    wide = weight.double()
    return float((decode(found).double() - wide).square().sum() / wide.square().sum())


def coded_bytes(encoded: Encoded) -> int:
    """Return the bytes of all streams as the coder "max" writes them."""
    layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    total = 0
    for stream, expected in zip(encoded.streams, layout, strict=True):
        taps = kernel(encoded.shape, expected.columns)
        hints = expected.hints if taps == (1, 1) else replace(expected.hints, kernel=taps)
        total += len(coder.encode(np.ascontiguousarray(stream), hints, "max").payload)
    return total


def bytes_at(weight: Tensor, scheme: Callable[[float], Scheme], sigma: float, wanted: float) -> float | None:
    """Bytes at the error `wanted`, between the steps next to it; None if no step from ⅛ to 4 `sigma` leaves it."""
    low, high = math.log2(sigma) - 3, math.log2(sigma) + 2
    found: dict[float, tuple[float, int]] = {}
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        encoded = scheme(2**middle).encode("w", weight)
        found[middle] = error(weight, encoded), coded_bytes(encoded)
        low, high = (middle, high) if found[middle][0] <= wanted else (low, middle)
    if low not in found or high not in found:
        return None
    (left, fine), (right, coarse) = found[low], found[high]
    at = math.log(wanted / left) / math.log(right / left) if right > left > 0 else 0.0
    return float(fine * (coarse / fine) ** at)


def row(name: str, weight: Tensor, sigma: float) -> Row:
    """One layer at one step."""
    plain = Spectral(Transform("identity"), sigma, "none").encode("w", weight)
    wanted, whole = error(weight, plain), coded_bytes(plain)
    scan = "planes" if weight.ndim > 2 else "none"
    taps = Transform("dct", axes="kernel" if weight.ndim > 2 else "all")

    def against(scheme: Callable[[float], Scheme]) -> float | None:
        found = bytes_at(weight, scheme, sigma, wanted)
        return None if found is None else found / whole

    best: dict[str, tuple[float, str]] = {}
    for share in SHARES:
        energy = 1 - share * wanted
        for kind in ("tucker", "in tandem"):
            base = Grid(sigma=sigma) if kind == "tucker" else Spectral(taps, sigma, scan)
            trial = Tucker(energy, base=base).encode("w", weight)
            if trial.scheme != "tucker":
                continue

            def scheme(step: float, base: Grid | Spectral = base, energy: float = energy) -> Scheme:
                at = Grid(sigma=step) if isinstance(base, Grid) else Spectral(base.transform, step, base.scan)
                return Tucker(energy, base=at)

            ratio = against(scheme)
            if ratio is not None:
                ranks = "×".join(str(rank) for rank in trial.params[: weight.ndim])
                best[kind] = min(best.get(kind, (math.inf, "")), (ratio, ranks))
    return {
        "layer": name,
        "shape": "×".join(map(str, weight.shape)),
        "sigma": sigma,
        "error": wanted,
        "grid_bytes": whole,
        "dct": against(lambda step: Spectral(taps, step, scan)),
        "tucker": best["tucker"][0] if "tucker" in best else None,
        "ranks": best["tucker"][1] if "tucker" in best else "not cut",
        "in_tandem": best["in tandem"][0] if "in tandem" in best else None,
    }


def layers(asked: argparse.Namespace) -> Mapping[str, Tensor]:
    """Name → weights of the layers asked for, float32."""
    if asked.weights is not None:
        given = [(asked.weights, asked.tensors.split(","))]
    else:
        folder = Path(os.environ.get("BIRDIE_DATA", "")) / "weights" / "resnet_cifar10"
        given = [(folder / name, list(patterns)) for name, patterns in NETS.items()]
    found = {}
    for path, patterns in given:
        for name, weight in read_state_dict(path).items():
            if weight.ndim >= 2 and any(fnmatchcase(name, pattern) for pattern in patterns):
                found[f"{path.stem} {name}"] = weight.float()
    return found


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tensors", default="*")
    parser.add_argument("--sigma", default="0.3,1,2")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    asked = options()
    steps = [float(each) for each in asked.sigma.split(",")]
    found = layers(asked)
    rows = []
    for name, weight in found.items():
        for step in steps:
            rows.append(row(name, weight, step))
            print(rows[-1], file=sys.stderr, flush=True)
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
