"""Triton kernel that decodes the coder "tiles" into weights, or into products. Importing this module needs Triton.

    words ─► rANS: a warp a tile, a lane a column ─► numbers ─► number · row · column ─► weights, or sums of products

The arithmetic is that of `birdie.entropy.rans_tiles._decode`, bit for bit: integers of 32 bits, and products of float32
that are rounded one by one. What a row waits for is the way from a lane's state to its next one: a look-up in a table,
which the L1 cache holds, then the lane's word. The words come from registers (`window`), which are refilled long before
they are needed, and a lane finds its own by a sum over the warp of one bit a lane, one instruction on a GPU
(redux.sync), and by counting bits, which LLVM makes one instruction (popc). A prefix sum would take five exchanges
between lanes, one after the other.

Nothing that a file says is believed: words are read within their array, slots and symbols lie within their tables by
arithmetic, and loops have as many steps as a tile has rows. A program notes whether its tile ended where it should, and
which rows are not all zeros. With TRITON_INTERPRET=1 set before Triton is imported the kernel runs on a CPU, which is
how it is tested.
"""

import triton
import triton.language as tl

FIELDS: tl.constexpr = tl.constexpr(16)  # of a matrix, in the order in which `decode` reads them


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    """Return how many bits of an unsigned integer of 32 bits are 1."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _half(pair, index):  # type: ignore[no-untyped-def]
    """Return the word of an index from the pair of words that holds it."""
    return (pair >> ((index & 1) * 16).to(tl.uint32)) & 0xFFFF


# Triton would compile a variant for each divisibility of these.
@triton.jit(do_not_specialize=["pairs", "tiles", "height_of_all"])  # type: ignore[untyped-decorator]
def decode(  # type: ignore[no-untyped-def]
    words,
    bounds,
    ends,
    matrices,
    tables,
    entries,
    values,
    by_row,
    by_column,
    sound,
    out,
    inputs,
    pairs,
    tiles,
    height_of_all,
    limit,
    TRELLIS: tl.constexpr,
    PAIRED: tl.constexpr,
    HALVES: tl.constexpr,
    RAW: tl.constexpr,
    LISTED: tl.constexpr,
    GROUPED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPARSE: tl.constexpr,
    CHECKED: tl.constexpr,
    dtype: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Decode one tile of one of several matrices.

    Args:
        words: pairs of them, `pairs` uint32.
        bounds: (tiles + 1,) where tiles begin.
        ends: (tiles,) start, from bit 8 on tail, from bit 16 on number of the matrix.
        matrices: (matrices, FIELDS).
        tables: (rows of all matrices + 1,) first entry of a row's table, -1 for a row that is left out.
        entries, values: of tables; 256 of each matrix.
        by_row, by_column: factors, those of rows with one more row.
        sound: (tiles + rows of all matrices,) 1 for a tile that ends as it should and for a row that is not zeros.
        out: weights, of bfloat16 as uint16; or with TOKENS sums, (tiles across, TOKENS, rows of all matrices) float32.
        inputs: (TOKENS, columns) float32.
        limit: largest magnitude of a weight.
        SPARSE: whether rows are left out.
        CHECKED: whether rows that are not zeros are noted.
        dtype: of weights.
        TOKENS: a power of two; 0 writes weights.
    """
    tile = tl.program_id(0)
    lane = tl.arange(0, 32)
    end, begin, last = tl.load(ends + tile), tl.load(bounds + tile), tl.load(bounds + tile + 1)
    matrix = end >> 16
    field = matrices + matrix * FIELDS
    index = tile - tl.load(field).to(tl.int32)
    row_of_all, rows = tl.load(field + 1).to(tl.int32), tl.load(field + 2).to(tl.int32)
    columns, height, chunk = (
        tl.load(field + 3).to(tl.int32),
        tl.load(field + 4).to(tl.int32),
        tl.load(field + 5).to(tl.int32),
    )
    shift, flip = tl.load(field + 6).to(tl.uint32), tl.load(field + 7).to(tl.uint32)
    low, groups, group_size = (
        tl.load(field + 8).to(tl.int32),
        tl.load(field + 9).to(tl.int32),
        tl.load(field + 10).to(tl.int32),
    )
    factors_of_matrix, column_of_all = tl.load(field + 11), tl.load(field + 12)
    origin, row_stride, column_stride = tl.load(field + 13), tl.load(field + 14), tl.load(field + 15)
    across = tl.cdiv(columns, 32)
    first_row, first_column = index // across * height, index % across * 32
    last_row = tl.minimum(first_row + height, rows)
    coded_until = last_row - ((end >> 8) & 0xFF)
    column = first_column + lane
    inside = column < columns
    group = column // group_size
    factor = tl.full([32], 1.0, tl.float32)
    if COLUMNS:
        factor = tl.load(by_column + column_of_all + column, mask=inside, other=0.0)
    if TOKENS > 0:
        token = tl.arange(0, TOKENS)
        tokens = tl.load(inputs + token[:, None] * columns + column[None, :], mask=inside[None, :], other=0.0)

    word_index = begin + 2 * lane
    pair = tl.load(words + (word_index >> 1), mask=inside & (word_index >> 1 < pairs), other=0)
    x = _half(pair, word_index) << 16
    word_index += 1
    pair = tl.load(words + (word_index >> 1), mask=inside & (word_index >> 1 < pairs), other=0)
    x = x | _half(pair, word_index)
    # Words that come next: a lane has a pair of the 64 from `base` on. Of these at most 31 are behind, 32 are taken.
    position = begin + 2 * tl.minimum(columns - first_column, 32)
    base = position & -2
    window = tl.load(words + (base >> 1) + lane, mask=(base >> 1) + lane < pairs, other=0)
    ahead = tl.load(words + (base >> 1) + 16 + lane, mask=(base >> 1) + 16 + lane < pairs, other=0)

    row_of_all += first_row
    left = tables + row_of_all
    factors_of_row = by_row + factors_of_matrix + tl.cast(first_row, tl.int64) * groups
    target = out + origin + tl.cast(first_row, tl.int64) * row_stride + column * column_stride
    seen = sound + tiles + row_of_all
    below = (tl.full([32], 1, tl.uint32) << lane.to(tl.uint32)) - 1
    table, scale = tl.load(left), tl.load(factors_of_row)
    for chunk_row in range(first_row, last_row, chunk):
        state = tl.zeros([32], tl.uint32)
        for row in range(chunk_row, tl.minimum(chunk_row + chunk, last_row)):
            left += 1
            next_table = tl.load(left)  # a row early, because nothing else waits for it
            next_scale = tl.load(factors_of_row + groups)
            coded = table >= 0
            slot = x & 0xFFF
            if PAIRED:
                slot = slot | ((state & 1) << 12)
            entry = tl.load(entries + (tl.maximum(table, 0).to(tl.uint32) + slot))
            after = ((entry >> 20) + 1) * (x >> 12) + (entry & 0xFFF)
            symbol = ((entry >> 12) & 0xFF).to(tl.int32)
            number = tl.load(values + matrix * 256 + symbol) if LISTED else low + (symbol << RAW)
            if RAW > 0:
                number += (after & ((1 << RAW) - 1)).to(tl.int32)
                after = after >> RAW
            need = inside & (after < tl.where(row < coded_until, 65536, 0))
            if SPARSE:
                need = need & coded
            taken = tl.sum(need.to(tl.uint32) << lane.to(tl.uint32), 0)
            window_index = position - base + _bits(taken & below).to(tl.int32)
            word = _half(tl.gather(window, window_index >> 1, 0), window_index)
            following = tl.where(need, (after << 16) | word, after)
            if SPARSE:
                following = tl.where(coded, following, x)
                number = tl.where(coded, number, 0)
                scale = tl.where(coded, scale, 0.0)
            x = following
            position += _bits(taken).to(tl.int32)
            if position - base >= 32:
                window = tl.where(lane < 16, tl.gather(window, (lane + 16) & 31, 0), ahead)
                base += 32
                ahead = tl.load(words + (base >> 1) + 16 + lane, mask=(base >> 1) + 16 + lane < pairs, other=0)

            if CHECKED:
                some = number
                if SPARSE:
                    some = tl.where(coded, number, 1)
                tl.store(seen + tl.zeros([32], tl.int32), tl.full([32], 1, tl.uint8), mask=inside & (some != 0))
                seen += 1
            count = number
            if HALVES:
                count = 2 * number + (state & 1).to(tl.int32)
            if GROUPED:
                weight = count.to(tl.float32) * tl.load(factors_of_row + group, mask=inside, other=0.0)
            else:
                weight = count.to(tl.float32) * scale * factor
            weight = tl.minimum(tl.maximum(weight, -limit), limit)
            if TRELLIS:
                state = (state >> 1) ^ ((state & 1) * shift) ^ ((number & 1).to(tl.uint32) * flip)
            if dtype == tl.bfloat16:  # to the nearest, ties to even
                bits = weight.to(tl.uint32, bitcast=True)
                bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
                weight = (bits << 16).to(tl.float32, bitcast=True)
            else:
                weight = weight.to(dtype)
            if TOKENS > 0:
                products = tl.sum(weight.to(tl.float32)[None, :] * tokens, 1)
                sums = out + (tl.cast(index % across, tl.int64) * TOKENS + token) * height_of_all + row_of_all
                tl.store(sums, products)
                row_of_all += 1
            elif dtype == tl.bfloat16:
                tl.store(target, bits.to(tl.uint16), mask=inside)
            else:
                tl.store(target, weight, mask=inside)
            target += row_stride
            factors_of_row += groups
            table, scale = next_table, next_scale
    right = (x == (tl.full([32], 1, tl.uint32) << (end & 0xFF).to(tl.uint32))) | (lane >= columns - first_column)
    tl.store(sound + tile, (tl.min(right.to(tl.int32), 0) * (position == last)).to(tl.uint8))
