"""A second decoder of coded streams, in plain Python integers: written from `docs/format.md`, the oracle of the first.

It shares no code with birdie and favours plainness over speed. Damage is not its business: it is given sound streams.
"""

from math import isqrt


class Bits:
    """Binary rANS over 16-bit words with adaptive models: the side information (format.md, "Numbers")."""

    def __init__(self, words: list[int]) -> None:
        self.words, self.at, self.x = words, 2, words[0] | words[1] << 16
        self.models: dict[object, list[int]] = {}

    def bit(self, model: object = None) -> int:
        p, count = self.models.setdefault(model, [1 << 15, 0]) if model is not None else [1 << 15, 0]
        odd = min(max(p >> 1, 32), 32736)
        slot = self.x % 32768
        bit = int(slot < odd)
        self.x = (odd if bit else 32768 - odd) * (self.x // 32768) + slot - (0 if bit else odd)
        if self.x < 1 << 16:
            self.x = self.x << 16 | self.words[self.at]
            self.at += 1
        if model is not None:
            target = 65535 if bit else 0
            self.models[model] = [p + ((target - p) * (131072 // (2 * count + 3)) >> 16), min(count + 1, 60)]
        return bit

    def number(self, context: int) -> int:
        length = 0
        while length < 34 and self.bit((context, "unary", length)):
            length += 1
        n = node = 1
        for _ in range(length):
            bit = self.bit((context, "tree", length, node)) if node < 8 else self.bit()
            node = 2 * node + bit
            n = 2 * n + bit
        return n - 1

    def signed(self, context: int) -> int:
        n = self.number(context)
        return n // 2 if n % 2 == 0 else -(n + 1) // 2

    def chain(self, context: int, count: int, most: int) -> list[int]:
        out: list[int] = []
        for _ in range(count):
            out.append(self.number(context + min(out[-1] if out else 0, most)))
        return out


def unsigned(n: int) -> int:
    return n // 2 if n % 2 == 0 else -(n + 1) // 2


def words_of(data: bytes) -> list[int]:
    return [data[i] | data[i + 1] << 8 for i in range(0, len(data), 2)]


def frequencies(bits: Bits, size: int, precision: int) -> list[int]:
    """One table (format.md, "Tables")."""
    low = bits.number(8)
    high = size - 1 - bits.number(8)
    stride, coarseness = divmod(bits.number(9), 5)
    width = high - low + 1
    if stride:
        count = -(-(width - 1) // 2**stride) + 1
        knots = [bits.number(10)]
        slope = 0
        for index in range(count - 1):
            slope += bits.signed(12 if index else 11)
            knots.append(knots[-1] + slope)
        knots = [knot << coarseness for knot in knots] + [knots[-1] << coarseness]
        logs = []
        for i in range(width):
            left, along = knots[i >> stride], i % 2**stride
            logs.append(left + ((knots[(i >> stride) + 1] - left) * along + 2 ** (stride - 1) >> stride))
    else:
        logs, knot = [], 0
        for step in bits.chain(13, width, 3):
            knot += unsigned(step)
            logs.append(knot << coarseness)
    symbol = low
    for _ in range(bits.number(17)):
        symbol += bits.number(18)
        logs[symbol - low] = max(logs[symbol - low] + bits.signed(19), 0 if stride else 1)
    return normalised([0] * low + [log if stride or log else -1 for log in logs], low, size, precision)


def normalised(logs: list[int], low: int, size: int, precision: int) -> list[int]:
    powers = [isqrt(isqrt(isqrt(isqrt(2 ** (240 + i))))) for i in range(16)]
    present = [i for i in range(low, len(logs)) if logs[i] >= 0]
    weights = {i: powers[logs[i] % 16] << logs[i] // 16 for i in present}
    total = sum(weights.values())
    table = [0] * size
    for i in present:
        table[i] = max(1, (weights[i] * 2**precision + total // 2) // total)
    order = sorted(present, key=lambda i: -table[i])
    lacking = 2**precision - sum(table)
    while lacking:
        for i in order if lacking > 0 else [i for i in order if table[i] > 1]:
            table[i] += (step := (lacking > 0) - (lacking < 0))
            lacking -= step
    return table


def decode_chunk(words: list[int], kinds: list[int], columns: int, tables: list, precision: int) -> list[int]:
    """Symbols of one chunk, row after row (format.md, "Chunks")."""
    states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in range(4)]
    at, out = 8, []
    slots = [[(s, f, i) for s, f in enumerate(table) for i in range(f)] for table in tables]
    for kind in kinds:
        for column in range(columns):
            x = states[column % 4]
            symbol, frequency, offset = slots[kind][x % 2**precision]
            x = frequency * (x >> precision) + offset
            if x < 1 << 16:
                x = x << 16 | words[at]
                at += 1
            states[column % 4] = x
            out.append(symbol)
    if at != len(words) or states != [1 << 16] * 4:
        raise ValueError("the chunk does not end where it should")
    return out


def alphabet(bits: Bits) -> tuple[list[int] | None, int, int]:
    """(values or None for a split alphabet, centre, size)."""
    kind = bits.number(0)
    low = bits.signed(1)
    if kind == 2:
        return None, low, 256 + 26 * 8
    size = bits.number(3) + 1
    gaps = [bits.number(2) + 1] * (size - 1) if kind == 0 else [bits.number(4) + 1 for _ in range(size - 1)]
    values = [low]
    for gap in gaps:
        values.append(values[-1] + gap)
    return values, 0, size


def decode_static(payload: bytes, rows: int, columns: int) -> list[list[int]]:
    """Coder 4: rows of values."""
    at = length = shift = 0
    while True:
        length |= (payload[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if payload[at - 1] < 128:
            break
    bits = Bits(words_of(payload[at : at + 2 * length]))
    at += 2 * length
    values, centre, size = alphabet(bits)
    scan, precision, count = bits.number(5), bits.number(6) + 8, bits.number(7) + 1
    if scan & 1:
        rows, columns = columns, rows
    back = bits.chain(20, rows, 1) if scan & 2 else [0] * rows
    kinds = bits.chain(24, rows, 31) if count > 1 else [0] * rows
    tables = [frequencies(bits, size, precision) for _ in range(count)]
    if max(kinds) == 0:
        parts = [([0], min(2**20, rows * columns - i)) for i in range(0, rows * columns, 2**20)]
    else:
        step = max(1, 2**20 // columns)
        parts = [(kinds[i : i + step], columns) for i in range(0, rows, step)]
    flat: list[int] = []
    for part, words in [(part, bits.number(21)) for part in parts]:
        flat += decode_chunk(words_of(payload[at : at + 2 * words]), *part, tables, precision)
        at += 2 * words
    grid = [flat[i : i + columns] for i in range(0, rows * columns, columns)]
    for row in range(rows):
        if back[row]:
            grid[row] = [(a + b - size // 2) % size for a, b in zip(grid[row], grid[row - back[row]], strict=True)]
    if values is None:
        out = split_values(grid, payload[at:], centre)
    else:
        out = [[values[symbol] for symbol in row] for row in grid]
    return [list(row) for row in zip(*out, strict=True)] if scan & 1 else out


def split_values(grid: list[list[int]], low: bytes, centre: int) -> list[list[int]]:
    out, at = [], 0
    for row in grid:
        out.append([])
        for token in row:
            width = (token - 256) // 8 + 5 if token >= 256 else 0
            high = 8 + token % 8 if token >= 256 else token
            for place in range(width):
                high = 2 * high + (low[at + width - 1 - place >> 3] >> (at + width - 1 - place & 7) & 1)
            at += width
            out[-1].append(centre + unsigned(high))
    return out


def decode_small(payload: bytes, rows: int, columns: int) -> list[list[int]]:
    """Coder 3: rows of values."""
    bits = Bits(words_of(payload))
    running, centre = bits.number(0), bits.signed(1)
    flat, before = [], centre
    for n in bits.chain(2, rows * columns, 31):
        flat.append((before if running else centre) + unsigned(n))
        before = flat[-1]
    return [flat[i : i + columns] for i in range(0, rows * columns, columns)]
