"""Triton kernels that quantize on trellises and code numbers in lanes. Importing this module needs Triton.

    weights ─► search: a path down each column ─► numbers ─► walk: states, histograms ─► rANS, a lane a thread ─► words

The searches are those of `birdie.compress.lanes`, with the same float32 arithmetic in the same order; the words are
those of `birdie.entropy.rans_lanes.encode`. With TRITON_INTERPRET=1 set before Triton is imported the kernels run on a
CPU, which is how they are tested.
"""

import triton
import triton.language as tl

COLUMNS = 32  # of a program of `search` or `walk`
COPIED = 1024  # words that a program of `join` copies at a time


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


@triton.jit(do_not_specialize=["low", "rows", "height", "size", "shift", "flip"])  # type: ignore[untyped-decorator]
def walk(  # type: ignore[no-untyped-def]
    numbers, low, symbols, counts, rows, columns, height, size, shift, flip, PAIRED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Fill `symbols` (rows, columns) with number - low, plus `size` in odd states, and count them in each row.

    `counts` (rows, size · parities) holds zeros.
    """
    first, last = tl.program_id(0) * height, tl.minimum(tl.program_id(0) * height + height, rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    state = tl.zeros([COLUMNS], tl.int32)
    width = size * 2 if PAIRED else size
    for row in range(first, last):
        offset = tl.cast(row, tl.int64) * columns + column
        number = tl.load(numbers + offset, mask=inside, other=0).to(tl.int32)
        symbol = number - low
        if PAIRED:
            symbol += (state & 1) * size
            state = (state >> 1) ^ ((state & 1) * shift) ^ ((number & 1) * flip)
        tl.store(symbols + offset, symbol.to(tl.uint16), mask=inside)
        tl.atomic_add(counts + tl.cast(row, tl.int64) * width + symbol, 1, mask=inside)


@triton.jit(do_not_specialize=["rows", "height", "width", "capacity"])  # type: ignore[untyped-decorator]
def encode(  # type: ignore[no-untyped-def]
    symbols,
    classes,
    entries,
    buffer,
    lengths,
    rows,
    columns,
    height,
    width,
    capacity,
    PRECISION: tl.constexpr,
    LANES: tl.constexpr,
):
    """Code one chunk, from its last symbol to its first, to the end of each lane's part of `buffer`.

    `entries` (classes, width) have the frequency of a symbol and, from bit 16 on, where its slots start.
    """
    chunk = tl.program_id(0)
    first, last = chunk * height, tl.minimum(chunk * height + height, rows)
    lane = tl.arange(0, LANES)
    ends = (chunk * LANES + lane + 1).to(tl.int64) * capacity
    length = tl.zeros([LANES], tl.int32)
    x = tl.zeros([LANES], tl.uint64)
    steps = (columns + LANES - 1) // LANES
    for back in range(last - first):
        row = last - 1 - back
        table = entries + tl.load(classes + row).to(tl.int64) * width
        symbols_of_row = symbols + tl.cast(row, tl.int64) * columns
        for step in range(steps):
            column = (steps - 1 - step) * LANES + lane
            inside = column < columns
            symbol = tl.load(symbols_of_row + column, mask=inside, other=0).to(tl.int32)
            entry = tl.load(table + symbol, mask=inside, other=1)
            frequency, start = (entry & 0xFFFF).to(tl.uint64), ((entry >> 16) & 0xFFFF).to(tl.uint64)
            full = inside & (x >= (frequency << (40 - PRECISION)))
            tl.store(buffer + ends - 1 - length, (x & 0xFFFF).to(tl.uint16), mask=full)
            length += full.to(tl.int32)
            rest = tl.where(full, x >> 16, x)
            # Below 2**40 the quotient of float64 is rounded down to that of integers.
            quotient = (rest.to(tl.float64) / frequency.to(tl.float64)).to(tl.uint64)
            coded = (quotient << PRECISION) + (rest - quotient * frequency) + start
            x = tl.where(inside, coded, x)
    for _ in tl.static_range(3):
        full = x > 0
        tl.store(buffer + ends - 1 - length, (x & 0xFFFF).to(tl.uint16), mask=full)
        length += full.to(tl.int32)
        x >>= 16
    tl.store(lengths + chunk * LANES + lane, length)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def join(buffer, lengths, bounds, words, capacity, COPIED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the words of a lane from the end of its part of `buffer` to where they belong in `words`."""
    lane = tl.program_id(0)
    length = tl.load(lengths + lane)
    source = buffer + (lane + 1).to(tl.int64) * capacity - length
    target = words + tl.load(bounds + lane)
    for begin in range(0, length, COPIED):
        index = begin + tl.arange(0, COPIED)
        tl.store(target + index, tl.load(source + index, mask=index < length), mask=index < length)
