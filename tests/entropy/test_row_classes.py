"""Rows are sorted into classes by their scale, whatever their order, and the classes come back."""

import numpy as np
import pytest

from birdie.entropy import row_classes
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError


def test_rows_of_two_scales_become_two_classes_narrow_first() -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2, 64).astype(bool)
    symbols = np.rint(rng.normal(100, np.where(wide, 20, 2)[:, None], (64, 200))).clip(0, 199).astype(np.uint16)
    counts = row_classes.histograms(symbols, 200)
    assert (counts.sum(1) == 200).all()
    assert row_classes.cluster(counts, 2).tolist() == wide.astype(int).tolist()


def test_classes_come_back_unless_there_are_too_many() -> None:
    classes = np.array([0, 0, 3, 1, 3], np.uint8)
    writer = SideWriter()
    row_classes.put(writer, classes)
    words = writer.finish()
    assert row_classes.take(SideReader(words), 5, 4).tolist() == classes.tolist()
    with pytest.raises(ArtifactError, match="class 3 of 3"):
        row_classes.take(SideReader(words), 5, 3)
