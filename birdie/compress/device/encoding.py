"""Quantization on trellises and coding in lanes on a GPU: the kernels as functions of tensors.

`birdie.save` quantizes there what lies in the memory of a GPU and has no sensitivity; numbers then go to the CPU, which
codes them. For equal numbers `symbols_of` and `encode_lanes` give the histograms and the words of the CPU.
"""

import logging
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress import lanes
from birdie.compress.lanes import Factors
from birdie.entropy.trellis import chunk_rows, machine
from birdie.runtime.device import current

_TIES = 0.02  # share of numbers that other rounding may change


def searches(weight: Tensor) -> bool:
    """Return whether `quantize` takes this tensor: it lies on a GPU where the kernels work."""
    return weight.device.type == "cuda" and _works(weight.device)


@cache
def _works(device: torch.device) -> bool:
    problem = "triton is not installed" if find_spec("triton") is None else trial(device)
    if problem is not None:
        logging.getLogger("birdie").warning("weights on %s are quantized on the CPU: %s", device, problem)
    return problem is None


def trial(device: torch.device) -> str | None:
    """Quantize a small matrix on `device`, and return what went wrong, or None. Ties may be broken otherwise."""
    matrix = np.random.default_rng(0).normal(0, 3, (70, 40)).astype(np.float32)
    rows, columns = np.ones(70, np.float32), np.ones(40, np.float32)
    shape = lanes.Shape.of(matrix)
    try:
        factors = Factors.of(shape, rows, columns, 8, 0.05)
        numbers = quantize(torch.from_numpy(matrix).to(device), factors).cpu().numpy()
        differ = float(np.mean(numbers != lanes.quantize(matrix, shape, rows, columns, 8, 0.05)))
        return f"{differ:.1%} of the numbers are others than the CPU's" if differ > _TIES else None
    except Exception as error:  # whatever Triton and the driver raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def quantize(weight: Tensor, factors: Factors) -> Tensor:
    """Return numbers (rows, columns), int16, that quantize `weight` on paths down the columns.

    They are those of `birdie.compress.lanes.quantize`, from the same float32 arithmetic.

    Args:
        weight: (rows, columns), real, on the device.
        factors: of the search, for a trellis of 4 to 32 states.
    """
    from birdie.compress.device import encoding_kernels as kernels

    rows, columns = weight.shape
    device = weight.device
    by_row_and_column = [torch.from_numpy(part).to(device) for part in factors[:4]]
    numbers = torch.empty((rows, columns), dtype=torch.int16, device=device)
    survivors = torch.empty((rows, columns), dtype=torch.int32, device=device)
    height = min(chunk_rows(columns), rows)
    states, shift, flip, top = factors.code
    with current(device):
        kernels.search[(-(-rows // height), -(-columns // kernels.COLUMNS))](
            *(
                weight.resolve_neg().contiguous(),
                *by_row_and_column,
                survivors.view(torch.uint32),
                numbers,
                rows,
                columns,
                height,
            ),
            *(float(factors.gain), shift, flip),
            STATES=states,
            TOP=top,
            COLUMNS=kernels.COLUMNS,
            enable_fp_fusion=False,
        )
    return numbers


def symbols_of(numbers: Tensor, low: int, size: int, states: int) -> tuple[Tensor, Tensor]:
    """Return symbols and their histograms: number - `low`, plus `size` in odd states of a trellis.

    Args:
        numbers: (rows, columns) of integers on the device, low … low + size - 1.
        low: the least number.
        size: count of different numbers that occur, those between included; at most 32,768.
        states: of the trellis whose paths run down the columns; 1: nothing is added.

    Returns:
        (rows, columns) uint16, and (rows, size · parities) int32.
    """
    from birdie.compress.device import encoding_kernels as kernels

    rows, columns = numbers.shape
    paths, paired, height = machine(states), states > 1, chunk_rows(columns)
    symbols = torch.empty((rows, columns), dtype=torch.uint16, device=numbers.device)
    counts = torch.zeros((rows, size * (1 + paired)), dtype=torch.int32, device=numbers.device)
    with current(numbers.device):
        kernels.walk[(-(-rows // height), -(-columns // kernels.COLUMNS))](
            *(numbers.contiguous(), low, symbols, counts, rows, columns, height, size),
            int(paths.next_state[-1, 0]) ^ (states - 1) >> 1,
            int(paths.next_state[0, 1]),
            PAIRED=paired,
            COLUMNS=kernels.COLUMNS,
            num_warps=1,
        )
    return symbols, counts


def encode_lanes(
    symbols: Tensor, classes: NDArray[np.uint8], frequencies: NDArray[np.int64], precision: int, lanes: int
) -> tuple[Tensor, Tensor]:
    """Code symbols in lanes, chunk by chunk: the words of `birdie.entropy.rans_lanes.encode`.

    Args:
        symbols: of `symbols_of`, on the device.
        classes: (rows,) class of each row.
        frequencies: (classes · parities, size), which sum to 2**precision in each row.
        precision: log2 of the number of slots.
        lanes: a power of two.

    Returns:
        (words,) uint16, lane after lane, and (chunks, lanes) int32 words of each lane.
    """
    from birdie.compress.device import encoding_kernels as kernels

    rows, columns = symbols.shape
    device, height = symbols.device, chunk_rows(columns)
    chunks = -(-rows // height)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    count = int(classes.max()) + 1
    entries = torch.from_numpy((frequencies | starts << 16).reshape(count, -1)).to(device)
    capacity = min(height, rows) * -(-columns // lanes) + 3
    buffer = torch.empty(chunks * lanes * capacity, dtype=torch.uint16, device=device)
    lengths = torch.empty((chunks, lanes), dtype=torch.int32, device=device)
    with current(device):
        kernels.encode[(chunks,)](
            *(symbols, torch.from_numpy(classes).to(device), entries, buffer, lengths),
            *(rows, columns, height, entries.shape[1], capacity),
            PRECISION=precision,
            LANES=lanes,
            num_warps=max(1, lanes // 32),
        )
        ends = lengths.flatten().cumsum(0)
        words = torch.empty(int(ends[-1]), dtype=torch.uint16, device=device)
        kernels.join[(chunks * lanes,)](
            buffer, lengths, ends - lengths.flatten(), words, capacity, COPIED=kernels.COPIED, num_warps=1
        )
    return words, lengths
