"""Lossless means every bit of every dtype, in the form that costs least; a cast rounds once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import DIFFERENCES, DTYPES, HALVES, LISTED, RUNS, VALUES, WHOLE, Lossless
from birdie.compress.tensors import FORMATS, from_bits
from birdie.entropy import coder
from birdie.errors import ArtifactError, ConfigError, WeightsError
from tests.artifact.states import same_bits
from tests.compress.matrices import assert_matches_layout, coded_bytes, gaussian
from tests.nightly import mostly_nightly


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return any bit pattern with equal chance: NaN payloads, infinities, subnormals, -0.0."""
    count = int(np.prod(shape, dtype=int))
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    data = generator.integers(0, 256, (count + 1) * dtype.itemsize).astype(np.uint8)
    return torch.from_numpy(data).view(dtype)[:count].reshape(shape)


def encode(weight: torch.Tensor) -> Encoded:
    """Encode a tensor losslessly, and require that every bit of it comes back."""
    encoded = Lossless().encode("w", weight)
    assert_matches_layout(encoded)
    assert same_bits(decode(encoded), weight.contiguous())
    return encoded


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    for seed, shape in enumerate([(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0), (0, 3, 2), (20, 30)]):
        encode(random_bits(dtype, shape, seed))
    if dtype.itemsize == 1:
        data = torch.arange(24, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 24).view(4, 6)
        assert torch.equal(decode(Lossless().encode("w", data.view(dtype).t())).view(torch.uint8), data.t())


def test_views_are_what_they_show() -> None:
    for dtype in (torch.complex64, torch.complex128):
        weight = torch.randn(4, 6, dtype=dtype)
        assert same_bits(decode(Lossless().encode("w", weight.conj())), weight.conj().resolve_conj())
        assert same_bits(decode(Lossless().encode("w", weight.conj().imag)), weight.conj().imag.resolve_neg())
    assert decode(Lossless().encode("w", torch.empty(0).as_strided((0, 1), (1, 0)))).shape == (0, 1)


def test_a_boolean_is_zero_or_one() -> None:
    """torch takes other bytes for True, but a file would have 1 instead."""
    with pytest.raises(ArtifactError, match="neither 0 nor 1"):
        from_bits(np.array([[2]], dtype=np.uint8), (1,), torch.bool)
    for byte in (2, 128, 255):
        for shape in ((), (5,), (3, 4)):
            weight = torch.ones(shape, dtype=torch.uint8)
            weight.view(-1)[-1] = byte
            with pytest.raises(WeightsError, match="'mask'"):
                Lossless().encode("mask", weight.view(torch.bool))


@pytest.mark.parametrize(("to", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_rounds_wide_floats_once_and_leaves_all_else_alone(to: str, dtype: torch.dtype) -> None:
    cast = Cast(to)  # type: ignore[arg-type]
    for source in (torch.float32, torch.float64):
        weight = torch.randn(9, 11, dtype=source)
        decoded = decode(cast.encode("w", weight))
        assert decoded.dtype == source
        assert torch.equal(decoded, weight.to(dtype).to(source))
    for other in (torch.float16, torch.bfloat16, torch.int64, torch.float8_e5m2, torch.bool):
        weight = random_bits(other, (6, 5))
        assert same_bits(decode(cast.encode("w", weight)), weight)


def test_a_cast_refuses_what_would_not_survive() -> None:
    with pytest.raises(WeightsError, match="beyond fp16"):
        Cast("fp16").encode("w", torch.tensor([1e6]))
    with pytest.raises(ConfigError, match="'fp8'"):
        Cast("fp8")  # type: ignore[arg-type]


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES[VALUES]),
    low=st.integers(-(1 << 40), 1 << 40),
    span=st.sampled_from([1, 2, 300, 70_000, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40]),
    rising=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_range_of_integers_comes_back(dtype: torch.dtype, low: int, span: int, rising: bool, seed: int) -> None:
    """Ranges at and over the 32 bits of a stream included; what a dtype cannot hold wraps on the way in."""
    values = np.random.default_rng(seed).integers(low, low + span, (6, 11))
    values = np.sort(values.ravel()).reshape(6, 11) if rising else values
    bits = values.astype(np.int64).view(np.uint64).astype(f"u{dtype.itemsize}")
    encode(torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(6, 11))


@pytest.mark.parametrize("dtype", DTYPES[VALUES], ids=str)
def test_the_ends_of_a_dtype_come_back(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    for values in ([ends.min, ends.max], [ends.max, ends.min, ends.max - 1], [ends.max], [ends.min] * 3):
        encode(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", mostly_nightly(DTYPES[LISTED], (torch.bfloat16, torch.float32)), ids=str)
def test_floats_of_few_magnitudes_cost_what_integers_do(dtype: torch.dtype) -> None:
    """Floats rounded to a grid, with a signed zero, a NaN and infinities among them; trained ones are not listed."""
    integers = torch.round(gaussian(64, 256) * 3) + 0.0  # no −0.0
    weight = (integers * 0.0123).to(dtype)
    weight[0, :4] = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")])
    encoded = encode(weight)
    assert encoded.params[0] == LISTED
    assert coded_bytes(encoded) < len(coder.encode(integers.int().numpy(), effort="fast").payload) + 200
    assert encode(gaussian(128, 256).to(dtype)).params == ()


def test_a_causal_mask_of_256_positions_takes_less_than_forty_bytes() -> None:
    for mask in (torch.ones(256, 256).tril(), torch.full((1, 1, 256, 256), -torch.inf).triu(1)):
        assert coded_bytes(encode(mask)) < 40


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_positions_in_floats_cost_next_to_nothing(dtype: torch.dtype) -> None:
    positions = torch.arange(-100, 156).to(dtype)
    encoded = encode(positions)
    assert (encoded.params, coded_bytes(encoded) < 16) == ((DIFFERENCES,), True)
    for other in (0.5, -0.0, torch.nan, torch.inf, 2.0 * WHOLE[dtype]):
        positions[70] = other
        assert encode(positions).params != (DIFFERENCES,)


HIGHEST, WORDS = (1 << 31) - 1, Lossless().encode("w", torch.tensor([1.5, 0.1], dtype=torch.bfloat16)).streams
IMPOSSIBLE: list[tuple[int, torch.dtype, list[list[int]]]] = [
    (HALVES, torch.uint8, [[3], [16]]),
    (HALVES, torch.uint8, [[3], [-1]]),
    (VALUES, torch.uint32, [[-1]]),
    (VALUES, torch.uint64, [[-1]]),
    (DIFFERENCES, torch.uint64, [[5, -6]]),
    (DIFFERENCES, torch.int32, [[HIGHEST, 1]]),
    (DIFFERENCES, torch.uint32, [[HIGHEST, HIGHEST, 2]]),
    *((DIFFERENCES, dtype, [[bound, 1]]) for dtype, bound in WHOLE.items()),
]


@pytest.mark.parametrize(("form", "dtype", "stream"), IMPOSSIBLE)
def test_integers_that_a_dtype_cannot_hold_are_a_corrupt_file(
    form: int, dtype: torch.dtype, stream: list[list[int]]
) -> None:
    values = np.array(stream, np.int64)
    with pytest.raises(ArtifactError, match="corrupt"):
        decode(Encoded("lossless", (1, values.shape[1]), dtype, (form,), (values,)))


def test_lists_and_runs_that_no_encoder_writes_are_a_corrupt_file() -> None:
    """A list rises and is not left; runs have a length, a word, and the tensor's length in total."""
    for numbers, gaps in (([2], [5, 1]), ([-3], [5, 1]), ([0], [5, 0]), ([0], [-1, 3]), ([0], [(1 << 15) - 1, 1])):
        streams = np.array([numbers * 4], np.int32), np.array([gaps], np.int32)
        with pytest.raises(ArtifactError, match="list"):
            decode(Encoded("lossless", (4,), torch.bfloat16, (LISTED, len(gaps)), streams))
    for words, lengths in (([0, 2], [40, 24]), ([0, -1], [40, 24]), ([0, 1], [40, 25]), ([0, 1], [65, -1])):
        runs = np.array([words], np.int32), np.array([lengths], np.int32)
        with pytest.raises(ArtifactError, match="runs"):
            decode(Encoded("lossless", (64,), torch.bfloat16, (RUNS, 2, 2), (*WORDS, *runs)))
    planes = Lossless().encode("w", torch.zeros(2, 3))
    wide = (planes.streams[0].astype(np.int32) + 300, *planes.streams[1:])
    with pytest.raises(ArtifactError):
        decode(Encoded("lossless", planes.shape, planes.dtype, (), wide))
