"""Losses as torch has them, loss(outputs, targets), as losses of calibration, loss(module, batch)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from birdie.errors import ConfigError

_MODULES = ("module", "model", "net", "network")  # first arguments of a loss module that calls the module itself


@dataclass(frozen=True, slots=True)
class CriterionLoss:
    """Loss of a module on an (inputs, targets) batch by a criterion, such as `nn.CrossEntropyLoss()`.

    Inputs are a tensor, a tuple of arguments, or a dict of keyword arguments.
    """

    criterion: Callable[..., Tensor]

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the loss."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            name = getattr(self.criterion, "__name__", type(self.criterion).__name__)
            raise ConfigError(
                f"the loss {name} takes (inputs, targets) batches, and one is another {type(batch).__name__}; "
                "give pairs, or a function loss(module, batch)"
            )
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            outputs = module(**inputs)
        else:
            outputs = module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
        return self.criterion(outputs, targets)


def batch_loss(loss: Any) -> Any:
    """Return `loss` as loss(module, batch): a criterion of torch, or a module like one, is called on pairs."""
    of_torch = getattr(loss, "__module__", None) == "torch.nn.functional"
    return CriterionLoss(loss) if of_torch or _is_criterion(loss) else loss


def _is_criterion(loss: Any) -> bool:
    if not isinstance(loss, nn.Module):
        return False
    first = next(iter(inspect.signature(loss.forward).parameters), "")
    return first not in _MODULES
