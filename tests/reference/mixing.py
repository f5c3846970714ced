"""Context mixing in plain integers (format.md, from "Tables of coder 5" on); names are those of the format."""

from typing import NamedTuple

from tests.reference.pinned import tables
from tests.reference.trellis import after


class Model(NamedTuple):
    """Size N of the alphabet, its zero Z, the scale, the prior's name, R and C; states, and what symbols stand for."""

    size: int
    zero: int
    scale: int
    prior: str
    steady: tuple[int, int]
    states: int = 1
    values: tuple[int, ...] = ()


def hold(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


class Chunk:
    """One chunk."""

    def __init__(self, model: Model, words: list[int]) -> None:
        self.tables = tables()
        self.squash, self.stretch, self.pace = (self.tables[name] for name in ("squash", "stretch", "pace"))
        self.size, self.zero, self.scale, self.words = model.size, model.zero, model.scale, words
        self.steady, self.states = model.steady, model.states
        self.values = model.values or (0,) * model.size
        self.cells = self.tables[model.prior]
        self.nodes = self.tree()
        self.counters: dict[tuple[int, int, int], list[int]] = {}
        self.sets = [[4915] * 6 + [21299, 14746] for _ in range(128)]
        starts = [self.squash[hold(128 * (k - 16), -2047, 2047) + 2048] for k in range(33)]
        self.outcomes = [[[p, 6] for p in starts] for _ in range(64)]
        self.width, self.code, self.at = 2**64 - 1, self.word(0) << 32 | self.word(1), 2

    def word(self, at: int) -> int:
        return self.words[at] if at < len(self.words) else 0

    def cell(self, place: int, scale: int) -> int:
        return self.cells[hold((place * self.tables["inverse"][scale] >> 14) + 2048, 0, 4096)]

    def tree(self) -> list[tuple]:
        """(low, split, high, depth, children), a child being a node or -1 - symbol."""
        scale = self.scale
        middles = [64 * (s - self.zero) for s in range(self.size)]
        masses = [self.cell(at + 32, scale) - self.cell(at - 32, scale) + 2 for at in middles]
        spans, nodes = [(0, self.size - 1, 0)], []
        for low, high, depth in spans:
            whole = sum(masses[low : high + 1])
            left, split = masses[low], low
            while split < high - 1 and 2 * left < whole:
                split += 1
                left += masses[split]
            less = left - masses[split]
            if split > low and whole - 2 * less < 2 * left - whole:
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
        first = self.cell(64 * (low - self.zero) - 32 + shift, scale) if low else 0
        middle = self.cell(64 * (split - self.zero) + 32 + shift, scale)
        last = self.cell(64 * (high - self.zero) + 32 + shift, scale) if high < self.size - 1 else self.cells[4096]
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
        base, (steady, even) = self.scale - 64, self.steady
        mean = self.tables["power"][self.scale] + 1
        most = 2 * (mean // 16 + 2)
        level = usual = (25 * mean**2 >> 10) + 1
        slow, quick = [level] * columns, [level] * columns
        out: list[list[int]] = []
        states, sizes = [0] * columns, [0] * columns
        for r in range(rows):
            here, expected, u = steady * usual, steady * level, self.sc(usual) - base
            self.rate = max(8, 24 - r * columns // 4000)
            last = before = 0
            out.append([])
            for c in range(columns):
                path = c if self.states > 0 else 0
                odd = states[path] % 2
                row = (self.lg(here) - self.lg(expected)) >> 1
                alone = self.sc(slow[c]) - base
                product, quicker = alone + row, self.sc(quick[c]) - base + row
                near = self.lg((13 * (2 * last + before + 2 * sizes[c]) >> 1) + (mean >> 2) + 1) - base
                contexts = [
                    hold((product + 4) >> 3, 0, 15),
                    16 + hold((row + u + 4) >> 3, 0, 15),
                    32 + hold((quicker + 4) >> 3, 0, 15),
                    48 + hold((3 * product + near + 16) >> 5, 0, 15),
                    64 + hold((alone + 1) >> 1, 0, 63),
                    128 + 8 * (8 * c // columns) + 8 * r // rows,
                ]
                symbol = self.symbol(contexts, [hold((s + 1) >> 1, 0, 63) for s in (product, quicker)], odd)
                out[r].append(symbol)
                before, last = last, abs(2 * (symbol - self.zero) + odd)
                sizes[c], states[path] = last, after(self.states, states[path], self.values[symbol])
                here += 16 * min(last, most) ** 2
                expected += slow[c]
            share = 2**16 * (expected + 64) // (here + 64)
            if r == 0:
                usual = here // (columns + steady) + 1
            else:
                usual = max((7 * usual + (here - steady * usual) // columns) // 8, 0) + 1
            for c in range(columns):
                g = (16 * min(sizes[c], most) ** 2 * share >> 16) + 1
                slow[c] += (g - slow[c]) * self.pace[min(r + even, 1023)] >> 16
                quick[c] += (g - quick[c]) * self.pace[min(r + even, max(30, even), 1023)] >> 16
            level = sum(slow) // columns + 1
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
        corrected = (self.outcomes[q][k][0] * (128 - j) + self.outcomes[q][k + 1][0] * j) >> 7
        bound = (self.width >> 16) * hold((3 * self.squash[z] + corrected) >> 2, 8, 65528)
        bit = int(self.code < bound)
        self.code, self.width = (self.code, bound) if bit else (self.code - bound, self.width - bound)
        if self.width < 2**32:
            self.width, self.code = self.width << 32, self.code << 32 | self.word(self.at)
            self.at += 1
        for weights, side in zip(mixers, y, strict=True):
            e = (65536 * bit - self.squash[side + 2048]) * self.rate >> 4
            weights[:] = [w + (x * e + 2**14 >> 15) for w, x in zip(weights, logits, strict=True)]
        self.learn(self.outcomes[q][k + (j >> 6)], 65535 * bit, 250)
        for counter in counters:
            self.learn(counter, (2**22 - 1) * bit, 1000)
        return bit

    def learn(self, model: list[int], target: int, most: int) -> None:
        p, n = model
        model[:] = [p + ((target - p) * self.pace[n] >> 16), min(n + 1, most)]
