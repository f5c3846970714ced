"""Sensitivity of a model without data: what the kind of each weight and its size tell.

    shapes of all weights ──► kind of each ──► assumed inputs, importance ──┐
                                                    every weight alike ─────┼──► their mean ──► Sensitivity
                                                    every layer alike ──────┘

What is assumed is a bet, and on some networks it loses. So the sensitivity is the mean of three assumptions, each in
units of what integers per row, the plain way, would cost under it: that of the kinds, that a relative error costs what
a layer has weights (`BY_WEIGHTS` of the mean), and that it costs the same in every layer (`BY_LAYERS`). The file that
is best for the mean costs at most 1 / `BY_WEIGHTS` times that of the plain way if the second one is true, and less in
practice, since trellis and coder need fewer bytes. On sixteen networks that others trained it has less error than the
plain way in 63 of 64 cases (`benchmarks.crowd`), where the kinds alone lost up to 3 times, with effort "fast" up to 27;
on ResNets, for which the kinds are right, it costs a tenth to two fifths more error.

Scale tells nothing: a unit times 1,000, with the next layer's column divided by it, is the same network. Energies of
rows and of columns that are more than `FAR_ROW` or `FAR_COLUMN` from the typical one are taken for such scales. Columns
further off are brought to that of the typical one. So are rows, by and by: at `FAR_ROW` they count as they are, and
from its square on they have the relative precision of the typical row.

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

The constants of kinds were chosen on a ResNet-20, a voice activity detector and a GPT of 0.5 million weights
(`benchmarks.without_data` has others), those of the mean on half of `benchmarks.crowd`.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.row_blocks import blocks
from birdie.compress.scheme import Sensitivity, TapCovariance

GATES = (3, 4)  # matrices that a GRU or an LSTM has one below the other
MOST_TABLES = 2  # embeddings of one height: that of the inputs and the head; layers are more
MOST_HEIGHTS = 3  # of embeddings: tokens, positions, classes; more are layers of a network that narrows or widens
LEAST_USERS, LEAST_SHARE = 3, 0.25  # other matrices of an embedding's width: at least so many, and this share of all
USUAL = 1 << 14  # elements of a layer
GATE = 1 << 12  # elements of a matrix that counts as `USUAL`
SHARED = 0.25  # square of the inputs' mean, in variances
MOST_TAPS = 1024  # of a kernel: more are taken as channels
BY_WEIGHTS, BY_LAYERS = 0.2, 0.1  # shares of two plain assumptions in the mean
FAR_ROW, FAR_COLUMN = 300.0, 64.0  # times the typical energy, or a part of it, beyond which it is a scale
_ROUNDS, _SETTLED = 4, 0.1  # of the search for scales of columns, and the change of a logarithm at which it ends
_LEAST_ROWS, _MOST_ROWS = 8, 128  # of a weight whose columns are compared, and those that are looked at
_ALIKE = 1e3  # least ratio of the largest to the median share of a row that a column has which is not just scaled
_QUANTILE = 0.75  # of the weights of a row that stands for its size
_FARTHEST = 2.0**140  # times the typical energy: scales of columns that are further off have no use
_DUST = 1e-60  # energy of a row that quantizes to zeros


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Assumptions for one kind of weight."""

    importance: float = 1.0  # of a relative error of a layer of `USUAL` weights
    # exponent by which the weights of a layer of more elements count less: at 0 a relative error of a layer costs as
    # much as it has weights, at 1 it costs the same in every layer
    size: float = 0.0
    gate: float = 0.0  # exponent by which the weights of a layer below `GATE` elements count more
    by_row: float = 0.0  # how far a row counts by its own energy (1) or by that of the typical row (0)
    tap_correlation: float = 0.0  # of inputs one tap apart
    shared: float = 0.0  # square of the inputs' mean, in variances


KINDS = {
    "image": LayerKind(size=1.0, by_row=0.25, tap_correlation=0.65, shared=SHARED),
    "sound": LayerKind(size=1.0, by_row=0.25, tap_correlation=0.4, shared=SHARED),
    "recurrent": LayerKind(importance=0.5, by_row=1.0),
    "embedding": LayerKind(importance=24.0),
    "matrix": LayerKind(gate=2.0),
    "vector": LayerKind(by_row=0.85),
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
    every = prior(weights, kinds=kinds_of({**weights, **(model or {})}, embeddings), counts=counts)
    ratios = [mean_cost(known[name]) / mean_cost(item) for name, item in every.items() if name in known]
    factor = float(np.median([ratio for ratio in ratios if ratio > 0] or [1.0]))
    return {name: scale_sensitivity(item, factor) for name, item in every.items() if name not in known}


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
    return fisher if sensitivity.taps is None else fisher * sensitivity.taps.mean


def prior(
    weights: Mapping[str, Tensor],
    *,
    kinds: Mapping[str, str] | None = None,
    counts: Mapping[str, int] | None = None,
) -> dict[str, Sensitivity]:
    """Return the assumed sensitivity of each weight, by name; of vectors, as if they were one row.

    Args:
        weights: name → weight.
        kinds: name → kind; None: `kinds_of` the weights.
        counts: name → how many matrices, one below the other, a weight is; others are one.
    """
    kinds, counts = kinds_of(weights) if kinds is None else kinds, counts or {}
    every = {name: _assumed(name, weight, KINDS[kinds[name]], counts.get(name, 1)) for name, weight in weights.items()}
    bets = sum(one.importance * float(one.costs.sum()) for one in every.values()) or 1.0
    layers = sum(counts.get(name, 1) for name in every)
    total = sum(weight.numel() for weight in weights.values())
    sensitivities = {}
    for name, one in every.items():
        plain = BY_WEIGHTS * weights[name].numel() / len(one.costs) / total + BY_LAYERS / layers
        bet = (1 - BY_WEIGHTS - BY_LAYERS) * one.importance / bets
        shares = total * (bet + plain / one.costs)
        fisher = [part * share for part, share in zip(np.array_split(one.rows, len(shares)), shares, strict=True)]
        sensitivities[name] = Sensitivity(row_fisher=torch.from_numpy(np.concatenate(fisher)), taps=one.taps)
    return sensitivities


@dataclass(frozen=True, slots=True)
class _Assumed:
    """Assumptions about one weight."""

    rows: NDArray[np.float64]  # (rows,), relative costs of an error in a row
    taps: TapCovariance | None  # covariance of the inputs
    importance: float  # by which `rows` is multiplied, if its kind is right
    # (matrices,), of integers per row, whose errors are in proportion to the largest weight of a row
    costs: NDArray[np.float64]


def _assumed(name: str, weight: Tensor, kind: LayerKind, count: int) -> _Assumed:
    """Return the assumptions about `count` matrices of one kind, one below the other."""
    taps = covariance(tuple(weight.shape), kind)
    power = _powers(name, weight, 1 if taps is None else len(taps.taps))
    energies, tops = [], []
    for rows in blocks(name, weight):
        equal = equalized(rows.astype(np.float64), None if power is None else power**-0.5)
        energies.append((equal * equal).sum(1) if taps is None else _energy(equal, taps))
        tops.append(np.maximum(equal.max(1), -equal.min(1)))
    energy, top = np.concatenate(energies), np.concatenate(tops)
    if power is not None:
        taps = TapCovariance(np.eye(1), 0.0, power) if taps is None else replace(taps, power=power)
    rows_of_each = [_row_costs(part, kind.by_row) for part in np.array_split(energy, count)]
    size = weight.numel() / count
    importance = kind.importance * (max(size, USUAL) / USUAL) ** (1 - kind.size)
    importance *= (GATE / min(max(size, 1), GATE)) ** kind.gate
    squares = np.array_split(np.where(energy > _DUST, top * top, 0.0), count)
    plain = np.array([float(part @ square) for part, square in zip(rows_of_each, squares, strict=True)])
    plain *= weight.numel() / len(energy) * (1.0 if taps is None else 1 + taps.shared)
    costs = np.where(plain > 0, plain, 1.0)
    return _Assumed(np.concatenate(rows_of_each), taps, importance * count / len(energy), costs)


def _row_costs(energy: NDArray[np.float64], by_row: float) -> NDArray[np.float64]:
    """Return the relative cost of an error in each row, by its energy in that of the typical row."""
    live = energy > _DUST
    typical = float(np.median(energy[live])) if live.any() else 1.0
    return np.asarray(1 / (typical * _compressed(np.where(live, energy / typical, 1.0), by_row, FAR_ROW)))


def _powers(name: str, weight: Tensor, taps: int) -> NDArray[np.float64] | None:
    """Return the assumed mean square of the input of each column, by the energy of its channel; None if all are 1.

    Rows are divided by a quantile of their weights, which a few columns far above the others do not move, and then
    columns by their scales, in turn. A column is one of another scale if its shares of all rows are alike: where a few
    rows alone use it, or the others hold the dust of dead channels, it is not.
    """
    if weight.ndim < 2 or len(weight) < _LEAST_ROWS:
        return None
    step = -(-len(weight) // _MOST_ROWS)
    rows = np.concatenate([part[::step] for part in blocks(name, weight)]).astype(np.float64)
    power: NDArray[np.float64] = np.ones(1)
    for _ in range(_ROUNDS):
        size = np.quantile(np.abs(rows * np.sqrt(power)), _QUANTILE, axis=1)
        used = size > _DUST**0.5
        if not used.any():
            return None
        shares = (rows[used] / size[used, None]) ** 2
        by_channel = shares.reshape(len(shares), -1, taps).mean(2)
        channels = np.median(by_channel, axis=0)
        live = by_channel.max(axis=0) < _ALIKE * channels
        if not live.any():
            return None
        relative = channels / np.median(channels[live])
        relative = np.where(live & (relative > 1 / _FARTHEST), relative, 1.0)
        previous, far = power, (relative > FAR_COLUMN) | (relative < 1 / FAR_COLUMN)
        if not far.any():
            return None
        power = np.repeat(np.where(far, 1 / relative, 1.0), taps)
        if previous.size > 1 and np.allclose(np.log(power), np.log(previous), atol=_SETTLED):
            break
    return power


def equalized(rows: NDArray[Any], scales: NDArray[np.float64] | None) -> NDArray[Any]:
    """Return rows (rows, columns) without columns of other scales, which may hold dust; rows of nothing else, divided.

    Args:
        scales: (columns,) scales of columns, 1 for those that are alike; None: all are.
    """
    if scales is None:
        return rows
    alike = np.where(scales == 1, rows, 0)
    return np.where(np.asarray(alike.any(axis=1))[:, None], alike, rows / scales)


def _compressed(relative: NDArray[np.float64], exponent: float, far: float) -> NDArray[np.float64]:
    """Return energies to an exponent; what is further than `far` from 1 is a scale, which counts the more in full."""
    distance = np.abs(np.log(relative))
    meant = np.minimum(distance, np.maximum(2 * math.log(far) - distance, 0.0))
    return np.asarray(relative * np.exp(np.sign(np.log(relative)) * meant * (exponent - 1)))


def _energy(rows: NDArray[np.float64], taps: TapCovariance) -> NDArray[np.float64]:
    """Return w H wᵀ of each row w, (rows, columns) → (rows,)."""
    by_channel = rows.reshape(len(rows), -1, len(taps.taps))
    squares = ((by_channel @ taps.taps) * by_channel).sum((1, 2))
    return np.asarray(squares + taps.shared * by_channel.sum((1, 2)) ** 2)


def covariance(shape: tuple[int, ...], kind: LayerKind) -> TapCovariance | None:
    """Return the assumed covariance of the inputs of a weight; None if they do not correlate."""
    kernel = shape[2:] if math.prod(shape[2:]) <= MOST_TAPS else ()
    shared = kind.shared if len(shape) > 1 and shape[1] > 1 else 0.0  # a first or depthwise layer: no ReLU is certain
    if not kind.tap_correlation or math.prod(kernel) == 1:
        return TapCovariance(np.eye(1), shared) if shared else None
    positions = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1).reshape(-1, len(kernel))
    distances: NDArray[np.float64] = np.sqrt(((positions[:, None] - positions) ** 2).sum(-1))
    return TapCovariance(kind.tap_correlation**distances, shared)
