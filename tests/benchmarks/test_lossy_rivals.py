"""Lossy rivals: each coder decodes from its bytes alone, with the error that its method promises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import lossy_rivals
from benchmarks.lossy_rivals import LossyCoder
from benchmarks.rivals import NotInstalledError
from birdie.golf import int8_zlib as baseline
from tests.benchmarks.small_gpt import subject


@pytest.mark.parametrize(("bits", "compressor"), [(6, "zstd"), (8, "zlib")])
def test_the_error_of_row_maximum_is_half_a_step_at_most(bits: int, compressor: str) -> None:
    state = subject().state
    coder = lossy_rivals.row_maximum(bits, compressor)
    data = coder.encode(state)
    decoded = coder.decode(data)
    assert decoded.keys() == state.keys()
    assert len(data) < sum(weight.nbytes for weight in state.values()) * bits / 32 + 8000
    for name, weight in state.items():
        if weight.ndim < 2 or weight.numel() < 1024:
            assert torch.equal(decoded[name], weight.half().float())
            continue
        step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((decoded[name] - weight).abs() <= 0.502 * step).all()


def test_the_challenges_export_is_bit_identical() -> None:
    state = subject().state
    coder = lossy_rivals.challenge_int8()
    data = coder.encode(state)
    assert data == baseline.pack(state).blob
    assert coder.decode(data).keys() == state.keys()


@pytest.mark.nightly  # processes that import torch
@pytest.mark.parametrize(
    ("kind", "settings"), [(lossy_rivals.nncodec, (-20, -38)), (lossy_rivals.entropack, (2.5, 5.0))]
)
def test_a_coder_in_its_own_environment_decodes_in_a_process_that_gets_only_the_file(
    kind: Callable[[Any], LossyCoder], settings: tuple[float, float]
) -> None:
    state = subject().state
    try:
        coarse, fine = (kind(setting) for setting in settings)
    except NotInstalledError as error:
        pytest.skip(str(error))
    files = [coder.encode(state) for coder in (coarse, fine)]
    assert len(files[0]) < len(files[1])
    errors = []
    for coder, data in zip((coarse, fine), files, strict=True):
        decoded = coder.decode(data)
        assert {name: weight.shape for name, weight in decoded.items()} == {n: w.shape for n, w in state.items()}
        errors.append(sum(float((decoded[name] - weight).square().sum()) for name, weight in state.items()))
    assert errors[1] < errors[0] / 16
