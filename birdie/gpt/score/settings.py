"""Settings of an evaluation, `[evaluation]` of a recipe, and of validation; the registry of scoring modes.

    [evaluation]              settings that several modes share, and which mode is used
    mode = "ttt-lora"
    [evaluation.ttt_lora]     settings of a mode; those of the others are ignored
    rank = 80
    [evaluation.ngram]        settings of the n-gram logit bias, which modifies the predictions of a mode

A mode that ships is one field of `EvaluationSettings`, whose type is the mode; `register` adds one from outside.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.score.mode import ScoringMode, ScoringSettings
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_multi_phase import MultiPhaseMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode
from birdie.gpt.score.modes.windows import WindowMode

S = TypeVar("S")

ALWAYS_READ = ("mode", "seq_len", "budget_seconds")
"""Shared settings that every mode reads."""


@dataclass(frozen=True, slots=True)
class EvaluationSettings(ScoringSettings):
    """Settings of an evaluation: those the modes share, and those of each mode.

    Raises:
        ConfigError: a value is out of range, or does not fit the mode.
    """

    streaming: StreamingMode = field(default_factory=StreamingMode)
    ttt_sgd: SGDMode = field(default_factory=SGDMode)
    ttt_lora: LoRAMode = field(default_factory=LoRAMode)
    ttt_multi_phase: MultiPhaseMode = field(default_factory=MultiPhaseMode)

    def __post_init__(self) -> None:
        ScoringSettings.__post_init__(self)
        if self.mode not in MODES:
            raise ConfigError(f"there is no scoring mode {self.mode!r}; {_nearest(self.mode, MODES)}")
        self._check_predictions(self.scoring_mode)
        if self.seq_len:
            self.check(self.seq_len)

    @property
    def scoring_mode(self) -> ScoringMode:
        """The mode that `mode` names, with its settings."""
        return self.table(MODES[self.mode])

    def check(self, length: int, mode: ScoringMode | None = None) -> None:
        """Raise ConfigError where the settings do not fit the mode, or windows (or a context) of `length`."""
        mode = mode or self.scoring_mode
        self._check_predictions(mode)
        mode.check(self, length)

    def _check_predictions(self, mode: ScoringMode) -> None:
        """Raise ConfigError where predictions would have to be modified in a way the mode does not support."""
        # Unlike a stride that is not read, these change what is predicted: to ignore them would be a silent error.
        if self.temperature != 1.0 and "temperature" not in mode.shared:
            raise ConfigError(f"mode {mode.name} scores at temperature 1; leave temperature {self.temperature:g} out")
        if self.ngram.enabled and not mode.ngram_bias:
            raise ConfigError(
                f"the n-gram bias needs predictions in the order of the stream, which mode {mode.name} does not make; "
                "disable ngram, or choose another mode"
            )

    def in_effect(self, mode: ScoringMode | None = None) -> dict[str, Any]:
        """Return the settings that the mode reads, in plain values."""
        mode = mode or self.scoring_mode
        shared = {name: getattr(self, name) for name in shared_names() if is_read(name, mode)}
        modes = (*(self.table(kind) for kind in mode.tables), mode)
        tables = {table.table_name(): table.values() for table in modes if table.values()}
        ngram = {"ngram": dataclasses.asdict(self.ngram)} if self.ngram.enabled else {}
        return {**shared, "mode": mode.name, **tables, **ngram}


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """Settings of validation during training: how often, and on how much text."""

    batch_tokens: Annotated[
        int, Parameter(env_var=("VAL_BATCH_SIZE", "VAL_BATCH_TOKENS"), help="Tokens in a batch, over all ranks.")
    ] = 524_288
    every: Annotated[
        int,
        Parameter(show=True, env_var="VAL_LOSS_EVERY", help="Steps between validations; 0 validates only at the end."),
    ] = 1000
    max_tokens: Annotated[
        int,
        Parameter(
            show=True, env_var="VAL_MAX_TOKENS", help="Score only this many tokens of the split; 0 scores all of it."
        ),
    ] = 0

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ConfigError(f"validation batch_tokens is {self.batch_tokens}; it must be at least 1")
        if self.every < 0:
            raise ConfigError(f"validation every is {self.every}; it must be 0 (only at the end) or a number of steps")
        if self.max_tokens < 0:
            raise ConfigError(f"validation max_tokens is {self.max_tokens}; it must be 0 (all) or a number of tokens")


MODES: dict[str, type[ScoringMode]] = {
    mode.name: mode
    # windows have no settings of their own, so they have no table
    for mode in (WindowMode, *(f.type for f in dataclasses.fields(EvaluationSettings)))
    if isinstance(mode, type) and issubclass(mode, ScoringMode)
}
"""Scoring modes by name."""


def register(mode: type[ScoringMode]) -> type[ScoringMode]:
    """Make a scoring mode of another package known by its name, to requests and to `birdie evaluate`.

    Recipes can name it; settings other than its defaults come from a request or from flags.

    Raises:
        ConfigError: the name is taken by another mode.
    """
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ConfigError(f"there is a scoring mode {mode.name!r} already; choose another name")
    return mode


def shared_names() -> list[str]:
    """Return the names of the settings that modes share, without the table of the n-gram bias."""
    return [setting.name for setting in dataclasses.fields(ScoringSettings) if setting.name != "ngram"]


def is_read(name: str, mode: ScoringMode | type[ScoringMode]) -> bool:
    """Return True if `mode` reads the setting or table `name` of an evaluation."""
    if name in shared_names():
        return name in (*ALWAYS_READ, *mode.shared)
    return name in ("ngram", mode.table_name(), *(table.table_name() for table in mode.tables))


def replaced(settings: S, changes: Mapping[str, Any], path: str) -> S:
    """Return a dataclass with some values changed, those of nested dataclasses by nested mappings."""
    values: dict[str, Any] = {}
    names = [setting.name for setting in dataclasses.fields(settings)]  # type: ignore[arg-type]
    for name, value in changes.items():
        if name not in names:
            raise ConfigError(f"{path} has no setting {name!r}; {_nearest(name, names)}")
        if isinstance(value, Mapping):
            value = replaced(getattr(settings, name), value, f"{path}.{name}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(settings, **values)  # type: ignore[type-var]


def _nearest(name: str, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, names, 1)
    return f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(names)}"
