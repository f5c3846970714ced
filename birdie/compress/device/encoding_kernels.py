"""Triton kernel that quantizes on trellises. Importing this module needs Triton.

    weights ─► search: a path down each column ─► numbers

The searches are those of `birdie.compress.trellis.lanes`, with the same float32 arithmetic in the same order. With
TRITON_INTERPRET=1 set before Triton is imported the kernel runs on a CPU, which is how it is tested.
"""

import triton
import triton.language as tl

COLUMNS = 32  # of a program of `search`


@triton.jit
def _round(x):  # type: ignore[no-untyped-def]
    """Return the nearest integer, ties to even, of |x| < 2**22: beyond 2**23 float32 has no fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _target(weight, scale, inverse_column, spread, column_power, gain):  # type: ignore[no-untyped-def]
    """Return the scaled weight, shrunk so that the nearest number is the best one, its bits included."""
    value = weight * scale * inverse_column
    power = spread * column_power + value * value
    return value * tl.div_rn(power, power + gain)


@triton.jit  # type: ignore[untyped-decorator]
def _error(value, choice: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the squared error of the nearest number of one parity in one state: `choice` is 2 · parity + odd."""
    half = value * 0.5 - 0.25 * choice
    error = half - _round(half)
    return error * error


@triton.jit(do_not_specialize=["rows", "height", "shift", "flip"])  # type: ignore[untyped-decorator]
def search(  # type: ignore[no-untyped-def]
    weights,
    inverse,
    inverse_column,
    power,
    column_power,
    survivors,
    numbers,
    rows,
    columns,
    height,
    gain,
    shift,
    flip,
    STATES: tl.constexpr,
    TOP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the cheapest paths down some columns of one chunk of rows, from state 0.

    `survivors` (rows, columns) uint32 is memory to work with: bit n says that the best way into state n is an odd
    number.
    """
    first, last = tl.program_id(0) * height, tl.minimum(tl.program_id(0) * height + height, rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    by_column = tl.load(inverse_column + column, mask=inside, other=0.0)
    spread_column = tl.load(column_power + column, mask=inside, other=1.0)
    state = tl.arange(0, STATES)
    odd = state >> TOP  # whether the state before was odd
    way = ((state ^ (odd * shift)) << 1) & (STATES - 1) | odd
    other_way = ((state ^ (odd * shift) ^ flip) << 1) & (STATES - 1) | odd
    even_index = way[:, None] + tl.zeros([STATES, COLUMNS], tl.int32)
    odd_index = other_way[:, None] + tl.zeros([STATES, COLUMNS], tl.int32)
    was_odd = odd[:, None] == 1
    cost = tl.where(state[:, None] == 0, 0.0, 1e30) + tl.zeros([STATES, COLUMNS], tl.float32)
    for row in range(first, last):
        scale, spread = tl.load(inverse + row), tl.load(power + row)
        offset = tl.cast(row, tl.int64) * columns + column
        weight = tl.load(weights + offset, mask=inside, other=0.0).to(tl.float32)
        value = _target(weight, scale, by_column, spread, spread_column, gain)
        price = tl.where(scale > 0, 0.0, 1e9)  # rows that are left out have even numbers: 0
        zero = tl.gather(cost, even_index, 0) + tl.where(was_odd, _error(value, 1)[None, :], _error(value, 0)[None, :])
        one = tl.gather(cost, odd_index, 0) + (
            tl.where(was_odd, _error(value, 3)[None, :], _error(value, 2)[None, :]) + price
        )
        better = one < zero
        cost = tl.where(better, one, zero)
        bits = tl.sum(better.to(tl.uint32) << state.to(tl.uint32)[:, None], 0)
        tl.store(survivors + offset, bits, mask=inside)
        if (row - first) % 64 == 63:  # costs stay small, so that float32 tells them apart
            cost -= tl.min(cost, 0)[None, :]
    end = tl.argmin(cost, 0).to(tl.int32)
    for back in range(last - first):
        row = last - 1 - back
        scale, spread = tl.load(inverse + row), tl.load(power + row)
        offset = tl.cast(row, tl.int64) * columns + column
        weight = tl.load(weights + offset, mask=inside, other=0.0).to(tl.float32)
        value = _target(weight, scale, by_column, spread, spread_column, gain)
        bits = tl.load(survivors + offset, mask=inside, other=0)
        previous_odd = end >> TOP
        parity = ((bits >> end.to(tl.uint32)) & 1).to(tl.int32)
        end = ((end ^ (previous_odd * shift) ^ (parity * flip)) << 1) & (STATES - 1) | previous_odd
        half = value * 0.5 - 0.25 * (previous_odd + 2 * parity).to(tl.float32)
        number = 2 * _round(half).to(tl.int32) + parity
        tl.store(numbers + offset, tl.where(scale > 0, number, 0).to(tl.int16), mask=inside)
