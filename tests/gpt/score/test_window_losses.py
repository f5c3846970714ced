"""Windows over a stream: every target is scored once, with the context that the layout promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.gpt.score.window_losses import Windows, per_document, sliding

SIZES = st.integers(1, 60).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


def times_scored(windows: Windows, targets: int) -> np.ndarray:
    times = np.zeros(targets, dtype=int)
    for first, stop in zip(windows.firsts, windows.stops, strict=True):
        times[first:stop] += 1
    return times


@settings(max_examples=50)
@given(st.integers(0, 400), SIZES)
def test_sliding_scores_every_target_once(targets: int, size: tuple[int, int]) -> None:
    length, stride = size
    windows = sliding(targets, length, stride)
    assert (times_scored(windows, targets) == 1).all()
    assert windows.scored == targets
    assert (windows.begins <= windows.firsts).all()
    assert (windows.firsts < windows.stops).all()
    assert (windows.stops - windows.begins <= length).all()


@given(st.integers(1, 400), SIZES)
def test_targets_have_their_context(targets: int, size: tuple[int, int]) -> None:
    length, stride = size
    windows = sliding(targets, length, stride)
    context = windows.firsts - windows.begins + 1  # inputs that the first scored target of a window has
    assert (context[1:] == length - stride + 1).all()


@given(st.integers(1, 400), SIZES)
def test_windows_are_those_of_the_records(targets: int, size: tuple[int, int]) -> None:
    """Windows start every S tokens, and are kept if first, or if their position T − S is a target."""
    length, stride = size
    kept = [w for w in range(0, targets, stride) if w == 0 or w + length - stride < targets]
    windows = sliding(targets, length, stride)
    assert windows.begins.tolist() == kept
    assert windows.stops.tolist() == [min(w + length, targets) for w in kept]
    assert windows.firsts.tolist() == [0 if w == 0 else w + length - stride for w in kept]


@settings(max_examples=50)
@given(st.integers(1, 300), st.sets(st.integers(0, 310)), SIZES)
def test_each_document_has_sliding_windows_of_its_own(targets: int, begins: set[int], size: tuple[int, int]) -> None:
    windows = per_document(np.array(sorted(begins), dtype=np.int64), targets, *size)
    assert (times_scored(windows, targets) == 1).all()
    edges = sorted({0, targets} | {b for b in begins if b < targets})
    expected = []
    for begin, end in itertools.pairwise(edges):
        alone = sliding(end - begin, *size)
        parts = (alone.begins, alone.firsts, alone.stops)
        expected += [tuple(begin + int(x) for x in row) for row in zip(*parts, strict=True)]
    rows = zip(windows.begins, windows.firsts, windows.stops, strict=True)
    assert [tuple(map(int, row)) for row in rows] == expected


@given(st.integers(0, 400), SIZES, st.integers(1, 9), st.integers(1, 500))
def test_ranks_and_batches_share_without_loss(targets: int, size: tuple[int, int], ranks: int, tokens: int) -> None:
    windows = sliding(targets, *size)
    shares = [windows.share(rank, ranks) for rank in range(ranks)]
    numbers = [len(share) for share in shares]
    assert max(numbers) - min(numbers) <= 1
    times = np.zeros(targets, dtype=int)
    for share in shares:
        for batch in share.by_shape().batches(tokens):
            assert len(set((batch.stops - batch.begins).tolist())) == 1
            assert len(set((batch.stops - batch.firsts).tolist())) == 1
            assert len(batch) == 1 or batch.inputs <= tokens
            times += times_scored(batch, targets)
    assert (times == 1).all()


@pytest.mark.parametrize(("length", "stride"), [(0, 0), (8, 0), (8, 9), (8, -1)])
def test_a_stride_that_leaves_gaps_is_refused(length: int, stride: int) -> None:
    with pytest.raises(ConfigError, match=str(length)):
        sliding(100, length, stride)
