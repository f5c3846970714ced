"""Variable-length integers (LEB128) of a header, and a cursor that reads them from a file that may be hostile.

No count is believed: each is checked against its limit and against the bytes that are left. Needs no numpy.
"""

from dataclasses import dataclass

from birdie.errors import ArtifactError


def varint(value: int) -> bytes:
    """Encode as LEB128: seven bits per byte, low bits first, the high bit set on all bytes but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass(slots=True)
class Cursor:
    """Reads the numbers of a header in order; every overrun is an ArtifactError that names file and byte."""

    data: bytes  # the header
    where: str  # the file, for messages
    fields_left: int  # how many more fields `part` may announce, over all entries
    position: int = 0  # bytes read so far

    def fail(self, what: str) -> ArtifactError:
        """Return the error to raise: what is wrong, and where."""
        return ArtifactError(f"the header of {self.where} is damaged near byte {self.position}: {what}")

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > len(self.data) - self.position:
            raise self.fail("it ends too early")
        self.position += count
        return self.data[self.position - count : self.position]

    def varint(self, limit: int, what: str) -> int:
        """Return the next number, at most `limit`, which must be coded in as few bytes as possible."""
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
            raise self.fail(f"{what} {value:,} is above {limit:,} or has needless bytes")
        return value

    def count(self, limit: int, what: str) -> int:
        """Return a count of fields of a byte or more each; more of them than bytes are left is damage."""
        value = self.varint(limit, what)
        if value > len(self.data) - self.position:
            raise self.fail(f"{what} {value:,} is more than the header can hold")
        return value

    def part(self, limit: int, what: str) -> int:
        """Return a count of dimensions, parameters or streams, which are bounded over all entries too."""
        value = self.count(limit, what)
        self.announce(value)
        return value

    def announce(self, fields: int) -> None:
        """Count dimensions, parameters or streams."""
        self.fields_left -= fields
        if self.fields_left < 0:
            raise self.fail("there are more dimensions, parameters and streams than any model has")
