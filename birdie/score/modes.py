"""Scoring modes that ship: the settings of each, what they must not contradict, and a description for the log.

    windows            non-overlapping and sliding windows           `windows`
    streaming          one pass through a rolling KV cache           `streaming`
    ttt-sgd            windows, and SGD on what was scored           `ttt.sgd`
    ttt-lora           documents, and adapters of each               `ttt.lora`
    ttt-multi-phase    the same, and SGD between documents           `ttt.multi_phase`

The last column is the module that scores. It imports torch, so it is imported when a mode scores: recipes and the flags
of `birdie train` and `birdie evaluate` need the settings alone.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.model.config import ADAPTED_PARTS, AdaptedPart
from birdie.score.mode import Scoring, ScoringMode, ScoringSettings, TrainingReport

LearningRate = Annotated[float, Parameter(help="Learning rate of the first chunk; it falls as a cosine.")]
Epochs = Annotated[int, Parameter(help="Passes over a chunk after it was scored.")]


class WindowedMode(ScoringMode):
    """Base of modes that score the windows which the shared settings ask for."""

    __slots__ = ()

    shared: ClassVar[tuple[str, ...]] = ("stride", "documents", "batch_seqs", "temperature")
    ngram_bias: ClassVar[bool] = True

    def describe(self, scoring: Scoring) -> str:
        settings, length = scoring.settings, f"{scoring.length:,}"
        if settings.documents:
            words = f"windows of {length} in each document, stride {settings.stride or scoring.length:,}"
        elif settings.stride:
            words = f"sliding windows of {length}, stride {settings.stride:,}"
        else:
            words = f"non-overlapping windows of {length}"
        return words + describe_temperature(settings)

    def check(self, settings: ScoringSettings, length: int) -> None:
        if settings.stride > length:
            raise ConfigError(f"stride {settings.stride} is longer than windows of {length}; give 1 to {length}")


@dataclass(frozen=True, slots=True)
class WindowMode(WindowedMode):
    """Score non-overlapping windows, or sliding windows with --stride, in each document with --documents."""

    name: ClassVar[str] = "windows"
    packaged: ClassVar[bool] = True

    def score(self, scoring: Scoring) -> TrainingReport | None:
        from birdie.score.windows import score_windows, windows_of

        score_windows(scoring, windows_of(scoring))
        return None


def describe_temperature(settings: ScoringSettings) -> str:
    """Return the temperature in words; empty at 1."""
    return f", temperature {settings.temperature:g}" if settings.temperature != 1.0 else ""


@dataclass(frozen=True, slots=True)
class StreamingMode(ScoringMode):
    """Score each token once through a rolling KV cache.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    name: ClassVar[str] = "streaming"
    shared: ClassVar[tuple[str, ...]] = ("documents", "batch_seqs", "temperature")
    ngram_bias: ClassVar[bool] = True

    chunk: Annotated[int, Parameter(help="Tokens of a call; the context moves on by as many.")] = 256
    sinks: Annotated[int, Parameter(help="First tokens of the stream that stay visible (attention sinks).")] = 0
    kv_bits: Annotated[
        int, Parameter(help="Bits of a coordinate of cached keys and values: 2, 3, 4 or 8; 0: not quantized.")
    ] = 0
    segments: Annotated[
        int, Parameter(help="Segments of the stream that are scored side by side, each after a context of its own.")
    ] = 1
    exact: Annotated[bool, Parameter(help="Start the cache anew where it is full: equals non-overlapping windows.")] = (
        False
    )

    def __post_init__(self) -> None:
        for name, minimum in (("chunk", 1), ("segments", 1), ("sinks", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"streaming {name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.kv_bits not in (0, 2, 3, 4, 8):
            raise ConfigError(f"streaming kv_bits is {self.kv_bits}; choose 2, 3, 4 or 8, or 0 for no quantization")
        if self.exact and (self.sinks or self.segments > 1 or self.kv_bits):
            raise ConfigError(
                "an exact stream equals windows, which have no sinks, segments or quantized cache; leave these out"
            )

    def score(self, scoring: Scoring) -> TrainingReport | None:
        from birdie.score.streaming import score_stream

        score_stream(scoring, self)
        return None

    def describe(self, scoring: Scoring) -> str:
        from birdie.score.streaming import segments_of

        temperature, length = describe_temperature(scoring.settings), f"{scoring.length:,}"
        if self.exact:
            return f"exact streaming, context {length}{temperature}"
        count = 1 if scoring.settings.documents else len(segments_of(scoring, self))
        parts = " in each document" if scoring.settings.documents else f" in {count} segments" if count > 1 else ""
        sinks = f" and {self.sinks} sinks" if self.sinks else ""
        bits = f", keys and values in {self.kv_bits} bits" if self.kv_bits else ""
        chunk = min(self.chunk, scoring.length)
        return f"streaming{parts}, context {length}{sinks}, chunks of {chunk:,} tokens{bits}{temperature}"

    def check(self, settings: ScoringSettings, length: int) -> None:
        if settings.documents and self.segments > 1:
            raise ConfigError(
                "streaming in each document has no segments; leave one of documents and streaming segments out"
            )
        room = max(0, length - self.chunk)
        if self.sinks > room:
            raise ConfigError(
                f"{self.sinks} sinks do not fit a context of {length} that moves on by {self.chunk}; "
                f"give 0 to {room}, or smaller chunks"
            )


@dataclass(frozen=True, slots=True)
class SGDSettings:
    """Settings of SGD with momentum over the whole model; the defaults are those of parameter-golf#549.

    Raises:
        ConfigError: a value is out of range.
    """

    lr: LearningRate = 0.002
    epochs: Epochs = 3
    chunk_tokens: Annotated[int, Parameter(help="Tokens of a chunk, which share a learning rate.")] = 32_768
    momentum: Annotated[float, Parameter(help="Decay of the accumulated gradient.")] = 0.9
    batch_seqs: Annotated[int, Parameter(help="Sequences of a step over all ranks.")] = 32
    grad_clip: Annotated[float, Parameter(help="Largest norm of the gradient; 0: unlimited.")] = 1.0
    freeze_blocks: Annotated[
        int, Parameter(help="First blocks that are not trained; embedding and head always are.")
    ] = 0

    def __post_init__(self) -> None:
        for name in ("lr", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"SGD {name} is {getattr(self, name)}; it must be a number of at least 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"SGD momentum is {self.momentum}; it must be in [0, 1)")
        for name, minimum in {"epochs": 1, "chunk_tokens": 1, "batch_seqs": 1, "freeze_blocks": 0}.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"SGD {name} is {getattr(self, name)}; it must be at least {minimum}")


@dataclass(frozen=True, slots=True)
class SGDMode(SGDSettings, WindowedMode):
    """Score windows chunk by chunk, and train the model by SGD on each chunk after it was scored."""

    name: ClassVar[str] = "ttt-sgd"
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "legal_ttt"

    def score(self, scoring: Scoring) -> TrainingReport | None:
        from birdie.score.ttt.sgd import score_chunks
        from birdie.score.windows import windows_of

        return score_chunks(scoring, windows_of(scoring), self)

    def describe(self, scoring: Scoring) -> str:
        return f"{WindowedMode.describe(self, scoring)}, SGD on chunks of {self.chunk_tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class LoRAMode(ScoringMode):
    """Score each document in chunks, and train adapters of its own on each chunk after it was scored.

    The defaults are those of parameter-golf#1530.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    name: ClassVar[str] = "ttt-lora"
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "ttt_lora"

    rank: Annotated[int, Parameter(env_var="TTT_LORA_RANK", help="Rank of the adapters.")] = 96
    alpha: Annotated[
        float, Parameter(env_var="TTT_LORA_ALPHA", help="The adapters' output is scaled by alpha / rank; 0: by 1.")
    ] = 0.0
    parts: Annotated[
        tuple[AdaptedPart, ...],
        Parameter(negative=(), help="Adapted parts: q, k, v, o (around attention), mlp (around the MLP), head."),
    ] = ADAPTED_PARTS
    lr: Annotated[float, Parameter(env_var="TTT_LORA_LR", help="Learning rate of AdamW.")] = 1e-4
    beta1: Annotated[float, Parameter(env_var="TTT_BETA1", help="Decay of AdamW's first moment.")] = 0.0
    beta2: Annotated[float, Parameter(env_var="TTT_BETA2", help="Decay of AdamW's second moment.")] = 0.999
    eps: Annotated[float, Parameter(help="Epsilon of AdamW.")] = 1e-10
    weight_decay: Annotated[float, Parameter(env_var="TTT_WEIGHT_DECAY", help="Weight decay of AdamW.")] = 0.5
    chunk: Annotated[
        int, Parameter(env_var="TTT_CHUNK_SIZE", help="Tokens of a document that are scored before a step.")
    ] = 48
    context: Annotated[
        int,
        Parameter(env_var="TTT_EVAL_SEQ_LEN", help="Most inputs of a window; 0: the sequence length of evaluation."),
    ] = 0
    batch_docs: Annotated[int, Parameter(env_var="TTT_BATCH_SIZE", help="Documents side by side on a rank.")] = 64
    warm_a: Annotated[
        bool, Parameter(env_var="TTT_WARM_START_A", help="A continues from the document before; B starts at zero.")
    ] = False
    seed: Annotated[int, Parameter(help="Seed of the initial A.")] = 0

    def __post_init__(self) -> None:
        for name in ("rank", "chunk", "batch_docs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("lr", "weight_decay", "alpha"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be a number of at least 0")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"LoRA eps is {self.eps}; it must be a number above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.parts or any(part not in ADAPTED_PARTS or self.parts.count(part) > 1 for part in self.parts):
            raise ConfigError(
                f"LoRA parts are {', '.join(self.parts)}; choose of {', '.join(ADAPTED_PARTS)}, each once"
            )
        if self.context < 0:
            raise ConfigError(f"LoRA context is {self.context}; it must be at least 0")
        if self.context:
            self.check_chunk(self.context)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"LoRA seed is {self.seed}; it must be from 0 to {2**63 - 1}")

    def score(self, scoring: Scoring) -> TrainingReport | None:
        from birdie.score.ttt.lora import score_documents

        return score_documents(scoring, self, context=self.context_of(scoring.length))

    def describe(self, scoring: Scoring) -> str:
        windows = f"windows of {self.context_of(scoring.length):,}"
        return f"documents in chunks of {self.chunk}, {windows}, LoRA of rank {self.rank} per document"

    def check(self, settings: ScoringSettings, length: int) -> None:
        del settings
        self.check_chunk(self.context_of(length))

    @property
    def left_to_right(self) -> bool:
        """False with warm A: then a document may follow, in its row, one that comes later in the stream."""
        return not self.warm_a

    def context_of(self, length: int) -> int:
        """Return the most inputs of a window where windows of evaluation have `length`."""
        return self.context or length

    def check_chunk(self, context: int) -> None:
        """Raise ConfigError where chunks are longer than windows of `context` inputs."""
        if self.chunk > context:
            raise ConfigError(
                f"LoRA chunks of {self.chunk} tokens do not fit windows of {context}; use smaller chunks, or a longer "
                "context"
            )


@dataclass(frozen=True, slots=True)
class MultiPhaseMode(SGDSettings, ScoringMode):
    """Score documents as ttt-lora does, and between them train the model by SGD on the documents so far.

    The adapters are those of ttt-lora's settings; the defaults are those of parameter-golf#1610 and #1626.

    Raises:
        ConfigError: a value is out of range.
    """

    name: ClassVar[str] = "ttt-multi-phase"
    tables: ClassVar[tuple[type[ScoringMode], ...]] = (LoRAMode,)
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "ttt_phased"

    lr: LearningRate = 0.001
    epochs: Epochs = 1
    prefix_docs: Annotated[
        int, Parameter(env_var="PHASED_TTT_PREFIX_DOCS", help="First documents of the queue that the model trains on.")
    ] = 2000
    phases: Annotated[
        int, Parameter(env_var="PHASED_TTT_NUM_PHASES", help="Phases, each on all of these documents so far.")
    ] = 3

    def __post_init__(self) -> None:
        SGDSettings.__post_init__(self)
        for name in ("prefix_docs", "phases"):
            if getattr(self, name) < 1:
                raise ConfigError(f"multi-phase {name} is {getattr(self, name)}; it must be at least 1")

    def score(self, scoring: Scoring) -> TrainingReport | None:
        from birdie.score.ttt.lora import score_documents
        from birdie.score.ttt.multi_phase import SGDPhases

        lora = scoring.settings.table(LoRAMode)
        return score_documents(scoring, lora, context=lora.context_of(scoring.length), phases=SGDPhases(self))

    def describe(self, scoring: Scoring) -> str:
        return f"{scoring.settings.table(LoRAMode).describe(scoring)}, SGD on the model in up to {self.phases} phases"

    def check(self, settings: ScoringSettings, length: int) -> None:
        settings.table(LoRAMode).check(settings, length)

    @property
    def left_to_right(self) -> bool:
        """False: the model trains on long documents before shorter ones, earlier in the stream, are scored."""
        return False

    def ends(self, documents: int) -> list[int]:
        """Return after how many documents of the queue each phase takes place, without phases that add none."""
        prefix = min(self.prefix_docs, documents)
        return sorted({prefix * (phase + 1) // self.phases for phase in range(self.phases)} - {0})
