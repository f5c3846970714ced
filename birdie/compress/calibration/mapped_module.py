"""Modules whose weights are in a file: only the layer that runs has its weights in memory.

A module is compared with a copy of itself that has decoded weights (`birdie.compress.calibration.kl`). The copy's
weights are in a file, mapped, and both modules give back the pages of a layer's weights once the layer has run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birdie.compress.calibration.kl import HeldOutKL
from birdie.compress.calibration.modes import evaluation_copy
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.calibration.stored import together
from birdie.errors import OutputError
from birdie.runtime.distributed import World
from birdie.runtime.mapped import release, releasing

_ALIGNED = 64  # bytes


class MappedHeldOut:
    """`HeldOutKL` whose second module is in a file, and which has the same value on all ranks.

    Args:
        module: from which differences are measured.
        batches: held-out batches.
        loss: calls the module on a batch.
        file: to be written; it takes the bytes of the module's state.
        world: ranks that call it together.
    """

    def __init__(self, module: nn.Module, batches: Sequence[Batch], loss: Loss, file: Path, world: World) -> None:
        self.module, self.batches, self.loss = module, batches, loss
        self._file, self._world = file, world
        self._measure: HeldOutKL | None = None  # on rank 0, once it is needed
        self._candidate = nn.Module()

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the difference, as `HeldOutKL` does; the arguments of rank 0 count."""
        world = self._world
        return float(world.broadcast(repr(together(world, lambda: self._difference(state)))))

    def _difference(self, state: Mapping[str, Tensor]) -> float:
        if not self._world.is_main:
            return 0.0
        if self._measure is None:
            self._candidate = mapped_copy(self.module, self._file)
            loss = partial(_released, self.loss)
            self._measure = HeldOutKL(self.module, self.batches, loss, lambda _: self._candidate)
        weights = self._candidate.state_dict()
        with releasing([self._file]):
            for name, weight in state.items():
                weights[name].copy_(weight)
                release(weights[name])
            return self._measure({})


def _released(loss: Loss, module: nn.Module, batch: Batch) -> Any:
    with releasing_layers(module):
        return loss(module, batch)


@contextmanager
def releasing_layers(module: nn.Module) -> Iterator[None]:
    """Release the pages of each layer's own weights after its forward pass, in the body of the context."""

    def after(layer: nn.Module, *_: Any) -> None:
        for weight in layer.parameters(recurse=False):
            release(weight)

    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mapped_copy(module: nn.Module, file: Path) -> nn.Module:
    """Return a copy of a module whose state on the CPU is in a new file, mapped; what is written to it goes there."""
    tensors = {id(tensor): tensor for tensor in _state(module) if tensor.device.type == "cpu" and tensor.numel()}
    offsets, size = {}, 0
    for key, tensor in tensors.items():
        offsets[key] = size
        size += -(-tensor.numel() * tensor.itemsize // _ALIGNED) * _ALIGNED
    try:
        with file.open("xb") as empty:
            empty.truncate(max(size, 1))
        content = torch.from_file(str(file), shared=True, size=max(size, 1), dtype=torch.uint8, device="cpu")
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot write {file}: {error}; free some space, or choose another folder") from error
    copies: dict[int, Any] = {}
    with releasing([file]):
        for key, tensor in tensors.items():
            stop = offsets[key] + tensor.numel() * tensor.itemsize
            mapped = content[offsets[key] : stop].view(tensor.dtype).view(tensor.shape)
            mapped.copy_(tensor.detach())
            release(mapped)
            release(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[key] = nn.Parameter(mapped, tensor.requires_grad) if is_parameter else mapped
    return evaluation_copy(module, copies)


def _state(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
