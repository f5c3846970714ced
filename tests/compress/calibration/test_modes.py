"""A mode for a while: of the parts named alone, and undone part by part, whatever happens."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

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
