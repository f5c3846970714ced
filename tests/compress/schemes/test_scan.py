"""Scans: permutations, undone; Morton's curve as its bits say, for any number of axes."""

import numpy as np
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
