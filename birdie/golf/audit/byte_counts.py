"""Byte accounting against the text: the denominator of bits per byte is where a score goes wrong without a sign.

    tokens ──decode──► text ──► UTF-8 bytes ──┐
       └── table or sidecar ──► bytes counted ┴──► equal, or the difference and the pieces that are at fault

`check_counts` decodes a stream; `check_table` needs none and compares a foreign table with the pieces. Scores were too
good by byte pieces counted by their names (parameter-golf#1143: 3 instead of 1), no piece for a lone space (#897), the
leading space counted twice (#1545), and a normalization that loses text (#755).
"""

import unicodedata
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.golf.audit.rules import BYTES, Finding, Result
from birdie.gpt.data import caseops
from birdie.gpt.data.byte_accounting import ByteTable, Tokens, check_bytes, counted_bytes
from birdie.gpt.data.tokenizer import RESERVED, SPACE, Tokenizer
from birdie.system.callbacks import Progress, no_progress

CONTROL, OPERATOR, BYTE, LONE, WORD, PLAIN = range(6)
KINDS = ("control", "operator", "byte", "lone space", "word-initial", "ordinary")
"""Kinds of pieces: no text, no text but an effect on others, one byte, "▁", "▁word", and all else."""
TOLERANCE = 1e-4
"""Share of the text's bytes below which a difference proves nothing: published tables miss their text by 7e-5."""

_SAMPLES = (
    *("Hello WORLD, iPhone 4s", "naïve café, Ångström", "“quoted” – don't…", "1,234.50 € = ½", "日本語のテキスト"),
    *("Москва и Ωmega", "🙂 emoji 👩‍🚀", "a_b-c/d@e.com #tag", "tab\tand\nnewline", "x² + y₂ ≠ ∞"),
)


class Pieces(NamedTuple):
    """The pieces of a vocabulary of V.

    Attributes:
        kinds: (V,) uint8, CONTROL, BYTE, ….
        names: as the tokenizer spells them.
        lengths: (V,) int64, UTF-8 bytes without one leading space; of a byte 1, of controls and operators 0.
        has_lone_space: whether a space by itself is one piece.
    """

    kinds: NDArray[np.uint8]
    names: tuple[str, ...]
    lengths: NDArray[np.int64]
    has_lone_space: bool

    def examples(self, ids: NDArray[np.integer[Any]], count: int = 3) -> str:
        """Return the names of the first of `ids`."""
        shown = ", ".join(repr(self.names[int(i)]) for i in ids[:count])
        return f"{shown}, …" if len(ids) > count else shown


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """Return the pieces of `tokenizer`."""
    if not tokenizer.model_bytes:
        names = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = np.array([CONTROL] * 4 + [BYTE] * 256, np.uint8)
        return Pieces(kinds, tuple(names), (kinds == BYTE).astype(np.int64), has_lone_space=True)
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(tokenizer.model_bytes)
    names = [str(model.id_to_piece(i)) for i in range(model.vocab_size())]
    kinds, lengths = np.empty(len(names), np.uint8), np.zeros(len(names), np.int64)
    for i, name in enumerate(names):
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
            kinds[i] = CONTROL
        elif tokenizer.kind == "caseops" and 0 <= i - RESERVED < len(caseops.OPERATORS):
            kinds[i] = OPERATOR
        elif model.is_byte(i):
            kinds[i], lengths[i] = BYTE, 1
        else:
            kinds[i] = LONE if name == SPACE else WORD if name.startswith(SPACE) else PLAIN
            lengths[i] = len(name.removeprefix(SPACE).encode())
    return Pieces(kinds, tuple(names), lengths, bool((kinds == LONE).any()))


def table_mistakes(table: ByteTable, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the mistakes of `table` for `tokenizer`; its rows beyond the vocabulary do not matter."""
    pieces = pieces_of(tokenizer)
    size, truth = len(pieces.names), _table_of(pieces)
    if len(table) < size:
        raise DataError(f"the byte table has {len(table):,} rows, the tokenizer {size:,} pieces; give all of them")
    mistakes = []
    for column in ("base_bytes", "has_leading_space", "is_boundary"):
        right, counted = getattr(truth, column), getattr(table, column)[:size]
        for kind, name in enumerate(KINDS):
            ids = np.flatnonzero((counted != right) & (pieces.kinds == kind))
            if len(ids):
                first = f"{counted[ids[0]]} instead of {right[ids[0]]}"
                mistakes.append(f"{column} of {len(ids):,} {name} pieces ({pieces.examples(ids)}), the first {first}")
    if not pieces.has_lone_space:
        mistakes.append(f"no piece for a lone space: {SPACE} becomes three byte pieces, so a space counts 3 (#897)")
    if lost := [sample for sample in _SAMPLES if _normalized(_roundtrip(tokenizer, sample)) != _normalized(sample)]:
        mistakes.append(f"the tokenizer's normalization loses text that the challenge's keeps: {lost[0]!r}")
    return tuple(mistakes)


def _roundtrip(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text))


def _normalized(text: str) -> str:
    """Return `text` as the challenge's normalization has it: NFKC, and no runs of spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def check_table(table: ByteTable, tokenizer: Tokenizer, *, path: str | None = None) -> tuple[Finding, ...]:
    """Return one finding for each mistake of a table of `tokenizer`, or one that it is right; `path` is its origin."""
    mistakes = [Finding(BYTES, "fail", mistake, "byte table", path) for mistake in table_mistakes(table, tokenizer)]
    evidence = f"the table of {tokenizer.name} gives each of {tokenizer.vocab_size:,} pieces its bytes"
    return tuple(mistakes) or (Finding(BYTES, "pass", evidence, "byte table", path),)


def check_counts(
    tokenizer: Tokenizer,
    tokens: Tokens,
    counts: ByteTable | NDArray[np.integer[Any]] | None = None,
    *,
    path: str | None = None,
    progress: Progress = no_progress,
) -> Finding:
    """Return whether the bytes counted for `tokens` are those of their text, and which pieces are at fault.

    Args:
        tokenizer: the tokenizer of the tokens.
        tokens: (N,) a stream.
        counts: the table, or the bytes of each token (N,), as a sidecar has them; None: the tokenizer's own table.
        path: origin of the counts.
        progress: reports tokens.
    """
    pieces = pieces_of(tokenizer)
    truth = tokenizer.byte_table() if pieces.has_lone_space else _table_of(pieces)
    counts = truth if counts is None else counts
    decoder = tokenizer if pieces.has_lone_space else _SpaceOfBytes(tokenizer)
    check = check_bytes(decoder, tokens, counts, progress=progress)
    source = "the table" if isinstance(counts, ByteTable) else "the sidecar"
    count, text, documents = check.table_bytes, check.text_bytes, check.documents
    if check.exact and pieces.has_lone_space:
        evidence = f"{source} counts {count:,} bytes for {documents:,} documents, which are those of their decoded text"
        return Finding(BYTES, "pass", evidence, "decoded text", path)
    excess = np.zeros((2, len(pieces.names)))  # by token: bytes too many, and the sum of absolute differences
    first = "none"
    for document in reversed(check.wrong):
        first = f"document {document.number:,} first: {document.table_bytes:,} instead of {document.text_bytes:,}"
        part = document.positions
        more = counted_bytes(counts, tokens, part, tokenizer.bos_id)
        more = more - truth.count_document(tokens[part], tokenizer.bos_id)
        for row, weights in zip(excess, (more, np.abs(more)), strict=True):
            row += np.bincount(tokens[part], weights=weights, minlength=len(pieces.names))
    result: Result = "unknown" if abs(count - text) <= TOLERANCE * text else "fail"
    evidence = f"{source} counts {count:,} bytes and the decoded text has {text:,} ({count - text:+,}, "
    evidence += f"{count / max(1, text) - 1:+.2%}); {len(check.wrong):,} of {documents:,} documents differ, {first}"
    if faults := _faults(excess, pieces):
        evidence += f"; {faults}"
    if not pieces.has_lone_space:
        evidence += f"; the vocabulary has no piece for a lone space, so {SPACE} is three byte pieces (#897)"
    return Finding(BYTES, result, evidence, "decoded text", path)


class _SpaceOfBytes:
    """A tokenizer whose vocabulary has no lone space: a space comes back from its three bytes as the mark itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bos_id, self.byte_table, self._tokenizer = tokenizer.bos_id, tokenizer.byte_table, tokenizer

    def decode(self, ids: Tokens) -> str:
        return self._tokenizer.decode(ids).replace(SPACE, " ")


def _table_of(pieces: Pieces) -> ByteTable:
    """Return the bytes by the kinds of pieces; the tokenizer refuses a table for a vocabulary without a lone space."""
    marked = (pieces.kinds == LONE) | (pieces.kinds == WORD)
    return ByteTable(pieces.lengths.astype(np.int16), marked, pieces.kinds == CONTROL)


def _faults(excess: NDArray[np.float64], pieces: Pieces) -> str:
    """Return which kinds of pieces are counted with other bytes than they have, and the sum."""
    parts = []
    for kind, name in enumerate(KINDS):
        of_kind = pieces.kinds == kind
        if excess[1, of_kind].any():
            size = np.where(of_kind, excess[1], 0)
            worst = np.argsort(-size)[:3]
            parts.append(
                f"{int(excess[0, of_kind].sum()):+,} by {name} pieces ({pieces.examples(worst[size[worst] > 0])})"
            )
    return ", ".join(parts)
