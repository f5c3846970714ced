"""The benchmark of the fused loss: both implementations agree to the bit, and rows have the pinned keys."""

import json

import pytest
import torch

from benchmarks import fused_loss

CPU = torch.device("cpu")


def test_both_implementations_are_measured_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "peak", lambda *_: 3.0)  # takes a process: see the nightly test
    eager, chunks = fused_loss.rows_of((64, 32, 8), 1, CPU)
    assert list(eager) == ["rows", "vocabulary", "dim", "way", "ms", "times_faster", "peak_mb", "same", "skipped"]
    assert (eager["way"], chunks["way"]) == ("eager", "chunks")
    assert eager["times_faster"] == 1
    assert chunks["same"]


@pytest.mark.nightly  # a process whose memory is measured, for each implementation
def test_the_fused_loss_needs_less_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fused_loss, "SHAPES", ((4096, 1024, 16),))
    monkeypatch.setattr("sys.argv", ["fused_loss", "--json", "--turns", "1", "--device", "cpu"])
    fused_loss.main()
    eager, chunks, gpu = json.loads(capsys.readouterr().out)["rows"]
    assert gpu["skipped"] == "no CUDA"
    assert chunks["same"]
    assert eager["ms"] > 0
    if eager["peak_mb"] is not None:
        assert chunks["peak_mb"] < 0.6 * eager["peak_mb"]
