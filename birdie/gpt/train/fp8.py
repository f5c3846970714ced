"""Training in fp8: products of the blocks read 8-bit floats, each tensor scaled by its largest absolute value.

    x ──► e4m3 ─┐                        w ──► e4m3 ─┐                     x ──► e4m3 ─┐
    w ──► e4m3 ─┴► y = x · wᵀ        dy ──► e5m2 ────┴► dx = dy · w    dy ──► e5m2 ────┴► dw = dyᵀ · x

Weights stay float32 masters under their names, so optimizers, state dicts and quantization-aware training are not
affected. Scores, in evaluation mode, are those of the float model. The scales are computed from the tensors of each
step alone, so resuming needs no state, and a micro-batch has the same scales on any number of ranks.

Products are those of torchao (`convert_to_float8_training`, tensor-wise scales), on GPUs of compute capability 8.9 or
newer. Emulation, for tests and experiments, rounds in the same way and multiplies in float32, anywhere and slowly.

Source: Micikevicius et al. 2022 (arXiv 2209.05433), the two formats and the use of each.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.train.settings import FP8_MULTIPLE, Fp8
from birdie.system.callbacks import Notify
from birdie.system.context import Context
from birdie.system.device import dtype_name

CAPABILITY = (8, 9)
_ORIGINAL = "without_fp8"  # attribute of a prepared class: the class it replaces


def prepare_fp8(module: nn.Module, mode: Fp8, compute_dtype: torch.dtype, context: Context) -> "Float8 | None":
    """Make the matrices of `module`'s blocks train in fp8, if `mode` says so and the device supports it; else None.

    Args:
        module: its layers only change their class; an earlier preparation is undone first.
        mode: "on" reports to the log where it is not supported; "emulate" works anywhere.
        compute_dtype: of the activations, for that report.
        context: device and log.
    """
    remove_fp8(module)
    if mode == "off":
        return None
    reason = _missing_library() if mode == "emulate" else _missing_library() or _unsupported(context.device)
    if reason and mode == "emulate":
        raise ConfigError(f"fp8 cannot be emulated: {reason}")
    if reason:
        context.notify(f"fp8 is not supported ({reason}); training in {dtype_name(compute_dtype)}")
        return None
    return Float8(module, emulate=mode == "emulate", notify=context.notify)


def remove_fp8(module: nn.Module) -> None:
    """Undo `prepare_fp8`; layers that were not prepared stay as they are."""
    for layer in module.modules():
        if _ORIGINAL in vars(type(layer)):
            for name in vars(type(layer))["fp8_attributes"]:
                delattr(layer, name)
            layer.__class__ = vars(type(layer))[_ORIGINAL]


class Float8:
    """A module whose blocks train in fp8.

    Attributes:
        module, emulate: the arguments.
        names: of the matrices that are read in fp8.
    """

    def __init__(self, module: nn.Module, *, emulate: bool, notify: Notify) -> None:
        self.module, self.emulate = module, emulate
        layers = {name: layer for name, layer in module.named_modules() if _is_linear_of_a_block(name, layer)}
        if any(hasattr(type(layer), _ORIGINAL) for layer in layers.values()):
            raise ConfigError("the module trains in fp8 already; undo preparations that came after that first")
        self._layers = {f"{name}.weight": layer for name, layer in layers.items() if _fits(layer)}
        if not self._layers:
            raise ConfigError(
                f"fp8 needs matrices of the blocks with both dimensions multiples of {FP8_MULTIPLE}, and there is "
                "none; choose another width, or turn fp8 off"
            )
        self.names = tuple(self._layers)
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        templates = {layer: _template(layer, emulate) for layer in self._layers.values()}
        for layer, template in templates.items():
            attributes = {name: value for name, value in vars(template).items() if name not in vars(layer)}
            parent = type(layer)
            if parent not in classes:
                classes[parent] = _subclass(parent, type(template), tuple(attributes))
            vars(layer).update(attributes)
            layer.__class__ = classes[parent]
        excluded = len(layers) - len(self._layers)
        notify(
            f"fp8: {len(self.names)} matrices of the blocks, {self._weight_count:,} weights, {self._library}"
            + f"; {excluded} with dimensions that are not multiples of {FP8_MULTIPLE} are excluded" * bool(excluded)
        )

    def diagnostics(self, loss: Callable[[], Tensor]) -> str:
        """Return a line with the number of matrices, and the largest value and the share flushed to zero in one pass.

        Args:
            loss: computes the loss (0-d) of a batch. Its gradient is computed once; no parameter's `grad` changes.
        """
        statistics = {
            "inputs": _RoundingStatistics(torch.float8_e4m3fn),
            "weights": _RoundingStatistics(torch.float8_e4m3fn),
            "gradients": _RoundingStatistics(torch.float8_e5m2),
        }

        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            statistics["inputs"].add(inputs[0])
            weight = layer.weight
            assert isinstance(weight, Tensor)
            statistics["weights"].add(weight)
            output.register_hook(statistics["gradients"].add)  # type: ignore[no-untyped-call]

        hooks = [layer.register_forward_hook(record) for layer in self._layers.values()]
        training = self.module.training
        try:
            self.module.train()
            trainable = [p for p in self.module.parameters() if p.requires_grad]
            torch.autograd.grad(loss(), trainable, allow_unused=True)
        finally:
            self.module.train(training)
            for hook in hooks:
                hook.remove()
        parts = ", ".join(f"{name} {part.line()}" for name, part in statistics.items())
        return (
            f"fp8: {len(self.names)} matrices, {self._weight_count:,} weights, {self._library}; largest value and "
            f"share rounded to zero: {parts}"
        )

    @property
    def _weight_count(self) -> int:
        return sum(layer._parameters["weight"].numel() for layer in self._layers.values())

    @property
    def _library(self) -> str:
        import torchao

        return f"torchao {torchao.__version__}" + (", emulated" if self.emulate else "")


@dataclass(slots=True)
class _RoundingStatistics:
    """Largest value, and values rounded to zero, of tensors that are scaled and rounded to `dtype`."""

    dtype: torch.dtype
    nonzero: int = 0
    zeroed: int = 0
    largest: float = 0.0

    def add(self, x: Tensor) -> None:
        with torch.no_grad():
            x = x.detach().float()
            largest = float(x.abs().max())
            rounded = (x * (torch.finfo(self.dtype).max / max(largest, 1e-12))).to(self.dtype).float()
            self.nonzero += int((x != 0).sum())
            self.zeroed += int(((rounded == 0) & (x != 0)).sum())
            self.largest = max(self.largest, largest)

    def line(self) -> str:
        return f"{self.largest:.3g} and {100 * self.zeroed / max(self.nonzero, 1):.2g} %"


def _is_linear_of_a_block(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and (name.startswith("blocks.") or ".blocks." in name)


def _fits(layer: nn.Module) -> bool:
    weight = layer._parameters["weight"]
    return weight is not None and all(size % FP8_MULTIPLE == 0 for size in weight.shape)


def _missing_library() -> str:
    return "" if find_spec("torchao") else "torchao is not installed; pip install 'birdie-compress[gpu]'"


def _unsupported(device: torch.device) -> str:
    needs = f"fp8 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    if device.type != "cuda":
        return f"the device is {device.type}; {needs}, or --train.fp8 emulate"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= CAPABILITY else f"this GPU has {capability[0]}.{capability[1]}; {needs}"


def _template(layer: nn.Module, emulate: bool) -> nn.Module:
    """Return torchao's layer of the same shape, on the meta device; its forward pass and settings are what is used."""
    with _quiet_logging():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weight = layer._parameters["weight"]
    assert weight is not None
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    template: nn.Module = convert_to_float8_training(plain, config=Float8LinearConfig(emulate=emulate))
    return template


def _subclass(parent: type[nn.Module], source: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `parent` with the forward pass of `source` in training; `weight` is read as in `parent`."""
    parent_forward: Callable[..., Tensor] = parent.forward
    fp8_forward: Callable[..., Tensor] = source.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return fp8_forward(self, x) if self.training else parent_forward(self, x)

    members: dict[str, Any] = {"forward": forward, _ORIGINAL: parent, "fp8_attributes": attributes}
    return type(parent.__name__, (parent,), {**members, "__module__": parent.__module__})


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence logging: importing torchao warns of extensions for other hardware, none of which is used."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
