"""Numbers of variable length in a header, and reading them from a file that may lie: no count is believed unchecked."""

from dataclasses import dataclass

from birdie.errors import ArtifactError


def varint(value: int) -> bytes:
    """LEB128: seven bits a byte, low bits first, the high bit set on all bytes but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass(slots=True)
class Cursor:
    """Reads a header's numbers in order; every overrun is an ArtifactError naming the place.

    Attributes:
        data: the header.
        where: the file, for messages.
        fields_left: how many more variable-length parts may come before it is no header anyone wrote.
        position: bytes read.
    """

    data: bytes
    where: str
    fields_left: int
    position: int = 0

    def fail(self, what: str) -> ArtifactError:
        """The error to raise: what is wrong, and where."""
        return ArtifactError(f"the header of {self.where} is damaged near byte {self.position}: {what}")

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self.data) - self.position:
            raise self.fail("it ends too early")
        self.position += count
        return self.data[self.position - count : self.position]

    def varint(self, limit: int, what: str) -> int:
        """The next number, at most `limit`, in the fewest bytes it goes into."""
        if self.position < len(self.data) and (byte := self.data[self.position]) < 0x80 and byte <= limit:
            self.position += 1
            return byte
        value = shift = 0
        byte = 0x80
        while byte >= 0x80 and shift <= 63:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
        if value > limit or byte >= 0x80 or (byte == 0 and shift > 7):
            raise self.fail(f"{what} {value:,} is over {limit:,} or has needless bytes")
        return value

    def count(self, limit: int, what: str) -> int:
        """A count of things that take a byte each at least: more than the bytes left is damage."""
        value = self.varint(limit, what)
        if value > len(self.data) - self.position:
            raise self.fail(f"{what} {value:,} is more than the header can hold")
        return value

    def varints(self, count: int, limit: int, what: str) -> tuple[int, ...]:
        """`count` numbers; all of one byte, as most are, are taken at once."""
        raw = self.data[self.position : self.position + count]
        if len(raw) == count and max(raw, default=0) < 0x80:
            self.position += count
            return tuple(raw)
        return tuple(self.varint(limit, what) for _ in range(count))

    def column(self, most: int, limit: int, what: str) -> tuple[int, ...]:
        """A count, then so many numbers."""
        return self.varints(self.part(most, f"count before a {what}"), limit, what)

    def part(self, limit: int, what: str) -> int:
        """A count of dimensions, parameters or streams, which are bounded over all entries too."""
        value = self.count(limit, what)
        self.fields_left -= value
        if self.fields_left < 0:
            raise self.fail("there are more dimensions, parameters and streams than any model has")
        return value
