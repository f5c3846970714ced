"""Choice of the search for paths through the trellis: with error feedback, on many paths side by side, or on a GPU."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.trellis import lanes, viterbi
from birdie.compress.trellis.feedback import Feedback
from birdie.compress.trellis.lanes import Matrix, WeightDensity
from birdie.entropy.trellis_states import chunk_rows

_SHORT = 64  # rows: the first weights of shorter paths cost too much


def search(
    weight: Tensor,
    matrix: Matrix,
    most: NDArray[np.float64],
    factors: Feedback,
    row: Matrix,
    column: Matrix,
    states: int,
    price: float,
    *,
    along: bool,
    zeros: NDArray[np.bool_] | None = None,
    row_prices: Matrix | None = None,
) -> tuple[int, NDArray[np.integer]]:
    """Return the states, negative for one path along all rows, and the numbers (rows, columns).

    One path starts only once, which saves bits; but where columns are nearly zero, separate paths down the columns can
    stay at zero.

    Args:
        weight: the tensor; where it lies on a GPU, paths down the columns are searched there.
        matrix: (rows, columns), its numbers.
        most: (rows,), largest magnitude of each row.
        factors: of error feedback.
        row, column: scales; that of a row is 0 where it is left out.
        price: of a bit, in squared scales.
        along: whether one path may run along the rows.
        zeros: (rows, columns), for one state: weights that take the number 0.
        row_prices: (rows,), with feedback: factors of the price.
    """
    if factors.feeds or states == 1:
        states = -states if factors.along and states != 1 else states
        fed = matrix, factors, row, column, states, price
        return states, viterbi.quantize(*fed, zeros=zeros, row_prices=row_prices)
    density = WeightDensity.of(matrix)
    if lanes.suits(density, most, row, column, states):
        short = min(len(matrix), chunk_rows(matrix.shape[1])) < _SHORT
        if (along or short) and density.even and bool(row.all()):
            return -states, lanes.quantize(matrix, density, row, column, -states, price)
        if _is_on_gpu(weight):
            from birdie.compress.device import device_encoding as device

            if states <= device.MOST_STATES and device.searches(weight):
                on_device = lanes.FeedbackFactors.of(density, row, column, states, price)
                return states, device.quantize(weight.detach().reshape(matrix.shape), on_device).cpu().numpy()
        return states, lanes.quantize(matrix, density, row, column, states, price)
    options = {signed: viterbi.quantize(matrix, factors, row, column, signed, price) for signed in (states, -states)}
    cheapest = min(options, key=lambda signed: viterbi.cost(matrix, options[signed], row, column, signed, price))
    return cheapest, options[cheapest]


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.device.type == "cuda"
