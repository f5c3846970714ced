"""The benchmark of compression time: every call of a stage is timed, and the synthetic calibration is valid."""

import time

import numpy as np
import pytest
import torch

from benchmarks import compress_time


def test_every_call_of_a_stage_is_timed_and_missing_stages_are_skipped() -> None:
    watch = compress_time.Stopwatch()
    stages = (("sleep", "time", "sleep"), ("none", "time", "no_such_name"), ("absent", "no_such_module", "x"))
    with watch.on(stages):
        time.sleep(0.01)
        time.sleep(0.02)
    time.sleep(0.01)
    assert watch.calls == {"sleep": 2}
    assert 0.03 <= watch.seconds["sleep"] < 1


def test_sensitivities_match_their_matrices_and_are_positive_definite() -> None:
    state = compress_time.random_state(compress_time.SMALL)
    known = compress_time.sensitivities(state)
    assert "tok_emb.weight" in known
    for name, sensitivity in known.items():
        rows, columns = state[name].shape
        assert sensitivity.hessian is not None
        assert sensitivity.row_fisher is not None
        assert sensitivity.row_fisher.shape == (rows,)
        assert sensitivity.hessian.shape == (columns, columns)
        assert float(torch.linalg.eigvalsh(sensitivity.hessian.double())[0]) > 0
        correlation = np.corrcoef(sensitivity.hessian.numpy())
        assert np.abs(correlation - np.eye(columns)).max() > 0.05  # features are correlated, so GPTQ has an effect


@pytest.mark.nightly  # codes a model
def test_stages_cover_saving_and_loading() -> None:
    state = compress_time.random_state(compress_time.SMALL)
    rows = {row["stage"]: row for row in compress_time.rows(state, compress_time.sensitivities(state), bits=4.0)}
    assert {"save, in all", "trellis and feedback", "entropy coding", "load, in all"} <= rows.keys()
    assert rows["save, in all"]["seconds"] >= rows["budget search"]["seconds"]
    assert rows["save, in all"]["bytes"] > 0
