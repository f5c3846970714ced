"""Row-class ANS: lossless, smaller than one table where rows differ, and its tables are valid."""

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import row_class_ans


def test_row_class_ans_is_lossless() -> None:
    random = np.random.default_rng(0)
    scales = random.choice([0.5, 3.0, 40.0], (200, 1))
    arrays: list[NDArray[np.integer]] = [
        np.rint(scales * random.standard_normal((200, 37))).astype(np.int16),
        np.full((3, 5), 7, np.int8),
        random.integers(-300, 300, (9, 1)).astype(np.int16),
    ]
    coded = row_class_ans.encode(arrays)
    decoded = row_class_ans.decode(coded, [array.shape for array in arrays])
    assert all(np.array_equal(restored, array) for restored, array in zip(decoded, arrays, strict=True))
    longer = row_class_ans.Encoded(coded.side, np.append(coded.words, np.uint32(1)))
    with pytest.raises(ValueError, match="end"):
        row_class_ans.decode(longer, [array.shape for array in arrays])


def test_row_classes_are_smaller_than_one_table_where_rows_differ() -> None:
    random = np.random.default_rng(1)
    scales = np.repeat([1.0, 4.0, 16.0, 40.0], 256)[:, None]
    values = np.rint(scales * random.standard_normal((1024, 128))).astype(np.int16)
    counts = np.bincount((values - values.min()).ravel())
    probabilities = counts[counts > 0] / values.size
    pooled = -(probabilities * np.log2(probabilities)).sum() * values.size / 8
    rows = [values[start : start + 256] for start in range(0, 1024, 256)]
    separate = 0.0
    for part in rows:
        probabilities = np.unique(part, return_counts=True)[1] / part.size
        separate += -(probabilities * np.log2(probabilities)).sum() * part.size / 8
    size = row_class_ans.encode([values]).size
    assert separate < size < 0.9 * pooled


@pytest.mark.parametrize("precision", [6, 12])
def test_tables_sum_to_their_precision_and_include_every_symbol(precision: int) -> None:
    counts = np.array([0, 1, 1, 100_000, 3, 0, 1, 50_000, 1, 1])
    table = row_class_ans.normalized(counts, precision)
    assert table.sum() == 1 << precision
    assert ((table > 0) == (counts > 0)).all()
