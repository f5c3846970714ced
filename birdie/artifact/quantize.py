"""Quantization in place: a module's weights become those that its .birdie file would decode to.

module ──save──► bytes in memory ──load──► the same module
"""

import sys
from io import BytesIO
from typing import Unpack

from torch import nn

from birdie.artifact.load import load
from birdie.artifact.options import QuantizeOptions
from birdie.artifact.save import save
from birdie.artifact.summary import Summary
from birdie.compress.rate.assignment import Schemes
from birdie.errors import ConfigError


def quantize_(model: nn.Module, scheme: Schemes | None = None, **options: Unpack[QuantizeOptions]) -> Summary:
    """Quantize the weights of `model` in place: to the values that a file with these settings decodes to.

    The result is that of `birdie.save` and `birdie.load` into the module, bit for bit, without a file: to try settings,
    to evaluate, or to fine-tune what is left. Weights keep their dtypes and devices; memory holds the coded file once.
    A calibration describes the float weights, so use its result for this module once, or quantize a copy. Units whose
    order is arbitrary are sorted in the module as well, as they are in a file: the function is unchanged, but an
    optimizer's averages then belong to other units; `birdie.calibrate(…, symmetries=False)` keeps the order.

    Args:
        model: a module, wrapped or not; its parameters and buffers are overwritten.
        scheme: how to store the matrices, as for `birdie.save`.
        options: budget, bits, quality, coder, calibration, progress and workers, as for `birdie.save`.

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
    summary = save(model, file, scheme=scheme, **options)
    limit = sys.maxsize  # limits are for files from elsewhere
    load(file.getbuffer(), into=model, max_bytes=limit, max_operations=limit, workers=options.get("workers"))
    return summary
