"""Quantization of a model that is being trained: all matrices together, by the trellis of the export, to a byte budget.

    latents ─► trellis, error feedback, scales by the Fisher information ─► symbols ─┬─► coded bytes ─► exponent
       ▲                                                                             └─► decoded weights ─► layers
       └───────────────────────────────────── gradient ────────────────────────────────────────────────────┘

Every few steps the latents are encoded anew, and the layers compute with what is decoded (`birdie.compress.trained`).
The gradient goes straight through to the latents. A pull of the latents towards what is decoded (the proximal step of
ADMM, Leng et al. 2017, arXiv 1707.09870) was tried and makes it worse: each encoding shrinks weights to save bits, and
the pull adds these up.

While weights change, scales follow the sensitivity that was measured at the beginning, and one exponent for all is
steered to the budget. At the end the model is calibrated again, and the exponent is searched as `birdie.save` does.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from birdie.artifact.writer import Meter, Writer
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.rate.allocation import Allocation, assignments
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.budget import Fit, fit_budget
from birdie.compress.rate.target import Target
from birdie.compress.registry import decode
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.state import EncodedState, ModelState, plain_state
from birdie.compress.trained import Trained, plain, train_as_stored, trained_weights
from birdie.errors import ConfigError

_SPARE = 0.002  # fraction of the budget that is left free while the size is steered
_STEERED = 0.7  # share of the estimated correction of the exponent: the rest follows at the next encoding
_STATES, _FINAL_STATES = 8, 32  # of the trellis, while weights still change and at the end


@dataclass(frozen=True, slots=True)
class Requantized:
    """Result of one encoding of all matrices.

    Attributes:
        bytes: of the complete file.
        bits: per weight of the matrices.
        error: squared difference between latents and what is decoded, as a share of the squared latents.
        changed: share of the symbols that differ from those of the last encoding; 1 at the first. The final encoding
            has another trellis and may have another order of units.
    """

    bytes: int
    bits: float
    error: float
    changed: float


class Requantization:
    """Encodes the matrices of a model whenever it is called, and makes the layers use what is decoded.

    Args:
        model: any module; its matrices are parametrized in place, and units whose order is arbitrary are sorted, which
            saves bits (the function is unchanged).
        batches: to calibrate on.
        loss: (module, batch) → any differentiable number.
        budget: bytes of the complete file.
        workers: threads; None uses every core.

    Attributes:
        model: the same.
        exponent: log2 of the typical scale in standard deviations.
        first: size by the search for the exponent, before any weight is changed.

    Raises:
        BudgetError: the file cannot be made as small as the budget.
        ConfigError: no matrix is left to quantize: the model is so small that 16 bits fit, or the calibration is wrong.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], loss: Loss, budget: int, *, workers: int | None = None
    ) -> None:
        self.model, self.budget, self.workers, self._data = model, budget, workers, (batches, loss)
        fit = self._search(model, _STATES, None)
        with torch.no_grad():
            for name, tensor in plain_state(model).items():
                if name in self.allocation.assignment.tensors:
                    tensor.copy_(self.allocation.assignment.tensors[name])  # in the sorted order
        weights = sum(tensor.numel() for tensor in self.allocation.matrices.values())
        self.first = Requantized(fit.bytes, 8 * fit.bytes / weights, 0.0, 0.0)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.matrices = {name: None for name in self.allocation.matrices if name in parameters}
        train_as_stored(model, self.matrices)
        self._symbols: dict[str, Encoded] = {}

    def _search(self, model: nn.Module, states: int, start: float | None) -> Fit:
        """Calibrate a model, sort its units, and search for the exponent.

        Args:
            model: with plain parameters.
            states: of the trellis.
            start: exponent to begin with.
        """
        state = ModelState.of(model)
        calibration = CalibrationResult.of(state.by_name, (model, *self._data))
        assignment = assignments(assign(calibration.ordered(state), None, Target(self.budget)), self.budget)[0]
        self.allocation = Allocation(assignment, calibration.sensitivities, plain=False, workers=self.workers)
        self.allocation.scheme = replace(self.allocation.scheme, states=states)
        with self._writer() as writer:
            first = None if start is None else 2.0**start
            fit = fit_budget(self.allocation, writer.size, self.budget, writer.estimate, start=first)
        if fit.sigma is None:
            raise ConfigError(f"the model fits a budget of {self.budget:,} bytes losslessly; give a smaller budget")
        self.exponent = math.log2(fit.sigma)
        return fit

    def __call__(self) -> Requantized:
        """Encode all matrices, make the layers use what is decoded, and let the exponent follow the size."""
        encoded = self._encode(self.exponent)
        with self._writer() as writer:
            size = writer.size(encoded)
        self.exponent += _STEERED * (size - self.budget * (1 - _SPARE)) * 8 / self.allocation.weights
        return self._hold(encoded, size)

    def finish(self) -> Requantized:
        """Calibrate again, and encode for good, to the budget, with more states: the model is then what the file holds.

        Raises:
            BudgetError: no exponent makes the file small enough.
        """
        fit = self._search(plain(copy.deepcopy(self.model), latent=True), _FINAL_STATES, self.exponent)
        with torch.no_grad():
            for part in self._parts():
                part.latent.copy_(self.allocation.assignment.tensors[part.name])  # in the sorted order
        return self._hold(fit.encoded, fit.bytes, final=True)

    def _encode(self, exponent: float) -> EncodedState:
        """Return the encoding of the model as it is now."""
        state, latents = plain_state(self.model), {part.name: part.latent for part in self._parts()}
        tensors = {name: latents.get(name, state[name]).detach().clone() for name in self.allocation.assignment.tensors}
        return self.allocation.continued({}, tensors).encode(exponent)

    def _hold(self, encoded: EncodedState, size: int, *, final: bool = False) -> Requantized:
        """Make the layers use what is decoded; `final`: give all other tensors the values of the file as well."""
        if final:
            self._settle(encoded)
        error = power = 0.0
        changed = count = 0
        for part in self._parts():
            new, old = encoded.tensors[part.name], self._symbols.get(part.name)
            changed += differences(new, old)
            count += part.latent.numel()
            with torch.no_grad():
                error += float((decode(new).to(part.latent).view_as(part.latent) - part.latent).square().sum())
                power += float(part.latent.square().sum())
            part.weight.hold(part.latent, new, final=final)
            self._symbols[part.name] = new
        return Requantized(size, 8 * size / count, error / power if power else 0.0, changed / count)

    def _parts(self) -> Iterator[Trained]:
        """Yield the matrices, tied ones under the name that the allocation has."""
        return (part for part in trained_weights(self.model) if part.name in self.matrices)

    def _settle(self, encoded: EncodedState) -> None:
        """Give the tensors that are no matrices the values of the file, in place."""
        with torch.no_grad():
            for name, tensor in plain_state(self.model).items():
                if name in encoded.tensors and name not in self.matrices:
                    tensor.copy_(decode(encoded.tensors[name]))

    @contextmanager
    def _writer(self) -> Iterator[Writer]:
        with ThreadPoolExecutor(self.workers) as pool:
            yield Writer(pool, "max", {}, Meter(None))  # as birdie.save(model, path) has it


def differences(new: Encoded, old: Encoded | None) -> int:
    """Return how many symbols of two encodings of one tensor differ; all if there is only one, or the shapes differ."""
    if isinstance(new, Blocks):
        parts = old.parts if isinstance(old, Blocks) and len(old.parts) == len(new.parts) else [None] * len(new.parts)
        return sum(map(differences, new.parts, parts))
    symbols = new.streams[0] if new.streams else np.zeros(0)
    if old is None or not old.streams or old.streams[0].shape != symbols.shape:
        return int(symbols.size)
    return int(np.count_nonzero(symbols != old.streams[0]))
