"""Work on disk: a compression that was killed goes on from it, and nothing stays when it is complete."""

import io
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import birdie
from birdie.artifact import saving
from birdie.artifact.container import Entry, Stream, to_bytes
from birdie.artifact.resume import Resume
from birdie.compress import coding
from birdie.compress.coding import Coded
from birdie.compress.rate import encoding
from birdie.compress.scheme import Encoded
from birdie.errors import OutputError
from tests.forked import run_python
from tests.ranks import birdie_command, run_as_ranks


def weights(count: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"blocks.{index}.w": torch.randn(64 + 8 * index, 96, generator=generator) for index in range(count)}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep coded tensors of small models on disk, too."""
    monkeypatch.setattr(saving, "_ON_DISK", 1)


@pytest.fixture(scope="module")
def plain() -> bytes:
    """The file of a process that nothing disturbs, without coded tensors on disk."""
    file = io.BytesIO()
    birdie.save(weights(), file, bits=4.0, effort="fast")
    return file.getvalue()


def count_coded(monkeypatch: pytest.MonkeyPatch) -> list[Encoded]:
    """Return the list of the tensors that are coded from here on."""
    coded: list[Encoded] = []

    def code(tensor: Encoded, *args: Any, **settings: Any) -> Coded:
        coded.append(tensor)
        return coding.code(tensor, *args, **settings)

    monkeypatch.setattr(encoding, "code", code)
    return coded


def folder_of(path: Path) -> Path:
    return path.parent / f".{path.name}.coded"


def test_a_complete_file_leaves_no_folder_and_has_the_bytes_of_one_in_memory(tmp_path: Path, plain: bytes) -> None:
    birdie.save(weights(), tmp_path / "x.birdie", bits=4.0)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.birdie"]
    assert (tmp_path / "x.birdie").read_bytes() == plain


def fail_at_the_fourth(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the fourth record stay torn and raise an error."""
    keep, left = Resume.keep, [4]

    def fail(self: Resume, key: str, coded: Coded) -> Coded:
        left[0] -= 1
        if left[0] == 0:
            self._path(key).write_bytes(b"half a record")
            raise error
        return keep(self, key, coded)

    monkeypatch.setattr(Resume, "keep", fail)


def require_continuation(path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save again: what three records hold is not coded once more, and the bytes are those of an undisturbed process."""
    assert not path.exists()
    assert folder_of(path).is_dir()
    coded, recalled, recall = count_coded(monkeypatch), list[str](), Resume.recall

    def count_recalled(self: Resume, key: str) -> Coded | None:
        if (tensor := recall(self, key)) is not None:
            recalled.append(key)
        return tensor

    monkeypatch.setattr(Resume, "recall", count_recalled)
    birdie.save(weights(), path, bits=4.0)
    assert path.read_bytes() == plain
    assert not folder_of(path).exists()
    assert len(recalled) >= 3
    continued = len(coded)
    birdie.save(weights(), path, bits=4.0)
    assert len(coded) - continued == continued + len(recalled)


def test_an_interruption_says_where_the_tensors_are_and_the_same_call_goes_on(
    tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.birdie"
    with monkeypatch.context() as patch:
        fail_at_the_fourth(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            birdie.save(weights(), path, bits=4.0, workers=1)
    assert str(folder_of(path)) in caplog.text
    require_continuation(path, plain, monkeypatch)


def test_an_interruption_before_any_work_is_done_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Resume(tmp_path / "x.birdie"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from safetensors.torch import load_file
import birdie
from birdie.artifact import saving as save
from birdie.artifact.resume import Resume
save._ON_DISK = 1
keep, left = Resume.keep, [4]
def killed(self, key, coded):
    left[0] -= 1
    if not left[0]:
        self._path(key).write_bytes(b"half a record")
        os.kill(os.getpid(), signal.SIGKILL)
    return keep(self, key, coded)
Resume.keep = killed
birdie.save(load_file(sys.argv[1]), Path(sys.argv[2]), bits=4.0, effort="fast", workers=1)
"""


def test_after_a_kill_the_same_call_goes_on(tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(weights(), tmp_path / "x.safetensors")
    done = run_python("-c", KILLED, f"{tmp_path}/x.safetensors", f"{tmp_path}/x.birdie")
    assert done.returncode == -signal.SIGKILL, done.stderr
    require_continuation(tmp_path / "x.birdie", plain, monkeypatch)


@pytest.mark.parametrize("fault", ["full", "no budget"])
def test_errors_that_would_come_again_leave_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "full":
        fail_at_the_fourth(monkeypatch, OutputError("cannot write x: no space left on device; free some space"))
    with pytest.raises((OutputError, birdie.BudgetError)):
        birdie.save(weights(), tmp_path / "x.birdie", bits=4.0 if fault == "full" else 0.01, workers=1)
    assert list(tmp_path.iterdir()) == []


def record(text: bytes) -> Coded:
    return Coded("int8", (len(text),), torch.float32, (7,), (Stream(0, text), Stream(2, b"more")))


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with Resume(tmp_path / "x.birdie") as resume:
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OutputError, match="no space left on device"):
            resume.keep("key", record(b"payload"))


def put_two(output: Path) -> None:
    """Leave the records "a" and "b"."""
    with suppress(KeyboardInterrupt), Resume(output) as resume:
        resume.keep("a", record(b"first"))
        resume.keep("b", record(b"second"))
        raise KeyboardInterrupt


def payloads(coded: Coded | None) -> list[bytes]:
    assert coded is not None
    return [b"".join(stream.pieces()) for stream in coded.streams]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def of_two(_: bytes) -> bytes:
    return to_bytes([Entry(name, 1, 0, (3,), (7,), record(b"one").streams) for name in ("int8", "int4")])


@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: data[:20], lambda _: b"", of_two])
def test_a_damaged_record_is_not_used(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    put_two(tmp_path / "x")
    for file in folder_of(tmp_path / "x").iterdir():
        file.write_bytes(damage(file.read_bytes()))
    with Resume(tmp_path / "x") as resume:
        assert resume.recall("b") is None
        assert payloads(resume.keep("b", record(b"again"))) == [b"again", b"more"]


def test_a_folder_that_somebody_prepared_is_not_believed(tmp_path: Path) -> None:
    """Neither records that were copied, nor links, nor files of other names are read, written or removed."""
    put_two(tmp_path / "x")
    shutil.copytree(folder_of(tmp_path / "x"), folder_of(tmp_path / "y"))
    (folder_of(tmp_path / "y") / "0").symlink_to(tmp_path / "thesis")
    (tmp_path / "thesis").write_text("mine")
    with Resume(tmp_path / "y") as resume:
        assert resume.recall("a") is None
        resume._path("c").symlink_to(tmp_path / "thesis")
        assert resume.recall("c") is None
        with pytest.raises(OutputError, match="link to"):
            resume.keep("c", record(b"third"))
    assert (tmp_path / "thesis").read_text() == "mine"
    assert [path.name for path in folder_of(tmp_path / "y").iterdir()] == ["0"]
    folder_of(tmp_path / "z").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="link to"):
        Resume(tmp_path / "z")
    folder_of(tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="it is a file"):
        Resume(tmp_path / "file")


def test_a_second_process_on_the_same_output_is_refused(tmp_path: Path) -> None:
    with (
        Resume(tmp_path / "x"),
        pytest.raises(OutputError, match="written by another process"),
        Resume(tmp_path / "x"),
    ):
        pass


def resuming_command(folder: str, *tokens: str) -> None:
    """Run the command line with coded tensors on disk, ranks above 0 in folders of their own if `folder` is given."""
    saving._ON_DISK = 1
    if folder and os.environ["RANK"] != "0":
        disk = Path(folder + os.environ["RANK"])
        disk.mkdir()
        os.chdir(disk)
    birdie_command(*tokens)


@pytest.mark.parametrize("own_disks", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_rank_0_collects_what_the_ranks_coded(own_disks: bool, tmp_path: Path, plain: bytes) -> None:
    save_file(weights(), tmp_path / "x.safetensors")
    command = ("compress", str(tmp_path / "x.safetensors"), "--bits", "4", "--effort", "fast", "-o", "x.birdie")
    ranks = tmp_path / "ranks"
    run_as_ranks(resuming_command, (str(tmp_path / "rank ") if own_disks else "", *command), 2, ranks, {})
    assert (ranks / "x.birdie").read_bytes() == plain
    assert not folder_of(ranks / "x.birdie").exists()
    if own_disks:
        assert not (tmp_path / "rank 1" / "x.birdie").exists()


DYING = """
import os, signal, sys
from birdie.artifact import saving as save
from birdie.artifact.resume import Resume
from birdie.cli import main
save._ON_DISK = 1
keep, left = Resume.keep, [2]
def killed(self, key, coded):
    left[0] -= 1
    if not left[0] and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return keep(self, key, coded)
recall = Resume.recall
def seen(self, key):
    record = recall(self, key)
    if record is not None:
        print("rank", os.environ["RANK"], "recalled", file=sys.stderr)
    return record
Resume.keep, Resume.recall = killed, seen
main()
"""


@pytest.mark.nightly
def test_a_rank_that_dies_is_restarted_and_takes_up_its_tensors(tmp_path: Path, plain: bytes) -> None:
    save_file(weights(), tmp_path / "x.safetensors")
    (tmp_path / "dying.py").write_text(DYING)
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = ["compress", "x.safetensors", "--bits", "4", "--effort", "fast", "-o", "x.birdie"]
    done = run_python("-m", *launcher, "dying.py", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.birdie").read_bytes() == plain
    assert "recalled" in done.stderr
    assert not folder_of(tmp_path / "x.birdie").exists()
