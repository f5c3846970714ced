"""Trellis decoding agrees with the reference decoder, chunk by chunk, and refuses what no encoder writes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.grid import MAX_SYMBOL
from birdie.entropy import trellis_states as trellis
from birdie.entropy.trellis_states import STATES, chunk_rows
from tests.reference import trellis as reference_trellis
from tests.reference.trellis import decode_trellis

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES for sign in (1, -1)]  # down columns, along rows


def encoded(numbers: Integers, params: tuple[int, ...], *scales: Integers, dtype: torch.dtype) -> Encoded:
    """Numbers and scales as the scheme stores them."""
    return Encoded("trellis", numbers.shape, dtype, params, (numbers, *(scale[:, None] for scale in scales)))


@settings(max_examples=25)  # the first example compiles
@given(
    states=st.sampled_from(PATHS),
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 3, 15, 16, 17]),
    resolutions=st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([0, 1, 2, 4, 8, 16])),
    base=st.integers(-90, 90),
    chunk=st.sampled_from([1 << 20, 40]),
    deviation=st.sampled_from([0.3, 3.0, 1e5]),
    seed=st.integers(0, 1 << 30),
)
def test_decoding_agrees_with_the_reference_decoder(
    states: int,
    rows: int,
    columns: int,
    resolutions: tuple[int, int],
    base: int,
    chunk: int,
    deviation: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.rint(rng.normal(0, deviation, (rows, columns))).astype(np.int32)
    numbers[rng.integers(0, 3, rows) == 0] = 0
    scales = [
        rng.integers(-3 * resolution, 3 * resolution + 1, size)
        for resolution, size in zip(resolutions, numbers.shape, strict=True)
    ]
    params: tuple[int, ...] = (states, *resolutions, base, int(rng.integers(0, rows)))
    scales = scales if resolutions[1] else scales[:1]
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference_trellis):
            patch.setattr(module, "CHUNK", chunk)
        tensor = decode(encoded(numbers, params, *scales, dtype=torch.float32))
        expected = decode_trellis(params, [numbers.tolist(), *(scale[:, None].tolist() for scale in scales)])
    assert tensor.tolist() == expected
    assert bool((tensor[(numbers == 0).all(1)] == 0).all()) or columns < 16


def test_paths_start_again_at_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk decodes without the rows above it."""
    monkeypatch.setattr(trellis, "CHUNK", 60)
    assert chunk_rows(20) == 3
    numbers = np.random.default_rng(0).integers(-4, 5, (9, 20)).astype(np.int32)
    scales = np.zeros(9, np.int32)
    tensor = decode(encoded(numbers, (8, 16, 0, 0, 0), scales, dtype=torch.float32))
    parts = [
        decode(encoded(numbers[start : start + 3], (8, 16, 0, 0, 0), scales[:3], dtype=torch.float32))
        for start in (0, 3, 6)
    ]
    assert torch.equal(tensor, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_beyond_a_dtype_are_clamped_to_its_range(dtype: torch.dtype) -> None:
    numbers = np.array([[MAX_SYMBOL], [-MAX_SYMBOL], [2**31 - 1], [1]], np.int32)
    tensor = decode(encoded(numbers, (4, 16, 16, 2000, 0), np.zeros(4, np.int32), np.full(1, 47), dtype=dtype))
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    clamped = torch.tensor([most, -most, most], dtype=torch.float64).to(dtype)
    assert torch.equal(tensor[:3, 0], clamped)
    assert bool(torch.isfinite(tensor).all())
