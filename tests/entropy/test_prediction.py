"""Predictions are undone exactly whatever their weights, use only earlier symbols, and are found where they pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import mixed, prediction, static
from birdie.entropy.prediction import MAX_KERNEL, MAX_WEIGHT, REFERENCES, Prediction, RowPrediction, TapPrediction
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError
from tests.reference import prediction as reference
from tests.reference.side_information import Bits
from tests.reference.streams import near_copies, smooth_kernels

Symbols = NDArray[np.uint16]
SIDES = st.tuples(st.integers(1, 8), st.integers(1, 8))


@st.composite
def predictions(draw: st.DrawFn, rows: int) -> Prediction:
    """Any prediction of an array with `rows` rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()):
        distances = rng.integers(0, np.arange(rows)[:, None] + 1, (rows, REFERENCES))
        weights = rng.integers(-MAX_WEIGHT, MAX_WEIGHT + 1, (rows, REFERENCES + 1))
        weights[rng.random(weights.shape) > share] = 0
        weights[:, 1:][distances == 0] = 0
        return RowPrediction(distances.astype(np.int64), weights.astype(np.int64))
    kernel = draw(SIDES)
    shape = kernel[0] * kernel[1], len(prediction.tap_offsets(kernel))
    weights = rng.integers(-MAX_WEIGHT, MAX_WEIGHT + 1, shape)
    weights[rng.random(shape) > share] = 0
    return TapPrediction(kernel, weights.astype(np.int64))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Symbols, Prediction, int, int]:
    """Symbols, a prediction of them, the zero, and the size of the alphabet."""
    rows, columns, size = draw(st.integers(1, 12)), draw(st.integers(1, 20)), draw(st.integers(2, 4096))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    symbols = rng.integers(0, size, (rows, columns)).astype(np.uint16)
    return symbols, draw(predictions(rows)), draw(st.integers(0, size - 1)), size


@settings(max_examples=50, deadline=None)
@given(cases())
def test_adding_undoes_subtracting(case: tuple[Symbols, Prediction, int, int]) -> None:
    symbols, predictor, zero, size = case
    original = symbols.copy()
    residuals = predictor.subtract(symbols, zero, size)
    assert (symbols == original).all()
    assert int(residuals.max()) < size
    assert (predictor.add(residuals, zero, size) == symbols).all()


@settings(max_examples=50, deadline=None)
@given(cases(), st.data())
def test_a_residual_depends_on_no_later_symbol(case: tuple[Symbols, Prediction, int, int], data: st.DataObject) -> None:
    symbols, predictor, zero, size = case
    index = data.draw(st.integers(0, symbols.size - 1))
    changed = symbols.copy()
    changed.reshape(-1)[index] = (int(changed.reshape(-1)[index]) + data.draw(st.integers(1, size - 1))) % size
    one, two = (predictor.subtract(array, zero, size).ravel() for array in (symbols, changed))
    assert (one[:index] == two[:index]).all()
    assert one[index] != two[index]


@settings(max_examples=25, deadline=None)
@given(cases())
def test_side_information_and_residuals_are_those_of_the_format(case: tuple[Symbols, Prediction, int, int]) -> None:
    symbols, predictor, zero, size = case
    writer = SideWriter()
    prediction.put(writer, predictor)
    words = writer.finish()
    reader = SideReader(words)
    taken = prediction.take(reader, len(symbols), prediction.MIN_COLUMNS)
    reader.finish()
    assert taken is not None
    residuals = predictor.subtract(symbols, zero, size)
    assert (taken.subtract(symbols, zero, size) == residuals).all()
    predicted = reference.take(Bits(words.tolist()), len(symbols))
    assert reference.add(predicted, residuals.tolist(), zero, size) == symbols.tolist()


def written_rows(first: list[int], weight: int) -> SideWriter:
    """Side information of rows with these first distances."""
    writer = SideWriter()
    distances = np.zeros((len(first), REFERENCES), np.int64)
    distances[:, 0] = first
    prediction.put(writer, RowPrediction(distances, np.full((len(first), REFERENCES + 1), weight)))
    return writer


def written_taps(kernel: tuple[int, int], weight: int) -> SideWriter:
    writer = SideWriter()
    shape = kernel[0] * kernel[1], len(prediction.tap_offsets(kernel))
    prediction.put(writer, TapPrediction(kernel, np.full(shape, weight)))
    return writer


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (written_rows([0, 2, 1], 3), "above the first"),
        (written_rows([1, 0, 0], 3), "above the first"),
        (written_rows([0, 1, 2], MAX_WEIGHT + 1), f"±{MAX_WEIGHT}"),
        (written_taps((3, 3), -MAX_WEIGHT - 1), f"±{MAX_WEIGHT}"),
        (written_taps((5, MAX_KERNEL // 5 + 1), 1), "5 × 13"),
        (written_taps((MAX_KERNEL + 1, 1), 1), "side of a kernel"),
    ],
)
def test_side_information_out_of_range_is_refused(writer: SideWriter, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        prediction.take(SideReader(writer.finish()), 3, prediction.MIN_COLUMNS)


def test_rows_too_short_for_references_have_none() -> None:
    words = written_rows([0, 1, 2], 3).finish()
    assert isinstance(prediction.take(SideReader(words), 3, prediction.MIN_COLUMNS), RowPrediction)
    with pytest.raises(ArtifactError, match=f"rows of {prediction.MIN_COLUMNS - 1}"):
        prediction.take(SideReader(words), 3, prediction.MIN_COLUMNS - 1)


@pytest.mark.parametrize(
    ("values", "kernel"), [(near_copies(), (1, 1)), (smooth_kernels(), (3, 3)), (smooth_kernels(side=5), (5, 5))]
)
def test_structure_is_found_and_its_residuals_are_narrower(
    values: NDArray[np.integer], kernel: tuple[int, int]
) -> None:
    zero, size = -int(values.min()), int(values.max() - values.min()) + 1
    symbols = (values + zero).astype(np.uint16)
    (predictor,) = prediction.candidates(symbols, zero, kernel)
    residuals = predictor.subtract(symbols, zero, size).astype(np.int64) - size // 2
    assert float(np.abs(residuals).mean()) < 0.5 * float(np.abs(values).mean())


def test_noise_costs_no_more_for_seeming_predictable(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(-15, 16, (24, 108))
    for encode in (mixed.encode, static.encode):
        searched = [len(encode(noise, kernel) or b"") for kernel in ((3, 3), (1, 1))]
        with monkeypatch.context() as patch:
            patch.setattr(prediction, "candidates", lambda *_: [])
            plain = len(encode(noise, (1, 1)) or b"")
        assert max(searched) <= plain + 4
