"""Where a recipe file enters the command line: kept apart from `recipe` so that asking for help loads no torch."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError
from cyclopts.config import Dict

from birdie.errors import BirdieError, ConfigError
from birdie.run.environment import settings

TABLES = (
    *("data", "model", "train", "optimizer", "average", "bandit"),
    *("qat", "validation", "calibration", "export", "evaluation", "run"),
)
SETTINGS = (*TABLES, "device")
MOVED = {
    "tilt": "evaluation.ngram",
    "sgd": "evaluation.ttt_sgd",
    "lora": "evaluation.ttt_lora",
    "phased": "evaluation.ttt_multi_phase",
}
"""Tables of earlier recipes, and where their settings are now; for error messages only."""
ABOUT = "about"  # a table that sets nothing: what a recipe is, and what is known of it
PROGRAM = "program"  # the settings of another program than `birdie train`, which [about] then names as `runs`


def configuration(file: str | os.PathLike[str] | None) -> tuple[Dict, ...]:
    """The cyclopts configuration sources: the variables that are no single setting's, then the recipe file.

    Raises:
        ConfigError: there is no such file, it is not TOML, another program runs it, or a variable has no such value.
    """
    content = {} if file is None else contents(file)
    about = content.pop(ABOUT, {})
    if "runs" in about:
        raise elsewhere(str(file), about["runs"])
    return sources(content, str(file))


def sources(content: Mapping[str, Any], name: str) -> tuple[Dict, ...]:
    """The cyclopts configuration sources where the recipe's settings are `content`, called `name` in errors.

    Raises:
        ConfigError: a variable has no such value.
    """
    found = {"environment": settings(os.environ, content), name: dict(content)}
    return tuple(
        Dict(values, use_commands_as_keys=False, allow_unknown=False, source=source)
        for source, values in found.items()
        if values
    )


def elsewhere(file: str, runs: str) -> ConfigError:
    """What to say where a recipe of another program is to be trained."""
    return ConfigError(f"{file} is no recipe of birdie train; run it with: {runs} --recipe {file}")


def contents(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything in a recipe file, its tables known by name and nothing more.

    Raises:
        ConfigError: there is no such file, it is not TOML, a table has another name than a recipe's, or it is for two
            programs.
    """
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"there is no recipe file {file}; give a .toml file or leave it out") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not a recipe: {error}; a recipe is a TOML file") from error
    for key, value in content.items():
        if key not in (*SETTINGS, ABOUT, PROGRAM):
            nearest = [MOVED[key]] if key in MOVED else difflib.get_close_matches(key, SETTINGS, 1)
            raise ConfigError(f"{file} has no setting {key!r}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        if key in (*TABLES, ABOUT, PROGRAM) and not isinstance(value, dict):
            raise ConfigError(f"{file} gives {key} a value; it is a table: write [{key}] and its settings below it")
    if (PROGRAM in content) != ("runs" in content.get(ABOUT, {})):
        raise ConfigError(f"{file}: [about] runs and [program] go together, a program and its settings; give both")
    if PROGRAM in content and any(key in SETTINGS for key in content):
        raise ConfigError(f"{file} has [program] and settings of birdie train, too; a recipe is for one of them")
    return content


def explain(error: CycloptsError) -> str:
    """A cyclopts error as one line; what our own checks said comes through unchanged."""
    cause = error.__cause__
    if isinstance(cause, BirdieError):
        return str(cause)
    return " ".join(str(error).split())
