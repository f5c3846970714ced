"""Quantization-aware training of a run on what its export will store within the byte budget: `[qat] budget`.

    from `start` on:  calibrate ─► search for the exponent ─► encode ─► offsets ─► layers use weight + offset
    then at times:                   exponent, by the size ◄─ encode ─┘
    the export:       calibrates the weights, and searches again

Weights are encoded as `birdie.save` encodes them: trellis, error feedback, scales by the Fisher information, one
exponent for all. Between two encodings they move, and layers use the decoded weight plus that movement; the gradient
goes straight through (Bengio et al. 2013, arXiv 1308.3432). The parameters stay what they are without it, so banks,
averages, checkpoints and validation do not know of it. A resumed run encodes at its first step.

Rank 0 calibrates and encodes, inside the training clock; the others wait for the offsets.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.coding import decode, with_integers
from birdie.compress.qat.fake_quantization import Reader, matrices_to_train, parameter, read_plainly, read_through
from birdie.compress.rate.assignment import Schemes
from birdie.compress.rate.target import parse_size
from birdie.compress.scheme import Encoded
from birdie.compress.state import ModelState
from birdie.errors import BirdieError, ConfigError
from birdie.model.gpt import GPT
from birdie.run.recipe import Recipe
from birdie.run.requantization import BudgetEncoder, Requantized, compared, require_reachable
from birdie.runtime.callbacks import Notify
from birdie.runtime.distributed import World

Calibrate = Callable[[dict[str, Tensor]], CalibrationResult]


class BudgetTraining:
    """A GPT that trains on what its export will store; a `StepHook` of the training loop.

    Args:
        recipe: of the run, with an export budget and calibration data.
        model: whose layers change their class until `remove`.
        calibrate: state on the CPU → its calibration; called on rank 0.
        rules: schemes that hold under the budget.
        metadata: of the artifact, which counts.
        world: this rank and its peers.
        notify: called with a line about each encoding.

    Attributes:
        names: of the tensors that are trained so.
        last: result of the last encoding on rank 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: GPT,
        calibrate: Calibrate,
        *,
        rules: Schemes,
        metadata: Mapping[str, Any],
        world: World,
        notify: Notify,
    ) -> None:
        assert recipe.export.budget is not None
        self.recipe, self.model, self.world = recipe, model, world
        self.last: Requantized | None = None
        self._budget = parse_size(recipe.export.budget)
        self._calibrate, self._notify = calibrate, notify
        self._file: dict[str, Any] = {"rules": rules, "coder": recipe.export.coder, "metadata": metadata}
        matrices = matrices_to_train(model, recipe.qat.tensors)
        self.names, self._layers = tuple(matrices), list(matrices.values())
        self._weights = {name: parameter(*layer) for name, layer in matrices.items()}
        require_reachable(ModelState.of(self._state()), self._budget, **self._file)
        self._offsets = {id(weight): torch.zeros_like(weight) for weight in self._weights.values()}
        self._encoder: BudgetEncoder | None = None
        self._symbols: dict[str, Encoded] = {}
        self._done = 0
        read_through(self._layers, self._reader)

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Encode the weights anew if it is time to.

        Args:
            step: finished steps; -1 during warm-up, when nothing is encoded.
            fraction: of the run that is done, 0 to 1.
            multiplier: factor on the learning rates.
        """
        settings = self.recipe.qat
        progress = settings.progress(fraction, multiplier)
        if step < 0 or progress is None or progress * settings.encodings < self._done:
            return
        self._done = int(progress * settings.encodings) + 1
        failure = None
        if self.world.is_main:
            try:
                self._encode(step)
            except BirdieError as error:
                failure = error
        device = next(iter(self._weights.values())).device
        if self.world.any(failure is not None, device):
            raise failure or ConfigError("rank 0 cannot encode the weights; see its message")
        for offset in self._offsets.values():
            self.world.broadcast_(offset)

    def penalty(self) -> None:
        """Return None: the exponent holds the size."""

    def remove(self) -> None:
        """Give the layers back their classes; the parameters stay as training left them."""
        read_plainly(self._layers)

    def _encode(self, step: int) -> None:
        """Encode the weights, and set the offsets of this rank."""
        state = self._state()
        if self._encoder is None:
            sensitivities = self._calibrate(state).sensitivities
            self._encoder = BudgetEncoder(ModelState.of(state), sensitivities, self._budget, **self._file)
            encoded, size = self._encoder.fit.encoded, self._encoder.fit.bytes
        else:
            encoded, size = self._encoder.encode(state)
        latents = {}
        for name, weight in self._weights.items():
            stored = encoded.ties.get(name, name)
            latents[stored] = state[name]
            decoded = decode(encoded.tensors[stored]).view_as(weight).to(weight)
            torch.sub(decoded, weight.detach(), out=self._offsets[id(weight)])
        self.last = compared(encoded, size, self._symbols, latents)
        self._symbols = {name: with_integers(encoded.tensors[name]) for name in latents}
        self._notify(
            f"qat budget: step {step + 1}, {self.last.bytes:,} bytes of {self._budget:,}, {len(latents)} tensors of "
            f"{self.last.bits:.3f} bits a weight, moved by {100 * self.last.error**0.5:.3g} % of their norm, "
            f"{100 * self.last.changed:.3g} % of their symbols new"
        )

    def _state(self) -> dict[str, Tensor]:
        """Return the float weights on the CPU."""
        return {name: weight.detach().cpu() for name, weight in self.model.state_dict().items()}

    def _reader(self, weight: Tensor) -> Reader:
        offset = self._offsets[id(weight)]
        return lambda weight: weight + offset
