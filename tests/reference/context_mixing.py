"""Context mixing in plain integers (coders.md, from "Tables of coder 5" on), with the names of the format."""

from typing import Any, NamedTuple

from tests.reference.mixing_tables import tables
from tests.reference.trellis import after


class Model(NamedTuple):
    """Size N of the alphabet, its zero Z, the scale, the name of the prior, R and C; states, and values of symbols."""

    size: int
    zero: int
    scale: int
    prior: str
    pseudo_counts: tuple[int, int]
    states: int = 1
    values: tuple[int, ...] = ()


def hold(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


class Chunk:
    """Decoder of one chunk."""

    def __init__(self, model: Model, words: list[int]) -> None:
        self.tables = tables()
        self.squash, self.stretch, self.adaptation = (self.tables[n] for n in ("squash", "stretch", "adaptation"))
        self.size, self.zero, self.scale, self.words = model.size, model.zero, model.scale, words
        self.pseudo_counts, self.states = model.pseudo_counts, model.states
        self.values = model.values or (0,) * model.size
        self.prior = self.tables[model.prior]
        self.nodes = self.tree()
        self.counters: dict[tuple[int, int, int], list[int]] = {}
        self.sets = [[4915] * 6 + [21299, 14746] for _ in range(128)]
        starts = [self.squash[hold(128 * (k - 16), -2047, 2047) + 2048] for k in range(33)]
        self.apm = [[[p, 6] for p in starts] for _ in range(64)]
        self.width, self.code, self.at = 2**64 - 1, self.word(0) << 32 | self.word(1), 2

    def word(self, at: int) -> int:
        return self.words[at] if at < len(self.words) else 0

    def cdf(self, position: int, scale: int) -> int:
        return self.prior[hold((position * self.tables["inverse"][scale] >> 14) + 2048, 0, 4096)]

    def tree(self) -> list[tuple[Any, ...]]:
        """(low, split, high, depth, children), a child being a node or -1 - symbol."""
        scale = self.scale
        middles = [64 * (s - self.zero) for s in range(self.size)]
        masses = [self.cdf(at + 32, scale) - self.cdf(at - 32, scale) + 2 for at in middles]
        spans, nodes = [(0, self.size - 1, 0)], []
        for low, high, depth in spans:
            total = sum(masses[low : high + 1])
            left, split = masses[low], low
            while split < high - 1 and 2 * left < total:
                split += 1
                left += masses[split]
            less = left - masses[split]
            if split > low and total - 2 * less < 2 * left - total:
                split -= 1
            children = []
            for start, stop in ((low, split), (split + 1, high)):
                children.append(-1 - start if start == stop else len(spans))
                if start < stop:
                    spans.append((start, stop, depth + 1))
            nodes.append((low, split, high, depth, children))
        return nodes

    def seed(self, node: int, fine: int, odd: int) -> int:
        low, split, high = self.nodes[node][:3]
        scale = hold(self.scale + 2 * fine - 64, 0, 383)
        shift = 32 * odd
        first = self.cdf(64 * (low - self.zero) - 32 + shift, scale) if low else 0
        middle = self.cdf(64 * (split - self.zero) + 32 + shift, scale)
        last = self.cdf(64 * (high - self.zero) + 32 + shift, scale) if high < self.size - 1 else self.prior[4096]
        return hold(2**22 * (last - middle) // (last - first), 2**12, 2**22 - 2**12) if last > first else 2**21

    def counter(self, x: int, node: int, odd: int) -> list[int]:
        if (x, node, odd) not in self.counters:
            self.counters[x, node, odd] = [self.seed(node, 4 * (x % 16) if x < 64 else 32, odd), 3]
        return self.counters[x, node, odd]

    def lg(self, value: int) -> int:
        value = int(float(value))  # 53 bits, ties to even
        exponent = value.bit_length() - 1
        return 16 * exponent + self.tables["log2"][(value << 8 >> exponent) & 255]

    def sc(self, squares: int) -> int:
        return (self.lg(squares) + 86) >> 1

    def decode(self, rows: int, columns: int) -> list[list[int]]:
        base, (row_count, column_count) = self.scale - 64, self.pseudo_counts
        mean = self.tables["power"][self.scale] + 1
        cap = 2 * (mean // 16 + 2)
        column_level = row_level = (25 * mean**2 >> 10) + 1
        slow, fast = [column_level] * columns, [column_level] * columns
        out: list[list[int]] = []
        states, magnitudes = [0] * columns, [0] * columns
        for r in range(rows):
            row_sum, expected_sum, u = row_count * row_level, row_count * column_level, self.sc(row_level) - base
            self.rate = max(8, 24 - r * columns // 4000)
            a1 = a2 = 0
            out.append([])
            for c in range(columns):
                path = c if self.states > 0 else 0
                odd = states[path] % 2
                row = (self.lg(row_sum) - self.lg(expected_sum)) >> 1
                column = self.sc(slow[c]) - base
                product, fast_product = column + row, self.sc(fast[c]) - base + row
                near = self.lg((13 * (2 * a1 + a2 + 2 * magnitudes[c]) >> 1) + (mean >> 2) + 1) - base
                contexts = [
                    hold((product + 4) >> 3, 0, 15),
                    16 + hold((row + u + 4) >> 3, 0, 15),
                    32 + hold((fast_product + 4) >> 3, 0, 15),
                    48 + hold((3 * product + near + 16) >> 5, 0, 15),
                    64 + hold((column + 1) >> 1, 0, 63),
                    128 + 8 * (8 * c // columns) + 8 * r // rows,
                ]
                symbol = self.symbol(contexts, [hold((s + 1) >> 1, 0, 63) for s in (product, fast_product)], odd)
                out[r].append(symbol)
                a2, a1 = a1, abs(2 * (symbol - self.zero) + odd)
                magnitudes[c], states[path] = a1, after(self.states, states[path], self.values[symbol])
                row_sum += 16 * min(a1, cap) ** 2
                expected_sum += slow[c]
            normalize = 2**16 * (expected_sum + 64) // (row_sum + 64)
            if r == 0:
                row_level = row_sum // (columns + row_count) + 1
            else:
                row_level = max((7 * row_level + (row_sum - row_count * row_level) // columns) // 8, 0) + 1
            for c in range(columns):
                g = (16 * min(magnitudes[c], cap) ** 2 * normalize >> 16) + 1
                slow[c] += (g - slow[c]) * self.adaptation[min(r + column_count, 1023)] >> 16
                limit = min(r + column_count, max(30, column_count), 1023)
                fast[c] += (g - fast[c]) * self.adaptation[limit] >> 16
            column_level = sum(slow) // columns + 1
        if len(self.words) > self.at - 1 or self.words[-1:] == [0]:
            raise ValueError("the chunk does not end where it should")
        return out

    def symbol(self, contexts: list[int], fine: list[int], odd: int) -> int:
        node = 0
        while node >= 0:
            node = self.nodes[node][4][self.bit(node, contexts, fine, odd)]
        return -1 - node

    def bit(self, node: int, contexts: list[int], fine: list[int], odd: int) -> int:
        counters = [self.counter(x, node, odd) for x in contexts]
        logits = [self.stretch[p >> 10] for p, _ in counters]
        logits += [self.stretch[self.seed(node, f, odd) >> 10] for f in fine]
        q = node if node < 48 else min(48 + self.nodes[node][3], 63)
        mixers = [self.sets[q], self.sets[64 + contexts[0]]]
        sums = [sum(w * x for w, x in zip(weights, logits, strict=True)) >> 16 for weights in mixers]
        y = [hold(total, -2047, 2047) for total in sums]
        z = (sum(y) >> 1) + 2048
        k, j = z >> 7, z % 128
        corrected = (self.apm[q][k][0] * (128 - j) + self.apm[q][k + 1][0] * j) >> 7
        bound = (self.width >> 16) * hold((3 * self.squash[z] + corrected) >> 2, 8, 65528)
        bit = int(self.code < bound)
        self.code, self.width = (self.code, bound) if bit else (self.code - bound, self.width - bound)
        if self.width < 2**32:
            self.width, self.code = self.width << 32, self.code << 32 | self.word(self.at)
            self.at += 1
        for weights, side in zip(mixers, y, strict=True):
            e = (65536 * bit - self.squash[side + 2048]) * self.rate >> 4
            weights[:] = [w + (x * e + 2**14 >> 15) for w, x in zip(weights, logits, strict=True)]
        self.learn(self.apm[q][k + (j >> 6)], 65535 * bit, 250)
        for counter in counters:
            self.learn(counter, (2**22 - 1) * bit, 1000)
        return bit

    def learn(self, model: list[int], target: int, most: int) -> None:
        p, n = model
        model[:] = [p + ((target - p) * self.adaptation[n] >> 16), min(n + 1, most)]
