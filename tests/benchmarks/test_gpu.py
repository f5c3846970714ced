"""`benchmarks.gpu` survives its checks, and each check's logic runs on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_checks
from benchmarks.gpu_checks import CHECKS, Check, Setup

CPU = Setup(torch.device("cpu"), small=True)


LONG = (
    "training",
    "muon",
    "fused",
    "sota",
    "byte budget",
    "loader",
    "profile",
    "compression",
    "compressed in device memory",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in LONG))
        for name, check in CHECKS.items()
        if check.on_cpu
    ],
)
def test_every_check_runs_at_a_small_size(name: str) -> None:
    rows = list(CHECKS[name].run(CPU))
    assert rows
    assert [row for row in rows if row.get("met") is False] == []
    assert all({"what"} <= row.keys() <= gpu.row_of(name, "").keys() for row in rows)


@pytest.mark.nightly  # a process that imports torch
def test_a_check_that_dies_costs_one_check() -> None:
    row = gpu.run_check("machine", "cuda:99", limit=60)[-1]
    assert row["met"] is False
    assert "exit code" in row["note"]


def test_a_failure_keeps_the_rows_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(_: Setup) -> object:
        yield {"what": "first"}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(CHECKS, "machine", Check("?", dies))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        gpu.work("machine", torch.device("cpu"), tmp_path / "rows")
    assert json.loads((tmp_path / "rows").read_text())["what"] == "first"


def test_what_is_left_out_is_said_and_the_file_is_whole_after_each_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_check(name: str, _device: str, _limit: float) -> list[gpu.Row]:
        ran.append(name)
        return [gpu.row_of(name, "it", figure=2, unit="ms", target="≥ 1", met=True)]

    monkeypatch.setattr(gpu, "run_check", run_check)
    path = tmp_path / "gpu.json"
    rows = gpu.measure(["machine", "tests"], 1, "cpu", path)
    assert ran == ["machine"]
    assert rows[1]["note"] == "skipped: no CUDA"
    results = json.loads(path.read_text())
    assert results["rows"] == rows
    text = gpu.PAGE.read_text()
    page = gpu.page(results, text)
    assert "| machine | it | 2 ms | ≥ 1 yes |  |" in page
    for mark, side in (("## Measured", 0), ("## The checks", 2)):
        assert page.partition(mark)[side] == text.partition(mark)[side]
    assert "minutes are over" in gpu.measure(["machine"], 0, "cuda", None)[0]["note"]


def test_the_mask_is_that_of_documents_and_windows() -> None:
    mask = gpu_checks._mask(torch.tensor([0, 3, 6, 9, 12]), 2, 6, 2, True)[:, 0]
    expected = torch.tensor([[[r // 3 == c // 3 and 0 <= r - c < 2 for c in range(6)] for r in range(6)]])
    assert torch.equal(mask, expected.expand(2, -1, -1))
