"""Weights that are quantized already come back bit for bit, near the size of their integers and scales."""

import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import birdie
from birdie.compress.registry import decode
from birdie.compress.scaled import search
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.lossless import SCALED, TABLES, Lossless, layout
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits
from tests.compress.matrices import assert_matches_layout, gaussian
from tests.nightly import mostly_nightly

SHAPE = (128, 256)
FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32


def weights(seed: int = 0) -> Tensor:
    """Return Gaussian rows of different scales."""
    return gaussian(*SHAPE, seed=seed) * 0.02 * torch.exp(0.3 * gaussian(SHAPE[0], 1, seed=seed + 1))


def in_groups(size: int) -> Tensor:
    return weights().reshape(SHAPE[0], -1, size)


def table_of(levels: Tensor, values: Tensor) -> Tensor:
    """Return the index of the nearest level."""
    return (values[..., None] - levels).abs().argmin(-1)


Packed = tuple[Tensor, tuple[Tensor, ...]]


def by_row(bits: int) -> Packed:
    scale = weights().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    number = (weights() / scale).round() + 0.0
    return number * scale, (number.to(torch.int8), scale)


def by_column() -> Packed:
    weight, parts = by_row(4)
    return weight.T.contiguous(), parts


def by_groups() -> Packed:
    groups = in_groups(64)
    scale = (groups.abs().amax(2, keepdim=True) / 7).to(FLOAT16)
    number = (groups / scale.float()).round().clamp(-8, 7) + 0.0
    return (number * scale.float()).to(FLOAT16).reshape(SHAPE), (number.to(torch.int8).reshape(SHAPE), scale.squeeze(2))


def with_zero_points() -> Packed:
    low, high = weights().amin(1, keepdim=True), weights().amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    number = (weights() / scale + zero).round().clamp(0, 255)
    return (number - zero) * scale, (number.to(torch.uint8), scale, zero.to(torch.uint8))


def gguf_q4_0() -> Packed:
    """Return blocks of 32 whose scale has the sign that makes the largest weight −8, so zeros may be −0.0."""
    groups = in_groups(32)
    scale = (groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8).to(FLOAT16)
    number = (groups / scale.float() + 8.5).floor().clamp(0, 15) - 8
    return (number * scale.float()).to(FLOAT16).reshape(SHAPE), (number.to(torch.int8).reshape(SHAPE), scale.squeeze(2))


def gptq() -> Packed:
    groups = in_groups(128)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / 15).to(FLOAT16)
    zero = (-low / scale.float()).round()
    number = (groups / scale.float() + zero).round().clamp(0, 15)
    parts = number.to(torch.uint8).reshape(SHAPE), scale.squeeze(2), zero.to(torch.uint8).squeeze(2)
    return ((number - zero) * scale.float()).to(FLOAT16).reshape(SHAPE), parts


def nf4(dtype: torch.dtype) -> Packed:
    """Return levels at quantiles of a Gaussian, times the largest magnitude of 64."""
    quantiles = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))
    levels = torch.where(quantiles < 0, quantiles / -quantiles[0], quantiles / quantiles[-1])
    groups = in_groups(64).to(dtype).float()
    scale = groups.abs().amax(2, keepdim=True)
    number = table_of(levels, groups / scale)
    parts = number.to(torch.uint8).reshape(SHAPE), scale.to(dtype).squeeze(2)
    return (levels[number] * scale).to(dtype).reshape(SHAPE), parts


def codebook(*, rows: bool) -> Packed:
    source = weights() if rows else weights().reshape(1, -1)
    levels = torch.quantile(source, torch.linspace(0.03, 0.97, 16), dim=1).T.contiguous()
    number = (source[..., None] - levels[:, None]).abs().argmin(-1)
    return levels.gather(1, number).reshape(SHAPE), (number.to(torch.uint8).reshape(SHAPE), levels)


def float8(*, scaled: bool) -> Packed:
    scale = weights().abs().amax(1, keepdim=True) / 448 if scaled else torch.tensor([[0.001]])
    number = (weights() / scale).to(torch.float8_e4m3fn)
    return number.float() * (scale if scaled else 1), (number.view(torch.uint8), scale)


def ternary() -> Packed:
    scale = weights().abs().mean(1, keepdim=True).to(BFLOAT16)
    number = (weights() / scale.float()).round().clamp(-1, 1) + 0.0
    return (number * scale.float()).to(BFLOAT16), (number.to(torch.int8), scale)


FORMATS: dict[str, tuple[Callable[[], Packed], str]] = {
    "int4 per row": (lambda: by_row(4), "int4 by row, exact"),
    "int4 per column": (by_column, "int4 by column, exact"),
    "int4 by 64 in float16": (by_groups, "int4 by 64, exact"),
    "uint8 with zero points": (with_zero_points, " levels by row, exact"),
    "Q4_0 in float16": (gguf_q4_0, "int4 by 32, exact"),
    "GPTQ by 128 in float16": (gptq, " levels by 128, exact"),
    "NF4 in float16": (lambda: nf4(FLOAT16), "16 levels by 64, exact"),
    "NF4 in float32": (lambda: nf4(FLOAT32), "16 levels by 64, exact"),
    "k-means of a tensor": (lambda: codebook(rows=False), "lossless"),
    "k-means of rows": (lambda: codebook(rows=True), "16 levels by row, exact"),
    "float8 per row in float32": (lambda: float8(scaled=True), " levels by row, exact"),
    "ternary in bfloat16": (ternary, "3 levels by row, exact"),
}


def saved(state: dict[str, Tensor], **options: Any) -> tuple[birdie.Summary, dict[str, Tensor]]:
    file = io.BytesIO()
    summary = birdie.save(state, file, **options)
    return summary, birdie.load(file.getvalue())


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_tensor_costs_what_its_packed_form_costs(name: str) -> None:
    """Two in a hundred more at most, and a hundred bytes; the summary says what it is."""
    make, text = FORMATS[name]
    weight, packed = make()
    summary, state = saved({"w": weight}, lossless=True)
    assert same_bits(state["w"], weight)
    together, _ = saved({str(index): part.contiguous() for index, part in enumerate(packed)}, lossless=True)
    assert summary.bytes <= 1.02 * together.bytes + 100, (summary.tensors[0].scheme, together.bytes)
    assert summary.tensors[0].scheme.endswith(text)


@pytest.mark.parametrize("name", mostly_nightly(FORMATS, [*FORMATS][::4]))
def test_by_default_and_with_room_a_quantized_tensor_stays_exact(name: str) -> None:
    """It does unless eight bits a weight are smaller, as they may be for 256 levels."""
    weight, _ = FORMATS[name][0]()
    summary, state = saved({"w": weight})
    exact, _ = saved({"w": weight}, lossless=True)
    assert same_bits(state["w"], weight) or (len(weight.unique()) > 200 and summary.bytes < exact.bytes)
    _, state = saved({"w": weight, "other": gaussian(96, 128)}, bits=math.ceil(exact.bits_per_weight) + 1)
    assert same_bits(state["w"], weight)


def test_a_budget_below_the_exact_size_is_met_all_the_same() -> None:
    weight, _ = by_row(8)
    summary, state = saved({"w": weight}, bits=5)
    assert summary.bits_per_weight <= 5
    assert not torch.equal(state["w"], weight)
    four, _ = by_row(4)  # as large as the budget without the header of the file
    alone, _ = saved({"w": four}, lossless=True)
    assert saved({"w": four}, budget=alone.bytes - 30)[0].bytes <= alone.bytes - 30


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_weights_that_are_not_quantized_have_no_levels(dtype: torch.dtype) -> None:
    assert search(gaussian(256, 512).to(dtype)) is None
    broken = by_row(4)[0]
    for value in (torch.nan, torch.inf):
        broken[5, 7] = value
        assert search(broken) is None


def test_rows_of_zeros_and_signed_zeros_come_back() -> None:
    weight, _ = by_row(4)
    weight[0], weight[3], weight[9] = 0.0, -0.0, -0.0
    weight[20, ::3] *= -0.0
    encoded = Lossless().encode("w", weight)
    assert encoded.params[0] == SCALED
    assert same_bits(decode(encoded), weight)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([FLOAT32, FLOAT16, BFLOAT16]),
    most=st.integers(1, 127),
    shape=st.sampled_from([(1, 2048), (16, 200), (40, 64), (200, 16), (3, 20, 40)]),
    group=st.sampled_from([16, 32, 64, 10_000]),
    exponent=st.integers(-12, 6),
    seed=st.integers(0, 99),
)
def test_any_grid_comes_back(
    dtype: torch.dtype, most: int, shape: tuple[int, ...], group: int, exponent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = (1, shape[1]) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    numbers = rng.integers(-most, most + 1, (rows, columns))
    scales = rng.uniform(1, 2, (rows, -(-columns // group))).astype(np.float32) * np.float32(2.0**exponent)
    values = numbers.astype(np.float32) * np.repeat(scales, group, axis=1)[:, :columns]
    weight = torch.from_numpy(values).to(dtype).reshape(shape)
    encoded = Lossless().encode("w", weight)
    assert_matches_layout(encoded)
    assert same_bits(decode(encoded), weight)


def damaged() -> Iterator[tuple[str, Encoded]]:
    """Yield tensors with one stream that no encoder writes."""
    encoded = Lossless().encode("w", by_row(4)[0])
    assert encoded.params[0] == SCALED

    def changed(index: int, value: int, at: int = 0) -> Encoded:
        streams = [stream.astype(np.int32) for stream in encoded.streams]
        streams[index] = streams[index].copy()
        streams[index][0, at] = value
        return Encoded("lossless", encoded.shape, encoded.dtype, encoded.params, tuple(streams))

    yield "number", changed(0, encoded.params[3])
    yield "number", changed(0, -1)
    yield "levels", changed(1, -1, 2)
    yield "levels", changed(1, 0, 2)
    yield "levels", changed(1, 1 << 30, 2)
    yield "finite", changed(2, 255)
    table = Lossless().encode("w", codebook(rows=True)[0])
    assert table.params[0] == TABLES
    numbers = table.streams[0].astype(np.int32)
    numbers[3, 3] = table.params[1]
    yield "number", Encoded("lossless", table.shape, table.dtype, table.params, (numbers, *table.streams[1:]))


@pytest.mark.parametrize(("text", "encoded"), [*damaged()])
def test_levels_that_no_encoder_writes_are_a_corrupt_file(text: str, encoded: Encoded) -> None:
    with pytest.raises(ArtifactError, match=text):
        decode(encoded)


@pytest.mark.parametrize(
    ("dtype", "params"),
    [
        (torch.float64, (SCALED, 1, 8, 4, 0)),
        (torch.int8, (SCALED, 1, 8, 4, 0)),
        *((FLOAT32, (SCALED, *rest)) for rest in ((0, 8, 4, 0), (1, 9, 4, 0), (7, 8, 4, 0), (1, 8, 0, 0))),
        *((FLOAT32, (SCALED, *rest)) for rest in ((1, 8, 513, 0), (1, 8, 4, 6), (1, 8, 4, -1), (1, 8, 4), ())),
        *((FLOAT32, (TABLES, *rest)) for rest in ((0,), (513,), (4, 4), ())),
        (torch.int32, (TABLES, 4)),
    ],
)
def test_parameters_that_are_impossible_are_refused(dtype: torch.dtype, params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="corrupt"):
        layout((6, 8), dtype, params)
