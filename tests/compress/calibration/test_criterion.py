"""Criteria of torch, and what is like them, stand for loss(module, batch) with (inputs, targets) batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.criterion import batch_loss


class Focal(nn.Module):
    """A criterion of one's own."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) ** 2


class Named(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


X, Y = torch.randn(6, 8), torch.arange(6)


@pytest.mark.parametrize("inputs", [X, (X, 2.0), {"x": X, "scale": 2.0}], ids=["tensor", "tuple", "dict"])
@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), F.cross_entropy, Focal()],
    ids=lambda criterion: getattr(criterion, "__name__", type(criterion).__name__),
)
def test_a_criterion_gets_outputs_and_targets(criterion: Any, inputs: Any) -> None:
    model = Named(8, 6)
    expected = criterion(model(X, 1.0 if isinstance(inputs, Tensor) else 2.0), Y)
    assert torch.equal(batch_loss(criterion)(model, (inputs, Y)), expected)
