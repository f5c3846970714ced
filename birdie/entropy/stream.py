"""A coded array; `birdie.entropy.coder` makes it, and the container of files holds it without knowing what it is."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stream:
    """A coded array.

    Attributes:
        coder: number of the coder in the file (0…255), a key of `birdie.entropy.coder.NAMES`.
        payload: the bytes it wrote.
    """

    coder: int
    payload: bytes

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)

    def pieces(self) -> Iterator[bytes]:
        """Yield the payload; a subclass may have it elsewhere than in memory."""
        yield self.payload
