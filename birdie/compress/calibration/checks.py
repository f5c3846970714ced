"""Checks of what a calibration sees: the loss, gradients and activations, squares of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError, DataError, WeightsError


def checked_loss(nats: Any) -> Tensor:
    """Return what a loss returned, if it is one number that depends on weights."""
    if not isinstance(nats, Tensor):
        raise ConfigError(
            f"the calibration loss returns a {type(nats).__name__}; return one number as a tensor, as training does "
            "before backward()"
        )
    if nats.numel() != 1:
        raise ConfigError(
            f"the calibration loss returns {tuple(nats.shape)} numbers; return one number, such as their mean()"
        )
    if nats.is_complex():
        raise ConfigError("the calibration loss is a complex number; return a real one, such as its abs()")
    if not nats.requires_grad:
        raise ConfigError(
            "the calibration loss does not depend on the module's weights by operations that torch differentiates; "
            "call the module in it, without detach(), item() or torch.no_grad()"
        )
    return nats


@contextmanager
def naming_bad_weights(module: nn.Module) -> Iterator[None]:
    """Replace the DataError of values that are not finite by a WeightsError that names a weight, if one is not finite.

    NaN is detected at the output of a layer, which does not show whether the data or a weight caused it.
    """
    try:
        yield
    except DataError as error:
        for name, weight in module.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise WeightsError(
                    f"tensor {name!r} holds NaN or infinite values, so nothing can be calibrated; repair the checkpoint"
                ) from error
        raise


def finite(name: str, values: Tensor) -> Tensor:
    """Return values of the calibration at a tensor, which must be finite."""
    if not bool(torch.isfinite(values).all()):
        raise DataError(
            f"calibration found NaN, infinite values or squares that exceed float32 at {name!r}; check weights and data"
        )
    return values


def require_finite(name: str, sensitivity: Sensitivity) -> None:
    """Raise DataError if squares exceeded float32."""
    blocks = None if sensitivity.blocks is None else sensitivity.blocks.blocks
    for part in (sensitivity.hessian, blocks, sensitivity.row_fisher, sensitivity.output):
        if part is not None and not bool(torch.isfinite(part).all()):
            raise DataError(f"squares of the calibration values at {name!r} exceed float32; check weights and batches")
