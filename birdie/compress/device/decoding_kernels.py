"""Triton kernels that decode the coder "lanes" and dequantize in one pass. Importing this module needs Triton.

    words ─► rANS: a lane per thread ─► numbers ─► states of the trellis ─► number · row · column ─► weights

A program decodes a chunk: all its lanes take the same step at the same time, and the lanes are neighboring columns, so
that they write neighboring weights. The integer arithmetic is that of `birdie.entropy.rans_lanes`, and products of
float32 are rounded one by one in the order of docs/format.md, so weights equal those of the CPU bit for bit.

Nothing that a file says is believed: the words of a lane are read within its bounds, which were checked with the side
information, slots and symbols lie within their tables by arithmetic, and loops have as many steps as the tensor has
weights. A program notes whether its lanes ended where they should. With TRITON_INTERPRET=1 set before Triton is
imported the kernels run on a CPU, which is how they are tested.
"""

import triton
import triton.language as tl

SLOTS = 4096  # of a table that a program of `expand` fills


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def expand(entries, symbols, size, PRECISION: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill `symbols` (tables, 2**PRECISION) with the symbol of each slot: the first whose slots end after it."""
    table = tl.program_id(0)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    symbol = tl.zeros([SLOTS], tl.int32)
    for index in range(size):
        entry = tl.load(entries + table * size + index)
        symbol += tl.where(slot >= (entry & 0xFFFF) + ((entry >> 16) & 0xFFFF), 1, 0)
    inside = slot < (1 << PRECISION)
    tl.store(symbols + (table << PRECISION) + slot, symbol.to(symbols.dtype.element_ty), mask=inside)


# Triton would compile a variant for each divisibility of these.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "height", "size", "groups", "group_size", "shift", "flip", "row_stride"]
)
def decode(  # type: ignore[no-untyped-def]
    words,
    bounds,
    classes,
    symbols,
    entries,
    row_scales,
    column_scales,
    states,
    out,
    damaged,
    rows,
    columns,
    height,
    size,
    groups,
    group_size,
    limit,
    shift,
    flip,
    row_stride,
    column_stride,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
    TRELLIS: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    COLUMN_SCALES: tl.constexpr,
    BFLOAT16: tl.constexpr,
    LANES: tl.constexpr,
):
    """Decode and dequantize one chunk of `height` rows to `out`, of bfloat16 as uint16.

    `bounds` (chunks · LANES + 1,) are the positions in `words` where lanes begin, `states` (chunks, columns) is memory
    to work with. The entry of a symbol is its frequency, from bit 16 on where its slots start, from bit 32 on its
    value.
    """
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    begin = tl.load(bounds + chunk * LANES + lane)
    length = tl.load(bounds + chunk * LANES + lane + 1) - begin
    position = tl.zeros([LANES], tl.int32)
    x = tl.zeros([LANES], tl.uint64)
    wrong = tl.zeros([LANES], tl.int32)
    for step in tl.static_range(3):
        need = (x < (1 << 24)) & (position < length)
        word = tl.load(words + begin + position, mask=need, other=0).to(tl.uint64)
        x = tl.where(need, (x << 16) | word, x)
        position += need.to(tl.int32)
        if step == 0:
            wrong = (need & (word == 0)).to(tl.int32)
    # The next word of each lane is loaded as soon as the one before is taken, to be there when it is needed.
    word = tl.load(words + begin + position, mask=position < length, other=0).to(tl.uint64)
    state_of = states + chunk.to(tl.int64) * columns
    for row in range(chunk * height, tl.minimum(chunk * height + height, rows)):
        table_of_row = tl.load(classes + row).to(tl.int32)
        out_of_row = out + tl.cast(row, tl.int64) * row_stride
        scales_of_row = row_scales + tl.cast(row, tl.int64) * groups
        scale_of_row = tl.load(scales_of_row)
        seen = tl.zeros([LANES], tl.int32)
        state = tl.zeros([LANES], tl.int32)
        upcoming = tl.zeros([LANES], tl.int32)
        if TRELLIS:  # the same for the states of the next columns
            upcoming = tl.load(state_of + lane, mask=lane < columns, other=0).to(tl.int32)
        for first in range(0, columns, LANES):
            column = first + lane
            inside = column < columns
            table = table_of_row + tl.zeros([LANES], tl.int32)
            if TRELLIS:
                state = tl.where(row > chunk * height, upcoming, 0)  # what was in memory before the first row is noise
                upcoming = tl.load(state_of + column + LANES, mask=column + LANES < columns, other=0).to(tl.int32)
            if PAIRED:
                table = 2 * table + (state & 1)
            slot = (x & ((1 << PRECISION) - 1)).to(tl.int32)
            symbol = tl.load(symbols + (table << PRECISION) + slot).to(tl.int32)
            entry = tl.load(entries + table * size + symbol)
            frequency, start = (entry & 0xFFFF).to(tl.uint32), ((entry >> 16) & 0xFFFF).to(tl.int32)
            number = (entry >> 32).to(tl.int32)
            # Both factors have 32 bits, which a GPU multiplies to 64 in one instruction.
            advanced = frequency.to(tl.uint64) * (x >> PRECISION).to(tl.uint32).to(tl.uint64)
            advanced += (slot - start).to(tl.uint64)
            need = inside & (advanced < (1 << 24)) & (position < length)
            x = tl.where(inside, tl.where(need, (advanced << 16) | word, advanced), x)
            position += need.to(tl.int32)
            next_word = tl.load(words + begin + position, mask=need & (position < length), other=0).to(tl.uint64)
            word = tl.where(need, next_word, word)
            seen |= (inside & (number != 0)).to(tl.int32)
            if TRELLIS:
                following = (state >> 1) ^ ((state & 1) * shift) ^ ((number & 1) * flip)
                tl.store(state_of + column, following.to(tl.uint8), mask=inside)
                number = 2 * number + (state & 1)
            if GROUPED:
                weight = number.to(tl.float32) * tl.load(scales_of_row + column // group_size, mask=inside, other=0.0)
            else:
                weight = number.to(tl.float32) * scale_of_row
            if COLUMN_SCALES:
                weight *= tl.load(column_scales + column, mask=inside, other=0.0)
            weight = tl.minimum(tl.maximum(weight, -limit), limit)
            target = out_of_row + column.to(tl.int64) * column_stride
            if BFLOAT16:
                bits = weight.to(tl.uint32, bitcast=True)
                bits += 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
                tl.store(target, (bits >> 16).to(tl.uint16), mask=inside)
            else:
                tl.store(target, weight.to(out.dtype.element_ty), mask=inside)
        if ZERO_ROWS and tl.max(seen, 0) == 0:
            for first in range(0, columns, LANES):
                column = first + lane
                target = out_of_row + column.to(tl.int64) * column_stride
                tl.store(target, tl.zeros([LANES], out.dtype.element_ty), mask=column < columns)
        if TRELLIS:
            tl.debug_barrier()  # states are read where another thread may have written them
    wrong |= ((x != 0) | (position != length)).to(tl.int32)
    tl.store(damaged + chunk, tl.max(wrong, 0))
