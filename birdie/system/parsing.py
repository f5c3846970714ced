"""Values from outside and to it: JSON, numbers in text.

JSON of others is read with errors that are ValueErrors in words; ours is written so that every parser reads it.
"""

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from birdie.errors import ConfigError

MAX_DIGITS = 4000
"""Digits of an integer that are read; the time for more grows with their square."""


def parse_json(data: str | bytes) -> Any:
    """Return the value of a JSON text, as bytes in UTF-8, UTF-16 or UTF-32. NaN and Infinity are numbers."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def to_json(value: Any, *, indent: int | None = None, **options: Any) -> str:
    """Return the JSON text of a value; NaN and infinity, which JSON lacks, become null.

    Args:
        indent, options: as of `json.dumps`.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def parse_object(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, as `parse_json` reads it."""
    content = parse_json(data)
    if not isinstance(content, dict):
        raise ValueError("it is not an object, which is in braces")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        (repeated, _), *_ = counts.most_common(1)
        raise ValueError(f"it has the key {repeated[:100]!r} twice")
    return content


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(text):,} digits")
    return int(text)


UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Return the seconds of "90", "90s", "5min" or "1.5h"."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"{text!r} is not a duration; write, for example, 90s, 5min or 1h")
    return float(match[1]) * UNITS[match[2]]


def whole_number(name: str, value: Any, least: int = 1) -> int | None:
    """Return `value` as an int (numpy integers are accepted, floats are not); None stays None."""
    try:
        if value is None or (operator.index(value) >= least and not isinstance(value, bool)):
            return None if value is None else operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} {value!r} is not a whole number from {least} up; give an int")
