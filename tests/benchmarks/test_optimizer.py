"""The benchmark of Muon: all optimizers take the same step up to rounding, and rows have the pinned keys."""

import pytest
import torch

from benchmarks import optimizer

CPU = torch.device("cpu")
KEYS = ["step", "ranks", "median_ms", "best_ms", "ratio", "turns", "difference"]


def test_banks_single_matrices_and_torch_take_the_same_step() -> None:
    members = {name: optimizer.matrices(0, CPU, dim=32) for name in ("torch", "matrices", "banks")}
    initial = optimizer.matrices(0, CPU, dim=32)
    optimizer.torch_muon(members["torch"])()
    optimizer.matrix_muon(members["matrices"])()
    optimizer.bank_muon(members["banks"])()
    for name in ("matrices", "banks"):
        assert optimizer.distance(members["torch"], members[name], initial) < 0.05
    assert optimizer.distance(members["torch"], initial, initial) == 1


def test_ratios_are_to_the_baseline() -> None:
    rows = optimizer.rows_of({"torch": [0.004, 0.006, 0.005], "banks": [0.002, 0.0025, 0.003]}, "torch", ranks=2)
    assert [list(row) for row in [*rows, optimizer.bare_row("alone")]] == [KEYS] * 3
    assert [(row["median_ms"], row["best_ms"], row["ratio"], row["turns"]) for row in rows] == [
        (5.0, 4.0, 1.0, 3),
        (2.5, 2.0, 2.0, 3),
    ]


def test_the_parts_of_a_step_are_timed() -> None:
    timer = optimizer.RangeTimer(CPU)
    step = optimizer.bank_muon(optimizer.matrices(0, CPU, dim=32))
    with timer.recording():
        step()
    assert {"optimizer/muon/momentum", "optimizer/muon/orthogonalize"} <= timer.seconds.keys()
    assert all(seconds >= 0 for seconds in timer.seconds.values())


@pytest.mark.nightly  # two processes that import torch
def test_two_ranks_are_measured() -> None:
    rows = optimizer.several_processes(0.0, 0, CPU, 2, layers=1)
    assert [row["step"] for row in rows[:2]] == ["replicated", "parallel"]
    assert all(row["ranks"] == 2 for row in rows)
