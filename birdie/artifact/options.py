"""Options of what writes and reads .birdie files. Each is defined once: name, type, check, help and default.

    SaveOptions ──┬──► birdie.save(…): signature, types, docstring    birdie/system/keywords.py
                  ├──► birdie compress --FLAG                         birdie/cli/compress_flags.py
                  ├──► the tables in docs/api/files.md                scripts/docs.py
                  └──► checks of each value, then of combinations     __post_init__

An option whose `Parameter` says `parse=False` has no flag. This module imports no torch, so that the help of a command
is fast.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter, Token

from birdie.compress.rate.target import Target, size_of
from birdie.compress.spec_examples import spec_examples
from birdie.entropy.hints import EffortOption
from birdie.errors import ConfigError
from birdie.system.callbacks import Progress
from birdie.system.combinations import Excludes, Needs, Rule, require
from birdie.system.keywords import Check, More, checked
from birdie.system.parsing import parse_duration, whole_number

if TYPE_CHECKING:
    import torch

    from birdie.artifact.base import BaseOption
    from birdie.compress.calibration.result import CalibrationResult
    from birdie.compress.calibration.sensitivity import Calibration
    from birdie.compress.rate.assignment import Schemes

    CalibrationOption = Calibration | CalibrationResult | Literal["synthetic"]
else:  # for the command line, which reads the types; what they are takes seconds to import
    BaseOption = CalibrationOption = Any
    Schemes = list[str]

COMBINATIONS: tuple[Rule, ...] = (
    Excludes("lossless", ("budget", "bits", "quality", "scheme", "calibration", "tune"), "keeps every bit"),
    Excludes("budget", ("bits", "quality"), "sets the size"),
    Excludes("bits", ("quality",), "sets the size"),
    Needs("quality", ("data",), "is measured on data"),
    Needs("tune", ("inputs",), "trains on inputs"),
    Needs("cache_bytes", ("lazy",), "limits the cache of lazy loading"),
)
"""Combinations of options that are refused."""
_WORDS = {
    "data": "calibration=birdie.calibrate(model, example_inputs=inputs), or (model, batches, loss)",
    "inputs": "calibration=birdie.calibrate(model, example_inputs=inputs)",
}


def _schemes(_: Any, tokens: Iterable[Token]) -> "Schemes":
    from birdie.compress.rate.assignment import schemes_of

    return schemes_of([token.value for token in tokens])


def _text(tokens: Iterable[Token]) -> str:
    return next(iter(tokens)).value


def _seconds(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return parse_duration(value)
    if not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf:
        return value
    raise ConfigError(f"{name}={value!r} is not a number of seconds")


def _number(name: str, value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a number") from None


def _effort(name: str, value: Any) -> Any:
    if value in get_args(EffortOption):
        return value
    raise ConfigError(f"{name} {value!r} is unknown; choose auto, max or fast")


def _json(name: str, value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    raise ConfigError(f"{name} is a {type(value).__name__}; give a dict")


def _calibration(name: str, value: Any) -> Any:
    if isinstance(value, str) and value != "synthetic":
        raise ConfigError(f"{name} {value!r} is unknown; give (module, batches, loss) or 'synthetic'")
    if value is not None and not isinstance(value, str):
        from birdie.compress.calibration.result import CalibrationResult, require_triple

        if not isinstance(value, CalibrationResult):
            require_triple(value)
    return value


def _beginning(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is a {type(value).__name__}; give the beginning of names, such as 'encoder.'")


def _progress(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool) or callable(value):
        return value
    raise ConfigError(f"{name}={value!r} is no function; give True for a bar, or a function of (done, total)")


def chosen(options: Any) -> set[str]:
    """Return the names of the options that do not have their defaults, and "inputs" or "data" of a calibration."""
    names = {option.name for option in fields(options) if getattr(options, option.name) != option.default}
    if "calibration" not in names:
        return names
    return names | ({"inputs"} if isinstance(options.calibration, str) else {"inputs", "data"})


def _require(options: Any) -> None:
    checked(options)
    require(COMBINATIONS, chosen(options), lambda name: _WORDS.get(name, name))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Size or quality of a file, and the schemes of its tensors."""

    scheme: Annotated[
        "Schemes | None",
        Parameter(
            negative=(),
            converter=_schemes,
            help="SPEC for all matrices, or PATTERN=SPEC, repeatable, of which the first that matches a name wins. "
            f"SPEC: {', '.join(spec_examples())}; or a scheme of an installed package (docs/schemes.md).",
        ),
        More(
            'In Python a spec ("int6"), a `birdie.schemes` object, or rules (pattern, spec). Default: '
            '"feedback:bits=8", eight bits over the range of each row, with small tensors in 16 bits or lossless.'
        ),
    ] = None
    budget: Annotated[
        int | str | None,
        Check(size_of),
        Parameter(help="Largest size of the file in bytes, or such as 16MB or 16MiB."),
        More("The precision of tensors without a rule is chosen so that the file lands just under it."),
    ] = None
    bits: Annotated[
        float | str | None,
        Check(lambda name, value: Target(bits=_number(name, value)).bits),
        Parameter(help="Largest size of the file in bits per weight, everything included."),
    ] = None
    quality: Annotated[
        float | str | None,
        Check(lambda name, value: Target(quality=_number(name, value)).quality),
        Parameter(help="Largest mean KL divergence from the float model in nats per token; needs a calibration."),
        More(
            "It is measured on batches held out from that. Losses of probabilities (cross-entropy, NLL, binary "
            "cross-entropy): the KL in nats per target (token, image, element). Losses of values (squared, absolute, "
            "Huber, margin): relative squared error of the predictions, Σ ‖decoded − float‖² / Σ ‖float − mean‖². "
            "Losses that call no function of `torch.nn.functional`: relative difference of the loss."
        ),
    ] = None
    calibration: Annotated[
        "CalibrationOption | None",
        Check(_calibration),
        Parameter(
            parse=False,
            help="What `birdie.calibrate` returned, for one file or several: quantization scales then follow the "
            "sensitivity of the loss, and units whose order is arbitrary are sorted.",
        ),
        More(
            'Or its arguments (module, batches, loss). Or "synthetic": inputs are made up for the module, random '
            "tokens for a language model, noise for an image network. With a budget, the file is compared with one by "
            "assumed sensitivities on inputs kept apart, and the better of both, or one by their mean, is written; the "
            "summary's `control` says which."
        ),
    ] = None
    tune: Annotated[
        float | str,
        Check(_seconds),
        Parameter(
            help="Seconds (also 90s or 5min) of training towards the float model's predictions on the "
            "inputs of the calibration: the file is closer to the model at the same size.",
        ),
        More(
            "Matrices are encoded in six parts, and those that are left make up for the errors of the others. The file "
            "is that without tuning, unless it is closer on inputs held out by more than chance. How far it gets "
            "depends on the machine. If it is stopped, the same call goes on after the last part."
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Base and metadata of a file."""

    base: Annotated[
        "BaseOption | None",
        Parameter(
            converter=lambda _, tokens: Path(_text(tokens)),
            help="Checkpoint, folder or .birdie file like this one, such as an earlier step, or the model before "
            "fine-tuning. The deltas alone are stored: every bit of them if lossless, else by the same settings "
            "as weights. Decoding needs the same base again.",
        ),
        More("In Python also a module, or a dict of tensors."),
    ] = None
    metadata: Annotated[
        Mapping[str, Any] | None, Check(_json), Parameter(parse=False, help="JSON to store in the file.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Work of the entropy coder; no other option of a file changes its time alone."""

    effort: Annotated[
        EffortOption,
        Check(_effort),
        Parameter(
            help="Effort of the entropy coding: max is the smallest, fast loads fastest; auto is max below 64 million "
            "weights."
        ),
    ] = "auto"
    progress: Annotated[
        Progress | bool | None,
        Check(_progress),
        Parameter(
            parse=False,
            help="True shows a progress bar on stderr or in the notebook; or a function, which is called with (done, "
            "total) as tensors are coded.",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Check(whole_number),
        Parameter(parse=False, help="Threads; None uses every core. The bytes do not depend on it."),
    ] = None

    def __post_init__(self) -> None:
        _require(self)


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Coding, Precision):
    """Options of `birdie.quantize_`."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(Coding, Relation):
    """Options of `birdie.save_object`."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Coding, Relation, Precision):
    """Options of `birdie.save`."""

    lossless: Annotated[
        bool,
        Parameter(
            negative=(), help="Keep every bit of every tensor; of the flag also all other values of the checkpoint."
        ),
    ] = False

    @property
    def target(self) -> Target:
        """Size or quality of the file."""
        return Target(self.budget, self.bits, self.quality, self.lossless)  # type: ignore[arg-type]  # checked

    @property
    def tuning(self) -> float:
        """Seconds of training towards the float model."""
        return float(self.tune)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the decoding of a file, and the base that it may need."""

    base: Annotated[
        "BaseOption | None",
        Parameter(
            help="The checkpoint that a file of deltas was made with: what `save` took, or the same tensors "
            "otherwise. A link of a chain of checkpoints finds its base beside it."
        ),
    ] = None
    max_bytes: Annotated[
        int | None,
        Check(lambda name, value: whole_number(name, value, 0)),
        Parameter(
            help="Refuse to decode more than this; default 1 GiB, 64 × the file or 2 × its base. By default tensors "
            "for which `into` has memory already do not count."
        ),
    ] = None
    max_operations: Annotated[
        int | None,
        Check(lambda name, value: whole_number(name, value, 0)),
        Parameter(
            help="Refuse to decode a file that takes more operations, of about a nanosecond each; default 2 for each "
            "byte that may be decoded, and 65,536 for each of the file. Small files that would take long are refused "
            "by it."
        ),
    ] = None
    schemes: Annotated[
        Collection[str],
        Parameter(
            help="Names of schemes from other packages that this file may use. They are imported, which runs their "
            "code."
        ),
    ] = ()
    workers: Annotated[int | None, Check(whole_number), Parameter(help="Threads; None uses every core.")] = None

    def __post_init__(self) -> None:
        _require(self)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Limits):
    """Options of `birdie.load`, besides those on which depends what it returns."""

    device: Annotated[
        "torch.device | str | None",
        Parameter(
            help="Destination of the tensors (or of the module); default: the CPU (or the module's current device). On "
            'CUDA with Triton, files of effort "fast" are decoded there (birdie.compress.device), to the same bits.'
        ),
    ] = None
    dtype: Annotated[
        "torch.dtype | None",
        Parameter(help="Dtype to which floating tensors (or the module) are cast after decoding."),
    ] = None
    lazy: Annotated[
        bool,
        Parameter(
            help="Decode nothing now, but each tensor when `into` reads it (birdie.artifact.lazy). The module can only "
            "run, where it was loaded: it is put in evaluation mode, and may have been built on the meta device. The "
            "file stays open."
        ),
    ] = False
    cache_bytes: Annotated[
        int | None,
        Check(lambda name, value: whole_number(name, value, 0)),
        Parameter(help="With lazy, most bytes of decoded tensors to keep; default: those of the largest."),
    ] = None
    prefix: Annotated[
        str,
        Check(_beginning),
        Parameter(
            help='Load only tensors whose names begin with it, under the rest of their names: `prefix="encoder."` '
            "with `into=model.encoder`."
        ),
    ] = ""
    names: Annotated[
        Collection[str] | None,
        Parameter(
            help="Load only these tensors (names or patterns, after `prefix`); the others of `into` stay as they are."
        ),
    ] = None
