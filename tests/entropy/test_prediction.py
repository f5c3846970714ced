"""Predictions are undone exactly whatever their weights, look only back, and are found where they pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import mixed, prediction, static
from birdie.entropy.numbers import Reader, Writer
from birdie.entropy.prediction import MAX_KERNEL, MOST_WEIGHT, REFERENCES, Prediction, Rows, Taps
from birdie.errors import ArtifactError
from tests.reference import prediction as reference
from tests.reference.numbers import Bits
from tests.reference.streams import near_copies, smooth_kernels

Symbols = NDArray[np.uint16]
SIDES = st.tuples(st.integers(1, 8), st.integers(1, 8))
WEIGHTS = st.integers(-MOST_WEIGHT, MOST_WEIGHT)


@st.composite
def predictions(draw: st.DrawFn, rows: int) -> Prediction:
    """Any prediction of an array with so many rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()):
        distances = rng.integers(0, np.arange(rows)[:, None] + 1, (rows, REFERENCES))
        weights = rng.integers(-MOST_WEIGHT, MOST_WEIGHT + 1, (rows, REFERENCES + 1))
        weights[rng.random(weights.shape) > share] = 0
        weights[:, 1:][distances == 0] = 0
        return Rows(distances.astype(np.int64), weights.astype(np.int64))
    kernel = draw(SIDES)
    shape = kernel[0] * kernel[1], len(prediction.places(kernel))
    weights = rng.integers(-MOST_WEIGHT, MOST_WEIGHT + 1, shape)
    weights[rng.random(shape) > share] = 0
    return Taps(kernel, weights.astype(np.int64))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Symbols, Prediction, int, int]:
    """Symbols, a prediction of them, the zero, and the size of the alphabet."""
    rows, columns, size = draw(st.integers(1, 12)), draw(st.integers(1, 20)), draw(st.integers(2, 4096))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    symbols = rng.integers(0, size, (rows, columns)).astype(np.uint16)
    return symbols, draw(predictions(rows)), draw(st.integers(0, size - 1)), size


@settings(max_examples=150, deadline=None)
@given(cases())
def test_adding_undoes_subtracting(case: tuple[Symbols, Prediction, int, int]) -> None:
    symbols, predicted, zero, size = case
    before = symbols.copy()
    left = predicted.subtract(symbols, zero, size)
    assert (symbols == before).all()
    assert int(left.max()) < size
    assert (predicted.add(left, zero, size) == symbols).all()


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_a_difference_depends_on_nothing_that_comes_later(
    case: tuple[Symbols, Prediction, int, int], data: st.DataObject
) -> None:
    symbols, predicted, zero, size = case
    place = data.draw(st.integers(0, symbols.size - 1))
    after = symbols.copy()
    after.reshape(-1)[place] = (int(after.reshape(-1)[place]) + data.draw(st.integers(1, size - 1))) % size
    one, two = (predicted.subtract(each, zero, size).ravel() for each in (symbols, after))
    assert (one[:place] == two[:place]).all()
    assert one[place] != two[place]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_descriptions_and_symbols_are_those_of_the_format(case: tuple[Symbols, Prediction, int, int]) -> None:
    symbols, predicted, zero, size = case
    writer = Writer()
    prediction.put(writer, predicted)
    words = writer.finish()
    reader = Reader(words)
    taken = prediction.take(reader, len(symbols), prediction.MIN_COLUMNS)
    reader.finish()
    assert taken is not None
    left = predicted.subtract(symbols, zero, size)
    assert (taken.subtract(symbols, zero, size) == left).all()
    foretold = reference.take(Bits(words.tolist()), len(symbols))
    assert reference.add(foretold, left.tolist(), zero, size) == symbols.tolist()


@given(SIDES)
def test_taps_look_back(kernel: tuple[int, int]) -> None:
    places = prediction.places(kernel)
    assert len(set(places)) == len(places)
    assert all(place > (0, 0) for place in places)


def rows_put(distances: list[int], weight: int) -> Writer:
    writer = Writer()
    found = np.zeros((len(distances), REFERENCES), np.int64)
    found[:, 0] = distances
    prediction.put(writer, Rows(found, np.full((len(distances), REFERENCES + 1), weight)))
    return writer


def taps_put(kernel: tuple[int, int], weight: int) -> Writer:
    writer = Writer()
    shape = kernel[0] * kernel[1], len(prediction.places(kernel))
    prediction.put(writer, Taps(kernel, np.full(shape, weight)))
    return writer


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        (rows_put([0, 2, 1], 3), "before the first"),
        (rows_put([1, 0, 0], 3), "before the first"),
        (rows_put([0, 1, 2], MOST_WEIGHT + 1), "beyond"),
        (taps_put((3, 3), -MOST_WEIGHT - 1), "beyond"),
        (taps_put((5, MAX_KERNEL // 5 + 1), 1), "kernel of 5 × 13"),
        (taps_put((MAX_KERNEL + 1, 1), 1), "side of a kernel"),
    ],
)
def test_what_no_encoder_writes_is_refused(writer: Writer, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        prediction.take(Reader(writer.finish()), 3, prediction.MIN_COLUMNS)


def test_rows_too_short_for_references_have_none() -> None:
    words = rows_put([0, 1, 2], 3).finish()
    assert isinstance(prediction.take(Reader(words), 3, prediction.MIN_COLUMNS), Rows)
    with pytest.raises(ArtifactError, match="foretold"):
        prediction.take(Reader(words), 3, prediction.MIN_COLUMNS - 1)


@pytest.mark.parametrize(
    ("values", "kernel"), [(near_copies(), (1, 1)), (smooth_kernels(), (3, 3)), (smooth_kernels(side=5), (5, 5))]
)
def test_structure_is_found_and_its_differences_are_narrower(
    values: NDArray[np.integer], kernel: tuple[int, int]
) -> None:
    zero, size = -int(values.min()), int(values.max() - values.min()) + 1
    symbols = (values + zero).astype(np.uint16)
    (found,) = prediction.candidates(symbols, zero, kernel)
    left = found.subtract(symbols, zero, size).astype(np.int64) - size // 2
    assert float(np.abs(left).mean()) < 0.5 * float(np.abs(values).mean())


def test_noise_costs_no_more_for_what_it_seems_to_foretell(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(-15, 16, (24, 108))
    for write in (mixed.encode, static.encode):
        sought = [len(write(noise, kernel) or b"") for kernel in ((3, 3), (1, 1))]
        with monkeypatch.context() as patch:
            patch.setattr(prediction, "candidates", lambda *_: [])
            plain = len(write(noise, (1, 1)) or b"")
        assert max(sought) <= plain + 4
