"""How an artifact is scored at the end, beyond the validation of training: `[evaluation]` of a recipe.

stride 0                  windows end to end, the challenge's own score
stride 64                 sliding windows: each target has at least length − 64 + 1 inputs
documents                 the same, or a stream, in each document by itself
stream                    each token passes the model once, by kept keys and values (`stream`)
adapt sgd                 windows in chunks; the model learns from each chunk once it is scored (`chunks`)
adapt lora                documents side by side, each with adapters that learn it as it is scored (`lora`)
adapt phased              the same, and now and then the model learns from the documents so far (`phased`)
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from cyclopts import Parameter

from birdie.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    S = TypeVar("S", bound=DataclassInstance)
else:
    S = TypeVar("S")

Adapt = Literal["none", "sgd", "lora", "phased"]
DOCUMENTWISE = ("lora", "phased")
LEARN_BY: dict[Adapt, tuple[str, ...]] = {"none": (), "sgd": ("sgd",), "lora": ("lora",), "phased": ("lora", "phased")}
"""The tables of a recipe that say how each learns."""

CHUNK = 256  # of a stream, unless told otherwise
_COUNTS = ("stride", "seq_len", "batch_seqs", "sinks", "budget_seconds")
_POSITIVE = ("chunk", "segments")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Of windows and streams.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    stride: Annotated[
        int,
        Parameter(
            env_var=("EVAL_STRIDE", "SLIDING_EVAL_STRIDE"),
            help="Places between sliding windows; 0: windows end to end.",
        ),
    ] = 0
    seq_len: Annotated[
        int, Parameter(env_var="EVAL_SEQ_LEN", help="Length of windows, or context of a stream; 0: that of training.")
    ] = 0
    documents: Annotated[bool, Parameter(help="Windows, or the stream, begin anew with each document.")] = False
    batch_seqs: Annotated[
        int,
        Parameter(
            env_var=("EVAL_BATCH_SEQS", "SLIDING_BATCH_SIZE"),
            help="Windows, or parts of a stream, at a time over all ranks; 0: chosen, of windows at most "
            "validation.batch-tokens.",
        ),
    ] = 0
    temperature: Annotated[float, Parameter(help="Divides the logits. Never tune it on what is scored.")] = 1.0
    stream: Annotated[bool, Parameter(help="Keep keys and values, so that each token passes the model once.")] = False
    chunk: Annotated[int, Parameter(help="Tokens of a stream at a time; its context moves on by as many.")] = CHUNK
    sinks: Annotated[int, Parameter(help="First tokens of a stream that are always seen.")] = 0
    kv_bits: Annotated[
        int, Parameter(help="Bits of a coordinate of kept keys and values: 2, 3, 4 or 8; 0: as the model computes.")
    ] = 0
    segments: Annotated[
        int, Parameter(help="Parts of a stream that pass side by side, each after a context that is not scored.")
    ] = 1
    exact: Annotated[
        bool, Parameter(help="Begin the stream anew where its context is full, so that it equals windows end to end.")
    ] = False
    adapt: Annotated[
        Adapt,
        Parameter(
            help="Learn from what is scored: sgd: the whole model, chunk by chunk, as [sgd] says; lora: adapters of "
            "each document, as [lora] says; phased: the whole model between documents, too, as [phased] says."
        ),
    ] = "none"
    budget_seconds: Annotated[
        float, Parameter(help="Time an evaluation may take in all, import and decoding included; 0: any.")
    ] = 600.0

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_POSITIVE):
            least = int(name in _POSITIVE)
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"evaluation {name} is {value}; it must be at least {least}")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"evaluation temperature is {self.temperature}; it must be finite and above 0")
        if self.seq_len and self.stride > self.seq_len:
            raise ConfigError(
                f"stride {self.stride} is longer than windows of {self.seq_len}; give 1 to {self.seq_len}"
            )
        if self.adapt not in get_args(Adapt):
            raise ConfigError(f"evaluation adapt is {self.adapt!r}; choose {', '.join(get_args(Adapt))}")
        if self.adapt in DOCUMENTWISE and self.temperature != 1.0:
            raise ConfigError(f"adapt {self.adapt} learns what it scores, at temperature 1; leave the temperature out")
        if self.stream and self.adapt != "none":
            raise ConfigError("a stream keeps keys and values of weights that adaptation changes; adapt with windows")
        if self.kv_bits not in (0, 2, 3, 4, 8):
            raise ConfigError(f"evaluation kv_bits is {self.kv_bits}; choose 2, 3, 4 or 8, or 0 for all there are")
        if self.stream and self.stride:
            raise ConfigError("a stream has no stride: its context moves on by chunk; give stride or stream")
        if not self.stream:
            off = {"sinks": self.sinks, "kv_bits": self.kv_bits, "exact": self.exact, "segments": self.segments - 1}
            off["chunk"] = self.chunk - CHUNK
            for name, value in off.items():
                if value:
                    raise ConfigError(f"{name} is of streams; set stream as well")
        if self.documents and self.segments > 1:
            raise ConfigError("a stream that begins anew with documents has no segments; leave one of the two out")
        if self.exact and (self.sinks or self.segments > 1 or self.kv_bits):
            raise ConfigError(
                "an exact stream equals windows, which know no sinks, segments or kept bits; leave these out"
            )


def parse_changes(text: str, base: S, table: str) -> S:
    """`base` changed by NAME=VALUE,… such as "lr=0.01,epochs=1"; a list is written A+B+C.

    Raises:
        ConfigError: there is no such setting of this table, or a value is none for it.
    """
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        held = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        if name not in held:
            raise ConfigError(f"[{table}] has no setting {name!r}; choose from {', '.join(held)}")
        try:
            changes[name] = _parsed(value.strip(), held[name])
        except (ValueError, KeyError):
            raise ConfigError(f"{table} {name} is {value!r}; give such as {name}={_written(held[name])}") from None
    return dataclasses.replace(base, **changes)


def _parsed(text: str, like: object) -> object:
    if isinstance(like, bool):
        return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
    if isinstance(like, tuple):
        return tuple(part.strip() for part in text.split("+") if part.strip())
    return text if isinstance(like, str) else type(like)(text)  # type: ignore[call-arg]


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
