"""UTF-8 bytes of each token: the denominator of bits per byte.

    bytes(target | previous) = base_bytes[target] + (has_leading_space[target] and not is_boundary[previous])

The leading space of a token counts one byte, except right after a boundary (BOS), where the text has no space. The rule
is the challenge's own. Two mistakes give a wrong score without an error: counting byte pieces by their name ("<0xE2>"
is 6 characters but stands for 1 byte) and counting the space twice. So `check_bytes` compares the table with the text
that the tokens decode to.

The operators of CaseOps (`gpt.data.caseops`) count no bytes, but after an escape the text has the operator itself:

    tokens   BOS  TITLE  he  llo  ▁  ESCAPE  TITLE
    bytes     0     0     2   3   1     0      3

In a run of escapes, every second one is itself escaped. So only `count_document`, which sees the whole run, is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.system.callbacks import Progress, no_progress

Tokens = NDArray[np.uint16]

TOLERANCE = 1e-3
"""Relative error allowed in a byte count: the challenge's own table is off by up to 7e-5 on its own text."""


@dataclass(frozen=True, slots=True)
class Escape:
    """A token after which an operator stands for itself.

    Attributes:
        bytes: (V,) int16, bytes that each token counts when escaped, in addition to its base bytes.
    """

    id: int
    bytes: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class ByteTable:
    """UTF-8 bytes of every token id of a vocabulary of V.

    Attributes:
        base_bytes: (V,) int16, bytes of the piece without its leading space.
        has_leading_space: (V,) bool, the piece begins with a space.
        is_boundary: (V,) bool, a space directly after this token is not part of the text (control, unknown, unused).
        escape: the escape token, if the vocabulary has one.
    """

    base_bytes: NDArray[np.int16]
    has_leading_space: NDArray[np.bool_]
    is_boundary: NDArray[np.bool_]
    escape: Escape | None = None

    def __len__(self) -> int:
        return len(self.base_bytes)

    def count(self, previous: NDArray[np.integer[Any]], targets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the bytes of each of `targets` after the token in `previous`, int64; all three have one shape.

        An escape in `previous` counts as active.
        """
        escaped = None if self.escape is None else previous == self.escape.id
        return self._count(previous, targets, escaped)

    def count_document(self, tokens: NDArray[np.integer[Any]], bos_id: int) -> NDArray[np.int64]:
        """Return the bytes of each of `tokens` (T,): one document without its BOS, or several documents with theirs."""
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
                f"a token id is outside the vocabulary of {len(self)}; use the tokenizer that produced the tokens"
            ) from error
        return total


def _escaped(escapes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask (T,) of the tokens after an active escape: in a run the first, the third, … escape is active."""
    positions = np.arange(len(escapes))
    run_starts = np.maximum.accumulate(np.where(escapes, 0, positions + 1))  # start of the run a position belongs to
    active = escapes & ((positions - run_starts) % 2 == 0)
    return np.concatenate(([False], active[:-1]))


class TokenDecoder(Protocol):
    """Part of a tokenizer that `check_bytes` needs."""

    @property
    def bos_id(self) -> int:
        """First token of every document."""
        ...

    def decode(self, ids: Tokens) -> str:
        """Return the text of `ids`."""
        ...

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """Return the table to check."""
        ...


@dataclass(frozen=True, slots=True)
class WrongDocument:
    """A document whose bytes are not counted as its text has them: its number, from 1."""

    number: int
    table_bytes: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class ByteCheck:
    """Comparison of counted bytes with the decoded text.

    Attributes:
        documents: number of decoded documents.
        table_bytes: UTF-8 bytes according to the table, or to the sidecar.
        text_bytes: UTF-8 bytes of the decoded documents.
        wrong: documents where the two differ.
    """

    documents: int
    tokens: int
    table_bytes: int
    text_bytes: int
    wrong: tuple[WrongDocument, ...] = ()

    @property
    def exact(self) -> bool:
        """True if the bytes are right for every document."""
        return not self.wrong


def split_documents(tokens: Tokens, bos_id: int) -> Iterator[Tokens]:
    """Yield the documents of `tokens` (N,) without their BOS; tokens before the first BOS are a document too."""
    edges = [*np.flatnonzero(tokens == bos_id).tolist(), len(tokens)]
    if edges[0] > 0:
        yield tokens[: edges[0]]
    for start, stop in pairwise(edges):
        yield tokens[start + 1 : stop]


def check_bytes(
    tokenizer: TokenDecoder,
    tokens: Tokens,
    counts: ByteTable | NDArray[np.integer[Any]] | None = None,
    *,
    progress: Progress = no_progress,
) -> ByteCheck:
    """Decode `tokens` (N,) by document and compare the bytes that are counted with the UTF-8 length of the text.

    A tokenizer that normalizes is compared with the normalized text, which its tokens decode to. A last document that
    is cut in the middle of a character is compared without the bytes of that character.

    Args:
        counts: the table, or the bytes of each token (N,), as a sidecar has them; None: the tokenizer's own table.
    """
    counts = tokenizer.byte_table() if counts is None else counts
    if not len(tokens):
        return ByteCheck(0, 0, 0, 0)
    begins = np.flatnonzero(tokens == tokenizer.bos_id).tolist()
    if not begins or begins[0] > 0:
        begins.insert(0, 0)
    table_bytes = text_bytes = 0
    wrong = []
    for number, (begin, end) in enumerate(pairwise((*begins, _end_of_text(tokenizer, tokens, begins[-1]))), 1):
        part = slice(begin, end)
        by_table = int(counted_bytes(counts, tokens, part, tokenizer.bos_id).sum())
        by_text = len(tokenizer.decode(tokens[part]).encode())
        if by_table != by_text:
            wrong.append(WrongDocument(number, by_table, by_text))
        table_bytes, text_bytes = table_bytes + by_table, text_bytes + by_text
        progress(end, len(tokens))
    return ByteCheck(len(begins), len(tokens), table_bytes, text_bytes, tuple(wrong))


def counted_bytes(
    counts: ByteTable | NDArray[np.integer[Any]], tokens: Tokens, document: slice, bos_id: int
) -> NDArray[np.int64]:
    """Return the bytes of each token of a document by a table, or by the bytes of each token of the stream."""
    if isinstance(counts, ByteTable):
        return counts.count_document(tokens[document], bos_id)
    return counts[document].astype(np.int64)


def _end_of_text(tokenizer: TokenDecoder, tokens: Tokens, begin: int) -> int:
    """Return the end of the last document, before the up to three bytes of a character that the stream cuts."""
    for end in range(len(tokens), max(begin, len(tokens) - 4), -1):
        if not tokenizer.decode(tokens[begin:end]).endswith("\ufffd"):  # the replacement of what is no UTF-8
            return end
    return len(tokens)
