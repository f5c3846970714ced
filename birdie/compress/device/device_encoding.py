"""Quantization on trellises on a GPU: the kernel as a function of tensors.

`birdie.save` quantizes there what lies in the memory of a GPU and has no sensitivity; numbers then go to the CPU, which
codes them.
"""

import logging
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from birdie.compress.trellis import lanes
from birdie.compress.trellis.lanes import FeedbackFactors
from birdie.entropy.trellis_states import chunk_rows
from birdie.system.device import current

MOST_STATES = 32  # of a trellis that `quantize` takes: survivors are the bits of a word
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
    shape = lanes.WeightDensity.of(matrix)
    try:
        factors = FeedbackFactors.of(shape, rows, columns, 8, 0.05)
        numbers = quantize(torch.from_numpy(matrix).to(device), factors).cpu().numpy()
        differ = float(np.mean(numbers != lanes.quantize(matrix, shape, rows, columns, 8, 0.05)))
        return f"{differ:.1%} of the numbers are others than the CPU's" if differ > _TIES else None
    except Exception as error:  # whatever Triton and the driver raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def quantize(weight: Tensor, factors: FeedbackFactors) -> Tensor:
    """Return numbers (rows, columns), int16, that quantize `weight` on paths down the columns.

    They are those of `birdie.compress.trellis.lanes.quantize`, from the same float32 arithmetic.

    Args:
        weight: (rows, columns), real, on the device.
        factors: of the search, for a trellis of 4 to `MOST_STATES` states.
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
