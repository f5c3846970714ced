"""Settings of quantization-aware training, `[qat]` of a recipe; `fake_quantization` applies them to a module.

The schemes, which import torch, are imported when a module is prepared or when a spec is checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from birdie.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from birdie.small.qat.fake_quantization import FakeQuantization

Levels = Literal["ternary", "binary"]
_KINDS = ("bits", "sigma", "levels", "scheme", "budget")


@dataclass(frozen=True, slots=True)
class Qat:
    """Settings of quantization-aware training; off unless `bits`, `sigma`, `levels`, `scheme` or `budget` is set.

    The first three are quantized on the device and inside compiled graphs. A scheme, also one from another package, is
    encoded and decoded on the CPU at every use, which is exact and slow: it is for schemes that have no other way.
    `budget` takes what the export will store, and encodes it only a few times (`birdie.small.stored_training`).

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    bits: Annotated[int | None, Parameter(help="Train on the grid of intN: 2 to 8 bits over the row's range.")] = None
    sigma: Annotated[
        float | None, Parameter(help="Train on a grid of this scale in standard deviations of the row, as sigma:0.4.")
    ] = None
    levels: Annotated[
        Levels | None, Parameter(help="Train on the levels of `ternary` (-s, 0, s) or `binary` (-s, s).")
    ] = None
    scheme: Annotated[
        str | None, Parameter(help="Train on what this scheme would store, such as codebook:k=16; slow, on the CPU.")
    ] = None
    budget: Annotated[
        bool, Parameter(negative=(), help="Train on what the export stores within its budget, by its calibration.")
    ] = False
    encodings: Annotated[int, Parameter(help="How often the weights are encoded for that, evenly over the rest.")] = 20
    group_size: Annotated[int, Parameter(help="Columns of a row that share the scale s of levels.")] = 128
    start: Annotated[float, Parameter(help="Fraction of the run after which it is on.")] = 0.0
    below: Annotated[
        float | None,
        Parameter(help="Factor on the learning rates below which it is on; 0.15: late, as in the records."),
    ] = None
    tensors: Annotated[tuple[str, ...], Parameter(negative=(), help="Name patterns of the matrices to quantize.")] = (
        "*",
    )

    def __post_init__(self) -> None:
        kinds = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) > 1:
            raise ConfigError(f"qat has {' and '.join(f'{n} {getattr(self, n)}' for n in kinds)}; set one of them")
        if self.levels not in (None, "ternary", "binary"):
            raise ConfigError(f"qat levels {self.levels!r} is unknown; choose ternary or binary")
        if self.scheme is not None:
            from birdie.compress.registry import parse_spec

            parse_spec(self.scheme)
        if self.group_size < 1:
            raise ConfigError(f"qat group_size {self.group_size} is out of range; choose 1 or more columns")
        if self.bits is not None and not 2 <= self.bits <= 8:
            raise ConfigError(f"qat bits {self.bits} is out of range; choose 2 to 8")
        if self.sigma is not None and not 2.0**-10 <= self.sigma <= 2.0**4:
            raise ConfigError(f"qat sigma {self.sigma} is out of range; choose a scale of 2^-10 to 16 deviations")
        if not 0 <= self.start < 1:
            raise ConfigError(f"qat start {self.start} is out of range; choose a fraction of the run, 0 to below 1")
        if self.below is not None and not 0 < self.below <= 1:
            raise ConfigError(f"qat below {self.below} is out of range; choose a factor above 0, up to 1")
        if self.encodings < 1:
            raise ConfigError(f"qat encodings {self.encodings} is out of range; encode at least once")
        if not self.tensors:
            raise ConfigError("qat tensors is empty; give a name pattern such as 'blocks.*'")

    @property
    def enabled(self) -> bool:
        """True if there is something to quantize."""
        return any(getattr(self, name) not in (None, False) for name in _KINDS)

    def progress(self, fraction: float, multiplier: float) -> float | None:
        """Return how far quantization-aware training is on its way, 0 to 1; None while it is off.

        Args:
            fraction: of the run that is done.
            multiplier: factor on the learning rates.
        """
        if fraction < self.start or (self.below is not None and multiplier >= self.below):
            return None
        if self.below is None:
            return (fraction - self.start) / (1 - self.start)
        return 1 - multiplier / self.below

    @property
    def spec(self) -> str:
        """The spec of the scheme that stores the weights as they are trained."""
        if self.scheme is not None:
            return self.scheme
        if self.levels is not None:
            return f"{self.levels}:group_size={self.group_size}"
        if self.budget:
            return "trellis"
        return f"int{self.bits}" if self.bits is not None else f"sigma:{self.sigma:g}"

    def prepare(self, module: "nn.Module", notify: Callable[[str], None] = lambda _: None) -> "FakeQuantization":
        """Make `module` use quantized weights in training mode, once `before_step` or `switch` turns it on.

        Args:
            module: only the classes of its layers change; `remove()` undoes that.
            notify: called with the line that names the scheme and says how far it moves the weights.

        Raises:
            ConfigError: nothing is set to quantize by, no matrix matches, or `module` is prepared already.
        """
        if not self.enabled or self.budget:
            raise ConfigError(f"qat has no scheme of its own; set one of {', '.join(_KINDS[:-1])}")
        from birdie.small.qat.fake_quantization import FakeQuantization

        return FakeQuantization(self, module, notify)
