"""Lossy rivals: each coder decodes from its bytes alone, with the error that its method promises."""

import pytest
import torch

from benchmarks import lossy_rivals
from benchmarks.rivals import NotInstalledError
from birdie.artifact import int8_zlib as baseline
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
def test_nncodec_decodes_in_a_process_that_gets_only_the_bitstream() -> None:
    state = subject().state
    try:
        coarse, fine = (lossy_rivals.nncodec(qp) for qp in (-20, -38))
    except NotInstalledError as error:
        pytest.skip(str(error))
    streams = [coder.encode(state) for coder in (coarse, fine)]
    assert len(streams[0]) < len(streams[1])
    errors = []
    for coder, data in zip((coarse, fine), streams, strict=True):
        decoded = coder.decode(data)
        assert {name: weight.shape for name, weight in decoded.items()} == {n: w.shape for n, w in state.items()}
        errors.append(max(float((decoded[name] - weight).abs().max()) for name, weight in state.items()))
    assert errors[1] < errors[0] / 4
