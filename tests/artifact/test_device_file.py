"""Loading to a GPU: kernels decode what they can, under Triton's interpreter, the CPU the rest, to the same bits."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact import device_file as device
from birdie.artifact.device_file import CompressedTensors, DeviceFile, target_of
from birdie.artifact.file import File
from birdie.compress import registry
from birdie.compress.device import compressed
from birdie.compress.device.compressed import CompressedTensor
from birdie.errors import ArtifactError
from tests.interpreted_kernels import run_interpreted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Return the results of all loads."""
    return run_interpreted("artifact/on_device_interpreted.py")


def test_a_loaded_state_equals_that_of_the_cpu(interpreted: dict[str, dict[str, Any]]) -> None:
    compressed = ["down.weight", "up.weight"]
    assert interpreted["state"] == {"same": True, "tied": True, "compressed": compressed, "kernels": 2}


def test_tensors_in_blocks_of_rows_are_decoded_block_by_block(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["blocks"] == {"same": True, "tied": True, "kernels": 4}


def test_casts_and_modules_get_what_they_would_get_from_the_cpu(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["into a module, cast"] == {"same": True, "kernels": 2}


def test_damage_is_an_error_that_names_the_tensor(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["damaged"]["same"]


def test_lazy_modules_decode_on_the_device_in_one_launch(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["blocks, lazy"] == {"same": True, "kernels": 2}  # of two passes
    assert interpreted["lazy, all cached"] == {"same": True, "kernels": 1}


def test_neighbors_in_the_file_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    birdie.save({name: torch.randn(1024, 64) for name in "abc"}, tmp_path / "x", scheme="int4", effort="fast")
    launches: list[int] = []

    def decode(tensor: CompressedTensor, checked: bool) -> tuple[Tensor, Tensor]:
        assert checked == (len(launches) < 2)  # the third time the first tensors are known to be sound
        launches.append(math.prod(tensor.shape))
        return torch.arange(launches[-1]), torch.ones(1)

    monkeypatch.setattr(device, "_TOGETHER", 2 * 65_536)
    monkeypatch.setattr(CompressedTensor, "decode", decode)
    with File(tmp_path / "x", registry.decoder) as file:
        tensors = CompressedTensors(file, CPU, workers=1)
        a, b = tensors.decode("a"), tensors.decode("b")
        assert launches == [2 * 65_536]
        assert (a.shape, int(b[0, 0])) == ((1024, 64), 65_536)
        a.add_(1)
        assert b._version == 0  # a cache keeps tensors that have another one
        for name in "cab":
            tensors.decode(name)
    assert launches == [2 * 65_536, 65_536, 2 * 65_536]


def test_tensors_may_stay_compressed(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["products"] == {"same": True, "names": ["down.weight", "up.weight"]}


def test_lazy_loading_codes_other_coders_anew(interpreted: dict[str, dict[str, Any]]) -> None:
    compressed = ["down.weight", "up.weight"]
    assert interpreted["context mixing"] == {"same": True, "compressed": compressed, "kernels": 2}


def test_the_device_is_that_of_the_call_or_the_only_one_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert target_of("cuda", None) == torch.device("cuda", 3)
    assert target_of("cuda:1", nn.Linear(2, 2)) == torch.device("cuda", 1)
    assert target_of(None, None) is None
    assert target_of("cpu", nn.Linear(2, 2)) is None
    assert target_of(None, nn.Linear(2, 2)) is None
    with torch.device("meta"):
        assert target_of(None, nn.Linear(2, 2)) is None


def test_without_kernels_tensors_are_decoded_on_the_cpu_and_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.birdie"
    birdie.save({"w": torch.randn(300, 300)}, path, scheme="int4")
    moved: list[dict[str, Any]] = []
    monkeypatch.setattr(device, "target_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr("birdie.compress.device.compressed.find_spec", lambda _: None)
    monkeypatch.setattr("birdie.artifact.loading._require_arguments", lambda *_: None)
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **kwargs: moved.append(kwargs) or tensor)
    compressed.works.cache_clear()
    with caplog.at_level(logging.WARNING):
        state = birdie.load(path, device="cuda:0")
    monkeypatch.setattr(Tensor, "to", to)
    compressed.works.cache_clear()
    assert {"device": "cuda:0", "dtype": None} in moved
    assert torch.equal(state["w"], birdie.load(path)["w"])
    assert "decoded on the CPU" in caplog.text


def test_damage_of_several_tensors_is_found_in_one_wait(tmp_path: Path) -> None:
    path = tmp_path / "model.birdie"
    birdie.save({"w": torch.ones(3)}, path)
    with DeviceFile(path, registry.decoder, CPU) as file:
        file._sound = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.tensor([0, 1], dtype=torch.uint8)}
        with pytest.raises(ArtifactError, match=r"'b' of .*model"):
            file.decode_all()
