"""Scans: permutations, undone; Morton's curve as its bits say, for any number of axes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.schemes.spectral import LAYOUTS, ORDERS, Scan, morton, points_of, raster
from birdie.compress.spectral.inverse import KINDS, Axes

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


def test_morton_knows_no_64_bits() -> None:
    """Twenty axes of sixteen bits are 320 bits of code."""
    points = np.random.default_rng(0).integers(0, 1 << 16, (500, 20))

    def code(point: np.ndarray) -> int:
        return int("".join(str(int(part) >> bit & 1) for bit in reversed(range(16)) for part in point), 2)

    codes = [code(points[index]) for index in morton(points)]
    assert codes == sorted(codes)


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


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_planes_and_columns_of_blocks_have_one_class(order: str) -> None:
    """Coefficients of one scale lie together, and the lowest frequencies come first."""
    axes, shape = Axes("dct", 4, 1), (8, 12, 3, 3)
    classes = np.stack(np.meshgrid(*axes.classes(shape), indexing="ij"), axis=-1)
    numbers = np.ravel_multi_index(tuple(np.moveaxis(classes, -1, 0)), axes.counts(shape))
    blocks = Scan("blocks", order).arrange(numbers, axes)
    assert (blocks == blocks[:1]).all()
    assert sorted(blocks[0].tolist()) == list(range(4 * 4 * 3 * 3))
    planes = Scan("planes", order).arrange(np.ascontiguousarray(classes[..., 0]), axes)
    assert (planes == planes[:, :1]).all()
    kernel = Scan("planes", order).arrange(np.ascontiguousarray(classes[..., 2] * 3 + classes[..., 3]), axes)
    assert (kernel.reshape(9, -1) == kernel.reshape(9, -1)[:, :1]).all()
    assert kernel[0, 0] == 0
    assert kernel[-1, -1] == 8
