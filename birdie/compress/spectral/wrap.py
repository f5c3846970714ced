"""Any model, its weights as quantized coefficients of a transform, trained with what they will cost.

    original (coefficients) ─► / step ─► round ─► · step ─► inverse transform ─► weight
                                 ▲
    position ─► network ─► log2 step

Each tensor becomes a `torch.nn.utils.parametrize` parametrization, so layers, their forward and their names stay: what
`model.weight` gives is what a file will give. The model owns the network: it lies in the first parametrization (never
beside the layers: a Sequential would run it), the others refer to it. `.to()`, `deepcopy`, `state_dict()` and
DistributedDataParallel therefore treat it like any other part, and what `spectral` returns is a handle whose
`parameters()` are those the model does not have already: none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from birdie.compress.registry import decode
from birdie.compress.scheme import Scheme
from birdie.compress.small_tensors import small_scheme
from birdie.compress.spectral.export import trained_scheme
from birdie.compress.spectral.network import QuantizationNetwork, features, stepped
from birdie.compress.spectral.rate import bits_of
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import REAL_DTYPES, rows_columns
from birdie.errors import ConfigError, WeightsError

LEAST = 256  # elements of a tensor below which 16 bits cost less than steps of its own
Rounding = Literal["straight", "noise", "leaky"]
_ROUNDINGS = ("straight", "noise", "leaky")
_CHUNK = 1 << 18  # elements that a temporary has where a sum is all that is wanted
_HALVINGS = 40
_CLOSE = 0.001  # of the bits
_FAR = 24.0  # octaves
_WORTH = 0.99  # of the bits: what a transform must come down to


def leaky_floor(x: Tensor, m: float = 0.01) -> Tensor:
    """⌊x⌋ plus `m` times what is left over, which is also its slope (AnimatedRNG/lsc)."""
    whole = x.detach().floor()
    return whole + m * (x - whole)


class _Rounded(torch.autograd.Function):
    """step · round(c / step), exactly as a decoder multiplies; as if nothing was rounded for the coefficients."""

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
            return gradients[0], _left(coefficients, step).mul_(gradients[0])
        pairs = zip(*(torch.split(each.flatten(), _CHUNK) for each in (coefficients, gradients[0])), strict=True)
        parts = [torch.dot(_left(part, step.flatten()), gradient) for part, gradient in pairs]
        return gradients[0], torch.stack(parts).sum().reshape(step.shape)


def _left(coefficients: Tensor, step: Tensor) -> Tensor:
    """What rounding adds to coefficients, in steps."""
    ratio = coefficients / step
    return ratio.round().sub_(ratio)


class SpectralWeight(nn.Module):
    """Coefficients → weight, of one tensor.

    Attributes:
        transform: which.
        scale: (), log2 of the coefficients' standard deviation when they were made: what steps are measured in.
        index: which tensor of the network's.
    """

    folds = True  # a file holds the weight it gives, by its plain name
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
        places = transform.classes(self.shape)
        grid = self.grid = transform.plan.counts(self.shape)
        self.register_buffer("features", features(index, len(network.tails), grid).to(weight.device), persistent=False)
        for axis, place in enumerate(places):
            self.register_buffer(f"places{axis}", place.to(weight.device), persistent=False)
        if index == 0:
            self.network = network  # a part of the model from here
        self._shared = (network,)

    @property
    def quantizer(self) -> QuantizationNetwork:
        """The network, whoever owns it."""
        return self._shared[0]

    def steps(self) -> tuple[Tensor, Tensor]:
        """(step, index in the table of steps) of every class, both of the grid's shape."""
        # The distribution's shape takes part, if by nothing: parallel training waits for every gradient.
        unused = 0 * self.quantizer.tails[self.index].sum()
        step, index = stepped(self.quantizer(self.features) + self.scale + unused)
        return step.reshape(self.grid), index.reshape(self.grid)

    def spread(self, grid: Tensor) -> Tensor:
        """What is by class, by coefficient; (1, …, 1) where there is but one class."""
        if grid.numel() == 1:
            return grid
        for axis, count in enumerate(self.grid):
            if count > 1:
                grid = grid.index_select(axis, getattr(self, f"places{axis}"))
        return grid

    def forward(self, coefficients: Tensor) -> Tensor:
        """The weight, as a file will have it."""
        step = self.spread(self.steps()[0])
        wide = coefficients.float()
        if self.training and self.rounding == "noise":
            found = wide + (torch.rand_like(wide) - 0.5) * step
        elif self.training and self.rounding == "leaky":
            found = leaky_floor(wide / step + 0.5) * step
        else:
            found = _Rounded.apply(wide, step)  # type: ignore[no-untyped-call]
        return self.transform.inverse(found).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The coefficients of `weight`."""
        return self.transform.forward(weight.detach().float()).to(self.dtype)

    def symbols(self, coefficients: Tensor) -> Tensor:
        """Return the integers a file will hold, as floats of the tensor's shape."""
        with torch.no_grad():
            return (coefficients.float() / self.spread(self.steps()[0])).round()

    def stored_as(self, name: str, coefficients: Tensor) -> Scheme:
        """Return the scheme that stores what was trained.

        Raises:
            WeightsError: a coefficient is not finite.
        """
        with torch.no_grad():
            indices = self.steps()[1]
        return trained_scheme(name, self.symbols(coefficients), indices, self.transform, self.shape, self.dtype)

    def bits(self, coefficients: Tensor, steps: Tensor | None = None) -> Tensor:
        """About what the coder will take for them, 0-d, differentiable; `steps` of the classes, if they are known."""
        step = self.spread(self.steps()[0] if steps is None else steps.reshape(self.grid))
        rows, columns = rows_columns(self.shape)
        flat = step.expand(self.shape).reshape(rows, columns) if step.numel() > 1 else step.reshape(1, 1)
        return bits_of(coefficients.float().reshape(rows, columns), flat, self.quantizer.tails[self.index])


def _deviation(coefficients: Tensor) -> float:
    """Their standard deviation about zero; something positive for zeros too."""
    found = float(coefficients.double().square().mean().sqrt())
    return found if found > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor that was wrapped: its plain name (of tied ones the first), where it lives, and its parametrization."""

    name: str
    module: nn.Module
    attribute: str
    weight: SpectralWeight

    @property
    def coefficients(self) -> nn.Parameter:
        """What is trained."""
        found = self.module.parametrizations[self.attribute].original  # type: ignore[union-attr, index]
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def symbols(self) -> Tensor:
        """The integers a file will hold, as floats of the tensor's shape."""
        return self.weight.symbols(self.coefficients)


def wrapped(model: nn.Module) -> Iterator[Wrapped]:
    """Everything that `spectral` has wrapped, tied tensors once per name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        lists = getattr(module, "parametrizations", None)
        if not isinstance(lists, nn.ModuleDict) or ".parametrizations." in f".{prefix}.":
            continue
        for attribute, chain in lists.items():
            if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], SpectralWeight):
                yield Wrapped(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, chain[0])


def distinct(model: nn.Module) -> list[Wrapped]:
    """The same, tied tensors once."""
    return list({id(each.weight): each for each in wrapped(model)}.values())


class Spectral:
    """What `spectral` returns: a handle on the quantization network that the model now owns."""

    def __init__(self, model: nn.Module, network: QuantizationNetwork) -> None:
        self.model, self.network = model, network

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the model's own `parameters()` lack: nothing. So adding both lists gives everything once."""
        return iter(())

    def settle(self) -> None:
        """Round what is not wrapped (biases, norms, statistics) to what a file will hold of it, in place.

        After that the model in memory is the model in the file; before, these differ by the rounding to 16 bits.
        """
        ours = {id(tensor) for each in wrapped(self.model) for tensor in each.module.parametrizations.parameters()}  # type: ignore[union-attr]
        inside = {id(tensor) for each in wrapped(self.model) for tensor in each.weight.buffers()}
        with torch.no_grad():
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if id(tensor) not in ours | inside and tensor.is_floating_point():
                    tensor.copy_(decode(small_scheme(tensor).encode(name, tensor)))


def spectral(
    model: nn.Module,
    *,
    transform: Transform | str | Callable[[str, Tensor], Transform] = "auto",
    init_bits: float = 10.0,
    tensors: str | Sequence[str] = "*",
    rounding: Rounding = "straight",
) -> Spectral:
    """Wrap a model in place: from now on its weights are quantized coefficients, and what they cost can be trained.

    Args:
        model: any module; floating parameters of two or more dimensions and 256 elements are taken.
        transform: "auto" takes, for each tensor as it is now, the one with the lowest estimate at equal squared error,
            which for weights that were never trained is the identity; or a `Transform`, the name of one, or
            (name, weight) → Transform.
        init_bits: bits per spectral weight to start from: one number for all steps is bisected to it.
        tensors: a name pattern of what is taken, or several.
        rounding: how training sees it: straight-through, uniform noise in training mode, or `leaky_floor`.

    Raises:
        ConfigError: settings are out of range, the model is wrapped already, or nothing is left to wrap.
        WeightsError: a weight is not finite.
    """
    if not 0.05 <= init_bits <= 20:
        raise ConfigError(f"init_bits={init_bits} is out of range; choose 0.05 to 20 bits per weight")
    if rounding not in _ROUNDINGS:
        raise ConfigError(f"rounding {rounding!r} is unknown; choose {', '.join(_ROUNDINGS)}")
    if next(wrapped(model), None) is not None:
        raise ConfigError("the model is wrapped already; go on training it, or remove() the first wrapping")
    patterns = [tensors] if isinstance(tensors, str) else list(tensors)
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for attribute, weight in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if _takes(weight) and any(fnmatchcase(name, pattern) for pattern in patterns):
                owners.setdefault(id(weight), []).append((module, attribute, name))
    if not owners:
        raise ConfigError(
            f"no floating tensor of two dimensions and {LEAST} elements matches {patterns}; nothing to wrap"
        )
    chosen = chooser(transform)
    transforms = []
    for (module, attribute, name), *_ in owners.values():
        weight = getattr(module, attribute).detach()
        if not bool(torch.isfinite(weight).all()):
            raise WeightsError(f"tensor {name!r} holds NaN or infinite values; mend it before it is wrapped")
        transforms.append(chosen(name, weight))
    network = QuantizationNetwork(len(owners)).to(next(model.parameters()).device)
    for index, places in enumerate(owners.values()):
        module, attribute, _ = places[0]
        weight = getattr(module, attribute)
        part = SpectralWeight(weight, index, transforms[index], rounding, network)
        parametrize.register_parametrization(module, attribute, part)
        for other, second, _ in places[1:]:
            _tie(module, attribute, other, second)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(_flattened)
            module.register_forward_hook(_released)
    at_bits(model, network, init_bits)
    return Spectral(model, network)


def chooser(transform: Transform | str | Callable[[str, Tensor], Transform]) -> Callable[[str, Tensor], Transform]:
    """(name, weight) → Transform of whatever the caller gave."""
    if isinstance(transform, Transform):
        return lambda _, __: transform
    if callable(transform):
        return transform
    if transform == "auto":
        return lambda _, weight: _cheapest(weight)
    fixed = Transform(transform)
    return lambda _, __: fixed


def _cheapest(weight: Tensor) -> Transform:
    """The orthonormal transform with the lowest estimate at a step of one deviation; the identity, if it is close."""
    kernels = [Transform("dct", axes="kernel")] if weight[0, 0].numel() > 1 else []
    shape, step = rows_columns(tuple(weight.shape)), torch.full((1, 1), _deviation(weight), device=weight.device)
    best, lowest = Transform("identity"), math.inf
    for each in (best, *kernels, Transform("dct"), Transform("hadamard")):
        coefficients = each.forward(weight.float()).reshape(shape)
        counts = (coefficients / step).round().unique(return_counts=True)[1].float()  # type: ignore[no-untyped-call]
        entropy = float(
            (counts * (counts.sum() / counts).log2()).sum()
        )  # of what has another shape than the estimate's
        found = min(entropy, float(bits_of(coefficients, step, torch.zeros(1, device=weight.device))))
        if found < (lowest if lowest == math.inf else _WORTH * lowest):
            best, lowest = each, found
    return best


def _takes(weight: Tensor) -> bool:
    return weight.dtype in REAL_DTYPES and weight.ndim >= 2 and weight.numel() >= LEAST


def _tie(module: nn.Module, attribute: str, other: nn.Module, second: str) -> None:
    """`other`'s tensor becomes the same parametrization; it takes a copy first, or it would be transformed twice."""
    setattr(other, second, nn.Parameter(getattr(module, attribute).detach().clone()))
    parametrize.register_parametrization(other, second, nn.Identity())
    other.parametrizations[second] = module.parametrizations[attribute]  # type: ignore[operator, index]


def _flattened(module: nn.Module, _: Any) -> None:
    """Recurrent layers keep lists of their weights: filled with what these are now …"""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]


def _released(module: nn.Module, _: Any, __: Any) -> None:
    """… and emptied: tensors with a history can be neither copied nor kept."""
    module._flat_weights = [None] * len(module._flat_weights_names)  # type: ignore[arg-type, assignment]


def at_bits(model: nn.Module, network: QuantizationNetwork, bits: float, *, reach: float = _FAR) -> None:
    """Bisect the one offset of all steps, by `reach` octaves at most, until the estimate is `bits` per weight."""
    with torch.no_grad():
        now = float(network.offset)
        low, high = now - reach, now + reach
        for _ in range(_HALVINGS):
            network.offset.fill_((low + high) / 2)
            found = float(quantization_loss(model))
            if abs(found - bits) < _CLOSE * bits:
                return
            low, high = (float(network.offset), high) if found > bits else (low, float(network.offset))


def quantization_loss(model: nn.Module) -> Tensor:
    """Average bits per spectral weight, every weight counting alike, 0-d and differentiable.

    Raises:
        ConfigError: nothing in the model is wrapped.
    """
    parts = distinct(model)
    if not parts:
        raise ConfigError("nothing in the model is spectral; call spectral(model) first")
    bits = torch.stack(
        [each.weight.bits(each.coefficients, steps) for each, steps in zip(parts, _steps(parts), strict=True)]
    )
    return bits.sum() / sum(each.coefficients.numel() for each in parts)


def _steps(parts: list[Wrapped]) -> list[Tensor | None]:
    """The steps of all classes of all tensors from one evaluation of the network; None where they have several."""
    weights = [each.weight for each in parts]
    network = weights[0].quantizer
    if any(each.quantizer is not network for each in weights):
        return [None] * len(parts)
    counts = [len(each.features) for each in weights]
    scales = torch.repeat_interleave(
        torch.stack([each.scale for each in weights]), torch.tensor(counts, device=weights[0].scale.device)
    )
    log2 = network(torch.cat([each.features for each in weights])) + scales
    return list(torch.split(stepped(log2)[0], counts))


def remove(model: nn.Module, *, rounded: bool = True) -> nn.Module:
    """Undo `spectral`: plain parameters again; tied ones stay tied.

    Args:
        model: wrapped.
        rounded: whether they are the weights as quantized now, or those that training has moved, for another scheme.
    """
    plain: dict[int, nn.Parameter] = {}
    for each in list(wrapped(model)):
        weight = getattr(each.module, each.attribute).detach().clone()
        if not rounded:
            weight = each.weight.transform.inverse(each.coefficients.detach().float()).to(weight.dtype)
        _own_class(each.module)
        parametrize.remove_parametrizations(each.module, each.attribute, leave_parametrized=False)
        setattr(each.module, each.attribute, plain.setdefault(id(each.weight), nn.Parameter(weight)))
    for module in model.modules():
        for hooks, ours in ((module._forward_pre_hooks, _flattened), (module._forward_hooks, _released)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        if isinstance(module, nn.RNNBase):
            _flattened(module, None)
    return model


def _own_class(module: nn.Module) -> None:
    """Copies of a parametrized module share its class, and removing would take the property away from all of them."""
    shared = type(module)
    own = {name: item for name, item in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, own)
