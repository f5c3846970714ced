"""The benchmark of the fused loss takes both ways in turns and says where it has no GPU."""

import json

import pytest

from benchmarks import fused


@pytest.mark.slow
def test_both_ways_are_measured_and_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fused, "SHAPES", ((4096, 1024, 16),))
    monkeypatch.setattr("sys.argv", ["fused", "--json", "--turns", "1", "--device", "cpu"])
    fused.main()
    eager, chunks, gpu = json.loads(capsys.readouterr().out)["rows"]
    assert (eager["way"], chunks["way"], gpu["skipped"]) == ("eager", "chunks", "no CUDA")
    assert chunks["same"]
    assert eager["ms"] > 0
    if eager["peak_mb"] is not None:
        assert chunks["peak_mb"] < 0.6 * eager["peak_mb"]
