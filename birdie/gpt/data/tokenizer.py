"""Tokenizers: raw bytes, and SentencePiece BPE (loaded from a `.model`, or trained).

All use pad 0, bos 1, eos 2, unk 3. Ids are uint16, as in the shards. `encode` adds no BOS; a document in a shard is BOS
+ tokens. A vocabulary that birdie trains keeps every byte of a text. The challenge's own normalize (NFKC; runs of
whitespace become one space), so decoding gives the normalized text.

A model that reserves ids 4 to 7 for the operators of CaseOps (`birdie.gpt.data.caseops`) applies them before and after:

    text ─► normalized ─► caseops.encode ─► pieces ─► ids ─► pieces ─► caseops.decode ─► normalized text
"""

import hashlib
import io
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.gpt.data import caseops
from birdie.gpt.data.byte_accounting import ByteTable, Escape, Tokens
from birdie.gpt.data.shards import MAX_VOCAB
from birdie.system.files import write_bytes
from birdie.system.regular import regular_file

Kind = Literal["bytes", "sentencepiece", "caseops"]

SPACE = "\u2581"  # SentencePiece's character for a space
RESERVED = 4  # number of control ids of every tokenizer; the operators of CaseOps come next
_OPERATOR_IDS = range(RESERVED, RESERVED + len(caseops.OPERATORS))
_PROBE = " \t a\r\n\n\u00a0\ufb01\u212b\u0301  "  # what every normalization of SentencePiece changes
SAMPLE_BYTES = 32_000_000  # of text for training a vocabulary: takes seconds, and more text hardly changes a merge

_TRAINER: dict[str, Any] = {
    "model_type": "bpe",
    "character_coverage": 0.999,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,  # an indentation is one piece
    "add_dummy_prefix": False,
    "required_chars": SPACE,  # without this piece a space would become the bytes of "\u2581"
    "hard_vocab_limit": False,
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "max_sentence_length": 1 << 30,  # bytes; SentencePiece skips longer texts silently, by default above 4,192
    "num_threads": 4,  # fixed: the model file records it, and the same text must give the same file on every machine
    "minloglevel": 2,
}


class Tokenizer(Protocol):
    """Encoder from text to token ids, and decoder back to text."""

    @property
    def kind(self) -> Kind:
        """Family of the tokenizer."""
        ...

    @property
    def name(self) -> str:
        """Name made of family and vocabulary size: "byte260", "sp1024", "sp1024_caseops"."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def bos_id(self) -> int:
        """First token of every document."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the tokenizer's definition: equal digests mean equal tokens."""
        ...

    @property
    def model_bytes(self) -> bytes:
        """Content of the model file; empty for raw bytes."""
        ...

    @property
    def keeps_text(self) -> bool:
        """True if every text decodes to itself; False if it is normalized first."""
        ...

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`, without BOS."""
        ...

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[Tokens]:
        """Return the ids of each of `texts`, encoded on up to `threads` threads if that is faster."""
        ...

    def decode(self, ids: NDArray[np.integer[Any]] | Sequence[int]) -> str:
        """Return the text of `ids`; control ids decode to nothing, malformed UTF-8 to U+FFFD."""
        ...

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """Return the bytes of each id, with at least `vocab_size` rows for a model whose vocabulary is padded."""
        ...


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which UTF-8 cannot hold; remove it"
        ) from error


def _empty_table(size: int) -> ByteTable:
    """Return a table of unused ids: no bytes, all boundaries."""
    return ByteTable(np.zeros(size, np.int16), np.zeros(size, np.bool_), np.ones(size, np.bool_))


class ByteTokenizer:
    """Tokenizer of raw UTF-8 bytes, "byte260": id = byte + 4."""

    kind: Kind = "bytes"
    name = "byte260"
    vocab_size = 260
    bos_id = 1
    digest = hashlib.sha256(b"byte260").hexdigest()
    model_bytes = b""
    keeps_text = True

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`, without BOS."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint16) + np.uint16(4)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[Tokens]:  # noqa: ARG002
        """Return the ids of each of `texts`; encoding only copies memory, so it uses no threads."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: NDArray[np.integer[Any]] | Sequence[int]) -> str:
        """Return the text of `ids`; control ids decode to nothing, malformed UTF-8 to U+FFFD."""
        values = np.asarray(ids, np.int64)
        _check_range(values, self.vocab_size)
        return (values[values >= 4] - 4).astype(np.uint8).tobytes().decode(errors="replace")

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """Return the bytes of each id: one for each byte, none for the four control ids."""
        table = _empty_table(max(self.vocab_size, vocab_size or 0))
        table.base_bytes[4:260] = 1
        table.is_boundary[4:260] = False
        return table


class SentencePieceTokenizer:
    """Tokenizer of a SentencePiece model.

    Args:
        model: content of a `.model` file.
        source: its name in error messages.
    """

    kind: Kind = "sentencepiece"

    def __init__(self, model: bytes, source: str = "the SentencePiece model") -> None:
        self.model_bytes = model
        self.digest = hashlib.sha256(model).hexdigest()
        self._source = source
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            loaded = bool(model) and self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(f"{source} is no SentencePiece model, or is damaged; give a .model file") from error
        if not loaded:
            raise DataError(f"{source} is empty; give a SentencePiece .model file")
        self.vocab_size = int(self._processor.vocab_size())
        self.bos_id = int(self._processor.bos_id())
        self.name = f"sp{self.vocab_size}"
        if self.vocab_size > MAX_VOCAB:
            raise DataError(
                f"{source} has {self.vocab_size:,} pieces; shards have 16-bit ids, so {MAX_VOCAB:,} at most"
            )
        if self.bos_id < 0:
            raise DataError(f"{source} has no BOS piece, which documents begin with; train it with bos_id=1")
        self.keeps_text = str(self._processor.decode(self._processor.encode(_PROBE))) == _PROBE

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`, without BOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[Tokens]:
        """Return the ids of each of `texts`, encoded on up to `threads` threads."""
        for text in texts:
            _utf8(text)
        encoded = self._processor.encode(list(texts), num_threads=threads)
        if self.keeps_text:  # "\u2581" itself is its three bytes, as its piece decodes to a space
            for i in (i for i, text in enumerate(texts) if SPACE in text):
                parts = self._processor.encode(texts[i].split(SPACE))
                mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
                encoded[i] = list(chain(parts[0], *((*mark, *part) for part in parts[1:])))
        return [np.array(ids, np.uint16) for ids in encoded]

    def normalize(self, text: str) -> str:
        """Return the normalized `text`, which is what `decode` returns."""
        return text if self.keeps_text else str(self._processor.normalize(text)).replace(SPACE, " ")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the pieces of `ids`, which must be in the vocabulary."""
        return [str(self._processor.id_to_piece(i)) for i in ids]

    def decode(self, ids: NDArray[np.integer[Any]] | Sequence[int]) -> str:
        """Return the text of `ids`; control ids decode to nothing, malformed UTF-8 to U+FFFD."""
        values = np.asarray(ids, np.int64)
        _check_range(values, self.vocab_size)
        return str(self._processor.decode(values.tolist()))

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """Return the bytes of each id by its piece type; ids beyond the model's vocabulary (padding) are unused."""
        processor = self._processor
        if processor.id_to_piece(processor.piece_to_id(SPACE)) != SPACE:
            raise DataError(
                f"{self._source} has no piece for a lone space ('{SPACE}'), so spaces become three byte tokens and "
                "bits per byte would be too low; train it on text with spaces"
            )
        table = _empty_table(max(self.vocab_size, vocab_size or 0))
        for i in range(self.vocab_size):
            if processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i):
                continue
            table.is_boundary[i] = False
            if processor.is_byte(i):  # its name is "<0xNN>", but it stands for one byte
                table.base_bytes[i] = 1
                continue
            piece: str = processor.id_to_piece(i)
            # without normalization a text may begin with a space, which counts like any other character
            table.has_leading_space[i] = piece.startswith(SPACE) and not self.keeps_text
            table.base_bytes[i] = len(piece.replace(SPACE, " ").encode()) - table.has_leading_space[i]
        return table


class CaseOpsTokenizer:
    """Tokenizer of a SentencePiece model for CaseOps.

    Its byte table counts the bytes of the text before CaseOps. Scoring takes them from the byte sidecar of the shards,
    as the challenge does (`birdie.gpt.data.byte_sidecar`).

    Args:
        model: SentencePiece model that reserves ids 4 to 7 for the operators.
    """

    kind: Kind = "caseops"

    def __init__(self, model: SentencePieceTokenizer) -> None:
        if not has_operators(model):
            raise DataError(
                f"the SentencePiece model {model.name} does not reserve ids 4 to 7 for the operators of CaseOps; "
                "give one that was trained for CaseOps"
            )
        self._model = model
        self._operators = {piece: RESERVED + i for i, piece in enumerate(model.pieces(_OPERATOR_IDS))}
        self.name = f"{model.name}_caseops"
        self.vocab_size, self.bos_id = model.vocab_size, model.bos_id
        self.digest, self.model_bytes, self.keeps_text = model.digest, model.model_bytes, model.keeps_text

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`, without BOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[Tokens]:
        """Return the ids of each of `texts`, encoded on up to `threads` threads.

        The text is normalized before CaseOps: otherwise "ABﬁ" would become ALLCAPS "abﬁ", the model would normalize it
        to "abfi", and it would decode to "ABFI".
        """
        for text in texts:
            _utf8(text)
        return self._model.encode_batch([caseops.encode(self._model.normalize(text)) for text in texts], threads)

    def decode(self, ids: NDArray[np.integer[Any]] | Sequence[int]) -> str:
        """Return the text of `ids`; control ids and lone operators decode to nothing, malformed UTF-8 to U+FFFD."""
        return caseops.decode(self._model.decode(ids))

    def byte_table(self, vocab_size: int | None = None) -> ByteTable:
        """Return the model's own byte table, but with no bytes for operators that are not escaped."""
        table = self._model.byte_table(vocab_size)
        escaped = np.zeros_like(table.base_bytes)
        for i in self._operators.values():
            table.base_bytes[i], escaped[i] = 0, caseops.OPERATOR_BYTES
        return replace(table, escape=Escape(self._operators[caseops.ESCAPE], escaped))


def has_operators(model: SentencePieceTokenizer) -> bool:
    """Return whether ids 4 to 7 are the operators of CaseOps; learned pieces come after the 256 bytes."""
    return model.vocab_size >= _OPERATOR_IDS.stop and set(model.pieces(_OPERATOR_IDS)) == set(caseops.OPERATORS)


def _check_range(ids: NDArray[np.int64], vocab_size: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DataError(
            f"token ids {ids.min()} to {ids.max()} are not all in the tokenizer's vocabulary of {vocab_size:,}; "
            "use the tokenizer that produced the tokens"
        )


BYTES = ("bytes", ByteTokenizer.name)
"""Names of the tokenizer that needs no file."""


def load_tokenizer(spec: str | os.PathLike[str]) -> ByteTokenizer | SentencePieceTokenizer | CaseOpsTokenizer:
    """Return the tokenizer "bytes" or that of a SentencePiece `.model` file, with CaseOps if it has the operators."""
    if spec in BYTES:
        return ByteTokenizer()
    path = Path(spec)
    try:
        model = SentencePieceTokenizer(regular_file(path).read_bytes(), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, DataError):
            raise
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        name = str(path)[:200]
        raise DataError(f"tokenizer {name!r}: {reason}; give 'bytes' or the path of a SentencePiece .model") from error
    return CaseOpsTokenizer(model) if has_operators(model) else model


def train_sentencepiece(
    documents: Iterable[str], vocab_size: int, target: Path | None = None, *, sample_bytes: int = SAMPLE_BYTES
) -> SentencePieceTokenizer:
    """Train a BPE vocabulary that keeps every byte of a text; the same documents give the same model file.

    Args:
        documents: training text.
        vocab_size: number of pieces, 260 of which are control pieces and bytes.
        target: file to write the model to as well.
        sample_bytes: of a longer text, a uniform sample of its lines with about so many UTF-8 bytes is used.
    """
    return _train(documents, vocab_size, target, sample_bytes)


def train_caseops(
    documents: Iterable[str], vocab_size: int, target: Path | None = None, *, sample_bytes: int = SAMPLE_BYTES
) -> CaseOpsTokenizer:
    """Train a BPE vocabulary as `train_sentencepiece` does, with ids 4 to 7 for the operators of CaseOps."""
    return CaseOpsTokenizer(_train(documents, vocab_size, target, sample_bytes, caseops.OPERATORS))


def _train(
    documents: Iterable[str], vocab_size: int, target: Path | None, sample_bytes: int, operators: Sequence[str] = ()
) -> SentencePieceTokenizer:
    least = RESERVED + len(operators) + 256
    if not least < vocab_size <= MAX_VOCAB:
        raise ConfigError(f"a vocabulary of {vocab_size:,} is not possible; choose {least + 1} to {MAX_VOCAB:,}")
    texts = _sampled(documents, sample_bytes)
    if operators:
        texts = [caseops.encode(text) for text in texts]
    if not texts:
        raise DataError("there is no text to train a vocabulary on; check the corpus")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            user_defined_symbols=list(operators),
            **_TRAINER,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"a vocabulary of {vocab_size:,} does not fit this text ({_last_clause(error)}); try a larger one"
        ) from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    if tokenizer.vocab_size != vocab_size:  # hard_vocab_limit is off, so the trainer stops early without an error
        raise DataError(
            f"the corpus has enough text for {tokenizer.vocab_size:,} pieces only, not {vocab_size:,}; "
            "give more text or a smaller vocabulary"
        )
    if target is not None:
        write_bytes(target, tokenizer.model_bytes)
    return tokenizer


def _last_clause(error: RuntimeError) -> str:
    """Return the readable end of SentencePiece's message, which begins with a C++ file and condition."""
    return str(error).strip().rsplit("] ", 1)[-1].strip(" .") or "no reason given"


def _sampled(documents: Iterable[str], limit: int) -> list[str]:
    """Return `documents`, or of each a uniform sample of its lines, at most `limit` bytes in all, in one pass.

    Each line draws a number in [0, 1) and is kept if it is below a threshold. Whenever the sample exceeds the limit,
    the threshold is halved.
    """
    draw = random.Random(0).random
    sample: list[tuple[float, int, str]] = []
    size, threshold = 0, 1.0
    for index, document in enumerate(documents):
        for line in document.replace("\0", " ").splitlines(keepends=True):
            number = draw()
            if number >= threshold:
                continue
            sample.append((number, index, line))
            size += len(line.encode())
            while size > limit and len(sample) > 1:
                threshold /= 2
                sample = [kept for kept in sample if kept[0] < threshold]
                size = sum(len(line.encode()) for _, _, line in sample)
    texts = ("".join(line for _, _, line in lines) for _, lines in groupby(sample, key=lambda kept: kept[1]))
    return [text for text in texts if not text.isspace()]


def require_tokenizer(tokenizer: Any, path: Path | str) -> None:
    """Refuse metadata of a tokenizer that are neither None nor its kind and digest."""
    if tokenizer is not None and not (
        isinstance(tokenizer, dict) and all(isinstance(tokenizer.get(key), str) for key in ("kind", "sha256"))
    ):
        raise ArtifactError(
            f"{path} names its tokenizer as {repr(tokenizer)[:80]}; the file is damaged: export it again"
        )


def check_same_tokenizer(tokenizer: Tokenizer, trained_with: Mapping[str, Any] | None, name: str) -> None:
    """Refuse a tokenizer other than the one in the artifact's metadata: its ids would mean other text.

    Args:
        tokenizer: to be used.
        trained_with: the artifact's metadata of its tokenizer; None: unknown.
        name: of the tokenizer, for the message.
    """
    if trained_with is not None and tokenizer.digest != trained_with["sha256"]:
        raise DataError(
            f"the model was trained with tokenizer {trained_with['kind']} {trained_with['sha256'][:12]}, "
            f"but {name} is {tokenizer.kind} {tokenizer.digest[:12]}; use the one it was trained with (--tokenizer)"
        )
