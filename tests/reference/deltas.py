"""Differences in plain integers (coders.md, "Deltas"), with the names of the format."""

from typing import Any

from tests.reference.mixing_tables import tables
from tests.reference.side_information import opened, words_of

CHUNK = 2**20

EXPONENTS = {  # exponent and mantissa bits of floats that have a sign bit
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e4m3fnuz": (4, 3),
    "float8_e5m2": (5, 2),
    "float8_e5m2fnuz": (5, 2),
}


def hold(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


class Chunk:
    """Decoder of one chunk, given the words of the base."""

    def __init__(
        self, base: list[list[int]], width: int, dtype: str, middle: int, scale: int, words: list[int]
    ) -> None:
        self.tables = tables()
        self.base, self.bits, self.dtype, self.middle, self.scale, self.words = base, width, dtype, middle, scale, words
        self.laplace = self.tables["Laplace"]
        self.all = self.laplace[4096] - self.laplace[2048]
        self.counters: dict[Any, list[int]] = {}
        self.sets: dict[Any, list[int]] = {}
        self.width, self.code, self.at = 2**64 - 1, self.word(0) << 32 | self.word(1), 2

    def word(self, at: int) -> int:
        return self.words[at] if at < len(self.words) else 0

    def lg(self, value: int) -> int:
        value = int(float(value))
        exponent = value.bit_length() - 1
        return 16 * exponent + self.tables["log2"][(value << 8 >> exponent) & 255]

    def survival(self, d: int) -> int:
        if d < -128:
            return self.all
        return max(self.laplace[4096] - self.laplace[min(2048 + self.tables["power"][hold(d + 128, 0, 255)], 4096)], 1)

    def longer(self, a: int, t: int) -> int:
        return self.survival(16 * t - a) if t > 0 else self.survival(-16 - a) if t == 0 else self.all

    def expected(self, x: int, i: int) -> int:
        if x == 0:
            return self.scale - 16 * (i - 16)
        return {1: 4 * i, 2: 4 * i, 3: 8 * i // 3, 5: 8 * i // 3, 4: 8 * i, 6: 8 * (i // 8), 7: 16 * (i // 8)}[x] - 160

    def counter(self, x: int, i: int, node: tuple[Any, ...]) -> list[int]:
        key = (x, i, node)
        if key not in self.counters:
            p, n = 2**21, 0 if node[0] == "sign" else 3
            if node[0] in ("up", "down"):
                a, t = self.expected(x, i), node[1]
                if node[0] == "up":
                    p = 2**22 * self.longer(a, t) // self.longer(a, t - 1)
                else:
                    more = self.longer(a, t + 1)
                    p = 2**22 * (self.longer(a, t) - more) // max(self.all - more, 1)
                p = hold(p, 2**12, 2**22 - 2**12)
            self.counters[key] = [p, n]
        return self.counters[key]

    def refill(self) -> None:
        if self.width < 2**32:
            self.width, self.code = self.width << 32, self.code << 32 | self.word(self.at)
            self.at += 1

    def bit(self, node: tuple[Any, ...], contexts: list[int], rate: int) -> int:
        counters = [self.counter(x, i, node) for x, i in enumerate(contexts)]
        weights = self.sets.setdefault(node, [12000] * 8)
        logits = [self.tables["stretch"][p >> 10] for p, _ in counters]
        y = hold(sum(w * z for w, z in zip(weights, logits, strict=True)) >> 16, -2047, 2047)
        squashed = self.tables["squash"][y + 2048]
        bound = (self.width >> 16) * hold(squashed, 8, 65528)
        bit = int(self.code < bound)
        if bit:
            self.width = bound
        else:
            self.code, self.width = self.code - bound, self.width - bound
        self.refill()
        error = ((65536 * bit - squashed) * rate) >> 4
        for k, z in enumerate(logits):
            weights[k] += (z * error + 2**14) >> 15
        for counter in counters:
            counter[0] += (((2**22 - 1) * bit - counter[0]) * self.tables["adaptation"][counter[1]]) >> 16
            counter[1] = min(counter[1] + 1, 1000)
        return bit

    def parts(self, word: int) -> tuple[int, int, int]:
        """(exponent, sign, ord) of a word of the base."""
        if self.dtype not in EXPONENTS:
            return 1, 0, word
        _, mantissa = EXPONENTS[self.dtype]
        sign, magnitude = word >> (self.bits - 1), word & (2 ** (self.bits - 1) - 1)
        return max(magnitude >> mantissa, 1), sign, -1 - magnitude if sign else magnitude

    def from_ord(self, value: int) -> int:
        value, top = value % (1 << self.bits), 1 << (self.bits - 1)
        return top | ((1 << self.bits) - 1 - value) if self.dtype in EXPONENTS and value & top else value

    def decode(self) -> list[list[int]]:
        columns, lg = len(self.base[0]), self.lg
        mean = max(self.tables["power"][320 + self.scale % 16] * 2 ** (self.scale // 16) >> 20, 1)
        total, count, n = 8 * mean, 8, 0
        sums, lasts, biases, signs = ([0] * columns for _ in range(4))
        out: list[list[int]] = []
        for r, row_words in enumerate(self.base):
            usual = total // count + 1
            row_sum, row_count, left, left2 = 8 * usual, 8, usual, usual
            left_k = sign1 = sign2 = row_bias = agreement = rank = 0
            out.append([])
            for c, word in enumerate(row_words):
                e, s, start = self.parts(word)
                shift = hold(e - self.middle + 16, 0, 40)
                row, column = lg(row_sum) - lg(row_count), lg(sums[c] + 8 * usual) - lg(n + 8)
                both = row + column - lg(usual) - 16 * shift
                near = lg((13 * (2 * left + left2 + 2 * lasts[c]) >> 6) + (usual >> 3) + 1) - 16 * shift
                every = (3 * both + 2 * near) // 5
                deep, half = hold(e - self.middle + 32, 0, 63), hold((both + 160) >> 3, 0, 95)
                contexts = [
                    deep,
                    hold((row - 16 * shift + 160) >> 2, 0, 191),
                    hold((column - 16 * shift + 160) >> 2, 0, 191),
                    hold(3 * (both + 160) >> 3, 0, 287),
                    hold((near + 160) >> 3, 0, 95),
                    hold(3 * (every + 160) >> 3, 0, 287),
                    8 * half + min(left_k, 7),
                    8 * (half >> 1) + hold((deep - 8) >> 2, 0, 7),
                ]
                rate = max(6, 24 - (r * columns + c) // 8000)
                t, way = hold((both + 8) >> 4, 0, self.bits - 1), "up"
                answer = self.bit((way, t), contexts, rate)
                if answer:
                    while answer and t < self.bits - 1:
                        t += 1
                        answer = self.bit((way, t), contexts, rate)
                else:
                    way = "down"
                    while not answer and t > 0:
                        t -= 1
                        answer = self.bit((way, t), contexts, rate)
                k = t + 1 if answer else t
                size, negative = int(k > 0), 0
                if k > 1:
                    size = 2 + self.bit(("first", k), contexts, rate)
                if k > 2:
                    size = 2 * size + self.bit(("second", k, size & 1), contexts, rate)
                if k:
                    x = [(y + 4096) >> 7 for y in (row_bias, biases[c], agreement, rank)]
                    known = [
                        *(s, x[0], x[1], 64 * x[0] + x[1]),
                        18 * (signs[c] + 1) + 6 * (sign1 + 1) + 2 * (sign2 + 1) + s,
                        *(3 * x[2] + signs[c] + 1, 64 * x[3] + x[1], 2 * min(k, 15) + s),
                    ]
                    negative = self.bit(("sign",), known, rate)
                rest = k - 3
                while rest > 0:
                    some = min(rest, 16)
                    rest -= some
                    self.width >>= some
                    part = min(self.code // self.width, 2**some - 1)
                    self.code -= part * self.width
                    size = size << some | part
                    self.refill()
                out[r].append(self.from_ord(start + (-size if negative else size)))
                change = min(min(size, 2**40 >> shift) << shift, 2**40)
                row_sum, row_count, total, count = row_sum + change, row_count + 1, total + change, count + 1
                if row_count == 4096:
                    row_sum, row_count = (row_sum >> 1) + 1, 2048
                if count == 2**18:
                    total, count = (total >> 1) + 1, 2**17
                sums[c] += change
                lasts[c], left2, left, left_k = change, left, change, k
                if k:
                    d = -1 if negative else 1
                    row_bias += (4095 * d - row_bias) >> 5
                    agreement += (4095 * d * signs[c] - agreement) >> 5
                    rank += (4095 * (d if biases[c] >= 0 else -d) - rank) >> 5
                    biases[c] += (4095 * d - biases[c]) >> 4
                    sign2, sign1, signs[c] = sign1, d, d
            n += 1
            if n >= 256:
                n, sums = n >> 1, [value >> 1 for value in sums]
        if len(self.words) > self.at - 1 or self.words[-1:] == [0]:
            raise ValueError("the chunk does not end where it should")
        return out


def decode_deltas(payload: bytes, base: list[list[int]], width: int, dtype: str) -> list[list[int]]:
    """Return the words, given those of the base, of `width` bits."""
    bits, rest = opened(payload)
    middle, scale = bits.number(6), bits.number(7)
    step = max(1, CHUNK // len(base[0]))
    counts = [bits.number(21) for _ in range(0, len(base), step)]
    out: list[list[int]] = []
    for count in counts:
        pairs = words_of(rest[: 4 * count])
        words = [low | high << 16 for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
        rest = rest[4 * count :]
        out += Chunk(base[len(out) : len(out) + step], width, dtype, middle, scale, words).decode()
    if rest:
        raise ValueError("bytes follow the last chunk")
    return out
