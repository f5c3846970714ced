"""Tensors that are no weights keep every bit, whatever the settings: masks, frequencies, energies, statistics."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.compress.exact import FEW
from birdie.compress.state import ModelState
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


def test_a_budget_that_integers_and_files_make_impossible_says_so() -> None:
    numbers = torch.Generator().manual_seed(0)
    state = {"q.codes": torch.randint(256, (64, 160), generator=numbers, dtype=torch.uint8), "q.scales": gaussian(64)}
    files = {"tokenizer.json": bytes(torch.randint(256, (8_000,), generator=numbers, dtype=torch.uint8).tolist())}
    with pytest.raises(BudgetError, match=r"kept files and metadata 8,\d{3}, integers .* 10,\d{3} .*quantized already"):
        write_model(state | {"w": gaussian(64, 64)}, io.BytesIO(), SaveOptions(budget=18_000), files=files)
