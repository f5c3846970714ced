"""Resolution of a recipe from its four sources, of which a later one overrides an earlier one:

    default  <  recipe file (TOML)  <  environment (the challenge's names)  <  command-line flag

An unknown key in a file or flag is an error that names the nearest known one.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import CycloptsError, Parameter

from birdie.errors import BirdieError, ConfigError
from birdie.gpt.run.environment import RULES
from birdie.gpt.run.recipe_file import (
    ABOUT,
    CommandApp,
    Source,
    explain,
    read_arguments,
    read_recipe_file,
    sources,
    wrong_program,
)
from birdie.gpt.run.recipe_settings import Recipe, setting_names, typed_setting

FLAT = Parameter(name="*")


def typed_tables(content: Mapping[str, Any], kind: Any = Recipe, path: str = "") -> dict[str, Any]:
    """Return the tables of a file with each value as its setting has it; unknown keys stay, for others to name."""
    hints = get_type_hints(kind)
    return {
        key: value
        if key not in hints
        else typed_tables(value, hints[key], f"{path}{key}.")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping)
        else typed_setting(value, hints[key], f"{path}{key}")
        for key, value in content.items()
    }


def configuration(file: str | os.PathLike[str] | None, origins: dict[str, str] | None = None) -> tuple[Source, ...]:
    """Return cyclopts configuration sources for `file`: joint environment variables first, then the recipe file.

    Args:
        origins: takes the settings that somebody chose, as TABLE.SETTING → flag, variable or key of the file.
    """
    content = {} if file is None else read_recipe_file(file)
    about = content.pop(ABOUT, {})
    if "runs" in about:
        raise wrong_program(str(file), about["runs"])
    try:
        content = typed_tables(content)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    # a file that states everything is the record of a run: nobody chose each of its settings
    recorded = setting_names(without_none(Recipe().to_dict())) <= setting_names(content)
    return sources(content, str(file), origins, chosen=not recorded)


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested table without values None, which a cyclopts configuration cannot hold."""
    return {
        key: without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _recipe(*, recipe: Annotated[Recipe | None, FLAT] = None) -> Recipe:
    return recipe or Recipe()


def load_recipe(
    file: str | os.PathLike[str] | None = None, flags: Sequence[str] = (), origins: dict[str, str] | None = None
) -> Recipe:
    """Resolve a recipe: defaults, then `file`, then the environment, then `flags` (`["--model.num-layers", "4"]`).

    Args:
        origins: takes the settings that somebody chose, as TABLE.SETTING → flag, variable or key of the file.
    """
    config = (*configuration(file, origins), read_arguments)
    app = CommandApp(name="recipe", config=config, help_flags=[], version_flags=[])
    app.default(_recipe)

    try:
        command, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False)
        recipe: Recipe = command(*bound.args, **bound.kwargs)
    except BirdieError:
        raise
    except CycloptsError as error:
        raise ConfigError(explain(error)) from error
    return recipe


def setting_variables() -> set[str]:
    """Return the names of the environment variables that set a recipe, each by itself or together."""
    return {*_variables(Recipe), *(name for rule in RULES for name in rule.variables)}


def _variables(kind: type) -> Iterator[str]:
    for hint in get_type_hints(kind, include_extras=True).values():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _variables(hint)
        for parameter in getattr(hint, "__metadata__", ()):
            yield from parameter.env_var or ()


def load_run_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe of a run folder, or the one in a file."""
    file = recipe_file(path)
    if not file.is_file():
        raise ConfigError(f"{path} is neither a run folder with a recipe.toml nor a recipe; give one of the two")
    return load_recipe(file)


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """Return the recipe's file in a run folder; `path` itself if it is no folder."""
    return Path(path, "recipe.toml") if Path(path).is_dir() else Path(path)
