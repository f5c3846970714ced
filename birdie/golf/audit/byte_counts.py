"""Byte accounting against the text: the denominator of bits per byte is where a score goes wrong without a sign.

    tokens ──decode──► text ──► UTF-8 bytes ──┐
       └── table or sidecar ──► bytes counted ┴──► equal, or the difference and the first document

`check_counts` decodes a stream; `check_table` needs none and compares a foreign table with the tokenizer's. Scores were
too good by byte pieces counted by their names (parameter-golf#1143: 3 instead of 1), no piece for a lone space (#897),
the leading space counted twice (#1545), and a normalization that loses text (#755).
"""

import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.golf.audit.rules import BYTES, Finding
from birdie.gpt.data.byte_accounting import ByteTable, Tokens, check_bytes
from birdie.gpt.data.tokenizer import Tokenizer
from birdie.system.callbacks import Progress, no_progress

TOLERANCE = 1e-4
"""Share of the text's bytes below which a difference proves nothing: published tables miss their text by 7e-5."""

_SAMPLES = (
    *("Hello WORLD, iPhone 4s", "naïve café, Ångström", "“quoted” – don't…", "1,234.50 € = ½", "日本語のテキスト"),
    *("Москва и Ωmega", "🙂 emoji 👩‍🚀", "a_b-c/d@e.com #tag", "tab\tand\nnewline", "x² + y₂ ≠ ∞"),
)


def check_table(table: ByteTable, tokenizer: Tokenizer, *, path: str | None = None) -> tuple[Finding, ...]:
    """Return one finding for each mistake of a table of `tokenizer`, or one that it is right.

    Args:
        table: bytes of each id; rows beyond the vocabulary do not matter.

    Raises:
        DataError: the table is shorter than the vocabulary.
    """
    mistakes = [Finding(BYTES, "fail", mistake, "byte table", path) for mistake in _mistakes(table, tokenizer)]
    evidence = f"the table of {tokenizer.name} gives each of {tokenizer.vocab_size:,} pieces its bytes"
    return tuple(mistakes) or (Finding(BYTES, "pass", evidence, "byte table", path),)


def _mistakes(table: ByteTable, tokenizer: Tokenizer) -> Iterator[str]:
    size = tokenizer.vocab_size
    if len(table) < size:
        raise DataError(f"the byte table has {len(table):,} rows, the tokenizer {size:,} pieces; give all of them")
    try:
        truth = tokenizer.byte_table()
    except DataError as error:  # no lone space
        yield str(error)
    else:
        for column in ("base_bytes", "has_leading_space", "is_boundary"):
            right, counted = getattr(truth, column), getattr(table, column)[:size]
            if len(ids := np.flatnonzero(counted != right)):
                first = f"the first of id {ids[0]:,}: {counted[ids[0]]} instead of {right[ids[0]]}"
                yield f"{column} of {len(ids):,} of {size:,} pieces, {first}"
    for sample in _SAMPLES:
        if _normalized(tokenizer.decode(tokenizer.encode(sample))) != _normalized(sample):
            yield f"the tokenizer's normalization loses text that the challenge's keeps: {sample!r}"
            return


def _normalized(text: str) -> str:
    """Return `text` as the challenge's normalization has it: NFKC, and no runs of spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def check_counts(
    tokenizer: Tokenizer,
    tokens: Tokens,
    counts: ByteTable | NDArray[np.integer[Any]],
    *,
    path: str | None = None,
    progress: Progress = no_progress,
) -> Finding:
    """Return whether the bytes counted for `tokens` are those of their text.

    Args:
        tokens: (N,) a stream.
        counts: a table, or the bytes of each token (N,), as a sidecar has them.
    """
    check = check_bytes(tokenizer, tokens, counts, progress=progress)
    source = "the table" if isinstance(counts, ByteTable) else "the sidecar"
    count, text, documents = check.table_bytes, check.text_bytes, check.documents
    if check.exact:
        evidence = f"{source} counts {count:,} bytes for {documents:,} documents, which are those of their decoded text"
        return Finding(BYTES, "pass", evidence, "decoded text", path)
    evidence = f"{source} counts {count:,} bytes and the decoded text has {text:,} ({count - text:+,}, "
    evidence += f"{count / max(1, text) - 1:+.2%}); {len(check.wrong):,} of {documents:,} documents differ"
    for document in check.wrong[:1]:
        wrong = f"{document.table_bytes:,} instead of {document.text_bytes:,}"
        evidence += f", document {document.number:,} first: {wrong}"
    proves = abs(count - text) > TOLERANCE * text
    return Finding(BYTES, "fail" if proves else "unknown", evidence, "decoded text", path)
