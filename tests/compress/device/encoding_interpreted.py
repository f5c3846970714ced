"""Quantization and coding by the kernels under Triton's interpreter, against the CPU: prints one JSON object.

TRITON_INTERPRET=1 python tests/compress/device/encoding_interpreted.py     # as test_encoding does
"""

import json
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress import lanes
from birdie.compress.device import encoding
from birdie.compress.lanes import Factors, Shape
from birdie.entropy import rans_lanes, row_classes, trellis
from tests.reference.streams import on_paths

Results = dict[str, dict[str, float | bool]]


def search(states: int, rows: int, columns: int, dtype: torch.dtype = torch.float32, chunk: int = 1 << 20) -> Results:
    """Return the share of numbers that differ from those of the CPU, and the errors of both in squared scales."""
    rng = np.random.default_rng(states + rows)
    weight = torch.from_numpy(rng.normal(0, 3, (rows, columns)).astype(np.float32)).to(dtype)
    matrix = weight.float().numpy()
    row = np.exp(rng.normal(0, 0.2, rows)).astype(np.float32)
    row[rows // 2] = 0  # left out
    column = np.exp(rng.normal(0, 0.2, columns)).astype(np.float32)
    shape = Shape.of(matrix)
    with mock.patch.object(trellis, "CHUNK", chunk):
        expected = lanes.quantize(matrix, shape, row, column, states, 0.05)
        numbers = encoding.quantize(weight, Factors.of(shape, row, column, states, 0.05)).numpy()
        errors = [error(matrix, one, row, column, states) for one in (expected, numbers)]
    return {"": {"differ": float(np.mean(numbers != expected)), "error": errors[1], "error of the CPU": errors[0]}}


def error(matrix: NDArray[np.float32], numbers: NDArray[np.int16], row: Any, column: Any, states: int) -> float:
    odd = trellis.odd_states(numbers, states)
    used = row > 0
    decoded = (numbers + 0.5 * odd) * row[:, None] * column
    return float(np.mean(((matrix - decoded)[used] / row[used, None] / column) ** 2))


def code(states: int, deviation: float, rows: int, columns: int, count: int, chunk: int = 1 << 20) -> Results:
    """Return whether symbols, histograms and words equal those of the CPU."""
    numbers = on_paths(rows, columns, states, deviation)
    low, size = int(numbers.min()), int(numbers.max() - numbers.min()) + 1
    parities = 1 + (states > 1)
    with mock.patch.object(trellis, "CHUNK", chunk):
        symbols, counts = encoding.symbols_of(torch.from_numpy(numbers.astype(np.int16)), low, size, states)
        odd = trellis.odd_states(numbers, states)
        joint = (numbers - low + size * (odd if states > 1 else 0)).astype(np.uint16)
        histograms = row_classes.histograms(joint, parities * size)
        classes = (np.arange(rows) % 3).astype(np.uint8)
        weights = row_classes.sums(histograms, classes, 3).reshape(-1, size) + 1
        frequencies = np.maximum(weights * 4096 // weights.sum(1, keepdims=True), 1)
        frequencies[np.arange(len(frequencies)), frequencies.argmax(1)] += 4096 - frequencies.sum(1)
        words, lengths = encoding.encode_lanes(symbols, classes, frequencies, 12, count)
        height, expected = trellis.chunk_rows(columns), []
        for first in range(0, rows, height):
            part = slice(first, first + height)
            expected.append(
                rans_lanes.encode(
                    (numbers - low)[part].astype(np.uint16),
                    classes[part],
                    frequencies,
                    12,
                    odd[part] if states > 1 else None,
                    count,
                )
            )
    return {
        "": {
            "symbols": bool((symbols.numpy() == joint).all()),
            "counts": bool((counts.numpy() == histograms).all()),
            "words": bool((words.numpy() == np.concatenate([one for one, _ in expected])).all()),
            "lengths": bool((lengths.numpy() == np.stack([one for _, one in expected])).all()),
        }
    }


def main() -> None:
    cases = {
        "search, 4 states": search(4, 70, 33),
        "search, 8 states": search(8, 70, 40),
        "search, 32 states": search(32, 80, 20),
        "search, bfloat16": search(16, 40, 12, torch.bfloat16),
        "search, chunks": search(8, 50, 30, chunk=400),
        "code, a grid": code(1, 3, 12, 37, 8),
        "code, 8 states": code(8, 1.5, 20, 40, 16),
        "code, 32 states, chunks": code(32, 9, 20, 40, 32, 200),
        "code, one lane a column": code(4, 1, 9, 64, 64),
    }
    sys.stdout.write(json.dumps({name: result[""] for name, result in cases.items()}))


if __name__ == "__main__":
    main()
