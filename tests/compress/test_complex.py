"""Complex weights: quantized as pairs of real numbers; what is no weight keeps every bit."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact.codes import DTYPES
from birdie.artifact.container import Reader, block_name, to_bytes
from birdie.compress.tensors import from_planes, planes
from birdie.errors import ArtifactError, WeightsError
from tests.artifact.states import same_bits
from tests.nightly import mostly_nightly

NUMBERS = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(shape, dtype=torch.complex64, generator=NUMBERS).to(dtype).clone()


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, channels: int = 20, modes: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(channels, channels, modes) / channels)
        self.register_buffer("freqs", random(modes))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        out = torch.zeros_like(waves)
        modes = self.weight.shape[-1]
        out[..., :modes] = torch.einsum("bix,iox->box", waves[..., :modes], self.weight)
        y: Tensor = torch.fft.irfft(out, n=x.shape[-1])
        return y


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.layers, self.project = nn.Conv1d(1, 20, 1), nn.ModuleList([Spectral()]), nn.Conv1d(20, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        y: Tensor = self.project(x)
        return y


def models() -> dict[str, Any]:
    return {
        "operator": Network(),
        "linear": nn.Linear(48, 64, dtype=torch.complex64),
        "bare": {"phases": random(96, 24), "bias": 0.1 * random(24)},
    }


def saved(model: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    birdie.save(model, file, **settings)
    return file.getvalue()


def bytes_of(model: Any) -> int:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    return sum(tensor.nbytes for tensor in state.values())


def error(decoded: Tensor, weight: Tensor) -> float:
    return float((decoded - weight).abs().norm() / weight.abs().norm())


@pytest.mark.parametrize(
    ("kind", "settings", "ratio", "most"),
    mostly_nightly(
        [
            (kind, *row)
            for kind in ("operator", "linear", "bare")
            for row in [
                ({}, 2.5, 0.01),
                ({"bits": 8.5}, 3.2, 0.02),
                ({"scheme": "int8"}, 2.5, 0.01),
                ({"scheme": "fp16"}, 1.5, 0.001),
                ({"scheme": [("*", "int4")]}, 2.5, 0.2),
            ]
        ],
        [
            ("operator", {}, 2.5, 0.01),
            ("linear", {"scheme": "int8"}, 2.5, 0.01),
            ("bare", {"scheme": "fp16"}, 1.5, 0.001),
            ("bare", {"scheme": [("*", "int4")]}, 2.5, 0.2),
        ],
    ),
    ids=str,
)
def test_complex_weights_become_smaller(kind: str, settings: dict[str, Any], ratio: float, most: float) -> None:
    model = models()[kind]
    file = saved(model, **settings)
    assert bytes_of(model) / len(file) > ratio
    for name, weight in (model.state_dict() if isinstance(model, nn.Module) else model).items():
        decoded = birdie.load(file)[name]
        assert (decoded.dtype, decoded.shape) == (weight.dtype, weight.shape)
        assert error(decoded, weight) < most


@pytest.mark.parametrize("kind", mostly_nightly(models(), ("bare",)))
def test_a_budget_is_met_and_counts_both_parts(kind: str) -> None:
    model = models()[kind]
    budget = bytes_of(model) // 5
    assert 0.8 * budget < len(saved(model, budget=budget)) <= budget
    summary = birdie.inspect(io.BytesIO(saved(model, lossless=True)))
    assert summary.weights == bytes_of(model) // 4
    for weight in [random(40, 30), random(40, 30, dtype=torch.complex128)]:
        assert len(saved({"weight": weight}, bits=6)) <= 2 * weight.numel() * 6 / 8


def test_the_error_is_that_of_a_real_tensor_of_the_same_numbers() -> None:
    weight = random(64, 48)
    decoded = birdie.load(saved({"weight": weight}))["weight"]
    assert same_bits(planes(decoded), birdie.load(saved({"weight": planes(weight)}))["weight"])


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch calls it experimental
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 0), (0,), (4, 3), (2, 3, 4), (3, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_planes_keep_every_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)
    parts = planes(weight)
    assert parts.dtype == (weight.real.dtype if weight.numel() else dtype)
    assert not weight.numel() or same_bits(from_planes(parts, shape), weight)
    assert same_bits(birdie.load(saved({"weight": weight}, lossless=True))["weight"], weight)
    decoded = birdie.load(saved({"weight": weight}))["weight"]
    assert (decoded.shape, decoded.dtype) == (weight.shape, weight.dtype)
    assert torch.allclose(torch.view_as_real(decoded).float(), torch.view_as_real(weight).float(), atol=4e-3)


def test_what_is_no_weight_keeps_every_bit() -> None:
    model = Network()
    freqs = model.layers[0].freqs
    assert isinstance(freqs, Tensor)
    assert same_bits(birdie.load(saved(model, scheme="int4"))["layers.0.freqs"], freqs)
    turns = torch.polar(torch.ones(64, 32), torch.outer(torch.arange(64.0), torch.rand(32)))
    state = {"freqs_cis": turns, "energies": random(300), "scalar": random(), "shift": random(7)}
    decoded = birdie.load(saved(state | {"weight": random(64, 64)}, bits=16))
    assert all(same_bits(decoded[name], tensor) for name, tensor in state.items())
    mask = (torch.rand(90, 90) < 0.5).to(torch.complex64)
    assert same_bits(birdie.load(saved({"mask": mask}))["mask"], mask)


@pytest.mark.parametrize("value", [complex("nan"), complex(0, float("inf"))])
@pytest.mark.parametrize("shape", [(64, 64), (40,)], ids=str)
def test_nan_is_refused(value: complex, shape: tuple[int, ...]) -> None:
    weight = random(*shape)
    weight[3] = torch.tensor(value)
    with pytest.raises(WeightsError, match="NaN"):
        saved({"weight": weight})
    assert same_bits(birdie.load(saved({"weight": weight}, lossless=True))["weight"], weight)


def test_data_calibrate_the_other_weights_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = Network(), [torch.randn(4, 1, 32, generator=NUMBERS) for _ in range(6)]
    with caplog.at_level("INFO", "birdie"):
        known = birdie.calibrate(model, batches, lambda module, x: module(x).square().mean())
        summary = birdie.save(model, io.BytesIO(), calibration=known, bits=8, tune=0.1)
    assert "layers.0.weight" in summary.uncalibrated
    assert any("layers.0.weight" in message for message in caplog.messages)
    assert summary.error is not None
    assert summary.error < 0.01


def test_blocks_of_another_dtype_are_refused() -> None:
    file = saved({"weight": random(64, 64)})
    with Reader(file) as reader:
        tensor, block = (reader.read(name) for name in ("weight", block_name("weight", 0)))
    for dtype in ("float64", "float16", "complex128"):
        changed = to_bytes([replace(tensor, dtype=DTYPES.index(dtype)), block])
        with pytest.raises(ArtifactError, match="blocks"):
            birdie.load(changed)
