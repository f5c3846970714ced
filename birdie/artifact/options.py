"""Options of `birdie.save` and its relatives: their types, and all checks of them, before anything is read."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, TypedDict, get_args

from birdie.artifact.base import BaseOption
from birdie.compress.calibration.result import CalibrationResult, require_triple
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.rate.assignment import Schemes
from birdie.compress.rate.target import Target
from birdie.entropy.hints import EffortOption
from birdie.errors import ConfigError
from birdie.system.callbacks import Progress
from birdie.system.parsing import whole_number

CalibrationOption = Calibration | CalibrationResult | Literal["synthetic"] | None


class QuantizeOptions(TypedDict, total=False):
    """Options of `birdie.quantize_`, as `birdie.save` documents them."""

    budget: int | None
    bits: float | None
    quality: float | None
    coder: EffortOption
    calibration: CalibrationOption
    tune: float
    progress: Progress | bool | None
    workers: int | None


class SaveOptions(QuantizeOptions, total=False):
    """Options of `birdie.save`, which documents them."""

    scheme: Schemes | None
    lossless: bool
    base: BaseOption | None
    metadata: Mapping[str, Any] | None


@dataclass(slots=True)
class SaveRequest:
    """The options of one call of `birdie.save`, checked; specs and patterns are parsed by `assign`."""

    _: KW_ONLY
    scheme: Schemes | None = None
    budget: int | None = None
    bits: float | None = None
    quality: float | None = None
    lossless: bool = False
    base: BaseOption | None = None
    coder: EffortOption = "auto"
    calibration: CalibrationOption = None
    tune: float = 0.0
    metadata: Mapping[str, Any] | None = None
    progress: Progress | bool | None = None
    workers: int | None = None
    target: Target = field(init=False)

    def __post_init__(self) -> None:
        self.target = Target(whole_number("budget", self.budget), self.bits, self.quality, self.lossless)
        self.workers = whole_number("workers", self.workers)
        known = self.calibration
        if self.metadata is not None and not isinstance(self.metadata, Mapping):
            raise ConfigError(f"metadata is a {type(self.metadata).__name__}; give a dict")
        if self.coder not in get_args(EffortOption):
            raise ConfigError(f"coder {self.coder!r} is unknown; choose auto, max or fast")
        if self.lossless and (self.scheme is not None or known is not None):
            excluded = "scheme" if self.scheme is not None else "calibration"
            raise ConfigError(f"lossless keeps every bit, so it takes no {excluded}; drop one of the two")
        tune: Any = self.tune
        if isinstance(tune, bool) or not isinstance(tune, Real) or not 0 <= float(tune) < math.inf:
            raise ConfigError(f"tune={tune!r} is not a number of seconds")
        if self.tune and known is None:
            raise ConfigError(
                "tune trains on inputs; give calibration=(module, batches, loss), or 'synthetic' for made-up inputs"
            )
        if isinstance(known, str) and known != "synthetic":
            raise ConfigError(f"calibration {known!r} is unknown; give (module, batches, loss) or 'synthetic'")
        if known is not None and not isinstance(known, CalibrationResult | str):
            require_triple(known)
        if self.quality is not None and (known is None or isinstance(known, str)):
            raise ConfigError(
                "quality is measured on data; give calibration=(module, batches, loss), or a budget instead"
            )
