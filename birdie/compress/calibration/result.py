"""Calibration result of a model: tensors with sorted units, sensitivities, and the KL of any encoding.

module, batches, loss ─┬─► calibrate ─► sensitivities ─┐
                       │                               ├─► symmetries ─► sorted tensors, sensitivities to match
                       └─► held-out batches ─► KL(float ‖ decoded) of any encoding

Sensitivities from few data are shrunk towards the prior (`birdie.compress.calibration.shrinkage`). For losses without
probabilities a relative error is measured instead of the KL (`birdie.compress.calibration.kl`).
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from birdie.compress.calibration.criterion import batch_loss
from birdie.compress.calibration.held_out import HeldOut, Measure
from birdie.compress.calibration.sensitivity import Batch, Calibration, Loss, measure, names_by_memory
from birdie.compress.calibration.shrinkage import shrink, with_row_floor
from birdie.compress.calibration.symmetry import Orders, permute_sensitivity, sort_units, symmetries_of
from birdie.compress.calibration.tensor_pieces import portions
from birdie.compress.coding import Quantized, decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.state import EncodedState, ModelState, embeddings_of, named_tensors
from birdie.compress.tensors import count_reals
from birdie.compress.trellis.feedback import Feedback
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError, WeightsError
from birdie.system.settings import kept_settings

HELD_OUT = 5  # one batch in five is held out, taken from the end
_HALF = 0.5


@dataclass(slots=True)
class CalibrationResult:
    """Result of a calibration; pass it to `birdie.save` instead of calibration data to write several files.

    Attributes:
        state: name → tensor, with units in the order that saves bits; the function of the module is unchanged.
        sensitivities: name → sensitivity, for that order.
        held_out: KL on batches that were not used for calibration.
        batches: batches that were used for calibration.
        factors: name → factors of error feedback, where these are kept for all files; else each file computes them.
        synthetic: inputs are made up or examples.
        unreached: names of matrices that the loss does not depend on, as far as calibration sees; they take the prior.
        files: of an offloaded calibration: those of sorted tensors, whose pages can be released; its tensors are
            decoded one by one, and nothing is tuned.
        orders: name → axis → the order of its units in which the axis is sorted.
    """

    state: dict[str, Tensor]
    sensitivities: Mapping[str, Sensitivity]
    held_out: Measure | None = None
    batches: Sequence[Batch] = ()
    factors: MutableMapping[str, Feedback] | None = None
    synthetic: bool = False
    unreached: Sequence[str] = ()
    files: Sequence[Path] | None = None
    orders: Orders = field(default_factory=dict)
    # of encodings that are still in memory: the one that is written has been compared with others before
    _measured: list[tuple[weakref.ref[EncodedState], float]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(
        cls,
        state: Mapping[str, Tensor],
        calibration: Calibration,
        *,
        symmetries: bool = True,
        gradients: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> "CalibrationResult":
        """Calibrate a module and sort its units.

        Args:
            state: tensors to compress, under the names of the module's state dict.
            calibration: the module, batches, and loss: (module, batch) → any differentiable number.
            symmetries: whether units may be permuted.
            gradients: False to differentiate nothing (`probe`): faster, and files are larger.
            progress: called with the number of batches done.

        Raises:
            ConfigError: the calibration is no such triple, or the loss does not depend on the weights.
            DataError: there are no batches, or activations are not finite.
            WeightsError: the module's state has other names or shapes.
        """
        module, loss, used, kept = checked_data(calibration, state)
        held_out = HeldOut(module, kept, loss)
        if gradients:
            sensitivities = measure(module, used, loss, progress=progress)
        else:
            from birdie.compress.calibration.probe import probe

            sensitivities = probe(held_out, used, loss, progress=progress)
        missing = unreached(module, state, sensitivities)
        sensitivities = settled(sensitivities, state, embeddings_of(module))
        groups = symmetries_of(module) if symmetries else ()
        if not groups:
            return cls(dict(state), sensitivities, held_out, used, unreached=missing)
        sorted_state, orders = sort_units(state, groups, sensitivities)
        sensitivities = {name: permute_sensitivity(name, item, orders) for name, item in sensitivities.items()}
        return cls(sorted_state, sensitivities, held_out, used, unreached=missing, orders=orders)

    def unsorted(self, state: ModelState) -> "CalibrationResult":
        """Return the same for the units in the order that they have in the model.

        Raises:
            ConfigError: the calibration is offloaded.
        """
        if self.files is not None:
            raise ConfigError("a difference to a base needs a calibration in memory; drop offload")
        back = {name: {axis: np.argsort(order) for axis, order in axes.items()} for name, axes in self.orders.items()}
        sensitivities = {name: permute_sensitivity(name, item, back) for name, item in self.sensitivities.items()}
        tensors = {name: state.by_name.get(name, tensor) for name, tensor in self.state.items()}
        return replace(self, state=tensors, sensitivities=sensitivities, factors=None, orders={})

    def ordered(self, state: ModelState) -> ModelState:
        """Return the same model with its units in the calibrated order.

        Raises:
            WeightsError: a tensor was not calibrated, or has another shape.
        """
        for name, weight in state.tensors.items():
            if name not in self.state or self.state[name].shape != weight.shape:
                raise WeightsError(f"tensor {name!r} is not one that was calibrated; calibrate this very model")
        return replace(state, tensors={name: self.state[name] for name in state.tensors})

    def divergence(self, encoded: EncodedState) -> float:
        """Return the mean KL(float ‖ decoded) on the held-out batches, or the relative error: see `HeldOut`."""
        if self.held_out is None:
            raise ConfigError("no batches were held out, so quality cannot be measured; ask for a budget instead")
        for state, divergence in self._measured:
            if state() is encoded:
                return divergence
        decoded = DecodedTensors(encoded.tensors)
        divergence = self.held_out(dict(decoded) if self.files is None else decoded)
        self._measured = [one for one in self._measured if one[0]() is not None]
        self._measured.append((weakref.ref(encoded), divergence))
        return divergence

    @property
    def keeps_apart(self) -> bool:
        """Return whether differences are measured on other batches than those of the sensitivities."""
        return self.held_out is not None and getattr(self.held_out, "batches", None) is not self.batches

    def mixed(self, embeddings: Collection[str]) -> "CalibrationResult | None":
        """Return the mean of these sensitivities and the assumed ones; None if they are in files."""
        if self.files is not None:
            return None
        mixed = shrink(self.sensitivities, self.state, self.sensitivities, embeddings=embeddings, least=_HALF)
        return replace(self, sensitivities={name: replace(item, at_large=True) for name, item in mixed}, factors=None)

    def measured(self) -> HeldOut:
        """Return what measures differences on batches.

        Raises:
            ConfigError: this result has no batches, or keeps its model in files.
        """
        if self.files is not None:
            raise ConfigError("tuning has the complete model in memory, which offload avoids; drop one")
        if not isinstance(self.held_out, HeldOut) or not self.batches:
            raise ConfigError("tuning needs calibration batches; give calibration=(module, batches, loss)")
        return self.held_out


class DecodedTensors(Mapping[str, Tensor]):
    """Tensors by name, each decoded when it is looked up, so that one is in memory at a time."""

    def __init__(self, tensors: Mapping[str, Quantized]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor, decoded now."""
        return decode(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._tensors)


def calibrated_state(
    state: ModelState, calibration: "Calibration | CalibrationResult | None", *, symmetries: bool = True
) -> tuple[ModelState, CalibrationResult | None]:
    """Return the state in its calibrated order and the calibration result; unchanged without calibration."""
    if calibration is None:
        return state, None
    if state.stored_as:
        raise ConfigError("a spectral model is stored as it was trained; leave calibration out, or remove() it first")
    if not isinstance(calibration, CalibrationResult):
        calibration = CalibrationResult.of(state.by_name, calibration, symmetries=symmetries)
    return calibration.ordered(state), calibration


def held_out_batches(batches: int) -> int:
    """Return how many of `batches` batches are held out from calibration."""
    return max(1, batches // HELD_OUT) if batches > 1 else 0


def checked_data(
    calibration: Calibration, state: Mapping[str, Tensor]
) -> tuple[nn.Module, Loss, Sequence[Batch], Sequence[Batch]]:
    """Return the module without wrappers, its loss of a batch, the batches to calibrate on, and those held out."""
    require_triple(calibration)
    module, batches, loss = calibration
    module, loss = unwrapped(module), batch_loss(loss)
    batches = listed(batches)
    require_match(module, state)
    count = held_out_batches(len(batches))
    return module, loss, *((batches[:-count], batches[-count:]) if count else (batches, batches))


def listed(batches: Iterable[Batch]) -> Sequence[Batch]:
    """Return batches as a sequence; a loader that shuffles leaves the random generators as they were."""
    if isinstance(batches, Sequence):
        return batches
    with kept_settings():
        return list(batches)


def require_triple(calibration: Any) -> None:
    """Raise ConfigError unless `calibration` is (module, batches, loss)."""
    if not (
        isinstance(calibration, tuple | list)
        and len(calibration) == 3
        and isinstance(calibration[0], nn.Module)
        and isinstance(calibration[1], Iterable)
        and callable(calibration[2])
    ):
        raise ConfigError("calibration is not (module, batches, loss); loss is loss(module, batch), or a criterion")


def require_match(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise WeightsError unless every tensor of `state` is one of the module's, by its name and shape."""
    shapes = {name: tuple(weight.shape) for name, weight in named_tensors(module).items()}
    for name, weight in state.items():
        if shapes.get(name) != tuple(weight.shape):
            raise WeightsError(
                f"tensor {name!r} of shape {tuple(weight.shape)} is not the calibrated module's "
                f"({shapes.get(name, 'it has none')}); calibrate with the model these weights belong to"
            )


def unreached(module: nn.Module, state: Mapping[str, Tensor], reached: Collection[str]) -> list[str]:
    """Return the names of the module's matrices that calibration did not reach, and log them with their share.

    Args:
        state: tensors to compress.
        reached: names of matrices with a sensitivity.
    """
    buffers = {buffer.untyped_storage().data_ptr() for buffer in module.buffers()}
    matrices = {
        name: (memory, count_reals(state[name]))
        for (memory, *_), name in names_by_memory(module).items()
        if memory not in buffers and name in state and (state[name].is_floating_point() or state[name].is_complex())
    }
    pieces = {name for one in portions(module) for name in one.names}  # of one memory, yet not tied
    known = {memory for name, (memory, _) in matrices.items() if name in reached and name not in pieces}
    missing = {name: size for name, (memory, size) in matrices.items() if name not in reached and memory not in known}
    if missing:
        logging.getLogger("birdie").info(
            "calibration data do not reach %d of %d matrices, %.3g %% of the weights, which are stored as without "
            "data: %s",
            len(missing),
            len(matrices),
            100 * sum(missing.values()) / sum(size for _, size in matrices.values()),
            abbreviated(sorted(missing)),
        )
    return sorted(missing)


def abbreviated(names: Sequence[str], most: int = 5) -> str:
    """Return names in one line: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def settled(
    sensitivities: Mapping[str, Sensitivity], state: Mapping[str, Tensor], embeddings: Collection[str]
) -> dict[str, Sensitivity]:
    """Return the sensitivities of a calibration, shrunk towards the prior and with a lower limit on rows."""
    shrunk = shrink(sensitivities, state, sensitivities, embeddings=embeddings)
    return {name: with_row_floor(sensitivity) for name, sensitivity in shrunk}
