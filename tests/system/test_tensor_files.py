"""Writing tensors: what shares memory is written, and what the system refuses is one error."""

import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from birdie.errors import OutputError
from birdie.system.tensor_files import write_tensors


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    bank = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": bank[0], "b": bank[1], "again": bank[1], "t": bank.T, "none": bank[:0]}
    write_tensors(tmp_path / "x", tensors, {"about": "text"})
    loaded = load_file(tmp_path / "x")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_grows_too_large_is_an_output_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write model: .*file too large") as caught:
            write_tensors(tmp_path / "x", {"a": torch.zeros(4096)}, target=Path("model"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_tensors(tmp_path / "none" / "x", {"a": torch.zeros(1)})
