"""Runs of a caller's module whose blocks are repeated or answered from files (`birdie.compress.calibration.units`)."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from birdie.compress.calibration.modes import differentiable_batch, measuring_mode, with_gradients
from birdie.compress.calibration.runs import Runs
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.calibration.units import Reached
from birdie.errors import BirdieError, ConfigError
from birdie.system.mapped import release


class BlockRuns(Runs):
    """Runs of a module on batches, whose weights may be mapped.

    Args:
        module, batches, loss: see `calibrate_blockwise`.
        device: of the module.
    """

    def __init__(self, module: nn.Module, batches: Sequence[Batch], loss: Loss, device: torch.device) -> None:
        super().__init__(module, loss)
        self.batches, self.device, self._loss = batches, device, loss

    @contextmanager
    def of(self, index: int) -> Iterator[Callable[[], Any]]:
        """Yield what returns the loss of a batch, or None if the run was ended before there was one."""
        batch = differentiable_batch(self.batches[index])

        def run() -> Any:
            try:
                return self._loss(self.module, batch)
            except Reached:
                return None
            finally:
                for weight in self.module.parameters():
                    release(weight)

        try:
            with _eager(), self.run(index, batch):
                yield run
        except (BirdieError, MemoryError, OSError):
            raise
        except Exception as error:  # the code of the caller raises any
            if not self._accepts(index):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"the loss does not run one block at a time ({reason}); calibrate without blockwise"
            ) from error

    def _accepts(self, index: int) -> bool:
        """Return whether the loss runs on the complete module."""
        batch = differentiable_batch(self.batches[index])
        try:
            with with_gradients(self.module), self.run(index, batch):
                self._loss(self.module, batch)
        except Exception:
            return False
        return True

    def once(self, index: int) -> Any:
        """Return the loss of a batch, without gradients of weights."""
        with measuring_mode(self.module), self.of(index) as run:
            return run()


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which functions of torch.compile run as they are written, so that all calls are seen."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context
