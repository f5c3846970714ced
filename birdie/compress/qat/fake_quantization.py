"""Fake quantization: layers compute with quantized weights, gradients go straight through to float weights.

    parameter w ──► quantize ──► Q(w) − w, no gradient ──► × switch ──► + w = the weight that the layer uses
         ▲                                                                  │
         └──────────────────────── gradient, unchanged ─────────────────────┘

Layers read their weights through a function in training mode only: validation scores the float model. Each layer gets a
subclass of its class in which `weight` is a property; the parameter stays where it was, so names, state dicts,
optimizers and parameter banks do not change. The switch is a tensor that the compiled graph reads. A Python flag would
be a constant to the compiler: several records trained with their late QAT compiled away.

Straight-through estimation: Bengio et al. 2013 (arXiv 1308.3432). Soft rounding: Agustsson & Theis 2020 (arXiv
2006.09952). Noise in place of rounding, drawn at each use, is for layers that a forward pass uses several times.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.compress.calibration.modes import in_mode
from birdie.compress.log_scales import PER_OCTAVE, SMALLEST
from birdie.compress.registry import decode, parse_spec
from birdie.compress.row_blocks import as_matrix, encoded_blocks
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.grid import FINEST
from birdie.compress.small_tensors import is_matrix
from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.compress.qat.settings import Qat

Layer = tuple[nn.Module, str]
"""A layer, and the attribute of one of its parameters."""
Reader = Callable[[Tensor], Tensor]
_TINY = 1e-30  # variance or scale below which a gradient would leave float32
_SOFTEST, _SHARPEST = 1.0, 24.0  # slope of soft rounding at the first and the last step; 24 is hard but for 1 in 10


def scale_of(settings: "Qat", rows: Tensor) -> Tensor:
    """Return the scale of each row as `Grid` stores it, in sixteenths of an octave: (rows, columns) → (rows, 1)."""
    octaves = torch.log2(_exact_scale(settings, rows).clamp_min(SMALLEST)) * PER_OCTAVE
    # A range has to fit, so its scale is rounded up; 1e-3 keeps float32 from rounding up an exact sixteenth.
    stored = torch.ceil(octaves - 1e-3) if settings.sigma is None else torch.round(octaves)
    return torch.exp2(stored / PER_OCTAVE)


def quantized(settings: "Qat", weight: Tensor, sharpness: Tensor, active: Tensor | None = None) -> Tensor:
    """Return the quantized weight, or its stand-in of soft rounding or noise: same shape and dtype, no gradient.

    Args:
        weight: any shape; rows as `Grid` counts them.
        sharpness: 0-d, slope of soft rounding; the other kinds ignore it.
        active: 0-d bool; where it is False, a scheme returns `weight` as it is, to save the time of encoding.
    """
    with torch.no_grad():
        if settings.scheme is not None:
            stored: Tensor = _stored_by(
                weight.detach(), torch.tensor(True) if active is None else active, settings.scheme
            )
            return stored
        rows = _rows(weight)
        if settings.levels is not None:
            nearest: Tensor = _quantize_to_levels(rows, settings.levels, settings.group_size)
            return nearest.view_as(weight).to(weight.dtype)
        scale = scale_of(settings, rows)
        scaled = rows / scale
        if settings.rounding == "noise":
            symbols = scaled + torch.rand_like(scaled) - 0.5
        elif settings.rounding == "soft":
            below = torch.floor(scaled)
            curve = torch.tanh((scaled - below - 0.5) * sharpness / 2) / torch.tanh(sharpness / 4)
            symbols = below + 0.5 + 0.5 * curve
        else:
            symbols = torch.round(scaled)
        if settings.bits is not None:
            symbols = symbols.clamp(-_top(settings), _top(settings))
        return (symbols * scale).view_as(weight).to(weight.dtype)


def bits_of(settings: "Qat", weight: Tensor) -> Tensor:
    """Return the differentiable entropy of the symbols of `weight` in bits (0-d): each row a rounded Laplace.

    Exact for such rows, 0.07 bit per weight too much for Gaussian ones. The scale follows the row, so bits fall
    where a row's distribution becomes more peaked, not where it shrinks.
    """
    rows = _rows(weight)
    mean = rows.abs().mean(1) / _exact_scale(settings, rows).squeeze(1).clamp_min(_TINY)
    return _laplace_bits(mean).sum() * rows.shape[1]


# A custom operator, because torch 2.13 compiles these cuts of padded float64 into kernels for CPUs that read what lies
# beside them.
@torch.library.custom_op("birdie::quantize_to_levels", mutates_args=())
def _quantize_to_levels(rows: Tensor, levels: str, group_size: int) -> Tensor:
    """Return rows of -s, 0 and s, or -s and s, with the scale s of each group as `Ternary` fits and stores it."""
    height, width = rows.shape
    group = min(group_size, width)
    parts = torch.nn.functional.pad(rows, (0, -width % group)).view(height, -1, group).double()
    sizes = parts.abs()
    if levels == "binary":
        real = torch.ones(width, device=rows.device, dtype=torch.float64)
        counts = torch.nn.functional.pad(real, (0, -width % group)).view(-1, group).sum(1)
        scale = sizes.sum(2) / counts
    else:  # the best set of weights that are not zero is a prefix by size, and its best scale their mean
        totals = sizes.sort(dim=2, descending=True).values.cumsum(2)
        scales = totals / torch.arange(1, group + 1, device=rows.device)
        best = (scales * totals).argmax(2, keepdim=True)
        scale = scales.gather(2, best).squeeze(2)
    octaves = torch.round(torch.log2(scale.clamp_min(SMALLEST)) * PER_OCTAVE) / PER_OCTAVE
    step = torch.where(scale > 0, torch.exp2(octaves), 0.0)[..., None]
    signs = parts.sign() if levels == "ternary" else torch.where(parts < 0, -1.0, 1.0)
    kept = sizes > step / 2 if levels == "ternary" else torch.ones_like(sizes, dtype=torch.bool)
    return (signs * kept * step).view(height, -1)[:, :width].to(rows.dtype).contiguous()


@_quantize_to_levels.register_fake
def _(rows: Tensor, _levels: str, _group_size: int) -> Tensor:
    return rows.new_empty(rows.shape)


def _exact_scale(settings: "Qat", rows: Tensor) -> Tensor:
    """Return the scale of each row before it is rounded to a stored one, (rows, 1); 0 for rows of zeros."""
    most = rows.abs().amax(1, keepdim=True)
    if settings.sigma is None:
        return most / _top(settings)
    spread = rows.var(1, correction=0, keepdim=True).clamp_min(_TINY).sqrt() * settings.sigma
    return torch.maximum(torch.where(most > 0, spread, most), most * FINEST)


def _top(settings: "Qat") -> int:
    return int(2 ** ((settings.bits or 8) - 1) - 1)


def storage_rules(settings: "Qat", module: nn.Module) -> list[tuple[str, str]]:
    """Return (name, spec) of the tensors that must be stored as they were trained.

    These are those of levels and of a scheme; for a grid any other scheme may be chosen.
    """
    if settings.levels is None and settings.scheme is None:
        return []
    return [(name, settings.spec) for name, _, _ in trainable_matrices(module, settings.tensors)]


def _rows(weight: Tensor) -> Tensor:
    wide = as_matrix(weight if weight.dtype is torch.float64 else weight.float())
    return wide.reshape(len(wide), -1)


def _laplace_bits(mean: Tensor) -> Tensor:
    """Return the entropy in bits of a Laplace distribution of mean magnitude `mean`, rounded to integers; 0 at 0.

    The symbols' magnitudes are geometric: with r = exp(-1 / mean), P(0) = 1 - √r and P(±k) = √r (1 - r) rᵏ⁻¹ / 2, whose
    entropy has a closed form.
    """
    mean = mean.clamp_min(0.02)  # 1e-20 bits; below, the exponentials leave float32
    nonzero = torch.exp(-0.5 / mean)
    ratio = torch.exp(-1 / mean)
    zero = -torch.expm1(-0.5 / mean)
    rest = -torch.expm1(-1 / mean)
    return -zero * torch.log2(zero) - nonzero * (torch.log2(nonzero * rest / 2) + ratio / rest * torch.log2(ratio))


@lru_cache(maxsize=64)
def _scheme(spec: str) -> Scheme:
    return parse_spec(spec)


# A custom operator, so that torch.compile calls it as it is: encoders are numpy and numba, not graphs.
@torch.library.custom_op("birdie::stored_by", mutates_args=())
def _stored_by(weight: Tensor, active: Tensor, spec: str) -> Tensor:
    """Return `weight` as the scheme of `spec` would store it; a copy if not `active`."""
    if not active:
        return weight.clone()
    scheme, wide = _scheme(spec), weight.float().cpu()
    matrix = wide if scheme.by_axes else as_matrix(wide)
    blocks = encoded_blocks(matrix, tuple(wide.shape), by_rows=False)
    stored = torch.cat([decode(scheme.encode("weight", matrix[rows])) for rows in blocks])
    return stored.view(wide.shape).to(weight.device, weight.dtype)


@_stored_by.register_fake
def _(weight: Tensor, _active: Tensor, _spec: str) -> Tensor:
    return torch.empty_like(weight)


class Switch:
    """Tensors that a graph reads: True while quantization is on, and the slope of soft rounding."""

    def __init__(self, device: torch.device) -> None:
        self.active = torch.zeros((), dtype=torch.bool, device=device)
        self.sharpness = torch.full((), _SOFTEST, device=device)


class FakeQuantization:
    """A module in quantization-aware training; a `StepHook` of birdie's training loop.

    Attributes:
        settings: that it was prepared with.
        module: whose layers were changed.
        names: of the tensors that are quantized.
        on: True while they are.
    """

    def __init__(self, settings: "Qat", module: nn.Module, notify: Callable[[str], None]) -> None:
        self.settings, self.module, self.on, self._notify = settings, module, False, notify
        self._announced = False
        matrices = matrices_to_train(module, settings.tensors)
        self.names, self._layers = tuple(matrices), list(matrices.values())
        self._switches: dict[torch.device, Switch] = {}
        self._weights = sum(p.numel() for p in {id(p): p for p in self._parameters()}.values())
        read_through(self._layers, self._reader)

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Turn it on or off for the next step: a pure function of the position in the run, so resuming needs no state.

        Args:
            step: finished steps; -1 during warm-up, which is not announced.
            fraction: of the run that is done, 0 to 1.
            multiplier: factor on the learning rates.
        """
        progress = self.settings.progress(fraction, multiplier)
        on = progress is not None
        self.switch(on, progress or 0.0)
        if on and not self._announced and step >= 0:
            self._announced = True
            self._notify(f"{self.diagnostics()} from step {step + 1} on")

    def switch(self, on: bool, progress: float = 1.0) -> None:
        """Turn it on or off, soft rounding `progress` (0 to 1) of its way to hard. Compiled graphs follow."""
        self.on = on
        slope = _SOFTEST * (_SHARPEST / _SOFTEST) ** min(1.0, max(0.0, progress))
        for switch in self._switches.values():
            switch.active.fill_(on)
            switch.sharpness.fill_(slope)

    def rate(self) -> Tensor:
        """Return the differentiable bits of the symbols of all tensors (0-d), tied ones once."""
        weights = {id(p): p for p in self._parameters()}.values()
        return torch.stack([bits_of(self.settings, weight) for weight in weights]).sum()

    def penalty(self) -> Tensor | None:
        """Return what to add to the loss of a step (0-d): `rate` times the bits per weight; None if it is off."""
        return self.rate() * (self.settings.rate / self._weights) if self.on and self.settings.rate else None

    def diagnostics(self) -> str:
        """Return one line: tensors, weights, and how far the weights that layers use are from the parameters."""
        moved = total = 0.0
        with torch.no_grad(), in_mode((layer for layer, _ in self._layers), training=True):
            for layer, key in self._layers:
                weight = parameter(layer, key)
                moved += float((getattr(layer, key) - weight).double().square().sum())
                total += float(weight.double().square().sum())
        settings = self.settings
        distance = 100 * math.sqrt(moved / total) if total else 0.0
        return (
            f"qat {settings.levels or settings.spec} {settings.rounding}: {len(self.names)} tensors, "
            f"{self._weights:,} weights, moved by {distance:.3g} % of their norm"
        )

    def remove(self) -> None:
        """Give the layers back their classes; the parameters stay as training left them."""
        read_plainly(self._layers)
        self.on = False

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter(layer, key) for layer, key in self._layers)

    def _switch_on(self, device: torch.device) -> Switch:
        """Return a new switch on `device`, set as the others are."""
        other, switch = next(iter(self._switches.values())), Switch(device)
        switch.active.copy_(other.active)
        switch.sharpness.copy_(other.sharpness)
        self._switches[device] = switch
        return switch

    def _reader(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what a layer reads in place of its parameter."""
        self._switches.setdefault(weight.device, Switch(weight.device))
        settings, switches = self.settings, self._switches

        def read(weight: Tensor) -> Tensor:
            switch = switches.get(weight.device) or self._switch_on(weight.device)  # the module may have moved
            moved = quantized(settings, weight, switch.sharpness, switch.active) - weight.detach()
            return weight + torch.where(switch.active, moved, torch.zeros_like(moved))

        return read


def trainable_matrices(module: nn.Module, patterns: Iterable[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, layer, attribute of the layer) of each trainable matrix that a name pattern matches."""
    for prefix, layer in module.named_modules():
        for key, weight in layer._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            usable = weight is not None and weight.requires_grad and is_matrix(weight)
            if usable and any(fnmatchcase(name, pattern) for pattern in patterns):
                yield name, layer, key


def matrices_to_train(module: nn.Module, patterns: Sequence[str]) -> dict[str, Layer]:
    """Return `trainable_matrices` by name."""
    matrices = {name: (layer, key) for name, layer, key in trainable_matrices(module, patterns)}
    if not matrices:
        raise ConfigError(
            f"qat patterns {', '.join(patterns)} match no matrix of 4096 weights or more; check the names"
        )
    return matrices


def read_through(layers: Iterable[Layer], reader: Callable[[Tensor], Reader]) -> None:
    """Make layers use functions of their parameters while they are in training mode.

    Args:
        layers: whose class changes.
        reader: parameter → function of the parameter that the layer uses.
    """
    keys: dict[nn.Module, list[str]] = {}
    for layer, key in layers:
        keys.setdefault(layer, []).append(key)
    if any(hasattr(type(layer), "unquantized") for layer in keys):
        raise ConfigError("the module is in quantization-aware training already; call remove() of that first")
    for layer, names in keys.items():
        kind = type(layer)
        properties = {key: _property(key, reader(parameter(layer, key))) for key in names}
        members = {**properties, "unquantized": kind, "__module__": kind.__module__}
        layer.__class__ = type(kind.__name__, (kind,), members)


def read_plainly(layers: Iterable[Layer]) -> None:
    """Give layers back their classes; the parameters stay as training left them."""
    for layer, _ in layers:
        if "unquantized" in vars(type(layer)):
            layer.__class__ = vars(type(layer))["unquantized"]


def parameter(layer: nn.Module, key: str) -> Tensor:
    """Return the parameter itself, whatever the layer reads."""
    weight = layer._parameters[key]
    assert weight is not None
    return weight


def _property(key: str, reader: Reader) -> property:
    def read(layer: nn.Module) -> Tensor | None:
        weight = layer._parameters[key]
        return weight if weight is None or not layer.training else reader(weight)

    return property(read)
