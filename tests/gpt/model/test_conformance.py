"""Laws that hold for every technique, alone and combined: formula, gradients, causality, cache, documents, symmetry,
optimizer groups, diagnostics and compilation. Resuming and ranks are laws of tests/gpt/train/test_laws.py.
"""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from birdie.compress.calibration.symmetry import sort_units
from birdie.compress.scheme import Sensitivity
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.techniques.skips import skip_count
from birdie.gpt.train.optimizers import split_parameters
from tests.gpt.model.technique_table import (
    ALL,
    BOS,
    COMBINATIONS,
    SMALL,
    TECHNIQUES,
    V,
    randomized,
    reference_logits,
    tokens,
    with_settings,
)

NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)
EACH = pytest.mark.parametrize("change", ALL.values(), ids=ALL)
TOGETHER = pytest.mark.parametrize(
    "change",
    [change if name not in TECHNIQUES else NIGHTLY(change) for name, change in ALL.items()],
    ids=ALL,
)
"""Combinations that together have every technique, and nightly each technique alone."""
EACH_TECHNIQUE = pytest.mark.parametrize("change", TECHNIQUES.values(), ids=TECHNIQUES)
SHAPE = {"vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult", "bos_id", "attention"}
CONSTANTS = {"rope_base", "qk_gain_init", "leaky_slope", "tied_embed_init_std"}
INITIALIZATION = {"orthogonal_init", "overtone_init", "phased_init"}


def test_every_setting_is_under_these_laws() -> None:
    settings = {name for change in TECHNIQUES.values() for name in change}
    assert settings | SHAPE | CONSTANTS | INITIALIZATION == {field.name for field in dataclasses.fields(GPTConfig)}


@EACH
def test_the_forward_pass_is_the_formula(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(2, 7)  # past all windows, and three documents
    expected = torch.stack([reference_logits(model, row.tolist()) for row in ids]).float()
    torch.testing.assert_close(model(ids), expected, rtol=2e-4, atol=2e-4)


@EACH_TECHNIQUE
def test_on_differs_from_off(change: dict[str, Any]) -> None:
    """With the same weights wherever both models have them."""
    on, off, ids = randomized(with_settings(change)), GPT(SMALL), tokens(1, 12)
    state = on.state_dict()
    if skip_count(on.config) == skip_count(SMALL):
        fitting = {
            name: state[name] for name, p in off.state_dict().items() if name in state and state[name].shape == p.shape
        }
        off.load_state_dict(off.state_dict() | fitting)
    assert (on(ids) - off(ids)).abs().max() > 1e-3


@TOGETHER
def test_every_parameter_is_in_exactly_one_group_and_has_a_gradient(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 16)
    groups = split_parameters(model)
    members = sorted(name for group in groups.values() for name in group)
    assert members == sorted(name for name, _ in model.named_parameters())
    assert all(p.ndim == 2 for p in groups["matrices"].values())
    model.loss(ids, ids.roll(-1, 1)).backward()
    dead = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert dead <= {"blocks.0.attn.value_mix"}  # the first layer has no other values to mix in


@TOGETHER
def test_a_new_model_learns_in_every_part_and_diagnostics_show_it(change: dict[str, Any]) -> None:
    """From its initial values: no parameter stays at zero because two factors of zero wait for each other.

    Lines name settings, and show gains, gates and scales, which are the parameters of the group "scalars".
    """
    torch.manual_seed(0)
    model, ids = GPT(with_settings(change)), tokens(4, 16)
    start, lines = {name: p.detach().clone() for name, p in model.named_parameters()}, model.diagnostics()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(ids, ids.roll(-1, 1)).backward()
        optimizer.step()
    unchanged = {name for name, p in model.named_parameters() if torch.equal(p, start[name])}
    assert unchanged <= {"blocks.0.attn.value_mix"}
    trained = model.diagnostics()
    assert [line.split(":")[0] for line in trained] == [line.split(":")[0] for line in lines]
    scalars, baseline = (split_parameters(gpt)["scalars"].keys() for gpt in (model, GPT(SMALL)))
    assert (trained != lines) == bool(scalars - baseline)


def test_an_active_technique_has_a_line_and_the_baseline_has_none() -> None:
    assert GPT(SMALL).diagnostics() == []
    for name, change in TECHNIQUES.items():
        (line,) = GPT(with_settings(change)).diagnostics()
        assert len(line.split(": ")[0]) > 2, name


@TOGETHER
def test_later_tokens_have_no_influence(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(1, 12)
    with torch.no_grad():
        logits = model(ids)
        for position in (1, 5, 6, 11):
            other = ids.clone()
            other[:, position:] = (other[:, position:] + 7) % V
            torch.testing.assert_close(model(other)[:, :position], logits[:, :position])


@TOGETHER
def test_nothing_crosses_the_beginning_of_an_isolated_document(change: dict[str, Any]) -> None:
    """Tokens before a BOS leave no trace after it, with isolated documents."""
    model, ids = randomized(with_settings({**change, "isolate_documents": True})), tokens(1, 12)
    other = ids.clone()
    other[:, :6] = tokens(1, 6, seed=9)
    other[:, 6] = ids[:, 6] = BOS
    with torch.no_grad():
        torch.testing.assert_close(model(other)[:, 6:], model(ids)[:, 6:])
        assert not torch.allclose(model(other)[:, :6], model(ids)[:, :6])


@TOGETHER
def test_the_cache_returns_the_logits_of_one_forward_pass(change: dict[str, Any]) -> None:
    """In calls of any size."""
    model, ids = randomized(with_settings(change)), tokens(3, 9)
    expected = model(ids)
    for parts in ([1] * 9, [5, 1, 1, 1, 1], [9]):
        cache = Cache(model, 3, 9)
        logits = torch.cat([cache(part) for part in ids.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@TOGETHER
def test_the_last_positions_alone_equal_those_of_all(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 9)
    targets = ids.roll(-1, 1)
    logits, losses = model(ids), model.loss(ids, targets, reduction="none")
    for n in (1, 4, 9):
        torch.testing.assert_close(model(ids, last_n=n), logits[:, -n:], rtol=1e-5, atol=1e-5)
        short = model.loss(ids, targets[:, -n:], reduction="none")
        torch.testing.assert_close(short, losses[:, -n:], rtol=1e-5, atol=1e-5)


@TOGETHER
def test_declared_symmetries_keep_the_function(change: dict[str, Any]) -> None:
    """Units in random order, by random sensitivities."""
    config = with_settings(change)
    model, other = randomized(config).double().eval(), GPT(config).double().eval()
    model.compute_dtype = other.compute_dtype = torch.float64
    ids, generator = tokens(2, 12), torch.Generator().manual_seed(5)
    state, expected = model.state_dict(), model(ids)
    rows = {name: torch.rand(len(weight), generator=generator) for name, weight in state.items() if weight.ndim}
    sensitivities = {name: Sensitivity(row_fisher=values) for name, values in rows.items()}
    permuted, orders = sort_units(state, model.symmetries(), sensitivities)
    assert len(orders) > len(model.symmetries()) / 2  # two units may be in order
    other.load_state_dict(permuted)
    torch.testing.assert_close(other(ids), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_compiler_traces_one_graph(number: int) -> None:
    """With depth recurrence and without."""
    model, ids = randomized(with_settings(COMBINATIONS[number])), tokens(2, 12)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    for recurrent in (False, True, False) if model.config.num_loops else (False,):
        model.depth_recurrence = recurrent
        torch.testing.assert_close(compiled(ids, ids), model.loss(ids, ids))


@pytest.mark.slow
@pytest.mark.parametrize("number", [NIGHTLY(0), NIGHTLY(1), 2])
def test_the_model_is_exported_as_one_program(number: int) -> None:
    model, ids = randomized(with_settings(COMBINATIONS[number])).eval(), tokens(2, 12)
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))
