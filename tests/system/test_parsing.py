"""JSON of others: an object, or a ValueError in words."""

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.system.parsing import parse_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_objects_come_back(content: dict[str, object], encoding: str) -> None:
    assert parse_object(json.dumps(content)) == content
    assert parse_object(json.dumps(content, ensure_ascii=True).encode(encoding)) == content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[1]", "not an object"),
        (b"null", "not an object"),
        (b"", "line 1 column 1"),
        (b'{"a": 1', "line 1 column 8"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5,000 digits"),
    ],
)
def test_what_is_wrong_is_said_in_words(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_object(data)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.eE-+ \\ntrufalsNI', max_size=40))
def test_nothing_but_a_value_error_leaves(data: bytes | str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_object(data), dict)


def test_numbers_that_only_python_writes_are_read() -> None:
    content = parse_object('{"a": NaN, "b": -Infinity, "c": 1e999}')
    assert math.isnan(content["a"])
    assert (content["b"], content["c"]) == (-math.inf, math.inf)
