"""Trellis in plain integers, and in floats with one rounding per step (format.md, "trellis")."""

from struct import pack, unpack

POLYNOMIALS = {
    1: (0o1, 0o0),
    4: (0o5, 0o2),
    8: (0o13, 0o4),
    16: (0o23, 0o4),
    32: (0o45, 0o10),
    64: (0o103, 0o24),
    128: (0o251, 0o106),
    256: (0o467, 0o242),
}
TABLE = (
    *(8388608, 8760003, 9147842, 9552851, 9975792, 10417458, 10878679, 11360319),
    *(11863283, 12388516, 12937002, 13509772, 14107901, 14732511, 15384775, 16065917),
)
CHUNK = 2**20


def after(states: int, state: int, number: int) -> int:
    """Return the state that follows `state` and a number."""
    h0, h1 = POLYNOMIALS[abs(states)]
    return state >> 1 ^ (state % 2) * (h0 >> 1) ^ (number % 2) * (h1 >> 1)


def single(value: float) -> float:
    """Return the nearest float32. A product of float32 factors is exact in float64, so this is its only rounding."""
    try:
        return float(unpack("<f", pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def step(index: int) -> float:
    return TABLE[index % 16] * 2.0 ** (index // 16 - 23)


def decode_trellis(params: tuple[int, ...], streams: list[list[list[int]]]) -> list[list[float]]:
    """Return the rows of a tensor of scheme 4, before they are clamped to the range of its dtype."""
    states, down, along, base, finer = params
    numbers, columns = streams[0], len(streams[0][0])
    rows = [step(16 // down * k[0] + base + (r < finer)) for r, k in enumerate(streams[1])]
    across = [step(16 // along * k[0]) for k in streams[2]] if along else [1.0] * columns
    out: list[list[float]] = []
    state = [0] * columns
    for r, row in enumerate(numbers):
        if r % max(1, CHUNK // columns) == 0:
            state = [0] * columns
        half = single(rows[r] * 0.5)
        if columns >= 16 and not any(row):
            half = 0.0
        out.append([])
        for c, m in enumerate(row):
            path = c if states > 0 else 0
            doubled = single(2 * m + state[path] % 2)
            out[r].append(single(single(doubled * half) * across[c]))
            state[path] = after(states, state[path], m)
    return out
