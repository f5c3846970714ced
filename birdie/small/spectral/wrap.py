"""Spectral training: wraps the weights of any model as quantized coefficients of a transform, trained with their cost.

    original (coefficients) ─► / step ─► round ─► · step ─► inverse transform ─► weight
                                 ▲
    position ─► network ─► log2 step

Each tensor becomes a `torch.nn.utils.parametrize` parametrization, so layers, their forward and their names do not
change, and reading `model.weight` returns exactly the weight that a file decodes to. The model owns the quantization
network: it is a submodule of the first parametrization (as a child of the model, a Sequential would run it), and the
others refer to it. So `.to()`, `deepcopy`, `state_dict()` and DistributedDataParallel handle it like any other part.
`spectral` returns a handle whose `parameters()` are those that the model does not have already: none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from birdie.compress.registry import decode
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.grid import MAX_SYMBOL
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.spectral import encode_symbols
from birdie.compress.small_tensors import small_scheme
from birdie.compress.spectral.transforms import Transform
from birdie.compress.state import ModelState, named_tensors
from birdie.compress.tensors import REAL_DTYPES, rows_columns
from birdie.errors import ConfigError, WeightsError
from birdie.small.qat.stored_weights import StoredAsTrained, is_stored
from birdie.small.spectral.network import QuantizationNetwork, features, stepped
from birdie.small.spectral.parametrization import (
    SpectralParametrized,
    owners_of,
    parametrize_weights,
    parametrized,
    plain_weights,
)
from birdie.small.spectral.rate import bits_of, chunk_elements

LEAST = 256  # elements of a tensor below which 16 bits cost less than separate steps
Rounding = Literal["straight", "noise", "leaky"]
_ROUNDINGS = ("straight", "noise", "leaky")
_HALVINGS = 40  # bisections of the initial offset, at most
_CLOSE = 0.001  # relative error of the bits at which the bisection stops
_FAR = 24.0  # octaves around the current offset in which the initial one is searched
_WORTH = 0.99  # share of the best bits so far that a transform must reach to be chosen


def leaky_floor(x: Tensor, m: float = 0.01) -> Tensor:
    """Return ⌊x⌋ plus `m` times the fraction of x, so that the slope is `m` (AnimatedRNG/lsc)."""
    integer = x.detach().floor()
    return integer + m * (x - integer)


class _Rounded(torch.autograd.Function):
    """step · round(c / step), exactly as in the decoder, with a straight-through gradient for the coefficients.

    The gradient by the step is round(c / step) − c / step, as in LSQ (Esser et al. 2020, arXiv 1902.08153).
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, coefficients: Tensor, step: Tensor) -> Tensor:
        if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            ctx.save_for_backward(coefficients, step)
        return (coefficients / step).round_().mul_(step)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.saved_tensors:  # type: ignore[attr-defined]
            return gradients[0], None
        coefficients, step = ctx.saved_tensors  # type: ignore[attr-defined]
        if step.numel() > 1:
            return gradients[0], _rounding_error(coefficients, step).mul_(gradients[0])
        size = chunk_elements(coefficients.device)
        pairs = zip(*(torch.split(part.flatten(), size) for part in (coefficients, gradients[0])), strict=True)
        parts = [torch.dot(_rounding_error(part, step.flatten()), gradient) for part, gradient in pairs]
        return gradients[0], torch.stack(parts).sum().reshape(step.shape)


def _rounding_error(coefficients: Tensor, step: Tensor) -> Tensor:
    """Return the rounding errors of the coefficients, in steps."""
    ratio = coefficients / step
    return ratio.round().sub_(ratio)


class SpectralWeight(nn.Module):
    """Parametrization of one tensor: coefficients → weight.

    Attributes:
        transform: of the tensor.
        scale: (), log2 of the coefficients' initial standard deviation, the unit of the steps.
        index: number of the tensor, an input of the network.
    """

    folds = True  # a file stores the resulting weight under its plain name (birdie.compress.state.folded)
    scale: Tensor
    features: Tensor

    def __init__(
        self, weight: Tensor, index: int, transform: Transform, rounding: Rounding, network: QuantizationNetwork
    ) -> None:
        super().__init__()
        self.transform, self.index, self.rounding = transform, index, rounding
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        deviation = _deviation(transform.forward(weight.detach().float()))
        self.register_buffer("scale", torch.tensor(deviation, device=weight.device).log2())
        axis_classes = transform.classes(self.shape)
        grid = self.grid = transform.plan.counts(self.shape)
        self.register_buffer("features", features(index, len(network.tails), grid).to(weight.device), persistent=False)
        for axis, classes in enumerate(axis_classes):
            self.register_buffer(f"classes{axis}", classes.to(weight.device), persistent=False)
        if index == 0:
            self.network = network  # makes the network a submodule of the model
        self._shared = (network,)

    @property
    def quantizer(self) -> QuantizationNetwork:
        """Quantization network of the model."""
        return self._shared[0]

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return (step, index in the table of steps) of every class, both of the grid's shape."""
        # The tail parameter takes part with factor 0: DistributedDataParallel waits for every gradient.
        unused = 0 * self.quantizer.tails[self.index].sum()
        step, index = stepped(self.quantizer(self.features) + self.scale + unused)
        return step.reshape(self.grid), index.reshape(self.grid)

    def spread(self, grid: Tensor) -> Tensor:
        """Return values per class expanded to values per coefficient; (1, …, 1) if there is only one class."""
        if grid.numel() == 1:
            return grid
        for axis, count in enumerate(self.grid):
            if count > 1:
                grid = grid.index_select(axis, getattr(self, f"classes{axis}"))
        return grid

    def forward(self, coefficients: Tensor) -> Tensor:
        """Return the weight as a file will decode to it."""
        step = self.spread(self.steps()[0])
        wide = coefficients.float()
        if self.training and self.rounding == "noise":
            quantized = wide + (torch.rand_like(wide) - 0.5) * step
        elif self.training and self.rounding == "leaky":
            quantized = leaky_floor(wide / step + 0.5) * step
        else:
            quantized = _Rounded.apply(wide, step)  # type: ignore[no-untyped-call]
        return self.transform.inverse(quantized).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the coefficients of `weight`."""
        return self.transform.forward(weight.detach().float()).to(self.dtype)

    def symbols(self, coefficients: Tensor) -> Tensor:
        """Return the integers that a file will hold, as floats of the tensor's shape."""
        with torch.no_grad():
            return (coefficients.float() / self.spread(self.steps()[0])).round()

    def stored_as(self, name: str, coefficients: Tensor) -> Scheme:
        """Return the scheme that stores symbols and scales as trained; lossless if symbols are too large."""
        symbols = self.symbols(coefficients)
        if not bool(torch.isfinite(symbols).all()):
            raise WeightsError(
                f"tensor {name!r} holds NaN or infinite coefficients; train on from an earlier checkpoint"
            )
        if float(symbols.abs().max()) > MAX_SYMBOL:
            return Lossless()
        with torch.no_grad():
            integers, indices = (part.cpu().numpy().astype(np.int32) for part in (symbols, self.steps()[1]))
        return StoredAsTrained(encode_symbols(self.shape, self.dtype, integers, indices, self.transform))

    def bits(self, coefficients: Tensor, steps: Tensor | None = None) -> Tensor:
        """Return the estimated bits of the coefficients, 0-d, differentiable; `steps` per class if already computed."""
        step = self.spread(self.steps()[0] if steps is None else steps.reshape(self.grid))
        rows, columns = rows_columns(self.shape)
        flat = step.expand(self.shape).reshape(rows, columns) if step.numel() > 1 else step.reshape(1, 1)
        return bits_of(coefficients.float().reshape(rows, columns), flat, self.quantizer.tails[self.index])


def _deviation(coefficients: Tensor) -> float:
    """Return the standard deviation of the coefficients about zero; 1 if they are all zero."""
    deviation = float(coefficients.double().square().mean().sqrt())
    return deviation if deviation > 0 else 1.0


def wrapped(model: nn.Module) -> Iterator[SpectralParametrized[SpectralWeight]]:
    """Yield all tensors that `spectral` has wrapped, tied tensors once per name."""
    return parametrized(model, SpectralWeight)


def distinct(model: nn.Module) -> list[SpectralParametrized[SpectralWeight]]:
    """Return all tensors that `spectral` has wrapped, tied tensors once."""
    return list({id(part.weight): part for part in wrapped(model)}.values())


class SpectralTraining:
    """Handle on a wrapped model and on the quantization network that the model owns."""

    def __init__(self, model: nn.Module, network: QuantizationNetwork) -> None:
        self.model, self.network = model, network

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over parameters that the model does not have: none, so that adding both lists repeats nothing."""
        return iter(())

    def settle(self) -> None:
        """Round the tensors that are not wrapped (biases, norms, statistics) as a file will store them, in place.

        Afterwards the model in memory equals the model in the file; before, they differ by the rounding to 16 bits.
        Tensors that are no weights, such as buffers, stay as they are, in memory and in the file.
        """
        ours = {id(tensor) for part in wrapped(self.model) for tensor in part.module.parametrizations.parameters()}  # type: ignore[union-attr]
        inside = {id(tensor) for part in wrapped(self.model) for tensor in part.weight.buffers()}
        state = ModelState.of(self.model)
        with torch.no_grad():
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                if not isinstance(tensor, Tensor) or id(tensor) in ours | inside or not tensor.is_floating_point():
                    continue
                if state.ties.get(name, name) not in state.exact:
                    tensor.copy_(decode(small_scheme(tensor).encode(name, tensor)))


def spectral(
    model: nn.Module,
    *,
    transform: Transform | str | Callable[[str, Tensor], Transform] = "auto",
    init_bits: float = 10.0,
    tensors: str | Sequence[str] = "*",
    rounding: Rounding = "straight",
) -> SpectralTraining:
    """Wrap a model in place: its weights become quantized coefficients, and their cost in bits can be trained.

    Args:
        model: any module; floating parameters of two or more dimensions and at least 256 elements are wrapped.
        transform: "auto" chooses, for each tensor in its current state, the transform with the lowest estimated bits,
            which for weights that were never trained is the identity; or a `Transform`, the name of one, or
            (name, weight) → Transform.
        init_bits: initial bits per spectral weight, set by bisection of the offset of all steps.
        tensors: name pattern of the tensors to wrap, or several.
        rounding: gradient of the rounding: straight-through, uniform noise in training mode, or `leaky_floor`.

    Raises:
        ConfigError: settings are out of range, the model is wrapped already, or no tensor matches.
        WeightsError: a weight is not finite.
    """
    if not 0.05 <= init_bits <= 20:
        raise ConfigError(f"init_bits={init_bits} is out of range; choose 0.05 to 20 bits per weight")
    if rounding not in _ROUNDINGS:
        raise ConfigError(f"rounding {rounding!r} is unknown; choose {', '.join(_ROUNDINGS)}")
    if next(wrapped(model), None) is not None:
        raise ConfigError("the model is wrapped already; go on training it, or remove() the first wrapping")
    if is_stored(model):
        raise ConfigError("birdie.fine_tune has trained the model as it is stored; call birdie.plain(model) first")
    patterns = [tensors] if isinstance(tensors, str) else list(tensors)

    def chosen(name: str, weight: Tensor) -> bool:
        return _can_wrap(weight) and any(fnmatchcase(name, pattern) for pattern in patterns)

    owners = owners_of(model, chosen)
    if not owners:
        raise ConfigError(
            f"no floating tensor of two dimensions and {LEAST} elements matches {patterns}; nothing to wrap"
        )
    choose = chooser(transform)
    transforms = []
    for (module, attribute, name), *_ in owners.values():
        weight = getattr(module, attribute).detach()
        named_tensors({name: weight})
        if not bool(torch.isfinite(weight).all()):
            raise WeightsError(f"tensor {name!r} holds NaN or infinite values; repair it before wrapping")
        transforms.append(choose(name, weight))
    network = QuantizationNetwork(len(owners)).to(next(model.parameters()).device)
    weights = [getattr(first.module, first.attribute) for first, *_ in owners.values()]
    parts = [
        SpectralWeight(weight, index, transforms[index], rounding, network) for index, weight in enumerate(weights)
    ]
    parametrize_weights(model, owners.values(), parts)
    at_bits(model, network, init_bits)
    return SpectralTraining(model, network)


def chooser(transform: Transform | str | Callable[[str, Tensor], Transform]) -> Callable[[str, Tensor], Transform]:
    """Return the function (name, weight) → Transform for the argument `transform` of `spectral`."""
    if isinstance(transform, Transform):
        return lambda _, __: transform
    if callable(transform):
        return transform
    if transform == "auto":
        return lambda _, weight: _cheapest(weight)
    fixed = Transform(transform)
    return lambda _, __: fixed


def _cheapest(weight: Tensor) -> Transform:
    """Return the orthonormal transform with the fewest bits at a step of one deviation; the identity if it is close."""
    kernels = [Transform("dct", axes="kernel")] if weight[0, 0].numel() > 1 else []
    shape, step = rows_columns(tuple(weight.shape)), torch.full((1, 1), _deviation(weight), device=weight.device)
    best, lowest = Transform("identity"), math.inf
    for transform in (best, *kernels, Transform("dct"), Transform("hadamard")):
        coefficients = transform.forward(weight.float()).reshape(shape)
        counts = (coefficients / step).round().unique(return_counts=True)[1].float()  # type: ignore[no-untyped-call]
        # The entropy of the counts is a second estimate, for distributions that the mixture of `rate` does not fit.
        entropy = float((counts * (counts.sum() / counts).log2()).sum())
        bits = min(entropy, float(bits_of(coefficients, step, torch.zeros(1, device=weight.device))))
        if bits < (lowest if lowest == math.inf else _WORTH * lowest):
            best, lowest = transform, bits
    return best


def _can_wrap(weight: Tensor) -> bool:
    return weight.dtype in REAL_DTYPES and weight.ndim >= 2 and weight.numel() >= LEAST


def at_bits(model: nn.Module, network: QuantizationNetwork, bits: float, *, reach: float = _FAR) -> None:
    """Bisect the offset of all steps, within `reach` octaves, until the estimate is `bits` per weight."""
    with torch.no_grad():
        now = float(network.offset)
        low, high = now - reach, now + reach
        for _ in range(_HALVINGS):
            network.offset.fill_((low + high) / 2)
            bits_now = float(quantization_loss(model))
            if abs(bits_now - bits) < _CLOSE * bits:
                return
            low, high = (float(network.offset), high) if bits_now > bits else (low, float(network.offset))


def quantization_loss(model: nn.Module) -> Tensor:
    """Return the mean bits per spectral weight, 0-d and differentiable.

    Raises:
        ConfigError: nothing in the model is wrapped.
    """
    parts = distinct(model)
    if not parts:
        raise ConfigError("nothing in the model is spectral; call spectral(model) first")
    bits = torch.stack(
        [part.weight.bits(part.original, steps) for part, steps in zip(parts, _steps(parts), strict=True)]
    )
    return bits.sum() / sum(part.original.numel() for part in parts)


def _steps(parts: list[SpectralParametrized[SpectralWeight]]) -> list[Tensor | None]:
    """Return the steps per class of all tensors from one evaluation of the network; None for several networks."""
    weights = [part.weight for part in parts]
    network = weights[0].quantizer
    if any(weight.quantizer is not network for weight in weights):
        return [None] * len(parts)
    counts = [len(weight.features) for weight in weights]
    scales = torch.repeat_interleave(
        torch.stack([weight.scale for weight in weights]), torch.tensor(counts, device=weights[0].scale.device)
    )
    log2 = network(torch.cat([weight.features for weight in weights])) + scales
    return list(torch.split(stepped(log2)[0], counts))


def remove(model: nn.Module, *, rounded: bool = True) -> nn.Module:
    """Replace the parametrizations of `spectral` by plain parameters; tied ones stay tied.

    Args:
        model: a wrapped model.
        rounded: True for the quantized weights, False for the weights before rounding, to use another scheme.
    """
    weights = []
    for part in wrapped(model):
        weight = getattr(part.module, part.attribute).detach().clone()
        if not rounded:
            weight = part.weight.transform.inverse(part.original.detach().float()).to(weight.dtype)
        weights.append((part, weight))
    return plain_weights(model, weights)
