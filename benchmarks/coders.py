"""Bytes and speed of each coder of birdie.entropy: `python -m benchmarks.coders [--json]`.

One row per coder and array, on one thread, with warm kernels; times are the best of as many runs as fit into `seconds`.

    weights   1,024 × 512 integers, Gaussian; rows and columns differ in scale
    scales    1,024 × 1 log2 indices of row scales, which vary smoothly
    noise     1,024 × 512 uniform bytes, like the low bits of a mantissa
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import Row, command_parser, report
from benchmarks.processes import take_turns
from birdie.entropy import coder, mixed, numbers, raw, static, tiles
from birdie.entropy import coding_plan as plan

Integers = NDArray[np.integer]
State = dict[str, Tensor]
ROWS, COLUMNS = 1024, 2048


def arrays(rows: int, seed: int) -> dict[str, Integers]:
    """Return the arrays by name."""
    rng = np.random.default_rng(seed)
    scales = 3 * np.exp(0.5 * rng.normal(size=(rows, 1)) + 0.3 * rng.normal(size=512))
    return {
        "weights": np.rint(rng.normal(size=(rows, 512)) * scales).clip(-127, 127).astype(np.int32),
        "scales": np.cumsum(np.rint(rng.normal(0, 2, (rows, 1))), 0).astype(np.int32),
        "noise": rng.integers(0, 256, (rows, 512)).astype(np.int32),
    }


def encoders(values: Integers) -> dict[int, Callable[[], bytes | None]]:
    """Return for each coder that takes `values` the function that encodes them."""
    low, high = int(values.min()), int(values.max())
    known: dict[int, Callable[[], bytes | None]] = {
        coder.PACKED: lambda: raw.encode_packed(values, low, high),
        coder.NUMBERS: lambda: numbers.encode(values),
        coder.STATIC: lambda: static.encode(values, (1, 1)),
        coder.MIXED: lambda: mixed.encode(values, (1, 1)),
        coder.TILES: lambda: tiles.encode(plan.search(values, (1, 1), 1)),
    }
    return known | ({coder.BYTES: lambda: values.astype(np.uint8).tobytes()} if low >= 0 and high < 256 else {})


def best(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest duration of `work`, of at least three runs with warm kernels."""
    return min(take_turns({"": work}, seconds=seconds)[""])


def coder_rows(rows: int, seed: int, seconds: float) -> Iterator[Row]:
    """Yield a row for each coder and array that it takes."""
    for name, values in arrays(rows, seed).items():
        for code, encode in encoders(values).items():
            if (payload := encode()) is None:
                continue

            def decode(code: int = code, payload: bytes = payload, values: Integers = values) -> Integers:
                return coder.decode(code, payload, values.shape[0], values.shape[1], threads=1)

            yield {
                "array": name,
                "coder": coder.NAMES[code],
                "bytes": len(payload),
                "bits per value": 8 * len(payload) / values.size,
                "encode M/s": values.size / best(encode, seconds) / 1e6,
                "decode M/s": values.size / best(decode, seconds) / 1e6,
                "exact": bool((decode() == values).all()),
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrays (default: 0)")
    parser.add_argument("--rows", type=int, default=1024, help="of the arrays (default: 1,024)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report(list(coder_rows(options.rows, options.seed, options.seconds)), as_json=options.json)


if __name__ == "__main__":
    main()
