"""The laws of every scheme: each word of the registry, many of their options, and a scheme from outside birdie.

A scheme added to `birdie.compress.schemes` is tested by the example of its `Spec`, without a further line; a row in
`PROMISES` holds it to smaller errors. What one scheme alone promises is in `tests/compress/schemes`.
"""

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import birdie
from birdie.compress import registry
from birdie.compress.registry import decode, decoder, options_of, parse_spec
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.cast import SIXTEEN_BIT, Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import applicable, default_scheme
from birdie.errors import ArtifactError, WeightsError
from tests.compress.example_scheme import SQUARES
from tests.compress.matrices import (
    DTYPES,
    coded_bytes,
    covariance,
    few_components,
    gaussian,
    random_weight,
    relative_error,
    squared_error,
)


class Promise(NamedTuple):
    """Largest errors of a scheme.

    Attributes:
        error: squared error of Gaussian rows of different deviations, as a share of their squares. Error feedback makes
            it larger for kernels, in exchange for the error of the outputs.
        extreme: largest error where magnitudes are extreme or one weight stands out, as a share of the largest weight.
        constant: largest error of a constant tensor, as a share of its value.
    """

    error: float = 0.6
    extreme: float = 1.1
    constant: float = 1.0


PROMISES = {
    "lossless": Promise(0, 0, 0),
    "int2": Promise(0.67, 0.61, 0.049),
    "int3": Promise(0.077, 0.2, 0.047),
    "int4": Promise(0.016, 0.086, 0.044),
    "int5": Promise(0.0038, 0.041, 0.022),
    "int6": Promise(0.00077, 0.02, 0.0092),
    "int7": Promise(0.0002, 0.0097, 0.0092),
    "int8": Promise(4.8e-5, 0.0048, 0.003),
    "sigma:0.3": Promise(0.011, 0.13, 1e-6),
    "sdclip": Promise(0.02, 0.16, 0.013),
    "fp16": Promise(6.2e-8, 1.1, 1.3),
    "bf16": Promise(3.8e-6, 1.1, 0.002),
    "trellis:sigma=0.3": Promise(0.0097, 0.17, 0.26),
    "gptq": Promise(0.024, 0.16, 0.24),
    "ternary": Promise(0.26, 0.41, 0.023),
    "binary": Promise(0.53, 1.1, 0.023),
    "codebook:k=16": Promise(0.015, 0.066, 1e-6),
    "rotation:bits=4": Promise(0.019, 0.18, 0.36),
    "lowrank:rank=4,base=int6": Promise(0.00038, 0.00073, 1e-6),
    "spectral:auto,sigma=0.3": Promise(0.01, 0.18, 1e-6),
    "tucker:energy=0.99": Promise(0.011, 0.13, 2e-6),
    "int4:group_size=8": Promise(0.0084, 0.086, 0.044),
    "int8:level_stride=4": Promise(0.00073, 0.02, 0.013),
    "int4:clip=search": Promise(0.013, 0.086, 0.044),
    "int4:clip=search,group_size=16": Promise(0.0088, 0.079, 0.044),
    "sigma:0.3,group_size=16": Promise(0.0099, 0.13, 1e-6),
    "sigma:0.3,per_tensor": Promise(0.0097, 0.13, 1e-6),
    "sdclip:bits=8,clip_sigmas=20": Promise(0.003, 0.064, 0.015),
    "gptq:bits=4,clip_sigmas=6": Promise(0.1, 0.33, 0.22),
    "trellis:1": Promise(0.0126, 0.17, 0.16),
    "trellis:8": Promise(0.0102, 0.17, 0.26),
    "trellis:states=32,sigma=0.3,per_tensor": Promise(0.0097, 0.17, 0.26),
    "ternary:group_size=5": Promise(0.17, 0.41, 0.023),
    "binary:group_size=7": Promise(0.46, 1.1, 0.023),
    "codebook:k=4": Promise(0.25, 0.27, 1e-6),
    "codebook:k=7,per_row": Promise(0.054, 0.14, 1e-6),
    "codebook:k=256": Promise(9.4e-6, 0.0067, 1e-6),
    "codebook:k=8,rate=0.05": Promise(0.076, 0.13, 1e-6),
    "rotation:bits=1": Promise(0.5, 0.79, 2.0),
    "rotation:bits=6": Promise(0.0011, 0.045, 0.081),
    "rotation:base=sigma:0.2": Promise(0.0045, 0.12, 0.13),
    "rotation:base=ternary": Promise(0.29, 0.8, 0.81),
    "lowrank:rank=2,base=int4": Promise(0.011, 0.0039, 7.4e-6),
    "lowrank:rank=3,base=codebook:k=4,per_row": Promise(0.069, 0.011, 0),
    "lowrank:rank=2,base=ternary:group_size=8": Promise(0.11, 0.013, 2.5e-6),
    "spectral:auto,sigma=0.05": Promise(0.00028, 0.021, 1e-6),
    "spectral:identity,sigma=0.3": Promise(0.0099, 0.13, 1e-6),
    "spectral:dct,edge=4": Promise(0.011, 0.18, 1e-6),
    "spectral:dct,axes=kernel": Promise(0.0099, 0.13, 1e-6),
    "spectral:wavelet53": Promise(0.0096, 0.14, 1e-6),
    "spectral:wavelet97,levels=9,scan=planes": Promise(0.011, 0.21, 0),
    "tucker:base=sigma:0.05": Promise(0.00026, 0.022, 1e-6),
    "tucker:base=trellis:states=8,sigma=0.05": Promise(0.00021, 0.038, 0.017),
    "tucker:base=spectral:identity,sigma=0.05": Promise(0.00028, 0.022, 1e-6),
    "tucker:base=ternary": Promise(0.37, 0.41, 0.026),
    "tucker:base=int8": Promise(0.00017, 0.022, 0.0028),
    "tucker:base=spectral:auto,sigma=0.1": Promise(0.0011, 0.086, 1e-6),
    "tucker:base=spectral:dct,edge=4,sigma=0.1": Promise(0.0012, 0.085, 1e-6),
    "spectral:dct": Promise(0.0095, 0.18, 1e-6),
    "spectral:wavelet97": Promise(0.01, 0.21, 1e-6),
    "sdclip:bits=2,clip_sigmas=2.5": Promise(0.62, 1.1, 0.026),
    "squares:0.1": Promise(0.035, 1.0, 1e-6),
}


EXAMPLES = [word.example for word in registry.words().values()]
SPECS = list(dict.fromkeys([*EXAMPLES, *PROMISES]))
FLOATS = ("lossless", "fp16", "bf16")  # which keep floating-point numbers; all others quantize
QUANTIZERS = [spec for spec in SPECS if spec not in FLOATS]
FORMS = ["gaussian", "zeros", "constant", "ties", "zero rows", "outlier", "huge", "tiny"]
SHAPES = [(), (1,), (9,), (1, 1), (7, 5), (1, 90), (60, 1), (10, 8, 5), (6, 4, 3, 3), (2, 3, 4, 3, 3)]
HUGE = 1 << 40


@pytest.fixture(autouse=True)
def _register_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_foreign", {})
    registry.register(SQUARES)
    yield
    registry.words.cache_clear()


def promise(spec: str) -> Promise:
    return PROMISES.get(spec, Promise())


def matrix() -> Tensor:
    """Return a matrix (24, 33) that every scheme stores in its own form, decompositions included."""
    return few_components(24, 33)


def tensor_of_form(form: str, *shape: int) -> Tensor:
    """Return a tensor that is hard to quantize in the way that `form` says."""
    weight = random_weight(*shape)
    if form == "zeros":
        return torch.zeros(shape)
    if form == "constant":
        return torch.full(shape, -2.5)
    if form == "ties":  # half of the numbers lie in the middle between two others
        return torch.arange(weight.numel()).remainder(9).sub(4).div(2).reshape(shape)
    if form == "zero rows":
        weight[::2] = 0
    if form == "outlier":
        weight.view(-1)[3] = 3e4
    return weight * {"huge": 1e30, "tiny": 1e-38}.get(form, 1.0)


def holds(spec: str, weight: Tensor) -> bool:
    """Return whether the scheme stores `weight` at all; casts refuse what their 16 bits cannot reach."""
    scheme = parse_spec(spec)
    return not isinstance(scheme, Cast) or bool(weight.to(SIXTEEN_BIT[scheme.to]).isfinite().all())


def encode(spec: str, weight: Tensor, sensitivity: Sensitivity | None = None) -> Encoded:
    return parse_spec(spec).encode("w", weight, sensitivity=sensitivity)


def largest_error(weight: Tensor, encoded: Encoded) -> float:
    return float((decode(encoded).double() - weight.double()).abs().max())


def assert_same(encoded: Encoded, other: Encoded) -> None:
    """Require the same streams, bit for bit, and the same description of them."""
    assert replace(encoded, streams=()) == replace(other, streams=())
    assert len(encoded.streams) == len(other.streams)
    for stream, expected in zip(encoded.streams, other.streams, strict=True):
        np.testing.assert_array_equal(stream, expected)


def assert_matches_layout(encoded: Encoded) -> None:
    """Require streams of the shapes and within the integer types that the decoder will expect."""
    layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    for stream, expected in zip(encoded.streams, layout, strict=True):
        assert stream.shape == (expected.rows, expected.columns)
        limits = np.iinfo(expected.dtype)
        assert stream.size == 0 or limits.min <= int(stream.min()) <= int(stream.max()) <= limits.max


def test_every_registered_scheme_is_tested() -> None:
    assert {parse_spec(spec).decoder.name for spec in SPECS} == set(registry.names())
    assert {spec for spec in SPECS if not parse_spec(spec).quantizes} == set(FLOATS)
    assert {encode(spec, matrix()).scheme for spec in SPECS} == set(registry.names())


@pytest.mark.parametrize("spec", SPECS)
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


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_come_back_in_their_shape_and_dtype_within_the_error_of_the_scheme(spec: str) -> None:
    for dtype in DTYPES:
        for weight in (random_weight(24, 33).to(dtype), random_weight(8, 6, 3, 3).to(dtype), matrix().to(dtype)):
            encoded = encode(spec, weight)
            assert_matches_layout(encoded)
            assert (decode(encoded).shape, decode(encoded).dtype) == (weight.shape, dtype)
            assert relative_error(weight, encoded) <= promise(spec).error + torch.finfo(dtype).eps ** 2 * (
                spec != "lossless"
            )


@pytest.mark.parametrize("spec", SPECS)
def test_small_and_narrow_tensors_come_back_too(spec: str) -> None:
    """The error is within three times that of larger tensors."""
    for shape in SHAPES:
        weight = random_weight(*shape) if shape else torch.tensor(-0.7)
        encoded = encode(spec, weight)
        assert_matches_layout(encoded)
        assert decode(encoded).shape == weight.shape
        bound = min(1, 3 * promise(spec).error) * float(weight.double().square().sum())
        assert float((decode(encoded).double() - weight.double()).square().sum()) <= bound


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_twice_gives_the_same_streams_on_any_number_of_threads(spec: str) -> None:
    for form in ["gaussian", "ties", "outlier"]:
        weight = tensor_of_form(form, 20, 24)
        if not holds(spec, weight):
            continue
        threads, expected = torch.get_num_threads(), encode(spec, weight)
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert_same(encode(spec, weight), expected)
        finally:
            torch.set_num_threads(threads)
        with ThreadPoolExecutor(3) as pool:
            for encoded in pool.map(encode, [spec] * 3, [weight] * 3):
                assert_same(encoded, expected)
        assert torch.equal(decode(expected), decode(expected))
        assert bool(decode(expected).isfinite().all())


@pytest.mark.parametrize("spec", SPECS)
def test_views_are_encoded_as_what_they_hold_and_weights_never_changed(spec: str) -> None:
    base = random_weight(24, 30)
    original = base.clone()
    for view in (base.T, base[::3, 1::2], base[:, :1].expand(24, 9), base[3], base[3, 4]):
        assert_same(encode(spec, view), encode(spec, view.contiguous()))
    parameter = torch.nn.Parameter(base)
    assert_same(encode(spec, parameter), encode(spec, base))
    assert torch.equal(base, original)


@pytest.mark.parametrize("spec", SPECS)
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


@pytest.mark.parametrize("spec", SPECS)
def test_extreme_magnitudes_and_outliers_stay_finite_and_near(spec: str) -> None:
    for magnitude in [1e-44, 1e-38, 1e-20, 1e20, 1e30, 3.4e38]:
        outlier = 0.01 * gaussian(12, 20)
        outlier[3, 5] = 1
        for unit in (torch.tensor([[1, -1, 0, 0.5]]), torch.ones(12, 1) * torch.linspace(-1, 1, 20), outlier):
            weight = unit * magnitude
            if not holds(spec, weight):
                with pytest.raises(WeightsError, match=rf"'w'.*{spec}"):
                    encode(spec, weight)
                continue
            assert largest_error(weight, encode(spec, weight)) <= promise(spec).extreme * magnitude


@pytest.mark.parametrize("spec", SPECS)
def test_constants_survive(spec: str) -> None:
    for value in [0.0, -7.5, 1e-30, -3e38]:
        weight = torch.full((9, 20), value)
        if holds(spec, weight):
            assert largest_error(weight, encode(spec, weight)) <= promise(spec).constant * abs(value)


# A row of the weight is a column of a factor: a transform mixes columns, and a trellis has no zero in odd states.
MIXING_ROWS = ("tucker:base=spectral:dct,edge=4,sigma=0.1", "tucker:base=trellis:states=8,sigma=0.05")


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in MIXING_ROWS])
def test_rows_of_zeros_stay_zero(spec: str) -> None:
    """In matrices and kernels, smooth and not, with a row that has a mean far from zero beside them.

    Of 16 columns or more, as a trellis has rows of zeros only from there on.
    """
    for seed, shape in enumerate([(30, 40), (30, 4, 3, 3), (12, 17)]):
        for weight in (random_weight(*shape, seed=seed), few_components(*shape, seed=seed)):
            weight[5] += 3
            zeros = [4, 7, 8, shape[0] - 1]
            weight[zeros] = 0
            decoded = decode(encode(spec, weight))
            assert bool((decoded[zeros] == 0).all())
            assert bool((decoded[5] != 0).any())


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "lossless"])
def test_values_that_are_not_finite_are_refused_with_the_name_of_the_tensor(spec: str) -> None:
    for bad in [float("nan"), float("inf"), -float("inf")]:
        weight = random_weight(8, 8)
        weight[1, 2] = weight[3, 4] = bad
        with pytest.raises(WeightsError, match=r"'blocks\.1\.w'.* 2 "):
            parse_spec(spec).encode("blocks.1.w", weight)


@pytest.mark.parametrize("spec", QUANTIZERS)
def test_what_is_no_tensor_of_real_numbers_is_refused(spec: str) -> None:
    for weight in (torch.ones(3, 4, dtype=torch.int32), torch.zeros(0, 4), torch.ones(2, 2, dtype=torch.complex64)):
        with pytest.raises(WeightsError, match="'w'"):
            encode(spec, weight)


@pytest.mark.parametrize("spec", QUANTIZERS)
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
    assert coded_bytes(encoded, "fast") > coded_bytes(smaller, "fast")


@pytest.mark.parametrize("spec", QUANTIZERS)
def test_small_tensors_are_kept_in_16_bits_or_losslessly_whatever_the_default(spec: str) -> None:
    scheme = parse_spec(spec)
    for weight in (gaussian(7), gaussian(60, 60), torch.ones(()), torch.tensor([1.0, 0.0, -2.0])):
        assert default_scheme(scheme, weight) == Cast()
    for weight in (torch.arange(5000), torch.tensor([1.0, 1e-9]), torch.full((9,), 1e6), torch.zeros(64, 64).bool()):
        assert default_scheme(scheme, weight) == Lossless()
    assert default_scheme(scheme, gaussian(64, 64)) == scheme
    assert applicable(scheme, gaussian(2, 2)) == scheme, "a rule that names a matrix holds, however small"


@pytest.mark.parametrize("spec", SPECS)
def test_the_cost_of_decoding_is_known_before_anything_is_allocated(spec: str) -> None:
    for weight in (matrix(), random_weight(8, 6, 3, 3), gaussian(9)):
        encoded = encode(spec, weight)
        cost = decoder(encoded.scheme).cost(encoded.shape, encoded.dtype, encoded.params)
        assert weight.nbytes <= cost.bytes < 1 << 20
        assert weight.numel() <= cost.operations < 1 << 20


def hostile_params(params: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield parameters that no encoder writes: longer, shorter, and each of `params` huge or negative."""
    yield (*params, 0)
    yield params * 2 + (0,) * 10_000
    yield tuple(range(-1, 10))
    for position in range(len(params)):
        yield params[:position]
        for number in (HUGE, -HUGE, 1 << 31, -(1 << 31), (1 << 63) - 1):
            yield (*params[:position], number, *params[position + 1 :])


@pytest.mark.parametrize("spec", SPECS)
def test_impossible_parameters_are_a_corrupt_file_and_allocate_nothing(spec: str) -> None:
    """Each is refused, or means another form of the same tensor, such as a grid without groups."""
    encoded = encode(spec, matrix())
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


@pytest.mark.parametrize("spec", QUANTIZERS)
def test_quantized_tensors_of_another_kind_are_a_corrupt_file(spec: str) -> None:
    encoded = encode(spec, matrix())
    for shape, dtype in (((24, 33), torch.int64), ((24, 33), torch.bool), ((0, 33), torch.float32)):
        with pytest.raises(ArtifactError):
            decoder(encoded.scheme).layout(shape, dtype, encoded.params)


@pytest.mark.parametrize("spec", SPECS)
def test_layout_and_cost_of_a_huge_tensor_allocate_nothing(spec: str) -> None:
    """A file may name any shape; only what is decoded is checked against the limit of its bytes."""
    encoded = encode(spec, matrix())
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


@pytest.mark.parametrize("spec", SPECS)
def test_any_numbers_in_the_streams_are_refused_or_decoded_to_the_shape_and_dtype(spec: str) -> None:
    """To finite numbers, where the scheme is one of birdie's that quantize."""
    for symbol in [-(1 << 31), -1, 0, 1, (1 << 31) - 1]:
        for weight in (matrix().half(), random_weight(4, 3, 3, 3)):
            encoded = encode(spec, weight)
            layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
            for index in (symbol, 0, 47, -2016, 2047, 2048):
                streams = tuple(
                    np.full((stream.rows, stream.columns), index if stream.hints.role == "scales" else symbol, np.int64)
                    .clip(np.iinfo(stream.dtype).min, np.iinfo(stream.dtype).max)
                    .astype(stream.dtype)
                    for stream in layout
                )
                try:
                    decoded = decode(replace(encoded, streams=streams))
                except ArtifactError:
                    continue
                assert (decoded.shape, decoded.dtype) == (weight.shape, weight.dtype)
                assert bool(decoded.isfinite().all()) or encoded.scheme in ("lossless", "cast", "squares")


def test_a_file_of_every_scheme_loads(tmp_path: Path) -> None:
    state = {f"{index:02d}": few_components(12, 10, 3, 3, seed=index) for index in range(len(SPECS))}
    rules = list(zip(state, SPECS, strict=True))
    summary = birdie.save(state, tmp_path / "m.birdie", scheme=rules, coder="fast")
    loaded = birdie.load(tmp_path / "m.birdie")
    assert {row.scheme for row in summary.tensors} == set(registry.names()) - {"cast"} | {"fp16", "bf16"}
    for name, spec in rules:
        assert torch.equal(loaded[name], decode(encode(spec, state[name]))), spec
