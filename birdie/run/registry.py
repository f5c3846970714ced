"""The recipes that ship with birdie, by name: what each is, what is known of its results, and what it still needs.

    recipes/sota.toml: [about] title, source, parameters, bytes, step_ms, bpb, needs;  then settings as in any recipe
    recipes/resnet_spectral.toml: [about] … runs = "python -m …";  then [program], the settings of that program

Figures of records are their authors', on eight H100s. `needs` names what a record has and birdie has not yet: the rest
of the recipe runs, and its figures are then not to be expected.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birdie.errors import ConfigError
from birdie.run.recipe import Recipe, load_recipe
from birdie.run.recipe_file import ABOUT, PROGRAM, contents, elsewhere


@dataclass(frozen=True, slots=True)
class About:
    """What a recipe says of itself.

    Attributes:
        title: in a few words.
        source: whose it is, and of when.
        parameters: of the model, exactly.
        bytes: of model and code.
        step_ms: milliseconds of a step.
        bpb: bits per byte of the validation text.
        accuracy: share of test images that are right.
        needs: techniques that the record has and this version has not.
        runs: the program it is for, where that is not `birdie train`.
    """

    title: str = ""
    source: str = ""
    parameters: int | None = None
    bytes: int | None = None
    step_ms: float | None = None
    bpb: float | None = None
    accuracy: float | None = None
    needs: tuple[str, ...] = ()
    runs: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], file: Path | str) -> "About":
        """From a table of a recipe file.

        Raises:
            ConfigError: it holds what is none of these.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{file}: [about] has no {key!r}; it has {', '.join(sorted(known))}")
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**fields)

    def unmeasured(self) -> "About":
        """The same without figures: of what was changed."""
        return About(self.title, self.source, needs=self.needs)


@dataclass(frozen=True, slots=True)
class Known:
    """A recipe of the book, or a file."""

    name: str
    path: Path
    about: About

    def recipe(self) -> Recipe:
        """Its settings, whatever the environment says.

        Raises:
            ConfigError: the file is no recipe, or another program's.
        """
        if self.about.runs is not None:
            raise elsewhere(str(self.path), self.about.runs)
        try:
            return Recipe.from_dict({key: value for key, value in contents(self.path).items() if key != ABOUT})
        except (TypeError, ValueError) as error:
            load_recipe(self.path)  # says which setting has a value of another kind
            raise ConfigError(f"{self.path} has a value of the wrong kind: {error}") from error

    def settings(self) -> dict[str, Any]:
        """Everything it sets, in plain values: of `birdie train`, or of the program that runs it."""
        if self.about.runs is None:
            return self.recipe().to_dict()
        return {PROGRAM: contents(self.path)[PROGRAM]}


def folder() -> Path:
    """Where the recipes lie: beside the package in a checkout, else where the installer put them."""
    beside = Path(__file__).resolve().parents[2] / "recipes"
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "birdie" / "recipes"


def book() -> Iterator[Known]:
    """All recipes that ship, by name."""
    for path in sorted(folder().glob("*.toml")):
        yield _known(path)


def find(name: str) -> Known:
    """The recipe called `name`, or the file.

    Raises:
        ConfigError: there is none.
    """
    if name.endswith(".toml"):
        return _known(Path(name))
    names = [path.stem for path in sorted(folder().glob("*.toml"))]
    if name in names:
        return _known(folder() / f"{name}.toml")
    nearest = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(names)}, or give a .toml file"
    raise ConfigError(f"there is no recipe {name!r}{hint}")


def _known(path: Path) -> Known:
    return Known(path.stem, path, About.of(contents(path).get(ABOUT, {}), path))


def changes(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(setting, here, there) of what two recipes (`Known.settings`) have different, in the order of settings."""
    for key in {**one, **other}:
        here, there = one.get(key), other.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from changes(here, there, f"{prefix}{key}.")
        elif here != there:
            yield f"{prefix}{key}", here, there
