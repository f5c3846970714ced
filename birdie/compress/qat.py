"""Quantization-aware training: layers see weights as the grid would store them, gradients pass straight through.

    parameter w ──► step of its row, rounding ──► Q(w) − w, no gradient ──► × flag ──► + w = what the layer uses
         ▲                                                                               │
         └───────────────────────────── gradient, as it is ──────────────────────────────┘

Each layer's class is replaced by a child whose `weight` is a property; the parameter stays where it was, so names,
state dicts and optimizers notice nothing. The property answers in training mode only: what is scored in evaluation mode
is the float model. The switch is a tensor that the graph reads: a Python flag would be a constant to the compiler, and
records have trained for weeks with their late QAT folded away by it.

Straight-through estimation: Bengio et al. 2013 (arXiv 1308.3432). Soft rounding: Agustsson & Theis 2020 (arXiv
2006.09952). Noise instead of rounding, drawn anew at each use, for layers that a forward pass uses several times.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from birdie.compress.calibration.modes import in_mode
from birdie.compress.log_scales import PER_OCTAVE, SMALLEST
from birdie.compress.schemes.grid import FINEST
from birdie.compress.schemes.ternary import GROUP_SIZE
from birdie.compress.small_tensors import is_matrix
from birdie.errors import ConfigError

Rounding = Literal["hard", "soft", "noise"]
Levels = Literal["ternary", "binary"]
_TINY = 1e-30  # variance or step below which a gradient would leave float32
_SOFTEST, _SHARPEST = 1.0, 24.0  # slope of soft rounding at the first and the last step; 24 is hard but for 1 in 10


@dataclass(frozen=True, slots=True)
class Qat:
    """On which grid to train, from when, and how it rounds; off unless `bits`, `sigma` or `levels` is given.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    bits: Annotated[int | None, Parameter(help="Train on the grid of intN: 2 to 8 bits over the row's range.")] = None
    sigma: Annotated[
        float | None, Parameter(help="Train on steps of so many standard deviations of the row, as sigma:0.4 does.")
    ] = None
    levels: Annotated[
        Levels | None, Parameter(help="Train on the grid of `ternary` (-s, 0, s) or `ternary:binary` (-s, s).")
    ] = None
    group: Annotated[int, Parameter(help="Columns of a row that share the scale s of levels.")] = GROUP_SIZE
    start: Annotated[float, Parameter(help="Share of the run after which it is on.")] = 0.0
    below: Annotated[
        float | None,
        Parameter(help="Factor on the learning rates below which it is on; 0.15: late, as in the records."),
    ] = None
    rounding: Annotated[
        Rounding, Parameter(help="hard; soft: ever harder; noise: uniform, anew at each use, for looped layers.")
    ] = "hard"
    rate: Annotated[float, Parameter(help="Nats of loss that one bit per weight is worth while it is on.")] = 0.0
    tensors: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Name patterns of the matrices that it is for.")
    ] = ("*",)

    def __post_init__(self) -> None:
        given = [name for name in ("bits", "sigma", "levels") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"qat has {' and '.join(f'{n} {getattr(self, n)}' for n in given)}; give one of them")
        if self.levels is not None:
            if self.levels not in ("ternary", "binary"):
                raise ConfigError(f"qat levels {self.levels!r} is unknown; choose ternary or binary")
            if self.rounding != "hard" or self.rate:
                raise ConfigError("qat levels are rounded hard and have no rate; leave rounding and rate out")
        if self.group < 1:
            raise ConfigError(f"qat group {self.group} is out of range; choose 1 or more columns")
        if self.bits is not None and not 2 <= self.bits <= 8:
            raise ConfigError(f"qat bits {self.bits} is out of range; choose 2 to 8")
        if self.sigma is not None and not 2.0**-10 <= self.sigma <= 2.0**4:
            raise ConfigError(f"qat sigma {self.sigma} is out of range; choose a step of 2^-10 to 16 deviations")
        if not 0 <= self.start < 1:
            raise ConfigError(f"qat start {self.start} is out of range; choose a share of the run from 0 to below 1")
        if self.below is not None and not 0 < self.below <= 1:
            raise ConfigError(f"qat below {self.below} is out of range; choose a factor above 0, up to 1")
        if self.rounding not in ("hard", "soft", "noise"):
            raise ConfigError(f"qat rounding {self.rounding!r} is unknown; choose hard, soft or noise")
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"qat rate {self.rate} is out of range; give nats of loss for a bit per weight")
        if not self.tensors:
            raise ConfigError("qat tensors is empty; give a name pattern such as 'blocks.*'")

    @property
    def enabled(self) -> bool:
        """Whether there is anything to prepare."""
        return self.bits is not None or self.sigma is not None or self.levels is not None

    def stored(self, module: nn.Module) -> list[tuple[str, str]]:
        """(name, spec) of what is trained on levels and must be stored on them; any other grid is free to choose."""
        spec = f"{self.levels}:group_size={self.group}"
        return [] if self.levels is None else [(name, spec) for name, _, _ in _matrices(module, self.tensors)]

    def prepare(self, module: nn.Module, notify: Callable[[str], None] = lambda _: None) -> "Quantizing":
        """Make `module` use quantized weights in training mode, once `before_step` or `switch` turns it on.

        Args:
            module: is changed in the classes of its layers only; `remove()` undoes it.
            notify: gets the line that says what was turned on, and by how much it moves the weights.

        Raises:
            ConfigError: neither bits, sigma nor levels is set, no matrix matches, or `module` is prepared already.
        """
        if not self.enabled:
            raise ConfigError("qat has no grid; set bits, sigma or levels")
        return Quantizing(self, module, notify)

    def step(self, rows: Tensor) -> Tensor:
        """The step of each row as `Grid` stores it, in sixteenths of an octave: (rows, columns) → (rows, 1)."""
        octaves = torch.log2(self._wanted(rows).clamp_min(SMALLEST)) * PER_OCTAVE
        # a range has to fit, so it is rounded up; what is a sixteenth but for float32 counts as one
        whole = torch.ceil(octaves - 1e-3) if self.sigma is None else torch.round(octaves)
        return torch.exp2(whole / PER_OCTAVE)

    def quantized(self, weight: Tensor, sharpness: Tensor) -> Tensor:
        """`weight` as the grid, or its stand-in, has it: same shape and dtype, no gradient. Rows as `Grid` counts them.

        Args:
            weight: any shape.
            sharpness: 0-d, slope of soft rounding; the other kinds ignore it.
        """
        with torch.no_grad():
            rows = _rows(weight)
            if self.levels is not None:
                return self._of_levels(rows).view_as(weight).to(weight.dtype)
            step = self.step(rows)
            scaled = rows / step
            if self.rounding == "noise":
                symbols = scaled + torch.rand_like(scaled) - 0.5
            elif self.rounding == "soft":
                below = torch.floor(scaled)
                curve = torch.tanh((scaled - below - 0.5) * sharpness / 2) / torch.tanh(sharpness / 4)
                symbols = below + 0.5 + 0.5 * curve
            else:
                symbols = torch.round(scaled)
            if self.bits is not None:
                symbols = symbols.clamp(-self._top, self._top)
            return (symbols * step).view_as(weight).to(weight.dtype)

    def bits_of(self, weight: Tensor) -> Tensor:
        """Differentiable entropy of the symbols of `weight` in bits (0-d): each row a Laplace distribution, rounded.

        Exact for such rows, 0.07 bit a weight too much for Gaussian ones. The step moves with the row, so bits fall
        where a row's shape becomes more peaked, not where it shrinks.
        """
        rows = _rows(weight)
        mean = rows.abs().mean(1) / self._wanted(rows).squeeze(1).clamp_min(_TINY)
        return _laplace_bits(mean).sum() * rows.shape[1]

    def _of_levels(self, rows: Tensor) -> Tensor:
        """Rows of -s, 0 and s, or -s and s, with a scale for each group as `Ternary` fits and stores it."""
        height, width = rows.shape
        group = min(self.group, width)
        parts = torch.nn.functional.pad(rows, (0, -width % group)).view(height, -1, group).double()
        sizes = parts.abs()
        if self.levels == "binary":
            real = torch.ones(width, device=rows.device, dtype=torch.float64)
            counts = torch.nn.functional.pad(real, (0, -width % group)).view(-1, group).sum(1)
            scale = sizes.sum(2) / counts
        else:  # the best set is a prefix of the weights by size, and its best scale their mean
            totals = sizes.sort(dim=2, descending=True).values.cumsum(2)
            scales = totals / torch.arange(1, group + 1, device=rows.device)
            best = (scales * totals).argmax(2, keepdim=True)
            scale = scales.gather(2, best).squeeze(2)
        octaves = torch.round(torch.log2(scale.clamp_min(SMALLEST)) * PER_OCTAVE) / PER_OCTAVE
        step = torch.where(scale > 0, torch.exp2(octaves), 0.0)[..., None]
        signs = parts.sign() if self.levels == "ternary" else torch.where(parts < 0, -1.0, 1.0)
        kept = sizes > step / 2 if self.levels == "ternary" else torch.ones_like(sizes, dtype=torch.bool)
        return (signs * kept * step).view(height, -1)[:, :width].to(rows.dtype)

    def _wanted(self, rows: Tensor) -> Tensor:
        """The step of each row before it is rounded to one that can be stored, (rows, 1); 0 for rows of zeros."""
        most = rows.abs().amax(1, keepdim=True)
        if self.sigma is None:
            return most / self._top
        spread = rows.var(1, correction=0, keepdim=True).clamp_min(_TINY).sqrt() * self.sigma
        return torch.maximum(torch.where(most > 0, spread, most), most * FINEST)

    @property
    def _top(self) -> int:
        return int(2 ** ((self.bits or 8) - 1) - 1)


def _rows(weight: Tensor) -> Tensor:
    wide = weight if weight.dtype is torch.float64 else weight.float()
    return wide.reshape(weight.shape[0], -1)


def _laplace_bits(mean: Tensor) -> Tensor:
    """Entropy in bits of a Laplace distribution of mean magnitude `mean`, rounded to integers; 0 at 0."""
    mean = mean.clamp_min(0.02)  # 1e-20 bits; below, the exponentials leave float32
    some = torch.exp(-0.5 / mean)  # chance of not being zero
    ratio = torch.exp(-1 / mean)  # of one magnitude to the one before
    none = -torch.expm1(-0.5 / mean)
    rest = -torch.expm1(-1 / mean)
    zero = -none * torch.log2(none)
    return zero - some * (torch.log2(some * rest / 2) + ratio / rest * torch.log2(ratio))


class Switch:
    """What a graph reads: whether quantization is on, and the slope of soft rounding."""

    def __init__(self, device: torch.device) -> None:
        self.active = torch.zeros((), dtype=torch.bool, device=device)
        self.sharpness = torch.full((), _SOFTEST, device=device)


class Quantizing:
    """A module in quantization-aware training.

    Attributes:
        settings: what it was prepared with.
        module: the module itself.
        names: of the tensors that are quantized.
        on: whether they are at the moment.
    """

    def __init__(self, settings: Qat, module: nn.Module, notify: Callable[[str], None]) -> None:
        self.settings, self.module, self.on, self._notify = settings, module, False, notify
        self._told = False
        found = list(_matrices(module, settings.tensors))
        if not found:
            raise ConfigError(
                f"qat patterns {', '.join(settings.tensors)} match no matrix of 4096 weights or more; check the names"
            )
        if any(hasattr(type(part), "unquantized") for _, part, _ in found):
            raise ConfigError("the module is in quantization-aware training already; call remove() of that first")
        self.names = tuple(name for name, _, _ in found)
        self._parts = [(part, key) for _, part, key in found]
        self._switches: dict[torch.device, Switch] = {}
        self._weights = sum(p.numel() for p in {id(p): p for p in self._parameters()}.values())
        keys: dict[nn.Module, list[str]] = {}
        for part, key in self._parts:
            keys.setdefault(part, []).append(key)
        for part, own in keys.items():
            part.__class__ = _child(type(part), {key: self._property(part, key) for key in own})

    def before_step(self, step: int, share: float, multiplier: float) -> None:
        """Turn it on or off for the step to come: a pure function of where the run is, so resuming needs no memory.

        Args:
            step: finished steps; -1 while priming, of which nothing is told.
            share: of the run that is done, 0 to 1.
            multiplier: factor on the learning rates.
        """
        settings = self.settings
        on = share >= settings.start and (settings.below is None or multiplier < settings.below)
        if settings.below is None:
            progress = (share - settings.start) / (1 - settings.start)
        else:
            progress = 1 - multiplier / settings.below
        self.switch(on, progress)
        if on and not self._told and step >= 0:
            self._told = True
            self._notify(f"{self.evidence()} from step {step + 1} on")

    def switch(self, on: bool, progress: float = 1.0) -> None:
        """Turn it on or off, soft rounding `progress` (0 to 1) of its way to hard. Compiled graphs follow."""
        self.on = on
        slope = _SOFTEST * (_SHARPEST / _SOFTEST) ** min(1.0, max(0.0, progress))
        for switch in self._switches.values():
            switch.active.fill_(on)
            switch.sharpness.fill_(slope)

    def rate(self) -> Tensor:
        """Differentiable bits that the symbols of all tensors take (0-d), tied ones once."""
        weights = {id(p): p for p in self._parameters()}.values()
        return torch.stack([self.settings.bits_of(weight) for weight in weights]).sum()

    def penalty(self) -> Tensor | None:
        """What to add to the loss of a step (0-d): the settings' rate times the bits per weight; None if it is off."""
        return self.rate() * (self.settings.rate / self._weights) if self.on and self.settings.rate else None

    def evidence(self) -> str:
        """One line: how many tensors and weights, and how far what a layer reads is from its parameter."""
        moved = total = 0.0
        with torch.no_grad(), in_mode((part for part, _ in self._parts), training=True):
            for part, key in self._parts:
                weight = part._parameters[key]
                assert weight is not None
                moved += float((getattr(part, key) - weight).double().square().sum())
                total += float(weight.double().square().sum())
        settings = self.settings
        grid = settings.levels or (f"int{settings.bits}" if settings.bits is not None else f"sigma:{settings.sigma:g}")
        away = 100 * math.sqrt(moved / total) if total else 0.0
        return (
            f"qat {grid} {self.settings.rounding}: {len(self.names)} tensors, {self._weights:,} weights, "
            f"moved by {away:.3g} % of their norm"
        )

    def remove(self) -> None:
        """Give the layers back their classes; the parameters are as training left them."""
        for part, _ in self._parts:
            if "unquantized" in vars(type(part)):
                part.__class__ = vars(type(part))["unquantized"]
        self.on = False

    def _parameters(self) -> Iterator[Tensor]:
        for part, key in self._parts:
            weight = part._parameters[key]
            assert weight is not None
            yield weight

    def _property(self, part: nn.Module, key: str) -> property:
        weight = part._parameters[key]
        assert weight is not None
        switch = self._switches.setdefault(weight.device, Switch(weight.device))
        settings = self.settings

        def read(layer: nn.Module) -> Tensor | None:
            weight = layer._parameters[key]
            if weight is None or not layer.training:
                return weight
            moved = settings.quantized(weight, switch.sharpness) - weight.detach()
            return weight + torch.where(switch.active, moved, torch.zeros_like(moved))

        return property(read)


def _matrices(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, layer, the layer's own name for it) of each trainable matrix that a pattern matches."""
    for prefix, part in module.named_modules():
        for key, weight in part._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            usable = weight is not None and weight.requires_grad and is_matrix(weight)
            if usable and any(fnmatchcase(name, pattern) for pattern in patterns):
                yield name, part, key


def _child(parent: type[nn.Module], properties: dict[str, property]) -> type[nn.Module]:
    """A class like `parent` whose parameters of these names are read through properties."""
    return type(parent.__name__, (parent,), {**properties, "unquantized": parent, "__module__": parent.__module__})
