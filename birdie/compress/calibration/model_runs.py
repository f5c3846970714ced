"""Runs of a caller's module and loss: the one way in which a calibration, a measurement or a tuning calls them.

    session ──► snapshot ──► run of batch 0 ──► as before ──► run of batch 1 ──► as before … ──► settings as before

Each run begins in the state that the module had at the beginning of the session, with random numbers that its batch
determines, and with gradients enabled as in training: losses may differentiate outputs or inputs (physics-informed
networks, forces, gradient penalties). What a run changed is put back when it ends, also by an exception
(`birdie.compress.calibration.kept`).

A measurement takes no gradients of the weights, so these have none while it runs, and nothing is kept of an ordinary
forward pass. A loss that differentiates by weights fails that way: it runs again with gradients of all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from birdie.compress.calibration.kept import Snapshot, Writes
from birdie.compress.calibration.modes import differentiable_tensors, measuring_mode, with_gradients
from birdie.errors import BirdieError, ConfigError
from birdie.system.settings import kept_settings, seed

T = TypeVar("T")


class Runs:
    """Runs of a module, which all begin alike.

    Args:
        module: of the caller, or a copy of it.
        others: what runs may change besides, such as a loss with a state.

    Attributes:
        needs_graph: whether the loss differentiates by what its batch holds, so that all that it calls needs a history.
        needs_weights: whether it differentiates by weights.
    """

    def __init__(self, module: nn.Module, *others: Any) -> None:
        self.module, self._others = module, others
        self._written: set[int] = set()
        self.needs_graph = self.needs_weights = self._is_watched = False
        self._snapshot: Snapshot | None = None
        self._put_settings_back: Callable[[], None] | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Take the present state of the module as that in which all runs in the body of the context begin."""
        gradients = [(weight, weight.grad) for weight in self.module.parameters() if weight.grad is not None]
        with kept_settings() as self._put_settings_back:
            for weight, _ in gradients:
                weight.grad = None  # a loss that calls backward() would add to it
            try:
                self._snapshot = Snapshot((self.module, *self._others), self._written)
                yield
            finally:
                self._snapshot = self._put_settings_back = None
                for weight, gradient in gradients:
                    weight.grad = gradient

    @contextmanager
    def run(self, number: int, batch: Any = None) -> Iterator[None]:
        """Run the module in the body of the context, which includes the backward pass if there is one.

        Args:
            number: of the batch, which seeds its random numbers.
            batch: that the run may change.
        """
        with ExitStack() as stack:
            if self._snapshot is None:
                stack.enter_context(self.session())
            snapshot, inputs = self._snapshot, Snapshot([batch])
            assert snapshot is not None
            seed(number)
            try:
                with torch.enable_grad(), ExitStack() as watch:
                    if not self._is_watched:
                        watch.enter_context(Writes(snapshot.parameters))
                    yield
                self._is_watched = True
                self._require_unchanged(snapshot)
            finally:
                snapshot.put_back()
                inputs.put_back()
                if self._put_settings_back is not None:
                    self._put_settings_back()
                self._written |= snapshot.written()

    def measured(self, number: int, batch: Any, measure: Callable[[], T]) -> T:
        """Return what a run in the mode of measurements returns, which keeps no tensor with a history.

        Args:
            number, batch: as for `run`.
            measure: runs the module.
        """
        with measuring_mode(self.module):
            if not self.needs_weights:
                try:
                    with self.run(number, batch):
                        return measure()
                except (BirdieError, MemoryError):
                    raise
                except Exception:  # the code of the caller raises any, for want of gradients
                    self.needs_weights = True
            with differentiable_tensors(self.module), with_gradients(self.module), self.run(number, batch):
                return measure()

    def _require_unchanged(self, snapshot: Snapshot) -> None:
        changed = snapshot.changed()
        if changed is None:
            return
        name = next((name for name, weight in self.module.named_parameters() if weight is changed), "")
        raise ConfigError(
            f"the forward pass changes parameter {name!r} in place, but not for the first batch, so its values are not "
            "kept; make it change on all batches or on none, or calibrate a copy of the module"
        )
