"""Bytes saved by transforms and Tucker factors of a layer at equal squared error: `python -m benchmarks.transforms`.

    python -m benchmarks.transforms [--json]                                 kernels of the CIFAR ResNets in BIRDIE_DATA
    python -m benchmarks.transforms --weights model.safetensors --tensors 'h.0.*' --sigma 0.3,1

Each row is a layer and a step of the plain grid, in standard deviations of the layer. The other schemes use the step
with the same error as that grid. Their coded symbols (coder "max") are divided by those of the grid, interpolated
between two neighboring steps: below 1 is better. Tucker is truncated at several energies, each of which causes a share
of the error, and the best is shown with its ranks: on plain grids, and in tandem with a DCT of the core's taps (for a
matrix: of core and factors). There is no ratio if core and factors have more numbers than the layer.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, report
from benchmarks.shared_data import shared_data
from birdie.artifact.checkpoints import read_state_dict
from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.spectral import Spectral
from birdie.compress.schemes.tucker import Tucker
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import kernel
from birdie.entropy import coder

SHARES = (0.1, 0.4, 0.8)  # of the error, caused by the truncation
NETS = {
    "resnet20-12fca82f.th": ("*layer1.1.conv1.weight", "*layer2.1.conv2.weight", "*layer3.1.conv1.weight"),
    "resnet32-d509ac18.th": ("*layer1.2.conv2.weight", "*layer3.2.conv2.weight"),
}
_HALVINGS = 7
Row = dict[str, Any]


def error(weight: Tensor, encoded: Encoded) -> float:
    """Return ‖w − ŵ‖² / ‖w‖²."""
    wide = weight.double()
    return float((decode(encoded).double() - wide).square().sum() / wide.square().sum())


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
    """Return the bytes at error `wanted`, interpolated between steps; None if no step of ⅛ to 4 `sigma` has it."""
    low, high = math.log2(sigma) - 3, math.log2(sigma) + 2
    points: dict[float, tuple[float, int]] = {}
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        encoded = scheme(2**middle).encode("w", weight)
        points[middle] = error(weight, encoded), coded_bytes(encoded)
        low, high = (middle, high) if points[middle][0] <= wanted else (low, middle)
    if low not in points or high not in points:
        return None
    (left, fine), (right, coarse) = points[low], points[high]
    share = math.log(wanted / left) / math.log(right / left) if right > left > 0 else 0.0
    return float(fine * (coarse / fine) ** share)


def row(name: str, weight: Tensor, sigma: float) -> Row:
    """Return the row of one layer at one step."""
    plain = Spectral(Transform("identity"), sigma, "none").encode("w", weight)
    wanted, grid_bytes = error(weight, plain), coded_bytes(plain)
    scan = "planes" if weight.ndim > 2 else "none"
    taps = Transform("dct", axes="kernel" if weight.ndim > 2 else "all")

    def against(scheme: Callable[[float], Scheme]) -> float | None:
        size = bytes_at(weight, scheme, sigma, wanted)
        return None if size is None else size / grid_bytes

    best: dict[str, tuple[float, str]] = {}
    for share in SHARES:
        energy = 1 - share * wanted
        for kind in ("tucker", "in tandem"):
            base = Grid(sigma=sigma) if kind == "tucker" else Spectral(taps, sigma, scan)
            trial = Tucker(energy, base=base).encode("w", weight)
            if trial.scheme != "tucker":
                continue

            def scheme(step: float, base: Grid | Spectral = base, energy: float = energy) -> Scheme:
                scaled = Grid(sigma=step) if isinstance(base, Grid) else Spectral(base.transform, step, base.scan)
                return Tucker(energy, base=scaled)

            ratio = against(scheme)
            if ratio is not None:
                ranks = "×".join(str(rank) for rank in trial.params[: weight.ndim])
                best[kind] = min(best.get(kind, (math.inf, "")), (ratio, ranks))
    return {
        "layer": name,
        "shape": "×".join(map(str, weight.shape)),
        "sigma": sigma,
        "error": wanted,
        "grid_bytes": grid_bytes,
        "dct": against(lambda step: Spectral(taps, step, scan)),
        "tucker": best["tucker"][0] if "tucker" in best else None,
        "ranks": best["tucker"][1] if "tucker" in best else "not cut",
        "in_tandem": best["in tandem"][0] if "in tandem" in best else None,
    }


def layers(options: argparse.Namespace) -> Mapping[str, Tensor]:
    """Return name → weights, float32, of the layers that the flags name."""
    if options.weights is not None:
        files = [(options.weights, options.tensors.split(","))]
    else:
        folder = shared_data() / "weights" / "resnet_cifar10"
        files = [(folder / name, list(patterns)) for name, patterns in NETS.items()]
    weights = {}
    for path, patterns in files:
        for name, weight in read_state_dict(path).items():
            if weight.ndim >= 2 and any(fnmatchcase(name, pattern) for pattern in patterns):
                weights[f"{path.stem} {name}"] = weight.float()
    return weights


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the CIFAR ResNets of the shared data)")
    parser.add_argument("--tensors", default="*", help="patterns of tensor names, comma-separated (default: *)")
    parser.add_argument("--sigma", type=comma_separated(float), default="0.3,1,2", help="steps (default: 0.3,1,2)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print the table."""
    options = parse()
    rows = []
    with errors_as_exit():
        for name, weight in layers(options).items():
            for step in options.sigma:
                rows.append(row(name, weight, step))
                log(str(rows[-1]))
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
