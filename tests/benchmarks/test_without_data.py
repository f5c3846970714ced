"""Comparison without data: naive files decode to what they say, ratios and rises are those of the curves."""

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks import lossy_rivals, without_data
from benchmarks.silero import load_silero

STATE = {
    "conv.weight": torch.randn(40, 16, 3, 3, generator=torch.Generator().manual_seed(0)),
    "head.weight": torch.randn(10, 128, generator=torch.Generator().manual_seed(1)),
    "norm": torch.linspace(0.5, 2, 7),
    "steps": torch.tensor(12345),
    "empty": torch.zeros(0),
    "zeros": torch.zeros(32, 64),
}


@pytest.mark.parametrize("bits", [8, 5, 4, 3])
@pytest.mark.parametrize("group", [None, 32])
def test_a_naive_file_decodes_to_within_half_a_step(bits: int, group: int | None) -> None:
    coder = lossy_rivals.naive(bits, group)
    data = coder.encode(STATE)
    decoded = coder.decode(data)
    assert list(decoded) == list(STATE)
    assert torch.equal(decoded["steps"], STATE["steps"])
    assert torch.equal(decoded["norm"], STATE["norm"].half().float())
    assert not decoded["zeros"].any()
    for name in ("conv.weight", "head.weight"):
        rows = STATE[name].flatten(1)
        rows = rows.reshape(-1, group) if group and rows.shape[1] % group == 0 else rows
        step = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert bool(((decoded[name].reshape(rows.shape) - rows).abs() <= 0.51 * step).all())
    numbers = sum(STATE[name].numel() for name in ("conv.weight", "head.weight"))
    assert len(data) < numbers * min(bits, 8) / 8 * 1.05 + 1500


def row(size: int, error: float, scheme: str = "birdie", agreement: float = 1.0) -> dict[str, object]:
    return {"network": "x", "scheme": scheme, "bytes": size, "error": error, "agreement": agreement}


def test_ratios_are_at_the_error_of_the_naive_file_and_rises_between_neighbors() -> None:
    birdie = [row(100, 1.0), row(200, 0.25), row(300, 0.3, agreement=0.9), row(400, 1 / 64)]
    naive = [row(400, 0.25, "int4 per channel"), row(1000, 1e-3, "int8 per channel")]
    compared = without_data.comparison(naive, birdie)
    assert [line["ratio"] for line in compared] == [0.5, None]
    overview = without_data.summary(naive, birdie)
    assert (overview["worst"], overview["median"], overview["compared"]) == (0.5, 0.5, "1 of 2")
    assert overview["rise"] == pytest.approx(1.2)
    assert overview["wrong"] == 0
    assert without_data.summary([row(250, 0.25, "int4 per channel")], birdie)["wrong"] == pytest.approx(0.1)


def test_budgets_are_geometric_from_the_smallest_naive_file_to_the_largest() -> None:
    assert without_data.budgets([row(100, 1), row(1600, 1)], 5) == [100, 200, 400, 800, 1600]


@pytest.mark.parametrize(("worst", "below"), [(0.5, 0), (1.3, 2), (9.0, without_data.STEPS)])
def test_smaller_files_are_made_until_one_is_as_bad_as_the_worst_naive_file(
    worst: float, below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_data, "birdie_row", lambda _network, budget, _inputs: row(budget, 100 / budget))
    rows = without_data.birdie_rows(cast(Any, None), [100, 200], worst, "none")
    sizes = [line["bytes"] for line in rows]
    assert sizes == sorted(sizes)
    assert sizes[-2:] == [100, 200]
    assert len(rows) == 2 + below


def test_the_detector_runs_its_cell_as_torch_does() -> None:
    if not os.environ.get("BIRDIE_DATA"):
        pytest.skip("BIRDIE_DATA is unset")
    module, _, clips = load_silero(Path(os.environ["BIRDIE_DATA"]))
    step, hidden, cell = torch.randn(3, 128), torch.randn(3, 128), torch.randn(3, 128)
    with torch.no_grad():
        for ours, torchs in zip(
            module._advance(step, hidden, cell), module.lstm_cell(step, (hidden, cell)), strict=True
        ):
            np.testing.assert_allclose(ours, torchs, atol=1e-6)
        probabilities = module(clips[:2])
    assert probabilities.shape == (2, clips.shape[1] // 512)
    assert 0.2 < float((probabilities > 0.5).float().mean()) < 0.99
