"""Context mixing agrees with the reference decoder for any model and any symbols, and refuses damaged words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import context_mixing, mixing_tables
from birdie.entropy.context_mixing import MAX_LOG_PSEUDO_COUNT, MAX_SIZE, Model
from birdie.errors import ArtifactError
from tests.reference import context_mixing as reference

Integers = NDArray[np.integer]
PRIORS = {mixing_tables.GAUSSIAN: "Gaussian", mixing_tables.LOGISTIC: "logistic", mixing_tables.LAPLACE: "Laplace"}
LARGEST = 16 * 15  # the scale of a mean magnitude of MAX_SIZE symbols


@st.composite
def models(draw: st.DrawFn, largest: int = LARGEST) -> Model:
    """Any model with scales up to `largest`."""
    size = draw(st.one_of(st.integers(2, 12), st.integers(2, MAX_SIZE)))
    zero, scale = draw(st.integers(0, size - 1)), draw(st.integers(0, largest))
    log_pseudo_count = st.integers(0, MAX_LOG_PSEUDO_COUNT)
    prior = draw(st.sampled_from([*PRIORS]))
    return Model(size, zero, scale, prior, draw(log_pseudo_count), draw(log_pseudo_count))


@st.composite
def cases(draw: st.DrawFn, largest: int = LARGEST) -> tuple[NDArray[np.uint16], Model]:
    """Symbols around the zero of a model, which need not fit its scale."""
    model = draw(models(largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.5, 4.0, 100.0, 1e4]))
    floats = rng.normal(size=(draw(st.integers(1, 6)), draw(st.integers(1, 12)))) * spread + model.zero
    return np.rint(floats).clip(0, model.size - 1).astype(np.uint16), model


@settings(max_examples=25, deadline=None)
@given(cases())
def test_any_symbols_come_back_from_any_model_by_both_decoders(case: tuple[NDArray[np.uint16], Model]) -> None:
    symbols, model = case
    words = context_mixing.encode(symbols, model)
    out = np.empty_like(symbols)
    context_mixing.decode(words, model, out)
    assert (out == symbols).all()
    pseudo_counts = 1 << model.row_log_pseudo_count, 1 << model.column_log_pseudo_count
    plain = reference.Model(model.size, model.zero, model.scale, PRIORS[model.prior], pseudo_counts)
    assert reference.Chunk(plain, words.tolist()).decode(*symbols.shape) == symbols.tolist()


@settings(max_examples=50, deadline=None)
@given(cases(mixing_tables.SCALES - 1), st.data())
def test_damaged_words_give_an_error_or_symbols_of_the_alphabet(
    case: tuple[NDArray[np.uint16], Model], data: st.DataObject
) -> None:
    symbols, model = case
    words = context_mixing.encode(symbols, model)
    words = words[: data.draw(st.integers(0, words.size))].copy()
    if words.size:
        words[data.draw(st.integers(0, words.size - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    out = np.full(symbols.shape, 0xFFFF, np.uint16)
    try:
        context_mixing.decode(words, model, out)
    except ArtifactError:
        return
    assert int(out.max()) < model.size


@pytest.mark.parametrize("more", [[0], [5], [1, 0], [0, 0, 7]])
def test_needless_words_are_refused(more: list[int]) -> None:
    rng = np.random.default_rng(0)
    symbols = rng.integers(0, 9, (3, 5)).astype(np.uint16)
    model = Model(9, 4, 130, mixing_tables.GAUSSIAN, 3, 3)
    words = np.concatenate([context_mixing.encode(symbols, model), np.array(more, np.uint32)])
    with pytest.raises(ArtifactError):
        context_mixing.decode(words, model, symbols)
