"""Sweep files: the recipe, the settings to search with their ranges, and how to search.

recipe = "laptop"              # a name that `birdie recipe list` shows, or a .toml file
preset = "cpu"                 # optional, as for `birdie train`
trials = 20                    # a grid has as many as it has combinations
sampler = "tpe"                # tpe, random or grid
pruner = "median"              # median, hyperband or none: stops poor trials by their validations
score = "bpb_artifact"         # or bpb_float: what is minimized
seed = 0                       # of the sampler

[set]                          # changes of the recipe that all trials have
"train.iterations" = 400

[search]
"optimizer.matrix_lr" = { low = 0.01, high = 0.08, log = true }
"model.num_layers" = { choices = [7, 9, 11] }
"""

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from birdie.errors import ConfigError
from birdie.gpt.run.recipe import Recipe, to_toml
from birdie.gpt.run.registry import find
from birdie.gpt.run.values import fits
from birdie.lab.assignments import kind_of, typed, with_settings
from birdie.lab.ledger import flat

Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["median", "hyperband", "none"]
Score = Literal["bpb_artifact", "bpb_float"]

_GRID_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Sweep:
    """The content of a sweep file.

    Attributes:
        recipe: that every trial starts from.
        space: full name of a setting → the values to search.
        trials: number of trials.
        sampler, pruner: of Optuna.
        score: column of the run that is minimized.
        seed: of the sampler.
    """

    recipe: Recipe
    space: Mapping[str, BaseDistribution]
    trials: int = 20
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    score: Score = "bpb_artifact"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.space:
            raise ConfigError(
                'the sweep searches nothing; add [search] with "optimizer.matrix_lr" = { low = …, high = … }'
            )
        for name, words in (("sampler", get_args(Sampler)), ("pruner", get_args(Pruner)), ("score", get_args(Score))):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} of the sweep is {getattr(self, name)!r}; give {', '.join(words)}")
        if type(self.trials) is not int or type(self.seed) is not int:
            raise ConfigError(
                f"trials {self.trials!r} and seed {self.seed!r} of the sweep are to be integers; correct them"
            )
        if self.trials < 1 or self.seed < 0:
            raise ConfigError(
                f"a sweep of {self.trials} trials with seed {self.seed} cannot run; give at least 1 and 0"
            )
        every, steps = self.recipe.validation.every, self.recipe.train.last_step
        if self.pruner != "none" and not 0 < every < steps:
            raise ConfigError(
                f"pruner {self.pruner} compares validations during training, and the recipe has none (validation.every "
                f'is {every}, of {steps:,} steps); set "validation.every" in [set], or pruner = "none"'
            )
        if self.sampler == "grid":
            object.__setattr__(self, "trials", min(self.trials, len(self.grid())))

    def grid(self) -> list[dict[str, Any]]:
        """Return the combinations of a grid, in the order of the trials."""
        values = [_values(name, kind) for name, kind in self.space.items()]
        if (count := math.prod(map(len, values))) > _GRID_LIMIT:
            raise ConfigError(f'the grid has {count:,} combinations; leave out values, or use sampler = "tpe"')
        return [dict(zip(self.space, row, strict=True)) for row in itertools.product(*values)]

    def suggest(self, trial: Trial) -> Recipe:
        """Return the recipe of a trial, whose values are chosen if they are not yet."""
        values: dict[str, Any] = {}
        for name, kind in self.space.items():
            if isinstance(kind, FloatDistribution):
                values[name] = trial.suggest_float(name, kind.low, kind.high, step=kind.step, log=kind.log)
            elif isinstance(kind, IntDistribution):
                values[name] = trial.suggest_int(name, kind.low, kind.high, step=kind.step, log=kind.log)
            elif isinstance(kind, CategoricalDistribution):
                values[name] = trial.suggest_categorical(name, kind.choices)
        return with_settings(self.recipe, typed(values, self.recipe))

    def to_toml(self) -> str:
        """Return all facts that make trials comparable, as TOML; the number of trials may be raised later."""
        search = {name: kind._asdict() | {"kind": type(kind).__name__} for name, kind in self.space.items()}
        for table in search.values():
            table.update({key: list(value) for key, value in table.items() if isinstance(value, tuple)})
        head = {name: getattr(self, name) for name in ("sampler", "pruner", "score", "seed")}
        return to_toml({**head, "search": search, "recipe": self.recipe.to_dict()})


def read_sweep(path: Path, trials: int | None = None) -> Sweep:
    """Return the sweep of a file.

    Args:
        trials: number of trials instead of the file's.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} cannot be read: {reason}; give a sweep file, such as examples/learning_rate.toml"
        ) from error
    try:
        return _sweep(values if trials is None else values | {"trials": trials}, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _sweep(values: dict[str, Any], path: Path) -> Sweep:
    name, preset, changes, search = (values.pop(key, None) for key in ("recipe", "preset", "set", "search"))
    known = [field.name for field in dataclasses.fields(Sweep)]
    if unknown := [key for key in values if key not in known[2:]]:
        raise ConfigError(
            f"{unknown[0]!r} is no setting of a sweep; there are recipe, preset, set, search, {', '.join(known[2:])}"
        )
    if not isinstance(name, str) or not isinstance(preset, str | None):
        raise ConfigError('name the recipe, as in recipe = "laptop", and the preset, if any, as text')
    if not all(isinstance(table, dict | None) for table in (changes, search)):
        raise ConfigError("[set] and [search] are tables; write them so")
    if name.endswith(".toml"):
        name = str(path.parent / name)
    recipe = find(name).recipe(preset)
    recipe = with_settings(recipe, typed(flat(changes or {}), recipe))
    space = dict(_distribution(key, table, recipe) for key, table in _leaves(search or {}))
    return Sweep(recipe, space, **values)


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return name and search range: `optimizer.matrix_lr = …` and `"optimizer.matrix_lr" = …` are the same."""
    leaves = []
    for key, value in tables.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((prefix + key, value))
    return leaves


def _distribution(name: str, table: Any, recipe: Recipe) -> tuple[str, BaseDistribution]:
    allowed = {"choices"}, {"low", "high"}, {"low", "high", "log"}, {"low", "high", "step"}
    if not isinstance(table, Mapping) or set(table) not in allowed:
        raise ConfigError(
            f"{name} = {table!r} is no range; give {{ choices = […] }}, or {{ low = …, high = … }} with log = true or "
            "step = …"
        )
    ends = list(table["choices"]) if "choices" in table else [table["low"], table["high"]]
    key = next(iter(typed({name: ends[0] if ends else None}, recipe)))
    numbers = [typed({key: value}, recipe)[key] for value in ends]  # refuses what is no value of the setting
    try:
        if "choices" in table:
            if any(isinstance(value, list | dict) for value in ends):
                raise ConfigError(f'{name}: choices are numbers or texts; write a list as a text, as in "9,10"')
            return key, CategoricalDistribution(ends)
        log, step = bool(table.get("log", False)), table.get("step")
        if fits(numbers[0], float) and type(numbers[0]) is float:
            return key, FloatDistribution(numbers[0], numbers[1], log=log, step=step)
        if kind_of(key) in (int, int | None):
            return key, IntDistribution(numbers[0], numbers[1], log=log, step=1 if step is None else step)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {error}") from error
    raise ConfigError(f"{name} is no number, so it has no low and high; give choices = […]")


def _values(name: str, kind: BaseDistribution) -> list[Any]:
    if isinstance(kind, CategoricalDistribution):
        return list(kind.choices)
    assert isinstance(kind, FloatDistribution | IntDistribution)
    if kind.step is None or kind.log:
        raise ConfigError(f"a grid needs the values of {name}; give choices = […] or a step")
    count = math.floor((kind.high - kind.low) / kind.step + 1e-9) + 1
    return [kind.low + index * kind.step for index in range(min(count, _GRID_LIMIT + 1))]
