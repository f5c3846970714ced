"""The benchmark of training throughput: every loop trains on the same data, and rows have the pinned keys."""

import dataclasses
import math

import pytest
import torch

from benchmarks import train
from birdie.model.gpt import GPTConfig


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTConfig(vocab_size=256, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1)
    monkeypatch.setattr(train, "CONFIG", config)
    settings = dataclasses.replace(train.SETTINGS, train_batch_tokens=128, train_seq_len=32, accumulation=2)
    monkeypatch.setattr(train, "SETTINGS", settings)


@pytest.mark.usefixtures("_small")
def test_the_plain_loop_and_birdie_start_at_the_same_loss() -> None:
    cpu = torch.device("cpu")
    plain = train.PlainLoop(0, cpu, torch.float32).step()
    birdie = next(iter(train.birdie_run(0, cpu, "float32", compiled=False))).loss
    assert plain == pytest.approx(birdie, rel=1e-5)


@pytest.mark.usefixtures("_small")
def test_rows_are_of_all_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_settings: function)
    rows = train.measure(0.0, 0, torch.device("cpu"), "float32")
    assert [row["loop"] for row in rows] == ["plain", "birdie", "birdie, compiled"]
    keys = ["loop", "dtype", "tokens_per_s", "best_tokens_per_s", "ratio", "steps", "first_step_s", "loss"]
    assert list(rows[0]) == keys
    assert rows[0]["ratio"] == 1
    assert [row["steps"] for row in rows] == [4] * 3
    assert all(math.isfinite(row["loss"]) for row in rows)
