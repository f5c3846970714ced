"""Constants in a state dict, known by their content: a rule made them, so the numbers follow one another.

Each number of an arithmetic or geometric progression, of a sine, of a window, or of their products is a linear function
of the few numbers before it (linear prediction). Trained weights are not: their neighbors tell little of them, and not
all even where they are smooth. Positions, frequencies, rotary and sinusoidal tables, Fourier and cosine bases, STFT
bases, schedules and coordinate grids are known thus, whatever their names and shapes. So are windows by their symmetry,
filter banks by their bands and the vectors of a spectral norm by their length of one.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.tensors import REAL_DTYPES, planes

Lines = NDArray[np.float64]

# Numbers that predict the next one: a sine or a progression needs two, and a grid of them, flattened, allows no more;
# the product of a window of three terms and a sine needs six.
_ORDERS = 2, 6
_PER_ORDER = 5  # numbers of a line for each of these
_LINES = 4, 32  # lines of a tensor that are looked at: few tell most weights
_POINTS = 64, 512  # of each
_LEAST = 12  # numbers of a line below which it may be predictable by chance
_MAD = 1.48  # standard deviations in a median of absolute deviations
_UNKNOWN = 3e-3  # what prediction leaves over, in standard deviations of the line; of learned curves it is 0.05
_PERHAPS = 0.4  # the same after one round
_ROUNDS = 4  # of least squares by absolute values, so that a step or a knot does not count
_PREDICTABLE = 0.45  # of the lines: in a grid that is flattened, one coordinate jumps too often


def is_constant(weight: Tensor) -> bool:
    """Return whether the numbers of a tensor follow from one another, as those of tables do and weights do not.

    Args:
        weight: floats of any shape; complex numbers count as two.
    """
    weight = planes(weight.detach())
    if weight.dtype not in REAL_DTYPES or weight.numel() < 3:
        return False
    if sum(size > 1 for size in weight.shape) < 2:
        line = weight.flatten()
        return _is_progression(line) or _is_direction(line) or _is_symmetric(line[None]) or _predictable(line, 0)
    axes = [axis for axis, size in enumerate(weight.shape) if size >= _LEAST]
    return any(_predictable(weight, axis) for axis in axes) or _is_stack_of_windows(weight) or _is_bank(weight)


def _predictable(weight: Tensor, axis: int) -> bool:
    """Return whether the lines of a tensor along an axis are linear predictions of themselves."""
    across = weight.movedim(axis, -1)
    count = across.numel() // max(across.shape[-1], 1)
    if across.shape[-1] < _LEAST:
        return False
    for lines, points in zip(_LINES, _POINTS, strict=True):
        chosen = np.linspace(0, count - 1, min(lines, count)).astype(np.int64)
        index = tuple(map(torch.from_numpy, np.unravel_index(chosen, across.shape[:-1]))) if across.ndim > 1 else ()
        some = across[..., :points][index] if index else across[None, :points]
        if not _follow(some.double().numpy(), torch.finfo(weight.dtype).eps):
            return False
    return True


def _follow(lines: Lines, precision: float) -> bool:
    """Return whether most lines, (lines, points), that vary at all are predictable.

    Args:
        precision: relative, of the dtype in which they were computed or stored.
    """
    used = lines[(lines != 0).any(axis=1)]
    if not len(used) or not np.isfinite(used).all():
        return False
    used = used / np.abs(used).max(axis=1, keepdims=True)  # squares of float64 may overflow
    typical = _quantile(np.abs(used), 0.5, used != 0)
    middle = _quantile(used, 0.5)
    spread = _MAD * _quantile(np.abs(used - middle[:, None]), 0.5)  # a few numbers may be far larger
    varied = spread > min(256 * precision, 0.1) * typical  # a line of rounding errors tells nothing
    used, limit = used[varied], _UNKNOWN * spread[varied] + 8 * precision * typical[varied]
    for order in _ORDERS if len(used) else ():
        if used.shape[1] >= _PER_ORDER * order:
            left = _left(used, order, rounds=1)
            if (left <= _PERHAPS * spread[varied]).mean() >= _PREDICTABLE:
                left = _left(used, order, rounds=_ROUNDS)
                if (left <= limit).mean() >= _PREDICTABLE:
                    return True
    return False


def _left(lines: Lines, order: int, rounds: int) -> Lines:
    """Return what the best linear prediction leaves of each line: a quantile over its numbers but for zeros."""
    windows = np.lib.stride_tricks.sliding_window_view(lines, order + 1, axis=1)
    past, coming = windows[..., :-1], windows[..., -1]
    least = 1e-6 * np.abs(lines).mean(axis=1, keepdims=True) + 1e-300
    rest, weights = coming, np.ones_like(coming)
    for _ in range(rounds):
        weighted = (past * weights[..., None]).swapaxes(1, 2)
        gram = weighted @ past
        ridge = 1e-12 * np.trace(gram, axis1=1, axis2=2)[:, None, None] + 1e-300
        solved = np.linalg.solve(gram + ridge * np.eye(order), weighted @ coming[..., None])
        rest = np.abs(coming - (past @ solved)[..., 0])
        weights = 1 / (rest + least)
    return _quantile(rest, 0.6, coming != 0)  # zeros of a pruned matrix tell nothing


def _quantile(lines: Lines, share: float, counted: "NDArray[np.bool_] | None" = None) -> Lines:
    """Return a quantile of each line, of the numbers that count; infinite if none does."""
    if counted is None or counted.all():
        index = int(share * (lines.shape[1] - 1))
        return np.partition(lines, index, axis=1)[:, index]
    rows = [line[mask] for line, mask in zip(lines, counted, strict=True)]
    return np.array([np.partition(row, at := int(share * (len(row) - 1)))[at] if len(row) else np.inf for row in rows])


def _is_progression(line: Tensor) -> bool:
    """Return whether a vector of four numbers and more is an arithmetic or a geometric progression."""
    values = line.double()
    rounding = 4 * torch.finfo(line.dtype).eps

    def is_even(steps: Tensor, size: float) -> bool:
        return bool(steps.abs().min() > 0 and (steps - steps.mean()).abs().max() <= 2 * rounding * size)

    if len(values) < 4 or not bool(values.isfinite().all()):
        return False
    if is_even(values.diff(), float(values.abs().max())):
        return True
    return bool((values > 0).all() or (values < 0).all()) and is_even(values.abs().log().diff(), 1.0)


def _is_symmetric(lines: Tensor) -> bool:
    """Return whether all lines, (lines, points), are symmetric, maybe but for the first number, and not constant."""
    for line in (lines, lines[:, 1:]):
        values = line.double()
        mirrored = (values - values.flip(1)).abs().amax(dim=1)
        top = values.abs().amax(dim=1)
        varied = values.amax(dim=1) - values.amin(dim=1) > 1e-3 * top
        if values.shape[1] >= 5 and bool(varied.all() and (mirrored <= 1e-5 * top).all()):
            return True
    return False


def _is_stack_of_windows(weight: Tensor) -> bool:
    """Return whether every line along the last axis is symmetric."""
    if weight.shape[-1] < 5:
        return False
    rows = weight.reshape(-1, weight.shape[-1])
    return _is_symmetric(rows[: _LINES[0]]) and _is_symmetric(rows[:: max(1, len(rows) // _LINES[1])])


def _is_direction(line: Tensor) -> bool:
    """Return whether a vector of eight numbers and more has the length one, as those of a spectral norm."""
    norm = float(line.double().norm())
    return len(line) >= 8 and abs(norm - 1) <= 2 * torch.finfo(line.dtype).eps


def _is_bank(weight: Tensor) -> bool:
    """Return whether rows or columns are bands of one sign that move on, as the filters of a mel scale do."""
    matrix = weight.squeeze()
    return matrix.ndim == 2 and (_has_bands(matrix) or _has_bands(matrix.T))


def _has_bands(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    if rows < 8 or columns < 16:
        return False
    some = matrix[:64].double()
    if not bool((some >= 0).all() or (some <= 0).all()):
        return False
    used = (matrix != 0).to(torch.uint8) if matrix.numel() <= 1 << 24 else (some != 0).to(torch.uint8)
    first, count = used.argmax(dim=1), used.sum(dim=1, dtype=torch.int64)
    last = columns - 1 - used.flip(1).argmax(dim=1)
    filled = count > 0
    first, last, count = first[filled], last[filled], count[filled]
    if len(first) < 8 or 4 * int(count.sum()) > 3 * used.numel() or not bool((last - first + 1 == count).all()):
        return False
    moves = first.diff(), last.diff()
    rises, falls = (all(bool((sign * move >= 0).all()) for move in moves) for sign in (1, -1))
    different = int((torch.stack(moves) != 0).any(dim=0).sum())
    return (rises or falls) and 2 * different >= len(first)
