"""Contract of a scoring mode: a frozen dataclass of settings with a generator of the losses of a token stream.

    Scoring(model, text, …) ──► mode.score(scoring) ──► Losses(firsts, nats), …  ──► the evaluator records them
                                        └──► at the end, TrainingReport, if the mode trains the model

The dataclass of a mode is all there is to it: its fields are a table of recipes, command-line flags and JSON, its name
and docstring are the help. A mode that ships is one field of `settings.EvaluationSettings`; one of another package is
passed to `evaluate` in a request, or registered under its name (`settings.register`). A mode must yield the loss of
every target exactly once, and may use only tokens up to position i for the loss at position i. What it has yielded is
recorded, and final, when it goes on: then it may learn from it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

from cyclopts import Parameter

from birdie.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from birdie.gpt.model.gpt import GPT
    from birdie.gpt.score.accumulator import Text
    from birdie.gpt.score.ledger import Ledger
    from birdie.system.distributed import World

M = TypeVar("M", bound="ScoringMode")


ORDERS = (16, 8, 6, 5, 4, 3, 2, 1)
MAX_ORDER, MAX_ORDERS = 64, 16
MAX_BETA = 8.0
"""Largest β in either direction: the odds of a hint change by at most a factor of e^8."""

COUNTS = 6
"""Buckets of an order: the candidate followed once, 2 or 3 times, more often; another token never or sometimes did."""


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """Settings of the n-gram logit bias, which modifies the predictions of a scoring mode.

    Raises:
        ConfigError: a value is out of range.
    """

    enabled: Annotated[
        bool, Parameter(env_var="NGRAM_TILT_ENABLED", help="Move predictions toward what followed the same tokens.")
    ] = False
    orders: Annotated[tuple[int, ...], Parameter(negative=(), help="Context lengths in tokens.")] = ORDERS
    beta: Annotated[
        float | None,
        Parameter(env_var="TOKEN_BOOST", help="Nats added to the hint's logit; default: learned while scoring."),
    ] = None
    threshold: Annotated[
        float, Parameter(env_var="TOKEN_THRESHOLD", help="Least hit rate of a bucket whose candidates become hints.")
    ] = 0.0
    table_bits: Annotated[
        int, Parameter(help="Each order has 2 to this power slots of 8 bytes; use 22 for a full validation split.")
    ] = 20

    def __post_init__(self) -> None:
        if not 1 <= len(set(self.orders)) == len(self.orders) <= MAX_ORDERS:
            raise ConfigError(f"ngram orders are {self.orders}; give 1 to {MAX_ORDERS} different ones, such as 8, 4, 2")
        if not all(1 <= order <= MAX_ORDER for order in self.orders):
            raise ConfigError(f"ngram orders are {self.orders}; each must be from 1 to {MAX_ORDER} tokens")
        if self.beta is not None and not -MAX_BETA <= self.beta <= MAX_BETA:
            raise ConfigError(f"ngram beta is {self.beta}; it must be from -{MAX_BETA:g} to {MAX_BETA:g}, such as 2")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"ngram threshold is {self.threshold}; it is a hit rate, from 0 to 1")
        if not 4 <= self.table_bits <= 28:
            raise ConfigError(f"ngram table_bits is {self.table_bits}; it must be from 4 to 28")

    @property
    def buckets(self) -> int:
        """Number of buckets, over all orders."""
        return COUNTS * len(self.orders)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, whatever the length of the stream."""
        return len(self.orders) * 8 << self.table_bits


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """Settings that several scoring modes share."""

    mode: Annotated[
        str, Parameter(show=True, help="Scoring mode, such as windows, streaming or ttt-sgd (docs/scoring.md).")
    ] = "windows"
    seq_len: Annotated[
        int,
        Parameter(
            env_var="EVAL_SEQ_LEN",
            help="Length of windows, or context of streaming; 0: the sequence length of training.",
        ),
    ] = 0
    stride: Annotated[
        int,
        Parameter(
            show=True,
            env_var=("EVAL_STRIDE", "SLIDING_EVAL_STRIDE"),
            help="Tokens between the starts of sliding windows; 0: non-overlapping windows.",
        ),
    ] = 0
    documents: Annotated[bool, Parameter(help="Start windows, or the stream, anew with each document.")] = False
    batch_seqs: Annotated[
        int,
        Parameter(
            env_var=("EVAL_BATCH_SEQS", "SLIDING_BATCH_SIZE"),
            help="Windows, or segments of a stream, in a batch over all ranks; 0: as many as fit "
            "validation.batch-tokens, or memory.",
        ),
    ] = 0
    temperature: Annotated[float, Parameter(help="Divides the logits. Never tune it on what is scored.")] = 1.0
    budget_seconds: Annotated[
        float, Parameter(help="Time for the whole evaluation, import and decoding included; 0: unlimited.")
    ] = 600.0
    ngram: NgramSettings = field(default_factory=NgramSettings)

    def __post_init__(self) -> None:
        for name in ("seq_len", "stride", "batch_seqs", "budget_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"evaluation {name} is {getattr(self, name)}; it must be at least 0")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"evaluation temperature is {self.temperature}; it must be finite and above 0")

    def table(self, kind: type[M]) -> M:
        """Return the settings of the mode `kind`: those of its table, or the defaults."""
        values = (getattr(self, setting.name) for setting in fields(self))
        return next((value for value in values if type(value) is kind), None) or kind()


def _one_rank() -> "World":
    from birdie.system.distributed import World

    return World()


@dataclass(frozen=True, slots=True)
class Scoring:
    """One evaluation of one model on one stream: what a mode works with.

    Attributes:
        model: in evaluation mode; a mode that trains it restores the weights.
        text: tokens and what counts their bytes.
        ledger: marks what was recorded; a mode declares to it what it learns from.
        length: tokens of a window, or of the context.
        settings: shared by the modes.
        batch_tokens: inputs in a batch over all ranks, unless the settings say how many windows.
        world: ranks that share the work.
        hint_tokens: (N,) token at each position whose log-probability is needed beside the target's loss; None: none.
    """

    model: "GPT"
    text: "Text"
    ledger: "Ledger"
    length: int
    device: "torch.device"
    settings: ScoringSettings = field(default_factory=ScoringSettings)
    batch_tokens: int = 65_536
    world: "World" = field(default_factory=_one_rank)
    hint_tokens: "NDArray[np.integer[Any]] | None" = None

    @property
    def tokens(self) -> "NDArray[np.uint16]":
        """Tokens of the stream, (N + 1,); the target at position i is token i + 1."""
        return self.text.tokens

    @property
    def bos_id(self) -> int:
        """Token that begins a document."""
        return self.text.bos_id

    @property
    def window_batch_tokens(self) -> int:
        """Inputs in a batch of windows over all ranks."""
        return self.settings.batch_seqs * self.length or self.batch_tokens


class Losses(NamedTuple):
    """Losses of targets at positions firsts[i] …, a row each.

    Attributes:
        firsts: (rows,) positions.
        nats: (rows, n) float64.
        hint_logp: (rows, n) log-probabilities of `Scoring.hint_tokens`, if there are any.
    """

    firsts: "NDArray[np.integer[Any]]"
    nats: "NDArray[np.float64]"
    hint_logp: "NDArray[np.float64] | None" = None


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Work of a mode that trains the model on what it has scored (test-time training).

    Attributes:
        chunks: units of work of the stream.
        steps: optimizer steps.
        tokens: targets in all steps, counted once for each step they are in.
        diagnostics: one line for the log: how much was trained, and that weights changed.
    """

    train_seconds: float
    chunks: int
    steps: int
    tokens: int
    diagnostics: str


class ScoringMode(ABC):
    """Base of scoring modes, which are frozen dataclasses; the first line of the docstring is the help text.

    Attributes:
        name: value of `--mode`; with _ for -, the name of its table in recipes.
        shared: settings of `ScoringSettings` that the mode reads, beside seq_len and budget_seconds.
        tables: other modes whose settings it reads.
        ngram_bias: it yields the log-probabilities of `Scoring.hint_tokens`, which the n-gram bias needs.
        packaged: it needs no more of the model than the losses of windows, which a package computes.
        trains: it trains the model, or adapters, on what it has scored, and returns a report.
        log_name: beginning of the result's line in the log of `train_gpt.py`.
    """

    __slots__ = ()

    name: ClassVar[str]
    shared: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[tuple[type["ScoringMode"], ...]] = ()
    ngram_bias: ClassVar[bool] = False
    packaged: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    log_name: ClassVar[str] = "final_eval"

    @abstractmethod
    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        """Yield the losses of this rank's share of the targets of `scoring.tokens`."""

    @abstractmethod
    def describe(self, scoring: Scoring) -> str:
        """Return what `score` does, in a few words for the log, such as "sliding windows of 1,024, stride 64"."""

    def check(self, settings: ScoringSettings, length: int) -> None:
        """Raise ConfigError where the settings do not fit each other, or windows of `length`."""
        del settings, length  # most modes have nothing to check

    @property
    def left_to_right(self) -> bool:
        """True unless a loss may depend on tokens that come later in the stream and were scored earlier."""
        return True

    def values(self) -> dict[str, Any]:
        """Return the mode's own settings in plain values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every mode is a dataclass

    @classmethod
    def table_name(cls) -> str:
        """Return the name of the mode's table in recipes."""
        return cls.name.replace("-", "_")

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring, without its period."""
        return (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")
