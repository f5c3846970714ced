"""A converted file is the one that the safetensors library writes, and appears complete or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import birdie
from birdie.artifact.options import Limits
from birdie.artifact.safetensors_export import DTYPES, to_safetensors
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, WeightsError


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(40, 30, generator=generator)
    return {
        "é.weight": torch.randn(64, 65, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "head": tied,
        "tok_emb": tied,
        "mask": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_the_file_is_that_of_the_library(tmp_path: Path, workers: int) -> None:
    birdie.save(dict(sorted(state().items())), tmp_path / "x.birdie", lossless=True)
    to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors", Limits(workers=workers))
    tensors = {name: tensor.clone() for name, tensor in state().items()}
    save_file(tensors, tmp_path / "y.safetensors", {"format": "pt"})
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


def test_tensors_lie_in_the_order_of_the_state_dict_where_that_aligns_them(tmp_path: Path) -> None:
    wide, narrow, byte = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2), torch.ones(1, 5, dtype=torch.uint8)
    for content, expected in (
        ({"10": narrow, "9": narrow, "b": wide, "a": byte}, ["10", "9", "b", "a"]),
        ({"10": byte, "9": narrow, "b": wide, "a": byte}, ["b", "9", "10", "a"]),
    ):
        birdie.save(content, tmp_path / "x.birdie", lossless=True)
        to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors")
        back = load_file(tmp_path / "x.safetensors")
        assert list(back) == expected
        assert all(torch.equal(back[name], tensor) for name, tensor in content.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype)
    birdie.save({"t": tensor}, tmp_path / "x.birdie", lossless=True)
    to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors")
    back = load_file(tmp_path / "x.safetensors")["t"]
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(6,), (2, 3), (0, 4), (2, 1, 5)])
def test_pairs_of_numbers_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"t": tensor}, tmp_path / "a.safetensors", {"format": "pt"})
    birdie.save(read_state_dict(tmp_path / "a.safetensors"), tmp_path / "x.birdie", lossless=True)
    to_safetensors(tmp_path / "x.birdie", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    for content, reason in (
        ({"t": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"__metadata__": torch.ones(2)}, "__metadata__"),
        ({"t": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "without a dimension"),
    ):
        birdie.save(content, tmp_path / "x.birdie", lossless=True)
        with pytest.raises(WeightsError, match=reason):
            to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors")


def test_a_damaged_file_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.birdie"
    birdie.save(state(), path, lossless=True)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="checksum"):
        to_safetensors(path, tmp_path / "direct.safetensors")
    assert run(build_app, ["decompress", str(path), "-o", str(tmp_path / "x.safetensors")]) == 1
    assert "checksum" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()
