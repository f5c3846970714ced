"""Settings of a recipe by name: `KEY=VALUE` of a command line, or values of a table."""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from birdie.errors import ConfigError
from birdie.lab.ledger import flat
from birdie.lab.selection import full_key
from birdie.run.recipe import Recipe, fits


def parse(texts: Sequence[str], recipe: Recipe) -> dict[str, Any]:
    """Return full name → value of the settings that texts "KEY=VALUE" name; KEY may be the last part of a name.

    Raises:
        ConfigError: a text has no "=", a setting is unknown, or a value does not fit.
    """
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} sets nothing; write KEY=VALUE, as in optimizer.matrix_lr=0.03")
        values[name.strip()] = value.strip()
    return typed(values, recipe)


def typed(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return full name → value of the settings `values`; texts are read as a value of the setting.

    Raises:
        ConfigError: a setting is unknown, or a value does not fit.
    """
    keys = flat(recipe.to_dict())
    full = {full_key(name, keys): value for name, value in values.items()}
    return {key: _typed(key, value) for key, value in full.items()}


def with_settings(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return `recipe` with the settings `values`, which `typed` returned.

    Raises:
        ConfigError: a value is out of range, or the settings contradict one another.
    """
    tables = recipe.to_dict()
    for key, value in values.items():
        *path, last = key.split(".")
        table: Any = tables
        for part in path:
            table = table[part]
        table[last] = value
    return Recipe.from_dict(tables)


def kind_of(key: str) -> Any:
    """Return the type that the setting `key` is annotated with."""
    kind: Any = Recipe
    for part in key.split("."):
        kind = get_type_hints(kind)[part]
    return kind


def _typed(key: str, value: Any) -> Any:
    kind, readings = kind_of(key), [value]
    if isinstance(value, str):
        readings = [None] if value.lower() in ("none", "null") else []
        for toml in (value, value.lower(), f"[{value}]"):
            with contextlib.suppress(ValueError, RecursionError):
                readings.append(tomllib.loads(f"value = {toml}")["value"])
        readings += [value, value.split(",")]
    for reading in readings:
        one = float(reading) if type(reading) is int and fits(float(reading), kind) else reading
        if fits(tuple(one) if isinstance(one, list) else one, kind):
            return one
    wanted = str(getattr(kind, "__name__", kind)).replace("typing.", "")
    raise ConfigError(f"{key} is of type {wanted}, which {value!r} is not; correct it")
