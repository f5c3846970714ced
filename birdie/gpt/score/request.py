"""Request for an evaluation: everything it needs beside the artifact, in one value.

EvaluationRequest ─┬─ data, tokenizer, limits, device, dtype, package
                   └─ settings: changes of those of the artifact's recipe ──► resolve ──► settings, scoring mode
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.settings import MODES, EvaluationSettings, is_read, replaced
from birdie.system.outputs import Kind, require_output

_ANY = Kind("a file", b"")  # a package that is there is read first
_OUTPUT = Parameter(converter=lambda _, tokens: require_output(tokens[0].value, kind=_ANY))
_PYTHON_ONLY = Parameter(parse=False)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Evaluation request: what to score, with which settings and where; None: as the artifact's recipe has it.

    Attributes:
        settings: changes of the recipe's settings as a nested mapping, such as {"mode": "ttt-sgd", "ttt_sgd": {"lr":
            0.01}}; or all settings, in place of the recipe's.
        mode: a scoring mode with its settings, in place of the one that the settings name; it need not be registered.

    Raises:
        ConfigError: a value is out of range.
    """

    data: Annotated[
        str | None,
        Parameter(show=True, help="Folder of shards, or validation shards by name or glob; default: the recipe's."),
    ] = None
    tokenizer: Annotated[str | None, Parameter(show=True, help="A .model file or `bytes`; default: the recipe's.")] = (
        None
    )
    max_tokens: Annotated[
        int | None, Parameter(show=True, help="Score only this many tokens; 0: the full split; default: the recipe's.")
    ] = None
    batch_tokens: Annotated[
        int | None, Parameter(help="Inputs in a batch over all ranks; default: the recipe's validation.batch-tokens.")
    ] = None
    device: Annotated[str, Parameter(show=True, help="auto, cuda, mps or cpu.")] = "auto"
    dtype: Annotated[str | None, Parameter(show=True, help="auto, float32 or bfloat16; default: that of training.")] = (
        None
    )
    package: Annotated[
        Path | None,
        _OUTPUT,
        Parameter(help="Score windows by code compiled ahead of time, in this file; compiled if it is missing."),
    ] = None
    settings: Annotated[EvaluationSettings | Mapping[str, Any] | None, _PYTHON_ONLY] = None
    mode: Annotated[ScoringMode | None, _PYTHON_ONLY] = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}; give a number of tokens, or 0 for all")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ConfigError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")

    def resolve(self, recipe: EvaluationSettings) -> tuple[EvaluationSettings, ScoringMode]:
        """Return the settings of the recipe with the changes of this request, and the scoring mode.

        Raises:
            ConfigError: there is no such setting, a value is out of range, or a change has no part in the mode.
        """
        changes: Mapping[str, Any] = {}
        if isinstance(self.settings, EvaluationSettings):
            settings, mode = self.settings, self.settings.scoring_mode
        else:
            changes = self.settings or {}
            settings, mode = _changed(recipe, changes)
        mode = self.mode or mode
        default = EvaluationSettings()  # a value that asks for nothing, such as stride 0, may be given to any mode
        unread = [
            name
            for name, value in changes.items()
            if not is_read(name, mode) and value != {} and value != getattr(default, name, None)
        ]
        if unread:
            fitting = [name for name, kind in MODES.items() if all(is_read(setting, kind) for setting in unread)]
            remedy = f", or choose --mode {' or '.join(fitting)}" if fitting else ""
            verb = "has" if len(unread) == 1 else "have"
            raise ConfigError(
                f"{' and '.join(unread)} {verb} no part in scoring mode {mode.name}; leave that out{remedy}"
            )
        return settings, mode


def _changed(recipe: EvaluationSettings, changes: Mapping[str, Any]) -> tuple[EvaluationSettings, ScoringMode]:
    """Return the settings of the recipe, and the mode they name, with `changes`.

    A registered mode has no field in the settings, so its table is taken out before the rest is applied.
    """
    fields_of_modes = {setting.name for setting in fields(recipe)}
    registered = {kind.table_name() for kind in MODES.values()} - fields_of_modes
    tables = {name: value for name, value in changes.items() if name in registered}
    settings = replaced(recipe, {name: value for name, value in changes.items() if name not in tables}, "evaluation")
    mode = settings.scoring_mode
    return settings, replaced(mode, tables.get(mode.table_name(), {}), f"evaluation.{mode.table_name()}")
