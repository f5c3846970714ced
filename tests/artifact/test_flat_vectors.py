"""Flat vectors of layers one after the other, and vectors whose rounding would count: in files, by every setting."""

from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import birdie
from birdie.artifact.summary import Summary
from tests.nightly import mostly_nightly

SIZES = [("norm", 0, 300), ("small", 0.02, 9000), ("usual", 0.2, 20_000), ("bias", 0.1, 200), ("large", 1.0, 30_001)]


def layers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: spread * torch.randn(count, generator=generator) if spread else torch.ones(count)
        for name, spread, count in SIZES
    }


def saved(state: dict[str, Tensor], **settings: Any) -> tuple[Summary, dict[str, Tensor]]:
    file = BytesIO()
    summary = birdie.save(state, file, **settings)
    return summary, birdie.load(file.getvalue())


def errors(flat: Tensor, **settings: Any) -> tuple[Summary, dict[str, float]]:
    """Return what saving says, and the relative error of each layer in a flat vector."""
    parts = layers()
    summary, state = saved({"flat": flat}, **settings)
    assert (state["flat"].shape, state["flat"].dtype) == (flat.shape, flat.dtype)
    decoded = state["flat"].split([len(part) for part in parts.values()])
    pairs = zip(parts.items(), decoded, strict=True)
    return summary, {name: float((back - part).norm() / part.norm()) for (name, part), back in pairs}


@pytest.mark.parametrize(
    ("settings", "bits", "ratio"),
    mostly_nightly(
        [
            *(({}, 9.5, 2), ({"bits": 8}, 8, 2), ({"scheme": "int4"}, 5, 2), ({"scheme": "trellis:sigma=0.3"}, 5, 2)),
            *(({"bits": 4}, 4, 2.5), ({"scheme": "rotation:bits=4"}, 5, 2), ({"effort": "fast"}, 9.5, 2)),
        ],
        [({}, 9.5, 2), ({"bits": 8}, 8, 2), ({"scheme": "int4"}, 5, 2)],
    ),
    ids=str,
)
def test_layers_of_different_size_in_a_flat_vector_err_alike(
    settings: dict[str, Any], bits: float, ratio: float
) -> None:
    """But for the rows that two layers share, which are many of a short layer."""
    summary, relative = errors(torch.cat(list(layers().values())), **settings)
    assert summary.bits_per_weight <= bits
    assert relative["small"] <= max(ratio, 2) * relative["large"] + 0.03
    assert relative["usual"] <= ratio * relative["large"] + 0.01
    assert max(relative["norm"], relative["large"]) < 0.15
    assert not summary.otherwise


def test_a_vector_of_complex_numbers_a_rule_and_a_tail_come_back() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "pairs": torch.randn(5001, dtype=torch.complex64, generator=generator),
        "half": torch.randn(4100, generator=generator).half(),
        "bias": torch.rand(4096, generator=generator) + 1,
        "w": torch.randn(4096, 4, generator=generator),
    }
    for settings in ({}, {"scheme": [("bias", "int8")]}, {"bits": 6}):
        summary, back = saved(state, **settings)
        for name, tensor in state.items():
            assert (back[name].shape, back[name].dtype) == (tensor.shape, tensor.dtype)
            assert float((back[name] - tensor).abs().square().mean() / tensor.abs().square().mean()) < 1e-3
        assert ("bias" in summary.otherwise) == (not settings)  # as long as a side of w, and not crowding it


@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"scheme": "int8"}], ids=str)
def test_phases_of_a_recurrent_unit_keep_every_bit_where_that_costs_little(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "B": torch.randn(64, 16, generator=generator),
        "bias": 0.01 * torch.randn(64, generator=generator),
        "nu_log": torch.log(2e-4 * (0.5 + torch.rand(64, generator=generator))),
        "theta_log": torch.log(3 * torch.rand(64, generator=generator) + 0.01),
        "large": torch.randn(64, 64, generator=generator),
    }
    summary, back = saved(state, **settings)
    assert torch.equal(back["theta_log"], state["theta_log"])
    assert torch.equal(back["nu_log"], state["nu_log"])
    rounded = {row.name for row in summary.tensors if row.scheme == "fp16"}
    assert "bias" in rounded
    assert summary.rounded == len(rounded)
    assert saved(state, lossless=True)[0].rounded == 0


def test_what_could_not_be_quantized_is_said() -> None:
    state = {"w": torch.randn(5000, 4), "subnormal": torch.randn(64, 64) * 1e-42, "norm.weight": torch.rand(5000) + 1}
    assert saved(state)[0].otherwise == ("subnormal", "norm.weight")
    assert saved(state, scheme=[("w", "lossless")])[0].otherwise == ("subnormal", "norm.weight")
    assert saved(state, lossless=True)[0].otherwise == saved(state, bits=40)[0].otherwise == ()


class Shifted(nn.Module):
    """A layer and a long vector that ends within a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 30)
        self.flat = nn.Parameter(0.02 * torch.randn(5003))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.layer(x) + self.flat[:30] + self.flat[-30:]
        return shifted


@pytest.mark.parametrize("settings", [{}, {"bits": 4}], ids=str)
def test_a_calibrated_vector_with_a_tail_is_measured_and_loaded(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Shifted()
    batches = [(torch.randn(8, 40), torch.randn(8, 30)) for _ in range(4)]
    file = BytesIO()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    summary, flat = birdie.save(model, file, calibration=(model, batches, loss), **settings), model.flat.detach()
    assert summary.error is not None
    assert summary.error < 0.01
    assert float((birdie.load(file.getvalue())["flat"] - flat).norm() / flat.norm()) < 0.3
