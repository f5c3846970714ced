"""Frequency tables in plain Python integers (coders.md, "Tables")."""

from math import isqrt

from tests.reference.side_information import Bits, unsigned


def frequencies(bits: Bits, size: int, precision: int) -> list[int]:
    """Return the frequencies of one table (coders.md, "Tables")."""
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
    return normalized([0] * low + [log if stride or log else -1 for log in logs], low, size, precision)


def normalized(logs: list[int], low: int, size: int, precision: int) -> list[int]:
    powers = [isqrt(isqrt(isqrt(isqrt(2 ** (240 + i))))) for i in range(16)]
    present = [i for i in range(low, len(logs)) if logs[i] >= 0]
    weights = {i: powers[logs[i] % 16] << logs[i] // 16 for i in present}
    total = sum(weights.values())
    table = [0] * size
    for i in present:
        table[i] = max(1, (weights[i] * 2**precision + total // 2) // total)
    order = sorted(present, key=lambda i: -table[i])
    remainder = 2**precision - sum(table)
    while remainder:
        for i in order if remainder > 0 else [i for i in order if table[i] > 1]:
            table[i] += (step := (remainder > 0) - (remainder < 0))
            remainder -= step
    return table
