"""Hints come from revealed tokens alone, are what the definition says, and never from a collision."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tests
from hypothesis import strategies as st

from birdie.errors import ConfigError, DataError
from birdie.score.ngram import RECORDS, Memory, TiltSettings, _nothing_known, hints

SMALL = TiltSettings(orders=(3, 2, 1), table_bits=14)  # no two contexts of four tokens share a place
streams = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def by_definition(tokens: list[int], settings: TiltSettings) -> list[tuple[int, int]]:
    """Hint and bucket after each token, from dictionaries of whole contexts."""
    orders = sorted(settings.orders)
    tables: dict[tuple[int, ...], list[int]] = {}
    rates: dict[int, list[float]] = defaultdict(lambda: [0.6, 2.0])
    said: dict[tuple[int, ...], tuple[int, int]] = {}
    answer = []
    for i, token in enumerate(tokens):
        for context, (candidate, bucket) in said.items():
            rates[bucket][0] += candidate == token
            rates[bucket][1] += 1
            entry = tables[context]
            if candidate == token:
                entry[1] = min(entry[1] + 1, 255)
                entry[2] = entry[2] // 2 + 1 if entry[2] > 2 else entry[2]
            else:
                entry[2] = min(entry[2] + 1, 255)
                entry[1] = entry[1] // 2 + 1 if entry[1] > 2 else entry[1] - 1
                if not entry[1]:
                    entry[:2] = [token, 1]
        for order in orders:
            context = tuple(tokens[i - order : i])
            if i >= order and context not in tables:
                tables[context] = [token, 1, 0]
        said = {}
        for rank, order in enumerate(orders):
            context = tuple(tokens[i + 1 - order : i + 1])
            if i + 1 >= order and context in tables:
                candidate, followed, not_followed = tables[context]
                often = 0 if followed < 2 else 1 if followed < 4 else 2
                said[context] = candidate, RECORDS * rank + 2 * often + (not_followed > 0)
        best, hint = (
            max(
                ((rates[bucket][0] / rates[bucket][1], bucket // RECORDS), (candidate, bucket))
                for candidate, bucket in said.values()
            )
            if said
            else ((-1.0, 0), (-1, 0))
        )
        answer.append(hint if best[0] >= settings.threshold else (-1, hint[1]))
    return answer


@tests(deadline=None)  # the first example compiles
@given(streams, st.sampled_from([0.0, 0.4]))
def test_hints_are_those_of_the_definition(tokens: list[int], threshold: float) -> None:
    settings = TiltSettings(orders=SMALL.orders, table_bits=SMALL.table_bits, threshold=threshold)
    found = hints(np.array(tokens), settings)
    assert list(zip(found.tokens.tolist(), found.buckets.tolist(), strict=True)) == by_definition(tokens, settings)


@tests(deadline=None)
@given(streams, st.data())
def test_what_comes_later_changes_no_hint(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    later = data.draw(st.lists(st.integers(0, 3), max_size=20))
    before, after = hints(np.array(tokens), SMALL), hints(np.array(tokens[: place + 1] + later), SMALL)
    for one, other in zip(before, after, strict=True):
        assert one[: place + 1].tolist() == other[: place + 1].tolist()


@tests(deadline=None)
@given(streams)
def test_token_by_token_gives_the_same(tokens: list[int]) -> None:
    found, memory = hints(np.array(tokens), SMALL), Memory(SMALL)
    assert [memory.reveal(token) for token in tokens] == list(
        zip(found.tokens.tolist(), found.buckets.tolist(), strict=True)
    )


def test_memory_has_no_end() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 3000)
    memory = Memory(SMALL)
    assert [memory.reveal(int(token))[0] for token in tokens] == hints(tokens, SMALL).tokens.tolist()


def test_a_collision_is_no_match() -> None:
    settings = TiltSettings(orders=(4, 2), table_bits=4)  # 16 places for thousands of contexts
    tokens = np.random.default_rng(0).integers(0, 12, 4000)
    found = hints(tokens, settings)
    followed: dict[tuple[int, ...], set[int]] = defaultdict(set)
    hinted = 0
    for i in range(len(tokens)):
        for order in settings.orders:
            if i >= order:
                followed[tuple(tokens[i - order : i])].add(int(tokens[i]))
        if found.tokens[i] >= 0:
            hinted += 1
            order = sorted(settings.orders)[found.buckets[i] // RECORDS]
            assert int(found.tokens[i]) in followed[tuple(tokens[i + 1 - order : i + 1])]
    assert 0 < hinted < len(tokens) / 2


def test_a_text_that_repeats_itself_is_known() -> None:
    once = np.random.default_rng(0).integers(0, 65_536, 500)
    tokens = np.tile(once, 2)
    found = hints(tokens, TiltSettings())
    assert (found.tokens[508:-1] == tokens[509:]).all()
    assert set(found.buckets[520:] // RECORDS) <= set(range(8))


def test_few_of_their_kind_were_right_makes_no_hint() -> None:
    tokens = np.random.default_rng(0).integers(0, 4, 2000)  # nothing to know: one in four is right
    every, sure = hints(tokens, SMALL), hints(tokens, TiltSettings(orders=(3, 2, 1), table_bits=12, threshold=0.6))
    assert (every.tokens[10:] >= 0).all()
    assert (sure.tokens[500:] < 0).mean() > 0.95


def test_tables_are_as_large_as_they_say() -> None:
    settings = TiltSettings(orders=(5, 3), table_bits=10)
    assert _nothing_known(settings).tables.nbytes == settings.nbytes == 2 * 8 * 1024


@pytest.mark.parametrize("token", [-1, 65_536])
def test_tokens_that_do_not_fit_are_refused(token: int) -> None:
    with pytest.raises(DataError, match="hold ids below 65,536"):
        hints(np.array([1, token]), SMALL)
    with pytest.raises(DataError, match="hold ids below 65,536"):
        Memory(SMALL).reveal(token)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"orders": ()}, "give 1 to 16"),
        ({"orders": (2, 2)}, "different ones"),
        ({"orders": (0, 2)}, "from 1 to 64"),
        ({"beta": 9.0}, "from -8 to 8"),
        ({"beta": float("nan")}, "from -8 to 8"),
        ({"threshold": 1.5}, "from 0 to 1"),
        ({"table_bits": 2}, "from 4 to 28"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TiltSettings(**settings)  # type: ignore[arg-type]
