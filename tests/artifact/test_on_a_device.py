"""Saving, calibrating and loading work with modules and tensors on an accelerator, and inside others' contexts."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration import sensitivity, synthetic
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from tests.forked import run_python
from tests.nightly import mostly_nightly

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_api_works_on_an_accelerator() -> None:
    done = run_python("-m", "tests.artifact.on_pretend_gpu", folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def embedded_loss(module: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def loss(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 16, generator=generator), torch.randint(8, (16,), generator=generator)) for _ in range(count)
    ]


def test_a_calibration_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[weakref.ref[Any]] = []
    create = sensitivity.Recorder.__init__

    def remember(self: Any, *args: Any) -> None:
        recorders.append(weakref.ref(self))
        create(self, *args)

    monkeypatch.setattr(sensitivity.Recorder, "__init__", remember)
    module = Embedded()
    CalibrationResult.of(module.state_dict(), (module, [torch.randint(20, (2, 8)) for _ in range(3)], embedded_loss))
    gc.collect()
    assert [recorder() for recorder in recorders] == [None]


def test_the_kl_is_measured_under_autocast() -> None:
    module = linear()
    held_out = HeldOut(module, batches(), loss)
    states = [{name: tensor * factor for name, tensor in module.state_dict().items()} for factor in (1.0, 1.2, 0.5)]
    with torch.autocast("cpu", torch.bfloat16):
        exact, near, far = (held_out(state) for state in states)
    assert exact < near < far


@pytest.mark.parametrize("offload", mostly_nightly([False, True], [True]))
def test_a_default_device_changes_nothing(offload: bool, tmp_path: Path) -> None:
    module, data = linear(), batches()
    known = birdie.calibrate(module, data, loss, offload=offload)
    birdie.save(module, tmp_path / "plain", bits=4, calibration=known, workers=1)
    with torch.device("meta"):
        known = birdie.calibrate(module, data, loss, offload=offload)
        birdie.save(module, tmp_path / "meta", bits=4, calibration=known, workers=1)
        decoded = birdie.load(tmp_path / "meta")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "meta").read_bytes()
    assert all(tensor.device.type == "cpu" for tensor in decoded.values())


@pytest.mark.slow
def test_calibration_of_a_distributed_module_does_not_communicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(linear(), nn.BatchNorm1d(8)))
        monkeypatch.setattr(wrapped, "_sync_buffers", lambda: pytest.fail("a collective on one rank"))
        birdie.save(wrapped, tmp_path / "file", calibration=birdie.calibrate(wrapped, batches(), loss), tune=0.1)
        assert set(birdie.load(tmp_path / "file")) == set(wrapped.module.state_dict())
        del wrapped
        gc.collect()
    finally:
        dist.destroy_process_group()


def test_made_up_inputs_have_the_dtype_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "STEPS", 2)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).bfloat16().eval()
    birdie.save(module, tmp_path / "file", calibration="synthetic")
    assert (tmp_path / "file").stat().st_size
