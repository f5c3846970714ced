"""Quantization of a model that is being trained: all matrices together, by the trellis of the export, to a byte budget.

    latent weights ─► trellis, error feedback, scales by the Fisher information ─► symbols ─┬─► coded bytes ─► exponent
           ▲                                                                                └─► decoded weights ─► layers
           └──────────────────────────── gradient, and a pull towards what is decoded ──────────────────────────┘

Every few steps the latents are encoded anew, and the layers compute with what is decoded (`birdie.compress.trained`).
The latents are pulled towards it, ever more: at the end they are what the file holds. This is the proximal step of ADMM
for weights on a grid (Leng et al. 2017, arXiv 1707.09870), with a trellis in place of a grid.

Scales follow the sensitivity that was measured when the training began, so that symbols change only where weights do.
One exponent for all matrices is steered until the file has its size; from then on it is fixed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact.writer import Meter, Writer
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.rate.allocation import Allocation, assignments
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.budget import fit_budget
from birdie.compress.rate.target import Target
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded
from birdie.compress.small_tensors import small_scheme
from birdie.compress.state import EncodedState, ModelState, plain_state
from birdie.compress.trained import Trained, train_as_stored, trained_weights
from birdie.errors import BudgetError, ConfigError

_ABOUT = {"metadata": None, "budget": None, "tree": None, "files": {}}  # as birdie.save(model, path) has it
_SPARE = 0.002  # fraction of the budget that is left free while the size is steered
_STEERED = 0.7  # share of the estimated correction of the exponent: the rest follows at the next encoding
_FINER = 2.0**-9  # octaves by which the exponent rises at least if the file is too large at the end
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Requantized:
    """Result of one encoding of all matrices.

    Attributes:
        bytes: of the complete file.
        bits: per weight of the matrices.
        error: squared difference between latents and what is decoded, as a share of the squared latents.
        changed: share of the symbols that differ from those of the last encoding; 1 at the first.
    """

    bytes: int
    bits: float
    error: float
    changed: float


class Requantization:
    """Encodes the matrices of a model whenever it is called, and makes the layers use what is decoded.

    Args:
        model: any module; its matrices are parametrized in place.
        calibration: (module, batches, loss), or the result of one, of this model with its units in their order.
        budget: bytes of the complete file.
        states: of the trellis.
        workers: threads; None uses every core.

    Raises:
        BudgetError: the file cannot be made as small as the budget.
        ConfigError: no matrix is left to quantize: the model is so small that 16 bits fit, or the calibration is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration | CalibrationResult,
        budget: int,
        *,
        states: int = 8,
        workers: int | None = None,
    ) -> None:
        self.model, self.budget, self.workers = model, budget, workers
        state = ModelState.of(model)
        if not isinstance(calibration, CalibrationResult):
            calibration = CalibrationResult.of(state.by_name, calibration, symmetries=False)
        assignment = assignments(assign(state, None, Target(budget)), budget)[-1]
        self.allocation = Allocation(assignment, calibration.sensitivities, plain=False, workers=workers)
        self.allocation.scheme = replace(self.allocation.scheme, states=states)
        with self._writer() as writer:
            fit = fit_budget(self.allocation, writer.size, budget, writer.estimate)
        if fit.sigma is None:
            raise ConfigError(f"the model fits a budget of {budget:,} bytes losslessly; give a smaller budget")
        self.exponent = float(np.log2(fit.sigma))
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.matrices = {name: None for name in self.allocation.matrices if name in parameters}
        train_as_stored(model, self.matrices)
        self._symbols: dict[str, Encoded] = {}

    def __call__(self, pull: float, *, steer: bool) -> Requantized:
        """Encode all matrices and make the layers use what is decoded.

        Args:
            pull: share of the way that latents go towards it.
            steer: whether the exponent follows the size.
        """
        encoded = self._encode(self.exponent)
        with self._writer() as writer:
            size = writer.size(encoded)
        result = self._hold(encoded, size, pull)
        if steer:
            octaves = (size - self.budget * (1 - _SPARE)) * 8 / self.allocation.weights
            self.exponent += _STEERED * octaves
        return result

    def finish(self) -> Requantized:
        """Encode for good, so that the file is not larger than the budget; the model is then what the file holds.

        Raises:
            BudgetError: no exponent nearby makes the file small enough.
        """
        self._settle()
        with self._writer() as writer:
            for _ in range(_TRIES):
                encoded = self._encode(self.exponent)
                size = writer.size(encoded)
                if size <= self.budget:
                    return self._hold(encoded, size, 1.0)
                self.exponent += max(_FINER, (size - self.budget) * 8 / self.allocation.weights)
        raise BudgetError(
            f"the file has {size:,} bytes instead of {self.budget:,} although its scales were made coarser; "
            "give more steps or bytes"
        )

    def _encode(self, exponent: float) -> EncodedState:
        """Return the encoding of the model as it is now."""
        latents = {part.name: part.latent.detach() for part in self._parts()}
        state = plain_state(self.model)
        tensors = {name: latents.get(name, state[name].detach()) for name in self.allocation.assignment.tensors}
        allocation = self.allocation.continued({}, {name: tensor.clone() for name, tensor in tensors.items()})
        return allocation.encode(exponent)

    def _hold(self, encoded: EncodedState, size: int, pull: float) -> Requantized:
        error = power = 0.0
        changed = count = 0
        for part in self._parts():
            new, old = encoded.tensors[part.name], self._symbols.get(part.name)
            changed += differences(new, old)
            count += part.latent.numel()
            with torch.no_grad():
                error += float((decode(new).to(part.latent).view_as(part.latent) - part.latent).square().sum())
                power += float(part.latent.square().sum())
            part.weight.hold(part.latent, new, pull)
            self._symbols[part.name] = new
        return Requantized(size, 8 * size / count, error / power if power else 0.0, changed / count)

    def _parts(self) -> Iterator[Trained]:
        """Yield the matrices, tied ones under the name that the allocation has."""
        return (part for part in trained_weights(self.model) if part.name in self.matrices)

    def _settle(self) -> None:
        """Round the tensors that are not matrices as the file will hold them, in place."""
        with torch.no_grad():
            for name, tensor in plain_state(self.model).items():
                if name not in self.matrices and name not in self.allocation.assignment.ties:
                    scheme = self.allocation.assignment.small.get(name)
                    if scheme is not None and tensor.is_floating_point():
                        tensor.copy_(decode(small_scheme(tensor).encode(name, tensor)))

    @contextmanager
    def _writer(self) -> Iterator[Writer]:
        with ThreadPoolExecutor(self.workers) as pool:
            yield Writer(pool, "max", _ABOUT, Meter(None))


def differences(new: Encoded, old: Encoded | None) -> int:
    """Return how many symbols of two encodings of one tensor differ; all if there is only one, or the shapes differ."""
    symbols = new.streams[0] if new.streams else np.zeros(0)
    if old is None or not old.streams or old.streams[0].shape != symbols.shape:
        return int(symbols.size)
    return int(np.count_nonzero(symbols != old.streams[0]))


