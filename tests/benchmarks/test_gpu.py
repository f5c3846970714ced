"""`benchmarks.gpu` survives its checks, and each check's logic runs on a CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import gpu, gpu_checks, on_device
from benchmarks.gpu_checks import CHECKS, Check, Setup
from benchmarks.train import RepeatedTokens
from birdie.artifact.container import Reader
from birdie.compress import row_blocks
from birdie.entropy import trellis_states as trellis
from birdie.gpt.model.attention_kernels import Kernels
from birdie.gpt.model.gpt import GPT
from birdie.gpt.train.settings import TrainSettings

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


def test_a_check_that_hangs_costs_one_check() -> None:
    (row,) = gpu.run_check("machine", "cpu", limit=0.01)
    assert (row["met"], row["note"][:9]) == (False, "stopped a")


@pytest.mark.nightly  # a process that imports torch
def test_a_check_that_dies_costs_one_check() -> None:
    row = gpu.run_check("machine", "cuda:99", limit=60)[-1]
    assert row["met"] is False
    assert "exit code" in row["note"]


@pytest.mark.nightly  # processes, or compression
def test_what_a_check_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def session(_command: object, **settings: Any) -> subprocess.Popen[bytes]:
        script = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
        started.append(popen([sys.executable, "-c", script], **(settings | {"stdout": subprocess.PIPE})))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", session)
    gpu.run_check("machine", "cpu", limit=2)
    output = started[0].stdout
    assert output is not None
    with output:
        assert _state_of(int(output.readline())) == "gone"


def _state_of(process: int) -> str:
    status = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not status.exists() or (state := status.read_text().rpartition(")")[2].split()[0]) == "Z":
            return "gone"
        time.sleep(0.05)
    return state


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


@pytest.mark.nightly  # processes, or compression
def test_the_tests_are_counted_and_a_failure_is_told_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("def test_a(): assert 0\ndef test_b(): pass\ndef test_c(): pass\n")
    monkeypatch.setattr(gpu_checks, "TESTS", (str(file),))
    first, last = gpu_checks.tests(Setup(torch.device("cpu"), small=False))
    assert (first["met"], first["note"].endswith("::test_a")) == (False, True)
    assert (last["met"], last["note"]) == (False, "1 failed, 2 passed")


def test_training_is_measured_with_the_kernels_and_documents_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Kernels("chosen")
    monkeypatch.setattr(gpu_checks, "best_kernels", lambda *_: chosen)
    run, _, _ = gpu_checks._run("sota", CPU, [], compute_dtype="float32", compile=False)
    assert cast(GPT, run.model).kernels is chosen
    ids, _ = RepeatedTokens(
        TrainSettings(train_batch_tokens=4096, train_seq_len=2048, accumulation=1), 1024, bos_id=1
    ).next()
    assert int((ids == 1).sum()) >= 4


def blocks_of_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((trellis, "CHUNK"), (row_blocks, "LARGE"), (row_blocks, "_BLOCK")):
        monkeypatch.setattr(module, name, size)


@pytest.mark.nightly  # processes, or compression
def test_matrices_that_a_file_holds_in_blocks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of_size(65_536, monkeypatch)  # the fewest weights that the fast coder codes in tiles
    assert any(row["what"] == "decode, CPU" for row in on_device.tensor(CPU.device, small=True))
    blocks_of_size(2048, monkeypatch)
    rows = on_device.model(CPU.device, small=True)
    assert [row["met"] for row in rows if "outputs" in row["what"]] == [True, True]
    on_device.saved(tmp_path / "model", on_device.TINY, CPU.device)
    with Reader(tmp_path / "model") as reader:
        assert {len(reader.blocks(f"blocks.{layer}.gate.weight")) for layer in range(2)} == {6}
