"""A checkpoint that is still being written waits, and one that is complete does not."""

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from birdie.chain import settled
from birdie.chain.settled import is_twin, missing_end, unfinished


def aged(path: Path, seconds: float = 60) -> Path:
    """Let a checkpoint be as old as that."""
    for file in (path, *path.rglob("*")):
        os.utime(file, (time.time() - seconds,) * 2)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save({"weight": torch.randn(40, 40)}, tmp_path / "ckpt_220.pt")
    return aged(tmp_path / "ckpt_220.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_cut_file_is_not_complete(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    state = {"a": torch.randn(30, 30), "b": torch.randn(7)}
    save_file(state, file) if name.endswith("safetensors") else torch.save(state, file)
    data = file.read_bytes()
    assert not missing_end(file)
    for length in (0, 1, 9, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        assert missing_end(file) or (0 < length < 4 and name == "x.pt"), length
    for other in (b"log of a run\n", b"{", b""):
        (tmp_path / "trainer_state.json").write_bytes(other)
        assert not missing_end(tmp_path / "trainer_state.json")


def test_what_is_old_closed_and_complete_does_not_wait(checkpoint: Path) -> None:
    assert unfinished([checkpoint]) == {}


def test_what_is_open_for_writing_waits_also_if_it_does_not_change(checkpoint: Path) -> None:
    with checkpoint.open("ab"):
        assert "is still being written" in unfinished([checkpoint])[checkpoint]
    with checkpoint.open("rb"):
        assert unfinished([checkpoint]) == {}


@pytest.mark.parametrize("name", ["ckpt_220.pt.tmp", ".ckpt_220.pt.x7Yz", "tmp-ckpt_220.pt"])
def test_a_checkpoint_waits_for_its_twin(checkpoint: Path, name: str) -> None:
    twin = checkpoint.with_name(name)
    with twin.open("wb"):
        assert unfinished([checkpoint])
    aged(twin)
    assert unfinished([checkpoint]) == {}


def test_a_change_while_it_is_watched_is_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint.parent / "step-7"
    folder.mkdir()
    (folder / "a.txt").write_text("a")

    def go_on(_: float) -> None:
        (folder / "b.txt").write_text("b")

    monkeypatch.setattr(settled, "QUIET", 2.0)
    monkeypatch.setattr(time, "sleep", go_on)
    assert [*unfinished([checkpoint, folder])] == [folder]


@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        ("step-2.tmp", "step-2", True),
        ("tmp-checkpoint-220", "checkpoint-220", True),
        ("step-20", "step-2", False),
        ("step-2", "step-2", False),
        ("laststep-2", "step-2", False),
        ("ckpt_220.pt_tmp", "ckpt_220.pt", True),
    ],
)
def test_a_twin_has_the_whole_name_and_more(name: str, of: str, expected: bool) -> None:
    assert is_twin(name, of) == expected
