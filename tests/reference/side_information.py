"""Side information in plain integers (coders.md, "Numbers"), and the alphabet that it begins with in coders 4 and 5."""


class Bits:
    """Decoder of numbers: binary rANS over 16-bit words with adaptive models (coders.md, "Numbers")."""

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


def opened(payload: bytes) -> tuple[Bits, bytes]:
    """Return the side information of coder 4 or 5, and the bytes that follow it."""
    at = length = shift = 0
    while True:
        length |= (payload[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if payload[at - 1] < 128:
            break
    end = at + 2 * length
    return Bits(words_of(payload[at:end])), payload[end:]


def alphabet(bits: Bits) -> tuple[list[int] | None, int, int]:
    """Return values (None for a split alphabet), center and size."""
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
