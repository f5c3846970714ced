"""Every door takes paths, bytes and binary file objects, and what is written to one is read from it again."""

import gzip
import io
import lzma
import mmap
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import birdie
from birdie.errors import ArtifactError, ConfigError, OutputError
from birdie.system.file_objects import source_of, write_all

STATE = {"weight": torch.linspace(-1, 1, 96).view(8, 12), "bias": torch.arange(8.0)}


@pytest.fixture(scope="module")
def data() -> bytes:
    file = io.BytesIO()
    birdie.save(STATE, file, lossless=True)
    return file.getvalue()


class Minimal:
    """An object of another package: it reads and writes, and nothing else."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def write(self, data: bytes) -> None:
        self.data += data

    def read(self, size: int = -1) -> bytes:
        part = self.data if size < 0 else self.data[:size]
        self.data = self.data[len(part) :]
        return part


class Slow(io.RawIOBase):
    """Takes a few bytes at a time, as an unbuffered file may."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)[:100]
        return min(len(data), 100)


@contextmanager
def zip_member(path: Path, mode: Any) -> Iterator[Any]:
    with zipfile.ZipFile(path, mode) as archive, archive.open("a/model.birdie", mode) as file:
        yield file


OPENERS: dict[str, Callable[[Path, str], Any]] = {
    "open": lambda path, mode: path.open(f"{mode}b"),
    "unbuffered": lambda path, mode: path.open(f"{mode}b", buffering=0),
    "gzip": lambda path, mode: gzip.GzipFile(path, f"{mode}b"),
    "xz": lambda path, mode: lzma.LZMAFile(path, f"{mode}b"),  # noqa: SIM115
    "zip": zip_member,
}


def require_same(file: Any) -> None:
    loaded = birdie.load(file)
    assert all(torch.equal(loaded[name], weight) for name, weight in STATE.items())


@pytest.mark.parametrize("kind", OPENERS)
def test_a_file_that_was_opened_is_written_and_read(kind: str, data: bytes, tmp_path: Path) -> None:
    with OPENERS[kind](tmp_path / "x", "w") as file:
        summary = birdie.save(STATE, file, lossless=True)
    assert summary.bytes == len(data)
    for door in (birdie.load, birdie.inspect, birdie.load_object):
        with OPENERS[kind](tmp_path / "x", "r") as file:
            door(file)
    with OPENERS[kind](tmp_path / "x", "r") as file:
        assert file.read() == data


@pytest.mark.parametrize("make", [io.BytesIO, tempfile.SpooledTemporaryFile, tempfile.TemporaryFile])
def test_what_was_just_written_is_read_from_its_start(make: Callable[[], Any]) -> None:
    with make() as file:
        birdie.save(STATE, file, lossless=True)
        require_same(file)
        require_same(file)  # it is at its end again
        file.seek(0)
        require_same(file)
        assert birdie.inspect(file).weights == 104


@pytest.mark.parametrize(
    "wrap",
    [bytes, bytearray, memoryview, Minimal, io.BytesIO, lambda data: io.BufferedReader(io.BytesIO(data)),
     lambda data: memoryview(bytes(byte for one in data for byte in (one, 0)))[::2]],
)  # fmt: skip
def test_every_door_takes_bytes_and_file_objects(wrap: Callable[[bytes], Any], data: bytes) -> None:
    require_same(wrap(data))
    assert birdie.inspect(wrap(data)).bytes == len(data)
    assert birdie.load_object(wrap(data)).keys() == STATE.keys()
    eager, lazy = (
        birdie.load(wrap(data), into=nn.Linear(12, 8)),
        birdie.load(wrap(data), into=nn.Linear(12, 8), lazy=True),
    )
    assert torch.equal(eager(torch.ones(12)), lazy(torch.ones(12)))


def test_a_mapped_file_is_read(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        require_same(mapped)


@pytest.mark.parametrize("make", [Minimal, Slow])
def test_objects_of_other_packages_are_written(make: Callable[[], Any]) -> None:
    file = make()
    birdie.save_object(STATE, file)
    assert birdie.load_object(file.data).keys() == STATE.keys()


def test_a_file_is_a_part_of_another(data: bytes, tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file:
        file.write(b"a header")
        birdie.save(STATE, file, lossless=True)
        file.seek(8)
        require_same(file)
        with pytest.raises(ArtifactError, match=r"not a \.birdie file"):
            birdie.load(file)
        file.seek(3)
        with pytest.raises(ConfigError, match=f"{len(data) + 5:,} bytes after its position"):
            birdie.save(STATE, file)
    assert (tmp_path / "x").read_bytes() == b"a header" + data


def text_file(path: Path, mode: str) -> Any:
    return path.open(mode, encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: io.StringIO("x"), r"StringIO is open for text; open it with mode '.b'"),
        (lambda path: text_file(path, "w+"), "open for text"),
        (lambda _: io.TextIOWrapper(io.BytesIO()), "open for text"),
        (lambda path: closed(path.open("w+b")), "is closed"),
        (lambda _: closed(io.BytesIO()), "BytesIO is closed"),
    ],
)
def test_what_is_no_binary_file_is_named(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    for door in (birdie.load, birdie.inspect, birdie.load_object, lambda file: birdie.save(STATE, file)):
        with closing(make(tmp_path / "x")) as file, pytest.raises(ConfigError, match=message):
            door(file)


def closed(file: Any) -> Any:
    file.close()
    return file


def test_wrong_objects_are_refused_before_work(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file, pytest.raises(ConfigError, match=r"x is not open for writing"):
        birdie.save(STATE, file)
    with (tmp_path / "y").open("wb") as file, pytest.raises(ArtifactError, match=r"cannot read .*y"):
        birdie.load(file)
    wrongs: list[Any] = [None, 5, object(), ["x"], 1.5]
    for wrong in wrongs:
        for door in (birdie.load, birdie.inspect, lambda path: birdie.save(STATE, path)):
            with pytest.raises(ConfigError, match="is not a path"):
                door(wrong)
    with pytest.raises(ConfigError, match="not bytes"):
        birdie.load(Minimal([]))  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=r"not a \.birdie file"):
        birdie.load(io.BytesIO())


class Full(io.BytesIO):
    """A disk that is full after some bytes."""

    def write(self, data: Any) -> int:
        super().write(data[:50])
        raise OSError("no space left on device")


class Interrupted(Full):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            raise KeyboardInterrupt from None


@pytest.mark.parametrize(("make", "error"), [(Full, OutputError), (Interrupted, KeyboardInterrupt)])
def test_nothing_half_written_stays(make: Callable[[], io.BytesIO], error: type[BaseException]) -> None:
    file = make()
    with pytest.raises(error):
        birdie.save(STATE, file)
    assert (file.getvalue(), file.tell()) == (b"", 0)


def test_nothing_is_written_if_the_model_cannot_be_saved() -> None:
    file = io.BytesIO()
    with pytest.raises(birdie.BudgetError):
        birdie.save({"weight": torch.randn(64, 64)}, file, budget=100)
    assert file.getvalue() == b""


@given(st.binary(max_size=500), st.integers(0, 600))
def test_any_bytes_are_read_from_the_position_to_the_end(content: bytes, position: int) -> None:
    file = io.BytesIO(content)
    file.seek(position)
    assert bytes(source_of(file)) == (content[position:] or content)  # type: ignore[arg-type]
    written = Slow()
    write_all(written, content)
    assert written.data == content
