"""How many UTF-8 bytes each token stands for: the denominator of bits per byte.

    bytes(target | previous) = base_bytes[target] + (has_leading_space[target] and not is_boundary[previous])

The space a token begins with costs its byte except right after a boundary (BOS), where the text has none. The rule is
the challenge's own; the way to get it wrong quietly is to measure byte pieces by their literal name ("<0xE2>", 6 bytes)
or to count the space twice, so `check_bytes` compares the table with the text the tokens decode to.

CaseOps' operators stand for no bytes, but after an escape the text holds the operator itself:

    tokens   BOS  TITLE  he  llo  ▁  ESCAPE  TITLE
    bytes     0     0     2   3   1     0      3

Whether an escape acts or is escaped itself takes all of a run of them to tell, so `count_document` alone always knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from birdie.errors import DataError

Tokens = NDArray[np.uint16]

TOLERANCE = 1e-3
"""Of a byte count, by which it may miss the text: the challenge's own table is off by up to 7e-5 on its own text."""


@dataclass(frozen=True, slots=True)
class Escape:
    """A token that makes the one after it stand for itself.

    Attributes:
        id: the token.
        bytes: (V,) int16, what each token stands for when escaped, beyond what it does otherwise.
    """

    id: int
    bytes: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Bytes of every token id of a vocabulary of V.

    Attributes:
        base_bytes: (V,) int16, UTF-8 bytes of the piece without its leading space.
        has_leading_space: (V,) bool, the piece begins with a space.
        is_boundary: (V,) bool, a space directly after this token is not part of the text (control, unknown, unused).
        escape: the token that escapes, in a vocabulary that has one.
    """

    base_bytes: NDArray[np.int16]
    has_leading_space: NDArray[np.bool_]
    is_boundary: NDArray[np.bool_]
    escape: Escape | None = None

    def __len__(self) -> int:
        return len(self.base_bytes)

    def count(self, previous: NDArray[np.integer[Any]], targets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Bytes charged for predicting each of `targets` after the token in `previous`; all three of one shape.

        An escape in `previous` is taken to act.

        Raises:
            DataError: an id lies outside the table.
        """
        escaped = None if self.escape is None else previous == self.escape.id
        return self._count(previous, targets, escaped)

    def count_document(self, tokens: NDArray[np.integer[Any]], bos_id: int) -> NDArray[np.int64]:
        """Bytes of each of `tokens` (T,): one document that follows a BOS left out, or more with their BOS.

        Raises:
            DataError: an id lies outside the table.
        """
        if not len(tokens):
            return np.zeros(0, np.int64)
        previous = np.concatenate(([bos_id], tokens[:-1]))
        return self._count(previous, tokens, None if self.escape is None else _escaped(tokens == self.escape.id))

    def _count(
        self,
        previous: NDArray[np.integer[Any]],
        targets: NDArray[np.integer[Any]],
        escaped: NDArray[np.bool_] | None,
    ) -> NDArray[np.int64]:
        try:
            total: NDArray[np.int64] = self.base_bytes[targets].astype(np.int64)
            total += self.has_leading_space[targets] & ~self.is_boundary[previous]
            if self.escape is not None and escaped is not None:
                total[escaped] += self.escape.bytes[targets[escaped]]
        except IndexError as error:
            raise DataError(
                f"a token id is outside the vocabulary of {len(self)}; use the tokenizer the tokens were made with"
            ) from error
        return total


def _escaped(escapes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens follow an escape that acts (T,): in a run of escapes the first, the third, … do."""
    places = np.arange(len(escapes))
    begins = np.maximum.accumulate(np.where(escapes, 0, places + 1))  # where the run of escapes begins, in a run
    acting = escapes & ((places - begins) % 2 == 0)
    return np.concatenate(([False], acting[:-1]))


class Decoder(Protocol):
    """What the check needs of a tokenizer."""

    @property
    def bos_id(self) -> int:
        """The id every document begins with."""
        ...

    def decode(self, ids: Tokens) -> str:
        """The text of `ids`."""
        ...

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """The table to check."""
        ...


@dataclass(frozen=True, slots=True)
class ByteCheck:
    """The byte table held against the text itself.

    Attributes:
        documents: documents decoded.
        tokens: tokens in them, BOS included.
        table_bytes: UTF-8 bytes by the table.
        text_bytes: UTF-8 bytes of the decoded documents.
        mismatched: documents where the two differ. The last one may only be cut in the middle of a character.
    """

    documents: int
    tokens: int
    table_bytes: int
    text_bytes: int
    mismatched: int

    @property
    def exact(self) -> bool:
        """Whether the table is right for every document."""
        return self.mismatched == 0


def split_documents(tokens: Tokens, bos_id: int) -> Iterator[Tokens]:
    """The documents of a token stream, without their BOS; what precedes the first BOS is a document too."""
    edges = [*np.flatnonzero(tokens == bos_id).tolist(), len(tokens)]
    if edges[0] > 0:
        yield tokens[: edges[0]]
    for start, stop in pairwise(edges):
        yield tokens[start + 1 : stop]


def check_bytes(tokenizer: Decoder, tokens: Tokens) -> ByteCheck:
    """Decode `tokens` (N,) document by document and compare the table's byte count with the text's true UTF-8 length.

    The text is what the tokens decode to: a tokenizer that normalises is measured on the normalised text.

    Raises:
        DataError: an id lies outside the vocabulary.
    """
    table = tokenizer.byte_table()
    documents = table_bytes = text_bytes = mismatched = 0
    for document in split_documents(tokens, tokenizer.bos_id):
        by_table = int(table.count_document(document, tokenizer.bos_id).sum())
        by_text = len(tokenizer.decode(document).encode())
        documents += 1
        table_bytes += by_table
        text_bytes += by_text
        mismatched += by_table != by_text
    return ByteCheck(documents, len(tokens), table_bytes, text_bytes, mismatched)
