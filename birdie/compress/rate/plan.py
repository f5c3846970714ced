"""How the tensors of one file are encoded: the schemes asked for, a target of bytes or quality, what is known.

state ──► search for the target, or the schemes as they are ──► Encoded ──► the better of both
  │                                                               │                ▲
  ├── what weights are worth there too ◄────── recalibrate ───────┤                │
  └── tuned to what quantization left ◄──────── refit ────────────┘                │
                  └──► the same once more ─────────────────────────► Encoded ──────┘
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from birdie.compress.calibration.result import Knowledge
from birdie.compress.rate.allocation import Allocation
from birdie.compress.rate.assignment import assign, encode_all
from birdie.compress.rate.budget import Size, fit_budget, fit_quality
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.lossless import Lossless


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for, in terms of the tensors that a file holds once.

    Attributes:
        default: the scheme of matrices that are not pinned, where there is no target.
        pinned: name → the scheme it has whatever the target.
        ties: second name → first name of what the file holds once.
        known: by calibration.
        budget: bytes the file may have.
        quality: nats of KL per target it may cost; needs `known`.
        recalibrate: whether to calibrate the quantized model too; needs `known`.
        refit: steps that tune what is kept in 16 bits to the rest; needs `known`.
        lossless: whether every bit is kept.
        plain: whether files are to be quick to code and load.
        workers: threads; None takes every core.
    """

    default: Scheme
    pinned: Mapping[str, Scheme]
    ties: Mapping[str, str]
    known: Knowledge | None
    budget: int | None
    quality: float | None
    recalibrate: bool
    refit: int
    lossless: bool
    plain: bool
    workers: int | None
    _sensitivities: dict[str, Sensitivity] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """What is known of either name of a tie holds for the first."""
        if self.known is not None:
            found = self.known.sensitivities.items()
            self._sensitivities.update({self.ties.get(name, name): each for name, each in found})

    def encode(self, state: Mapping[str, Tensor], size: Size, rough: Size | None = None) -> dict[str, Encoded]:
        """Every tensor of `state`, as the target and the schemes will have it.

        Recalibration and refit each do it all once more, and the better is taken: the smaller where a quality is met
        either way, else the nearer to the float model.

        Args:
            state: name → tensor, ties removed.
            size: bytes of the file that holds these.
            rough: about the same, sooner, for the beginning of a search.

        Raises:
            BudgetError: nothing fits the budget or the quality.
            WeightsError: a tensor cannot be stored so.
        """
        encoded = self._encode(state, size, rough)
        if self.known is None:
            return encoded
        better = self.known.divergence if self.quality is None else size
        plan = self
        if self.recalibrate:
            plan = replace(self, known=self.known.recalibrated(encoded, self.ties, self.workers))
            again = plan._encode(state, size, rough)
            if better(again) >= better(encoded):
                plan, again = self, encoded
            encoded = again
        if self.refit:
            tuned = self.known.refitted(encoded, self.ties, self.refit, self.workers)
            encoded = min((encoded, plan._encode({**state, **tuned}, size, rough)), key=better)
        return encoded

    def _encode(self, state: Mapping[str, Tensor], size: Size, rough: Size | None) -> dict[str, Encoded]:
        known, workers = self._sensitivities, self.workers
        chosen: dict[str, Any] = {
            "pinned": self.pinned,
            "allocate": self._allocate,
            "calibrated": known,
            "workers": workers,
        }
        if self.budget is not None:
            return fit_budget(state, size, self.budget, rough=rough, **chosen).encoded
        if self.quality is not None and self.known is not None:
            return fit_quality(state, size, self.quality, self.known.divergence, **chosen).encoded
        schemes = dict.fromkeys(state, Lossless()) if self.lossless else assign(state, self.pinned, self.default)
        return encode_all(state, schemes, sensitivities=known, workers=workers)

    def _allocate(self, matrices: Mapping[str, Tensor]) -> Allocation:
        return Allocation(matrices, self._sensitivities, plain=self.plain, workers=self.workers)
