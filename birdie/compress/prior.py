"""Sensitivity of a model without data: what the kind of each weight and its size tell.

    shapes of all weights ──► kind of each ──► assumed inputs, importance of rows ──► Sensitivity

A relative error of one layer costs about as much in every layer of a network (on a ResNet-20, a relative squared error
of 0.002 in one layer alone costs 0.0001 to 0.005 nats of KL, most often 0.001, whatever its size), so a row weighs one
over its energy, the part of its output that the weights cause. What differs between kinds of weights is assumed as
follows.

- Convolutions: neighboring taps see nearly the same input, and inputs behind a ReLU have a mean in common, so the sum
  of a row's errors costs far more than their squares. Error feedback makes that sum small. A normalization or the next
  layer may raise a row that is smaller than others, or drop it: so rows count by their energy only in part (`by_row`).
  Where some rows are far larger than others, as without normalization, the typical row is the median, not the mean.
- Long vectors, of layers one after the other: each row counts by its own size, nearly. At 0.85, layers 50 times apart
  differ by 1.9 in relative error; at 1 a hash grid, whose small rows hardly matter, errs more than with integers.
- Recurrent weights: each gate is behind a sigmoid of its own, so a row counts by its own size.
- Matrices: a relative error costs as much as a layer has weights, but not less than for `USUAL` weights. Matrices below
  `GATE` weights are gates, mixtures of streams and the last layers of classifiers, on which everything depends, and a
  few more bits for them cost nothing (a GPT of 3.8 million weights, calibrated: 36 % less KL at equal bytes).
- Embeddings: an error in the head reaches every prediction, and most embeddings are the head as well.

Kinds are recognized by shapes and by the embeddings of a module, so other names change nothing. Convolutions have more
than two dimensions. An embedding has as many columns as the residual stream is wide, and a number of rows that nothing
else has. Recurrent weights have three or four times as many rows as the state has elements, in pairs, and no matrix
takes so many inputs.

The constants were chosen on a ResNet-20, a voice activity detector and a GPT of 0.5 million weights; the benchmark
(`benchmarks.without_data`) has others.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.row_blocks import blocks, sums_of_rows
from birdie.compress.scheme import Sensitivity, TapCovariance

GATES = (3, 4)  # matrices that a GRU or an LSTM has one below the other
MOST_TABLES = 2  # embeddings of one height: that of the inputs and the head; layers are more
MOST_HEIGHTS = 3  # of embeddings: tokens, positions, classes; more are layers of a network that narrows or widens
LEAST_USERS, LEAST_SHARE = 3, 0.25  # other matrices of an embedding's width: at least so many, and this share of all
USUAL = 1 << 14  # elements of a layer
GATE = 1 << 12  # elements of a matrix that counts as `USUAL`
SHARED = 0.25  # square of the inputs' mean, in variances
MOST_TAPS = 1024  # of a kernel: more are taken as channels


@dataclass(frozen=True, slots=True)
class Kind:
    """Assumptions for one kind of weight.

    Attributes:
        importance: of a relative error of a layer of `USUAL` weights.
        size: exponent by which the weights of a layer of more elements count less: at 0 a relative error of a layer
            costs as much as it has weights, at 1 it costs the same in every layer.
        gate: exponent by which the weights of a layer below `GATE` elements count more.
        by_row: how far a row counts by its own energy (1) or by that of the typical row (0).
        floor: least energy of a row, in that of the typical row.
        tap_correlation: of inputs one tap apart.
        shared: square of the inputs' mean, in variances.
    """

    importance: float = 1.0
    size: float = 0.0
    gate: float = 0.0
    by_row: float = 0.0
    floor: float = 1e-3
    tap_correlation: float = 0.0
    shared: float = 0.0


KINDS = {
    "image": Kind(size=1.0, by_row=0.25, tap_correlation=0.65, shared=SHARED),
    "sound": Kind(size=1.0, by_row=0.25, tap_correlation=0.4, shared=SHARED),
    "recurrent": Kind(importance=0.5, by_row=1.0),
    "embedding": Kind(importance=24.0),
    "matrix": Kind(gate=2.0),
    "vector": Kind(by_row=0.85, floor=0.0),
}


def kinds_of(weights: Mapping[str, Tensor], embeddings: Collection[str] = ()) -> dict[str, str]:
    """Return the kind of each weight of a model, a key of `KINDS`, by its shape and the shapes of the others.

    Args:
        weights: name → weight.
        embeddings: names of those that are known as such.
    """
    shapes = Counter((len(weight), weight.shape[1]) for weight in weights.values() if weight.ndim == 2)
    recurrent = {rows for rows, columns in shapes if _is_recurrent(rows, columns, shapes)}
    tables = {shape for shape in shapes if _is_embedding(*shape, shapes)}
    if len({rows for rows, _ in tables}) > MOST_HEIGHTS:
        tables = set()

    def kind(name: str, weight: Tensor) -> str:
        if weight.ndim != 2:
            return "vector" if weight.ndim < 2 else "sound" if weight.ndim == 3 else "image"
        rows, columns = weight.shape
        if rows in recurrent:
            return "recurrent"
        return "embedding" if name in embeddings or (rows, columns) in tables else "matrix"

    return {name: kind(name, weight) for name, weight in weights.items()}


def _is_recurrent(rows: int, columns: int, shapes: Counter[tuple[int, int]]) -> bool:
    """Return whether a matrix takes the state of a GRU or LSTM; a layer of attention has a matrix back to its width."""
    back = sum(count for (outputs, _), count in shapes.items() if outputs == columns)
    if rows not in {gates * columns for gates in GATES} or back >= shapes[rows, columns]:
        return False
    pairs = sum(count for (outputs, _), count in shapes.items() if outputs == rows)
    return pairs > 1 and all(inputs != rows for _, inputs in shapes)


def _is_embedding(rows: int, columns: int, shapes: Counter[tuple[int, int]]) -> bool:
    """Return whether a matrix has the width of the residual stream and a number of rows that nothing else has."""
    if rows * columns < GATE or any(inputs == rows for _, inputs in shapes):
        return False
    tables = sum(count for (outputs, _), count in shapes.items() if outputs == rows)
    users = sum(count for shape, count in shapes.items() if columns in shape and shape[0] != rows)
    return tables <= MOST_TABLES and users >= max(LEAST_USERS, LEAST_SHARE * (shapes.total() - tables))


def prior_in_units_of(
    known: Mapping[str, Sensitivity],
    weights: Mapping[str, Tensor],
    counts: Mapping[str, int] | None = None,
    model: Mapping[str, Tensor] | None = None,
    embeddings: Collection[str] = (),
) -> dict[str, Sensitivity]:
    """Return the assumed sensitivity of each of `weights` that is not known, in the units of the known ones.

    Args:
        known: name → sensitivity by calibration.
        weights: name → weight.
        counts: name → how many matrices, one below the other, a weight is; a relative error of each costs the same.
        model: all tensors of the model, by which kinds are recognized; None: `weights`.
        embeddings: names of weights that are known as such.
    """
    every = prior(weights, kinds=kinds_of({**weights, **(model or {})}, embeddings))
    every |= {name: _stacked(name, weights[name], count) for name, count in (counts or {}).items()}
    ratios = [mean_cost(known[name]) / mean_cost(item) for name, item in every.items() if name in known]
    factor = float(np.median([ratio for ratio in ratios if ratio > 0] or [1.0]))
    return {name: scale_sensitivity(item, factor) for name, item in every.items() if name not in known}


def _stacked(name: str, weight: Tensor, count: int) -> Sensitivity:
    """Return the assumed sensitivity of a matrix of `count` matrices one below the other."""
    parts = [prior({name: part})[name] for part in weight.chunk(count)]
    rows = [part.row_fisher for part in parts if part.row_fisher is not None]
    return replace(parts[0], row_fisher=torch.cat(rows))


def scale_sensitivity(sensitivity: Sensitivity, factor: float) -> Sensitivity:
    """Return the sensitivity of a loss `factor` times as large; rows must have weights."""
    assert sensitivity.row_fisher is not None
    output = None if sensitivity.output is None else sensitivity.output * factor
    return replace(sensitivity, row_fisher=sensitivity.row_fisher * factor, output=output)


def mean_cost(sensitivity: Sensitivity) -> float:
    """Return the mean cost of a squared error of one weight."""
    fisher = 1.0 if sensitivity.row_fisher is None else float(sensitivity.row_fisher.double().mean())
    power = sensitivity.input_power()
    if power is not None:
        return fisher * float(power.double().mean())
    return fisher if sensitivity.taps is None else fisher * (1 + sensitivity.taps.shared)


def prior(weights: Mapping[str, Tensor], *, kinds: Mapping[str, str] | None = None) -> dict[str, Sensitivity]:
    """Return the assumed sensitivity of each weight, by name; of vectors, as if they were one row.

    Args:
        weights: name → weight.
        kinds: name → kind; None: `kinds_of` the weights.
    """
    kinds = kinds_of(weights) if kinds is None else kinds
    return {name: _sensitivity(name, weight, KINDS[kinds[name]]) for name, weight in weights.items()}


def _sensitivity(name: str, weight: Tensor, kind: Kind) -> Sensitivity:
    taps = covariance(tuple(weight.shape), kind)
    if taps is None:
        energy = sums_of_rows(name, weight)[1]
    else:
        energy = np.concatenate([_energy(rows, taps) for rows in blocks(name, weight)])
    used = energy[energy > 0]
    typical = float(np.median(used)) if used.size else 1.0
    energy = np.maximum(np.where(energy > 0, energy, typical), kind.floor * typical)
    importance = kind.importance * (max(weight.numel(), USUAL) / USUAL) ** (1 - kind.size)
    importance *= (GATE / min(max(weight.numel(), 1), GATE)) ** kind.gate
    fisher = importance / len(energy) / (energy**kind.by_row * typical ** (1 - kind.by_row))
    return Sensitivity(row_fisher=torch.from_numpy(fisher), taps=taps)


def _energy(rows: NDArray[np.float32], taps: TapCovariance) -> NDArray[np.float64]:
    """Return w H wᵀ of each row w, (rows, columns) → (rows,)."""
    by_channel = rows.astype(np.float64).reshape(len(rows), -1, len(taps.taps))
    squares = ((by_channel @ taps.taps) * by_channel).sum((1, 2))
    return np.asarray(squares + taps.shared * by_channel.sum((1, 2)) ** 2)


def covariance(shape: tuple[int, ...], kind: Kind) -> TapCovariance | None:
    """Return the assumed covariance of the inputs of a weight; None if they do not correlate."""
    kernel = shape[2:] if math.prod(shape[2:]) <= MOST_TAPS else ()
    shared = kind.shared if len(shape) > 1 and shape[1] > 1 else 0.0  # a first or depthwise layer: no ReLU is certain
    if not kind.tap_correlation or math.prod(kernel) == 1:
        return TapCovariance(np.eye(1), shared) if shared else None
    positions = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1).reshape(-1, len(kernel))
    distances: NDArray[np.float64] = np.sqrt(((positions[:, None] - positions) ** 2).sum(-1))
    return TapCovariance(kind.tap_correlation**distances, shared)
