"""Measure of how far a module with other weights is from the module itself, on batches that calibration did not use.

    decoded weights ──► copy of the module ──► predictions ─┐
                               module, once ──► predictions ┴──► mean difference (`birdie.compress.calibration.kl`)

The weights are written to a copy. `torch.func.functional_call` would need none, but a state dict may have other names
than the parameters, or pieces of them (`birdie.hub.names_on_disk`), and modules keep results of a forward pass, which
must not be those of other weights. The copy of a module that does not fit in memory has its weights in a file, mapped,
and both give back the pages of a layer's weights once the layer has run.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from birdie.compress.calibration.kl import Difference, Predictions, difference, kl, predictions
from birdie.compress.calibration.model_runs import Runs
from birdie.compress.calibration.modes import evaluation_copy, fresh_casts, measuring_mode
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.errors import DataError, OutputError
from birdie.system.distributed import World, together
from birdie.system.mapped import release, releasing

Measure = Callable[[Mapping[str, Tensor]], float]
"""Difference of these weights, by name, from those of a model."""

T = TypeVar("T")
_CACHED = 1 << 28  # bytes of reference predictions kept between measurements
_ALIGNED = 64  # bytes


class HeldOut:
    """Mean difference of a module with other weights from the module itself, on held-out batches.

    It is the mean KL where the loss is one of probabilities; else see `birdie.compress.calibration.kl`.

    Args:
        module: from which differences are measured.
        batches: that calibration did not use.
        loss: calls the module on a batch.
        file: takes the weights of the copy, which are mapped; None: they are in memory.
        world: ranks that measure together: rank 0 does, and all have its value.

    Attributes:
        original: runs of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Sequence[Batch],
        loss: Loss,
        *,
        file: Path | None = None,
        world: World | None = None,
    ) -> None:
        self.module, self.batches, self.loss = module, batches, loss
        self._file, self._world = file, world or World()
        # before a calibration, after which parts of the module may keep results that cannot be copied
        self._copy = Runs(evaluation_copy(module), loss) if file is None else None
        self.original = Runs(module, loss)
        self._reference: dict[int, Predictions] = {}

    @property
    def candidate(self) -> nn.Module:
        """The copy, which receives the other weights; one in a file is made when it is needed."""
        return self.copied.module

    @property
    def copied(self) -> Runs:
        """Runs of the copy."""
        if self._copy is None:
            assert self._file is not None
            self._copy = Runs(mapped_copy(self.module, self._file), self.loss)
        return self._copy

    def on(self, batches: Sequence[Batch]) -> "HeldOut":
        """Return the same measure on other batches, by the same copy."""
        other = copy.copy(self)
        other.batches, other._reference, other._copy = batches, {}, self.copied
        return other

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the difference: nats per target, plus relative errors of values; infinite if predictions are NaN.

        Weights that `state` leaves out keep the values of the previous call.
        """
        value = together(self._world, lambda: self._with(state, self.mean) if self._world.is_main else 0.0)
        return self._world.broadcast(value)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set weights of the copy."""
        weights = self.candidate.state_dict()
        with torch.no_grad(), self._releasing():
            for name, weight in state.items():
                weights[name].copy_(weight)
                release(weights[name])

    def predictions(self, index: int, batch: Batch) -> Predictions:
        """Return the float model's predictions for a batch; `index` seeds its random numbers."""
        return self._predictions(self.original, index, batch)

    def nats(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """Return the KL of each target, (targets,) float64; None if the loss has no probabilities."""
        return self._with(state, self._nats)

    def _with(self, state: Mapping[str, Tensor], measure: Callable[[], T]) -> T:
        self.load(state)
        with ExitStack() as stack:
            stack.enter_context(self._releasing())
            stack.enter_context(fresh_casts())
            stack.enter_context(measuring_mode(self.candidate))
            stack.enter_context(self.copied.session())
            stack.enter_context(torch.no_grad())
            return measure()

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._file is not None:
                stack.enter_context(releasing([self._file]))
                stack.enter_context(releasing_layers(self.module))
                stack.enter_context(releasing_layers(self.candidate))
            yield

    def _predictions(self, runs: Runs, index: int, batch: Batch) -> Predictions:
        def measure() -> Predictions:
            result = predictions(runs.module, batch, self.loss)
            runs.needs_graph |= any(tensor.requires_grad for tensor in result.tensors)
            return result.detached()

        return runs.measured(index, batch, measure)

    def _nats(self) -> Tensor | None:
        parts: list[Tensor] = []
        for index, batch in enumerate(self.batches):
            ours, theirs = self._expected(index, batch), self._predictions(self.copied, index, batch)
            parts += map(kl, ours.log_probabilities, theirs.log_probabilities)
        return torch.cat(parts) if parts else None

    def mean(self) -> float:
        """Return the mean difference of the copy, as it is now, over all batches."""
        total: Difference | None = None
        for index, batch in enumerate(self.batches):
            part = difference(self._expected(index, batch), self._predictions(self.copied, index, batch))
            total = part if total is None else total + part
        mean = None if total is None else total.mean()
        if mean is None:
            raise DataError("the held-out calibration batches have no targets to measure the KL on; give others")
        return math.inf if math.isnan(mean) else float(mean)  # what predicts NaN is worse than all else

    def _expected(self, index: int, batch: Batch) -> Predictions:
        """Return the float model's predictions for batch `index`, cached as far as memory allows."""
        cached = self._reference.get(index)
        if cached is not None:
            return cached
        expected = self.predictions(index, batch)
        if any(bool(p.isnan().any()) for p in expected.tensors):
            raise DataError("the model predicts NaN on held-out batches; check the weights and the batches")
        size = sum(p.nbytes for kept in self._reference.values() for p in kept.tensors)
        if size + sum(p.nbytes for p in expected.tensors) <= _CACHED:
            self._reference[index] = expected
        return expected


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
    state = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    tensors = [tensor for tensor in state.values() if tensor.device.type == "cpu" and tensor.numel()]
    *starts, size = accumulate((-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors), initial=0)
    try:
        with file.open("xb") as empty:
            empty.truncate(max(size, 1))
        content = torch.from_file(str(file), shared=True, size=max(size, 1), dtype=torch.uint8, device="cpu")
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot write {file}: {error}; free some space, or choose another folder") from error
    copies: dict[int, Any] = {}
    with releasing([file]):
        for start, tensor in zip(starts, tensors, strict=True):
            mapped = content[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            mapped.copy_(tensor.detach())
            release(mapped)
            release(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(mapped, tensor.requires_grad) if is_parameter else mapped
    return evaluation_copy(module, copies)
