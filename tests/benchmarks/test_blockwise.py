"""The benchmark of blockwise calibration: both ways measure the same, in memory and on disk that the row tells."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import blockwise, memory

JOB = blockwise.Job("complete", 2, 64, 256, 2, save=False)


@pytest.mark.skipif(not memory.can_measure(), reason="needs /proc")
def test_both_ways_have_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)  # of this process: later tests need theirs
    monkeypatch.setattr(blockwise, "_INTERVAL", 0.001)
    one, two = (blockwise.measured(replace(JOB, method=method), tmp_path) for method in blockwise.METHODS)
    assert one.keys() == two.keys()
    assert two["fisher"] == pytest.approx(one["fisher"], rel=1e-4)
    assert one["disk_mb"] == 0 < two["disk_mb"]
    assert not (tmp_path / "work").exists()


def test_files_of_both_ways_have_the_same_budget(tmp_path: Path) -> None:
    one, two = (blockwise.done(replace(JOB, method=method, save=True), tmp_path) for method in blockwise.METHODS)
    assert two["bytes"] == pytest.approx(one["bytes"], rel=0.02)


def test_the_folder_is_measured_while_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with blockwise.watched(tmp_path) as most:
        (tmp_path / "work" / "file").write_bytes(bytes(1000))
        while most() < 1000:
            pass
        (tmp_path / "work" / "file").unlink()
    assert most() == 1000
