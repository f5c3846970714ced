"""Files of checkpoints: their parts, and whether somebody still writes them."""

import argparse
import io
import json
import os
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from birdie.artifact.safetensors_export import DTYPES
from birdie.chain import settled
from birdie.chain.file_parts import FileParts, join, split
from birdie.chain.settled import missing_end, unfinished


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


def require_same_bytes(path: Path) -> FileParts:
    """Check that the parts of a file make it up, and return them."""
    parts, out = split(path), io.BytesIO()
    digest = join(out, [*parts.tensors.values()], parts.gaps, parts.other)
    assert out.getvalue() == path.read_bytes()
    assert (digest, len(out.getvalue())) == (parts.sha256, parts.size)
    return parts


@given(
    kinds=st.dictionaries(
        st.text("abc./é", min_size=1, max_size=8),
        st.tuples(
            st.sampled_from([kind for kind in DTYPES if kind.itemsize and kind is not torch.float4_e2m1fn_x2]),
            st.sampled_from([(), (1,), (3, 5), (0, 2), (2, 1, 3)]),
        ),
        max_size=6,
    )
)
@settings(max_examples=30, deadline=None)
def test_the_tensors_of_safetensors_are_those_of_the_file(
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    tensors = {
        name: torch.ones(torch.Size(shape).numel() * kind.itemsize, dtype=torch.uint8).view(kind).reshape(shape)
        for name, (kind, shape) in kinds.items()
    }
    save_file(tensors, path, {"step": "3"})
    parts = require_same_bytes(path)
    assert {name: tuple(tensor.shape) for name, tensor in parts.tensors.items()} == {
        name: shape for name, (_, shape) in kinds.items()
    }


def test_the_tensors_of_torch_save_have_their_paths_and_shapes(tmp_path: Path) -> None:
    weight = torch.randn(40, 30)
    content: dict[str, Any] = {
        "model": {"a": weight, "tied": weight, "half": torch.randn(7).bfloat16()},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(40, 30), "step": torch.tensor(3.0)}}},
        "part": torch.randn(10, 10)[2:4],
        "turned": torch.randn(6, 5).t(),
        "mask": torch.tensor([True, False]),
        "arguments": argparse.Namespace(lr=1),
    }
    torch.save(content, tmp_path / "x.pt")
    parts = require_same_bytes(tmp_path / "x.pt")
    assert torch.equal(parts.tensors["model/a"], weight)
    assert parts.ties == {"model/tied": "model/a"}
    assert parts.tensors["optimizer/state/0/exp_avg"].shape == (40, 30)
    assert parts.tensors["optimizer/state/0/step"].shape == ()
    assert parts.tensors["model/half"].dtype == torch.bfloat16
    assert sorted(tensor.numel() for name, tensor in parts.tensors.items() if "data/" in name) == [30, 100]


def packed(tensors: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tensors, out)
    return out.getvalue()


def deflated() -> bytes:
    out = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(packed({"a": torch.zeros(100)})))
    with source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return out.getvalue()


def safetensors(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(start: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


ODD = {
    "empty": b"",
    "text": b"a" * 100,
    "cut": packed({"a": torch.randn(100)})[:-40],
    "deflated": deflated(),
    "overlapping": safetensors({"a": tensor(0, 12), "b": tensor(8, 16)}),
    "beyond the end": safetensors({"a": tensor(0, 64)}),
    "reversed": safetensors({"a": tensor(8, 0)}),
    "gaps": safetensors({"a": tensor(4, 8), "b": tensor(12, 16)}),
    "unaligned": safetensors({"a": tensor(1, 9, "F64", [1])}),
    "unknown dtype": safetensors({"a": tensor(0, 16, "F2")}),
    "other shape": safetensors({"a": tensor(0, 16, "F32", [3])}),
    "many dimensions": safetensors({"a": tensor(0, 4, "F32", [1] * 40)}),
    "no table": safetensors({"a": 3}),
    "no shape": safetensors({"a": tensor(0, 4, "F32", "x")}),
    "negative shape": safetensors({"a": tensor(0, 4, "F32", [-1, -1])}),
    "name with NUL": safetensors({"a\0": tensor(0, 4)}),
    "long name": safetensors({"a" * 5000: tensor(0, 4)}),
    "name twice": safetensors(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":3}'),
    "boolean of 7": safetensors({"a": tensor(0, 4, "BOOL", [4])}, bytes([0, 1, 7, 255])),
    "nested deeply": safetensors(b"[" * 20000),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_files_that_are_not_understood_come_back_as_well(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(ODD[name])
    require_same_bytes(path)
