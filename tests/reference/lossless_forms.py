"""Reference decoder of the lossless forms 6 to 8 in plain Python integers, written from docs/format.md.

It does not look for damage: its input is valid streams. Words are integers.
"""

import struct

Rows = list[list[int]]
# dtype → bits of a word, widths of its planes from the top, bits above which the sign is moved
WORDS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "float32": (32, (8, 8, 8, 8), 8),
    "float16": (16, (8, 8), 8),
    "bfloat16": (16, (8, 8), 8),
    "bool": (1, (1,), 0),
}
SCALES = ("float32", "float16", "bfloat16")
LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def planes(dtype: str, streams: list[Rows]) -> list[int]:
    """Return the words of planes, in row-major order."""
    bits, widths, exponent = WORDS[dtype]
    words = []
    for fields in zip(*([value for row in stream for value in row] for stream in streams), strict=True):
        word = 0
        for field, width in zip(fields, widths, strict=True):
            word = word << width | field
        if exponent:  # exponent, sign, rest → sign, exponent, rest
            below = bits - 1 - exponent
            sign = word >> below & 1
            word = sign << bits - 1 | word >> below + 1 << below | word % (1 << below)
        words.append(word)
    return words


def undone(numbers: list[int], order: int) -> list[int]:
    """Return the numbers of differences to the one before the last, taken so many times."""
    for _ in range(order):
        numbers = numbers[:]
        for index in range(2, len(numbers)):
            numbers[index] += numbers[index - 2]
    return numbers


def value(dtype: str, word: int) -> float:
    """Return the float of a word."""
    if dtype == "bfloat16":
        word, dtype = word << 16, "float32"
    code, size = ("<f", 4) if dtype == "float32" else ("<e", 2)
    return float(struct.unpack(code, word.to_bytes(size, "little"))[0])


def store(dtype: str, exact: float) -> int:
    """Return the word of an exact number: clamped, rounded to float32 and then to the dtype."""
    exact = min(max(exact, -LARGEST[dtype]), LARGEST[dtype])
    single = struct.unpack("<f", struct.pack("<f", exact))[0]
    if dtype == "float16":
        return int.from_bytes(struct.pack("<e", single), "little")
    word = int.from_bytes(struct.pack("<f", single), "little")
    return word if dtype == "float32" else word + 0x7FFF + (word >> 16 & 1) >> 16


def decode_form(dtype: str, shape: tuple[int, int], params: tuple[int, ...], streams: list[Rows]) -> list[int]:
    """Return the words of a tensor (rows, columns) in row-major order."""
    if params[0] == 6:
        return matches(dtype, params, streams)
    numbers, *rest = streams
    if params[0] == 8:
        table = planes(dtype, rest)
        return [table[row * params[1] + number] for row, line in enumerate(numbers) for number in line]
    _, height, width, _, kind = params
    levels: list[float] = []
    if kind < 3:
        level, rest = 0, [*rest]
        for index, gap in enumerate(rest.pop(0)[0]):
            level += gap
            if index and gap == 0:
                levels[-1] = -0.0
            levels.append(float(level))
    else:
        levels = [value("float32", word) for word in planes("float32", rest[:4])]
        rest = rest[4:]
    scales = [value(SCALES[kind % 3], word) for word in planes(SCALES[kind % 3], rest)]
    across = -(-shape[1] // width)
    return [
        store(dtype, levels[number] * scales[row // height * across + column // width])
        for row, line in enumerate(numbers)
        for column, number in enumerate(line)
    ]


def matches(dtype: str, params: tuple[int, ...], streams: list[Rows]) -> list[int]:
    _, _, _, order, *form = params
    *rest, counts, lengths, distances = streams
    # Values stand in a word in two's complement.
    literals = [number % 2**64 for number in rest[0][0]] if form == [2] else planes(dtype, rest)
    words: list[int] = []
    used = 0
    three = (undone(one[0], order // 3**index % 3) for index, one in enumerate((counts, lengths, distances)))
    for count, length, distance in zip(*three, strict=True):
        words += literals[used : used + count]
        used += count
        for _ in range(length):
            words.append(words[-distance])
    return words + literals[used:]
