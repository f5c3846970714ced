"""Laws of calibration with files in place of memory: the sums of one in memory, to the bit, whatever the module is."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration import sensitivity
from birdie.compress.calibration.offload import Offload
from birdie.compress.calibration.sensitivity import measure, measure_batches
from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError, DataError, OutputError
from birdie.system.distributed import World
from tests.compress.calibration.block_models import CASES, WIDTH, Case, chain, classify, seeded, vectors
from tests.nightly import mostly_nightly


def offloaded(case: Case, folder: Path, least: int = 1) -> dict[str, Sensitivity]:
    """Return the sensitivities with all tensors of `least` bytes in files."""
    module, batches, loss = case
    with Offload(folder, module, least) as offload:
        recorder = measure_batches(module, batches, loss, offload=offload)
        recorder.share(World())
        return dict(recorder.finish())


def parts(known: Sensitivity) -> dict[str, Any]:
    blocks = None if known.blocks is None else known.blocks.blocks
    named = {"hessian": known.hessian, "blocks": blocks, "rows": known.row_fisher, "output": known.output}
    return {**named, "samples": known.samples, "gradients": known.gradients}


def require_same(measured: Any, expected: Any) -> None:
    assert sorted(measured) == sorted(expected)
    for name in expected:
        ours, theirs = parts(measured[name]), parts(expected[name])
        for part, value in theirs.items():
            same = torch.equal(ours[part], value) if isinstance(value, Tensor) else ours[part] == value
            assert same, (name, part)


NIGHTLY = {"a GPT with value residual and repeated layers"}  # the one with more techniques has them, too


@pytest.mark.parametrize("name", mostly_nightly(CASES, CASES.keys() - NIGHTLY))
def test_the_sums_are_those_of_a_calibration_in_memory(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    require_same(offloaded(case, tmp_path / "work"), measure(*case))


class Unusual(nn.Module):
    """Uses of weights other than products, skips over layers, and activations that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.recurrent = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.raw, self.last = nn.Parameter(0.3 * seeded(WIDTH, WIDTH)), nn.Linear(2 * WIDTH, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = F.relu(skip @ self.raw, inplace=True)
        x = x.t().contiguous().t()  # a view with other strides, of which a slice is used
        x = self.normed(x[:, :WIDTH]) + self.recurrent(x[:, None])[0][:, 0]
        x.add_(1).mul_(2)
        out: Tensor = self.last(torch.cat((x, skip.expand(2, -1, -1)[1]), 1))
        return out


@pytest.mark.parametrize("least", [1, 100, 400])
def test_any_use_of_a_weight_is_measured(least: int, tmp_path: Path) -> None:
    case = Case(Unusual(), vectors(), classify)
    require_same(offloaded(case, tmp_path / "work", least), measure(*case))


def test_columns_in_blocks_are_those_of_a_calibration_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "MAX_COLUMNS", WIDTH // 2)
    measured = offloaded(chain(), tmp_path / "work")
    require_same(measured, measure(*chain()))
    assert all(known.blocks is not None for known in measured.values())


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    module, batches, loss = chain()

    def functional(module: nn.Module, batch: Any) -> Tensor:
        gradients: Tensor = torch.func.grad(lambda x: module(x).sum())(batch[0])
        return gradients.square().sum()

    (tmp_path / "file").write_text("")
    for arguments, error, message in (
        ((module, batches, functional), ConfigError, r"torch\.func"),
        ((module, [], loss), DataError, "no calibration batches"),
    ):
        with pytest.raises(error, match=message):
            birdie.calibrate(*arguments, offload=tmp_path)
    with pytest.raises(OutputError, match="file"):
        birdie.calibrate(module, batches, loss, offload=tmp_path / "file")


def test_a_file_that_is_cut_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with Offload(tmp_path / "work", nn.Linear(2, 2), least=1) as offload:
        held = offload.hold(torch.arange(64.0))
        assert torch.equal(held(), torch.arange(64.0))
        os.truncate(tmp_path / "work" / "activations", 100)
        with pytest.raises(OutputError, match="activations was cut"):
            held()
