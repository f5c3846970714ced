"""Units in another order are the same function, bit counts fall, nothing given is changed, and doubt means no."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from birdie.compress.calibration.symmetry import permute_sensitivity, sort_units, symmetries_of
from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.entropy import coder
from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT, GPTConfig

CHANNELS = [(("0.weight", 0, 1), ("0.bias", 0, 1), ("2.weight", 1, 1))]
M = TypeVar("M", bound=nn.Module)
SMALL: dict[str, Any] = {"vocab_size": 50, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
SHAPES = [
    GPTConfig(vocab_size=50, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2),
    GPTConfig(vocab_size=50, num_layers=2, model_dim=48, num_heads=6, num_kv_heads=6, tie_embeddings=False),
    GPTConfig(vocab_size=50, num_layers=1, model_dim=32, num_heads=4, num_kv_heads=1, mlp_mult=3),
    GPTConfig(
        **SMALL, xsa_last_n=1, value_embed_layers=(1, 2), value_embed_dim=8, attn_gate="dense", activation="swiglu"
    ),
]
NAMES = ["grouped", "untied", "one-kv-head", "value-embedding"]


def randomized(module: M, seed: int = 0) -> M:
    """`module` in float64 with no weight at zero or one, so that each has its effect."""
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            if weight.is_floating_point():
                values = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
                weight.copy_(values.abs() + 0.1 if "running_var" in name else values)
    return module


def gpt(config: GPTConfig) -> GPT:
    model = randomized(GPT(config))
    model.compute_dtype = torch.float64
    return model


def ids(config: GPTConfig) -> Tensor:
    return torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def randomly(state: Mapping[str, Tensor], seed: int) -> dict[str, Sensitivity]:
    """Sensitivities by which the units of all symmetries come into a random order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Sensitivity(row_fisher=torch.rand(len(weight), generator=generator, dtype=torch.float64))
        for name, weight in state.items()
        if weight.ndim
    }


def back_in_order(weight: Tensor, orders: Mapping[int, Any]) -> Tensor:
    for axis, order in orders.items():
        weight = weight.index_select(axis, torch.from_numpy(np.argsort(order)))
    return weight


@pytest.mark.parametrize("config", SHAPES, ids=NAMES)
def test_a_gpt_in_another_order_is_the_same_function(config: GPTConfig) -> None:
    model = gpt(config)
    original, original_state = model(ids(config)), {k: v.clone() for k, v in model.state_dict().items()}
    for sensitivities in ({}, randomly(original_state, 3)):
        state, orders = sort_units(model.state_dict(), model.symmetries(), sensitivities)
        assert equal(original_state, dict(model.state_dict()))  # what was given is not changed
        moved = {name for name in state if not torch.equal(state[name], original_state[name])}
        assert any("c_v" in name for name in moved)
        assert all("mlp" in name or "attn." in name or name == "value_embed.proj.weight" for name in moved)
        assert {f"blocks.{i}.mlp.fc.weight" for i in range(config.num_layers)} <= moved
        assert moved == set(orders)
        other = gpt(config)
        other.load_state_dict(state)
        torch.testing.assert_close(other(ids(config)), original, rtol=1e-9, atol=1e-9)
        assert equal({name: back_in_order(state[name], orders.get(name, {})) for name in state}, original_state)


def calibrated(model: GPT, names: list[str], config: GPTConfig) -> dict[str, Sensitivity]:
    """Measured on one batch: input second moments and squared output gradients of the named layers."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name in names:
        layer = model.get_submodule(name.removesuffix(".weight"))

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            output.retain_grad()
            seen[name] = [inputs[0].detach().flatten(0, 1), output]

        handles.append(layer.register_forward_hook(note))
    model.loss(ids(config)[:, :-1], ids(config)[:, 1:]).backward()
    for handle in handles:
        handle.remove()
    known = {}
    for name, (x, y) in seen.items():
        assert y.grad is not None
        g = y.grad.flatten(0, 1)
        known[name] = Sensitivity(x.T @ x / len(x), g.square().mean(0), g.T @ g)
    return known


def test_sensitivities_are_permuted_as_if_measured_again() -> None:
    config = SHAPES[0]
    model, other = gpt(config), gpt(config)
    names = [name for name, _ in model.named_matrices() if "tok_emb" not in name]
    known = calibrated(model, names, config)
    state, orders = sort_units(model.state_dict(), model.symmetries(), known)
    other.load_state_dict(state)
    again = calibrated(other, names, config)
    for name in names:
        moved = permute_sensitivity(name, known[name], orders)
        for mine, measured in ((moved.hessian, again[name].hessian), (moved.output, again[name].output)):
            assert mine is not None
            assert measured is not None
            scale = measured.diagonal().sqrt().clamp_min(1e-100)
            torch.testing.assert_close(mine / scale.outer(scale), measured / scale.outer(scale), rtol=0, atol=1e-5)
        assert moved.row_fisher is not None
        torch.testing.assert_close(moved.row_fisher, again[name].row_fisher, rtol=1e-5, atol=0)
    for i in range(config.num_layers):
        rows, hessian = again[f"blocks.{i}.mlp.fc.weight"].row_fisher, again[f"blocks.{i}.mlp.proj.weight"].hessian
        assert rows is not None
        assert hessian is not None
        keys = rows.clamp_min(1e-300).log() + hessian.diagonal().clamp_min(1e-300).log()
        assert bool((keys.diff() >= -1e-5).all())


def test_a_kernel_moves_with_its_channel_in_the_sensitivities_too() -> None:
    module = nn.Sequential(nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, (2, 3)))
    root = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hessian = root @ root.T
    known = {"2.weight": Sensitivity(hessian, torch.ones(2))}
    state, orders = sort_units(module.state_dict(), CHANNELS, known)
    moved = permute_sensitivity("2.weight", known["2.weight"], orders)
    original, after = (w.reshape(2, 30).double() for w in (module.state_dict()["2.weight"], state["2.weight"]))
    assert moved.hessian is not None
    torch.testing.assert_close(after @ moved.hessian @ after.T, original @ hessian @ original.T)
    powers = hessian.diagonal().reshape(5, 6).sum(1)
    assert orders["0.weight"][0].tolist() == powers.argsort().tolist()
    assert not torch.equal(after, original)
    with pytest.raises(ConfigError, match="recalibrate"):
        permute_sensitivity("2.weight", Sensitivity(torch.eye(7)), orders)


def test_sorting_saves_bytes_of_the_real_coder() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(256, generator=generator).mul(0.7).exp()
    state = {
        "up": torch.randn(256, 64, generator=generator) * spread[:, None],
        "down": torch.randn(64, 256, generator=generator) * spread,
    }

    def size(tensors: dict[str, Tensor]) -> int:
        streams = [s for name, w in tensors.items() for s in Grid(sigma=0.4).encode(name, w).streams]
        return sum(len(coder.encode(stream).payload) for stream in streams)

    new, orders = sort_units(state, [(("up", 0, 1), ("down", 1, 1))], {})
    assert size(state) - size(new) > 0.5 * math.lgamma(257) / math.log(2) / 8  # of the freedom: log2(256!) bits
    assert {name: list(axes) for name, axes in orders.items()} == {"up": [0], "down": [1]}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    block=st.integers(1, 3),
    units=st.integers(1, 6),
    dtype=st.sampled_from([torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
)
def test_blocks_move_as_wholes_and_back(seed: int, block: int, units: int, dtype: torch.dtype) -> None:
    labels = torch.arange(4 * units).view(units, 4)  # tell afterwards where each row and column came from
    other = torch.randint(-60, 60, (2, 3 + units * block, 2), generator=torch.Generator().manual_seed(seed)).to(dtype)
    state = {"a": labels, "b": other, "c": torch.ones(3)}
    symmetries = [(("a", 0, 1), ("b", -2, block, 3, 3 + units * block)), (("a", 1, 2), ("b", 0, 1))]
    new, orders = sort_units(state, symmetries, randomly(state, seed))
    rows, halves = new["a"][:, 0] // 4, new["a"][0, ::2] % 4 // 2
    moved = [3 + block * int(row) + k for row in rows for k in range(block)]
    wide = other.float()[halves]
    assert torch.equal(new["b"].float(), torch.cat((wide[:, :3], wide[:, moved]), 1))
    assert new["c"] is state["c"]
    assert torch.equal(back_in_order(new["b"].float(), orders.get("b", {})), other.float())


def test_tied_names_stay_tied_and_must_move_together() -> None:
    weight = torch.randn(6, 3)
    state = {"a": weight, "b": weight[:], "down": torch.randn(2, 6)}
    new, _ = sort_units(state, [(("a", 0, 1), ("b", 0, 1), ("down", 1, 1))], {})
    assert new["a"] is new["b"]
    assert not torch.equal(new["a"], weight)
    for alone in ((("a", 0, 1), ("down", 1, 1)), (("a", 0, 3), ("b", 0, 1, 0, 2), ("down", 1, 3))):
        with pytest.raises(ConfigError, match="tied"):
            sort_units(state, [alone], {})
    with pytest.raises(ConfigError, match="shares part of its memory"):
        sort_units({"a": weight, "part": weight[2:], "down": torch.randn(2, 6)}, [(("a", 0, 1), ("down", 1, 1))], {})
    bank = torch.randn(2, 6, 3)  # two layers in one block of memory do not overlap
    apart, _ = sort_units({"a": bank[0], "b": bank[1], "down": torch.randn(2, 6)}, [(("a", 0, 1), ("down", 1, 1))], {})
    assert apart["b"] is not bank
    assert torch.equal(apart["b"], bank[1])


BAD = {
    "not a tuple": "up",
    "empty": (),
    "no member": ("up",),
    "too short": (("up", 0),),
    "a float": (("up", 0.0, 1),),
    "a bool": (("up", True, 1),),
    "no such tensor": (("upp", 0, 1),),
    "no such axis": (("up", 2, 1),),
    "block does not divide": (("up", 0, 4),),
    "beyond the end": (("up", 0, 1, 0, 7),),
    "empty range": (("up", 0, 1, 3, 3),),
    "other number of units": (("up", 0, 1), ("down", 0, 1)),
    "twice the same": (("up", 0, 1), ("up", 0, 1)),
    "overlapping": (("up", 0, 1, 0, 3), ("up", 0, 1, 2, 5)),
    "a power": (("up", 0, 1, 0, 6, 1),),
}


@pytest.mark.parametrize("symmetry", BAD.values(), ids=BAD)
def test_a_symmetry_that_does_not_fit_is_refused(symmetry: Any) -> None:
    with pytest.raises(ConfigError, match="symmetr"):
        sort_units({"up": torch.randn(6, 3), "down": torch.randn(2, 6)}, [symmetry], {})


def test_declarations_of_parts_are_found_under_their_names() -> None:
    model = gpt(SHAPES[0])
    assert symmetries_of(model) == model.symmetries()
    wrapped = nn.ModuleDict({"lm": model})
    symmetries = symmetries_of(wrapped)
    assert len(symmetries) == len(model.symmetries())
    state, _ = sort_units(wrapped.state_dict(), symmetries, {})
    plain, _ = sort_units(model.state_dict(), model.symmetries(), {})
    assert equal({name.removeprefix("lm."): weight for name, weight in state.items()}, plain)


def test_blocks_of_channels_move_with_them() -> None:
    module = nn.Sequential(nn.Conv2d(1, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, (2, 3)))
    root = torch.randn(2, 18, 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = BlockDiagonal(torch.arange(36).view(2, 18), root @ root.mT)
    known = {"2.weight": Sensitivity(row_fisher=torch.ones(2), blocks=blocks)}
    dense = torch.block_diag(*blocks.blocks)
    state, orders = sort_units(module.state_dict(), CHANNELS, known)
    moved = permute_sensitivity("2.weight", known["2.weight"], orders).blocks
    original, after = (w.reshape(2, 36).double() for w in (module.state_dict()["2.weight"], state["2.weight"]))
    assert moved is not None
    assert not torch.equal(after, original)
    torch.testing.assert_close(moved.product(after) @ after.T, original @ dense @ original.T)
