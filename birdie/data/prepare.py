"""Corpus + tokenizer → shards, in the challenge's own layout, so that its commands find their paths.

    <root>/datasets/fineweb10B_sp1024/fineweb_{train,val}_%06d.bin and dataset.json
    <root>/tokenizers/fineweb_1024_bpe.model

With CaseOps there is a byte sidecar for each validation shard, and both names end as those of the challenge's own
CaseOps data do, so that the commands of its records find them:

    <root>/datasets/fineweb10B_sp1024_lossless_caps_caseops_v1_reserved/fineweb_val_bytes_%06d.bin, …
    <root>/tokenizers/fineweb_1024_bpe_lossless_caps_caseops_v1_reserved.model

The folder of shards appears at the end, whole, or not at all; data that birdie did not prepare is never replaced.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from birdie.data.byte_accounting import TOLERANCE, ByteCheck, check_bytes
from birdie.data.corpus import Corpus
from birdie.data.dataset import INFO_NAME, Dataset, DatasetInfo, SplitTotals
from birdie.data.shards import SHARD_TOKENS, ShardWriter, Split
from birdie.data.tokenizer import Tokenizer, load_tokenizer, train_caseops, train_sentencepiece
from birdie.errors import ConfigError, DataError, OutputError
from birdie.runtime.files import atomic_folder, require_writable, write_bytes

Stage = Literal["overlap", "vocabulary", "train", "val", "check"]

_BATCH_BYTES = 2_000_000  # of text tokenized in one go
_CASEOPS = "_caseops"  # as a tokenizer's name ends
_CASEOPS_NAMES = "_lossless_caps_caseops_v1_reserved"  # as the challenge's folders and files end


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage has come.

    Attributes:
        stage: looking for an "overlap" of the splits, learning the "vocabulary", writing the "train" or "val" shards,
            or the byte "check" of the latter.
        documents: documents done in this stage; in "overlap", "vocabulary" and "check", which begin with it, 0.
        tokens: tokens written in this stage.
        bytes: UTF-8 bytes of their text.
    """

    stage: Stage
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set that is ready.

    Attributes:
        folder: the shards and their dataset.json.
        tokenizer: what `load_tokenizer` takes: the path of the model, or "bytes".
        info: contents of dataset.json.
        check: the byte table held against the validation text.
        left_out: training documents that were left out because they are held out, too.
    """

    folder: Path
    tokenizer: str
    info: DatasetInfo
    check: ByteCheck
    left_out: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the challenge's scripts look for data with one vocabulary.

    Attributes:
        folder: of the shards.
        model: the tokenizer's file, or None for raw bytes, which need none.
    """

    folder: Path
    model: Path | None

    @classmethod
    def of(cls, root: str | os.PathLike[str], tokenizer_name: str) -> "Layout":
        """The layout under `root` for "sp1024", "sp1024_caseops", "byte260", …"""
        root, name = Path(root), tokenizer_name.removesuffix(_CASEOPS)
        end = _CASEOPS_NAMES if name != tokenizer_name else ""
        folder = root / "datasets" / f"fineweb10B_{name}{end}"
        if not name.startswith("sp"):
            return cls(folder, None)
        return cls(folder, root / "tokenizers" / f"fineweb_{name.removeprefix('sp')}_bpe{end}.model")


def prepare(
    corpus: Corpus,
    tokenizer: str | os.PathLike[str] | int = 1024,
    root: str | os.PathLike[str] = "data",
    *,
    caseops: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    threads: int | None = None,
) -> Iterator[Progress | Prepared]:
    """Tokenize `corpus` into shards; yields progress and, last, the `Prepared` data set.

    Args:
        corpus: the text.
        tokenizer: "bytes", the path of a SentencePiece model, or the size of a BPE vocabulary to learn from the corpus.
        root: folder of the layout.
        caseops: capitals become operators; a model that is given must have them, and is used that way in any case.
        shard_tokens: tokens a shard.
        threads: for tokenizing; default: one a core.

    Raises:
        ConfigError: a setting is out of range, or CaseOps is asked of a tokenizer without it.
        DataError: the text or the tokenizer cannot be used, its byte table is wrong for this text, or training
            documents are held out, too.
        OutputError: `root` cannot be written, or data that birdie did not prepare is in the way.
    """
    require_writable(root)
    if isinstance(tokenizer, int):
        name = f"sp{tokenizer}{_CASEOPS if caseops else ''}"
    else:
        given = _load(tokenizer, caseops)
        name = given.name
    layout = Layout.of(root, name)
    _check_replaceable(layout.folder)
    yield Progress("overlap")
    left_out = _require_disjoint(corpus)
    if isinstance(tokenizer, int):
        yield Progress("vocabulary")
        learn = train_caseops if caseops else train_sentencepiece
        chosen: Tokenizer = learn(corpus.train(), tokenizer)
    else:
        chosen = given
    _check_model_replaceable(layout, chosen)
    with atomic_folder(layout.folder) as folder:
        writer = _SplitWriter(chosen, folder, shard_tokens, threads or os.cpu_count() or 1)
        yield from writer.write("train", corpus.train())
        yield from writer.write("val", corpus.validation())
        yield Progress("check")
        check = check_bytes(chosen, Dataset((), tuple(writer.paths["val"])).validation_tokens())
        require_right(check, chosen)
        totals = writer.totals
        info = DatasetInfo(corpus.name, chosen.kind, chosen.digest, chosen.vocab_size, totals["train"], totals["val"])
        info.write(folder)
        if layout.model is not None:
            write_bytes(layout.model, chosen.model_bytes)
    yield Prepared(layout.folder, str(layout.model or "bytes"), info, check, left_out)


def _load(spec: str | os.PathLike[str], caseops: bool) -> Tokenizer:
    tokenizer = load_tokenizer(spec)
    if caseops and tokenizer.kind != "caseops":
        raise ConfigError(
            f"CaseOps needs a tokenizer with its operators, and {os.fspath(spec)} ({tokenizer.name}) has none; "
            "give another, or have one learned"
        )
    return tokenizer


def _require_disjoint(corpus: Corpus) -> int:
    """Refuse training documents that are held out as well; how many of them the corpus leaves out by itself."""
    overlap = corpus.overlap()
    if overlap.documents and not corpus.leaves_out_copies:
        raise DataError(
            f"{overlap.documents:,} training document(s) are validation documents, too, the first of them "
            f"{overlap.first}, and a score on text that was trained on means nothing; remove them from the training "
            "text or from the validation text"
        )
    return overlap.documents


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an earlier result of `prepare`."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    ours = INFO_NAME in names and all(name == INFO_NAME or name.endswith(".bin") for name in names)
    if names and not ours:
        raise OutputError(f"{folder} holds files that birdie did not prepare; choose another root, or move them away")


def _check_model_replaceable(layout: Layout, tokenizer: Tokenizer) -> None:
    """Refuse to replace a tokenizer other than this one and the one of the data set about to be replaced."""
    if layout.model is None or not layout.model.exists():
        return
    earlier = DatasetInfo.read(layout.folder)
    known = {tokenizer.digest, earlier.tokenizer_sha256 if earlier else None}
    if hashlib.sha256(layout.model.read_bytes()).hexdigest() not in known:
        raise OutputError(
            f"{layout.model} is another tokenizer than the one in use; use that one, or choose another root"
        )


def require_right(check: ByteCheck, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose byte table is not true to the text it decodes to.

    Raises:
        DataError: the two differ by more than 0.1 %.
    """
    if abs(check.table_bytes - check.text_bytes) > TOLERANCE * check.text_bytes:
        raise DataError(
            f"the byte table of {tokenizer.name} counts {check.table_bytes:,} bytes of validation text, which has "
            f"{check.text_bytes:,}; bits per byte would be wrong, so use another tokenizer"
        )


class _SplitWriter:
    """Tokenizes documents batch by batch into the shards of a split, keeping totals."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, shard_tokens: int, threads: int) -> None:
        self.totals: dict[Split, SplitTotals] = {}
        self.paths: dict[Split, list[Path]] = {}
        self._tokenizer, self._table = tokenizer, tokenizer.byte_table()
        self._with_sidecar = tokenizer.kind == "caseops"
        self._folder, self._shard_tokens, self._threads = folder, shard_tokens, threads

    def write(self, split: Split, documents: Iterator[str]) -> Iterator[Progress]:
        """Write `documents` as BOS + tokens each, and the sidecar of "val"; yields progress after each batch."""
        bos = np.array([self._tokenizer.bos_id], np.uint16)
        totals = SplitTotals(0, 0, 0, 0)
        with ShardWriter(self._folder, split, self._shard_tokens) as shards, self._sidecar(split) as sidecar:
            for texts, source_bytes in _batched(documents):
                encoded = self._tokenizer.encode_batch(texts, self._threads)
                stream = np.concatenate(list(chain.from_iterable((bos, tokens) for tokens in encoded)))
                counts = self._table.count_document(stream, self._tokenizer.bos_id)
                shards.write(stream)
                if sidecar is not None:
                    sidecar.write(counts)
                totals = SplitTotals(
                    totals.documents + len(texts),
                    totals.tokens + len(stream),
                    totals.bytes + int(counts.sum()),
                    totals.source_bytes + source_bytes,
                )
                yield Progress(split, totals.documents, totals.tokens, totals.bytes)
        self.totals[split], self.paths[split] = totals, shards.paths

    def _sidecar(self, split: Split) -> AbstractContextManager[ShardWriter | None]:
        if split == "val" and self._with_sidecar:
            return ShardWriter(self._folder, "val_bytes", self._shard_tokens)
        return nullcontext()


def _batched(documents: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    """Documents in batches of about `_BATCH_BYTES`, each with its UTF-8 length."""
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
