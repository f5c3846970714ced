"""The benchmarks of budgets, of a normal source and of compression time measure what they say."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import budgets, compress_time, gaussian_source
from birdie.artifact.save import save
from birdie.compress.registry import parse_spec
from birdie.errors import ArtifactError


def test_budgets_are_drawn_between_two_and_eight_bits_and_the_same_each_time() -> None:
    found = budgets.draw(1_000_000)
    assert len(found) == 50
    assert found == sorted(budgets.draw(1_000_000))
    assert found != budgets.draw(1_000_000, seed=1)
    assert 250_000 <= found[0] < 400_000
    assert 850_000 < found[-1] <= 1_000_000


def test_what_is_over_far_under_or_padded_is_not_met() -> None:
    assert budgets.slack_allowed(10_000) == 64
    assert budgets.slack_allowed(1_000_000) == 1000
    assert budgets._row(100_000, 99_950, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 100_001, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 99_899, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 99_950, 3, 1.0, "")["met"]
    refused = budgets._row(100, None, None, 1.0, "too small")
    assert not refused["met"]
    assert refused["slack"] is None


def test_a_file_belongs_to_its_tensors_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.birdie"
    save(budgets.small_state(), path, scheme="int6", coder="fast", metadata={"a": 1})
    assert budgets.padding(path) == 0
    path.write_bytes(path.read_bytes() + bytes(7))
    with pytest.raises(ArtifactError):
        budgets.padding(path)


@pytest.mark.slow  # a search of several codings each
def test_budgets_of_a_small_model_are_met() -> None:
    state = budgets.small_state()
    weights = sum(weight.numel() for name, weight in state.items() if name != "lm_head.weight")
    found = list(budgets.rows(state, budgets.draw(weights, count=3), coder="fast"))
    assert [row["met"] for row in found] == [True] * 3
    (impossible,) = budgets.rows(state, [500], coder="fast")
    assert "500 bytes cannot be met" in impossible["reason"]
    assert not impossible["met"]


def test_the_bound_is_shannons() -> None:
    assert gaussian_source.bound(1.0, 0.25) == 1
    assert gaussian_source.bound(2.0, 2.0) == 0
    assert gaussian_source.bound(1.0, 4.0) == 0


def test_a_scalar_grid_is_a_quarter_of_a_bit_from_the_bound_and_overhead_counts() -> None:
    source = gaussian_source.normal(256)
    found = gaussian_source.at_rate(gaussian_source.spelled("sigma:{step}"), 4.0, source, "grid")
    assert found["bits"] == pytest.approx(4, abs=gaussian_source.NEAR)
    assert found["gap"] == pytest.approx(found["bits"] - 0.5 * math.log2(1 / found["distortion"]), abs=0.02)
    assert 0.2 < found["gap"] < 0.4  # 0.25 with an ideal coder and no steps of rows
    assert found["bytes"] * 8 / source.numel() == found["bits"]
    assert found["distortion"] == pytest.approx(found["step"] ** 2 / 12, rel=0.05)


def test_no_file_of_noise_beats_the_bound() -> None:
    source = gaussian_source.normal(128, seed=3)
    for spec in ("sigma:0.5", "int4", "int8", "fp16"):
        assert gaussian_source.coded(parse_spec(spec), source, spec)["gap"] > 0.2


def test_stages_are_timed_on_every_call_and_missing_ones_left_out() -> None:
    watch = compress_time.Stopwatch()
    stages = (("sleep", "time", "sleep"), ("none", "time", "no_such_name"), ("gone", "no_such_module", "x"))
    with watch.on(stages):
        time.sleep(0.01)
        time.sleep(0.02)
    time.sleep(0.01)
    assert watch.calls == {"sleep": 2}
    assert 0.03 <= watch.seconds["sleep"] < 1


def test_sensitivities_fit_their_matrices_and_are_positive() -> None:
    state = compress_time.random_state(compress_time.SMALL)
    known = compress_time.sensitivities(state)
    assert "tok_emb.weight" in known
    for name, found in known.items():
        rows, columns = state[name].shape
        assert found.hessian is not None
        assert found.row_fisher is not None
        assert found.row_fisher.shape == (rows,)
        assert found.hessian.shape == (columns, columns)
        assert float(torch.linalg.eigvalsh(found.hessian.double())[0]) > 0
        correlation = np.corrcoef(found.hessian.numpy())
        assert np.abs(correlation - np.eye(columns)).max() > 0.05  # GPTQ has something to do


@pytest.mark.slow  # codes a model once
def test_stages_cover_saving_and_loading() -> None:
    state = compress_time.random_state(compress_time.SMALL)
    found = {row["stage"]: row for row in compress_time.rows(state, compress_time.sensitivities(state), bits=4.0)}
    assert {"save, in all", "trellis and feedback", "entropy coding", "load, in all"} <= found.keys()
    assert found["save, in all"]["seconds"] >= found["budget search"]["seconds"]
    assert found["save, in all"]["bytes"] > 0
