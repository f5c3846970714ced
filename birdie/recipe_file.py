"""Where a recipe file enters the command line: kept apart from `recipe` so that asking for help loads no torch."""

import difflib
import os
import tomllib
from pathlib import Path

from cyclopts import CycloptsError
from cyclopts.config import Toml

from birdie.errors import BirdieError, ConfigError

TABLES = ("data", "model", "train", "optimizer", "qat", "validation", "calibration", "export", "run")
SETTINGS = (*TABLES, "device")


def configuration(file: str | os.PathLike[str] | None) -> tuple[Toml, ...]:
    """The cyclopts configuration source for a recipe file; none for None.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    if file is None:
        return ()
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"there is no recipe file {file}; give a .toml file or leave it out") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not a recipe: {error}; a recipe is a TOML file") from error
    for key, value in content.items():
        if key not in SETTINGS:
            nearest = difflib.get_close_matches(key, SETTINGS, 1)
            raise ConfigError(f"{file} has no setting {key!r}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        if key in TABLES and not isinstance(value, dict):
            raise ConfigError(f"{file} gives {key} a value; it is a table: write [{key}] and its settings below it")
    return (Toml(file, use_commands_as_keys=False, allow_unknown=False),)


def explain(error: CycloptsError) -> str:
    """A cyclopts error as one line; what our own checks said comes through unchanged."""
    cause = error.__cause__
    if isinstance(cause, BirdieError):
        return str(cause)
    return " ".join(str(error).split())
