"""Context mixing is what the format says for any model and any symbols, and costs what weights are worth."""

from math import erf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import logistic, mixed, mixing, static
from birdie.entropy.mixing import MAX_SIZE, MAX_STEADINESS, Model
from birdie.errors import ArtifactError
from tests.reference import mixing as reference
from tests.reference.streams import near_copies, smooth_kernels

Integers = NDArray[np.integer]
PRIORS = {logistic.GAUSSIAN: "Gaussian", logistic.LOGISTIC: "logistic", logistic.LAPLACE: "Laplace"}


LARGEST = 16 * 15  # the scale of a mean magnitude of MAX_SIZE symbols


@st.composite
def models(draw: st.DrawFn, largest: int = LARGEST) -> Model:
    """Any model with scales up to `largest`."""
    size = draw(st.one_of(st.integers(2, 12), st.integers(2, MAX_SIZE)))
    zero, scale = draw(st.integers(0, size - 1)), draw(st.integers(0, largest))
    steadiness = st.integers(0, MAX_STEADINESS)
    return Model(size, zero, scale, draw(st.sampled_from([*PRIORS])), draw(steadiness), draw(steadiness))


@st.composite
def cases(draw: st.DrawFn, largest: int = LARGEST) -> tuple[Integers, Model]:
    """Symbols about the zero of a model, that need not fit its scale."""
    model = draw(models(largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.5, 4.0, 100.0, 1e4]))
    floats = rng.normal(size=(draw(st.integers(1, 6)), draw(st.integers(1, 12)))) * spread + model.zero
    return np.rint(floats).clip(0, model.size - 1).astype(np.uint16), model


@settings(max_examples=25, deadline=None)
@given(cases())
def test_any_symbols_come_back_from_any_model_by_both_decoders(case: tuple[Integers, Model]) -> None:
    symbols, model = case
    words = mixing.encode(symbols, model)
    out = np.empty_like(symbols)
    mixing.decode(words, model, out)
    assert (out == symbols).all()
    plain = reference.Model(
        model.size, model.zero, model.scale, PRIORS[model.kind], (1 << model.rows, 1 << model.columns)
    )
    assert reference.Chunk(plain, words.tolist()).decode(*symbols.shape) == symbols.tolist()


@settings(max_examples=150, deadline=None)
@given(cases(logistic.SCALES - 1), st.data())
def test_damaged_words_give_an_error_or_symbols_of_the_alphabet(
    case: tuple[Integers, Model], data: st.DataObject
) -> None:
    symbols, model = case
    words = mixing.encode(symbols, model)
    words = words[: data.draw(st.integers(0, words.size))].copy()
    if words.size:
        words[data.draw(st.integers(0, words.size - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    out = np.full(symbols.shape, 0xFFFF, np.uint16)
    try:
        mixing.decode(words, model, out)
    except ArtifactError:
        return
    assert int(out.max()) < model.size


@pytest.mark.parametrize("more", [[0], [5], [1, 0], [0, 0, 7]])
def test_words_that_are_not_needed_are_refused(more: list[int]) -> None:
    rng = np.random.default_rng(0)
    symbols = rng.integers(0, 9, (3, 5)).astype(np.uint16)
    model = Model(9, 4, 130, logistic.GAUSSIAN, 3, 3)
    words = np.concatenate([mixing.encode(symbols, model), np.array(more, np.uint32)])
    with pytest.raises(ArtifactError, match="does not end"):
        mixing.decode(words, model, symbols)


@settings(deadline=None)
@given(models(logistic.SCALES - 1))
def test_the_prior_gives_every_symbol_its_share(model: Model) -> None:
    masses = mixing.masses(model)
    assert masses.shape == (model.size,)
    assert (masses > 0).all()


def cost(values: Integers, kernel: tuple[int, int] = (1, 1)) -> int:
    payload = mixed.encode(values, kernel)
    assert payload is not None
    return len(payload)


def rounded(scales: float | NDArray[np.float64], rows: int, columns: int, seed: int = 0) -> tuple[Integers, float]:
    """Rounded Gaussians with these deviations, and the bytes they are worth to whoever knows the deviations."""
    values = np.rint(np.random.default_rng(seed).normal(size=(rows, columns)) * scales)
    upper, lower = (np.vectorize(erf)((values + side) / (np.sqrt(2) * scales)) for side in (0.5, -0.5))
    return values.astype(np.int32), float(-np.log2((upper - lower) / 2).sum()) / 8


@pytest.mark.parametrize("scale", [1.5, 40.0])
def test_a_gaussian_costs_its_entropy(scale: float) -> None:
    values, worth = rounded(scale, 384, 256)
    assert cost(values) < 1.01 * worth


def test_scales_of_rows_and_columns_are_learned() -> None:
    """Static tables know classes of rows; knowing both scales must beat them, and come near what it is worth."""
    rng = np.random.default_rng(5)
    scales = 6 * np.exp(0.5 * rng.normal(size=(256, 1)) + 0.5 * rng.normal(size=256))
    values, worth = rounded(scales, 256, 256)
    coded = cost(values)
    assert coded < 0.97 * len(static.encode(values, (1, 1)))
    assert coded < 1.03 * worth


def test_small_arrays_have_little_to_learn() -> None:
    for rows, columns in ((1, 1), (4, 4), (16, 16), (32, 32)):
        values, worth = rounded(5.0, rows, columns)
        if values.size > 1:
            assert cost(values) < 1.1 * worth + 24, values.shape


@pytest.mark.parametrize(("values", "kernel"), [(near_copies(), (1, 1)), (smooth_kernels(), (3, 3))])
def test_predictions_are_used_where_they_pay(
    values: Integers, kernel: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_them = cost(values, kernel)
    monkeypatch.setattr(mixed.prediction, "candidates", lambda *_: [])
    assert with_them < 0.9 * cost(values, kernel)


@pytest.mark.parametrize("wide", [600, 1500, 3000])
def test_more_symbols_than_the_tree_holds_leave_low_bits(wide: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, wide, (64, 160)).astype(np.int32)
    payload = mixed.encode(values, (1, 1))
    assert payload is not None
    assert (mixed.decode(payload, 64, 160, np.dtype(np.int32), 1) == values).all()
    assert len(payload) < 1.03 * values.size * np.log2(wide) / 8
