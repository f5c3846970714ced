"""Quantization by the kernel under Triton's interpreter, against the CPU."""

from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.device import device_encoding as encoding
from birdie.compress.trellis import lanes
from birdie.compress.trellis.lanes import FeedbackFactors, WeightDensity
from birdie.entropy import trellis_states as trellis


def search(
    states: int, rows: int, columns: int, dtype: torch.dtype = torch.float32, chunk: int = 1 << 20
) -> dict[str, float]:
    """Return the share of numbers that differ from those of the CPU, and the errors of both in squared scales."""
    rng = np.random.default_rng(states + rows)
    weight = torch.from_numpy(rng.normal(0, 3, (rows, columns)).astype(np.float32)).to(dtype)
    matrix = weight.float().numpy()
    row = np.exp(rng.normal(0, 0.2, rows)).astype(np.float32)
    row[rows // 2] = 0  # left out
    column = np.exp(rng.normal(0, 0.2, columns)).astype(np.float32)
    shape = WeightDensity.of(matrix)
    with mock.patch.object(trellis, "CHUNK", chunk):
        expected = lanes.quantize(matrix, shape, row, column, states, 0.05)
        numbers = encoding.quantize(weight, FeedbackFactors.of(shape, row, column, states, 0.05)).numpy()
        errors = [error(matrix, one, row, column, states) for one in (expected, numbers)]
    return {"differ": float(np.mean(numbers != expected)), "error": errors[1], "error of the CPU": errors[0]}


def error(matrix: NDArray[np.float32], numbers: NDArray[np.int16], row: Any, column: Any, states: int) -> float:
    odd = trellis.odd_states(numbers, states)
    used = row > 0
    decoded = (numbers + 0.5 * odd) * row[:, None] * column
    return float(np.mean(((matrix - decoded)[used] / row[used, None] / column) ** 2))


def results() -> dict[str, dict[str, float]]:
    """Return what the kernel made of matrices of several trellises."""
    return {
        "4 states": search(4, 70, 33),
        "8 states": search(8, 70, 40),
        "32 states": search(32, 80, 20),
        "bfloat16": search(16, 40, 12, torch.bfloat16),
        "chunks": search(8, 50, 30, chunk=400),
    }
