"""Conversion of text to the value of a setting: the same for flags, environment variables, recipe files and `--set`.

"3"  "+3"  "1_000"  "1e3"  "3.0"      an integer, if the number is one exactly: 3.5 is not rounded
"0.5"  "1e-3"  "inf"                  a number; NaN, and what is too large or too small for one, is not
"true"  "yes"  "1"  "false"  "no"  "0"
"none"                                no value, where a setting may have none
"9,10"  "[9, 10]"                     a list
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from birdie.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "1", "t", "y"), ("false", "no", "0", "f", "n")
_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_LARGEST_EXACT = 2**53  # beyond it, not every integer is a float


def fits(value: Any, hint: Any) -> bool:
    """Return whether `value` has the type that a setting is annotated with; integers fit in 64 bits, NaN never fits."""
    kind, options = get_origin(hint), get_args(hint)
    if hint in (int, float) and type(value) is int:
        return -(2**63) <= value < 2**63
    if hint is float:
        return type(value) is float and not math.isnan(value)
    if kind is Literal:
        return isinstance(value, str) and value in options
    if kind in (Union, UnionType):
        return any(fits(value, option) for option in options)
    if kind is tuple:
        return isinstance(value, tuple) and all(fits(item, options[0]) for item in value)
    return type(value) is hint


def typed(value: Any, hint: Any) -> Any:
    """Return a value of TOML or JSON as the value of a setting of type `hint`: lists as tuples, 3.0 as integer 3."""
    value = _to_tuples(value)
    options = _options(hint)
    if not fits(value, hint) and int in options and type(value) is float and abs(value) < _LARGEST_EXACT:
        value = int(value) if value.is_integer() else value
    if not fits(value, hint):
        raise ConfigError(f"give {describe(hint)}")
    return value


def parsed(text: str, hint: Any) -> Any:
    """Return the value that a text gives a setting of type `hint`."""
    for option in sorted(_options(hint), key=lambda option: option is str):  # "none" is no text, where it can be None
        for value in _readings(text.strip() if option is not str else text, option):
            if fits(value, option):
                return value
    raise ConfigError(f"give {describe(hint)}")


def describe(hint: Any) -> str:
    """Return the values of a setting of type `hint` in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", NoneType: "none"}
    options = [option for kind in _options(hint) for option in (get_args(kind) if _is_literal(kind) else (kind,))]
    if get_origin(hint) is tuple:
        return f"a list; each item is {describe(get_args(hint)[0])}"
    return " or ".join(words.get(option, str(option)) for option in options)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _readings(text: str, hint: Any) -> Iterator[Any]:
    """Yield what `text` can mean where `hint` is one type, which it may not fit."""
    if hint is NoneType and text.lower() in ("none", "null"):
        yield None
    elif hint is bool:
        yield True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    elif hint in (int, float):
        yield _number(text, hint)
    elif get_origin(hint) is tuple:
        try:
            items = json.loads(text) if text.startswith("[") else [part for part in text.split(",") if part.strip()]
            item = get_args(hint)[0]
            yield tuple(parsed(part, item) if isinstance(part, str) else typed(part, item) for part in items)
        except (ValueError, RecursionError, ConfigError):
            return
    elif hint is str or _is_literal(hint):
        yield text


def _number(text: str, hint: Any) -> int | float | None:
    """Return the number that `text` is, if it can be held without a loss that changes what was written."""
    if hint is float and text.lower().lstrip("+-") in ("inf", "infinity"):
        return float(text)
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return None
    if exact and not -400 < exact.adjusted() < 400:  # before an integer of so many digits is made
        return None
    if hint is int:
        return int(exact) if exact == exact.to_integral_value() else None
    value = float(exact)
    return None if math.isinf(value) or (value == 0 and exact) else value


def is_plain(hint: Any) -> bool:
    """Return whether a setting is of numbers, switches or choices; other texts are what they are."""
    if get_origin(hint) is tuple:
        return is_plain(get_args(hint)[0]) and str not in get_args(hint)
    return all(option in (int, float, bool, NoneType) or _is_literal(option) for option in _options(hint))
