"""Settings of a recipe by name: `KEY=VALUE` of a command line, or values of a table."""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

from birdie.errors import ConfigError
from birdie.gpt.run.recipe_file import OVERRIDES
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.values import fits, parsed
from birdie.gpt.run.values import typed as typed_value
from birdie.lab.run_ledger import flat
from birdie.lab.selection import full_key


def parse(texts: Sequence[str], recipe: Recipe) -> dict[str, Any]:
    """Return full name → value of the settings that texts "KEY=VALUE" name; KEY may be the last part of a name."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} sets nothing; write KEY=VALUE, as in optimizer.matrix_lr=0.03")
        values[name.strip()] = value.strip()
    return typed(values, recipe)


def typed(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return full name → value of the settings `values`; texts are read as a value of the setting."""
    keys = flat(recipe.to_dict())
    full = {full_key(name, keys): value for name, value in values.items()}
    return {key: _typed(key, value) for key, value in full.items()}


def with_settings(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return `recipe` with the settings `values`, which `typed` returned; they override as a later source does."""
    tables = recipe.to_dict()
    rivals = {rival: attrgetter(rival)(Recipe()) for key in values for rival in OVERRIDES.get(key, ())}
    for key, value in (rivals | dict(values)).items():
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
    kind = kind_of(key)
    try:
        result = parsed(_unquoted(value), kind) if isinstance(value, str) else typed_value(value, kind)
    except ConfigError as error:
        raise ConfigError(f"{key} is {value!r}; {error}") from None
    if type(result) is int and fits(float(result), kind):
        return float(result)
    return list(result) if isinstance(result, tuple) else result


def _unquoted(text: str) -> str:
    """Return the text that a quoted string of TOML is; another text as it is."""
    if text[:1] not in ("'", '"'):
        return text
    with contextlib.suppress(ValueError, RecursionError):
        value = tomllib.loads(f"value = {text}")["value"]
        return value if isinstance(value, str) else text
    return text
