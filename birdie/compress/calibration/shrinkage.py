"""Shrinkage of a calibration from few samples towards the prior.

    sensitivity from n samples ─┐
    prior of the same weight ───┴─► (1 − α) measured + α prior, α by n and the dimension

The smallest eigenvalues of a Hessian from few samples are far too small, and error feedback then moves errors to where
they seem to cost nothing. The prior (`birdie.compress.prior`) knows correlations between taps and the mean of inputs
behind a ReLU; of inputs without either, only the diagonal is kept. The share α is that of the oracle approximating
shrinkage estimator (Chen, Wiesel, Eldar & Hero 2010, arXiv 0907.4698), with the measured matrix whitened by the prior.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from birdie.compress.prior import level, prior
from birdie.compress.scheme import Sensitivity, TapCovariance

ROW_SAMPLES = 4.0  # gradients that the prior of the rows is worth
ENOUGH = 100  # samples for each dimension of which nothing is shrunk
_LEAST = 1e-6  # smallest variance of an input, in the mean of all


def shrunk(known: Mapping[str, Sensitivity], weights: Mapping[str, Tensor]) -> dict[str, Sensitivity]:
    """Return the sensitivities, shrunk towards the prior as far as their numbers of samples ask for.

    Args:
        known: name → sensitivity by calibration; one without a number of samples is not changed.
        weights: name → weight, of the same names at least where something is to be shrunk.

    Raises:
        WeightsError: a weight is not finite.
    """
    assumed = prior({name: weights[name] for name in known if name in weights})
    levels = {name: level(known[name]) / level(item) for name, item in assumed.items()}
    unit = float(np.median([ratio for ratio in levels.values() if ratio > 0] or [1.0]))
    return {name: _shrunk(item, assumed[name], unit) if name in assumed else item for name, item in known.items()}


def _shrunk(known: Sensitivity, assumed: Sensitivity, unit: float) -> Sensitivity:
    hessian, blocks, rows, output = known.hessian, known.blocks, known.row_fisher, known.output
    if hessian is not None and known.samples:
        hessian = shrunk_covariance(hessian, known.samples, assumed.taps)
    if blocks is not None and known.samples:
        parts = [shrunk_covariance(block, known.samples, assumed.taps) for block in blocks.blocks]
        blocks = replace(blocks, blocks=torch.stack(parts))
    measured = level(replace(known, row_fisher=None))
    if rows is not None and known.gradients and assumed.row_fisher is not None and measured > 0:
        prior_rows = assumed.row_fisher.to(rows) * (unit * level(replace(assumed, row_fisher=None)) / measured)
        share = ROW_SAMPLES / (ROW_SAMPLES + known.gradients)
        mixed = (1 - share) * rows + share * prior_rows
        if output is not None:
            # Correlations between rows are those of the few gradients, variances the mixed ones.
            factors = (mixed / rows.clamp_min(_LEAST * float(rows.mean()))).sqrt()
            output = shrunk_covariance(output, known.gradients) * factors[:, None] * factors
            output.diagonal().copy_(mixed)
        rows = mixed
    return replace(known, hessian=hessian, blocks=blocks, row_fisher=rows, output=output)


def shrunk_covariance(measured: Tensor, samples: float, taps: TapCovariance | None = None) -> Tensor:
    """Return (1 − α) measured + α target, (n, n), with the variances measured and the correlations of `taps`.

    Args:
        measured: second moments.
        samples: how many independent samples they are the mean of.
        taps: assumed correlations; None: there are none.
    """
    size = len(measured)
    variance = measured.diagonal().double()
    mean = float(variance.mean())
    if not mean > 0 or size < 2 or samples >= ENOUGH * size:
        return measured
    deviation = variance.clamp_min(_LEAST * mean).sqrt()
    correlation = measured.double() / deviation[:, None] / deviation
    target = _correlations(taps, size)
    if target is None:
        share = oracle_share(correlation, samples)
        target = torch.eye(size, dtype=torch.float64)
    else:
        root = torch.linalg.cholesky(target)
        half = torch.linalg.solve_triangular(root, correlation, upper=False)
        share = oracle_share(torch.linalg.solve_triangular(root, half.T, upper=False), samples)
    mixed = (1 - share) * correlation + share * target
    return (mixed * deviation[:, None] * deviation).to(measured.dtype)


def oracle_share(whitened: Tensor, samples: float) -> float:
    """Return α of the oracle approximating shrinkage of a matrix (n, n) towards the identity."""
    size, trace = len(whitened), float(whitened.trace())
    squares = float((whitened * whitened).sum())
    excess = squares - trace**2 / size
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / size) * squares + trace**2) / ((samples + 1 - 2 / size) * excess))


def _correlations(taps: TapCovariance | None, size: int) -> Tensor | None:
    if taps is None or size % len(taps.taps):
        return None
    dense = np.kron(np.eye(size // len(taps.taps)), taps.taps) + taps.shared
    deviation = np.sqrt(dense.diagonal())
    return torch.from_numpy(dense / np.outer(deviation, deviation))
