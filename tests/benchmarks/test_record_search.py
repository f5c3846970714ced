"""The search over the record stack's factors: sweeps are interpolated, and the best pair meets the target KL."""

import math
from dataclasses import replace

import pytest

from benchmarks import record_stack
from benchmarks.record_search import EMBEDDING_STEPS, MATRIX_STEPS, Sweep, Tuner
from tests.benchmarks.small_gpt import subject


def test_sweeps_are_interpolated_and_inverted_in_logarithms() -> None:
    steps = (0.1, 0.2, 0.4)
    sweep = Sweep(steps, [3 * step**2 for step in steps], [1000 - 50 * math.log2(step) for step in steps])
    for step in (0.05, 0.1, 0.15, 0.4, 0.7):
        assert sweep.kl_at(step) == pytest.approx(3 * step**2)
        assert sweep.bytes_at(step) == pytest.approx(1000 - 50 * math.log2(step))
        assert sweep.step_for(3 * step**2) == pytest.approx(step)


def test_the_best_pair_divides_the_kl_in_proportion_to_the_weights() -> None:
    model = subject()
    tuner = Tuner(model, record_stack.hessians(model.module, model.calibration, list(model.state)), lambda _: None)
    assert tuner.has_embeddings
    count = dict.fromkeys((True, False), 0)
    for name in tuner.names:
        count[record_stack.is_embedding(name)] += model.state[name].numel()

    def judge(a: float | None, b: float | None) -> tuple[float, float]:
        size = 0.0
        for step, number in ((a, count[False]), (b, count[True])):
            size += 0 if step is None else number * (4 - math.log2(step)) / 8
        return 0.3 * (a or 0) ** 2 + 2 * (b or 0) ** 2, size

    tuner.judge = judge  # type: ignore[method-assign]
    a, b = tuner.tune(0.01)
    assert b is not None
    assert 0.3 * a**2 + 2 * b**2 == pytest.approx(0.01, rel=1e-2)
    # Lagrange condition: d bytes / d KL = weights / KL is equal for both kinds
    share = count[True] / (count[True] + count[False])
    assert 2 * b**2 / 0.01 == pytest.approx(share, rel=0.1)


def test_the_search_measures_the_decoded_tensors() -> None:
    model = subject()
    tuner = Tuner(model, record_stack.hessians(model.module, model.calibration, list(model.state)), lambda _: None)
    fine, coarse = tuner.judge(MATRIX_STEPS[0], EMBEDDING_STEPS[0]), tuner.judge(MATRIX_STEPS[-1], EMBEDDING_STEPS[-1])
    assert 0 < fine[0] < coarse[0]
    assert fine[1] > coarse[1]
    assert tuner.judge(None, EMBEDDING_STEPS[0])[0] < fine[0]
    parts = tuner.parts(0.35, 0.05)
    state = {**model.state, **{name: part.dequantized() for name, part in parts.items()}}
    sample = replace(model, held_out=model.held_out[:1], logits={}, bits=None)
    assert tuner.judge(0.35, 0.05)[0] == sample.measure(state).kl
