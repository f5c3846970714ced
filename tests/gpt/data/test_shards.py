"""Shards: the format is the challenge's byte for byte, tokens round-trip, and malformed files are refused."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from birdie.errors import DataError
from birdie.gpt.data.shards import ShardReader, ShardWriter, read_shard, write_shard

TOKENS = np.arange(1, 101, dtype=np.uint16)


@settings(deadline=None)  # each shard waits for the disk
@given(arrays(np.uint16, st.integers(1, 300)))
def test_tokens_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.bin"
    write_shard(path, tokens)
    assert np.array_equal(read_shard(path), tokens)


def test_the_format_is_the_challenges(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([1, 515]))
    data = (tmp_path / "a.bin").read_bytes()
    assert data[:12] == (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert data[12:1024] == bytes(1012)
    assert data[1024:] == b"\x01\x00\x03\x02"


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"\0\0\0\0", "begins with 0, a shard begins with 20240520"),
        (4, b"\2\0\0\0", "version 2"),
        (8, b"\0\0\0\0", "says 0 tokens"),
        (8, b"\xff\xff\xff\xff", "says -1 tokens"),
        (8, b"\xff\xff\xff\x7f", "1,224 bytes, but 2,147,483,647 tokens take 4,294,968,318"),
        (1224, b"\0", "1,225 bytes, but 100 tokens take 1,224"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, offset: int, replacement: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    data = bytearray(path.read_bytes())
    data[offset : offset + 4] = replacement
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_shard(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 11, 1023, 1024, 1223])
def test_truncated_files_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=f"{size:,} bytes"):
        read_shard(path)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=4), st.integers(9, 60))
def test_the_writer_divides_one_sequence_into_shards(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard: int
) -> None:
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "fineweb", "train", shard) as writer:
        for part in np.split(tokens, np.cumsum(sizes)[:-1] if sizes else []):
            writer.write(part)
    read = [np.asarray(read_shard(path)) for path in sorted(folder.iterdir())]
    assert sorted(folder.iterdir()) == writer.paths
    assert all(len(part) == shard for part in read[:-1])
    assert np.array_equal(np.concatenate([np.zeros(0, np.uint16), *read]), tokens)


def test_an_interrupted_writer_removes_the_incomplete_shard(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, "fineweb", "val", 60) as writer:
            writer.write(TOKENS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["fineweb_val_000000.bin"]


def cut(path: Path) -> None:
    os.truncate(path, 1034)


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 0))  # as a clock of a millisecond would show it


def replace(path: Path) -> None:
    write_shard(path, TOKENS[::-1])


@pytest.mark.parametrize("change", [cut, overwrite, replace, Path.unlink])
def test_a_shard_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Its process would otherwise die of SIGBUS, or go on with other tokens than a resumed run."""
    write_shard(tmp_path / "a.bin", TOKENS)
    reader = ShardReader(tmp_path / "a.bin")
    assert np.array_equal(reader.read(40, 20), TOKENS[40:60])
    change(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin"):
        reader.read(40, 20)
