"""Training in fp8: the blocks' products read 8-bit floats, each tensor scaled by its largest value, while they train.

    x ──► e4m3 ─┐                        w ──► e4m3 ─┐                     x ──► e4m3 ─┐
    w ──► e4m3 ─┴► y = x · wᵀ        dy ──► e5m2 ────┴► dx = dy · w    dy ──► e5m2 ────┴► dw = dyᵀ · x

Weights stay float32 masters under their names; optimizers, state dicts and quantization-aware training notice nothing.
What is scored, in evaluation mode, is the float model. Nothing is remembered between steps: the scales are those of the
values at hand, so resuming needs no state, and a micro-batch gets the same scales on any number of ranks.

Products are torchao's (`convert_to_float8_training`, tensor-wise scales), on GPUs of compute capability 8.9 or newer.
Emulated, which is for tests and for foresight, they round the same and multiply in float32 anywhere, slowly.

Source: Micikevicius et al. 2022 (arXiv 2209.05433), the two formats and where each is used.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.runtime.device import dtype_name

Fp8 = Literal["off", "on", "emulate"]

MULTIPLE = 16  # what the hardware's products want of every dimension, tokens included
CAPABILITY = (8, 9)
_MARK = "without_fp8"


def prepare_fp8(
    module: nn.Module, mode: Fp8, device: torch.device, compute_dtype: torch.dtype, notify: Callable[[str], None]
) -> "Float8 | None":
    """Make the matrices of `module`'s blocks train in fp8 if `mode` asks for it and `device` can; else None.

    Args:
        module: layers change their class only; a preparation from before is undone first.
        mode: "on" tells `notify` in one line why it is not possible, where it is not; "emulate" works anywhere.
        compute_dtype: that of the activations, named in that line.

    Raises:
        ConfigError: no matrix has dimensions that fp8 takes, or emulation lacks torchao.
    """
    remove_fp8(module)
    if mode == "off":
        return None
    why = _missing() if mode == "emulate" else _missing() or _unable(device)
    if why and mode == "emulate":
        raise ConfigError(f"fp8 cannot be emulated here: {why}")
    if why:
        notify(f"fp8 is not supported here ({why}); training in {dtype_name(compute_dtype)}")
        return None
    return Float8(module, emulate=mode == "emulate", notify=notify)


def remove_fp8(module: nn.Module) -> None:
    """Give the layers of `module` back their own products; what was not prepared is left alone."""
    for part in module.modules():
        if _MARK in vars(type(part)):
            for name in vars(type(part))["fp8_attributes"]:
                delattr(part, name)
            part.__class__ = vars(type(part))[_MARK]


class Float8:
    """A module whose blocks train in fp8.

    Attributes:
        names: of the matrices that are read in fp8.
        emulate: whether products are emulated.
    """

    def __init__(self, module: nn.Module, *, emulate: bool, notify: Callable[[str], None]) -> None:
        self.module, self.emulate = module, emulate
        layers = {name: part for name, part in module.named_modules() if _is_of_a_block(name, part)}
        if any(hasattr(type(part), _MARK) for part in layers.values()):
            raise ConfigError("the module trains in fp8 already; undo what was prepared after that first")
        self._parts = {f"{name}.weight": part for name, part in layers.items() if _fits(part)}
        if not self._parts:
            raise ConfigError(
                f"fp8 needs matrices of the blocks with both dimensions multiples of {MULTIPLE}, and there is none; "
                "choose another width, or turn fp8 off"
            )
        self.names = tuple(self._parts)
        children: dict[type[nn.Module], type[nn.Module]] = {}
        twins = {part: _twin(part, emulate) for part in self._parts.values()}
        for part, twin in twins.items():
            attributes = {name: value for name, value in vars(twin).items() if name not in vars(part)}
            parent = type(part)
            if parent not in children:
                children[parent] = _child(parent, type(twin), tuple(attributes))
            vars(part).update(attributes)
            part.__class__ = children[parent]
        left = len(layers) - len(self._parts)
        notify(
            f"fp8: {len(self.names)} matrices of the blocks, {self._weights:,} weights, {self._how}"
            + (f"; {left} with dimensions that are not multiples of {MULTIPLE} are left out" if left else "")
        )

    def evidence(self, loss: Callable[[], Tensor]) -> str:
        """One line: how many matrices, and what fp8 did to the values of one pass: largest, and flushed to zero.

        Args:
            loss: the loss (0-d) of a batch; its gradient is made once, and no parameter's `grad` is touched.
        """
        seen = {"inputs": _Seen(torch.float8_e4m3fn), "weights": _Seen(torch.float8_e4m3fn)}
        seen["gradients"] = _Seen(torch.float8_e5m2)

        def look(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen["inputs"].add(inputs[0])
            weight = part.weight
            assert isinstance(weight, Tensor)
            seen["weights"].add(weight)
            output.register_hook(seen["gradients"].add)  # type: ignore[no-untyped-call]

        hooks = [part.register_forward_hook(look) for part in self._parts.values()]
        training = self.module.training
        try:
            self.module.train()
            wanted = [p for p in self.module.parameters() if p.requires_grad]
            torch.autograd.grad(loss(), wanted, allow_unused=True)
        finally:
            self.module.train(training)
            for hook in hooks:
                hook.remove()
        words = ", ".join(f"{name} {each.words()}" for name, each in seen.items())
        return f"fp8: {len(self.names)} matrices, {self._weights:,} weights, {self._how}; largest and lost: {words}"

    @property
    def _weights(self) -> int:
        return sum(part._parameters["weight"].numel() for part in self._parts.values())

    @property
    def _how(self) -> str:
        import torchao

        return f"torchao {torchao.__version__}" + (", emulated" if self.emulate else "")


@dataclass(slots=True)
class _Seen:
    """What was lost of the tensors that were rounded to `dtype`."""

    dtype: torch.dtype
    values: int = 0
    lost: int = 0
    largest: float = 0.0

    def add(self, x: Tensor) -> None:
        with torch.no_grad():
            x = x.detach().float()
            most = float(x.abs().max())
            small = (x * (torch.finfo(self.dtype).max / max(most, 1e-12))).to(self.dtype).float() == 0
            self.values += int((x != 0).sum())
            self.lost += int((small & (x != 0)).sum())
            self.largest = max(self.largest, most)

    def words(self) -> str:
        return f"{self.largest:.3g} and {100 * self.lost / max(self.values, 1):.2g} %"


def _is_of_a_block(name: str, part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and (name.startswith("blocks.") or ".blocks." in name)


def _fits(part: nn.Module) -> bool:
    weight = part._parameters["weight"]
    return weight is not None and all(size % MULTIPLE == 0 for size in weight.shape)


def _missing() -> str:
    return "" if find_spec("torchao") else "torchao is not installed; pip install 'birdie[gpu]'"


def _unable(device: torch.device) -> str:
    needs = f"it takes a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    if device.type != "cuda":
        return f"the device is {device.type}; {needs}, or --train.fp8 emulate"
    has = torch.cuda.get_device_capability(device)
    return "" if has >= CAPABILITY else f"this GPU has compute capability {has[0]}.{has[1]}; {needs}"


def _twin(part: nn.Module, emulate: bool) -> nn.Module:
    """A layer of this shape as torchao makes it, without memory: its forward pass and its settings are what is used."""
    with _quietly():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weight = part._parameters["weight"]
    assert weight is not None
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    twin: nn.Module = convert_to_float8_training(plain, config=Float8LinearConfig(emulate=emulate))
    return twin


def _child(parent: type[nn.Module], source: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """A class like `parent` whose forward pass is that of `source` in training; it reads `weight` as parents do."""
    plain: Callable[..., Tensor] = parent.forward
    in_fp8: Callable[..., Tensor] = source.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return in_fp8(self, x) if self.training else plain(self, x)

    members: dict[str, Any] = {"forward": forward, _MARK: parent, "fp8_attributes": attributes}
    return type(parent.__name__, (parent,), {**members, "__module__": parent.__module__})


@contextmanager
def _quietly() -> Iterator[None]:
    """Importing torchao tells of extensions for other hardware that it could not load; none of them is used."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
