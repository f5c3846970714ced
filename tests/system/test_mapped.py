"""Pages of a mapped file are given back, and read again with the same values."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.errors import WeightsError
from birdie.system.mapped import release, releasing

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


def written_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(os.urandom(32))


def cut(path: Path) -> None:
    """Cut a file within its last page, which then reads as zeros."""
    os.truncate(path, path.stat().st_size - 4)


def replaced(path: Path) -> None:
    save_file({"w": torch.zeros(64, 64)}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("settings", [{"lossless": True}, {}, {"bits": 6}], ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("change", [written_in_place, cut, replaced])
def test_a_file_that_is_written_to_while_it_is_read_is_an_error(
    change: Callable[[Path], None], suffix: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Never a mixture of two contents; a file that is replaced stays as it was for who has it open."""
    path, weight = (tmp_path / "x").with_suffix(suffix), torch.randn(64, 64)
    save = save_file if suffix == ".safetensors" else torch.save
    save({"w": weight}, path)
    source, changed = open_checkpoint(path), list[bool]()

    def progress(*_: object) -> None:
        if not changed:
            changed.append(True)
            change(path)

    output = tmp_path / "x.birdie"
    if change is not replaced:
        with source.mapped(), pytest.raises(WeightsError, match=r"another process (wrote|changed)"):
            write_checkpoint(source, output, SaveOptions(progress=progress, **settings))
        assert not output.exists()
    else:
        with source.mapped():
            write_checkpoint(source, output, SaveOptions(progress=progress, **settings))
        if "lossless" in settings:
            assert torch.equal(birdie.load(output)["w"], weight)
    assert changed
