"""The kernel decodes tiles to the bits of the CPU, under Triton's interpreter, and notices damage where that does."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from birdie.compress.device import compressed
from birdie.compress.device.compressed import CompressedTensor, Matrices, compressed_linear
from birdie.compress.schemes import trellis
from birdie.compress.tiled import Product
from birdie.entropy import coder, tiles
from birdie.entropy.hints import Hints
from birdie.errors import ArtifactError, ConfigError
from tests.interpreted_kernels import ROOT
from tests.reference.streams import on_paths

CPU = torch.device("cpu")
SHAPE = 40, 64


def test_weights_equal_those_of_the_cpu_bit_for_bit(interpreted: dict[str, dict[str, Any]]) -> None:
    sound = {name: result["same"] for name, result in interpreted["decoding"].items() if not result.get("damaged")}
    assert len(sound) > 30
    assert [name for name, same in sound.items() if not same] == []


def test_damage_is_noticed_where_the_cpu_notices_it(interpreted: dict[str, dict[str, Any]]) -> None:
    damaged = {name: result["same"] for name, result in interpreted["decoding"].items() if result.get("damaged")}
    assert len(damaged) > 10
    assert "damaged, zeros" in damaged
    assert [name for name, same in damaged.items() if not same] == []


def test_products_with_few_tokens_write_no_weights(interpreted: dict[str, dict[str, Any]]) -> None:
    products = interpreted["products"]
    assert max(result["error"] for result in products.values()) < 1e-6
    assert [name for name, result in products.items() if not result["registers"]] == [
        "9 tokens, decoded",
        "columns first, decoded",
    ]


def test_a_product_needs_a_matrix_and_inputs_that_fit_it() -> None:
    tensor = of(SHAPE)
    assert tensor is not None
    for weight, columns in ((tensor, 65), (replace(tensor, shape=(2, 20, 64)), 64)):
        with pytest.raises(ConfigError, match=rf"\(3, {columns}\)"):
            compressed_linear(torch.ones(3, columns), weight)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """Without one: Triton brings the assembler. The interpreter takes code that the compiler refuses."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "tests.compress.device.compile_for_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 9


def payload() -> bytes:
    """Return a small array in tiles."""
    with mock.patch.multiple(tiles, _LEAST=1, _MOST_SHARE=1), mock.patch.dict(coder._TRY_NUMBERS, fast=0):
        coded = coder.encode(on_paths(*SHAPE, 8, 2), Hints(states=8), effort="fast")
    assert coded.coder == coder.TILES
    return coded.payload


def of(shape: tuple[int, ...], data: bytes | None = None) -> CompressedTensor | None:
    """Return a tensor of a trellis whose symbols are coded in `data`."""
    params = (8, 16, 0, 0, 0)
    layout = trellis.layout(shape, torch.bfloat16, params)
    payloads = [(coder.TILES, payload() if data is None else data), (coder.CONSTANT, b"")]
    product = Product.of(trellis.DECODER, shape, torch.bfloat16, params, layout, payloads)
    return None if product is None else CompressedTensor.of(shape, torch.bfloat16, [(product, 0)])


def test_any_damage_is_refused_or_leaves_what_the_kernel_can_decode() -> None:
    """Within its tables and words: nothing else is checked on the device."""
    data, rng, refused = payload(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, 60, rng.integers(1, 3)):
            damaged[at] ^= 1 << rng.integers(8)
        try:
            tensor = of(SHAPE, bytes(damaged))
        except ArtifactError:
            refused += 1
            continue
        assert tensor is not None
        (part,) = tensor.parts
        assert_within_bounds(part)
    assert refused > 100


def assert_within_bounds(part: Matrices) -> None:
    size = 1 << 12 + part.form.paired
    assert int(part.tables.max()) <= len(part.entries) - size
    assert int(part.tables.min()) >= -1
    assert bool((part.bounds.diff() >= 0).all())
    assert int(part.bounds[-1]) <= 2 * len(part.words)
    assert len(part.bounds) == len(part.ends) + 1
    assert int((part.ends >> 16).max()) < len(part.matrices)
    assert part.rows == SHAPE[0]
    assert len(part.by_row) == SHAPE[0] + 1


def test_the_coded_form_is_hardly_larger_than_in_the_file() -> None:
    numbers = np.random.default_rng(0).normal(0, 3, (2048, 1024)).round().astype(np.int32)
    coded = coder.encode(numbers, Hints(states=8), effort="fast")
    tensor = of(numbers.shape, coded.payload)
    assert tensor is not None
    assert tensor.nbytes < 1.06 * len(coded.payload)


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
