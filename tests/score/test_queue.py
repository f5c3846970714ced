"""Documents in a queue: every place once, longest first; every batch to one rank, and the ranks equally busy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from birdie.score.queue import dealt, queue

BOS = 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=80), st.integers(1, 9))
def test_every_place_is_in_one_document(drawn: list[int], size: int) -> None:
    tokens = np.array(drawn, np.uint16)
    found = queue(tokens, BOS, size)
    places = [
        place for number in range(len(found)) for d in zip(*found.batch(number), strict=True) for place in range(*d)
    ]
    assert sorted(places) == list(range(len(tokens) - 1))
    lengths = found.stops - found.begins
    assert (lengths > 0).all()
    assert (np.diff(lengths) <= 0).all()
    for begin, stop in zip(found.begins, found.stops, strict=True):
        assert begin == 0 or tokens[begin] == BOS
        assert BOS not in tokens[begin + 1 : stop]
        assert stop == len(tokens) - 1 or tokens[stop] == BOS


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 20), st.integers(0, 20))
def test_the_cost_is_what_passes_the_model(lengths: list[int], size: int, chunk: int, more: int) -> None:
    tokens = np.concatenate([[BOS] + [2] * (n - 1) for n in lengths] + [[BOS]])
    found, context = queue(tokens, BOS, size), chunk + more
    for number in range(len(found)):
        begins, stops = found.batch(number)
        expected = sum(min(first + chunk, context) for n in (stops - begins).tolist() for first in range(0, n, chunk))
        assert found.cost(number, chunk, context) == expected


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_batches_are_dealt_once_and_evenly(costs: list[int], size: int) -> None:
    costs.sort(reverse=True)
    shares = [dealt(costs, rank, size) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    loads = [sum(costs[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
