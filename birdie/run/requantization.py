"""Quantization of a model that is being trained: all matrices together, by the trellis of the export, to a byte budget.

    latents ─► trellis, error feedback, scales by the Fisher information ─► symbols ─┬─► coded bytes ─► exponent
       ▲                                                                             └─► decoded weights ─► layers
       └───────────────────────────────────── gradient ────────────────────────────────────────────────────┘

Every few steps the latents are encoded anew, and the layers compute with what is decoded (`compress/qat/trained.py`).
The gradient goes straight through to the latents. A pull of the latents towards what is decoded (the proximal step of
ADMM, Leng et al. 2017, arXiv 1707.09870) was tried and makes it worse: each encoding shrinks weights to save bits, and
the pull adds these up.

While weights change, scales follow the sensitivity that was measured at the beginning, and one exponent for all is
steered to the budget. At the end the model is calibrated again, and the exponent is searched as `birdie.save` does.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact.write import Beside
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.coding import decode, with_integers
from birdie.compress.qat.trained import Parametrized, TrainedWeight, parametrized, plain, train_as_stored
from birdie.compress.rate.assignment import Schemes, assign
from birdie.compress.rate.encoding import Coder
from birdie.compress.rate.jobs import FINEST, assignments, jobs_of
from birdie.compress.rate.search import fit_budget
from birdie.compress.rate.target import Target
from birdie.compress.scheme import Blocks, Encoded, Sensitivity
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.state import EncodedState, ModelState, plain_state
from birdie.entropy.hints import Effort
from birdie.errors import BudgetError, ConfigError

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


class BudgetEncoder:
    """Encodes the matrices of a model to a byte budget, at first by a search and then while their weights change.

    Args:
        state: tensors in the order of units in which they will be stored, with the schemes of those that have one.
        sensitivities: name → sensitivity of the matrices.
        budget: bytes of the complete file.
        rules: (pattern, spec) of tensors that the budget does not change, as `birdie.save` takes them; None: none.
        states: of the trellis.
        start: exponent at which the search begins; None: by estimate.
        coder: entropy coding effort of the file.
        metadata: of the file; without any, the budget is not noted in it either.
        workers: threads; None uses every core.

    Attributes:
        jobs: of the file.
        exponent: log2 of the typical scale in standard deviations.
        fit: the result of the search.
    """

    def __init__(
        self,
        state: ModelState,
        sensitivities: Mapping[str, Sensitivity],
        budget: int,
        *,
        rules: Schemes | None = None,
        states: int = _STATES,
        start: float | None = None,
        coder: Effort = "max",
        metadata: Mapping[str, Any] = MappingProxyType({}),
        workers: int | None = None,
    ) -> None:
        self.budget, self._coder = budget, _coder(budget, coder, metadata, workers)
        assignment = assignments(assign(to_be_trained(state), rules, Target(budget)), budget)[0]
        trellis = Trellis(states)
        self.jobs = jobs_of(assignment, sensitivities, trellis=trellis, down_columns=False, workers=workers)
        self.fit = fit_budget(self.jobs, self._coder, budget, start=start)
        if self.fit.sigma is None:
            raise ConfigError(f"the model fits a budget of {budget:,} bytes losslessly; give a smaller budget")
        self.exponent = math.log2(self.fit.sigma)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name → tensor of the file, tied ones once."""
        return self.jobs.assignment.tensors

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[EncodedState, int]:
        """Encode all tensors with the values that they have now, and let the exponent follow the size.

        Args:
            tensors: name → values, for every name in `tensors`.

        Returns:
            The encoding, and the bytes of the complete file.
        """
        now = {name: tensors[name].detach().clone() for name in self.tensors}
        jobs = self.jobs.continued({}, now)
        encoded = jobs.state(self._coder.code([*jobs.by_name.values()], self.exponent))
        size = self._coder.size(encoded)
        exponent = self.exponent + _STEERED * (size - self.budget * (1 - _SPARE)) * 8 / jobs.weights
        self.exponent = min(max(exponent, FINEST), jobs.coarsest)
        return encoded, size


def _coder(budget: int, effort: Effort, metadata: Mapping[str, Any], workers: int | None = None) -> Coder:
    fields = {"metadata": metadata, "budget": budget} if metadata else {}
    return Coder(effort, Beside(fields).size, workers, keeps_integers=True)


def to_be_trained(state: ModelState) -> ModelState:
    """Return a state none of whose matrices is exact: one that begins at zero has few values, and will have others."""
    return replace(state, exact=frozenset(name for name in state.exact if state.tensors[name].ndim < 2))


def require_reachable(
    state: ModelState, budget: int, *, rules: Schemes | None, coder: Effort, metadata: Mapping[str, Any]
) -> None:
    """Check before training that a budget can be met, and leaves something to quantize; arguments as `BudgetEncoder`.

    Initial weights are often constant and take few bytes, so all tensors are noise here, and the matrices of the
    smallest file zeros.
    """
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.tensors.items()
    }
    state = replace(to_be_trained(state), tensors=noise)
    assignment = assignments(assign(state, rules, Target(budget)), budget)[0]
    zeros = {name: torch.zeros_like(noise[name]) for name in assignment.free}
    code = _coder(budget, coder, metadata)
    smallest = jobs_of(replace(assignment, tensors={**noise, **zeros}), down_columns=False)
    size = code.size(smallest.state(code.code([*smallest.by_name.values()], draft=True)))
    if size > budget:
        raise BudgetError(
            f"budget {budget:,} bytes cannot be met: with zeros for all matrices that it changes the file takes "
            f"{size:,} bytes; allow more than that, or pin fewer tensors to fine schemes"
        )
    if budget < 2 * assignment.weights:  # noise in float32 takes more than that
        return
    jobs = jobs_of(assignment)
    pinned = code.code([job for job in jobs.by_name.values() if job.role == "rule"])
    if code.size(jobs.state({**pinned, **code.code(jobs.lossless())})) <= budget:
        raise ConfigError(f"the model fits a budget of {budget:,} bytes losslessly; give a smaller budget")


class Requantization:
    """Encodes the matrices of a model whenever it is called, and makes the layers use what is decoded.

    Args:
        model: any module; its matrices are parametrized in place, and units whose order is arbitrary are sorted, which
            saves bits (the function is unchanged).
        batches: to calibrate on before the first encoding; a few are enough.
        loss: (module, batch) → any differentiable number.
        budget: bytes of the complete file.
        workers: threads; None uses every core.

    Attributes:
        model: the same.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], loss: Loss, budget: int, *, workers: int | None = None
    ) -> None:
        self.model, self.budget, self.workers = model, budget, workers
        self._loss = loss
        self._encoder = self._search(model, batches)
        with torch.no_grad():
            for name, tensor in plain_state(model).items():
                if name in self._encoder.tensors:
                    tensor.copy_(self._encoder.tensors[name])  # in the sorted order
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        searched = (job.name for job in self._encoder.jobs.searched)
        self.matrices = {name: None for name in searched if name in parameters}
        train_as_stored(model, self.matrices)
        self._symbols: dict[str, Encoded] = {}

    def _search(self, model: nn.Module, batches: Sequence[Batch], **settings: Any) -> BudgetEncoder:
        """Calibrate a model with plain parameters, sort its units, and search for the exponent."""
        state = ModelState.of(model)
        calibration = CalibrationResult.of(state.by_name, (model, batches, self._loss))
        ordered = calibration.ordered(state)
        return BudgetEncoder(ordered, calibration.sensitivities, self.budget, workers=self.workers, **settings)

    def __call__(self) -> Requantized:
        """Encode all matrices, make the layers use what is decoded, and let the exponent follow the size."""
        state, latents = plain_state(self.model), {part.name: part.original for part in self._parts()}
        encoded, size = self._encoder.encode({name: latents.get(name, state[name]) for name in self._encoder.tensors})
        return self._hold(encoded, size)

    def finish(self, batches: Sequence[Batch]) -> Requantized:
        """Calibrate again, and encode for good, to the budget, with more states: the model is then what the file holds.

        Args:
            batches: to calibrate on; tens of thousands of tokens, or thousands of images.
        """
        latent = plain(copy.deepcopy(self.model), latent=True)
        self._encoder = self._search(latent, batches, states=_FINAL_STATES, start=self._encoder.exponent)
        with torch.no_grad():
            for part in self._parts():
                part.original.copy_(self._encoder.tensors[part.name])  # in the sorted order
        return self._hold(self._encoder.fit.encoded, self._encoder.fit.bytes, final=True)

    def _hold(self, encoded: EncodedState, size: int, *, final: bool = False) -> Requantized:
        """Make the layers use what is decoded; `final`: give all other tensors the values of the file as well."""
        if final:
            self._settle(encoded)
        parts = {part.name: part for part in self._parts()}
        latents = {name: part.original.detach().clone() for name, part in parts.items()}
        for name, part in parts.items():
            part.weight.hold(part.original, with_integers(encoded.tensors[name]), final=final)
        result = compared(encoded, size, self._symbols, latents)
        self._symbols = {name: with_integers(encoded.tensors[name]) for name in parts}
        return result

    def _parts(self) -> Iterator[Parametrized[TrainedWeight]]:
        """Yield the matrices, tied ones under the name that the file has."""
        return (part for part in parametrized(self.model, TrainedWeight) if part.name in self.matrices)

    def _settle(self, encoded: EncodedState) -> None:
        """Give the tensors that are no matrices the values of the file, in place."""
        with torch.no_grad():
            for name, tensor in plain_state(self.model).items():
                if name in encoded.tensors and name not in self.matrices:
                    tensor.copy_(decode(encoded.tensors[name]))


def compared(
    encoded: EncodedState, size: int, previous: Mapping[str, Encoded], latents: Mapping[str, Tensor]
) -> Requantized:
    """Compare an encoding with the weights, and with the last encoding.

    Args:
        encoded: all tensors.
        size: bytes of the complete file.
        previous: name → the last encoding of a matrix.
        latents: name → weight of each matrix when it was encoded.
    """
    error = power = 0.0
    changed = count = 0
    for name, latent in latents.items():
        new = with_integers(encoded.tensors[name])
        changed += differences(new, previous.get(name))
        count += latent.numel()
        error += float((decode(new).to(latent).view_as(latent) - latent).square().sum())
        power += float(latent.square().sum())
    return Requantized(size, 8 * size / count, error / power if power else 0.0, changed / count)


def differences(new: Encoded, old: Encoded | None) -> int:
    """Return how many symbols of two encodings of one tensor differ; all if there is only one, or the shapes differ."""
    if isinstance(new, Blocks):
        parts = old.parts if isinstance(old, Blocks) and len(old.parts) == len(new.parts) else [None] * len(new.parts)
        return sum(map(differences, new.parts, parts))
    symbols = new.streams[0] if new.streams else np.zeros(0)
    if old is None or not old.streams or old.streams[0].shape != symbols.shape:
        return int(symbols.size)
    return int(np.count_nonzero(symbols != old.streams[0]))
