"""Bytes and speed of each coder of birdie.entropy on equal arrays: `python -m benchmarks.coders --json [--seconds 2]`.

One row per coder and array, on one thread, with warm kernels; times are the best of as many runs as fit into `seconds`.

    weights   1,024 × 512 integers, Gaussian; rows and columns differ in scale
    scales    1,024 × 1 log2 indices of row scales, which vary smoothly
    noise     1,024 × 512 uniform bytes, like the low bits of a mantissa
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command_parser, report
from birdie.entropy import coder, mixed, numbers, raw, static

Integers = NDArray[np.integer]
Row = dict[str, object]


def arrays(seed: int) -> dict[str, Integers]:
    """Return the arrays by name."""
    rng = np.random.default_rng(seed)
    scales = 3 * np.exp(0.5 * rng.normal(size=(1024, 1)) + 0.3 * rng.normal(size=512))
    return {
        "weights": np.rint(rng.normal(size=(1024, 512)) * scales).clip(-127, 127).astype(np.int32),
        "scales": np.cumsum(np.rint(rng.normal(0, 2, (1024, 1))), 0).astype(np.int32),
        "noise": rng.integers(0, 256, (1024, 512)).astype(np.int32),
    }


def encoders(values: Integers) -> dict[int, Callable[[], bytes | None]]:
    """Return for each coder that takes `values` the function that encodes them."""
    low, high = int(values.min()), int(values.max())
    known: dict[int, Callable[[], bytes | None]] = {
        coder.PACKED: lambda: raw.encode_packed(values, low, high),
        coder.NUMBERS: lambda: numbers.encode(values),
        coder.STATIC: lambda: static.encode(values, (1, 1)),
        coder.LANES: lambda: static.encode(values, (1, 1), 1, 64 if values.shape[1] > 64 else 4),
        coder.MIXED: lambda: mixed.encode(values, (1, 1)),
    }
    return known | ({coder.BYTES: lambda: values.astype(np.uint8).tobytes()} if low >= 0 and high < 256 else {})


def best(work: Callable[[], object], seconds: float) -> float:
    """Return the least time of `work`, in seconds, of three runs or more."""
    work()  # compiles the kernels
    least, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        least, runs = min(least, time.perf_counter() - start), runs + 1
    return least


def measure(name: str, values: Integers, code: int, encode: Callable[[], bytes | None], seconds: float) -> Row | None:
    """Return the row of a coder; None where it does not take the array."""
    payload = encode()
    if payload is None:
        return None

    def decode() -> Integers:
        rows, columns = values.shape
        return coder.decode(code, payload, rows, columns, threads=1)

    return {
        "array": name,
        "coder": coder.NAMES[code],
        "bytes": len(payload),
        "bits per value": 8 * len(payload) / values.size,
        "encode M/s": values.size / best(encode, seconds) / 1e6,
        "decode M/s": values.size / best(decode, seconds) / 1e6,
        "exact": bool((decode() == values).all()),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measured = [
        measure(name, values, code, encode, options.seconds)
        for name, values in arrays(options.seed).items()
        for code, encode in encoders(values).items()
    ]
    report([row for row in measured if row is not None], as_json=options.json)


if __name__ == "__main__":
    main()
