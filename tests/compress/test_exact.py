"""Exact whatever the scheme: tensors that are no weights, constants, and the precision of small tensors."""

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.compress.constants import is_constant
from birdie.compress.exact import FEW
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import SMALL, applicable, small_scheme
from birdie.compress.state import ModelState
from birdie.compress.tensors import parts
from birdie.errors import BudgetError, WeightsError
from tests.nightly import mostly_nightly

SETTINGS: list[dict[str, Any]] = [{}, {"bits": 8}, {"scheme": "int4"}, {"scheme": "bf16"}, {"scheme": [("*", "int8")]}]


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


COSINES = torch.arange(64).outer(10_000.0 ** (-torch.arange(64) / 64)).cos()


class Tables(nn.Module):
    """A matrix, its bias, and buffers as other people's modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.norm.running_mean, self.norm.running_var = gaussian(64), gaussian(64).exp()
        tables = {
            "mask": torch.tril(torch.ones(1, 1, 32, 32)),
            "turns": 10_000.0 ** (-torch.arange(32) / 32),
            "cosines": torch.arange(64).outer(10_000.0 ** (-torch.arange(16) / 16)).cos(),
            "e0": torch.tensor([-13.587, -1029.41, -1484.87], dtype=torch.float64),
            "step": torch.tensor(0.1),
        }
        for name, table in tables.items():
            self.register_buffer(name, table)


def roundtrip(model: nn.Module | dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    file = io.BytesIO()
    birdie.save(model, file, **settings)
    return birdie.load(file.getvalue())


@pytest.mark.parametrize("settings", mostly_nightly(SETTINGS, [{"bits": 8}]), ids=str)
def test_buffers_of_a_module_come_back_bit_for_bit(settings: dict[str, Any]) -> None:
    model = Tables()
    decoded = roundtrip(model, **settings)
    for name, buffer in model.named_buffers():
        assert torch.equal(decoded[name], buffer), name
    assert not torch.equal(decoded["linear.weight"], model.linear.weight)


EXACT = {
    "running_var": gaussian(64).exp(),
    "blocks.0.inv_freq": 10_000.0 ** (-torch.arange(0, 64, 2) / 64),
    "mask": torch.tril(torch.ones(48, 48)),
    "one_hot": torch.eye(64)[torch.arange(100) % 64],
    "signs": torch.where(gaussian(70, 70) > 0, 1.3, -1.3),
    "segments": (torch.arange(64 * 64).reshape(64, 64) // 300 * 0.7).float(),
    "positions": torch.arange(500.0)[None],
    "n_averaged": torch.tensor(3.7),
    "input_max": torch.tensor(torch.inf),  # a bound that nothing has set yet
    "energies.weight": gaussian(90, 1) * 3,
    "target_mean": gaussian(1, 12, 1),
    "shift": gaussian(40, 20, dtype=torch.float64),
    "layers.0.causal": torch.triu(torch.full((40, 40), -torch.inf), 1),
}


@pytest.mark.parametrize("settings", mostly_nightly(SETTINGS, [{}, {"scheme": "int4"}]), ids=str)
def test_what_is_no_weight_of_a_state_dict_comes_back_bit_for_bit(settings: dict[str, Any]) -> None:
    decoded = roundtrip({"weight": gaussian(64, 64), **EXACT}, **settings)
    for name, tensor in EXACT.items():
        assert torch.equal(decoded[name], tensor), name


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("norm.weight", gaussian(64)),
        ("layers.0/bias", gaussian(1, 64)),
        ("head.weight", gaussian(80, 80)),
        ("codes", gaussian(64, 64).mul(3).round() * 0.1),  # quantized once, in more values than a mask has
        ("vector", gaussian(5000)),
        ("norm.weight", torch.ones(64)),  # which 16 bits keep, and tuning may change
    ],
)
def test_weights_are_weights(name: str, weight: Tensor) -> None:
    few = name == "codes" and weight.unique().numel() <= FEW
    assert ModelState.of({"a": gaussian(80, 64), name: weight}).exact == ({name} if few else frozenset())


@pytest.mark.parametrize(
    ("vector", "exact"),
    [
        (gaussian(64), False),
        (gaussian(1, 64), False),
        (gaussian(80), False),
        (gaussian(33), True),  # no matrix has such a side
        (torch.linspace(0.01, 3.0, 64), True),  # positions, bins
        (10_000.0 ** (-torch.arange(64) / 64), True),
        (gaussian(64, dtype=torch.float64), True),
    ],
)
def test_a_vector_of_unknown_name_is_in_doubt_if_it_is_as_long_as_a_side_of_a_matrix(
    vector: Tensor, exact: bool
) -> None:
    state = ModelState.of({"a": gaussian(80, 64), "b": vector})
    assert (state.exact, state.doubtful) == (({"b"}, frozenset()) if exact else (frozenset(), {"b"}))
    assert not ModelState.of({"a": gaussian(80, 64), "bias": gaussian(64)}).doubtful


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_doubt_is_resolved_for_exactness_where_that_costs_little(settings: dict[str, Any]) -> None:
    small = {"a": gaussian(80, 64), "phases": gaussian(64)}
    assert torch.equal(roundtrip(small, **settings)["phases"], small["phases"])
    many = {"a": gaussian(80, 64), **{f"phases{index}": gaussian(64) + index for index in range(40)}}
    exact = [torch.equal(tensor, many[name]) for name, tensor in roundtrip(many, **settings).items()]
    assert 1 <= sum(exact) < 20


@pytest.mark.parametrize("counter", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_running_statistics_are_known_by_their_position(counter: bool, layers: int) -> None:
    state, statistics = {"w": gaussian(64, 32, 3, 3), "b": gaussian(64)}, set()
    for layer in range(layers):
        state |= {f"{layer}p": gaussian(64), f"{layer}q": gaussian(64), f"{layer}r": gaussian(64) + 1}
        state[f"{layer}s"] = gaussian(64).exp()
        statistics |= {f"{layer}r", f"{layer}s"}
        if counter:
            state[f"{layer}t"] = torch.tensor(7)
    assert ModelState.of(state).exact == statistics


@pytest.mark.parametrize("shape", [(32, 64), (32, 8, 8), (8, 32, 7)], ids=str)
def test_weight_norm_has_weights_where_spectral_norm_has_vectors(shape: tuple[int, ...]) -> None:
    state = {"conv.weight_v": gaussian(*shape)} | {
        name: torch.nn.functional.normalize(gaussian(size), dim=0)
        for name, size in (("other.weight_v", 64), ("other.weight_u", 32))
    }
    assert ModelState.of(state).exact == {"other.weight_v", "other.weight_u"}


def test_a_buffer_tied_to_a_parameter_is_a_weight() -> None:
    module = nn.Linear(64, 64)
    module.register_buffer("kept", module.weight.detach())
    assert ModelState.of(module).exact == frozenset()


def test_a_rule_with_the_full_name_wins_and_a_pattern_does_not() -> None:
    state = {"cos_cached": COSINES, "w": gaussian(64, 64)}
    assert torch.equal(roundtrip(state, scheme=[("*cached", "int4")])["cos_cached"], state["cos_cached"])
    assert not torch.equal(roundtrip(state, scheme=[("cos_cached", "int4")])["cos_cached"], state["cos_cached"])


def test_what_is_exact_may_hold_nan_and_a_weight_may_not() -> None:
    bad = torch.full((64,), torch.nan)
    for name in ("running_var", "limits"):
        state = {"w": gaussian(96, 80), name: bad}
        assert roundtrip(state)[name].isnan().all()
    with pytest.raises(WeightsError, match=r"norm\.weight=lossless"):
        roundtrip({"w": gaussian(64, 64), "norm.weight": bad})
    assert roundtrip({"w": gaussian(64, 64), "norm.weight": bad}, scheme=[("norm.weight", "lossless")])


def test_a_budget_that_exact_tensors_make_impossible_names_the_largest() -> None:
    state = {"w": gaussian(64, 64), "cos_cached": COSINES, "inv_freq": gaussian(64)}
    with pytest.raises(BudgetError, match=r"'cos_cached' with \d,\d{3} bytes"):
        birdie.save(state, io.BytesIO(), budget=5_000)


def test_a_budget_that_integers_and_files_make_impossible_says_so() -> None:
    numbers = torch.Generator().manual_seed(0)
    state = {"q.codes": torch.randint(256, (64, 160), generator=numbers, dtype=torch.uint8), "q.scales": gaussian(64)}
    files = {"tokenizer.json": bytes(torch.randint(256, (8_000,), generator=numbers, dtype=torch.uint8).tolist())}
    with pytest.raises(BudgetError, match=r"kept files and metadata 8,\d{3}, integers .* 10,\d{3} .*quantized already"):
        write_model(state | {"w": gaussian(64, 64)}, io.BytesIO(), SaveOptions(budget=18_000), files=files)


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


@pytest.mark.parametrize("numbers", [1000, 100_000])
def test_integers_are_a_map_at_any_size(numbers: int) -> None:
    indices = torch.randint(50_000, (numbers // 10, 10), generator=torch.Generator().manual_seed(0)).float()
    assert ModelState.of({"map": indices, "w": gaussian(64, 64)}).exact == {"map"}
    indices[-1, -1] += 0.5
    assert not ModelState.of({"map": indices, "w": gaussian(64, 64)}).exact


class Unit(nn.Module):
    """A layer of torch, and vectors and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.phases = nn.Parameter(gaussian(64))
        self.scales = nn.Parameter(gaussian(5000))
        self.table = nn.Parameter(interleaved(), requires_grad=False)


def test_a_module_tells_which_vectors_are_of_torchs_layers() -> None:
    unit = Unit()
    nn.init.normal_(unit.norm.weight)
    state = ModelState.of(unit)
    assert {"phases", "table"} <= state.exact
    assert not {"layer.weight", "layer.bias", "norm.weight", "norm.bias"} & (state.exact | state.doubtful)
    unit.table.requires_grad_()
    assert "table" not in ModelState.of(unit).exact  # it will be trained


@pytest.mark.parametrize(
    ("weight", "scheme"),
    [
        (torch.randn(10), Cast()),
        (torch.tensor([1.0, 0.0, -2.0]), Cast()),
        (torch.full((10,), 1e-7), Lossless()),  # float16 would keep three bits of it
        (torch.full((10,), 1e6), Lossless()),
        (torch.arange(3), Lossless()),
        (torch.tensor([1.0, 1e-9, 2e-8]), Lossless()),  # one would become zero, one subnormal
        (torch.tensor([1.0, 1e-60], dtype=torch.float64), Lossless()),
        (torch.tensor([1.0, float("nan")]), Cast()),  # which refuses it: only a rule may keep it losslessly
    ],
)
def test_small_tensors_keep_their_precision(weight: torch.Tensor, scheme: Scheme) -> None:
    assert small_scheme(weight) == scheme


def test_a_quantizer_takes_vectors_from_as_many_elements_as_matrices_of_the_default() -> None:
    assert applicable(Grid(bits=4), torch.randn(SMALL)) == Grid(bits=4)
    assert applicable(Grid(bits=4), torch.ones(SMALL - 1)) == Cast()
    assert applicable(Grid(bits=4), torch.randn(2, 2)) == Grid(bits=4)


def test_a_scheme_that_loses_nothing_for_size_takes_any_tensor() -> None:
    assert applicable(Lossless(), torch.arange(3)) == Lossless()
    assert applicable(Cast("bf16"), torch.ones(3)) == Cast("bf16")
    assert applicable(Cast("bf16"), torch.arange(3)) == Lossless()


SHAPES = [(), (0,), (0, 3), (3, 0), (1,), (5_000_000,), (2, 2_500_000), (2_500_000, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_the_tensor(shape: tuple[int, ...], transposed: bool) -> None:
    """Checks look at a few million elements at a time: of one tensor of 4 GB they made three more."""
    weight = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    weight = weight.T if transposed and weight.ndim == 2 else weight
    pieces = list(parts(weight))
    assert all(piece.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), weight.reshape(-1))
    assert max(piece.numel() for piece in pieces) <= 1 << 22
