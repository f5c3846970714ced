"""Recipe files as sources of settings for the command line.

This module is separate from `recipe` so that `birdie --help` does not import torch.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from typing import Any

from cyclopts import CycloptsError
from cyclopts.config import Dict

from birdie.errors import BirdieError, ConfigError
from birdie.run.environment import settings
from birdie.runtime.reading import require_regular

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
"""Tables of earlier recipe versions → the tables that replaced them; for error messages only."""
ABOUT = "about"  # table that describes the recipe and sets nothing
PROGRAM = "program"  # settings of a program other than `birdie train`; [about] then names the program in `runs`


def configuration(file: str | os.PathLike[str] | None) -> tuple[Dict, ...]:
    """Return cyclopts configuration sources for `file`: joint environment variables first, then the recipe file.

    Raises:
        ConfigError: the file does not exist, is not TOML or is for another program, or a variable has a wrong value.
    """
    content = {} if file is None else read_recipe_file(file)
    about = content.pop(ABOUT, {})
    if "runs" in about:
        raise wrong_program(str(file), about["runs"])
    return sources(content, str(file))


def sources(content: Mapping[str, Any], name: str) -> tuple[Dict, ...]:
    """Return cyclopts configuration sources for settings `content`, which errors refer to as `name`.

    Raises:
        ConfigError: an environment variable has a wrong value.
    """
    tables = {"environment": settings(os.environ, content), name: dict(content)}
    return tuple(
        Dict(values, use_commands_as_keys=False, allow_unknown=False, source=source)
        for source, values in tables.items()
        if values
    )


def wrong_program(file: str, runs: str) -> ConfigError:
    """Return the error for training a recipe of another program."""
    return ConfigError(f"{file} is not a recipe of birdie train; run it with: {runs} --recipe {file}")


def read_recipe_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a recipe file; only the names of its tables are checked.

    Raises:
        ConfigError: the file does not exist or is not TOML, a table is unknown, or the file is for two programs.
    """
    try:
        content = tomllib.loads(require_regular(file).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read recipe {file}: {reason}; give a .toml file or leave it out") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a recipe: {error}; a recipe is a TOML file") from error
    for key, value in content.items():
        if key not in (*SETTINGS, ABOUT, PROGRAM):
            nearest = [MOVED[key]] if key in MOVED else difflib.get_close_matches(key, SETTINGS, 1)
            raise ConfigError(f"{file} has no setting {key!r}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        if key in (*TABLES, ABOUT, PROGRAM) and not isinstance(value, dict):
            raise ConfigError(f"{file} sets the table {key} to a value; write [{key}] and its settings below it")
    if (PROGRAM in content) != ("runs" in content.get(ABOUT, {})):
        raise ConfigError(f"{file} has only one of [about] runs and [program], which go together; give both or neither")
    if PROGRAM in content and any(key in SETTINGS for key in content):
        raise ConfigError(f"{file} has both [program] and settings of birdie train; a recipe is for one of them")
    return content


def explain(error: CycloptsError) -> str:
    """Return the message of a cyclopts error as one line; the message of a BirdieError stays unchanged."""
    cause = error.__cause__
    if isinstance(cause, BirdieError):
        return str(cause)
    return " ".join(str(error).split())
