"""Parallel Muon: any number of ranks computes what one computes, each with the momentum of its matrices alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.parallel_muon import shard_banks
from birdie.gpt.train.settings import OptimizerSettings
from birdie.system.distributed import World
from tests.ranks import run_in_process_group
from tests.tiny_run import accept, at_rates, tiny_model

SETTINGS: dict[str, Any] = {"newton_schulz_dtype": "float32", "matrix_lr": 0.02}
PLAIN = OptimizerSettings(**SETTINGS)
CLIPPED = OptimizerSettings(**SETTINGS, grad_clip_norm=0.05)
EVERYTHING = OptimizerSettings(
    **SETTINGS,
    grad_clip_norm=0.05,
    muon_coefficients="polar_express",
    muon_row_normalize=True,
    muon_beta2=0.9,
    muon_weight_decay=0.1,
    adam_weight_decay=0.05,
)
STEPS = 4


def share_of_gradient(name: str, p: torch.Tensor, step: int, rank: int, size: int) -> torch.Tensor:
    """Return the gradient on one of `size` ranks: different on each, with the same sum for any size."""
    draw = torch.Generator().manual_seed(hash_of(name) + step)
    total = torch.randn(p.shape, generator=draw)
    parts = torch.randn((size, *p.shape), generator=draw)
    return total / size + parts[rank] - parts.mean(0)


def hash_of(name: str) -> int:
    return sum((i + 1) * ord(letter) for i, letter in enumerate(name))


def steps(optimizers: Optimizers, model: nn.Module, world: World, first: int, count: int) -> list[tuple[float, float]]:
    """Take `count` steps; return loss and gradient norm of each."""
    results = []
    for step in range(first, first + count):
        optimizers.zero_grad()
        for name, p in model.named_parameters():
            share = share_of_gradient(name, p, step, world.rank, world.size)
            p.grad = share if p.grad is None else p.grad.add_(share)
        results.append(optimizers.step(torch.tensor(1.0 / world.size), at_rates(momentum=0.9), accept))
    return results


def optimizers_of(model: nn.Module, settings: OptimizerSettings, world: World, dtype: torch.dtype) -> Optimizers:
    return Optimizers(model, settings, newton_schulz_dtype=dtype, world=world)


def train(world: World, folder: Path) -> None:
    """Train with each of the settings from new weights; rank 0 leaves the results."""
    for name, settings in (("plain", PLAIN), ("clipped", CLIPPED), ("everything", EVERYTHING)):
        model = tiny_model()
        optimizers = optimizers_of(model, settings, world, torch.float32)
        results = steps(optimizers, model, world, 0, STEPS)
        state = optimizers.full_state()
        counts = [len(t["momentum_buffer"]) for t in optimizers.muon.state.values()] if optimizers.muon else []
        if world.is_main:
            torch.save(
                {"results": results, "weights": model.state_dict(), "state": state, "counts": counts},
                folder / f"{name}.pt",
            )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_many_ranks_compute_what_one_computes(size: int, tmp_path: Path) -> None:
    """Banks of 6, 3, 3 and 6 matrices: neither two nor four ranks divide them all, so padding is needed."""
    run_in_process_group(train, size, tmp_path / "run")
    for name, settings in (("plain", PLAIN), ("clipped", CLIPPED), ("everything", EVERYTHING)):
        several = torch.load(tmp_path / "run" / f"{name}.pt", weights_only=True)
        model = tiny_model()
        alone = optimizers_of(model, settings, World(), torch.float32)
        results = steps(alone, model, World(), 0, STEPS)
        assert [value for result in several["results"] for value in result] == pytest.approx(
            [value for result in results for value in result], rel=1e-4
        )
        for key, value in model.state_dict().items():
            torch.testing.assert_close(several["weights"][key], value, rtol=0, atol=2e-4)
        state = alone.full_state()
        assert several["state"].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(several["state"][key], value, rtol=1e-3, atol=1e-4)
        shardings = shard_banks([bank.shape for bank in alone.banks], size)
        assert several["counts"] == [len(sharding.ranges[0]) for sharding in shardings]


@given(
    banks=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
)
def test_every_matrix_has_one_rank_and_the_work_is_balanced(banks: list[tuple[int, int, int]], ranks: int) -> None:
    shardings = shard_banks([torch.Size(bank) for bank in banks], ranks)
    load = [0] * ranks
    for (count, rows, columns), sharding in zip(banks, shardings, strict=True):
        assert [i for shard in sharding.ranges for i in shard] == list(range(count))
        counts = [len(shard) for shard in sharding.ranges]
        assert max(counts) - min(counts) <= 1
        assert sharding.padded == max(counts)
        work = min(rows, columns) ** 2 * max(rows, columns)
        load = [total + n * work for total, n in zip(load, counts, strict=True)]
    assert max(load) - min(load) <= max(min(bank[1:]) ** 2 * max(bank[1:]) for bank in banks)


def resume(world: World, folder: Path) -> None:
    """Take two more steps from a state that another number of ranks saved."""
    saved = torch.load(folder.parent / "saved.pt", weights_only=True)
    model = tiny_model()
    model.load_state_dict(saved["weights"])
    optimizers = optimizers_of(model, EVERYTHING, world, torch.float32)
    optimizers.load_state(saved["state"])
    steps(optimizers, model, world, 2, 2)
    state = optimizers.full_state()
    if world.is_main:
        torch.save({"weights": model.state_dict(), "state": state}, folder / "done.pt")


@pytest.mark.slow
@pytest.mark.parametrize("size", [3])
def test_state_moves_to_another_number_of_ranks(size: int, tmp_path: Path) -> None:
    model = tiny_model()
    optimizers = optimizers_of(model, EVERYTHING, World(), torch.float32)
    steps(optimizers, model, World(), 0, 2)
    torch.save({"weights": model.state_dict(), "state": optimizers.full_state()}, tmp_path / "saved.pt")
    steps(optimizers, model, World(), 2, 2)
    run_in_process_group(resume, size, tmp_path / "run")
    several = torch.load(tmp_path / "run" / "done.pt", weights_only=True)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(several["weights"][key], value, rtol=0, atol=2e-4)
    for key, value in optimizers.full_state().items():
        torch.testing.assert_close(several["state"][key], value, rtol=1e-3, atol=1e-4)


def test_clipping_acts_on_the_gradient_of_all_parameters() -> None:
    model = tiny_model()
    optimizers = optimizers_of(model, CLIPPED, World(), torch.float32)
    (_, norm), *_ = steps(optimizers, model, World(), 0, 1)
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert norm > 0.05
    assert torch.stack(norms).norm().item() == pytest.approx(0.05, rel=1e-3)


def test_a_failed_check_stops_the_step_before_any_weight_changes() -> None:
    for settings in (PLAIN, CLIPPED):
        model = tiny_model()
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizers = optimizers_of(model, settings, World(), torch.float32)
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan"))

        def refuse(_loss: float, norm: float) -> None:
            assert norm != norm
            raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            optimizers.step(torch.zeros(()), at_rates(momentum=0.9), refuse)
        assert all(torch.equal(p, initial[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("group", ["muon_weight_decay", "adam_weight_decay", "embed_weight_decay"])
def test_weight_decay_shrinks_the_parameters_of_its_groups(group: str) -> None:
    """With a gradient of zero a step only decays, by learning rate times decay times multiplier."""
    model = tiny_model()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = OptimizerSettings(**(SETTINGS | {group: 0.5}))
    optimizers = optimizers_of(model, settings, World(), torch.float32)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.step(torch.zeros(()), at_rates(momentum=0.9, decay=0.5), accept)
    covered = {
        "muon_weight_decay": ("matrices",),
        "adam_weight_decay": ("embedding", "scalars"),
        "embed_weight_decay": ("embedding",),
    }[group]
    for name, members in optimizers.groups.items():
        factor = 1 - optimizers.rates[name] * 0.25 if name in covered else 1.0
        for key, p in members.items():
            torch.testing.assert_close(p.detach(), initial[key] * factor)
