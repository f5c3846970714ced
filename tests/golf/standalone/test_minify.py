"""Minified modules do the same in fewer bytes, and keep the names by which they are called."""

from typing import Any

import pytest

from birdie.golf.standalone.minify import minify

SAMPLE = """
import math as math__
from functools import reduce as functools__reduce
from dataclasses import dataclass as dataclasses__dataclass
codec__LIMIT = 1 << 4
codec__NAMES, codec__OTHER = range(2)
def codec__damaged(subject): return ValueError(f'{subject} of {codec__LIMIT} is too large')
def codec__check(value, dtype=int, *, limit=codec__LIMIT - 1):
    values = [value for value in (value, value + 1)]
    if value > limit: raise codec__damaged(f'{value}')
    return dict(dtype=dtype, total=functools__reduce(lambda left, right: left + right, values), kind=codec__OTHER)
@dataclasses__dataclass
class codec__Box:
    value_of_it: 0
    def get(self, number): return vars(self)['value_of_it'] if (number, (1 + 2)) else None
def codec__boxed(**options): return codec__Box(**options)
def main(value, extra=0):
    try: checked = codec__check(value, limit=9)
    except ValueError as error: return str(error), codec__Box(math__.floor(2.5)).get('number')
    return checked, tuple((each for each in (codec__boxed(value_of_it=value).get(extra),)))
"""


@pytest.mark.parametrize("value", [1, 8, 9, 10, 11])
def test_a_minified_module_means_the_same(value: int) -> None:
    original: dict[str, Any] = {}
    minified: dict[str, Any] = {}
    exec(SAMPLE, original)
    text = minify(SAMPLE, ["main"])
    exec(text, minified)
    assert minified["main"](value) == original["main"](value)
    assert minified["main"](value=value, extra=1) == original["main"](value, 1)
    assert len(text) < 0.6 * len(SAMPLE)
    assert "codec" not in text
    assert "subject" not in text
