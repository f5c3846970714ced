"""A recipe: every setting of a run in one value that can be saved, compared and run again.

The settings are defined in the modules that use them (`GPTConfig`, `TrainSettings`, …); this module nests them.
`birdie.gpt.run.recipe_loading` resolves a recipe from files, variables and flags.
"""

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from cyclopts import Parameter

from birdie.compress import parse_size
from birdie.entropy import Effort
from birdie.errors import ConfigError
from birdie.gpt.data.data_order import Order, unknown_order
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.run.values import typed
from birdie.gpt.score.settings import EvaluationSettings, ValidationSettings
from birdie.gpt.train.settings import (
    AverageSettings,
    BanditSettings,
    OptimizerSettings,
    TrainingTables,
    TrainSettings,
    comma_separated,
)
from birdie.small import Qat

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    R = TypeVar("R", bound=DataclassInstance)
else:
    R = TypeVar("R")

DEFAULT_SCHEME = "int8"
EMBEDDING = "tok_emb.weight"
"""Name of the token embedding, tied or not. Bigram and value embeddings are stored like other matrices."""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Shards, tokenizer, and the order in which training reads the shards."""

    path: Annotated[
        str, Parameter(show=True, env_var="DATA_PATH", help="Folder of shards (`*_train_*.bin`, `*_val_*.bin`).")
    ] = "./data/datasets/fineweb10B_sp1024"
    train: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Training shards by name or glob, instead of the folder.")
    ] = ()
    val: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Validation shards by name or glob, instead of the folder.")
    ] = ()
    tokenizer: Annotated[
        str, Parameter(show=True, env_var="TOKENIZER_PATH", help="A SentencePiece `.model`, or `bytes`.")
    ] = "./data/tokenizers/fineweb_1024_bpe.model"
    order: Annotated[
        Order,
        Parameter(
            env_var="LOADER_MODE",
            help="sequential: the challenge's endless stream; shuffled: blocks of one sequence in random order; "
            "coprime: such blocks from a growing mix of shards; packed: documents in a row, separated by attention.",
        ),
    ] = "sequential"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ConfigError(unknown_order(self.order))
        if bool(self.train) != bool(self.val):
            raise ConfigError("data.train and data.val together replace the data folder; give both or neither")


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Data and size of the calibration, which measures the sensitivity of the loss to each weight before the export."""

    data: Annotated[
        Literal["none", "train", "own"],
        Parameter(
            show=True,
            env_var="CALIBRATION_DATA",
            help="train: the run's training shards; own: sampled from the model itself; none: no calibration.",
        ),
    ] = "none"
    tokens: Annotated[
        int, Parameter(env_var="CALIBRATION_TOKENS", help="Tokens of calibration; a fifth of them is held out.")
    ] = 65_536
    reserve_seconds: Annotated[
        float,
        Parameter(env_var="GPTQ_RESERVE_SECONDS", help="Seconds of the wall-clock cap that calibration has."),
    ] = 15.0
    temperature: Annotated[float, Parameter(help="Sampling temperature of the model's own samples.")] = 0.8
    seed: Annotated[int, Parameter(help="Random seed of the model's own samples.")] = 0

    def __post_init__(self) -> None:
        if self.data not in ("none", "train", "own"):
            raise ConfigError(f"calibration data is {self.data!r}; choose none, train or own")
        if self.tokens < 1:
            raise ConfigError(f"calibration on {self.tokens} tokens is not possible; give tens of thousands")
        if not 0 <= self.reserve_seconds < math.inf:
            raise ConfigError(f"reserve_seconds is {self.reserve_seconds}; give seconds from 0, or leave it out")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"calibration temperature is {self.temperature}; it must be finite and above 0")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"calibration seed is {self.seed}; it must be from 0 to {2**63 - 1}")


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Size, schemes and coding effort of the artifact that is exported from the trained weights."""

    budget: Annotated[
        str | None,
        Parameter(show=True, help="Maximum size of the artifact: 16MB = 16,000,000 bytes, 16MiB = 16,777,216."),
    ] = None
    scheme: Annotated[
        str, Parameter(help="Scheme of every matrix that no other setting names; a budget replaces it.")
    ] = DEFAULT_SCHEME
    embedding: Annotated[
        str | None,
        Parameter(help="Scheme of the token embedding, even under a budget: fp16, int7. None: as other matrices."),
    ] = None
    attention: Annotated[
        str | None, Parameter(help="Scheme of the matrices of attention, even under a budget. None: as other matrices.")
    ] = None
    mlp: Annotated[str | None, Parameter(help="Scheme of the matrices of the MLPs, even under a budget.")] = None
    int4_layers: Annotated[
        tuple[int, ...],
        Parameter(
            env_var="INT4_LAYERS",
            env_var_split=comma_separated,
            negative=(),
            help="Layers whose int8 symbols are rounded to multiples of --export.int4-step.",
        ),
    ] = ()
    int4_step: Annotated[int, Parameter(env_var="INT4_STEP", help="4 leaves 64 levels: int6.")] = 4
    effort: Annotated[Effort, Parameter(help="Entropy coding effort: max (smallest) or fast.")] = "max"

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_size(self.budget)
        every = (self.scheme, self.embedding, self.attention, self.mlp)
        specs = [spec for spec in every if spec is not None and spec != DEFAULT_SCHEME]
        if specs:  # an invalid scheme is an error before training, not after it
            from birdie.compress import parse_spec

            for spec in specs:
                parse_spec(spec)
        if self.int4_step < 1 or self.int4_step > 64:
            raise ConfigError(f"int4_step is {self.int4_step}; it must be from 1 to 64")
        if any(layer < 0 for layer in self.int4_layers):
            raise ConfigError(f"int4_layers is {self.int4_layers}; layers count from 0")
        if self.effort not in ("max", "fast"):
            raise ConfigError(f"effort is {self.effort!r}; choose max or fast")

    def pinned(self) -> list[tuple[str, str]]:
        """Return (name pattern, spec) pairs that hold even under a budget."""
        specs = {EMBEDDING: self.embedding, "blocks.*.attn.*": self.attention, "blocks.*.mlp.*": self.mlp}
        return [(pattern, spec) for pattern, spec in specs.items() if spec is not None]

    def schemes(self) -> list[tuple[str, str]]:
        """Return (name pattern, spec) pairs; the first match decides."""
        layers = dict.fromkeys(self.int4_layers)
        special = [(f"blocks.{layer}.*", f"int8:level_stride={self.int4_step}") for layer in layers]
        return [*special, *self.pinned(), ("*", self.scheme)]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Log lines and checkpoints of a run."""

    log_every: Annotated[
        int,
        Parameter(
            show=True,
            env_var="TRAIN_LOG_EVERY",
            help="Steps between lines of the log, after the first ten; 15 silent seconds give one, too. 0: none.",
        ),
    ] = 200
    checkpoint_every: Annotated[
        int, Parameter(help="Steps between checkpoints; 0 keeps one only at the end and on Ctrl-C.")
    ] = 500
    keep_checkpoints: Annotated[
        int, Parameter(help="Newest checkpoints that are kept; a run returns to an older one if the newest is damaged.")
    ] = 2
    checkpoint_deltas: Annotated[
        bool,
        Parameter(
            name=["--run.checkpoint-deltas", "--checkpoint-deltas"],
            negative=(),
            help="Keep every checkpoint in checkpoints.birdie/, as a lossless difference to the one before; "
            "`birdie decompress` restores any step.",
        ),
    ] = False

    def logs(self, step: int) -> bool:
        """Return True if this step gets a line in the log."""
        return self.log_every > 0 and (step <= 10 or step % self.log_every == 0)

    def __post_init__(self) -> None:
        if self.log_every < 0:
            raise ConfigError(f"log_every is {self.log_every}; it must be 0 (none) or a number of steps")
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; it must be 0 (never) or a number of steps")
        if self.keep_checkpoints < 1:
            raise ConfigError(f"keep_checkpoints is {self.keep_checkpoints}; keep at least 1, better 2")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every setting of a run, in nested tables."""

    data: DataSettings = field(default_factory=DataSettings)
    model: GPTConfig = field(default_factory=GPTConfig)
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    average: AverageSettings = field(default_factory=AverageSettings)
    bandit: BanditSettings = field(default_factory=BanditSettings)
    qat: Qat = field(default_factory=Qat)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    device: Annotated[str, Parameter(show=True, help="auto, cuda, mps or cpu.")] = "auto"

    def __post_init__(self) -> None:
        unknown = [layer for layer in self.export.int4_layers if layer >= self.model.num_layers]
        if unknown:
            raise ConfigError(
                f"int4_layers names layer {unknown[0]}, but the model has layers 0 to {self.model.num_layers - 1}"
            )
        self.evaluation.check(self.evaluation.seq_len or self.train.train_seq_len)
        kind, floor = self.average.kind, self.train.min_lr
        if kind != "none" and self.qat.levels is not None:
            raise ConfigError(
                f"average {kind} of weights that train on {self.qat.levels} levels lies between the levels, which "
                "loses the result of training; turn one of the two off"
            )
        if self.qat.budget and (self.export.budget is None or self.calibration.data == "none"):
            raise ConfigError(
                "qat budget trains on what the export stores within its budget, by calibration; set export.budget and "
                "calibration.data (train or own)"
            )
        thresholds = {"swa_below": self.average.swa_below if kind == "swa" else None, "qat below": self.qat.below}
        for name, below in thresholds.items():
            if below is not None and below <= floor:
                raise ConfigError(
                    f"{name} is {below:g}, but the learning rates never fall below min_lr {floor:g} of their peaks; "
                    f"raise it above {floor:g}"
                )

        if self.data.order == "packed" and not self.model.isolate_documents:
            raise ConfigError("data order packed separates documents by attention only; set model.isolate_documents")
        if self.data.order == "packed" and self.model.rope_train_seq_len:
            raise ConfigError(
                f"rope_train_seq_len {self.model.rope_train_seq_len} would rotate packed rows, which are longer than "
                "any sequence, by another base than scoring does; set it to 0, or choose another data order"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with the settings `values`; the inverse of `to_dict`."""
        return _build(cls, values, "")

    def to_toml(self) -> str:
        """Return the recipe as TOML, which `load_recipe` reads back to an equal recipe."""
        return to_toml(self.to_dict())

    @property
    def reserved_seconds(self) -> float:
        """Seconds of the wall-clock cap that calibration has; 0 without calibration or without a cap."""
        calibrates = self.calibration.data != "none" and self.train.cap_ms is not None
        return self.calibration.reserve_seconds if calibrates else 0.0

    @property
    def training(self) -> TrainSettings:
        """Settings of the training, whose cap is what calibration leaves of it.

        Raises:
            ConfigError: calibration leaves nothing.
        """
        cap, seconds = self.train.max_wallclock_seconds, self.reserved_seconds
        if not seconds:
            return self.train
        if seconds >= cap:
            raise ConfigError(
                f"calibration has {seconds:.1f} s of a cap of {cap:g} s, which leaves no time for training; lower "
                "calibration.reserve_seconds, or raise max_wallclock_seconds"
            )
        return dataclasses.replace(self.train, max_wallclock_seconds=cap - seconds)

    @property
    def tables(self) -> TrainingTables:
        """Settings of the steps, with the cap that calibration leaves."""
        return TrainingTables(self.training, self.optimizer, self.average, self.bandit)

    @property
    def scores_twice(self) -> bool:
        """True if an artifact is scored by [evaluation] as well, because that differs from plain windows."""
        return self.evaluation.in_effect() != EvaluationSettings().in_effect()

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with any setting."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]


def typed_setting(value: Any, hint: Any, name: str) -> Any:
    """Return a value of TOML or JSON as the setting `name` of type `hint` has it."""
    try:
        return typed(value, hint)
    except ConfigError as error:
        raise ConfigError(f"{name} is {repr(value)[:80]}; {error}") from None


def _build(kind: type[R], values: Any, path: str) -> R:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{kind.__name__} is {repr(values)[:80]}, not a table of settings; give one")
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{kind.__name__} has no setting {key[:80]!r}{hint}")
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{path}{key}.")
        else:
            arguments[key] = typed_setting(value, hints[key], path + key)
    return kind(**arguments)


def to_toml(values: Mapping[str, Any]) -> str:
    """Return plain values and tables as a TOML file; None, which TOML lacks, is left out."""
    return "\n".join(_toml_lines(values, "")).lstrip("\n") + "\n"


def _toml_lines(values: Mapping[str, Any], path: str) -> Iterator[str]:
    # a table's own values come before the tables in it: after [a.b] they would be b's
    yield from (f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict | None))
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ("", f"[{path}{key}]")
            yield from _toml_lines(value, f"{path}{key}.")


def _toml(value: Any) -> str:
    # TOML's strings, numbers, booleans and arrays of these are spelled as JSON spells them
    return json.dumps(value)


def setting_names(tables: Mapping[str, Any], path: str = "") -> set[str]:
    """Return the full names of the settings in nested tables."""
    return {
        name
        for key, value in tables.items()
        for name in (setting_names(value, f"{path}{key}.") if isinstance(value, Mapping) else (path + key,))
    }
