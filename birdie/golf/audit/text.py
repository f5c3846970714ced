"""Byte accounting held against the text itself: the denominator of bits per byte is where a score goes wrong quietly.

    tokens ──decode──► text ──► UTF-8 bytes ─┐
       └── table or sidecar ──► bytes said ──┴──► equal, or by how much not and which pieces are to blame

`check_bytes` decodes a stream; `check_table` needs none and names what a foreign table has wrong: bytes of a byte piece
by its name (openai/parameter-golf #1143: 3 instead of 1), no piece for a lone space (#897), the leading space counted
twice (#1545), bytes for control tokens, spaces charged after a boundary, normalisation that loses text (#755).
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from birdie.data import caseops
from birdie.data.byte_accounting import ByteTable, Tokens
from birdie.data.tokenizer import RESERVED, SPACE, Tokenizer
from birdie.errors import DataError
from birdie.golf.audit.rules import BYTES, Finding, Verdict
from birdie.runtime.callbacks import Progress

CONTROL, OPERATOR, BYTE, LONE, WORD, PLAIN = range(6)
KINDS = ("control", "operator", "byte", "lone space", "word-initial", "ordinary")
"""What pieces there are: for no text, for no text but within one, for one byte, "▁", "▁word", and all else."""

NEAR = 1e-4
"""Of the text's bytes: less is no proof, as tables of the challenge's own exports were off by 7e-5 on its own text."""

_LEFT = "\ufffd"  # what a decoder makes of a byte that is no UTF-8
_SAMPLES = (
    *("Hello WORLD, iPhone 4s", "naïve café, Ångström", "“quoted” – don't…", "1,234.50 € = ½", "日本語のテキスト"),
    *("Москва и Ωmega", "🙂 emoji 👩‍🚀", "a_b-c/d@e.com #tag", "tab\tand\nnewline", "x² + y₂ ≠ ∞"),
)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a vocabulary of V.

    Attributes:
        kinds: (V,) uint8, CONTROL, BYTE, ….
        names: as the tokenizer spells them.
        lengths: (V,) int64, UTF-8 bytes of a piece without one leading space; of a byte 1, of controls and operators 0.
        marks_spaces: whether spaces are written as "▁", as SentencePiece does.
    """

    kinds: NDArray[np.uint8]
    names: tuple[str, ...]
    lengths: NDArray[np.int64]
    marks_spaces: bool

    def __len__(self) -> int:
        return len(self.names)

    @property
    def has_lone_space(self) -> bool:
        """Whether a space by itself is one piece."""
        return bool((self.kinds == LONE).any()) or not self.marks_spaces

    def some(self, ids: NDArray[np.integer[Any]], most: int = 3) -> str:
        """The first of `ids` by name."""
        shown = ", ".join(repr(self.names[int(i)]) for i in ids[:most])
        return f"{shown}, …" if len(ids) > most else shown


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """What the pieces of `tokenizer` are."""
    if not tokenizer.model_bytes:
        names = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = np.array([CONTROL] * 4 + [BYTE] * 256, np.uint8)
        return Pieces(kinds, tuple(names), (kinds == BYTE).astype(np.int64), marks_spaces=False)
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(tokenizer.model_bytes)
    kinds = np.empty(model.vocab_size(), np.uint8)
    names, lengths = [], np.zeros(len(kinds), np.int64)
    for i in range(len(kinds)):
        name = str(model.id_to_piece(i))
        operator = tokenizer.kind == "caseops" and 0 <= i - RESERVED < len(caseops.OPERATORS)
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            kinds[i] = CONTROL
        elif operator:
            kinds[i] = OPERATOR
        elif model.is_byte(i):
            kinds[i], lengths[i] = BYTE, 1
        else:
            kinds[i] = LONE if name == SPACE else WORD if name.startswith(SPACE) else PLAIN
            lengths[i] = len(name.removeprefix(SPACE).encode())
        names.append(name)
    return Pieces(kinds, tuple(names), lengths, marks_spaces=True)


@dataclass(frozen=True, slots=True)
class Bug:
    """One thing a byte table has wrong.

    Attributes:
        name: of the mistake.
        pieces: how many entries have it.
        examples: some of them.
        more: bytes it adds to each piece, at most.
    """

    name: str
    pieces: int
    examples: str
    more: int


def bugs(table: ByteTable, tokenizer: Tokenizer) -> tuple[Bug, ...]:
    """What `table` has wrong for `tokenizer`; its rows beyond the vocabulary are not looked at.

    Raises:
        DataError: it has fewer rows than the tokenizer has pieces.
    """
    pieces = pieces_of(tokenizer)
    size = len(pieces)
    if len(table) < size:
        raise DataError(f"the byte table has {len(table):,} rows, the tokenizer {size:,} pieces; give all of them")
    base = table.base_bytes[:size].astype(np.int64)
    spaced, boundary = table.has_leading_space[:size], table.is_boundary[:size]
    off = base - pieces.lengths
    kinds, text = pieces.kinds, pieces.kinds != CONTROL
    marked = (kinds == LONE) | (kinds == WORD)
    literal = np.array([len(name.encode()) for name in pieces.names])
    letters = np.array([len(name.removeprefix(SPACE)) for name in pieces.names])
    own_mark = marked & (base == literal)  # "▁" is three bytes of UTF-8
    as_bytes = kinds == BYTE
    plain = (kinds == PLAIN) | (marked & ~own_mark)
    by_letters = plain & (off != 0) & (base == letters)
    found = (
        ("byte pieces measured by their names (<0xNN> is 6 characters, and stands for 1 byte)", as_bytes & (base == 6)),
        ("byte pieces counted as 3 bytes instead of 1", as_bytes & (base == 3)),
        ("byte pieces not counted as 1 byte", as_bytes & (base != 1) & (base != 3) & (base != 6)),
        ("the space mark ▁ counted as the 3 bytes it is written with", own_mark),
        ("leading space counted twice, in the table and by the rule", marked & spaced & (off == 1) & ~own_mark),
        ("leading space in the table, so that it counts after BOS too", marked & ~spaced & (off == 1) & ~own_mark),
        ("leading space not counted", marked & ~spaced & (off <= 0) & ~own_mark),
        ("characters counted instead of bytes", by_letters),
        ("bytes counted for control tokens", ((kinds == CONTROL) | (kinds == OPERATOR)) & (base != 0)),
        ("a space counted for pieces that begin with none", spaced & ~marked),
        ("spaces charged after control tokens, where the text has none", (kinds == CONTROL) & ~boundary),
        ("spaces not charged after pieces of text", text & boundary),
        ("bytes that are not those of the piece", plain & (off != 0) & ~by_letters & ~(marked & (off == 1))),
    )
    named = [
        Bug(name, int(where.sum()), pieces.some(np.flatnonzero(where)), int(off[where].max()))
        for name, where in found
        if where.any()
    ]
    if not pieces.has_lone_space:
        said = f"no piece for a lone space: {SPACE} becomes three byte pieces, so a space counts as 3 bytes (#897)"
        named.append(Bug(said, 1, repr(SPACE), 2))
    if lost := list(_lost(tokenizer)):
        said = (
            "the tokenizer's normalisation loses text that the challenge's keeps (its bytes are counted all the same)"
        )
        named.append(Bug(said, len(lost), ", ".join(f"{a!r} → {b!r}" for a, b in lost[:2]), 0))
    return tuple(named)


def _lost(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """(text, what came back) that the challenge's normalisation (NFKC, one space a run) does not make the same."""
    for sample in _SAMPLES:
        kept = " ".join(unicodedata.normalize("NFKC", sample).split())
        back = tokenizer.decode(tokenizer.encode(sample))
        if " ".join(unicodedata.normalize("NFKC", back).split()) != kept:
            yield sample, back


def check_table(
    table: ByteTable, tokenizer: Tokenizer, *, tokens: Tokens | None = None, path: str | None = None
) -> tuple[Finding, ...]:
    """Judge a table that somebody else made: one finding for each thing it has wrong, or one that it is right.

    Args:
        table: base bytes, leading spaces and boundaries by token id.
        tokenizer: it is said to be of.
        tokens: a stream (N,); what the mistakes come to on it is told.
        path: where the table is from.

    Raises:
        DataError: it has fewer rows than the tokenizer has pieces.
    """
    found = bugs(table, tokenizer)
    if not found:
        said = f"the table of {tokenizer.name} gives each of {tokenizer.vocab_size:,} pieces its own bytes"
        return (Finding(BYTES, "pass", said, "byte table", path),)
    worth = "" if tokens is None else _worth(table, tokenizer, tokens)
    return tuple(
        Finding(BYTES, "fail", f"{bug.name}: {bug.pieces:,} ({bug.examples}){worth}", "byte table", path)
        for bug in found
    )


def _worth(table: ByteTable, tokenizer: Tokenizer, tokens: Tokens) -> str:
    said = int(table.count_document(tokens, tokenizer.bos_id).sum())
    true = sum(length for _, length in _lengths(tokenizer, tokens))
    return (
        f"; on {len(tokens):,} tokens the table counts {said:,} bytes, the text has {true:,} ({said / true - 1:+.2%})"
    )


def check_bytes(
    tokenizer: Tokenizer,
    tokens: Tokens,
    counts: ByteTable | NDArray[np.integer[Any]] | None = None,
    *,
    path: str | None = None,
    progress: Progress | None = None,
) -> tuple[Finding, ...]:
    """Decode `tokens` (N,) document by document and compare their bytes with those that are charged for them.

    Equality passes. A document that is cut in the middle of a character is compared without its last bytes.

    Args:
        tokenizer: made the tokens.
        tokens: a stream.
        counts: the table, or the bytes of each token (N,), as a sidecar has them; None: the tokenizer's own table.
        path: where the counts are from.
        progress: called with (tokens done, tokens in all).
    """
    pieces = pieces_of(tokenizer)
    true = _true_table(pieces, tokenizer)
    charged = true if counts is None else counts
    said = text = wrong = documents = 0
    off = np.zeros((2, len(pieces)))  # by token: bytes too many, and how far off whichever way
    first: str | None = None
    for part, length in _lengths(tokenizer, tokens, pieces, progress):
        given = _charged(charged, tokens[part], part, tokenizer.bos_id)
        by_count = int(given.sum())
        documents += 1
        said, text = said + by_count, text + length
        if by_count != length:
            wrong += 1
            first = first or f"document {documents:,} first: {by_count:,} instead of {length:,}"
            more = given - true.count_document(tokens[part], tokenizer.bos_id)
            for row, weights in zip(off, (more, np.abs(more)), strict=True):
                row += np.bincount(tokens[part], weights=weights, minlength=len(pieces))
    source = "the table" if isinstance(charged, ByteTable) else "the sidecar"
    if not wrong and pieces.has_lone_space:
        same = f"{source} counts {said:,} bytes for {documents:,} documents, which are those of their decoded text"
        return (Finding(BYTES, "pass", same, "decoded text", path),)
    verdict: Verdict = "unknown" if abs(said - text) <= NEAR * text else "fail"
    evidence = (
        f"{source} counts {said:,} bytes and the decoded text has {text:,} ({said - text:+,}, "
        f"{said / max(1, text) - 1:+.2%}); {wrong:,} of {documents:,} documents differ, {first or 'none'}"
    )
    if blame := _blame(off, pieces):
        evidence += f"; {blame}"
    if not pieces.has_lone_space:
        evidence += f"; the vocabulary has no piece for a lone space, so {SPACE} is three byte pieces (#897)"
    return (Finding(BYTES, verdict, evidence, "decoded text", path),)


def _true_table(pieces: Pieces, tokenizer: Tokenizer) -> ByteTable:
    """Bytes by the kinds of pieces: the tokenizer's own table, which refuses a vocabulary without a lone space."""
    if pieces.has_lone_space:
        return tokenizer.byte_table()
    marked = (pieces.kinds == LONE) | (pieces.kinds == WORD)
    return ByteTable(pieces.lengths.astype(np.int16), marked, pieces.kinds == CONTROL)


def _charged(
    counts: ByteTable | NDArray[np.integer[Any]], tokens: Tokens, part: slice, bos_id: int
) -> NDArray[np.int64]:
    """Bytes that each of `tokens`, the places `part` of the stream, is charged with."""
    if isinstance(counts, ByteTable):
        return counts.count_document(tokens, bos_id)
    return counts[part].astype(np.int64)


def _lengths(
    tokenizer: Tokenizer, tokens: Tokens, pieces: Pieces | None = None, progress: Progress | None = None
) -> Iterator[tuple[slice, int]]:
    """(places of a document with its BOS, UTF-8 bytes of its text) for each document of a stream."""
    pieces = pieces or pieces_of(tokenizer)
    begins = np.flatnonzero(tokens == tokenizer.bos_id).tolist()
    if not begins or begins[0] > 0:
        begins.insert(0, 0)
    for number, begin in enumerate(begins):
        end = begins[number + 1] if number + 1 < len(begins) else _whole_end(tokenizer, tokens, begin, pieces)
        text = tokenizer.decode(tokens[begin:end])
        if not pieces.has_lone_space:  # what was a space comes back from its three bytes as the mark itself
            text = text.replace(SPACE, " ")
        yield slice(begin, end), len(text.encode())
        if progress is not None:
            progress(end, len(tokens))


def _whole_end(tokenizer: Tokenizer, tokens: Tokens, begin: int, pieces: Pieces) -> int:
    """Where the last document ends without the bytes of a character that the stream cuts."""
    end = len(tokens)
    for cut in range(min(4, end - begin)):
        if not tokenizer.decode(tokens[begin : end - cut]).endswith(_LEFT):
            return end - cut
        if pieces.kinds[int(tokens[end - cut - 1])] != BYTE:
            break
    return end


def _blame(off: NDArray[np.float64], pieces: Pieces) -> str:
    """Which kinds of pieces are charged other bytes than they have, and by how much."""
    told = []
    for kind, name in enumerate(KINDS):
        of_kind = pieces.kinds == kind
        if off[1, of_kind].any():
            far = np.where(of_kind, off[1], 0)
            worst = np.argsort(-far)[:3]
            told.append(f"{int(off[0, of_kind].sum()):+,} by {name} pieces ({pieces.some(worst[far[worst] > 0])})")
    return ", ".join(told)
