"""Recipe files as sources of settings for the command line.

This module is separate from `recipe` so that `birdie --help` does not import torch.
"""

import copy
import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, get_args, get_origin

from cyclopts import UNSET, App, Argument, ArgumentCollection, CycloptsError, Parameter, Token, UnusedCliTokensError
from cyclopts.config import Dict

from birdie.errors import BirdieError, ConfigError
from birdie.gpt.run.environment import settings, variables_of
from birdie.gpt.run.values import is_plain, parsed
from birdie.system.regular import regular_file

TABLES = (
    *("data", "model", "train", "optimizer", "average", "bandit"),
    *("qat", "validation", "calibration", "export", "evaluation", "run"),
)
SETTINGS = (*TABLES, "device")
ABOUT = "about"  # table that describes the recipe and sets nothing
HELP_ALL = "--help-all"
PROGRAM = "program"  # settings of a program other than `birdie train`; [about] then names the program in `runs`


class CommandApp(App):
    """Application of one command, whose flags are collected once in a process: those of a recipe take 0.1 s.

    The help of a flag is in its `Parameter`, so docstrings, which take as long to parse as the rest, are left alone.

    Where settings of a dataclass are marked by `Parameter(show=True)`, `--help` leaves out its others; `--help-all` has
    them.

    Attributes:
        shows_all: the help has every setting.
    """

    _flags: ClassVar[dict[Callable[..., Any], ArgumentCollection]] = {}
    shows_all: bool = False

    def assemble_argument_collection(
        self, *, default_parameter: Parameter | None = None, parse_docstring: bool = False
    ) -> ArgumentCollection:
        """Return copies of the flags and arguments, so that no value stays for the next command line."""
        assert self.default_command is not None
        command = inspect.unwrap(self.default_command)
        if command not in self._flags:
            self._flags[command] = super().assemble_argument_collection(default_parameter=default_parameter)
        copies = {id(flag): copy.copy(flag) for flag in self._flags[command]}
        for flag in copies.values():
            flag.tokens = []
            flag.children = ArgumentCollection([copies[id(child)] for child in flag.children])  # type: ignore[no-untyped-call]
        if parse_docstring and not self.shows_all:  # it is for the help
            self._leave_out(list(copies.values()))
        return ArgumentCollection(list(copies.values()))  # type: ignore[no-untyped-call]

    def _leave_out(self, flags: list[Argument]) -> None:
        """Hide the settings that are not marked, and say so below the help."""
        shown = [flag for flag in flags if flag.show]
        hidden = [flag for flag in shown if flag.keys and not flag.parameter.show]
        if any(flag.keys and flag.parameter.show for flag in shown):
            for flag in hidden:
                flag.parameter = Parameter.combine(flag.parameter, Parameter(show=False))
            self.help_epilogue = f"{len(hidden)} more settings are in `{self.name[0]} {HELP_ALL}`."


Source = Callable[[App, tuple[str, ...], ArgumentCollection], None]
"""A source of settings: it adds values to arguments that have none, or changes those that they have."""

OVERRIDES = {
    "data.path": ("data.train", "data.val"),
    "train.warmdown_iters": ("train.warmdown_fraction",),
    "train.iterations": ("train.force_stop_step",),
    "train.max_wallclock_seconds": ("train.force_stop_step",),
}
"""Setting → others that would make it one without effect: given by a later source, it takes them to their defaults."""


def sources(
    content: Mapping[str, Any], name: str, origins: dict[str, str] | None = None, *, chosen: bool = False
) -> tuple[Source, ...]:
    """Return cyclopts configuration sources for settings `content`, which errors refer to as `name`.

    Args:
        origins: takes the settings that flags and variables give, as TABLE.SETTING → flag or variable.
        chosen: whether somebody chose the settings in `content`, so that `origins` takes them as well.
    """

    def settle(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        present = {setting_of(argument.name): argument for argument in arguments if argument.tokens}
        order = {setting: _order(argument.tokens[0]) for setting, argument in present.items()}
        for setting, others in OVERRIDES.items():
            for other in others:
                if order.get(setting, 0) > order.get(other, 2):
                    present[other].tokens = []
        for setting, argument in present.items():
            if origins is not None and argument.tokens and (chosen or order[setting]):
                origins[setting] = spelling(argument.tokens[0], argument.name)

    tables = {"environment": settings(os.environ, content), name: dict(content)}
    dicts = (
        Dict(values, use_commands_as_keys=False, allow_unknown=False, source=source)
        for source, values in tables.items()
        if values
    )
    return (*dicts, settle)


def _order(token: Token) -> int:
    """Return 2 for a value of a flag, 1 for one of a variable, 0 for one of a recipe file or a preset."""
    return {"cli": 2, "env": 1, "environment": 1}.get(token.source, 0)


def read_arguments(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Replace what was given for each flag by the value that it is, in the spelling that cyclopts reads; it goes last
    among the sources of a configuration.
    """
    for argument in arguments:
        hint = argument.field_info.annotation
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if argument.parameter.converter or not argument.tokens or not is_plain(hint):
            continue
        many = get_origin(hint) is tuple
        tokens: list[Token] = []
        for token in argument.tokens:
            if token.keys or token.implicit_value is not UNSET:
                tokens.append(token)
                continue
            try:
                value = parsed(token.value, hint)
            except ConfigError as error:
                raise ConfigError(f"{spelling(token, argument.name)} is {token.value[:80]!r}; {error}") from None
            values = value if many else (value,)
            tokens += [token.evolve(value=_spelled(item), index=len(tokens) + i) for i, item in enumerate(values)]
        argument.tokens = tokens


def _spelled(value: Any) -> str:
    return repr(value).lower() if isinstance(value, bool | None) else str(value)


def spelling(token: Token, name: str) -> str:
    """Return how the flag, variable or key of a file is written that gave a value to the flag `name`."""
    setting = setting_of(name)
    if token.source == "environment":
        return ", ".join(variables_of(setting)) or setting
    if token.source in ("cli", "env"):
        return token.keyword or name
    return f"{token.source}: {setting}"


def setting_of(name: str) -> str:
    """Return the full name of the setting that a flag sets: `--train.warmdown-iters` → `train.warmdown_iters`."""
    return name.lstrip("-").replace("-", "_")


def wrong_program(file: str, runs: str) -> ConfigError:
    """Return the error for training a recipe of another program."""
    return ConfigError(f"{file} is not a recipe of birdie train; run it with: {runs} --recipe {file}")


def read_recipe_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a recipe file; only the names of its tables are checked."""
    try:
        content = tomllib.loads(regular_file(file).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read recipe {file}: {reason}; give a .toml file or leave it out") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a recipe: {error}; a recipe is a TOML file") from error
    for key, value in content.items():
        if key not in (*SETTINGS, ABOUT, PROGRAM):
            nearest = difflib.get_close_matches(key, SETTINGS, 1)
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
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        first = error.unused_tokens[0]
        return f"{first!r} is one argument too many; --help shows what the command takes"
    return " ".join(str(error).split())
