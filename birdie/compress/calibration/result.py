"""What calibration tells a compressor: the state in its best order, what each weight is worth, what a file costs.

module, batches, loss ─┬─► calibrate ─► sensitivities ─┐
                       │                               ├─► symmetries ─► sorted state, sensitivities to match
                       └─► batches held back ─► KL(float ‖ decoded) of any encoding
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from birdie.compress.calibration.kl import Judge
from birdie.compress.calibration.probe import probe
from birdie.compress.calibration.refit import refit
from birdie.compress.calibration.sensitivity import Batch, Calibration, calibrate
from birdie.compress.calibration.symmetry import canonical, carried
from birdie.compress.calibration.symmetry_graph import symmetries_of
from birdie.compress.feedback import FLOOR
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.decoders import decode
from birdie.errors import ConfigError, WeightsError

HELD_BACK = 5  # every so many batches one is kept for judging, the last ones


@dataclass(slots=True)
class Knowledge:
    """What is known of a model.

    Attributes:
        state: name → tensor, units in the order that saves bits; the function is the module's.
        sensitivities: for that order.
        judge: of the KL, on the batches held back.
        batches: what was calibrated on; none of the judge's.
    """

    state: dict[str, Tensor]
    sensitivities: dict[str, Sensitivity]
    judge: Judge | None = None
    batches: Sequence[Batch] = ()

    @classmethod
    def of(
        cls,
        state: Mapping[str, Tensor],
        calibration: Calibration,
        *,
        symmetries: bool = True,
        gradients: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> "Knowledge":
        """Calibrate.

        Args:
            state: what is compressed, under the names of the module's state dict.
            calibration: the module, batches, and loss: (module, batch) → summed nats by `F.cross_entropy`.
            symmetries: whether units may change places.
            gradients: without them nothing is differentiated (`probe`): quicker, and files are larger.

        Raises:
            ConfigError: the calibration is no such triple, or the loss does not depend on the weights.
            DataError: there are no batches, or what they give is not finite.
            WeightsError: the module's state has other names or shapes.
        """
        require_triple(calibration)
        module, given, loss = calibration
        batches = given if isinstance(given, Sequence) else list(given)
        _require_match(module, state)
        held = held_back(len(batches))
        used, kept = (batches[:-held], batches[-held:]) if held else (batches, batches)
        judge = Judge(module, kept, loss)
        if gradients:
            found = calibrate(module, used, loss, progress=progress)
        else:
            found = probe(judge, used, loss, progress=progress)
        found = {name: _floored(each) for name, each in found.items()}
        groups = symmetries_of(module) if symmetries else ()
        if not groups:
            return cls(dict(state), found, judge, used)
        sorted_state, report = canonical(state, groups, sensitivities=found)
        return cls(sorted_state, {name: carried(name, each, report) for name, each in found.items()}, judge, used)

    def ordered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of these names, units in the calibrated order.

        Raises:
            WeightsError: one was not calibrated, or in another shape.
        """
        for name, weight in state.items():
            if name not in self.state or self.state[name].shape != weight.shape:
                raise WeightsError(f"tensor {name!r} is not one that was calibrated; calibrate this very model")
        return {name: self.state[name] for name in state}

    def divergence(self, encoded: Mapping[str, Encoded]) -> float:
        """Mean KL(float ‖ decoded) in nats per target on the batches held back."""
        if self.judge is None:
            raise ConfigError("no batches were held back, so no quality can be told; ask for a budget instead")
        return self.judge({name: decode(each) for name, each in encoded.items()})

    def refitted(
        self, encoded: Mapping[str, Encoded], ties: Mapping[str, str], steps: int, workers: int | None = None
    ) -> dict[str, Tensor]:
        """What `encoded` keeps in 16 bits (norms, gains, biases), tuned to the KL of the rest: `refit`.

        Args:
            ties: second name → first name, of what `encoded` holds once.
            steps: of Adam, one batch each.

        Raises:
            ConfigError: nothing was calibrated on in this process.
            DataError: fewer than two batches are left beside the judge's.
        """
        judge = self._witness("refit")
        own = self._decoded(encoded, ties, workers)
        names = [name for name, each in encoded.items() if each.scheme == "cast"]
        return refit(judge.module, judge.module.state_dict() | own, names, self.batches, judge.loss, steps=steps)

    def recalibrated(
        self, encoded: Mapping[str, Encoded], ties: Mapping[str, str], workers: int | None = None
    ) -> "Knowledge":
        """What weights are worth halfway between the float and the quantized model: the means of both calibrations.

        Inputs are then partly those that quantized layers give, and a unit that only quantization woke counts.

        Args:
            ties: second name → first name, of what `encoded` holds once.

        Raises:
            ConfigError: nothing was calibrated on in this process.
        """
        judge = self._witness("recalibration")
        module = copy.deepcopy(judge.module).eval()
        module.load_state_dict(module.state_dict() | self._decoded(encoded, ties, workers))
        found = calibrate(module, self.batches, judge.loss)
        both = {name: _mean(each, _floored(found[name])) for name, each in self.sensitivities.items() if name in found}
        return replace(self, sensitivities=self.sensitivities | both)

    def _witness(self, what: str) -> Judge:
        if self.judge is None:
            raise ConfigError(f"{what} needs the batches of a calibration; give calibration=(module, batches, loss)")
        return self.judge

    def _decoded(
        self, encoded: Mapping[str, Encoded], ties: Mapping[str, str], workers: int | None
    ) -> dict[str, Tensor]:
        with ThreadPoolExecutor(workers) as pool:
            decoded = dict(zip(encoded, pool.map(decode, encoded.values()), strict=True))
        return decoded | {name: decoded[first] for name, first in ties.items()}


def held_back(batches: int) -> int:
    """How many of so many batches are kept for judging, and not calibrated on."""
    return max(1, batches // HELD_BACK) if batches > 1 else 0


def require_triple(calibration: Any) -> None:
    """Raise ConfigError unless it is (module, batches, loss)."""
    if not (
        isinstance(calibration, tuple | list)
        and len(calibration) == 3
        and isinstance(calibration[0], nn.Module)
        and isinstance(calibration[1], Iterable)
        and callable(calibration[2])
    ):
        raise ConfigError("calibration is not (module, batches, loss); loss(module, batch) gives summed nats")


def _require_match(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    for name, weight in state.items():
        if shapes.get(name) != tuple(weight.shape):
            raise WeightsError(
                f"tensor {name!r} of shape {tuple(weight.shape)} is not the calibrated module's "
                f"({shapes.get(name, 'it has none')}); calibrate with the model these weights belong to"
            )


def _floored(sensitivity: Sensitivity) -> Sensitivity:
    """Rows that calibration never saw used are not free: they may be on other data."""
    rows, output = sensitivity.row_fisher, sensitivity.output
    if rows is None:
        return sensitivity
    floor = FLOOR * rows.mean()
    if output is not None:
        output = output + torch.diag((floor - output.diagonal()).clamp_min(0))
    return Sensitivity(sensitivity.hessian, rows.clamp_min(floor), output)


def _mean(one: Sensitivity, other: Sensitivity) -> Sensitivity:
    def half(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return a if a is None or b is None else (a + b) / 2

    return Sensitivity(
        half(one.hessian, other.hessian), half(one.row_fisher, other.row_fisher), half(one.output, other.output)
    )
