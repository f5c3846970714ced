"""Training on what a file of a byte budget will hold, in a run (`[qat] budget`) and by `birdie.fine_tune`.

    calibrate ─► search for the exponent ─► encode ─► symbols ─┬─► coded bytes ─► exponent of the next encoding
                                              ▲                └─► decoded weights ─► layers
                                              └── weights ◄──────── gradient ────────────┘

Matrices are encoded as `birdie.save` encodes them: trellis, error feedback, scales by the Fisher information, one
exponent for all. Between two encodings they move, and layers use the decoded weight plus that movement; the gradient
goes straight through (`birdie.small.qat.stored_weights`). The parameters stay what they are, so banks, averages and
checkpoints do not know of it. While weights change, scales follow the sensitivity that was measured at the beginning,
and the exponent is steered to the budget. At the end the model is calibrated again, and the exponent is searched.

A pull of the weights towards what is decoded (the proximal step of ADMM, Leng et al. 2017, arXiv 1707.09870) was tried
and makes it worse: each encoding shrinks weights to save bits, and the pull adds these up.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact.write import Beside
from birdie.checkpoints.stored_order import order_field
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.coding import decode, with_integers
from birdie.compress.rate.assignment import Assignment, Schemes, assign
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import FINEST, Jobs, assignments, jobs_of
from birdie.compress.rate.search import Fit, fit_budget
from birdie.compress.rate.target import Target
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.state import EncodedState, ModelState, keys_of, named_tensors
from birdie.entropy.hints import Effort
from birdie.errors import BirdieError, BudgetError, ConfigError
from birdie.small.qat.fake_quantization import matrices_to_train
from birdie.small.qat.quantized_layers import Layer, layers_of, parameter
from birdie.small.qat.settings import Qat
from birdie.small.qat.stored_weights import hold, offset_of, plain, use_decoded
from birdie.system.context import Context

_SPARE = 0.002  # fraction of the budget that is left free while the size is steered
_STEERED = 0.7  # share of the estimated correction of the exponent: the rest follows at the next encoding
_STATES, _FINAL_STATES = 8, 32  # of the trellis, while weights still change and at the end
Calibrate = Callable[[Mapping[str, Tensor]], CalibrationResult]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Result of one encoding of a model."""

    bytes: int  # of the complete file
    bits: float  # per weight of the matrices
    error: float  # squared difference between weights and what is decoded, as a share of the squared weights
    # share of the symbols that differ from those of the last encoding; 1 at the first. The final encoding has another
    # trellis and may have another order of units
    changed: float


@dataclass(frozen=True, slots=True)
class BudgetFile:
    """A file with a byte budget.

    Attributes:
        budget: bytes of the complete file.
        rules: (pattern, spec) of tensors that the budget does not change, as `birdie.save` takes them; None: none.
        effort: of the entropy coder.
        metadata: of the file; without any, the budget is not noted in it either.
        order: of its tensors (birdie.checkpoints.order).
    """

    budget: int
    rules: Schemes | None = None
    effort: Effort = "max"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    order: Any = None

    @property
    def encoder(self) -> Encoder:
        """Encoder of the file."""
        about = {"metadata": self.metadata, "budget": self.budget} if self.metadata else {}
        return Encoder(self.effort, Beside({**about, "order": self.order}).size, keeps_integers=True)

    def assignment(self, state: ModelState) -> Assignment:
        """Return the schemes of the tensors of a module."""
        return assignments(assign(state, self.rules, Target(self.budget)), self.budget)[0]

    def require_reachable(self, state: ModelState) -> None:
        """Check before training that the budget can be met, and leaves something to quantize.

        Initial weights are often constant and take few bytes, so all tensors are noise here, and the matrices of the
        smallest file zeros.
        """
        generator, encoder = torch.Generator().manual_seed(0), self.encoder
        noise = {
            name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor.cpu()
            for name, tensor in state.tensors.items()
        }
        assignment = self.assignment(replace(state, tensors=noise))
        zeros = {name: torch.zeros_like(noise[name]) for name in assignment.free}
        smallest = jobs_of(replace(assignment, tensors={**noise, **zeros}), down_columns=False)
        size = encoder.size(smallest.state(encoder.code([*smallest.by_name.values()], draft=True)))
        if size > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: with zeros for all matrices that it changes the file "
                f"takes {size:,} bytes; allow more than that, or pin fewer tensors to fine schemes"
            )
        if self.budget < 2 * assignment.weights:  # noise in float32 takes more than that
            return
        jobs = jobs_of(assignment)
        pinned = encoder.code(jobs.rules)
        if encoder.size(jobs.state({**pinned, **encoder.code(jobs.lossless())})) <= self.budget:
            raise self.lossless_error()

    def lossless_error(self) -> ConfigError:
        """Return the error of a budget that leaves nothing to quantize."""
        return ConfigError(f"the model fits a budget of {self.budget:,} bytes losslessly; give a smaller budget")


class StoredTraining:
    """A model whose layers use what its file will hold of their weights; a `StepHook` of the training loop of a run.

    Args:
        model: whose layers change their class until `remove` or `finish`.
        file: that it is trained for.
        calibrate: name → tensor of the model, on the CPU → its calibration. If that sorts units, the model is sorted.
        settings: of a run: which matrices are trained so, and when they are encoded; in evaluation mode layers use the
            float weights. None: all matrices that the budget changes, in either mode, and the caller encodes.
        context: ranks, of which rank 0 calibrates and encodes, inside the training clock, and the log, which has a line
            about each encoding of a run. None: one rank.

    Attributes:
        last: result of the last encoding, on rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        file: BudgetFile,
        calibrate: Calibrate,
        *,
        settings: Qat | None = None,
        context: Context | None = None,
    ) -> None:
        self.model, self.file = model, replace(file, order=order_field(keys_of(model)))
        self.last: Encoding | None = None
        self._calibrate, self._settings = calibrate, settings
        self._context = context or Context(torch.device("cpu"))
        self._matrices: dict[str, Layer] = {}
        self._jobs: Jobs | None = None
        self._exponent = 0.0
        self._symbols: dict[str, Encoded] = {}
        self._done = 0
        if settings is not None:
            self._matrices = matrices_to_train(model, settings.tensors)
            self.file.require_reachable(ModelState.of(model))
            use_decoded(self._matrices.values(), in_evaluation=False)

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:
        """Encode the weights anew if it is time to; a resumed run encodes at its first step.

        Args:
            step: finished steps; -1 during warm-up, when nothing is encoded.
            fraction: of the run that is done, 0 to 1.
            multiplier: factor on the learning rates.
        """
        assert self._settings is not None
        progress, encodings = self._settings.progress(fraction, multiplier), self._settings.encodings
        if step < 0 or progress is None or progress * encodings < self._done:
            return
        self._done = int(progress * encodings) + 1
        failure = None
        if self._context.world.is_main:
            try:
                last = self.encode()
                self._context.notify(
                    f"qat budget: step {step + 1}, {last.bytes:,} bytes of {self.file.budget:,}, "
                    f"{len(self._symbols)} tensors of {last.bits:.3f} bits a weight, moved by "
                    f"{100 * last.error**0.5:.3g} % of their norm, {100 * last.changed:.3g} % of their symbols new"
                )
            except BirdieError as error:
                failure = error
        offsets = [offset_of(*layer) for layer in self._matrices.values()]
        if self._context.world.any(failure is not None, offsets[0].device):
            raise failure or ConfigError("rank 0 cannot encode the weights; see its message")
        for offset in offsets:
            self._context.world.broadcast_(offset)

    def encode(self) -> Encoding:
        """Encode all matrices, make the layers use what is decoded, and let the exponent follow the size."""
        if self._jobs is None:
            fit = self._search(self._calibrate, _STATES)
            if self._settings is None:
                use_decoded(self._matrices.values(), in_evaluation=True)
            return self._hold(fit.encoded, fit.bytes)
        tensors, encoder, budget = named_tensors(self.model), self.file.encoder, self.file.budget
        jobs = self._jobs.continued({name: tensors[name].cpu() for name in self._jobs.assignment.tensors})
        encoded = jobs.state(encoder.code([*jobs.by_name.values()], self._exponent))
        size = encoder.size(encoded)
        exponent = self._exponent + _STEERED * (size - budget * (1 - _SPARE)) * 8 / jobs.weights
        self._exponent = min(max(exponent, FINEST), jobs.coarsest)
        return self._hold(encoded, size)

    def finish(self, calibrate: Calibrate) -> Encoding:
        """Calibrate again, and encode for good, to the budget, with more states: the model is then what the file holds.

        The layers have their classes again, and `birdie.save` writes this encoding, until the weights change or
        `birdie.plain(model)` is called.

        Args:
            calibrate: as before; this one decides on the file.
        """
        self.remove()
        fit = self._search(calibrate, _FINAL_STATES, start=self._exponent)
        result = self._hold(fit.encoded, fit.bytes)
        self._set(fit.encoded.decode())
        return result

    def remove(self) -> None:
        """Give the layers back their classes; the parameters stay as training left them."""
        plain(self.model, latent=True)

    def _search(self, calibrate: Calibrate, states: int, start: float | None = None) -> Fit:
        """Calibrate the model, sort its units, and search for the exponent."""
        state = ModelState.of(self.model)
        tensors = {name: tensor.detach().cpu() for name, tensor in state.tensors.items()}
        by_name = {name: tensors[state.ties.get(name, name)] for name in state.by_name}
        calibration = calibrate(by_name)
        state = calibration.ordered(replace(state, by_name=by_name, tensors=tensors))
        assignment = replace(self.file.assignment(state), trellis=Trellis(states))
        jobs = jobs_of(assignment, calibration.sensitivities, down_columns=False)
        fit = fit_budget(jobs, self.file.encoder, self.file.budget, start=start)
        if fit.sigma is None:
            raise self.file.lossless_error()
        self._jobs, self._exponent = jobs, math.log2(fit.sigma)
        self._set(state.tensors)
        if self._settings is None:
            searched = {job.name for job in jobs.searched}
            self._matrices = layers_of(self.model, lambda name, _: state.ties.get(name, name) in searched)
        return fit

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if name in tensors:
                    tensor.copy_(tensors[name])

    def _hold(self, encoded: EncodedState, size: int) -> Encoding:
        """Make the layers use what is decoded; compare it with the weights, and with the last encoding."""
        error = power = 0.0
        changed = count = 0
        symbols: dict[str, Encoded] = {}
        decoded: dict[str, Tensor] = {}
        for name, (layer, key) in self._matrices.items():
            first = encoded.ties.get(name, name)
            if first not in symbols:
                weight, symbols[first] = parameter(layer, key).detach(), with_integers(encoded.tensors[first])
                decoded[first] = decode(symbols[first]).to(weight).view_as(weight)
                changed += _differences(symbols[first], self._symbols.get(first))
                count += weight.numel()
                error += float((decoded[first] - weight).square().sum())
                power += float(weight.square().sum())
            hold(layer, key, symbols[first], decoded[first])
        self._symbols = symbols
        self.last = Encoding(size, 8 * size / count, error / power if power else 0.0, changed / count)
        return self.last


def _differences(new: Encoded, old: Encoded | None) -> int:
    """Return how many symbols of two encodings of one tensor differ; all if there is only one, or the shapes differ."""
    if isinstance(new, Blocks):
        parts = old.parts if isinstance(old, Blocks) and len(old.parts) == len(new.parts) else [None] * len(new.parts)
        return sum(map(_differences, new.parts, parts))
    symbols = new.streams[0] if new.streams else np.zeros(0)
    if old is None or not old.streams or old.streams[0].shape != symbols.shape:
        return int(symbols.size)
    return int(np.count_nonzero(symbols != old.streams[0]))
