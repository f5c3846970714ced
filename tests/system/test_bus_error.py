"""A mapped file that is cut ends in an error with its name, whichever thread read it, and not in SIGBUS."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import WeightsError
from birdie.system.bus_error import _handler, faults, guarded
from birdie.system.kernels import on_compiling
from birdie.system.mapped import complete, require_complete

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards only on Linux")


def mapped(path: Path, count: int = 1 << 20) -> Tensor:
    save_file({"w": torch.ones(count)}, path)
    return load_file(path)["w"]


def total(weight: Tensor, threads: int) -> float:
    if not threads:
        return float(weight.sum())
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda part: float(part.sum()), weight.chunk(threads)))


@pytest.mark.parametrize("threads", [0, 2])
def test_what_was_cut_reads_as_zeros_and_is_noted(threads: int, tmp_path: Path) -> None:
    for _ in range(2):
        weight = mapped(tmp_path / "x.safetensors")
        os.truncate(tmp_path / "x.safetensors", 1 << 16)
        with guarded():
            assert 0 < total(weight, threads) < weight.numel()
            assert faults


def test_guards_nest_and_leave_the_handler_that_was_there(tmp_path: Path) -> None:
    weight, handler = mapped(tmp_path / "x.safetensors"), signal.getsignal(signal.SIGBUS)
    with guarded():
        with guarded():
            assert total(weight, 2) == weight.numel()
        assert signal.getsignal(signal.SIGBUS) != handler
        assert not faults
    assert signal.getsignal(signal.SIGBUS) == handler


def test_a_file_that_is_cut_within_a_page_is_named(tmp_path: Path) -> None:
    """No signal comes, and the bytes are zeros."""
    path = tmp_path / "x.safetensors"
    weight, size = mapped(path, 100), path.stat().st_size
    with complete([path]):
        require_complete()
        os.truncate(path, size - 4)
        assert weight[-1] == 0
        with pytest.raises(WeightsError, match=f"{path} had {size:,} bytes and has {size - 4:,} now"):
            require_complete()
    require_complete()


def test_a_file_that_is_replaced_or_not_mapped_may_change(tmp_path: Path) -> None:
    """A mapping stays that of the old file."""
    path, other = tmp_path / "x.safetensors", tmp_path / "other"
    weight = mapped(path)
    other.write_bytes(bytes(10))
    with complete([path, other]):
        os.truncate(other, 5)
        other.replace(path)
        assert weight.sum() == weight.numel()
        require_complete()


def test_an_input_that_is_cut_while_it_is_compressed_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({name: torch.randn(1 << 18) for name in "abc"}, path)
    encode = Lossless.encode

    def cut(scheme: Lossless, name: str, weight: Tensor, **options: object) -> object:
        os.truncate(path, 1 << 16)
        return encode(scheme, name, weight, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Lossless, "encode", cut)
    arguments = ["compress", str(path), "-o", str(tmp_path / "x.birdie"), "--lossless", "--coder", "fast"]
    assert run(build_app, arguments) == 1
    error = capsys.readouterr().err
    assert f"{path} had" in "".join(error.split("\n"))
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_guard_is_no_compilation_that_a_person_is_told_of() -> None:
    notices: list[int] = []
    _handler.cache_clear()
    with on_compiling(lambda: notices.append(1)), guarded():
        pass
    assert notices == []
