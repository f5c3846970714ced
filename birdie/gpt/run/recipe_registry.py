"""Registry of the recipes that ship with birdie, by name, with their descriptions and recorded results.

    recipes/sota.toml: [about] title, source, parameters, bytes, step_ms, bpb, needs;  then settings as in any recipe
    recipes/resnet_spectral.toml: [about] … runs = "python -m …";  then [program], the settings of that program

Figures of records are their authors', on eight H100s. `needs` lists techniques of a record that birdie does not
support: the recipe runs without them, and does not reach the record's figures.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birdie.errors import ConfigError
from birdie.gpt.run.presets import apply_preset
from birdie.gpt.run.recipe_file import ABOUT, PROGRAM, read_recipe_file, wrong_program
from birdie.gpt.run.recipe_settings import Recipe


@dataclass(frozen=True, slots=True)
class About:
    """Description of a recipe: the table [about] of its file.

    Attributes:
        title: a few words.
        source: author and date.
        parameters: exact number of parameters of the model.
        bytes: size of model and code.
        step_ms: milliseconds per step.
        bpb: bits per byte on the validation split.
        accuracy: fraction of test images classified correctly.
        needs: techniques of the record that birdie does not support.
        runs: command that runs the recipe, if that is not `birdie train`.
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
        """Return the description in the table [about] of a recipe file."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{file}: [about] has no {key!r}; it has {', '.join(sorted(known))}")
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**fields)

    def unmeasured(self) -> "About":
        """Return the description without figures, for a recipe whose settings were changed."""
        return About(self.title, self.source, needs=self.needs)


@dataclass(frozen=True, slots=True)
class RegisteredRecipe:
    """Recipe of the registry, or in a file that the user named."""

    name: str
    path: Path
    about: About

    def recipe(self, preset: str | None = None) -> Recipe:
        """Return the settings of the file, shrunk by a preset unless that is None; the environment is ignored."""
        if self.about.runs is not None:
            raise wrong_program(str(self.path), self.about.runs)
        try:
            values = {key: value for key, value in read_recipe_file(self.path).items() if key != ABOUT}
            recipe = Recipe.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        return recipe if preset is None else apply_preset(recipe, preset, self.about.step_ms)

    def settings(self) -> dict[str, Any]:
        """Return all settings as plain values: those of `birdie train`, or of the program that runs the recipe."""
        if self.about.runs is None:
            return self.recipe().to_dict()
        return {PROGRAM: read_recipe_file(self.path)[PROGRAM]}


def folder() -> Path:
    """Return the folder of the recipes: in a checkout beside the package, otherwise where the installer put it."""
    checkout = Path(__file__).resolve().parents[3] / "recipes"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "birdie" / "recipes"


def shipped_recipes() -> Iterator[RegisteredRecipe]:
    """Yield all recipes that ship with birdie, by name."""
    for path in sorted(folder().glob("*.toml")):
        yield _read(path)


def find(name: str) -> RegisteredRecipe:
    """Return the recipe called `name`, or the one in the file `name`."""
    if name.endswith(".toml"):
        return _read(Path(name))
    names = [path.stem for path in sorted(folder().glob("*.toml"))]
    if name in names:
        return _read(folder() / f"{name}.toml")
    nearest = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(names)}, or give a .toml file"
    raise ConfigError(f"there is no recipe {name!r}{hint}")


def _read(path: Path) -> RegisteredRecipe:
    return RegisteredRecipe(path.stem, path, About.of(read_recipe_file(path).get(ABOUT, {}), path))


def changes(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (setting, left value, right value) for each difference of two recipes (`RegisteredRecipe.settings`)."""
    for key in {**left, **right}:
        left_value, right_value = left.get(key), right.get(key)
        if isinstance(left_value, dict) and isinstance(right_value, dict):
            yield from changes(left_value, right_value, f"{prefix}{key}.")
        elif left_value != right_value:
            yield f"{prefix}{key}", left_value, right_value
