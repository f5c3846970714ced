"""Quantization in place: a module's weights become those that its .birdie file would decode to.

module ──save──► bytes in memory ──load──► the same module
"""

import sys
from io import BytesIO
from typing import Any, Literal

from torch import nn

from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.artifact.summary import Summary
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.rate.assignment import Schemes
from birdie.entropy.hints import Effort
from birdie.errors import ConfigError
from birdie.runtime.callbacks import Progress
from birdie.runtime.outputs import Source


def quantize_(
    model: nn.Module,
    scheme: Schemes | None = None,
    *,
    budget: int | None = None,
    bits: float | None = None,
    quality: float | None = None,
    coder: Effort = "max",
    calibration: Calibration | CalibrationResult | Literal["synthetic"] | None = None,
    example_inputs: Any = None,
    symmetries: bool = True,
    refit: int = 0,
    blockwise: bool | Source = False,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Summary:
    """Quantize the weights of `model` in place: to the values that a file with these settings decodes to.

    The result is that of `birdie.save` and `birdie.load` into the module, bit for bit, without a file: to try settings,
    to evaluate, or to fine-tune what is left. Weights keep their dtypes and devices; memory holds the coded file once.

    Args:
        model: a module, wrapped or not; its parameters and buffers are overwritten.
        scheme, budget, bits, quality, coder, refit, blockwise, progress, workers: as in `birdie.save`.
        calibration, example_inputs: as in `birdie.save`. A `CalibrationResult` describes the float weights, so use it
            for this module once, or quantize a copy.
        symmetries: with calibration, units whose order is arbitrary are sorted in the module as well, as they are in a
            file. The function is unchanged, but an optimizer's averages then belong to other units: give False to keep
            the order.

    Returns:
        Bytes and tensors of the file that `birdie.save` would write.

    Raises:
        ConfigError: `model` is not a module, or settings contradict one another; the module is unchanged.
        WeightsError: a tensor holds NaN or infinite values, or cannot be stored at all; the module is unchanged.
        BudgetError: nothing fits the budget; the module is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}, not a module; give a module, or use birdie.save")
    file = BytesIO()
    summary = save(
        model,
        file,
        scheme=scheme,
        budget=budget,
        bits=bits,
        quality=quality,
        coder=coder,
        calibration=calibration,
        example_inputs=example_inputs,
        symmetries=symmetries,
        refit=refit,
        blockwise=blockwise,
        progress=progress,
        workers=workers,
    )
    limit = sys.maxsize  # limits are for files from elsewhere
    load(file.getbuffer(), into=model, max_bytes=limit, max_operations=limit, workers=workers)
    return summary
