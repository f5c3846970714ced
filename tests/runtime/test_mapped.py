"""Pages of a mapped file are given back, and read again with the same values."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from birdie.runtime.mapped import release, releasing

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def resident_file_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1])


def test_released_pages_leave_the_process_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    save_file({"w": weight}, path)
    mapped = load_file(path)["w"]
    assert torch.equal(mapped, weight)
    touched = resident_file_kib()
    with releasing([path]):
        release(mapped[1:7, 1:])
        release(mapped)
        assert resident_file_kib() < touched - 12_000
        assert torch.equal(mapped, weight)


def test_other_memory_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1024, 1024)}, path)
    mapped, other = load_file(path)["w"], torch.full((1024, 1024), 3.0)
    mapped *= 2  # changed pages: nobody may release them, and without `releasing` nobody does
    release(mapped)
    with releasing([tmp_path / "x.safetensors"]):
        release(other)
    assert bool((mapped == 2).all())
    assert bool((other == 3).all())
