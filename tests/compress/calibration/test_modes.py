"""Modules while they are measured: modes, copies, criteria."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.criterion import batch_loss
from birdie.compress.calibration.modes import evaluation_copy
from birdie.compress.calibration.synthetic import synthetic_calibration


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_module_that_keeps_a_result_with_gradients_can_be_copied_and_calibrated() -> None:
    """`torch.nn.utils.weight_norm` keeps the weight of the last forward pass as an attribute."""
    norm: Any = torch.nn.utils.weight_norm
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU(), norm(nn.Linear(8, 4)))
    inputs = torch.randn(16, 8)
    expected = model(inputs)
    twin = evaluation_copy(model)
    assert torch.equal(twin(inputs), expected)
    dict(twin.named_parameters())["0.weight_g"].data.zero_()
    assert not torch.equal(twin(inputs), expected)
    assert torch.equal(model(inputs), expected)
    assert synthetic_calibration(model, inputs).sensitivities


def test_what_cannot_be_copied_is_shared() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lock: Any = threading.Lock()
    vars(module).update(lock=lock, own=[1])
    twin = evaluation_copy(module)
    assert vars(twin)["lock"] is lock
    assert vars(twin)["own"] == [1]
    assert vars(twin)["own"] is not vars(module)["own"]
    assert twin[0].weight is not module[0].weight  # type: ignore[index]


def test_evaluation_does_not_call_the_code_of_a_module() -> None:
    """Adapters add their weights to those of the layer when they are told to evaluate."""

    class Adapter(nn.Linear):
        def train(self, mode: bool = True) -> "Adapter":
            if not mode:
                self.weight.data.add_(1)
            return super().train(mode)

    module = Adapter(4, 4)
    weight = module.weight.detach().clone()
    synthetic_calibration(module, torch.randn(16, 4))
    assert torch.equal(module.weight, weight)
    assert module.training


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
