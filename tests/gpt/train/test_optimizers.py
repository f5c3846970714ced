"""Every trainable parameter is in exactly one optimizer group, with the learning rate of the challenge."""

from typing import Any

import pytest
import torch
from torch import nn

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.optimizers import Optimizers, split_parameters
from birdie.gpt.train.resuming import require_optimizer
from birdie.gpt.train.settings import OptimizerSettings
from birdie.system.distributed import World
from tests.tiny_run import accept, at_rates


def small(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=40, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, tie_embeddings=tied))


def optimizers_of(model: nn.Module, settings: OptimizerSettings | None = None) -> Optimizers:
    return Optimizers(
        model,
        settings or OptimizerSettings(),
        newton_schulz_dtype=torch.float32,
        world=World(),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = small(tied)
    groups = split_parameters(model)
    names = [name for members in groups.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert set(groups) == {"matrices", "embedding", "scalars"} | (set() if tied else {"head"})
    assert all(p.ndim == 2 for p in groups["matrices"].values())
    assert len(groups["matrices"]) == 3 * 6


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_moves_in_a_step(tied: bool) -> None:
    """After some steps: the output layers start at zero and hide everything before them from the first gradient."""
    model, ids = small(tied), torch.arange(40).view(2, 20)
    optimizers, initial = optimizers_of(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizers.zero_grad()
        model.loss(ids, ids.roll(1)).backward()
        optimizers.step(torch.zeros(()), at_rates(), accept)
    assert [name for name, p in model.named_parameters() if torch.equal(p, initial[name])] == []


def test_a_multiplier_of_zero_moves_nothing() -> None:
    model, ids = small(), torch.arange(40).view(2, 20)
    initial = [p.detach().clone() for p in model.parameters()]
    model.loss(ids, ids.roll(1)).backward()
    optimizers_of(model).step(torch.zeros(()), at_rates(0.0), accept)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), initial, strict=True))


def test_the_learning_rate_of_the_embedding_depends_on_tying() -> None:
    settings = OptimizerSettings(tied_embed_lr=0.1, embed_lr=0.2, head_lr=0.3, matrix_lr=0.4, scalar_lr=0.5)
    assert optimizers_of(small(), settings).rates == {"matrices": 0.4, "embedding": 0.1, "scalars": 0.5}
    untied = {"matrices": 0.4, "embedding": 0.2, "head": 0.3, "scalars": 0.5}
    assert optimizers_of(small(tied=False), settings).rates == untied


def test_an_undeclared_parameter_is_refused_by_name() -> None:
    model = small()
    model.extra = nn.Linear(32, 1)
    with pytest.raises(ConfigError, match=r"'extra.weight' of shape \(1, 32\) .* none"):
        split_parameters(model)


def test_a_model_without_declarations_has_its_matrices_embeddings_and_the_rest() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "layer": nn.Linear(4, 6), "norm": nn.LayerNorm(6)})
    groups = {group: list(members) for group, members in split_parameters(model).items()}
    assert groups == {
        "matrices": ["layer.weight"],
        "embedding": ["table.weight"],
        "scalars": ["layer.bias", "norm.weight", "norm.bias"],
    }


def test_state_round_trips() -> None:
    model, ids = small(), torch.arange(40).view(2, 20)
    optimizers = optimizers_of(model)
    model.loss(ids, ids.roll(1)).backward()
    optimizers.step(torch.zeros(()), at_rates(), accept)
    state = optimizers.full_state()
    assert {key.rpartition("/")[2] for key in state} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    other = optimizers_of(small())
    other.load_state(state)
    restored = other.full_state()
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("key", "value", "values"),
    [
        (
            "blocks.9.attn.c_q.weight/momentum_buffer",
            torch.zeros(32, 32),
            r"blocks\.9\.attn\.c_q",
        ),
        ("tok_emb.weight/exp_avg", torch.zeros(2, 2), r"shape \(2, 2\)"),
        ("tok_emb.weight/step", torch.zeros(1), r"shape \(1,\), .* \(\)"),
        ("blocks.0.attn.c_q.weight/row_square", torch.zeros(5, 1), r"shape \(5, 1\), .* \(\d+, 1\)"),
    ],
)
def test_state_of_another_model_is_refused(key: str, value: torch.Tensor, values: str) -> None:
    with pytest.raises(WeightsError, match=values):
        require_optimizer(split_parameters(small()), {key: value}, 1, row_square=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix_lr": -0.1}, "matrix_lr is -0.1"),
        ({"scalar_lr": float("nan")}, "scalar_lr is nan"),
        ({"muon_momentum": 1.0}, "muon_momentum is 1.0"),
        ({"muon_backend_steps": -1}, "muon_backend_steps is -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings(**change)
