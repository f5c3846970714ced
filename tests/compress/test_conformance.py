"""The laws of every scheme: each word of the registry, many of their options, and a scheme from outside birdie.

A scheme added to `birdie.compress.schemes` is tested by the example of its `Spec`, without a further line. What one
scheme alone promises is in `tests/compress/schemes`.
"""

import functools
import math
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import birdie
from birdie.compress import registry
from birdie.compress.inner_tensors import part_params, take_part
from birdie.compress.registry import decode, decoder, options_of, parse_spec
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.cast import SIXTEEN_BIT, Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.rotation import decode_parts
from birdie.compress.small_tensors import applicable, default_scheme
from birdie.errors import ArtifactError, ConfigError, WeightsError
from tests.compress.matrices import (
    DTYPES,
    assert_matches_layout,
    coded_bytes,
    covariance,
    few_components,
    gaussian,
    random_weight,
    relative_error,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("squares")

FORMS = [
    "int4:clip=search,group_size=16",
    "sigma:0.3,per_tensor",
    "trellis:8",
    "codebook:k=7,per_row",
    "rotation:base=codebook:k=8,per_row",
    "lowrank:rank=2,base=ternary:group_size=8",
    "spectral:dct",
    "spectral:wavelet97",
    "tucker:base=trellis:states=8,sigma=0.05",
    "squares:0.1",
]
"""Specs whose streams have another form than those of the examples."""
OPTIONS = [
    "int4:group_size=8",
    "int8:level_stride=4",
    "int4:clip=search",
    "sigma:0.3,group_size=16",
    "sdclip:bits=8,clip_sigmas=20",
    "sdclip:bits=2,clip_sigmas=2.5",
    "gptq:bits=4,clip_sigmas=6",
    "trellis:1",
    "trellis:states=32,sigma=0.3,per_tensor",
    "ternary:group_size=5",
    "binary:group_size=7",
    "codebook:k=4",
    "codebook:k=256",
    "codebook:k=256,per_row",
    "codebook:k=8,rate=0.05",
    "rotation:bits=1",
    "rotation:bits=6",
    "rotation:base=sigma:0.2",
    "rotation:base=ternary",
    "lowrank:rank=2,base=int4",
    "lowrank:rank=3,base=codebook:k=4,per_row",
    "spectral:auto,sigma=0.05",
    "spectral:identity,sigma=0.3",
    "spectral:dct,edge=4",
    "spectral:dct,axes=kernel",
    "spectral:wavelet53",
    "spectral:wavelet97,levels=9,scan=planes",
    "tucker:base=sigma:0.05",
    "tucker:base=spectral:identity,sigma=0.05",
    "tucker:base=ternary",
    "tucker:base=int8",
    "tucker:base=spectral:auto,sigma=0.1",
    "tucker:base=spectral:dct,edge=4,sigma=0.1",
]
"""More options: nightly, as those above decode alike."""
EXAMPLES = [word.example for word in registry.words().values()]
SPECS = [*EXAMPLES, *FORMS, *OPTIONS]
FLOATS = ("lossless", "fp16", "bf16")  # which keep floating-point numbers; all others quantize
QUANTIZERS = [spec for spec in SPECS if spec not in FLOATS]
SHAPES = [(), (1,), (9,), (1, 1), (7, 5), (1, 90), (60, 1), (10, 8, 5), (6, 4, 3, 3), (2, 3, 4, 3, 3)]
HUGE = 1 << 40
AUTO = "spectral:auto,sigma=0.3"
"""An example that tries transforms and scans with the slowest coder: daily in two laws alone."""
NIGHTLY = {*OPTIONS, AUTO, "int2", "int3", "int5", "int6", "int7"}
UNBOUNDED = {"group_size", "rank", "rate"}  # options that may be as large as one likes
# Squared error, as a share of the squares, times 4^bits per weight: 1 at the rate–distortion bound of Gaussian rows,
# 1.42 for a fine uniform grid and an ideal coder, 1.7 with the scales of a small matrix.
WASTE = 4.0


def daily(specs: list[str], *more: str) -> list[Any]:
    """Return specs as parameters of a test, those of NIGHTLY at night except `more`."""
    return [pytest.param(spec, marks=pytest.mark.nightly) if spec in NIGHTLY - {*more} else spec for spec in specs]


def matrix() -> Tensor:
    """Return a matrix (24, 33) that every scheme stores in its own form, decompositions included."""
    return few_components(24, 33)


def stored(spec: str) -> list[Tensor]:
    """Return tensors of 24 rows and 33 columns, or as many numbers, one for every form that the scheme stores."""
    if spec != "lossless":
        return [matrix(), random_weight(8, 11, 3, 3)]
    ids = torch.arange(24 * 33).reshape(24, 33)
    packed = torch.from_numpy(np.random.default_rng(0).integers(0, 15, (24, 33, 2)) @ np.array([1, 16]))
    listed = (10 * matrix()).round() / 7
    return [matrix(), ids, ids * 7919 % 5003, packed.byte(), listed, (ids > 500).float()]


def holds(spec: str, weight: Tensor) -> bool:
    """Return whether the scheme stores `weight` at all; casts refuse what their 16 bits cannot reach."""
    scheme = parse_spec(spec)
    return not isinstance(scheme, Cast) or bool(weight.to(SIXTEEN_BIT[scheme.to]).isfinite().all())


def encode(spec: str, weight: Tensor, sensitivity: Sensitivity | None = None) -> Encoded:
    return parse_spec(spec).encode("w", weight, sensitivity=sensitivity)


@functools.cache
def forms(spec: str) -> list[Encoded]:
    """Return an encoded tensor of every form that the scheme stores, the same ones for each law of decoders."""
    return [encode(spec, weight) for weight in stored(spec)]


def largest_error(weight: Tensor, encoded: Encoded) -> float:
    return float((decode(encoded).double() - weight.double()).abs().max())


def assert_same(encoded: Encoded, other: Encoded) -> None:
    """Require the same streams, bit for bit, and the same description of them."""
    assert replace(encoded, streams=()) == replace(other, streams=())
    assert len(encoded.streams) == len(other.streams)
    for stream, expected in zip(encoded.streams, other.streams, strict=True):
        np.testing.assert_array_equal(stream, expected)


@pytest.mark.parametrize("spec", daily([spec for spec in SPECS if spec != "squares:0.1"], AUTO))
def test_a_tensor_is_decoded_inside_others_as_its_decoder_says(spec: str) -> None:
    encoded = encode(spec, matrix())
    kind, params = decoder(encoded.scheme), part_params(encoded)
    if kind.inner == "no":
        with pytest.raises(ArtifactError, match="inner"):
            take_part(encoded.shape, params)
        return
    part, rest = take_part(encoded.shape, (*params, 7))
    assert rest == (7,)
    assert torch.equal(part.decode(encoded.streams), decode(encoded))
    if kind.inner == "rows":
        (some,) = decode_parts([part], encoded.streams, (slice(5, 11), slice(None)))
        np.testing.assert_array_equal(some, decode(encoded)[5:11].numpy())
    else:
        with pytest.raises(ArtifactError, match="inner"):
            take_part(encoded.shape, params, by_rows=True)


def test_every_registered_scheme_is_tested() -> None:
    assert {parse_spec(spec).decoder.name for spec in SPECS} == set(registry.names())
    assert {spec for spec in SPECS if not parse_spec(spec).quantizes} == set(FLOATS)


@pytest.mark.parametrize("spec", daily(SPECS, AUTO))
def test_a_spec_is_the_same_scheme_every_time_and_with_its_defaults_written_out(spec: str) -> None:
    scheme, word = parse_spec(spec), registry.words()[spec.partition(":")[0]]
    assert type(scheme) is word.scheme
    assert {scheme: spec}[parse_spec(f" {spec} ")] == spec  # frozen, so that it may be a key
    assert decoder(scheme.decoder.name) is scheme.decoder
    options, _, base = spec.partition(":")[2].partition("base=")
    items = [item for item in options.split(",") if item]
    for name, _, default in options_of(word):
        if type(default) in (int, float, str) and not any(item.startswith(f"{name}=") for item in items):
            first = bool(items) and "=" not in items[0] and name == next(options_of(word))[0]
            items += [] if first else [f"{name}={default}"]
    items += [f"base={base}"] if base else []
    assert parse_spec(":".join([word.spec.word, ",".join(items)][: 1 + bool(items)])) == scheme


@pytest.mark.parametrize("spec", daily(SPECS, AUTO))
def test_tensors_come_back_in_their_shape_and_dtype_nearer_than_zeros(spec: str) -> None:
    for weight in (*(matrix().to(dtype) for dtype in DTYPES), random_weight(24, 33), random_weight(8, 6, 3, 3)):
        encoded = encode(spec, weight)
        assert_matches_layout(encoded)
        assert (decode(encoded).shape, decode(encoded).dtype) == (weight.shape, weight.dtype)
        assert relative_error(weight, encoded) <= (0 if spec == "lossless" else 0.7)


@pytest.mark.parametrize("spec", daily([spec for spec in SPECS if spec != "lossless"]))
def test_bits_are_not_wasted(spec: str) -> None:
    """Casts keep an exponent with every weight, and small groups a scale for a few: these may take half a bit more."""
    weight = random_weight(64, 96)
    encoded = encode(spec, weight)
    bits = 8 * coded_bytes(encoded) / weight.numel()
    more = 0.5 if spec in FLOATS or "group_size" in spec else 0
    assert relative_error(weight, encoded) <= WASTE * 4.0 ** (more - bits)


@pytest.mark.parametrize("spec", daily(SPECS))
def test_small_and_narrow_tensors_come_back_too(spec: str) -> None:
    for shape in SHAPES:
        weight = random_weight(*shape) if shape else torch.tensor(-0.7)
        encoded = encode(spec, weight)
        assert_matches_layout(encoded)
        assert decode(encoded).shape == weight.shape
        assert relative_error(weight, encoded) <= 1


@pytest.mark.parametrize("spec", daily([spec for spec in QUANTIZERS if spec != "squares:0.1"]))
def test_weights_below_the_smallest_scale_are_kept_losslessly(spec: str) -> None:
    for weight in (random_weight(8, 16) * 1e-42, random_weight(8, 16).double() * 1e-60):
        assert torch.equal(decode(encode(spec, weight)), weight)


@pytest.mark.parametrize("spec", daily([spec for spec in SPECS if spec != "squares:0.1"]))
def test_options_out_of_range_are_refused_with_their_value(spec: str) -> None:
    scheme: Any = parse_spec(spec)
    for field in fields(scheme):
        value = getattr(scheme, field.name)
        if type(value) not in (int, float):
            continue
        wrong = [-1, *([] if field.name in UNBOUNDED else [HUGE]), *([math.nan] if type(value) is float else [])]
        for number in wrong:
            with pytest.raises(ConfigError, match=str(number)):
                replace(scheme, **{field.name: number})


@pytest.mark.parametrize("spec", daily([spec for spec in QUANTIZERS if spec != "squares:0.1"]))
@pytest.mark.parametrize("bad", [0.0, 3e-40, 1e-30, 1e-10, 1e10, 1e30, "column"])
def test_one_bad_row_or_column_costs_the_others_nothing(spec: str, bad: float | str) -> None:
    """A dead channel, one that weight decay left subnormal, and one whose scale the next layer takes back.

    What has one scale for all rows takes one for each if a row is far above the others, unless that was asked for.
    """
    one_scale = "spectral" in spec or (spec.startswith("codebook") and "per_row" not in spec)
    far_above = bad in (1e10, 1e30)
    if far_above and "per_tensor" in spec:
        return
    weight = random_weight(60, 80)
    plain = encode(spec, weight)
    good, wide = torch.arange(60) != 7, torch.arange(80) != 9
    spoiled = weight.clone()
    if bad == "column":
        spoiled[:, 9] *= 3e-40
    else:
        spoiled[7] *= float(bad)
    encoded = encode(spec, spoiled)
    assert encoded.scheme != "lossless"

    def error(encoded: Encoded) -> float:
        rest = (decode(encoded) - weight)[good][:, wide].double().square().sum(1)
        return float((rest / weight[good][:, wide].double().square().sum(1)).mean())

    assert error(encoded) <= 1.2 * error(plain)
    level = 1.6 if "codebook" in spec or "rotation" in spec else 1.01  # rows of zeros need a level more
    assert (one_scale and far_above) or coded_bytes(encoded) <= level * coded_bytes(plain) + 48


@pytest.mark.parametrize("spec", daily(SPECS, AUTO))
def test_encoding_twice_gives_the_same_streams_on_any_number_of_threads(spec: str) -> None:
    weight = random_weight(20, 24)
    weight[5:10] = torch.arange(120).remainder(9).sub(4).div(2).reshape(5, 24)  # half lie in the middle of two others
    weight[12, 5] = 3e4
    threads, expected = torch.get_num_threads(), encode(spec, weight)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_same(encode(spec, weight), expected)
    finally:
        torch.set_num_threads(threads)
    with ThreadPoolExecutor(2) as pool:
        for encoded in pool.map(encode, [spec] * 2, [weight] * 2):
            assert_same(encoded, expected)
    assert torch.equal(decode(expected), decode(expected))
    assert bool(decode(expected).isfinite().all())


@pytest.mark.parametrize("spec", daily(SPECS))
def test_views_are_encoded_as_what_they_hold_and_weights_never_changed(spec: str) -> None:
    base = random_weight(24, 30)
    original = base.clone()
    for view in (base.T[::3, 1::2], base[:, :1].expand(24, 9), base[3]):
        assert_same(encode(spec, view), encode(spec, view.contiguous()))
    parameter = torch.nn.Parameter(base)
    assert_same(encode(spec, parameter), encode(spec, base))
    assert torch.equal(base, original)


@pytest.mark.parametrize("spec", daily(SPECS))
def test_a_sensitivity_changes_neither_the_layout_nor_what_can_be_decoded(spec: str) -> None:
    """Singular Hessians of inputs that are never active included."""
    weight, dead = random_weight(20, 24), torch.ones(24).double()
    dead[3:9] = 0
    hessian, output = covariance(24) * dead * dead[:, None], covariance(20)
    for sensitivity in (
        Sensitivity(hessian, output.diagonal().clone(), output),
        Sensitivity(torch.ones(24, 24), torch.ones(20), torch.eye(20)),
        Sensitivity(torch.zeros(24, 24), torch.ones(20)),
    ):
        encoded = encode(spec, weight, sensitivity)
        assert_same(encode(spec, weight, sensitivity), encoded)
        assert_matches_layout(encoded)
        assert largest_error(weight, encoded) <= 10 * float(weight.abs().max())


@pytest.mark.parametrize("spec", daily(SPECS))
def test_extreme_magnitudes_and_outliers_stay_finite_and_near(spec: str) -> None:
    for magnitude in [1e-44, 1e-38, 1e20, 3.4e38]:
        outlier = 0.01 * gaussian(12, 20)
        outlier[3, 5] = 1
        for unit in (torch.tensor([[1, -1, 0, 0.5]]), torch.ones(12, 1) * torch.linspace(-1, 1, 20), outlier):
            weight = unit * magnitude
            if not holds(spec, weight):
                with pytest.raises(WeightsError, match=rf"'w'.*{spec}"):
                    encode(spec, weight)
                continue
            assert largest_error(weight, encode(spec, weight)) <= 1.1 * magnitude


@pytest.mark.parametrize("spec", daily(SPECS))
def test_constants_survive(spec: str) -> None:
    for value in [0.0, -7.5, -3e38]:
        weight = torch.full((9, 20), value)
        if holds(spec, weight):
            assert largest_error(weight, encode(spec, weight)) <= 2 * abs(value)


# A row of the weight is a column of a factor: a transform mixes columns, and a trellis has no zero in odd states.
MIXING_ROWS = ("tucker:base=spectral:dct,edge=4,sigma=0.1", "tucker:base=trellis:states=8,sigma=0.05")


@pytest.mark.parametrize("spec", daily([spec for spec in SPECS if spec not in MIXING_ROWS]))
def test_rows_of_zeros_stay_zero(spec: str) -> None:
    """In matrices and kernels, smooth and not, with a row that has a mean far from zero beside them.

    Of 16 columns or more, as a trellis has rows of zeros only from there on.
    """
    for seed, shape in enumerate([(30, 40), (30, 32), (30, 4, 3, 3), (12, 17)]):
        weight = few_components(*shape) if seed == 1 else random_weight(*shape)
        weight[5] += 3
        zeros = [4, 7, 8, shape[0] - 1]
        weight[zeros] = 0
        decoded = decode(encode(spec, weight))
        assert bool((decoded[zeros] == 0).all())
        assert bool((decoded[5] != 0).any())


@pytest.mark.parametrize("spec", daily([spec for spec in SPECS if spec != "lossless"]))
def test_values_that_are_not_finite_are_refused_with_the_name_of_the_tensor(spec: str) -> None:
    for bad in [float("nan"), float("inf"), -float("inf")]:
        weight = random_weight(8, 8)
        weight[1, 2] = weight[3, 4] = bad
        with pytest.raises(WeightsError, match=r"'blocks\.1\.w'.* 2 "):
            parse_spec(spec).encode("blocks.1.w", weight)
    if spec in QUANTIZERS and spec != "squares:0.1":
        with pytest.raises(WeightsError, match="'w'"):
            encode(spec, torch.full((8, 8), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("spec", daily(QUANTIZERS))
def test_what_is_no_tensor_of_real_numbers_is_refused(spec: str) -> None:
    for weight in (torch.ones(3, 4, dtype=torch.int32), torch.zeros(0, 4), torch.ones(2, 2, dtype=torch.complex64)):
        with pytest.raises(WeightsError, match="'w'"):
            encode(spec, weight)


@pytest.mark.parametrize("spec", daily(QUANTIZERS))
def test_a_finer_scale_leaves_less_error_in_more_bytes(spec: str) -> None:
    """A byte budget is met that way; a scheme of fixed precision returns None."""
    scheme, weight = parse_spec(spec), gaussian(32, 40)
    fine, coarse = scheme.at_scale(0.1), scheme.at_scale(0.4)
    if fine is None or coarse is None:
        assert fine is coarse is None
        return
    assert type(fine) is type(scheme)
    encoded, smaller = fine.encode("w", weight), coarse.encode("w", weight)
    assert squared_error(weight, encoded) < 0.5 * squared_error(weight, smaller)
    assert coded_bytes(encoded) > coded_bytes(smaller)


@pytest.mark.parametrize("spec", daily(QUANTIZERS))
def test_small_tensors_are_kept_in_16_bits_or_losslessly_whatever_the_default(spec: str) -> None:
    scheme = parse_spec(spec)
    for weight in (gaussian(7), gaussian(60, 60), torch.ones(()), torch.tensor([1.0, 0.0, -2.0])):
        assert default_scheme(scheme, weight) == Cast()
    for weight in (torch.arange(5000), torch.tensor([1.0, 1e-9]), torch.full((9,), 1e6), torch.zeros(64, 64).bool()):
        assert default_scheme(scheme, weight) == Lossless()
    assert default_scheme(scheme, gaussian(64, 64)) == scheme
    assert applicable(scheme, gaussian(2, 2)) == scheme, "a rule that names a matrix holds, however small"


@pytest.mark.parametrize("spec", daily(SPECS))
def test_the_cost_of_decoding_is_known_before_anything_is_allocated(spec: str) -> None:
    for encoded in (*forms(spec), encode(spec, gaussian(9))):
        cost = decoder(encoded.scheme).cost(encoded.shape, encoded.dtype, encoded.params)
        count = math.prod(encoded.shape)
        assert count * encoded.dtype.itemsize <= cost.bytes < 1 << 20
        assert count <= cost.operations < 1 << 20


def hostile_params(params: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield parameters that no encoder writes: longer, shorter, and each of `params` huge or negative."""
    yield (*params, 0)
    yield params * 2 + (0,) * 10_000
    yield tuple(range(-1, 10))
    for position in range(len(params)):
        yield params[:position]
        for number in (HUGE, -HUGE, 1 << 31, -(1 << 31), (1 << 63) - 1):
            yield (*params[:position], number, *params[position + 1 :])


@pytest.mark.parametrize("spec", daily(SPECS))
def test_impossible_parameters_are_a_corrupt_file_and_allocate_nothing(spec: str) -> None:
    """Each is refused, or means another form of the same tensor, such as a grid without groups."""
    for encoded in forms(spec):
        decoding = decoder(encoded.scheme)
        refused = 0
        tracemalloc.start()
        try:
            for params in hostile_params(encoded.params):
                try:
                    layout = decoding.layout(encoded.shape, encoded.dtype, params)
                except ArtifactError:
                    refused += 1
                    continue
                assert len(params) < len(encoded.params)
                assert sum(stream.rows * stream.columns for stream in layout) <= 8 * 24 * 33
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert refused >= 3 + 5 * len(encoded.params)


def assert_refused_or_decoded(encoded: Encoded, params: tuple[int, ...], symbol: int, index: int) -> None:
    """Require ArtifactError, or a tensor of the shape and dtype, from streams of one symbol and of one scale.

    It has finite numbers where the scheme is one of birdie's that quantize.
    """
    try:
        layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, params)
        streams = tuple(
            np.full((stream.rows, stream.columns), index if stream.hints.role == "scales" else symbol, np.int64)
            .clip(np.iinfo(stream.dtype).min, np.iinfo(stream.dtype).max)
            .astype(stream.dtype)
            for stream in layout
        )
        decoded = decode(replace(encoded, params=params, streams=streams))
    except ArtifactError:
        return
    assert (decoded.shape, decoded.dtype) == (encoded.shape, encoded.dtype)
    assert encoded.scheme in ("lossless", "cast", "squares") or bool(decoded.isfinite().all())


@pytest.mark.parametrize("spec", daily(SPECS))
def test_whatever_a_file_says_is_refused_or_decoded(spec: str) -> None:
    """Any numbers in the streams, and each parameter replaced by another small one."""
    weights = stored(spec) if spec == "lossless" else [matrix().half(), random_weight(4, 3, 3, 3)]
    for encoded in (encode(spec, weight) for weight in weights):
        for symbol in (-(1 << 31), -1, 0, 1, (1 << 31) - 1):
            for index in (symbol, 0, 47, -2016, 2047, 2048):
                assert_refused_or_decoded(encoded, encoded.params, symbol, index)
        for position in range(len(encoded.params)):
            for number in range(-1, 18):
                params = (*encoded.params[:position], number, *encoded.params[position + 1 :])
                assert_refused_or_decoded(encoded, params, 1, 0)


@pytest.mark.parametrize("spec", daily(QUANTIZERS))
def test_quantized_tensors_of_another_kind_are_a_corrupt_file(spec: str) -> None:
    encoded = forms(spec)[0]
    for shape, dtype in (((24, 33), torch.int64), ((24, 33), torch.bool), ((0, 33), torch.float32)):
        with pytest.raises(ArtifactError):
            decoder(encoded.scheme).layout(shape, dtype, encoded.params)


@pytest.mark.parametrize("spec", daily(SPECS))
def test_layout_and_cost_of_a_huge_tensor_allocate_nothing(spec: str) -> None:
    """A file may name any shape; only what is decoded is checked against the limit of its bytes."""
    encoded = forms(spec)[0]
    decoding, shape = decoder(encoded.scheme), (1 << 30, 1 << 30)
    tracemalloc.start()
    try:
        layout = decoding.layout(shape, encoded.dtype, encoded.params)
        cost = decoding.cost(shape, encoded.dtype, encoded.params)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    except ArtifactError:  # parameters that are bound to the shape, such as ranks
        return
    finally:
        tracemalloc.stop()
    assert cost.bytes >= encoded.dtype.itemsize << 60
    assert layout[0].rows * layout[0].columns == 1 << 60 or encoded.scheme == "tucker"


def decode_checked(encoded: Encoded) -> Tensor:
    """Decode as a file is decoded: the layout is checked first."""
    decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    return decode(encoded)


LEVELS = [[1, 1], [2, 1], [0, (1 << 23) + 1], [-(1 << 31), 0]]
CORRUPT: list[tuple[str, tuple[int, ...], list[list[list[int]]]]] = [
    ("ternary", (2,), [[[0, 2]], [[0]]]),
    *(("codebook", (2, 0), [[[0, 1]], [levels], [[0]]]) for levels in LEVELS),
    ("codebook", (1, 0), [[[0, 1]], [[1]], [[0]]]),
    *(("trellis", params, []) for params in [(2, 16, 0, 0, 0), (8, 3, 0, 0, 0), (8, 16, 5, 0, 0)]),
    *(("trellis", params, []) for params in [(8, 16, 0, 2048, 0), (8, 16, 0, 0, 4), (8, 4, 0, 0, 0, 16)]),
    ("cast", (2,), []),
    ("spectral", (1, 3, 0, 0, 2, 0), []),  # blocks do not divide the tensor
]


@pytest.mark.parametrize(("scheme", "params", "streams"), CORRUPT)
def test_what_no_encoder_writes_is_a_corrupt_file(
    scheme: str, params: tuple[int, ...], streams: list[list[list[int]]]
) -> None:
    """Levels that do not rise, symbols beyond the alphabet, states and resolutions that do not exist."""
    integers = tuple(np.array(stream, np.int32) for stream in streams)
    with pytest.raises(ArtifactError, match=rf"scheme {scheme}|corrupt"):
        decode_checked(Encoded(scheme, (1, 2) if streams else (4, 5), torch.float32, params, integers))


def test_a_file_of_every_scheme_loads(tmp_path: Path) -> None:
    specs = [spec for spec in SPECS if spec not in NIGHTLY]
    state = {f"{index:02d}": few_components(6, 5, 3, 3, seed=index) for index in range(len(specs))}
    rules = list(zip(state, specs, strict=True))
    summary = birdie.save(state, tmp_path / "m.birdie", scheme=rules)
    loaded = birdie.load(tmp_path / "m.birdie")
    assert {row.scheme for row in summary.tensors} == set(registry.names()) - {"cast"} | {"fp16", "bf16"}
    for name, spec in rules:
        assert torch.equal(loaded[name], decode(encode(spec, state[name]))), spec
