"""Limits on what decoding takes: bytes, memory and operations, checked from the header before anything is decoded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import birdie
from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.artifact.container import Entry, Stream
from birdie.artifact.file import DTYPES, OPERATIONS_PER_BYTE, OPERATIONS_PER_TENSOR
from birdie.artifact.folders import write_folder
from birdie.artifact.options import Limits
from birdie.artifact.repack import load_object
from birdie.artifact.safetensors_export import to_safetensors
from birdie.checkpoints import limits
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.standalone import decoder
from tests.artifact.states import decode_tensor

FLOAT = DTYPES.index(torch.float32)
ZERO = Stream(0, b"")
CODES = {name: code for code, name in SCHEMES.items()}
LOADERS: dict[str, Any] = {
    "load": birdie.load,
    "load_object": load_object,
    "decode_tensor": lambda path, **limits: decode_tensor(path, "w", **limits),
    "lazy": lambda path, **limits: birdie.load(path, into=linear(), lazy=True, **limits),
    "one file": decoder.load,
}


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(64, 64))


def linear() -> Holder:
    return Holder()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    birdie.save({"w": torch.zeros(64, 64)}, tmp_path / "zeros.birdie", lossless=True)
    return tmp_path / "zeros.birdie"


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_limit_refuses_before_decoding_and_names_the_argument_and_the_flag_that_lift_it(
    load: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(path, max_bytes=16_384, max_operations=1_000_000)
    monkeypatch.setattr("birdie.entropy.coder.decode", None)
    with pytest.raises(ArtifactError, match=r"16,384 bytes to .* 16,383 allowed; raise max_bytes \(--max-size\)"):
        load(path, max_bytes=16_383)
    with pytest.raises(ArtifactError, match=r"operations .* 99 allowed; raise max_operations \(--max-operations\)"):
        load(path, max_operations=99)


def test_tensors_for_which_a_module_has_memory_need_no_limit_lifted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("birdie.artifact.file.MIN_DECODED_LIMIT", 1000)
    monkeypatch.setattr("birdie.artifact.file.DECODED_PER_BYTE", 1)
    with pytest.raises(ArtifactError, match="max_bytes"):
        birdie.load(path)
    assert not birdie.load(path, into=linear()).w.any()
    for other in (linear().half(), torch.nn.Linear(64, 64)):
        with pytest.raises(ArtifactError, match="max_bytes"):
            birdie.load(path, into=other)
    with pytest.raises(ArtifactError, match="1,000 allowed"):
        birdie.load(path, into=linear(), max_bytes=1000)


@pytest.mark.parametrize(
    ("scheme", "shape", "params", "streams"),
    [
        pytest.param("lowrank", (1 << 14, 1 << 14), (1 << 14, 2, 0), 5, id="low rank"),
        pytest.param("spectral", (1 << 14, 1 << 14), (1, 64, 0, 0, 0, 0), 2, id="DCT"),
        pytest.param("rotation", (1 << 14, 1 << 14), (0, 2, 0), 2, id="rotation"),
    ],
)
def test_a_small_file_that_would_take_minutes_is_refused(
    scheme: str, shape: tuple[int, ...], params: tuple[int, ...], streams: int
) -> None:
    data = container.to_bytes([Entry("w", CODES[scheme], FLOAT, shape, params, (ZERO,) * streams)])
    with pytest.raises(ArtifactError, match="operations"):
        decoder.load(data)


def test_a_small_file_that_would_take_many_times_its_decoded_bytes_is_refused() -> None:
    wavelet = Entry("w", 9, FLOAT, (1 << 12, 1 << 12), (2, 0, 1, 0, 0, 0), (ZERO, ZERO))
    with pytest.raises(ArtifactError, match=r"bytes of memory .* raise max_bytes \(--max-size\)"):
        decoder.load(container.to_bytes([wavelet]))


def test_many_tensors_pass_with_a_few_bytes_each_and_not_without() -> None:
    """The reading of a tensor is work too."""
    assert 2 * OPERATIONS_PER_BYTE < OPERATIONS_PER_TENSOR < 3 * OPERATIONS_PER_BYTE
    empty = [Entry(f"{index:05x}", 1, FLOAT, (1,), (), (ZERO,) * 4) for index in range(20_000)]
    with pytest.raises(ArtifactError, match="operations"):
        decoder.load(container.to_bytes(empty))


def test_impossible_parameters_are_refused_with_the_name_of_the_tensor() -> None:
    data = container.to_bytes([Entry("w", 2, FLOAT, (4, 4), (5,), (ZERO, ZERO))])
    with pytest.raises(ArtifactError, match=r"'w'.*a group of 5 columns"):
        decoder.load(data)


@pytest.mark.parametrize(
    ("limit", "most"), [("MAX_ENTRIES", 5), ("MAX_NAMES_BYTES", 11)], ids=["tensors", "bytes of names"]
)
def test_a_model_that_no_file_has_room_for_is_refused_before_anything_is_read_or_coded(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{index}": torch.full((2, 2), index) for index in range(6)}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    monkeypatch.setattr(limits, limit, most)
    monkeypatch.setattr("birdie.entropy.coder.encode", None)
    monkeypatch.setattr("birdie.checkpoints.checkpoints.load_file", None)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: birdie.save(state, tmp_path / "x.birdie", lossless=True),
        lambda: birdie.save(state, tmp_path / "x.birdie", scheme="int4"),
        lambda: birdie.save_object({"model": state, "step": 3}, tmp_path / "x.birdie"),
        lambda: birdie.save_object(state, tmp_path / "x.birdie"),
        lambda: read_state_dict(tmp_path / "w.safetensors"),
    )
    for attempt in attempts[: 2 if limit == "MAX_NAMES_BYTES" else None]:
        with pytest.raises(ConfigError, match=rf"{most} tensors, not 6|names of all tensors"):
            attempt()
    for file in ("w.safetensors", "w.pt"):
        assert run(build_app, ["compress", str(tmp_path / file), "-o", str(tmp_path / "x.birdie"), "--lossless"]) == 1


def test_groups_of_tiny_tensors_count_before_anything_is_coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{index}": torch.randn(4, 4, generator=torch.Generator().manual_seed(index)) for index in range(64)}
    birdie.save(state, tmp_path / "x.birdie", lossless=True)
    with container.Reader(tmp_path / "x.birdie") as reader:
        assert sum(name.startswith("\0") for name in reader._index) == 1
    monkeypatch.setattr(limits, "MAX_ENTRIES", 64)
    monkeypatch.setattr("birdie.entropy.coder.encode", None)
    with pytest.raises(ConfigError, match="64 tensors, not 65"):
        birdie.save(state, tmp_path / "x.birdie", lossless=True)


@pytest.mark.parametrize("size", [1 << 60, (1 << 64) - 1, 100_000_001, 1 << 62])
def test_a_header_that_says_it_is_huge_is_not_read(size: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + bytes(4))
    with pytest.raises(WeightsError, match="at most 100,000,000"):
        read_state_dict(path)


def aliases(path: Path, count: int) -> int:
    """Write one constant tensor with so many aliases; return the bytes of the tensor."""
    named = [Entry(f"w{index:02}", 0, FLOAT, (64, 64), target="w", kind=container.ALIAS) for index in range(count)]
    container.write(path, [Entry("w", 1, FLOAT, (64, 64), (), (ZERO,) * 4), *named], b"{}")
    return 4 * 64 * 64


@pytest.mark.parametrize("writer", [to_safetensors, write_folder])
def test_what_is_written_under_each_name_counts_under_each_name(
    writer: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = aliases(tmp_path / "x.birdie", 40)
    assert (tmp_path / "x.birdie").stat().st_size < 120
    writer(tmp_path / "x.birdie", tmp_path / "sound", Limits(max_bytes=41 * size))
    monkeypatch.setattr("birdie.entropy.coder.decode", None)
    with pytest.raises(ArtifactError, match=f"{41 * size:,} bytes .* {41 * size - 1:,} allowed"):
        writer(tmp_path / "x.birdie", tmp_path / "refused", Limits(max_bytes=41 * size - 1))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("suffix", [".pt", ".ptz", ".safetensors"])
def test_a_converted_file_stays_within_the_limit(suffix: str, tmp_path: Path) -> None:
    """In a .pt file the names of tied tensors share one."""
    size = aliases(tmp_path / "x.birdie", 20)
    arguments = ["decompress", str(tmp_path / "x.birdie"), "-o", str(tmp_path / f"x{suffix}"), "--max-size", str(size)]
    status = run(build_app, arguments)
    if suffix == ".safetensors":
        assert status != 0
    else:
        assert status == 0
        assert (tmp_path / f"x{suffix}").stat().st_size < 2 * size


@pytest.mark.parametrize("load", [birdie.load, load_object, decoder.load], ids=["load", "load_object", "one file"])
def test_tied_tensors_share_memory_and_count_once(load: Any, tmp_path: Path) -> None:
    size = aliases(tmp_path / "x.birdie", 20)
    loaded = load(tmp_path / "x.birdie", max_bytes=size)
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 1
