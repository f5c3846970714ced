"""Download of a published data set into the challenge's folder layout, with all of its consistency checks.

    hub ──► staging folder ──► size, SHA-256 ──► header, ids, bytes by the tokenizer ──► final path ──► dataset.json

Files appear one by one, each atomically (the validation shards together, because a part of them gives another score).
`dataset.json` is updated after each file. So an interrupted download leaves a data set that works, and the same call
again downloads only what is missing or damaged. Nothing is remembered between calls: each call requests the listing.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from birdie.data.byte_accounting import ByteTable, Tokens, check_bytes
from birdie.data.dataset import MIN_ROUNDTRIP, DatasetInfo, SplitTotals, roundtrip_share
from birdie.data.hub.catalog import (
    MANIFEST,
    MAX_MANIFEST,
    RemoteDataset,
    find_root,
    require_variant,
    select_files,
)
from birdie.data.hub.repository import RemoteFile, Repository
from birdie.data.prepare import Layout, require_matching_bytes
from birdie.data.shards import HEADER_BYTES, read_shard
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ConfigError, DataError, OutputError
from birdie.runtime.files import atomic_path, temporary_folder, write_bytes
from birdie.runtime.outputs import require_folder, require_writable

Stage = Literal["check", "download", "count"]
Report = Callable[[Stage, int, int], None]
"""Called with (stage, bytes done, bytes in total): files checked, files downloaded, kept files counted again."""

SPARE_BYTES = 64_000_000  # free disk space that must remain beside the downloaded files
_SAMPLE_TOKENS = 1 << 22  # validation tokens that check the byte table: takes seconds, all of them half a minute
_ROUNDTRIP_TOKENS = 65_536  # tokens that must be reproduced when they are decoded and encoded
_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a published data set.

    Attributes:
        repo: "owner/name" of a data set repository on the hub.
        revision: branch, tag or commit; None: the newest commit.
        root: folder of the repository with datasets/ and tokenizers/; None: the challenge's, or the only one.
        endpoint: address of the hub; None: `HF_ENDPOINT`, or huggingface.co.
    """

    repo: str = "willdepueoai/parameter-golf"
    revision: str | None = None
    root: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class DownloadedDataset:
    """A published data set on disk.

    Attributes:
        folder: folder of the shards and dataset.json.
        tokenizer: argument for `load_tokenizer`: path of the model, or "bytes".
        info: content of dataset.json.
        commit: commit of the repository.
        downloaded: names of the files that were downloaded.
        kept: names of the files that existed and were intact.
        bytes: number of downloaded bytes.
        notes: one sentence for each irregularity of the source.
    """

    folder: Path
    tokenizer: str
    info: DatasetInfo
    commit: str
    downloaded: tuple[str, ...]
    kept: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]


def download(
    variant: str = "sp1024",
    train_shards: int = 10,
    root: str | Path = "data",
    *,
    source: Source | None = None,
    report: Report | None = None,
) -> DownloadedDataset:
    """Download the validation split, the first `train_shards` training shards and the tokenizer of `variant`.

    Training shards beyond those that are already in the folder are checked and counted as well.

    Args:
        variant: "sp1024", "byte260", …
        train_shards: number of training shards; 0 for validation only.
        root: root of the folder layout.
        source: location of the data set; default: the challenge's own repository.
        report: progress callback.
    """
    if train_shards < 0:
        raise ConfigError(f"train_shards={train_shards} must not be negative")
    require_variant(variant)
    source = source or Source()
    repository = Repository.open(source.repo, source.revision, source.endpoint)
    dataset = _remote_dataset(repository, variant, source.root)
    if train_shards > len(dataset.train):
        raise ConfigError(
            f"{variant} has {len(dataset.train)} training shards in {source.repo}, not {train_shards}; "
            "lower --train-shards"
        )
    return _Downloader(repository, dataset, Layout.of(root, variant), report or _ignore).run(train_shards)


def _remote_dataset(repository: Repository, variant: str, root: str | None) -> RemoteDataset:
    folder = find_root(repository.files, variant, root)
    manifest = repository.files.get(folder + MANIFEST)
    if manifest is None:
        return select_files(repository.files, folder, variant, None)
    if manifest.size > MAX_MANIFEST:
        raise DataError(f"the hub lists {manifest.path} with {manifest.size:,} bytes; nothing was downloaded")
    with tempfile.TemporaryDirectory() as temporary:  # not kept: an old manifest names old shards
        content = repository.download(manifest, Path(temporary)).read_bytes()
        return select_files(repository.files, folder, variant, content)


def _ignore(stage: Stage, done: int, total: int) -> None:
    """Ignore the progress."""


class _Downloader:
    """One download: compare the folder with the repository, then fetch and verify what is missing."""

    def __init__(self, repository: Repository, dataset: RemoteDataset, layout: Layout, report: Report) -> None:
        self._repository, self._dataset, self._layout, self._report = repository, dataset, layout, report
        self._downloaded: list[RemoteFile] = []
        self._done_bytes = self._missing_bytes = 0

    def run(self, train_shards: int) -> DownloadedDataset:
        dataset, folder = self._dataset, self._layout.folder
        require_writable(require_folder(folder, overwrite=True))
        info = self._replaceable_info()
        present = {path.name for split in ("train", "val") for path in folder.glob(f"*_{split}_*.bin")}
        if foreign := present - {file.name for file in (*dataset.train, *dataset.val)}:
            raise OutputError(
                f"{folder} has {min(foreign)}, which {self._repository.name} does not have; choose another root, or "
                "move it away"
            )
        train = [file for index, file in enumerate(dataset.train) if index < train_shards or file.name in present]
        kept = self._intact([file for file in (*dataset.val, *train) if file.name in present], info)
        missing = [file for file in (*dataset.val, *train) if file.name not in kept]
        self._require_space(missing)
        tokenizer = self._install_tokenizer()
        if info is not None and not self._is_current(info, tokenizer, train, kept):
            info = None
        with temporary_folder(self._layout.folder) as staging:
            if info is None or missing:
                info = self._install_val(tokenizer, staging, kept, info)
                info = self._install_train(tokenizer, staging, train, kept, info)
        names = [file.name for file in (*dataset.val, *train)]
        return DownloadedDataset(
            folder,
            str(self._layout.model or "bytes"),
            info,
            self._repository.commit,
            tuple(file.name for file in self._downloaded),
            tuple(name for name in names if name in kept),
            sum(file.size for file in self._downloaded),
            dataset.notes,
        )

    def _replaceable_info(self) -> DatasetInfo | None:
        """Return the existing dataset.json, or None if there is none or it is damaged."""
        try:
            info = DatasetInfo.read(self._layout.folder)
        except DataError:  # damaged: it is written again from the shards
            return None
        if info is not None and info.corpus.partition("@")[0] != self._repository.name:
            raise OutputError(f"{self._layout.folder} has data of {info.corpus}; choose another root, or move it away")
        return info

    def _intact(self, files: Sequence[RemoteFile], info: DatasetInfo | None) -> set[str]:
        """Return the names of the local files that match the listing; the others are downloaded again."""
        total, done, kept = sum(file.size for file in files), 0, set()
        for file in files:
            path = self._layout.folder / file.name
            if file.matches(path, lambda count, done=done: self._report("check", done + count, total)):  # type: ignore[misc]
                kept.add(file.name)
            elif info is None and _is_shard(path):
                raise OutputError(
                    f"{path} is a valid shard, but differs from the one of {self._repository.name}; choose another "
                    "root, or move it away"
                )
            done += file.size
        return kept

    def _require_space(self, missing: Iterable[RemoteFile]) -> None:
        self._missing_bytes = sum(file.size for file in missing)
        free = shutil.disk_usage(self._layout.folder).free
        if self._missing_bytes and self._missing_bytes + SPARE_BYTES > free:
            raise OutputError(
                f"the download takes {self._missing_bytes:,} bytes, but {self._layout.folder} has {free:,} free; "
                "lower --train-shards, free some space or choose another root"
            )

    def _fetch(self, file: RemoteFile, staging: Path) -> Path:
        done = self._done_bytes
        path = self._repository.download(
            file,
            staging,
            lambda count: self._report("download", min(done + count, self._missing_bytes), self._missing_bytes),
        )
        self._done_bytes += file.size
        self._downloaded.append(file)
        return path

    def _install_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, downloaded to its final path if it is not there yet."""
        remote, model, variant = self._dataset.model, self._layout.model, self._dataset.variant
        if remote is None or model is None:
            return load_tokenizer("bytes")
        if model.exists() and not remote.matches(model):
            raise OutputError(f"{model} differs from the tokenizer of {self._repository.name}; choose another root")
        with temporary_folder(self._layout.folder) as staging:
            exists = model.exists()
            path = model if exists else self._repository.download(remote, staging)
            tokenizer = load_tokenizer(path)
            if tokenizer.name != variant:
                raise DataError(
                    f"{remote.path} of {self._repository.name} has {tokenizer.vocab_size:,} pieces, so it does not "
                    f"belong to {variant}; use another repository or revision"
                )
            tokenizer.byte_table()  # raises for a vocabulary that would count a space as three bytes
            if not exists:
                write_bytes(model, tokenizer.model_bytes)
                self._downloaded.append(remote)
        return tokenizer

    def _is_current(self, info: DatasetInfo, tokenizer: Tokenizer, train: Sequence[RemoteFile], kept: set[str]) -> bool:
        """Return whether `info` counts exactly the kept files and they come first, so need not be counted again."""
        names = [file.name for file in train]
        first = [name for name in names if name in kept]
        tokens = {
            "val": sum(_tokens_in(self._layout.folder / file.name) for file in self._dataset.val if file.name in kept),
            "train": sum(_tokens_in(self._layout.folder / name) for name in first),
        }
        return (
            info.tokenizer_sha256 == tokenizer.digest
            and names[: len(first)] == first
            and {file.name for file in self._dataset.val} <= kept
            and (info.val.tokens, info.train.tokens) == (tokens["val"], tokens["train"])
        )

    def _install_val(
        self, tokenizer: Tokenizer, staging: Path, kept: set[str], info: DatasetInfo | None
    ) -> DatasetInfo:
        """Download, check and count the validation shards and move them to their final paths."""
        if info is not None:
            return replace(info, corpus=self._corpus)
        folder, files = self._layout.folder, self._dataset.val
        paths = [folder / file.name if file.name in kept else self._fetch(file, staging) for file in files]
        shards = [read_shard(path) for path in paths]
        counter = _TotalsCounter(tokenizer)
        for file, tokens in zip(files, shards, strict=True):
            counter.add(tokens, file)
        expected = self._dataset.val_tokens
        if expected is not None and counter.totals.tokens != expected:
            raise DataError(
                f"{MANIFEST} of {self._repository.name} counts {expected:,} validation tokens, the shards have "
                f"{counter.totals.tokens:,}; a score on them would not be comparable, so use another revision"
            )
        _require_match(shards[0], tokenizer, files[0])
        require_matching_bytes(check_bytes(tokenizer, shards[0][:_SAMPLE_TOKENS]), tokenizer)
        for file, path in zip(files, paths, strict=True):
            self._move(path, file)
        none = SplitTotals(0, 0, 0, 0)
        return DatasetInfo(self._corpus, tokenizer.kind, tokenizer.digest, tokenizer.vocab_size, none, counter.totals)

    def _install_train(
        self, tokenizer: Tokenizer, staging: Path, train: Sequence[RemoteFile], kept: set[str], info: DatasetInfo
    ) -> DatasetInfo:
        """Download, check and count the training shards one by one, and write `dataset.json` after each."""
        folder = self._layout.folder
        counted = sum(file.name in kept for file in train) if info.train.tokens else 0  # counted shards come first
        uncounted = {file.name for file in train[counted:] if (folder / file.name).exists()}
        recount, done = sum(file.size for file in train[counted:] if file.name in kept), 0
        counter = _TotalsCounter(tokenizer, info.train)
        if counted:
            counter.last = int(read_shard(folder / train[counted - 1].name)[-1])
        if not uncounted:
            info.write(folder)
        for file in train[counted:]:
            path = folder / file.name if file.name in kept else self._fetch(file, staging)
            tokens = read_shard(path)
            if file is train[0]:
                _require_match(tokens, tokenizer, file)
            counter.add(tokens, file)
            if file.name in kept:
                done += file.size
                self._report("count", done, recount)
            else:
                self._move(path, file)
            uncounted.discard(file.name)
            info = replace(info, train=counter.totals)
            if not uncounted:  # otherwise dataset.json would count only a part of the shards in the folder
                info.write(folder)
        return info

    @property
    def _corpus(self) -> str:
        return f"{self._repository.name}@{self._repository.commit[:12]}"

    def _move(self, path: Path, file: RemoteFile) -> None:
        target = self._layout.folder / file.name
        if path != target:
            with atomic_path(target) as temporary:
                path.replace(temporary)


class _TotalsCounter:
    """Totals of consecutive shards; a document may continue from one shard to the next.

    Attributes:
        totals: totals so far.
        last: last token before the next shard; initially BOS.
    """

    def __init__(self, tokenizer: Tokenizer, totals: SplitTotals | None = None) -> None:
        self.totals = totals or SplitTotals(0, 0, 0, 0)
        self.last = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table()

    def add(self, tokens: Tokens, file: RemoteFile) -> None:
        """Add the tokens of one shard."""
        documents = size = 0
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = tokens[start : start + _BLOCK_TOKENS]
            histogram = np.bincount(block, minlength=len(self._table))
            if len(histogram) > self._tokenizer.vocab_size:
                raise DataError(
                    f"{file.path} has token id {len(histogram) - 1}, but {self._tokenizer.name} has "
                    f"{self._tokenizer.vocab_size:,} ids; shards and tokenizer of this repository do not match, so use "
                    "another repository or revision"
                )
            documents += int(histogram[self._tokenizer.bos_id])
            size += _block_bytes(self._table, histogram, block, self.last)
            self.last = int(block[-1])
        old = self.totals
        # The text before normalization is not published, so source_bytes is the size of the decoded text as well.
        self.totals = SplitTotals(
            old.documents + documents, old.tokens + len(tokens), old.bytes + size, old.source_bytes + size
        )


def _block_bytes(table: ByteTable, histogram: NDArray[np.intp], block: Tokens, previous: int) -> int:
    """Return the sum of `table.count` over `block` (N,) after `previous`, from the histogram of the block.

    Every leading space is counted, then the spaces after a boundary are subtracted: much faster than a sum per token.
    """
    bytes_per_id = table.base_bytes.astype(np.int64) + table.has_leading_space
    after_boundary = np.flatnonzero(table.is_boundary[block[:-1]]) + 1
    uncounted = int(table.has_leading_space[block[after_boundary]].sum())
    uncounted += int(table.is_boundary[previous] and table.has_leading_space[block[0]])
    return int(histogram @ bytes_per_id) - uncounted


def _require_match(tokens: Tokens, tokenizer: Tokenizer, file: RemoteFile) -> None:
    """Check that the tokenizer reproduces the first `tokens` when it decodes and encodes them."""
    if tokens[:_ROUNDTRIP_TOKENS].max() < tokenizer.vocab_size:  # `_TotalsCounter` reports larger ids
        share = roundtrip_share(tokens[:_ROUNDTRIP_TOKENS], tokenizer)
        if share < MIN_ROUNDTRIP:
            raise DataError(
                f"only {share:.0%} of the tokens in {file.path} are reproduced when {tokenizer.name} decodes and "
                "encodes them; shards and tokenizer of this repository do not match, so use another repository or "
                "revision"
            )


def _is_shard(path: Path) -> bool:
    try:
        read_shard(path)
    except DataError:
        return False
    return True


def _tokens_in(path: Path) -> int:
    return (path.stat().st_size - HEADER_BYTES) // 2
