"""Preparation of a data set: corpus + tokenizer → shards, in folders as the challenge's, with the name of the text.

    <root>/datasets/stdlib_sp1024/stdlib_{train,val}_%06d.bin and dataset.json
    <root>/tokenizers/stdlib_sp1024.model

CaseOps data (`stdlib_sp1024_caseops`) have a byte sidecar `stdlib_val_bytes_%06d.bin` for each validation shard.

The folder of shards appears at the end, atomically. Data that birdie did not prepare are never replaced.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from birdie.errors import ConfigError, DataError, OutputError
from birdie.gpt.data.byte_accounting import TOLERANCE, ByteCheck, check_bytes
from birdie.gpt.data.corpus import Corpus
from birdie.gpt.data.dataset import INFO_NAME, Dataset, DatasetInfo, SplitTotals
from birdie.gpt.data.shards import SHARD_TOKENS, ShardWriter, Split, read_shard
from birdie.gpt.data.tokenizer import Tokenizer, load_tokenizer, train_caseops, train_sentencepiece
from birdie.system.files import atomic_folder, write_bytes
from birdie.system.outputs import require_file, require_folder, require_writable

Stage = Literal["overlap", "vocabulary", "train", "val", "check"]

_BATCH_BYTES = 2_000_000  # UTF-8 bytes of text that are tokenized at a time
_CASEOPS = "_caseops"  # suffix of a tokenizer's name


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Progress of one stage.

    Attributes:
        stage: search for an "overlap" of the splits, training of the "vocabulary", writing of the "train" or "val"
            shards, or the byte "check" of the latter.
        documents: documents finished in this stage; 0 when "overlap", "vocabulary" or "check" begins.
        bytes: UTF-8 bytes of their text.
    """

    stage: Stage
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """A prepared data set on disk.

    Attributes:
        folder: folder of the shards and dataset.json.
        tokenizer: argument for `load_tokenizer`: path of the model, or "bytes".
        info: content of dataset.json.
        check: comparison of the byte table with the validation text.
        excluded: number of training documents that were excluded as copies of held-out documents.
    """

    folder: Path
    tokenizer: str
    info: DatasetInfo
    check: ByteCheck
    excluded: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of the data of one text and vocabulary.

    Attributes:
        model: file of the tokenizer; None for raw bytes, which need none.
    """

    folder: Path
    model: Path | None

    @classmethod
    def of(cls, root: str | os.PathLike[str], text: str, tokenizer: str) -> "Layout":
        """Return the layout below `root` of a text, for the tokenizer "sp1024", "sp1024_caseops", "byte260", …"""
        return cls._below(root, f"{text}_{tokenizer}", f"{text}_{tokenizer}" if tokenizer.startswith("sp") else None)

    @classmethod
    def published(cls, root: str | os.PathLike[str], variant: str) -> "Layout":
        """Return the layout below `root` where the challenge's scripts expect the variant "sp1024", "byte260", …"""
        size = variant.removeprefix("sp")
        return cls._below(root, f"fineweb10B_{variant}", f"fineweb_{size}_bpe" if size != variant else None)

    @classmethod
    def _below(cls, root: str | os.PathLike[str], folder: str, model: str | None) -> "Layout":
        datasets, tokenizers = (
            require_folder(Path(root) / part, overwrite=True) for part in ("datasets", "tokenizers")
        )
        return cls(datasets / folder, None if model is None else tokenizers / f"{model}.model")


def prepare(
    corpus: Corpus,
    tokenizer: str | os.PathLike[str] | int = 1024,
    root: str | os.PathLike[str] = "data",
    *,
    caseops: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    threads: int | None = None,
) -> Iterator[PrepareProgress | PreparedDataset]:
    """Tokenize `corpus` into shards; yield progress and finally the `PreparedDataset`.

    Args:
        tokenizer: "bytes", the path of a SentencePiece model, or the size of a BPE vocabulary to train on the corpus.
        root: root of the folder layout.
        caseops: train a CaseOps vocabulary; a model file must have the operators (it is used with them in any case).
        threads: threads for tokenizing; default: one per core.
    """
    require_writable(root)
    if isinstance(tokenizer, int):
        name = f"sp{tokenizer}{_CASEOPS if caseops else ''}"
    else:
        loaded = _load(tokenizer, caseops)
        name = loaded.name
    layout = Layout.of(root, corpus.name, name)
    _check_replaceable(layout.folder, corpus)
    yield PrepareProgress("overlap")
    excluded = _require_disjoint(corpus)
    if isinstance(tokenizer, int):
        yield PrepareProgress("vocabulary")
        train = train_caseops if caseops else train_sentencepiece
        chosen: Tokenizer = train(corpus.train(), tokenizer)
    else:
        chosen = loaded
    _check_model_replaceable(layout, chosen)
    with atomic_folder(layout.folder, replace=True) as folder:
        writer = _SplitWriter(chosen, folder, corpus.name, shard_tokens, threads or os.cpu_count() or 1)
        yield from writer.write("train", corpus.train())
        yield from writer.write("val", corpus.validation())
        yield PrepareProgress("check")
        check = check_bytes(chosen, Dataset((), tuple(writer.paths["val"])).validation_tokens())
        require_matching_bytes(check, chosen)
        totals = writer.totals
        info = DatasetInfo(
            corpus.name, chosen.kind, chosen.digest, chosen.vocab_size, totals["train"], totals["val"], corpus.source
        )
        info.write(folder)
        if layout.model is not None:
            write_bytes(layout.model, chosen.model_bytes)
    yield PreparedDataset(layout.folder, str(layout.model or "bytes"), info, check, excluded)


def _load(spec: str | os.PathLike[str], caseops: bool) -> Tokenizer:
    tokenizer = load_tokenizer(spec)
    if caseops and tokenizer.kind != "caseops":
        raise ConfigError(
            f"CaseOps needs a tokenizer with its operators, but {os.fspath(spec)} ({tokenizer.name}) has none; "
            "give another, or leave it out to train one"
        )
    return tokenizer


def _require_disjoint(corpus: Corpus) -> int:
    """Return the number of training documents that the corpus excludes as copies of held-out documents."""
    overlap = corpus.overlap()
    if overlap.documents and not corpus.excludes_copies:
        raise DataError(
            f"{overlap.documents:,} training document(s) are validation documents as well, the first of them "
            f"{overlap.first}; a score on training text is meaningless, so remove them from the training text or from "
            "the validation text"
        )
    return overlap.documents


def _check_replaceable(folder: Path, corpus: Corpus) -> None:
    """Check that `folder` is missing, empty, or an earlier result of `prepare` from the same source."""
    if not require_folder(folder, overwrite=True).exists():
        return
    paths = [path for path in folder.iterdir() if path.name != INFO_NAME]
    if paths and not (_has_totals(folder) and all(map(_is_shard, paths))):
        raise OutputError(f"{folder} has files that birdie did not prepare; choose another root, or move them away")
    earlier = DatasetInfo.read(folder)
    if earlier is not None and earlier.source != corpus.source and earlier.source:
        raise OutputError(f"{folder} was prepared from another source; choose another --name or root, or remove it")


def _has_totals(folder: Path) -> bool:
    with suppress(DataError):
        return not (folder / INFO_NAME).is_symlink() and DatasetInfo.read(folder) is not None
    return False


def _is_shard(path: Path) -> bool:
    if path.is_symlink() or not re.search(r"_(train|val|val_bytes)_\d+\.bin$", path.name):
        return False
    with suppress(DataError):
        return len(read_shard(path)) > 0
    return False


def _check_model_replaceable(layout: Layout, tokenizer: Tokenizer) -> None:
    """Check that the model file is missing, is this tokenizer, or belongs to the data set that is being replaced."""
    if layout.model is None or not require_file(layout.model).exists():
        return
    earlier = DatasetInfo.read(layout.folder)
    replaceable = {tokenizer.digest, earlier.tokenizer_sha256 if earlier else None}
    if hashlib.sha256(layout.model.read_bytes()).hexdigest() not in replaceable:
        raise OutputError(f"{layout.model} is another tokenizer; give it with --tokenizer, or choose another root")


def require_matching_bytes(check: ByteCheck, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer's byte table matches the decoded text."""
    if abs(check.table_bytes - check.text_bytes) > TOLERANCE * check.text_bytes:
        raise DataError(
            f"the byte table of {tokenizer.name} counts {check.table_bytes:,} bytes of validation text, the text has "
            f"{check.text_bytes:,}; bits per byte would be wrong, so use another tokenizer"
        )


class _SplitWriter:
    """Writer of the shards and totals of each split; it tokenizes the documents in batches."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, name: str, shard_tokens: int, threads: int) -> None:
        self.totals: dict[Split, SplitTotals] = {}
        self.paths: dict[Split, list[Path]] = {}
        self._tokenizer, self._table = tokenizer, tokenizer.byte_table()
        self._with_sidecar = tokenizer.kind == "caseops"
        self._folder, self._name, self._shard_tokens, self._threads = folder, name, shard_tokens, threads

    def write(self, split: Split, documents: Iterator[str]) -> Iterator[PrepareProgress]:
        """Write each document as BOS + tokens, and the sidecar of "val"; yield progress after each batch."""
        bos = np.array([self._tokenizer.bos_id], np.uint16)
        totals = SplitTotals(0, 0, 0, 0)
        with self._writer(split) as shards, self._sidecar(split) as sidecar:
            for texts, source_bytes in _batched(documents):
                encoded = self._tokenizer.encode_batch(texts, self._threads)
                batch = np.concatenate(list(chain.from_iterable((bos, tokens) for tokens in encoded)))
                counts = self._table.count_document(batch, self._tokenizer.bos_id)
                shards.write(batch)
                if sidecar is not None:
                    sidecar.write(counts)
                totals = SplitTotals(
                    totals.documents + len(texts),
                    totals.tokens + len(batch),
                    totals.bytes + int(counts.sum()),
                    totals.source_bytes + source_bytes,
                )
                yield PrepareProgress(split, totals.documents, totals.tokens, totals.bytes)
        self.totals[split], self.paths[split] = totals, shards.paths

    def _sidecar(self, split: Split) -> AbstractContextManager[ShardWriter | None]:
        if split == "val" and self._with_sidecar:
            return self._writer("val_bytes")
        return nullcontext()

    def _writer(self, split: Split | Literal["val_bytes"]) -> ShardWriter:
        return ShardWriter(self._folder, self._name, split, self._shard_tokens)


def _batched(documents: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    """Yield batches of documents of about `_BATCH_BYTES`, each with its UTF-8 length."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text.encode())
        if size >= _BATCH_BYTES:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size
