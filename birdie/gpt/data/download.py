"""Download of a published data set into the challenge's folder layout, with all of its consistency checks.

    Hub ──► .NAME.download/ ──► size, SHA-256 ──► header, ids, bytes by the tokenizer ──► NAME/, dataset.json

huggingface_hub transfers the files, shows its bars and continues what was stopped, so `HF_ENDPOINT`, `HF_TOKEN` and
proxies work as usual. The folder beside the data set keeps what was received until all of it is checked. Each call
requests the listing, and downloads only what is missing or damaged.
"""

import glob
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError, DataError, OutputError
from birdie.gpt.data.byte_accounting import ByteTable, Tokens, check_bytes
from birdie.gpt.data.dataset import MIN_ROUNDTRIP, DatasetInfo, SplitTotals, roundtrip_share
from birdie.gpt.data.preparation import Layout, require_matching_bytes
from birdie.gpt.data.published import (
    MANIFEST,
    MAX_MANIFEST,
    RemoteDataset,
    RemoteFile,
    find_root,
    read_listing,
    require_variant,
    select_files,
)
from birdie.gpt.data.shards import HEADER_BYTES, read_shard
from birdie.gpt.data.tokenizer import Tokenizer, load_tokenizer
from birdie.system.callbacks import no_message
from birdie.system.files import atomic_path, write_bytes
from birdie.system.hub_requests import library, request
from birdie.system.locks import locked_folder
from birdie.system.outputs import require_folder, require_writable

_TIMEOUT = 30.0
_SAMPLE_TOKENS = 1 << 22  # validation tokens that check the byte table: takes seconds, all of them half a minute
_ROUNDTRIP_TOKENS = 65_536  # tokens that must be reproduced when they are decoded and encoded
_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a published data set.

    Attributes:
        repo: "owner/name" of a data set repository on the Hub.
        revision: branch, tag or commit; None: the newest commit.
        root: folder of the repository with datasets/ and tokenizers/; None: the challenge's, or the only one.
        endpoint: address of the Hub; None: `HF_ENDPOINT`, or huggingface.co.
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
) -> DownloadedDataset:
    """Download the validation split, the first `train_shards` training shards and the tokenizer of `variant`.

    Training shards beyond those that are already in the folder are checked and counted as well.

    Args:
        variant: "sp1024", "byte260", …
        train_shards: number of training shards; 0 for validation only.
        root: root of the folder layout.
        source: location of the data set; default: the challenge's own repository.
    """
    if train_shards < 0:
        raise ConfigError(f"train_shards={train_shards} must not be negative")
    require_variant(variant)
    source = source or Source()
    commit, dataset = _look_up(source, variant)
    if train_shards > len(dataset.train):
        raise ConfigError(
            f"{variant} has {len(dataset.train)} training shards in {source.repo}, not {train_shards}; "
            "lower --train-shards"
        )
    layout = Layout.published(root, variant)
    folder, model = layout.folder, layout.model
    require_writable(require_folder(folder, overwrite=True))
    info = _replaceable_info(folder, source.repo)
    present = {path.name for split in ("train", "val") for path in folder.glob(f"*_{split}_*.bin")}
    if foreign := present - {file.name for file in (*dataset.train, *dataset.val)}:
        raise OutputError(
            f"{folder} has {min(foreign)}, which {source.repo} does not have; choose another root, or move it away"
        )
    train = [file for index, file in enumerate(dataset.train) if index < train_shards or file.name in present]
    wanted = [*dataset.val, *train]
    kept = _intact([file for file in wanted if file.name in present], folder, info, source.repo)
    missing = [file for file in wanted if file.name not in kept]
    if dataset.model is not None and model is not None:
        if not model.exists():
            missing.insert(0, dataset.model)
        elif not dataset.model.matches(model):
            raise OutputError(f"{model} differs from the tokenizer of {source.repo}; choose another root")
    if missing or info is None or not _counts(info, folder, dataset.val, train):
        staging = require_writable(require_folder(folder.with_name(f".{folder.name}.download"), overwrite=True))
        with locked_folder(staging, no_message):
            _fetch(source, commit, missing, staging)
            tokenizer = _tokenizer(dataset, model, staging, source.repo)
            paths = {file: folder / file.name if file.name in kept else staging / file.path for file in wanted}
            val, train_totals = _checked_totals(dataset, train, paths, tokenizer, source.repo)
            corpus = f"{source.repo}@{commit[:12]}"
            info = DatasetInfo(corpus, tokenizer.kind, tokenizer.digest, tokenizer.vocab_size, train_totals, val)
            if model is not None and not model.exists():
                write_bytes(model, tokenizer.model_bytes)
            for file in wanted:
                if file.name not in kept:
                    with atomic_path(folder / file.name) as temporary:
                        paths[file].replace(temporary)
            info.write(folder)  # last: without it, or with other totals, the next call counts again
        shutil.rmtree(staging, ignore_errors=True)
    return DownloadedDataset(
        folder,
        str(model or "bytes"),
        info,
        commit,
        tuple(file.name for file in missing),
        tuple(file.name for file in wanted if file.name in kept),
        sum(file.size for file in missing),
        dataset.notes,
    )


def _look_up(source: Source, variant: str) -> tuple[str, RemoteDataset]:
    """Return the commit of the repository and the files of `variant` in it."""
    api = library().HfApi(endpoint=source.endpoint)
    subject = f"{source.repo} at {api.endpoint}"
    info: Any = request(
        lambda: api.dataset_info(source.repo, revision=source.revision, files_metadata=True, timeout=_TIMEOUT), subject
    )
    commit, files = read_listing(info, subject)
    root = find_root(files, variant, source.root)
    manifest = files.get(root + MANIFEST)
    if manifest is None:
        return commit, select_files(files, root, variant, None)
    if manifest.size > MAX_MANIFEST:
        raise DataError(f"the Hub lists {manifest.path} with {manifest.size:,} bytes; nothing was downloaded")
    with tempfile.TemporaryDirectory() as temporary:  # not kept: an old manifest names old shards
        _fetch(source, commit, [manifest], Path(temporary))
        return commit, select_files(files, root, variant, (Path(temporary) / manifest.path).read_bytes())


def _replaceable_info(folder: Path, repo: str) -> DatasetInfo | None:
    """Return the existing dataset.json, or None if there is none or it is damaged."""
    try:
        info = DatasetInfo.read(folder)
    except DataError:  # damaged: it is written again from the shards
        return None
    if info is not None and info.corpus.partition("@")[0] != repo:
        raise OutputError(f"{folder} has data of {info.corpus}; choose another root, or move it away")
    return info


def _intact(files: Sequence[RemoteFile], folder: Path, info: DatasetInfo | None, repo: str) -> set[str]:
    """Return the names of the local files that match the listing; the others are downloaded again."""
    kept = {file.name for file in files if file.matches(folder / file.name)}
    for path in (folder / file.name for file in files if file.name not in kept):
        if info is None and _is_shard(path):
            raise OutputError(
                f"{path} is a valid shard, but differs from the one of {repo}; choose another root, or move it away"
            )
    return kept


def _is_shard(path: Path) -> bool:
    try:
        read_shard(path)
    except DataError:
        return False
    return True


def _counts(info: DatasetInfo, folder: Path, val: Iterable[RemoteFile], train: Iterable[RemoteFile]) -> bool:
    """Return whether `info` has the totals of the shards in `folder`, by their sizes."""
    sizes = [sum(((folder / file.name).stat().st_size - HEADER_BYTES) // 2 for file in files) for files in (val, train)]
    return sizes == [info.val.tokens, info.train.tokens]


def _fetch(source: Source, commit: str, files: Sequence[RemoteFile], folder: Path) -> None:
    """Download `files` into `folder`, with their paths in the repository, and check each against the listing."""
    if not files:
        return

    def transfer() -> object:
        return library().snapshot_download(
            source.repo,
            repo_type="dataset",
            revision=commit,
            endpoint=source.endpoint,
            allow_patterns=[glob.escape(file.path) for file in files],
            local_dir=folder,
        )

    request(transfer, f"{files[0].path if len(files) == 1 else f'{len(files)} files'} of {source.repo}")
    for file in files:  # a pattern that matches nothing is no error of the library, nor is a folder that existed
        path = folder / file.path
        if not file.matches(path):
            what = "other bytes than the Hub lists" if path.exists() else "no bytes"
            path.unlink(missing_ok=True)
            raise DataError(f"{file.path} of {source.repo} was received with {what}; run this again later")


def _tokenizer(dataset: RemoteDataset, model: Path | None, staging: Path, repo: str) -> Tokenizer:
    if dataset.model is None or model is None:
        return load_tokenizer("bytes")
    tokenizer = load_tokenizer(model if model.exists() else staging / dataset.model.path)
    if tokenizer.name != dataset.variant:
        raise DataError(
            f"{dataset.model.path} of {repo} has {tokenizer.vocab_size:,} pieces, so it does not belong to "
            f"{dataset.variant}; use another repository or revision"
        )
    return tokenizer


def _checked_totals(
    dataset: RemoteDataset,
    train: Sequence[RemoteFile],
    paths: dict[RemoteFile, Path],
    tokenizer: Tokenizer,
    repo: str,
) -> tuple[SplitTotals, SplitTotals]:
    """Return the totals of the validation and the training shards, which match the tokenizer and the manifest."""
    totals = []
    for files in (dataset.val, train):
        counter = _TotalsCounter(tokenizer)
        for file in files:
            tokens = read_shard(paths[file])
            counter.add(tokens, file)
            if file is files[0]:
                _require_match(tokens, tokenizer, file)
            if file is dataset.val[0]:
                require_matching_bytes(check_bytes(tokenizer, tokens[:_SAMPLE_TOKENS]), tokenizer)
        totals.append(counter.totals)
    val, train_totals = totals
    if dataset.val_tokens is not None and val.tokens != dataset.val_tokens:
        raise DataError(
            f"{MANIFEST} of {repo} counts {dataset.val_tokens:,} validation tokens, the shards have {val.tokens:,}; a "
            "score on them would not be comparable, so use another revision"
        )
    return val, train_totals


class _TotalsCounter:
    """Totals of consecutive shards; a document may continue from one shard to the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.totals = SplitTotals(0, 0, 0, 0)
        self._tokenizer, self._table, self._last = tokenizer, tokenizer.byte_table(), tokenizer.bos_id

    def add(self, tokens: Tokens, file: RemoteFile) -> None:
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
            size += _block_bytes(self._table, histogram, block, self._last)
            self._last = int(block[-1])
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
    share = roundtrip_share(tokens[:_ROUNDTRIP_TOKENS], tokenizer)
    if share < MIN_ROUNDTRIP:
        raise DataError(
            f"only {share:.0%} of the tokens in {file.path} are reproduced when {tokenizer.name} decodes and encodes "
            "them; shards and tokenizer of this repository do not match, so use another repository or revision"
        )
