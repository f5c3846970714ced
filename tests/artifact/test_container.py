"""The container: what is written is read, order does not matter, single entries are read alone, and every damaged byte
is noticed."""

import dataclasses
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.artifact import container
from birdie.artifact.container import ALIAS, BLOCKS, FILES, Entry, Reader, Stream, block_name
from birdie.artifact.inspection import inspect
from birdie.artifact.loading import load
from birdie.artifact.repack import load_object
from birdie.artifact.safetensors_export import to_safetensors
from birdie.entropy.varint import varint
from birdie.errors import ArtifactError, ConfigError
from birdie.standalone import decoder

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
STREAMS = st.builds(Stream, st.integers(0, 255), st.binary(max_size=20))
ENTRIES = st.lists(
    st.builds(
        Entry,
        st.text("ab./~é日𝛑", max_size=12),
        st.integers(0, container.MAX_SCHEME),
        st.integers(0, 63),
        st.lists(st.integers(0, 1000), max_size=4).map(tuple),
        st.lists(INT64, max_size=3).map(tuple),
        st.lists(STREAMS, max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda entry: entry.name,
)


def read_all(data: bytes) -> None:
    reader = Reader(data)
    for name in reader.names:
        reader.read(name)


def sample() -> list[Entry]:
    entries = [Entry(f"layers.{i}.weight", 2, 1, (3, 4), (i, -5), (Stream(1, bytes([i] * 9)),)) for i in range(5)]
    return [*entries, Entry("tied", 0, 1, (3, 4), target="layers.3.weight", kind=ALIAS)]


@settings(max_examples=25)
@given(ENTRIES, st.binary(max_size=40), st.randoms())
def test_entries_come_back_in_any_order_from_the_same_bytes(entries: list[Entry], metadata: bytes, random) -> None:  # type: ignore[no-untyped-def]
    data = container.to_bytes(entries, metadata)
    shuffled = list(entries)
    random.shuffle(shuffled)
    assert container.to_bytes(shuffled, metadata) == data
    reader = Reader(data)
    assert reader.metadata == metadata
    assert reader.names == tuple(sorted((entry.name for entry in entries), key=str.encode))
    for entry in entries:
        assert reader.read(entry.name) == entry
        assert reader.entry(entry.name).shape == entry.shape
    assert sum(reader.table().values()) + reader.header_bytes == reader.size == len(data)


def test_a_file_reads_like_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.birdie"
    size = container.write(path, sample(), b"{}")
    assert path.stat().st_size == size
    with Reader(path) as reader:
        assert reader.read("layers.2.weight") == sample()[2]
        assert reader.entry("tied").target == "layers.3.weight"
    assert path.read_bytes() == container.to_bytes(sample(), b"{}")


def test_one_damaged_tensor_leaves_the_others_readable() -> None:
    data = bytearray(container.to_bytes(sample()))
    data[Reader(bytes(data)).header("layers.1.weight").offset] ^= 1
    reader = Reader(bytes(data))
    assert reader.read("layers.0.weight") == sample()[0]
    with pytest.raises(ArtifactError, match=r"layers\.1\.weight"):
        reader.read("layers.1.weight")


def test_a_thousand_tensors_cost_a_few_bytes_each() -> None:
    parts = ("attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "mlp.fc.weight")
    entries = [Entry(f"blocks.{i}.{part}", 2, 1, (512, 512)) for i in range(200) for part in parts]
    assert len(container.to_bytes(entries)) < 1500


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = container.to_bytes(sample(), b"{}")
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(ArtifactError):
            read_all(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(ArtifactError):
            Reader(data[:length])
    with pytest.raises(ArtifactError, match="added"):
        Reader(data + b"x")


def test_the_likely_mistakes_have_their_own_words(tmp_path: Path) -> None:
    data = container.to_bytes(sample())
    with pytest.raises(ArtifactError, match="text-mode"):
        Reader(data.replace(b"\r\n", b"\n"))
    with pytest.raises(ArtifactError, match=r"not a \.birdie file"):
        Reader(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ArtifactError, match=r"version 9\.7"):
        Reader(data[:8] + b"\x07\x09" + data[10:])
    with pytest.raises(ArtifactError, match="no tensor 'x'"):
        Reader(data).read("x")
    with pytest.raises(ArtifactError, match="cannot open"):
        Reader(tmp_path / "missing.birdie")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([sample()[0], sample()[0]], "two tensors"),
        ([Entry("a", 0, 1, (), target="b", kind=ALIAS)], "not a stored tensor"),
        ([Entry("a", 1 << 16, 1, ())], "scheme"),
        ([Entry("a", 1, 64, ())], "dtype"),
        ([Entry("a", 1, 1, (), target="b", kind=ALIAS), Entry("b", 1, 1, ())], "scheme"),
        ([Entry("a", 0, 1, (2, 3), (1,), kind=BLOCKS)], "parameters"),
        ([Entry("a", 0, 1, (2, 3), (), (Stream(0, b""),), kind=BLOCKS)], "streams"),
        ([Entry("a", 1, 1, (1 << 40, 1 << 40))], "elements"),
        ([Entry("a", 1, 1, (0, 1 << 60))], "elements"),
        ([Entry("a", 1, 1, (-1,))], "negative"),
        ([Entry("a" * 5000, 1, 1, ())], "name"),
        ([Entry("a", 1, 1, (), (1 << 63,))], "parameters"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries: list[Entry], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        container.to_bytes(entries)


def test_an_alias_of_an_alias_is_refused() -> None:
    chain = dataclasses.replace(sample()[-1], name="twice", target="tied")
    with pytest.raises(ConfigError, match="twice"):
        container.to_bytes([*sample(), chain])


def test_golden_file_reads_and_is_written_alike() -> None:
    """The header's bytes are pinned up to deflate, whose output may differ between zlib versions."""
    golden = bytes.fromhex((Path(__file__).parents[1] / "golden" / "container.hex").read_text())
    reader = Reader(golden)
    assert reader.metadata == b"{}"
    assert [reader.read(name) for name in reader.names[:-1]] == sample()[:-1]
    written = container.to_bytes(sample(), b"{}")
    assert unpacked(written) == unpacked(golden)


def unpacked(data: bytes) -> tuple[bytes, bytes]:
    """The header as it was before packing, and the payloads."""
    end = Reader(data).header_bytes
    header = data[22:end]
    return zlib.decompress(header, -15) if len(header) < int.from_bytes(data[14:18], "little") else header, data[end:]


def test_a_header_that_would_unpack_too_far_is_stored_as_it_is() -> None:
    data = container.to_bytes(sample(), b" " * (2 << 20))
    assert data[10:14] == data[14:18], "its packed length is its length"
    assert Reader(data).metadata == b" " * (2 << 20)


def header_with(
    shape: bytes, params: bytes = b"\0", streams: bytes = b"\0", rest: bytes = b"", kind: bytes = b"\1"
) -> bytes:
    """The file of a header with one entry, whose columns are these bytes."""
    header = b"\0\1\0\1a\1" + kind + shape + params + streams + rest
    return container.with_prefix(header, len(header))


@pytest.mark.parametrize("kind", [6, 1000])
def test_an_entry_of_an_unknown_kind_is_refused_by_name(kind: int) -> None:
    with pytest.raises(ArtifactError, match=f"'a' .* kind {kind}"):
        Reader(header_with(b"\0", kind=varint(64 * kind + 1)))


@pytest.mark.parametrize("value", [0, 1, -1, 63, -64, 64, 1 << 20, -(1 << 40), (1 << 63) - 1, -(1 << 63)])
def test_numbers_of_every_length_come_back(value: int) -> None:
    sizes = (abs(value) % 300, 1 << 14, 127, 128)
    entries = [Entry("a", 1, 1, sizes, (value, 5, value)), Entry("b", 1, 1, ()), Entry("c", 1, 1, (1,), (value,) * 9)]
    reader = Reader(container.to_bytes(entries))
    assert [reader.entry(name) for name in reader.names] == entries


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (header_with(b"\1\x81\0"), "needless"),
        (header_with(b"\1" + b"\xff" * 9 + b"\2"), "needless"),
        (header_with(b"\1" + b"\x80" * 10 + b"\1"), "needless"),
        (header_with(b"\1" + varint(container.MAX_ELEMENTS + 1)), "above"),
        (header_with(b"\x11" + bytes(17)), "17 times"),
        (header_with(b"\2" + varint(1 << 30) * 2), "elements"),
        (header_with(b"\0", b"\3\1"), "early"),
        (header_with(b"\0", b"\0", b"\1\0"), "early"),
        (header_with(b"\0", b"\0", b"\1\0", b"\x81\0"), "needless"),
        (header_with(b"\0", b"\0", b"\1\0", b"\x80"), "early"),
    ],
)
def test_columns_with_impossible_numbers_are_refused(file: bytes, words: str) -> None:
    Reader(header_with(b"\0"))
    with pytest.raises(ArtifactError, match=words):
        Reader(file)


def test_more_fields_than_any_model_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_FIELDS", 1 << 12)
    entries = [Entry(f"{i:04x}", 1, 1, (), (1 << 62,) * 256) for i in range(17)]
    with pytest.raises(ConfigError, match="dimensions and streams"):
        container.to_bytes(entries)
    reader = Reader(container.to_bytes(entries[:16]))
    assert reader.entry("000f").params == (1 << 62,) * 256


HIDDEN: dict[str, list[Entry]] = {
    "a block": [
        Entry("w", 0, 1, (2, 3), kind=BLOCKS),
        Entry(block_name("w", 0), 1, 1, (2, 3), (), (Stream(1, bytes(6)),)),
        Entry("x", 0, 1, (2, 3), target=block_name("w", 0), kind=ALIAS),
    ],
    "a block of no tensor": [
        Entry("v\0a", 1, 1, (2, 3), (), (Stream(1, bytes(6)),)),
        Entry("x", 0, 1, (2, 3), target="v\0a", kind=ALIAS),
    ],
    "kept files": [
        Entry("\0files", 0, 1, (2, 3), (), (Stream(0, b"abc"),), kind=FILES),
        Entry("x", 0, 1, (2, 3), target="\0files", kind=ALIAS),
    ],
    "another shape": [
        Entry("w", 1, 1, (2, 3), (), (Stream(1, bytes(6)),)),
        Entry("x", 0, 1, (3, 2), target="w", kind=ALIAS),
    ],
    "another dtype": [
        Entry("w", 1, 1, (2, 3), (), (Stream(1, bytes(6)),)),
        Entry("x", 0, 2, (2, 3), target="w", kind=ALIAS),
    ],
    "itself": [Entry("x", 0, 1, (2, 3), target="x", kind=ALIAS)],
    "no blocks": [Entry("x", 0, 1, (2, 3), kind=BLOCKS)],
    "blocks that are blocks": [
        Entry("x", 0, 1, (2, 3), kind=BLOCKS),
        Entry(block_name("x", 0), 0, 1, (2, 3), kind=BLOCKS),
        Entry(block_name(block_name("x", 0), 0), 1, 1, (2, 3), (), (Stream(1, bytes(6)),)),
    ],
}
READERS: dict[str, Callable[[Path], object]] = {
    "Reader": Reader,
    "inspect": inspect,
    "load": load,
    "load_object": load_object,
    "to_safetensors": lambda path: to_safetensors(path, path.with_suffix(".safetensors")),
    "one-file decoder": decoder.load_object,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("entries", HIDDEN.values(), ids=HIDDEN)
def test_entries_that_refer_to_wrong_ones_are_refused_when_the_file_is_opened(
    entries: list[Entry], read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_require_sound", lambda _: None)  # the writer would refuse them, too
    container.write(tmp_path / "x.birdie", entries, b"{}")
    with pytest.raises(ArtifactError, match="'x'"):
        read(tmp_path / "x.birdie")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("by_position", [True, False])
def test_threads_and_processes_may_share_a_reader(
    by_position: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_position:
        monkeypatch.delattr(os, "pread")  # as on Windows, where processes are not forked
    names = [f"{index:02}" for index in range(16)]
    content = {name: os.urandom(40_000) for name in names}
    entries = [Entry(name, 1, 1, (40_000,), (), (Stream(1, content[name]),)) for name in names]
    container.write(tmp_path / "x.birdie", entries)
    with Reader(tmp_path / "x.birdie") as reader:

        def read(name: str) -> bool:
            return reader.read(name).streams[0].payload == content[name]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, 10 * names))
        if by_position:
            children = [pid for _ in range(3) if (pid := _forked(lambda: all(map(read, 20 * names))))]
            assert all(map(read, 20 * names))
            assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


def _forked(work: Callable[[], bool]) -> int:
    """Start a process that exits with status 0 if `work` returns True; return its number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = not work()
        finally:
            os._exit(status)
    return pid
