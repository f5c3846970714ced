"""Every trainable parameter has exactly one optimizer, the one the challenge gives it, at the rate it gives it."""

import pytest
import torch
from torch import nn

from birdie.errors import ConfigError, WeightsError
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.train.groups import RULES, Optimizers, OptimizerSettings, split_parameters


def small(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=40, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, tie_embeddings=tied))


def optimizers_of(model: nn.Module, settings: OptimizerSettings | None = None) -> Optimizers:
    return Optimizers(
        model.named_parameters(),
        settings or OptimizerSettings(),
        newton_schulz_dtype=torch.float32,
        world=World(),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = small(tied)
    groups = split_parameters(model.named_parameters())
    names = [name for members in groups.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert set(groups) == {"matrices", "embedding", "scalars"} | (set() if tied else {"head"})
    assert all(p.ndim == 2 for p in groups["matrices"].values())
    assert len(groups["matrices"]) == 3 * 6


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_moves_in_a_step(tied: bool) -> None:
    """Two steps, since the zero output layers hide everything behind them from the first gradient."""
    model, ids = small(tied), torch.arange(40).view(2, 20)
    optimizers, before = optimizers_of(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizers.zero_grad()
        model.loss(ids, ids.roll(1)).backward()
        optimizers.step(torch.zeros(()), 1.0, 0.95)
    unmoved = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unmoved == []


def test_a_multiplier_of_zero_moves_nothing() -> None:
    model, ids = small(), torch.arange(40).view(2, 20)
    before = [p.detach().clone() for p in model.parameters()]
    model.loss(ids, ids.roll(1)).backward()
    optimizers_of(model).step(torch.zeros(()), 0.0, 0.95)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_embeddings_rate_depends_on_tying() -> None:
    settings = OptimizerSettings(tied_embed_lr=0.1, embed_lr=0.2, head_lr=0.3, matrix_lr=0.4, scalar_lr=0.5)
    assert optimizers_of(small(), settings).rates == {"matrices": 0.4, "embedding": 0.1, "scalars": 0.5}
    untied = {"matrices": 0.4, "embedding": 0.2, "head": 0.3, "scalars": 0.5}
    assert optimizers_of(small(tied=False), settings).rates == untied


def test_a_parameter_nobody_owns_is_refused_by_name() -> None:
    model = small()
    model.smear_gate = nn.Linear(32, 1)
    with pytest.raises(ConfigError, match=r"'smear_gate.weight' of shape \(1, 32\) .* is in none"):
        split_parameters(model.named_parameters())


def test_a_parameter_two_groups_claim_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "everything", lambda *_: True)
    with pytest.raises(ConfigError, match=r"'tok_emb.weight' .* is in embedding and everything"):
        split_parameters([("tok_emb.weight", nn.Parameter(torch.zeros(2, 2)))])


def test_a_frozen_parameter_needs_no_owner() -> None:
    model = small()
    model.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert "frozen" not in {name for members in split_parameters(model.named_parameters()).values() for name in members}


def test_state_comes_back_as_it_was_saved() -> None:
    model, ids = small(), torch.arange(40).view(2, 20)
    optimizers = optimizers_of(model)
    model.loss(ids, ids.roll(1)).backward()
    optimizers.step(torch.zeros(()), 1.0, 0.95)
    state = optimizers.full_state()
    assert {key.rpartition("/")[2] for key in state} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    other = optimizers_of(small())
    other.load_state(state)
    restored = other.full_state()
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("blocks.9.attn.c_q.weight/momentum_buffer", torch.zeros(32, 32), "has no parameter here"),
        ("tok_emb.weight/exp_avg", torch.zeros(2, 2), r"has shape \(2, 2\)"),
        ("tok_emb.weight/step", torch.zeros(1), r"has shape \(1,\), but its parameter of .* wants \(\)"),
        ("blocks.0.attn.c_q.weight/row_square", torch.zeros(5, 1), r"has shape \(5, 1\), but .* wants \(\d+, 1\)"),
    ],
)
def test_state_of_another_model_is_refused(key: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        optimizers_of(small()).load_state({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix_lr": -0.1}, "matrix_lr is -0.1"),
        ({"scalar_lr": float("nan")}, "scalar_lr is nan"),
        ({"muon_momentum": 1.0}, "muon_momentum is 1.0"),
        ({"muon_backend_steps": -1}, "muon_backend_steps is -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings(**change)
