"""The benchmark of fp8 trains the same model in each arithmetic, and says if there is no GPU."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import fp8
from birdie.data.corpus import file_corpus
from tests.data.random_text import random_lines


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (extra gpu)")
def test_only_the_arithmetic_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(random_lines(300), encoding="utf-8")
    monkeypatch.setattr(fp8, "stdlib_corpus", lambda: file_corpus([text], validation_fraction=0.1))
    monkeypatch.setattr(fp8, "SMALL", dataclasses.replace(fp8.SMALL, num_layers=2))
    monkeypatch.setattr(fp8, "SETTINGS", dataclasses.replace(fp8.SETTINGS, train_batch_tokens=256))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *rows, gpu = fp8.measure(steps=3, gpu_steps=1, seed=0)
    assert [row["arithmetic"] for row in rows] == list(fp8.ARITHMETIC)
    assert rows[0]["over_bfloat16"] == 1
    assert "emulated" in rows[1]["said"]
    assert len({row["loss"] for row in rows}) == 3
    assert all(row["over_bfloat16"] == pytest.approx(1, rel=0.01) for row in rows)
    assert gpu == {"arithmetic": "on a GPU", "skipped": "no CUDA"}
