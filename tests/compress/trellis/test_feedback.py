"""Error feedback is the least-squares answer of what is not yet quantized, and survives any matrix it may be given."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.compress.scheme import BlockDiagonal, Sensitivity, TapCovariance
from birdie.compress.trellis.feedback import (
    BLOCK,
    INPUT_DAMPING,
    OUTPUT_DAMPING,
    BlockFeedback,
    Feedback,
    TapFeedback,
    feedback,
)
from birdie.errors import WeightsError

Matrix = NDArray[np.float64]


def fed(factors: Feedback) -> BlockFeedback | TapFeedback:
    assert factors.columns is not None
    return factors.columns


def covariance(size: int, seed: int, rank: int | None = None) -> Matrix:
    """Return the covariance of correlated inputs whose scales differ."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rank or 4 * size, size)) @ (np.eye(size) + 0.4 * rng.normal(size=(size, size)))
    mixed = mixed * np.exp(0.5 * rng.normal(size=size))
    return np.asarray(mixed.T @ mixed / len(mixed))


def damped(matrix: Matrix, share: float) -> Matrix:
    return np.asarray(matrix + np.eye(len(matrix)) * share * matrix.diagonal().mean())


def known(hessian: Matrix | None = None, output: Matrix | None = None) -> Sensitivity:
    as_tensor = [None if matrix is None else torch.from_numpy(matrix) for matrix in (hessian, output)]
    return Sensitivity(as_tensor[0], None if as_tensor[1] is None else as_tensor[1].diagonal(), as_tensor[1])


def smooth(taps: int, seed: int) -> Matrix:
    """Return a covariance of taps with equal variances, as a tap covariance has."""
    matrix = covariance(taps, seed)
    deviation = np.sqrt(matrix.diagonal())
    matrix /= np.outer(deviation, deviation)
    np.fill_diagonal(matrix, 1)
    return matrix


@settings(max_examples=25)
@given(
    channels=st.integers(1, 6),
    taps=st.integers(1, 7),
    shared=st.sampled_from([0.0, 0.1, 0.3, 2.0]),
    block=st.integers(1, 20),
    seed=st.integers(0, 10_000),
)
@example(channels=3, taps=1, shared=0.0, block=2, seed=0)
def test_a_tap_covariance_feeds_back_as_the_matrix_it_stands_for(
    channels: int, taps: int, shared: float, block: int, seed: int
) -> None:
    columns, rng = channels * taps, np.random.default_rng(seed)
    matrix = smooth(taps, seed) + 0.05 * np.eye(taps)
    dense = np.asarray(np.kron(np.eye(channels), matrix) + shared, np.float64)
    share = INPUT_DAMPING * dense.diagonal().mean()
    known_taps = TapCovariance(matrix + np.eye(taps) * share, shared)
    by_taps = feedback(Sensitivity(taps=known_taps), 3, columns)
    by_matrix = feedback(known(dense), 3, columns)
    assert by_taps.order.tolist() == by_matrix.order.tolist() == list(range(columns))
    np.testing.assert_allclose(by_taps.column_weight, by_matrix.column_weight, rtol=1e-6)
    weight = rng.normal(size=(3, columns)).astype(np.float32)
    np.testing.assert_allclose(by_taps.energy(weight), by_matrix.energy(weight), rtol=1e-4)
    assert (by_taps.columns is None) == (not known_taps.correlates), "then there is nothing to feed"
    for start in range(0, columns if known_taps.correlates else 0, block):
        part = slice(start, min(start + block, columns))
        first, second = (np.triu(fed(item).within(part), 1) for item in (by_taps, by_matrix))
        np.testing.assert_allclose(first, second, atol=1e-5)
        errors, left = rng.normal(size=(part.stop - start, 3)).astype(np.float32), weight.T.copy()
        moved = left.copy()
        fed(by_taps).apply(left, part, errors)
        fed(by_matrix).apply(moved, part, errors)
        np.testing.assert_allclose(left, moved, atol=1e-4)


@settings(max_examples=25)
@given(blocks=st.integers(1, 4), size=st.integers(1, 6), part=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_blocks_feed_back_as_the_matrix_with_these_blocks(blocks: int, size: int, part: int, seed: int) -> None:
    columns, rng = blocks * size, np.random.default_rng(seed)
    matrices = [covariance(size, seed + block) for block in range(blocks)]
    matrices = [matrix / matrix.diagonal().mean() for matrix in matrices]  # the same damping
    members = rng.permutation(columns).reshape(blocks, size)
    dense = np.zeros((columns, columns))
    for index, matrix in zip(members, matrices, strict=True):
        dense[np.ix_(index, index)] = matrix
    by_block = feedback(
        Sensitivity(blocks=BlockDiagonal(torch.from_numpy(members), torch.from_numpy(np.stack(matrices)))), 3, columns
    )
    by_matrix = feedback(known(dense), 3, columns)
    assert sorted(by_block.order.tolist()) == list(range(columns))
    np.testing.assert_allclose(by_block.column_weight, by_matrix.column_weight, rtol=1e-6)
    weight = rng.normal(size=(3, columns)).astype(np.float32)
    np.testing.assert_allclose(by_block.energy(weight), by_matrix.energy(weight), rtol=1e-4)

    def complete(item: Feedback) -> Matrix:
        """Return all coefficients in the order of the columns of the matrix."""
        out = np.zeros((columns, columns))
        for start in range(0, columns, part):
            inside = slice(start, min(start + part, columns))
            count = inside.stop - start
            later = np.zeros((columns, count), np.float32)
            fed(item).apply(later, inside, np.eye(count, dtype=np.float32))
            out[np.ix_(item.order[inside], item.order)] -= later.T
            out[np.ix_(item.order[inside], item.order[inside])] += np.triu(fed(item).within(inside), 1)
        return out

    np.testing.assert_allclose(complete(by_block), complete(by_matrix), atol=1e-5)


@settings(max_examples=25)
@given(columns=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_columns_move_to_where_least_squares_puts_them(columns: int, seed: int) -> None:
    """After each column the rest is where it makes tr(E H Eᵀ) least, given what is quantized already."""
    rng = np.random.default_rng(seed)
    weight, hessian = rng.normal(size=(3, columns)), covariance(columns, seed)
    shared = feedback(known(hessian), 3, columns)
    assert shared.columns is not None
    assert sorted(shared.order) == list(range(columns))
    assert (np.diff(hessian.diagonal()[shared.order]) <= 0).all(), "the largest first"
    h = damped(hessian, INPUT_DAMPING)[np.ix_(shared.order, shared.order)]
    start = weight[:, shared.order]
    left, total = start.copy(), 0.0
    for j in range(columns):
        error = left[:, j] - np.rint(left[:, j])
        left[:, j] -= error
        left[:, j + 1 :] -= error[:, None] * fed(shared).within(slice(0, columns))[j, j + 1 :]
        total += float(shared.column_weight[shared.order[j]] * (error**2).sum())
        done, rest = slice(0, j + 1), slice(j + 1, columns)
        if j + 1 < columns:
            best = start[:, rest] + (start[:, done] - left[:, done]) @ h[done, rest] @ np.linalg.inv(h[rest, rest])
            np.testing.assert_allclose(left[:, rest], best, rtol=1e-4, atol=1e-4)
    errors = start - left
    assert np.einsum("ij,jk,ik->", errors, h, errors) == pytest.approx(total, rel=1e-4), "a sum of pivots"


@pytest.mark.parametrize("rows", [BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_rows_below_a_block_move_to_where_least_squares_puts_them(rows: int) -> None:
    rng = np.random.default_rng(rows)
    output = covariance(rows, rows)
    shared = feedback(known(None, output), rows, 4)
    assert shared.columns is None
    g = damped(output, OUTPUT_DAMPING)
    start = rng.normal(size=rows)
    target, total = start.copy(), 0.0
    for first in range(0, rows, BLOCK):
        done, rest = slice(0, min(first + BLOCK, rows)), slice(min(first + BLOCK, rows), rows)
        block = slice(first, done.stop)
        error = target[block] - np.rint(target[block])
        target[block] -= error
        target[rest] -= error @ shared.rows[block, rest]
        schur = g[block, block].copy()
        if rest.stop > rest.start:
            inverse = np.linalg.inv(g[rest, rest])
            best = start[rest] + inverse @ g[rest, done] @ (start[done] - target[done])
            np.testing.assert_allclose(target[rest], best, rtol=1e-4, atol=1e-4)
            schur -= g[block, rest] @ inverse @ g[rest, block]
        np.testing.assert_allclose(shared.row_weight[block], schur.diagonal(), rtol=1e-6)
        total += float(error @ schur @ error)
        assert not shared.rows[block, : block.stop].any(), "within a block the trellis is searched as a whole"
    errors = start - target
    assert errors @ g @ errors == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    "hessian",
    [
        np.zeros((6, 6)),
        np.ones((6, 6)),
        np.diag([0.0, 0, 0, 0, 0, 1e-30]),
        np.diag([1e30, 1e-30, 0, 0, 1, 1]),
        covariance(6, 0, rank=2),
        covariance(6, 1) * np.outer([1, 1, 0, 1, 0, 1], [1, 1, 0, 1, 0, 1]),
        covariance(6, 2) - 3 * np.eye(6),
    ],
    ids=["zero", "ones", "tiny", "far apart", "rank 2", "dead columns", "indefinite"],
)
def test_any_finite_matrix_gives_finite_factors(hessian: Matrix) -> None:
    """Singular ones, dead columns, what rounding made indefinite."""
    original = hessian.copy()
    shared = feedback(known(hessian), 3, 6)
    for values in (fed(shared).within(slice(0, 6)), shared.column_weight):
        assert np.isfinite(values).all()
    assert (shared.column_weight > 0).all()
    assert sorted(shared.order) == list(range(6))
    assert (hessian == original).all()
    wide = np.asarray(np.kron(hessian, np.eye(7)), np.float64)
    rows = feedback(known(None, wide), 42, 2)
    assert np.isfinite(rows.rows).all()
    assert (np.isfinite(rows.row_weight) & (rows.row_weight > 0)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_or_of_another_shape_is_refused(bad: float) -> None:
    rows, columns = BLOCK + 1, 4
    spoilt, output = torch.eye(columns), torch.eye(rows)
    spoilt[1, 2] = output[3, 3] = bad
    cases = [
        (Sensitivity(spoilt), "Hessian"),
        (Sensitivity(torch.eye(columns + 1)), "Hessian"),
        (Sensitivity(torch.ones(columns)), "Hessian"),
        (Sensitivity(None, torch.full((rows,), bad)), "row Fisher"),
        (Sensitivity(None, torch.ones(rows + 1)), "row Fisher"),
        (Sensitivity(None, torch.ones(rows), output), "output covariance"),
        (Sensitivity(None, torch.ones(rows), torch.eye(rows - 1)), "output covariance"),
    ]
    for sensitivity, what in cases:
        with pytest.raises(WeightsError, match=what):
            feedback(sensitivity, rows, columns)
