"""Laws that hold for every technique, alone and combined: formula, gradients, causality, cache, documents, symmetry,
optimizer groups, diagnostics, resuming, ranks and compilation.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.compress.calibration.symmetry import sort_units
from birdie.compress.scheme import Sensitivity
from birdie.model.cache import Cache
from birdie.model.config import GPTConfig
from birdie.model.gpt import GPT
from birdie.model.techniques.skips import skip_count
from birdie.runtime.callbacks import no_message
from birdie.runtime.distributed import World
from birdie.train.checkpoint import Checkpoint
from birdie.train.optimizers import split_parameters
from birdie.train.training import Training
from tests.model.technique_table import (
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
from tests.ranks import run_in_process_group
from tests.tiny_run import OPTIMIZERS, TinyBatches, tiny_settings

EACH = pytest.mark.parametrize("change", ALL.values(), ids=ALL)
EACH_COMBINATION = pytest.mark.parametrize("change", COMBINATIONS, ids=range(len(COMBINATIONS)))  # has every technique
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


@EACH
def test_every_parameter_is_in_exactly_one_group_and_has_a_gradient(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 16)
    groups = split_parameters(model)
    members = sorted(name for group in groups.values() for name in group)
    assert members == sorted(name for name, _ in model.named_parameters())
    assert all(p.ndim == 2 for p in groups["matrices"].values())
    model.loss(ids, ids.roll(-1, 1)).backward()
    dead = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert dead <= {"blocks.0.attn.value_mix"}  # the first layer has no other values to mix in


@EACH
def test_a_new_model_learns_in_every_part_and_diagnostics_show_it(change: dict[str, Any]) -> None:
    """From its initial values: no parameter stays at zero because two factors of zero wait for each other.

    Lines name settings, and show gains, gates and scales, which are the parameters of the group "scalars".
    """
    torch.manual_seed(0)
    model, ids = GPT(with_settings(change)), tokens(4, 16)
    start, lines = {name: p.detach().clone() for name, p in model.named_parameters()}, model.diagnostics()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(6):
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


@EACH
def test_later_tokens_have_no_influence(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(1, 12)
    with torch.no_grad():
        logits = model(ids)
        for position in (1, 5, 6, 11):
            other = ids.clone()
            other[:, position:] = (other[:, position:] + 7) % V
            torch.testing.assert_close(model(other)[:, :position], logits[:, :position])


@EACH
def test_nothing_crosses_the_beginning_of_an_isolated_document(change: dict[str, Any]) -> None:
    """Tokens before a BOS leave no trace after it, with isolated documents."""
    model, ids = randomized(with_settings({**change, "isolate_documents": True})), tokens(1, 12)
    other = ids.clone()
    other[:, :6] = tokens(1, 6, seed=9)
    other[:, 6] = ids[:, 6] = BOS
    with torch.no_grad():
        torch.testing.assert_close(model(other)[:, 6:], model(ids)[:, 6:])
        assert not torch.allclose(model(other)[:, :6], model(ids)[:, :6])


@pytest.mark.parametrize("parts", [[1] * 9, [5, 1, 1, 1, 1], [9]], ids=str)
@EACH
def test_the_cache_returns_the_logits_of_one_forward_pass(change: dict[str, Any], parts: list[int]) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 9)
    cache = Cache(model, 3, 9)
    logits = torch.cat([cache(part) for part in ids.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last_n", [1, 4, 9])
@EACH
def test_the_last_positions_alone_equal_those_of_all(change: dict[str, Any], last_n: int) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 9)
    targets = ids.roll(-1, 1)
    torch.testing.assert_close(model(ids, last_n=last_n), model(ids)[:, -last_n:], rtol=1e-5, atol=1e-5)
    short = model.loss(ids, targets[:, -last_n:], reduction="none")
    torch.testing.assert_close(short, model.loss(ids, targets, reduction="none")[:, -last_n:], rtol=1e-5, atol=1e-5)


@EACH
def test_declared_symmetries_keep_the_function(change: dict[str, Any]) -> None:
    """Units in random order, by random sensitivities; each symmetry alone."""
    config = with_settings(change)
    model, other = randomized(config).double().eval(), GPT(config).double().eval()
    model.compute_dtype = other.compute_dtype = torch.float64
    ids, generator = tokens(2, 12), torch.Generator().manual_seed(5)
    state, expected = model.state_dict(), model(ids)
    rows = {name: torch.rand(len(weight), generator=generator) for name, weight in state.items() if weight.ndim}
    sensitivities = {name: Sensitivity(row_fisher=values) for name, values in rows.items()}
    moved = 0
    for symmetry in model.symmetries():
        permuted, orders = sort_units(state, [symmetry], sensitivities)
        moved += bool(orders)
        other.load_state_dict(permuted)
        torch.testing.assert_close(other(ids), expected, rtol=1e-9, atol=1e-9)
    assert moved > len(model.symmetries()) / 2  # two units may be in order


def start(
    change: dict[str, Any], world: World | None = None, resume: Checkpoint | None = None, seed: int = 0
) -> Training:
    torch.manual_seed(seed)
    model = GPT(with_settings(change))
    hooks = model.step_hooks(no_message)
    settings = tiny_settings(iterations=3, warmdown_iters=2)
    return Training(model, TinyBatches(world), settings, OPTIMIZERS, world=world, hooks=hooks, saved=resume)


@EACH
def test_a_resumed_run_is_bit_identical(change: dict[str, Any]) -> None:
    run, checkpoint = start(change), None
    losses = {}
    for step in run:
        losses[step.number] = step.loss
        if step.number == 1:
            checkpoint = run.checkpoint()
    resumed = start(change, resume=checkpoint, seed=5)
    assert {step.number: step.loss for step in resumed} == {n: loss for n, loss in losses.items() if n > 1}
    for name, weight in run.state().weights.items():
        assert torch.equal(resumed.state().weights[name], weight), name


def train_combinations(world: World, folder: Path) -> None:
    """Train every technique for some steps; rank 0 leaves losses and weights."""
    results = []
    for change in COMBINATIONS:
        run = start(change, world)
        losses = [step.loss for step in run]
        results.append((losses, run.state().weights))
    if world.is_main:
        torch.save(results, folder / "results.pt")


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    run_in_process_group(train_combinations, 2, tmp_path / "ranks")
    results = torch.load(tmp_path / "ranks" / "results.pt", weights_only=True)
    for change, (losses, weights) in zip(COMBINATIONS, results, strict=True):
        run = start(change)
        assert losses == pytest.approx([step.loss for step in run], abs=1e-4)
        for name, weight in run.state().weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-3, msg=name)


@pytest.mark.slow
@EACH_COMBINATION
def test_the_compiler_traces_one_graph(change: dict[str, Any]) -> None:
    """With depth recurrence and without."""
    model, ids = randomized(with_settings(change)), tokens(2, 12)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    for model.depth_recurrence in (False, True, False) if change.get("num_loops") else (False,):
        torch.testing.assert_close(compiled(ids, ids), model.loss(ids, ids))


@pytest.mark.slow
@EACH_COMBINATION
def test_the_model_is_exported_as_one_program(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)).eval(), tokens(2, 12)
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))
