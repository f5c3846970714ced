"""Kernels decode tensors to the bits of the CPU, under Triton's interpreter, and notice damage where it does."""

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from birdie.compress.device import compressed
from birdie.compress.device.compressed import CompressedTensor
from birdie.compress.schemes import grid, trellis
from birdie.entropy import coder, static
from birdie.entropy.hints import Hints
from birdie.errors import ArtifactError
from tests.interpreted_kernels import ROOT
from tests.reference.streams import near_copies, on_paths

CPU = torch.device("cpu")


def test_weights_equal_those_of_the_cpu_bit_for_bit(interpreted: dict[str, dict[str, Any]]) -> None:
    sound = {name: result["same"] for name, result in interpreted["decoding"].items() if not result.get("damaged")}
    assert len(sound) > 30
    assert [name for name, same in sound.items() if not same] == []


def test_damage_is_noticed_where_the_cpu_notices_it(interpreted: dict[str, dict[str, Any]]) -> None:
    damaged = {name: result["same"] for name, result in interpreted["decoding"].items() if result.get("damaged")}
    assert len(damaged) > 10
    assert [name for name, same in damaged.items() if not same] == []


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """Without one: Triton brings the assembler. The interpreter takes code that the compiler refuses."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "tests.compress.device.compile_for_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 8


def of(
    scheme: str, numbers: Any, params: tuple[int, ...], *payloads: tuple[int, bytes], dtype: torch.dtype = torch.float32
) -> CompressedTensor | None:
    decoder = {"grid": grid.DECODER, "trellis": trellis.DECODER}[scheme]
    layout = decoder.layout(numbers.shape, dtype, params)
    lanes = coder.LANES, static.encode(numbers, (1, 1), layout[0].hints.states, 4)
    return CompressedTensor.of(scheme, numbers.shape, dtype, params, layout, [lanes, *payloads][-len(layout) :])


NUMBERS = on_paths(20, 30, 8, 2)
ONE_SCALE = (coder.CONSTANT, b"")


def test_what_the_kernels_do_not_decode_is_left_to_the_cpu() -> None:
    assert of("grid", NUMBERS, (), ONE_SCALE) is not None
    assert of("grid", NUMBERS, (), ONE_SCALE, dtype=torch.float64) is None
    assert of("grid", near_copies(), (), ONE_SCALE) is None  # predicted
    assert of("grid", NUMBERS * (1 << 22), (), ONE_SCALE) is None  # float32 would round 2m + 1
    wide = np.random.default_rng(0).integers(-(2**20), 2**20, (40, 40))
    assert of("grid", wide, (), ONE_SCALE) is None  # split alphabet
    fixed = (coder.STATIC, static.encode(NUMBERS, (1, 1)))
    assert of("grid", NUMBERS, (), fixed, ONE_SCALE) is None
    layout = trellis.layout((20, 30), torch.float32, (-8, 16, 0, 0, 0))
    assert not compressed.may_decode("trellis", torch.float32, (-8, 16, 0, 0, 0), [coder.LANES])
    assert layout[0].hints == Hints("symbols", states=-8)
    assert not compressed.may_decode("rotation", torch.float32, (), [coder.LANES])


def test_damaged_side_information_is_refused() -> None:
    with pytest.raises(ArtifactError, match="scale index"):
        of("grid", NUMBERS, (), (coder.CONSTANT, b"\xff\x7f"))
    layout = grid.layout((20, 30), torch.float32, ())
    data = static.encode(NUMBERS, (1, 1), 1, 4)
    for damaged in (data[:-2], data + b"\0\0", data[:9]):
        with pytest.raises(ArtifactError):
            CompressedTensor.of(
                "grid", (20, 30), torch.float32, (), layout, [(coder.LANES, damaged), (coder.CONSTANT, b"")]
            )


def test_any_damage_is_refused_or_leaves_what_the_kernels_can_decode() -> None:
    """Within their tables and words: nothing else is checked on the device."""
    layout = grid.layout((20, 30), torch.float32, ())
    data, rng = static.encode(NUMBERS, (1, 1), 1, 8), np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for at in rng.integers(0, min(len(data), 60), rng.integers(1, 3)):
            damaged[at] ^= 1 << rng.integers(8)
        try:
            payloads = [(coder.LANES, bytes(damaged)), ONE_SCALE]
            tensor = CompressedTensor.of("grid", (20, 30), torch.float32, (), layout, payloads)
        except ArtifactError:
            refused += 1
            continue
        if tensor is None:
            continue
        frequencies, starts = tensor.entries & 0xFFFF, tensor.entries >> 16 & 0xFFFF
        assert (frequencies.sum(1) == 1 << tensor.precision).all()
        assert (starts + frequencies).max() == 1 << tensor.precision
        assert int(tensor.classes.max()) < len(tensor.entries)
        assert (tensor.bounds.diff() >= 0).all()
        assert int(tensor.bounds[-1]) <= tensor.words.numel()
        assert tensor.bounds.numel() == tensor.chunks * tensor.lanes + 1
        assert tensor.matrix in ((20, 30), (30, 20))
    assert refused > 100


def test_the_coded_form_is_hardly_larger_than_in_the_file() -> None:
    numbers = np.random.default_rng(0).normal(0, 3, (1024, 1024)).round().astype(np.int32)
    coded = coder.encode(numbers, effort="fast")
    layout = grid.layout((1024, 1024), torch.bfloat16, ())
    tensor = CompressedTensor.of(
        "grid", (1024, 1024), torch.bfloat16, (), layout, [(coded.coder, coded.payload), ONE_SCALE]
    )
    assert tensor is not None
    assert tensor.nbytes < 1.03 * len(coded.payload)


def test_a_device_without_kernels_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda _: None)
    compressed.works.cache_clear()
    for _ in range(2):
        assert not compressed.works(torch.device("cuda", 0))
        assert not compressed.works(CPU)
    compressed.works.cache_clear()
    assert len(caplog.records) == 1
    assert "triton is not installed" in caplog.text
