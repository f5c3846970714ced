"""Shrinkage of a calibration from few samples towards the prior.

    sensitivity from n samples ─┐
    prior of the same weight ───┴─► (1 − α) · measured + α · prior, α by n and the number of columns

The small eigenvalues of a Hessian from few samples are far too small, and error feedback then moves errors to where
they seem to cost nothing. The prior (`birdie.compress.prior`) has the correlations between taps of a kernel and the
mean of inputs behind a ReLU; elsewhere it is the identity. Its trace is made that of the measured Hessian. α is that of
the oracle approximating shrinkage estimator (Chen, Wiesel, Eldar & Hero 2010, arXiv 0907.4698) after whitening by the
prior. The Fisher information of rows is shrunk in proportion to a number of gradients, `ROW_GRADIENTS`, that the prior
is worth. Rows of an embedding are first shrunk towards their mean, each by the number of times that it was drawn.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from birdie.compress.prior import kinds_of, mean_cost, prior
from birdie.compress.row_blocks import with_rows
from birdie.compress.scheme import Sensitivity, TapCovariance
from birdie.compress.trellis.feedback import FLOOR

ROW_GRADIENTS = 16.0
ENOUGH = 100  # samples for each column, from which on a Hessian is not shrunk: α is below 0.01
_LEAST = 1e-6  # smallest variance of a gradient, as a share of the mean of all rows


def shrink(
    known: Mapping[str, Sensitivity],
    weights: Mapping[str, Tensor],
    names: Collection[str],
    *,
    embeddings: Collection[str] = (),
    least: float = 0.0,
) -> Iterator[tuple[str, Sensitivity]]:
    """Yield (name, sensitivity), shrunk towards the prior as far as their numbers of samples require, one at a time.

    Args:
        known: name → sensitivity by calibration; without a number of samples it is not changed.
        weights: name → weight, of all of the model; a sensitivity without a weight is not changed.
        embeddings: names of weights that are known as such.
        least: share of the prior, at least.
    """
    matrices = {name: with_rows(weights[name], known[name]) for name in known if name in weights}
    real = {name: weight for name, weight in weights.items() if not weight.is_complex()}
    assumed = prior(matrices, kinds=kinds_of({**real, **matrices}, embeddings))
    ratios = [mean_cost(known[name]) / mean_cost(item) for name, item in assumed.items()]
    typical = float(np.median([ratio for ratio in ratios if ratio > 0] or [1.0]))
    for name in names:
        yield name, _shrunk(known[name], assumed[name], typical, least) if name in assumed else known[name]


def with_row_floor(sensitivity: Sensitivity) -> Sensitivity:
    """Return the sensitivity with a lower limit on the Fisher of rows: rows that calibration never used may be used."""
    rows, output = sensitivity.row_fisher, sensitivity.output
    if rows is None:
        return sensitivity
    floor = FLOOR * rows.mean()
    if output is not None:
        output = output + torch.diag((floor - output.diagonal()).clamp_min(0))
    return replace(sensitivity, row_fisher=rows.clamp_min(floor), output=output)


def shrink_rows(squares: Tensor, draws: Tensor) -> Tensor:
    """Return sums of squares of a table's rows, each closer to the mean row the less often it was drawn.

    Rows that no batch used are not rows that nothing uses. A mean row keeps the level that all draws together tell.

    Args:
        squares: (rows, columns), of gradients.
        draws: (rows,), how often each row was looked up.
    """
    share = (ROW_GRADIENTS / (ROW_GRADIENTS + draws))[:, None]
    return (1 - share) * squares + share * squares.mean(0)


def _shrunk(known: Sensitivity, assumed: Sensitivity, typical: float, least: float) -> Sensitivity:
    """Return one sensitivity, shrunk; `typical` is the cost of an error, measured over assumed."""
    hessian, blocks = known.hessian, known.blocks
    if hessian is not None and (known.samples or least):
        hessian = shrink_covariance(hessian, known.samples or math.inf, assumed.taps, least)
    if blocks is not None and (known.samples or least):
        parts = [shrink_covariance(block, known.samples or math.inf, assumed.taps, least) for block in blocks.blocks]
        blocks = replace(blocks, blocks=torch.stack(parts))
    known = replace(known, hessian=hessian, blocks=blocks)
    power = mean_cost(replace(known, row_fisher=None))
    if known.row_fisher is None or assumed.row_fisher is None or not (known.gradients or least) or not power > 0:
        return known
    # A row costs its Fisher information times the power of the inputs, so the prior's rows are for the prior's inputs.
    factor = typical * mean_cost(replace(assumed, row_fisher=None)) / power
    share = max(ROW_GRADIENTS / (ROW_GRADIENTS + known.gradients) if known.gradients else 0.0, least)
    rows = (1 - share) * known.row_fisher + share * factor * assumed.row_fisher.to(known.row_fisher)
    if known.output is None:
        return replace(known, row_fisher=rows)
    deviation = known.row_fisher.clamp_min(_LEAST * float(known.row_fisher.mean())).sqrt()
    if not bool(deviation.all()):
        return replace(known, row_fisher=rows, output=torch.diag(rows))
    correlation = shrink_covariance(
        known.output / deviation[:, None] / deviation, known.gradients or math.inf, least=least
    )
    output = correlation * rows.sqrt()[:, None] * rows.sqrt()
    output.diagonal().copy_(rows)
    return replace(known, row_fisher=rows, output=output)


def shrink_covariance(
    measured: Tensor, samples: float, taps: TapCovariance | None = None, least: float = 0.0
) -> Tensor:
    """Return (1 − α) · measured + α · prior, (n, n).

    Args:
        measured: second moments.
        samples: number of independent samples that they are the mean of.
        taps: the prior, up to a factor; None is the identity. Powers of columns are measured, not assumed.
        least: α, at least.
    """
    size, mean = len(measured), float(measured.diagonal().double().mean())
    if size < 2 or not mean > 0 or (samples >= ENOUGH * size and not least):
        return measured
    whitened = measured.double() / mean
    target = torch.eye(size, dtype=torch.float64, device=measured.device)
    if taps is not None:
        dense = replace(taps, power=None).dense(size)
        target = torch.from_numpy(dense / dense.diagonal().mean())
        root = torch.linalg.cholesky(target)
        half = torch.linalg.solve_triangular(root, whitened, upper=False)
        whitened = torch.linalg.solve_triangular(root, half.T, upper=False)
    share = max(oracle_share(whitened, samples), least)
    return ((1 - share) * measured.double() + share * mean * target).to(measured.dtype)


def oracle_share(covariance: Tensor, samples: float) -> float:
    """Return α of the oracle approximating shrinkage of a covariance (n, n) towards a multiple of the identity."""
    size, trace = len(covariance), float(covariance.trace())
    squares = float((covariance * covariance).sum())
    excess = squares - trace**2 / size
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / size) * squares + trace**2) / ((samples + 1 - 2 / size) * excess))
