"""Spectral schemes: transforms pay where they are taken, and scans are orders that are undone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.log_scales import scales_of
from birdie.compress.registry import decode
from birdie.compress.schemes.grid import MAX_SYMBOL
from birdie.compress.schemes.spectral import (
    LAYOUTS,
    ORDERS,
    SCANS,
    Scan,
    Spectral,
    best_scan,
    best_transform,
    encode_symbols,
    morton,
    points_of,
    raster,
    scan_named,
)
from birdie.compress.spectral.inverse import KINDS, Axes, cosines
from birdie.compress.spectral.transforms import Transform
from birdie.entropy import coder
from birdie.errors import ConfigError
from tests.compress.matrices import DTYPES, gaussian, smooth_kernels, squared_error

SHAPES = [(1, 1), (9,), (7, 5), (40, 33), (64, 24), (6, 4, 3, 3), (16, 8, 5), (2, 3, 4, 3, 3)]
TRANSFORMS = [
    *(Transform(kind) for kind in KINDS),
    *(Transform("dct", axes="kernel"), Transform("dct", 4), Transform("wavelet97", levels=9)),
]


@settings(max_examples=25)
@given(
    shape=st.sampled_from(SHAPES),
    transform=st.sampled_from(TRANSFORMS),
    scan=st.sampled_from(SCANS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_trained_coefficients_come_back(
    shape: tuple[int, ...], transform: Transform, scan: str, dtype: torch.dtype, seed: int
) -> None:
    """The decoded weight is the inverse of symbol · scale of its class, whatever the scan."""
    axes, rng = transform.plan, np.random.default_rng(seed)
    if not scan_named(scan).fits(shape, axes):
        with pytest.raises(ConfigError, match="evenly"):
            encode_symbols(shape, dtype, np.zeros(shape, int), np.zeros((), int), transform, scan)
        return
    symbols = rng.integers(-40, 41, shape)
    indices = rng.integers(-160, 0, axes.counts(shape))
    encoded = encode_symbols(shape, dtype, symbols, indices, transform, scan)
    wide = torch.from_numpy(scales_of(indices)).double()
    for axis, classes in enumerate(transform.classes(shape)):
        wide = wide.index_select(axis, classes)
    expected = transform.inverse(torch.from_numpy(symbols).double() * wide)
    back = decode(encoded)
    assert (back.shape, back.dtype) == (torch.Size(shape), dtype)
    torch.testing.assert_close(back, expected.float().to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    if transform.kind == "identity":
        assert torch.equal(back, (torch.from_numpy(symbols).float() * wide.float()).to(dtype))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_leaves_the_error_of_the_plain_grid(transform: Transform) -> None:
    weight = gaussian(48, 40)
    for sigma in (0.2, 0.8):
        plain = squared_error(weight, Spectral(Transform("identity"), sigma).encode("w", weight))
        transformed = squared_error(weight, Spectral(transform, sigma).encode("w", weight))
        assert abs(math.log2(transformed / plain)) < 0.15  # scales come in sixteenths of an octave


def test_auto_takes_the_identity_for_noise_and_a_transform_where_it_pays() -> None:
    noisy = gaussian(48, 64)
    assert best_transform(noisy, 0.995).kind == "identity"
    assert Spectral(sigma=0.5).encode("w", noisy).params[0] == KINDS.index("identity")
    smooth = smooth_kernels(24, 16, 3, 3)
    transform = best_transform(smooth, 0.995)
    assert (transform.kind, transform.axes) == ("dct", "kernel")
    plain, chosen = (
        len(coder.encode(Spectral(option, 0.5).encode("w", smooth).streams[0]).payload)
        for option in (Transform("identity"), "auto")
    )
    assert chosen < 0.8 * plain
    assert best_transform(torch.zeros(64, 64), 0.995).kind == "identity"


def test_the_cheapest_scan_is_taken() -> None:
    rng, transform = np.random.default_rng(0), Transform(axes="kernel")
    widths = np.array([[40, 9, 2], [9, 2, 1], [2, 1, 0.3]])
    symbols = np.rint(rng.standard_normal((16, 16, 3, 3)) * widths).astype(np.int32)
    chosen = best_scan(symbols, transform.plan)

    def size(scan: str) -> int:
        encoded = encode_symbols(symbols.shape, torch.float32, symbols, np.zeros((), int), transform, scan)
        return len(coder.encode(encoded.streams[0]).payload)

    assert size("auto") == min(size(scan) for scan in SCANS)
    assert chosen.layout != "none"


def test_transforms_scans_and_coefficients_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="'haar'"):
        Spectral("haar")
    with pytest.raises(ConfigError, match="scan 'snake'"):
        Spectral(scan="snake")
    zeros, transform = np.zeros((4, 6), int), Transform(edge=2)
    with pytest.raises(ConfigError, match="do not fit"):
        encode_symbols((4, 6), torch.float32, zeros, np.zeros((4, 6), int), transform)
    with pytest.raises(ConfigError, match="beyond"):
        encode_symbols((4, 6), torch.float32, zeros + MAX_SYMBOL + 1, np.zeros((), int), transform)
    with pytest.raises(ConfigError, match="scale index"):
        encode_symbols((4, 6), torch.float32, zeros, np.full((2, 2), 9999), transform)


def test_a_block_is_the_sum_that_the_format_describes() -> None:
    """Frequencies rise and axes run from the last to the first, in float64; here in plain Python."""
    transform, shape = Transform("dct", 3), (3, 3)
    symbols = np.array([[5, -2, 1], [3, 0, -1], [1, 2, 4]])
    decoded = decode(encode_symbols(shape, torch.float64, symbols, np.full((), -33), transform, "none")).numpy()
    basis, scale = cosines(3).tolist(), float(scales_of(np.array(-33)))
    block = [[float(symbol) * scale for symbol in row] for row in symbols.tolist()]
    for axis in (1, 0):
        lines = block if axis == 1 else [list(line) for line in zip(*block, strict=True)]
        inverted = []
        for line in lines:
            total = [basis[0][sample] * line[0] for sample in range(3)]
            for k in (1, 2):
                total = [total[sample] + basis[k][sample] * line[k] for sample in range(3)]
            inverted.append(total)
        block = inverted if axis == 1 else [list(line) for line in zip(*inverted, strict=True)]
    np.testing.assert_array_equal(decoded, np.array(block).astype(np.float32).astype(np.float64))


SIZES = st.lists(st.integers(1, 7), min_size=0, max_size=5).map(tuple)


def block(*sizes: int) -> np.ndarray:
    return points_of(tuple(np.arange(size) for size in sizes))


@settings(max_examples=25)
@given(sizes=SIZES)
def test_orders_are_permutations(sizes: tuple[int, ...]) -> None:
    points = block(*sizes)
    for order in (raster, morton):
        assert sorted(order(points)) == list(range(len(points)))
    assert list(raster(points)) == list(range(len(points)))


@settings(max_examples=25)
@given(sizes=SIZES.filter(len))
def test_morton_rises_in_interleaved_bits(sizes: tuple[int, ...]) -> None:
    """Python integers of any length are the reference."""

    def code(point: np.ndarray) -> int:
        bits = [f"{int(part):04b}" for part in point]
        return int("".join("".join(column) for column in zip(*bits, strict=True)), 2)

    points = block(*sizes)
    codes = [code(points[index]) for index in morton(points)]
    assert codes == sorted(set(codes))


@settings(max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 9]), min_size=0, max_size=5).map(tuple),
    scan=st.builds(Scan, st.sampled_from(LAYOUTS), st.sampled_from(ORDERS)),
    axes=st.builds(Axes, st.sampled_from(KINDS), st.sampled_from([2, 4]), st.integers(1, 3), st.booleans()),
)
def test_layouts_are_undone(sizes: tuple[int, ...], scan: Scan, axes: Axes) -> None:
    if not scan.fits(sizes, axes):
        assert scan.layout == "blocks"
        return
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    matrix = scan.arrange(numbers, axes)
    assert matrix.shape == scan.matrix(sizes, axes)
    assert sorted(matrix.ravel().tolist()) == list(range(numbers.size))
    np.testing.assert_array_equal(scan.restore(matrix, sizes, axes), numbers)
