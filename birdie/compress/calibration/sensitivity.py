"""Which weights the loss minds: input Hessians and output-gradient covariances of every matrix, from a few batches.

    module, batches, loss ──► forward, watched ──► x of each use ─┐
                                  │                               ├──► Sensitivity of each weight
                              curvature of the loss ──► g of each ┘

The Fisher information of a matrix W, with y = W x and g the gradient of the loss at y, is taken as the Kronecker
product of G = Σ g gᵀ and H = mean x xᵀ (K-FAC: Martens & Grosse 2015, arXiv 1503.05671; convolutions after Grosse &
Martens 2016, arXiv 1602.01407), so that a small change E of W costs about ½ tr(G E H Eᵀ) nats of KL.

Weights are known by where they lie in memory, at `F.linear`, convolutions and `F.embedding`: banks of several matrices,
tied heads and functional calls are covered; a matrix multiplied by `@` is not seen. At `F.cross_entropy` no label is
used: what goes back is a random vector whose covariance is the curvature of the KL at these logits (each class with the
root of its probability and a random sign), so that labels a network has learnt by heart do not make its Fisher vanish.
"""

import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.runtime.distributed import World

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Calibration = tuple[nn.Module, Iterable[Batch], Loss]
Key = tuple[int, int, tuple[int, ...]]

MAX_OUTPUTS = 4096  # of a matrix whose full output covariance is kept; beyond, its diagonal
_CONVOLUTIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_CASTS = (Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.double, Tensor.type)


def calibrate(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    gradients: bool = True,
    world: World | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Sensitivity]:
    """What the loss minds, by the name of each weight that was used.

    Args:
        module: is neither trained nor changed; its `named_matrices()`, if it has any, name views of banks.
        batches: what `loss` takes, one at a time; tens of thousands of tokens, or thousands of images.
        loss: (module, batch) → summed nats, by way of `F.cross_entropy` (any reduction) or any differentiable scalar.
        seed: of the random signs.
        temperature: logits are divided by it first. Above 1, classes count where the network is all but certain.
        gradients: without them only forward passes are made: Hessians of inputs, and how often rows are looked up.
        world: ranks with batches of their own; every rank gets the sum.
        progress: called with the number of batches done.

    Raises:
        ConfigError: the module has no weights, or its loss does not depend on them.
        DataError: there are no batches, or activations or gradients are not finite, or too large to be squared.
        WeightsError: they are not because a weight is not.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; it must be above 0")
    places = _places(module)
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    watch = _Watch(places, torch.Generator().manual_seed(seed), temperature, device, gradients)
    with _evaluating(module), torch.set_grad_enabled(gradients):
        for done, batch in enumerate(batches, start=1):
            with _blaming_weights(module):
                with watch:
                    nats = loss(module, batch)
                if gradients and not (isinstance(nats, Tensor) and nats.numel() == 1 and nats.requires_grad):
                    raise ConfigError("the calibration loss must be one number that depends on the module's weights")
                if watch.roots:
                    torch.autograd.grad(nats.reshape(()), watch.roots, allow_unused=True)
            watch.forget()
            if progress is not None:
                progress(done)
    return watch.finish(world or World())


@contextmanager
def _blaming_weights(module: nn.Module) -> Iterator[None]:
    """What is not finite shows at the output first: whose fault it is, is said of the weights if it is theirs."""
    try:
        yield
    except DataError as error:
        for name, weight in module.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise WeightsError(
                    f"tensor {name!r} holds NaN or infinite values, so nothing can be calibrated; mend the checkpoint"
                ) from error
        raise


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and gradients of every floating parameter without leaving any behind."""
    training = {part: part.training for part in module.modules()}
    frozen = [weight for weight in module.parameters() if not weight.requires_grad and weight.is_floating_point()]
    module.eval()
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for part, mode in training.items():
            part.training = mode
        for weight in frozen:
            weight.requires_grad_(False)


def _places(module: nn.Module) -> dict[Key, str]:
    """Where each weight of two or more dimensions lies → its name; of tied names the first of the alphabet."""
    named = {name: weight for name, weight in module.state_dict(keep_vars=True).items() if isinstance(weight, Tensor)}
    views = getattr(module, "named_matrices", None)
    if callable(views):
        named |= dict(views())
    found = {_key(named[name]): name for name in sorted(named, reverse=True) if named[name].ndim >= 2}
    if not found:
        raise ConfigError("the module to calibrate has no matrices; give the model itself, with its weights")
    return found


def _key(weight: Tensor) -> Key:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset()), tuple(weight.shape)


@dataclass(slots=True)
class _Sums:
    """What was seen of one weight: Σ x xᵀ, Σ g gᵀ or its diagonal, uses; and of look-ups Σ g² by row."""

    inputs: Tensor | None = None
    outputs: Tensor | None = None
    looked_up: Tensor | None = None
    uses: int = 0

    def shapes(self) -> list[list[int] | None]:
        """Of the three sums, None for what was not seen."""
        return [None if part is None else list(part.shape) for part in (self.inputs, self.outputs, self.looked_up)]

    def filled(self, shapes: list[list[int] | None], device: torch.device) -> "_Sums":
        """With zeros for what other ranks have seen and this one has not."""
        mine = (self.inputs, self.outputs, self.looked_up)
        inputs, outputs, looked_up = (
            part if part is not None or shape is None else torch.zeros(shape, device=device)
            for part, shape in zip(mine, shapes, strict=True)
        )
        return _Sums(inputs, outputs, looked_up, self.uses)


class _Watch(TorchFunctionMode):
    """Sees every product with a known weight, and turns cross-entropies into their curvature."""

    def __init__(
        self,
        places: Mapping[Key, str],
        generator: torch.Generator,
        temperature: float,
        device: torch.device,
        gradients: bool,
    ) -> None:
        super().__init__()
        self.places, self.generator, self.temperature, self.device = places, generator, temperature, device
        self.gradients = gradients
        self.casts: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.sums: dict[str, _Sums] = {}
        self.roots: list[Tensor] = []
        self.targets = 0
        self.batches = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and self.gradients:
            return self._curvature(args, kwargs)
        out = func(*args, **kwargs)
        if func in _CASTS and args and (name := self._name(args[0])) is not None and isinstance(out, Tensor):
            self.casts[id(out)] = (weakref.ref(out), name)
        elif func is F.linear:
            self._product(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), out)
        elif func is F.embedding:
            self._look_up(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), out)
        elif func in _CONVOLUTIONS:
            self._convolution(_CONVOLUTIONS[func], args, kwargs, out)
        return out

    def _name(self, weight: Any) -> str | None:
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            return None
        cast = self.casts.get(id(weight))
        if cast is not None and cast[0]() is weight:
            return cast[1]
        return self.places.get(_key(weight))

    def _product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        name = self._name(weight)
        if name is not None and self._counts(out):
            rows = x.detach().reshape(-1, x.shape[-1])

            def add(g: Tensor | None) -> None:
                seen = rows.float()
                self._add(name, seen.T @ seen, len(seen), None if g is None else g.reshape(-1, g.shape[-1]))

            self._later(out, add)

    def _look_up(self, ids: Tensor, weight: Tensor, out: Tensor) -> None:
        name = self._name(weight)
        if name is None or not self._counts(out):
            return

        def add(g: Tensor | None) -> None:
            g = torch.ones_like(out) if g is None else g
            sums = self.sums.setdefault(name, _Sums())
            if sums.looked_up is None:
                sums.looked_up = torch.zeros(tuple(weight.shape), dtype=torch.float32, device=g.device)
            sums.looked_up.index_add_(0, ids.reshape(-1), _finite(name, g).reshape(-1, g.shape[-1]).float() ** 2)

        self._later(out, add)

    def _convolution(self, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
        name = self._name(weight)
        if name is None or not self._counts(out):
            return
        stride, padding, dilation = (
            _argument(args, kwargs, place, word, default)
            for place, word, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        groups = int(_argument(args, kwargs, 6, "groups", 1))
        source = x.detach()

        def add(g: Tensor | None) -> None:
            patches = _patches(source.float(), tuple(weight.shape), dims, stride, padding, dilation, groups)
            taps = math.prod(weight.shape[2:])
            swapped = (patches.T @ patches).view(taps, weight.shape[1], taps, weight.shape[1])
            rows = None
            if g is not None:
                g = g if g.ndim == dims + 2 else g[None]  # one example without a batch
                rows = g.reshape(*g.shape[:2], -1).movedim(1, -1).reshape(-1, g.shape[1])
            self._add(name, swapped.permute(1, 0, 3, 2).reshape(2 * (patches.shape[1],)), len(patches), rows)

        self._later(out, add)

    def _counts(self, out: Tensor) -> bool:
        return out.requires_grad or not self.gradients

    def _later(self, out: Tensor, add: Callable[[Tensor | None], None]) -> None:
        if not self.gradients:
            with torch._C.DisableTorchFunction():
                add(None)
            return

        def hook(gradient: Tensor) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                add(gradient.detach())

        out.register_hook(hook)  # type: ignore[no-untyped-call]
        self.roots.append(out)

    def _add(self, name: str, inputs: Tensor, uses: int, g: Tensor | None) -> None:
        """inputs Σ x xᵀ over so many uses; g (uses, rows), or fewer of them where groups share an output's rows."""
        sums = self.sums.setdefault(name, _Sums())
        inputs = _finite(name, inputs)
        sums.inputs = inputs if sums.inputs is None else sums.inputs.add_(inputs)
        sums.uses += uses
        if g is not None:
            g = g.float()
            outputs = _finite(name, g.T @ g if g.shape[1] <= MAX_OUTPUTS else (g * g).sum(0))
            sums.outputs = outputs if sums.outputs is None else sums.outputs.add_(outputs)

    def _curvature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """A sum whose gradient at the logits has the curvature of the KL, Diag(p) − p pᵀ, as its covariance."""
        source, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
        ignore_index = _argument(args, kwargs, 4, "ignore_index", -100)
        reduction = _argument(args, kwargs, 6, "reduction", "mean")
        logits = source.movedim(1, -1) if source.ndim > 1 else source
        with torch.no_grad():
            p = torch.softmax(logits.detach().float() / self.temperature, -1)
            signs = torch.randint(0, 2, p.shape, generator=self.generator).to(p) * 2 - 1
            roots = p.sqrt() * signs
            vector = roots - p * roots.sum(-1, keepdim=True)
            if target.shape == logits.shape[:-1]:
                vector = vector * (target != ignore_index)[..., None]
                self.targets += int((target != ignore_index).sum())
            else:
                self.targets += p[..., 0].numel()
        each: Tensor = (logits.float() * vector).sum(-1)
        if reduction == "none":
            return each
        return each.sum() / max(each.numel(), 1) if reduction == "mean" else each.sum()

    def forget(self) -> None:
        """Between batches: nothing of the graph is kept."""
        self.roots.clear()
        self.casts.clear()
        self.batches += 1

    def finish(self, world: World) -> dict[str, Sensitivity]:
        """Means over all ranks, in nats per target (per batch where no cross-entropy was seen)."""
        shapes = _agreed({name: sums.shapes() for name, sums in self.sums.items()}, world)
        counts = torch.tensor([self.targets, self.batches], dtype=torch.float64, device=self.device)
        targets, batches = world.sum_(counts).tolist()
        if not batches:
            raise DataError("there are no calibration batches; give some tens of thousands of tokens or images")
        if not shapes:
            raise ConfigError("the calibration loss uses none of the module's matrices; check that it calls the module")
        everywhere = {name: self.sums.get(name, _Sums()).filled(shapes[name], self.device) for name in sorted(shapes)}
        found = {name: _sensitivity(sums, targets or batches, world) for name, sums in everywhere.items()}
        for name, each in found.items():
            for part in (each.hessian, each.row_fisher, each.output):
                if part is not None and not bool(torch.isfinite(part).all()):
                    raise DataError(
                        f"squares of what calibration met at {name!r} exceed float32; check the weights and the batches"
                    )
        return found


def _agreed(shapes: dict[str, list[list[int] | None]], world: World) -> dict[str, list[list[int] | None]]:
    """What any rank has seen: each must give zeros for what it has not, or sums would be taken of different things."""
    found: dict[str, list[list[int] | None]] = {}
    for text in world.all_gather_strings(json.dumps(shapes)):
        for name, mine in json.loads(text).items():
            before = found.setdefault(name, [None] * len(mine))
            found[name] = [a if a is not None else b for a, b in zip(before, mine, strict=True)]
    return found


def _sensitivity(sums: _Sums, units: float, world: World) -> Sensitivity:
    """Both uses of a tied embedding as one: the products' Hessian and the look-ups' squares, rows by their share."""
    parts = [world.sum_(part) for part in (sums.inputs, sums.outputs, sums.looked_up) if part is not None]
    uses = world.sum_(torch.tensor([float(sums.uses)], device=parts[0].device))[0].item()
    taken = iter(part.cpu() for part in parts)
    inputs = next(taken) / uses if sums.inputs is not None else None
    outputs = next(taken) / units if sums.outputs is not None else None
    looked_up = next(taken) / units if sums.looked_up is not None else None
    fisher = outputs if outputs is None or outputs.ndim == 1 else outputs.diagonal().clone()
    if looked_up is None or (fisher is None and inputs is not None):
        return Sensitivity(inputs, fisher, outputs if outputs is not None and outputs.ndim == 2 else None)
    if inputs is None or fisher is None:
        return Sensitivity(torch.diag(looked_up.mean(0)), looked_up.sum(1) / looked_up.mean(0).sum().clamp_min(1e-30))
    hessian = fisher.sum() * inputs + torch.diag(looked_up.sum(0))
    rows = (fisher * inputs.diagonal().sum() + looked_up.sum(1)) / hessian.diagonal().sum().clamp_min(1e-30)
    return Sensitivity(hessian, rows)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _finite(name: str, values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise DataError(
            f"calibration met NaN, infinite values or squares that exceed float32 at {name!r}; check weights and data"
        )
    return values


def _patches(
    x: Tensor, shape: tuple[int, ...], dims: int, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """What each output of a convolution sees, (positions · groups, columns of the weight), channels varying fastest."""
    if x.ndim == dims + 1:
        x = x[None]
    kernel = shape[2:]
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in reach]
    else:
        sides = [(side, side) for side in _each(0 if padding == "valid" else padding, dims)]
    padded = F.pad(x, [side for pair in reversed(sides) for side in pair])
    # Channels last, so that what a kernel sees is copied in runs of channels.
    last = padded.view(len(x), groups, -1, *padded.shape[2:]).movedim(2, -1).contiguous()
    places = [
        (side - d * (k - 1) - 1) // s + 1
        for side, k, s, d in zip(last.shape[2:-1], kernel, stride, dilation, strict=True)
    ]
    along = last.stride()[2:-1]
    seen = last.as_strided(
        (*last.shape[:2], *places, *kernel, last.shape[-1]),
        (
            *last.stride()[:2],
            *(step * s for step, s in zip(along, stride, strict=True)),
            *(step * d for step, d in zip(along, dilation, strict=True)),
            1,
        ),
    )
    rows: Tensor = seen.reshape(-1, math.prod(kernel) * last.shape[-1])
    return rows


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return (int(value),) * dims if isinstance(value, int) else tuple(int(v) for v in value)
