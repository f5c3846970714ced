"""Training in fp8: the matrices of the blocks become torchao's `Float8Linear`, with a scale for each tensor.

    x ──► e4m3 ─┐                        w ──► e4m3 ─┐                     x ──► e4m3 ─┐
    w ──► e4m3 ─┴► y = x · wᵀ        dy ──► e5m2 ────┴► dx = dy · w    dy ──► e5m2 ────┴► dw = dyᵀ · x

Weights stay float32 masters under their names, so optimizers and state dicts are not affected. In evaluation mode the
layers are those of the float model. Scales are computed from the tensors of each step alone: resuming needs no state.

Source: Micikevicius et al. 2022 (arXiv 2209.05433), the two formats and the use of each.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.train.settings import FP8_MULTIPLE
from birdie.system.callbacks import Notify

CAPABILITY = (8, 9)


def fp8_supported(device: torch.device, notify: Notify) -> bool:
    """Return whether `device` multiplies in fp8; else say in the log that training continues without."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < CAPABILITY:
        notify(f"fp8 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer; training without it")
    return capability >= CAPABILITY


def train_in_fp8(module: nn.Module, notify: Notify, **config: Any) -> None:
    """Replace the linear layers of `module`'s blocks by those of torchao, around the same parameters.

    Args:
        module: of which `blocks` is a part.
        notify: called with a line about the layers.
        config: of torchao's `Float8LinearConfig`; `emulate=True` rounds in the same way on a CPU.

    Raises:
        ConfigError: torchao is not installed, or no layer can be replaced.
    """
    try:
        with _quiet_logging():
            import torchao
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
            from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ConfigError(
            "training in fp8 needs torchao; pip install 'birdie-compress[gpu]', or turn fp8 off"
        ) from error

    class TrainedInFloat8(Float8Linear):  # type: ignore[misc]
        """A layer whose evaluation is that of the float weights."""

        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                return super().forward(input)  # type: ignore[no-any-return]
            return F.linear(input, self.weight.to(input.dtype), self.bias)

    convert_to_float8_training(module, config=Float8LinearConfig(**config), module_filter_fn=fits_fp8)
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    if not layers:
        raise ConfigError(
            f"fp8 needs matrices of the blocks with both dimensions multiples of {FP8_MULTIPLE}, which "
            "quantization-aware training does not read, and there is none; choose another width, or turn fp8 off"
        )
    for layer in layers:
        layer.__class__ = TrainedInFloat8
    weights = sum(layer.weight.numel() for layer in layers)
    notify(f"fp8: {len(layers)} matrices of the blocks, {weights:,} weights, torchao {torchao.__version__}")


def fits_fp8(layer: nn.Module, name: str) -> bool:
    """Return whether a layer is a matrix of a block that kernels for fp8 take, and reads its own parameter."""
    weight = vars(layer)["_parameters"].get("weight")
    in_block = name.startswith("blocks.") or ".blocks." in name
    plain = isinstance(layer, nn.Linear) and weight is not None and layer.weight is weight
    return in_block and plain and all(size % FP8_MULTIPLE == 0 for size in layer.weight.shape)  # type: ignore[union-attr]


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence logging: importing torchao warns of extensions for other hardware, none of which is used."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
