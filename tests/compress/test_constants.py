"""Tables that a rule made are known by their numbers, in any shape; what was trained or drawn is not taken for one."""

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import birdie
from birdie.compress.constants import is_constant
from tests.compress.test_packed import gaussian

FREQUENCIES = 10_000.0 ** (-torch.arange(64) / 64)
ANGLES = torch.arange(512.0)[:, None] * FREQUENCIES
SAMPLES = torch.arange(400)
FOURIER = 2 * math.pi * torch.outer(torch.arange(201), SAMPLES) / 400
BETAS = torch.linspace(1e-4, 0.02, 1000)


def interleaved() -> Tensor:
    return torch.stack([ANGLES.sin(), ANGLES.cos()], dim=2).flatten(1)


def filter_bank(filters: int, bins: int) -> Tensor:
    """Return triangles with centers on a logarithmic scale, (filters, bins)."""
    centers = 700 * (10 ** (torch.linspace(0, 1.07, filters + 2)) - 1) / 8000
    slopes = centers[:, None] - torch.linspace(0, 1, bins)
    rise, fall = -slopes[:-2] / centers.diff()[:-1, None], slopes[2:] / centers.diff()[1:, None]
    return torch.minimum(rise, fall).clamp_min(0)


def grid_of_sines(size: int) -> Tensor:
    """Return sines of the coordinates of a square, flattened, behind a row of zeros: (1, size² + 1, 4 · 96)."""
    x, y = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="xy")
    angles = [axis.flatten()[:, None] * 10_000.0 ** (-torch.arange(96) / 96) for axis in (x, y)]
    table = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return torch.cat([torch.zeros(1, table.shape[1]), table])[None]


CONSTANTS: dict[str, Tensor] = {
    "sines then cosines": torch.cat([ANGLES.sin(), ANGLES.cos()], 1),
    "sines between cosines": interleaved(),
    "transposed": interleaved().T,
    "rotary cache": torch.cat([ANGLES, ANGLES], 1).cos()[None, None],
    "rotary numbers": torch.polar(torch.ones(512, 64), ANGLES),
    "grid of sines": grid_of_sines(14),
    "in float16": interleaved().half(),
    "in bfloat16": interleaved().bfloat16(),
    "in float64": ANGLES.double().cos(),
    "Fourier basis": torch.cat([FOURIER.cos(), FOURIER.sin()]),
    "STFT basis": (torch.cat([FOURIER.cos(), FOURIER.sin()]) * torch.hann_window(400))[:, None],
    "cosine basis": torch.cos(math.pi / 64 * (torch.arange(64) + 0.5) * torch.arange(64)[:, None]),
    "mel filters": filter_bank(80, 201),
    "mel filters, transposed": filter_bank(128, 513).T,
    "coordinates": torch.stack(torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 24), indexing="ij")),
    "frequencies": FREQUENCIES,
    "positions": torch.linspace(0.01, 3.0, 64),
    "slopes": 2.0 ** (-torch.arange(1, 9) * 0.7),
    "noise levels": torch.cumprod(1 - BETAS, 0),
    "Hann window": torch.hann_window(512),
    "Kaiser window": torch.kaiser_window(400),
    "symmetric window": torch.blackman_window(63, periodic=False),
    "Gaussian kernels": torch.exp(-0.5 * ((torch.arange(33) - 16) / torch.linspace(2, 6, 24)[:, None]) ** 2),
    "state of a memory": -torch.tril((2 * torch.arange(64) + 1.0).sqrt().outer((2 * torch.arange(64) + 1.0).sqrt())),
    "direction": nn.functional.normalize(gaussian(48), dim=0),
}  # fmt: skip

SPARSE = gaussian(256, 256) * (gaussian(256, 256).roll(7) > 1.6)
WEIGHTS: dict[str, Tensor] = {
    "drawn": gaussian(64, 64),
    "of a layer": nn.Linear(300, 100).weight.detach(),
    "of a convolution": nn.Conv2d(3, 64, 7).weight.detach(),
    "of a long convolution": nn.Conv1d(1, 64, 400).weight.detach(),
    "a vector": gaussian(64),
    "a norm": 1 + 0.01 * gaussian(512),
    "ones": torch.ones(64),
    "zeros": torch.zeros(64, 64),
    "pruned": SPARSE,
    "pruned, positive": SPARSE.abs(),
    "a random walk": gaussian(512, 64).cumsum(0),
    "smooth": nn.functional.avg_pool1d(gaussian(64, 1, 600), 9, 1)[:, 0],
    "sines that were trained": interleaved() + 0.03 * gaussian(512, 128),
    "blocks": torch.block_diag(*gaussian(8, 16, 16).abs()),
    "triangular": gaussian(64, 64).tril(),
    "on a grid": gaussian(128, 128).mul(2).round() * 0.1,
    "of low rank": gaussian(128, 2) @ gaussian(2, 128),
    "circulant": gaussian(64)[(torch.arange(64)[:, None] - torch.arange(64)) % 64],
    "short rows": gaussian(400, 14),
    "in bfloat16": gaussian(256, 256).bfloat16(),
    "with outliers": gaussian(128, 128) ** 5,
    "near the identity": torch.eye(128) + 0.01 * gaussian(128, 128),
    "columns of other sizes": gaussian(128, 128) * torch.logspace(-3, 3, 128),
}


@pytest.mark.parametrize("table", CONSTANTS)
def test_tables_are_constants(table: str) -> None:
    assert is_constant(CONSTANTS[table])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_are_none(weight: str) -> None:
    assert not is_constant(WEIGHTS[weight])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bits_are_looked_at_without_a_warning(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]))
    shape = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    bits = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    is_constant(bits.view(dtype).reshape(shape))


@pytest.mark.parametrize("options", [{}, {"scheme": [("*", "int4")]}, {"bits": 8}], ids=str)
@pytest.mark.parametrize("table", ["rotary cache", "STFT basis", "mel filters", "frequencies", "grid of sines"])
def test_they_come_back_bit_for_bit_under_any_name(table: str, options: dict[str, Any]) -> None:
    state = {"a.weight": gaussian(400, 128), "b": CONSTANTS[table]}
    file = io.BytesIO()
    if "bits" in options:
        options = {"budget": 3 * 400 * 128 + 4 * CONSTANTS[table].numel()}
    birdie.save(state, file, effort="fast", **options)
    assert torch.equal(birdie.load(file.getvalue())["b"], CONSTANTS[table])
