"""Fake quantization: layers compute with quantized weights, gradients go straight through to float weights.

    parameter w ──► quantize ──► Q(w) − w, no gradient ──► × switch ──► + w = the weight that the layer uses
         ▲                                                                  │
         └──────────────────────── gradient, unchanged ─────────────────────┘

Layers read their weights through it in training mode only (`layers`): validation scores the float model. The switch is
a tensor that the compiled graph reads. A Python flag would be a constant to the compiler: several records trained with
their late QAT compiled away.

Straight-through estimation: Bengio et al. 2013 (arXiv 1308.3432).
"""

import math
from collections.abc import Callable, Sequence
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
from birdie.small.qat.quantized_layers import Layer, layers_of, parameter, read_plainly, read_through

if TYPE_CHECKING:
    from birdie.small.qat.settings import Qat

_TINY = 1e-30  # variance or scale below which a gradient would leave float32


def scale_of(settings: "Qat", rows: Tensor) -> Tensor:
    """Return the scale of each row as `Grid` stores it, in sixteenths of an octave: (rows, columns) → (rows, 1)."""
    octaves = torch.log2(_exact_scale(settings, rows).clamp_min(SMALLEST)) * PER_OCTAVE
    # A range has to fit, so its scale is rounded up; 1e-3 keeps float32 from rounding up an exact sixteenth.
    stored = torch.ceil(octaves - 1e-3) if settings.sigma is None else torch.round(octaves)
    return torch.exp2(stored / PER_OCTAVE)


def quantized(settings: "Qat", weight: Tensor, active: Tensor | None = None) -> Tensor:
    """Return the quantized weight: same shape and dtype, no gradient.

    Args:
        weight: any shape; rows as `Grid` counts them.
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
        symbols = torch.round(rows / scale)
        if settings.bits is not None:
            symbols = symbols.clamp(-_top(settings), _top(settings))
        return (symbols * scale).view_as(weight).to(weight.dtype)


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
    return [(name, settings.spec) for name in trainable_matrices(module, settings.tensors)]


def _rows(weight: Tensor) -> Tensor:
    wide = as_matrix(weight if weight.dtype is torch.float64 else weight.float())
    return wide.reshape(len(wide), -1)


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
        devices = {parameter(*layer).device for layer in self._layers}
        self._switches = {device: torch.tensor(False, device=device) for device in devices}
        weights = {id(weight): weight for weight in (parameter(*layer) for layer in self._layers)}.values()
        self._weights = sum(weight.numel() for weight in weights)
        read_through(self._layers, self._read)

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Turn it on or off for the next step: a pure function of the position in the run, so resuming needs no state.

        Args:
            step: finished steps; -1 during warm-up, which is not announced.
            fraction: of the run that is done, 0 to 1.
            multiplier: factor on the learning rates.
        """
        self.switch(self.settings.progress(fraction, multiplier) is not None)
        if self.on and not self._announced and step >= 0:
            self._announced = True
            self._notify(f"{self.diagnostics()} from step {step + 1} on")

    def switch(self, on: bool) -> None:
        """Turn it on or off. Compiled graphs follow."""
        self.on = on
        for switch in self._switches.values():
            switch.fill_(on)

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
            f"qat {settings.levels or settings.spec}: {len(self.names)} tensors, "
            f"{self._weights:,} weights, moved by {distance:.3g} % of their norm"
        )

    def remove(self) -> None:
        """Give the layers back their classes; the parameters stay as training left them."""
        read_plainly(layer for layer, _ in self._layers)
        self.on = False

    def _read(self, layer: nn.Module, key: str) -> Tensor:
        """Return the weight that a layer uses."""
        weight = parameter(layer, key)
        active = self._switches.get(weight.device)
        if active is None:  # the module has moved
            active = self._switches[weight.device] = torch.tensor(self.on, device=weight.device)
        moved = quantized(self.settings, weight, active) - weight.detach()
        return weight + torch.where(active, moved, torch.zeros_like(moved))


def trainable_matrices(module: nn.Module, patterns: Sequence[str]) -> dict[str, Layer]:
    """Return the trainable matrices that a name pattern matches."""

    def chosen(name: str, weight: nn.Parameter) -> bool:
        trained = weight.requires_grad and is_matrix(weight)
        return trained and any(fnmatchcase(name, pattern) for pattern in patterns)

    return layers_of(module, chosen)


def matrices_to_train(module: nn.Module, patterns: Sequence[str]) -> dict[str, Layer]:
    """Return `trainable_matrices`; an error if there is none."""
    matrices = trainable_matrices(module, patterns)
    if not matrices:
        raise ConfigError(
            f"qat patterns {', '.join(patterns)} match no matrix of 4096 weights or more; check the names"
        )
    return matrices
