"""How fine each matrix is at one global step: the exponent that a budget or a quality turns.

Calibrated matrices share one Lagrange multiplier (`trellis`): what a bit less costs is the same everywhere. Others take
steps in standard deviations, embeddings finer ones (`EMBEDDING_FACTOR`), and so does everything where nothing was
calibrated: one step a matrix, as errors of a large row and of a small one cost about the same, and one a row in kernels
of convolutions, whose rows a normalization mostly brings to one size, and in plain grids, by whose rows the size can be
steered finely. The exponent is log2 of the typical step in standard deviations either way.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.feedback import Feedback, feedback
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.tensors import finite_rows, rows_columns

# Embedding rows take steps this much finer. Tuned on a 3.8 M-weight GPT with GPTQ, the best pairs of steps were
# 0.3 σ with 0.05 σ for the embedding, and 0.2 σ with 0.108 σ: factors of 0.17 and 0.54. This is between the two.
EMBEDDING_FACTOR = 0.35
EMBEDDING_NAMES = ("tok_emb", "embed", "wte", "lm_head")

# The finest is about eighteen bits per weight, the most that symbols exact in float32 leave to a row with outliers. At
# the coarsest of steps by spread every row has the widest; where the loss decides, next to nothing is left of any.
FINEST, COARSEST, COARSEST_BY_LOSS = -16.0, 3.6, 9.0
# Standard deviations no step exceeds: beyond, a matrix is all but zero, and to call that a fit would be a lie.
WIDEST = 4.0
_WIDEST_TRELLIS = 1.5  # beyond, the cheapest path through a trellis is nothing at all


@dataclass(slots=True)
class Allocation:
    """The matrices of a model and what is known of them.

    Attributes:
        matrices: name → weight, real floats, not empty.
        sensitivities: name → what calibration found; names may be missing, and others be there.
        scheme: how calibrated matrices are quantized, and all of them if `plain` is false.
        plain: whether matrices that were not calibrated take a grid, quick to load, instead of a trellis.
    """

    matrices: Mapping[str, Tensor]
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)
    scheme: Trellis = field(default_factory=Trellis)
    plain: bool = True
    workers: int | None = None
    _known: dict[str, Feedback] = field(init=False, default_factory=dict)
    _unit: float = field(init=False, default=0.0)
    _most: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Factorise what was calibrated."""
        names = [name for name in self.matrices if name in self.sensitivities]
        with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
            self._known = dict(zip(names, pool.map(self._feedback, names), strict=True))
        total, count, levels = 0.0, 0, []
        for name, known in self._known.items():
            spread = float(finite_rows(name, self.matrices[name]).std(dtype=np.float64)) or 1.0
            typical = float(np.log2(known.row_weight).mean() + np.log2(known.column_weight).mean()) / 2
            levels.append(math.log2(spread) + typical)
            total += levels[-1] * self.matrices[name].numel()
            count += self.matrices[name].numel()
        self._unit = total / max(count, 1)
        self._most = max(levels, default=0.0) - self._unit

    @property
    def coarsest(self) -> float:
        """The largest exponent there is: where matrices that hardly count pull the mean down, others must follow."""
        return max(COARSEST_BY_LOSS, self._most + COARSEST) if self._known else COARSEST

    def encode(self, exponent: float, *, draft: bool = False) -> dict[str, Encoded]:
        """Every matrix at `exponent`; `draft` tells about the size in a fraction of the time."""

        def encoded(name: str) -> Encoded:
            weight = self.matrices[name]
            if name in self._known:
                return self.scheme.coded(name, weight, self._known[name], 2.0 ** (exponent + self._unit), draft=draft)
            sigma = min(2.0**exponent * _factor(name), WIDEST)
            whole = weight.ndim < 3 and not self.plain
            if self.plain or draft or sigma > _WIDEST_TRELLIS:
                return Grid(sigma=sigma, whole=whole).encode(name, weight)
            return Trellis(self.scheme.states, sigma, whole=whole).encode(name, weight)

        with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
            return dict(zip(self.matrices, pool.map(encoded, self.matrices), strict=True))

    def sample(self, count: int) -> NDArray[np.float32]:
        """About `count` weights in steps at exponent 0, flat."""
        share = min(1.0, count / sum(weight.numel() for weight in self.matrices.values()))
        return np.concatenate([self._normalised(name, share) for name in self.matrices])

    def _feedback(self, name: str) -> Feedback:
        weight = self.matrices[name]
        return feedback(self.sensitivities[name], *rows_columns(tuple(weight.shape)), output=self.scheme.output)

    def _normalised(self, name: str, share: float) -> NDArray[np.float32]:
        weight = self.matrices[name]
        flat = weight.detach().reshape(rows_columns(tuple(weight.shape)))
        picked = torch.arange(0, flat.shape[0], max(1, round(1 / share)))
        rows = finite_rows(name, flat[picked])
        if name in self._known:
            known = self._known[name]
            unit = np.outer(known.row_weight[picked.numpy()] ** 0.5, known.column_weight**0.5) * 2.0**-self._unit
            return np.asarray(rows * unit, dtype=np.float32).reshape(-1)
        deviation = rows.std(axis=1, keepdims=True, dtype=np.float64)
        return np.asarray(rows / (np.where(deviation > 0, deviation, 1) * _factor(name)), dtype=np.float32).reshape(-1)


def _factor(name: str) -> float:
    return EMBEDDING_FACTOR if any(part in name for part in EMBEDDING_NAMES) else 1.0
