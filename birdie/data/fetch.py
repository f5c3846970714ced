"""The challenge's published shards, fetched into the challenge's layout and held against all they must agree with.

    hub ──► beside its place ──► size, SHA-256 ──► header, ids, bytes by the tokenizer ──► in place ──► dataset.json

Files appear one by one, whole or not at all (the validation shards together, for a part of them is another score), and
`dataset.json` counts after each what is there: a fetch that is stopped leaves a data set that works, and the same call
again fetches only what is missing or damaged. Nothing is remembered between calls: the hub is asked each time.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from birdie.data.byte_accounting import ByteTable, Tokens, check_bytes
from birdie.data.dataset import LEAST_REPRODUCED, DatasetInfo, SplitTotals, reproduced
from birdie.data.hub import RemoteFile, Repository
from birdie.data.prepare import Layout, require_right
from birdie.data.published import MANIFEST, MAX_MANIFEST, Published, choose, find_root, require_variant
from birdie.data.shards import HEADER_BYTES, read_shard
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ConfigError, DataError, OutputError
from birdie.runtime.files import atomic_path, require_writable, write_bytes

Stage = Literal["check", "fetch", "count"]
Report = Callable[[Stage, int, int], None]  # bytes done and in all

SPARE = 64_000_000  # bytes of disk left free beside what is fetched
_SAMPLE = 1 << 22  # validation tokens decoded to prove the byte table: seconds, where all of them take half a minute
_PROBE = 65_536  # tokens that must come back when their text is encoded again
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Source:
    """Where a published data set is.

    Attributes:
        repo: "owner/name" of a data set on the hub.
        revision: branch, tag or commit; None: what is newest now.
        root: folder of the repository with datasets/ and tokenizers/; None: the challenge's, or the only one.
        endpoint: the hub's address; None: `HF_ENDPOINT`, or huggingface.co.
    """

    repo: str = "willdepueoai/parameter-golf"
    revision: str | None = None
    root: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A published data set that is ready.

    Attributes:
        folder: the shards and their dataset.json.
        tokenizer: what `load_tokenizer` takes: the path of the model, or "bytes".
        info: contents of dataset.json.
        commit: of the repository.
        fetched: names of the files that had to be fetched.
        kept: names of those that were there and whole.
        bytes: fetched.
        notes: what was not as it should be at the source, in sentences.
    """

    folder: Path
    tokenizer: str
    info: DatasetInfo
    commit: str
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]


def fetch(
    variant: str = "sp1024",
    train_shards: int = 10,
    root: str | Path = "data",
    *,
    source: Source | None = None,
    report: Report | None = None,
) -> Fetched:
    """Fetch the validation split, the first `train_shards` training shards and the tokenizer of `variant`.

    Training shards beyond those that are in the folder already are checked and counted too.

    Args:
        variant: "sp1024", "byte260", …
        train_shards: how many, from the first on; 0 for validation alone.
        root: folder of the layout.
        source: where from; default: the challenge's own repository.
        report: is told the bytes done and in all: of files there being checked, fetched, and counted again.

    Raises:
        ConfigError: a setting is out of range, or huggingface_hub is not installed.
        DataError: the hub does not give the data, or what it gives does not fit together.
        OutputError: no space, or data that did not come from this repository is in the way.
    """
    if train_shards < 0:
        raise ConfigError(f"train_shards={train_shards} must not be negative")
    require_variant(variant)
    source = source or Source()
    repository = Repository.open(source.repo, source.revision, source.endpoint)
    published = _published(repository, variant, source.root)
    if train_shards > len(published.train):
        raise ConfigError(
            f"{variant} has {len(published.train)} training shards in {source.repo}, not {train_shards}; ask for fewer"
        )
    return _Fetch(repository, published, Layout.of(root, variant), report or _unheard).run(train_shards)


def _published(repository: Repository, variant: str, root: str | None) -> Published:
    place = find_root(repository.files, variant, root)
    manifest = repository.files.get(place + MANIFEST)
    if manifest is None:
        return choose(repository.files, place, variant, None)
    if manifest.size > MAX_MANIFEST:
        raise DataError(f"the hub lists {manifest.path} with {manifest.size:,} bytes; nothing was fetched")
    with tempfile.TemporaryDirectory() as folder:  # never kept: a manifest of yesterday names the shards of yesterday
        return choose(repository.files, place, variant, repository.fetch(manifest, Path(folder)).read_bytes())


def _unheard(stage: Stage, done: int, total: int) -> None:
    """A report to nobody."""


class _Fetch:
    """One fetch: what is there, what is missing, and the way from one to the other."""

    def __init__(self, repository: Repository, published: Published, layout: Layout, report: Report) -> None:
        self._repository, self._published, self._layout, self._report = repository, published, layout, report
        self._fetched: list[RemoteFile] = []
        self._done = self._missing_bytes = 0

    def run(self, train_shards: int) -> Fetched:
        published, folder = self._published, self._layout.folder
        require_writable(folder)
        info = self._earlier()
        present = {path.name for split in ("train", "val") for path in folder.glob(f"*_{split}_*.bin")}
        if foreign := present - {file.name for file in (*published.train, *published.val)}:
            raise OutputError(
                f"{folder} holds {min(foreign)}, which {self._repository.name} has not; choose another root, or move "
                "it away"
            )
        train = [file for place, file in enumerate(published.train) if place < train_shards or file.name in present]
        kept = self._whole([file for file in (*published.val, *train) if file.name in present], info)
        missing = [file for file in (*published.val, *train) if file.name not in kept]
        self._require_space(missing)
        tokenizer = self._tokenizer()
        if info is not None and not self._counted(info, tokenizer, train, kept):
            info = None
        with self._staging() as staging:
            if info is None or missing:
                info = self._val(tokenizer, staging, kept, info)
                info = self._train(tokenizer, staging, train, kept, info)
        names = [file.name for file in (*published.val, *train)]
        return Fetched(
            folder,
            str(self._layout.model or "bytes"),
            info,
            self._repository.commit,
            tuple(file.name for file in self._fetched),
            tuple(name for name in names if name in kept),
            sum(file.size for file in self._fetched),
            published.notes,
        )

    def _earlier(self) -> DatasetInfo | None:
        """What dataset.json says, if it is ours to replace.

        Raises:
            OutputError: it is of other data.
        """
        try:
            info = DatasetInfo.read(self._layout.folder)
        except DataError:  # damaged, and written anew from the shards
            return None
        if info is not None and info.corpus.partition("@")[0] != self._repository.name:
            raise OutputError(
                f"{self._layout.folder} holds data of {info.corpus}; choose another root, or move it away"
            )
        return info

    def _whole(self, files: Sequence[RemoteFile], info: DatasetInfo | None) -> set[str]:
        """Names of the files that are what the hub lists; the others are damaged, and will be fetched again.

        Raises:
            OutputError: a sound shard of unknown origin is in the way of another.
        """
        total, done, kept = sum(file.size for file in files), 0, set()
        for file in files:
            path = self._layout.folder / file.name
            if file.matches(path, lambda count, done=done: self._report("check", done + count, total)):  # type: ignore[misc]
                kept.add(file.name)
            elif info is None and _is_shard(path):
                raise OutputError(
                    f"{path} is a shard, but not the one {self._repository.name} has; choose another root, or move it "
                    "away"
                )
            done += file.size
        return kept

    def _require_space(self, missing: Iterable[RemoteFile]) -> None:
        self._missing_bytes = sum(file.size for file in missing)
        free = shutil.disk_usage(self._layout.folder).free
        if self._missing_bytes and self._missing_bytes + SPARE > free:
            raise OutputError(
                f"{self._missing_bytes:,} bytes are to be fetched into {self._layout.folder}, where {free:,} are free; "
                "ask for fewer --train-shards, free some space or choose another root"
            )

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A folder beside the places of the files, so that they move by renaming; gone at the end, whatever happens."""
        staging = Path(tempfile.mkdtemp(prefix=".hub.", suffix=".part", dir=self._layout.folder))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _get(self, file: RemoteFile, staging: Path) -> Path:
        done = self._done
        path = self._repository.fetch(
            file,
            staging,
            lambda count: self._report("fetch", min(done + count, self._missing_bytes), self._missing_bytes),
        )
        self._done += file.size
        self._fetched.append(file)
        return path

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer, in its place.

        Raises:
            DataError: it cannot be used, or is not of this variant.
            OutputError: another one is there.
        """
        remote, model, variant = self._published.model, self._layout.model, self._published.variant
        if remote is None or model is None:
            return load_tokenizer("bytes")
        if model.exists() and not remote.matches(model):
            raise OutputError(f"{model} is another tokenizer than {self._repository.name} has; choose another root")
        with self._staging() as staging:
            found = model.exists()
            path = model if found else self._repository.fetch(remote, staging)
            tokenizer = load_tokenizer(path)
            if tokenizer.name != variant:
                raise DataError(
                    f"{remote.path} of {self._repository.name} has {tokenizer.vocab_size:,} pieces, so it is not of "
                    f"{variant}; use another repository or revision"
                )
            tokenizer.byte_table()  # refuses a vocabulary that would count spaces as three bytes
            if not found:
                write_bytes(model, tokenizer.model_bytes)
                self._fetched.append(remote)
        return tokenizer

    def _counted(self, info: DatasetInfo, tokenizer: Tokenizer, train: Sequence[RemoteFile], kept: set[str]) -> bool:
        """Whether `info` counts just the files kept, and these come first: then they need not be counted again."""
        names = [file.name for file in train]
        first = [name for name in names if name in kept]
        held = {
            "val": sum(
                _tokens_of(self._layout.folder / file.name) for file in self._published.val if file.name in kept
            ),
            "train": sum(_tokens_of(self._layout.folder / name) for name in first),
        }
        return (
            info.tokenizer_sha256 == tokenizer.digest
            and names[: len(first)] == first
            and {file.name for file in self._published.val} <= kept
            and (info.val.tokens, info.train.tokens) == (held["val"], held["train"])
        )

    def _val(self, tokenizer: Tokenizer, staging: Path, kept: set[str], info: DatasetInfo | None) -> DatasetInfo:
        """The validation shards in place, checked and counted."""
        if info is not None:
            return replace(info, corpus=self._corpus)
        folder, files = self._layout.folder, self._published.val
        paths = [folder / file.name if file.name in kept else self._get(file, staging) for file in files]
        shards = [read_shard(path) for path in paths]
        totals = _Count(tokenizer)
        for file, tokens in zip(files, shards, strict=True):
            totals.add(tokens, file)
        said = self._published.val_tokens
        if said is not None and totals.totals.tokens != said:
            raise DataError(
                f"{MANIFEST} of {self._repository.name} counts {said:,} validation tokens, the shards hold "
                f"{totals.totals.tokens:,}; a score on them would compare with nothing, so use another revision"
            )
        _require_fit(shards[0], tokenizer, files[0])
        sample = shards[0][:_SAMPLE]
        require_right(check_bytes(tokenizer, sample), tokenizer)
        for file, path in zip(files, paths, strict=True):
            self._place(path, file)
        none = SplitTotals(0, 0, 0, 0)
        return DatasetInfo(self._corpus, tokenizer.kind, tokenizer.digest, tokenizer.vocab_size, none, totals.totals)

    def _train(
        self, tokenizer: Tokenizer, staging: Path, train: Sequence[RemoteFile], kept: set[str], info: DatasetInfo
    ) -> DatasetInfo:
        """The training shards in place, each checked and counted, `dataset.json` after each."""
        folder = self._layout.folder
        counted = sum(file.name in kept for file in train) if info.train.tokens else 0  # they come first
        uncounted = {file.name for file in train[counted:] if (folder / file.name).exists()}
        recount, done = sum(file.size for file in train[counted:] if file.name in kept), 0
        count = _Count(tokenizer, info.train)
        if counted:
            count.last = int(read_shard(folder / train[counted - 1].name)[-1])
        if not uncounted:
            info.write(folder)
        for file in train[counted:]:
            path = folder / file.name if file.name in kept else self._get(file, staging)
            tokens = read_shard(path)
            if file is train[0]:
                _require_fit(tokens, tokenizer, file)
            count.add(tokens, file)
            if file.name in kept:
                done += file.size
                self._report("count", done, recount)
            else:
                self._place(path, file)
            uncounted.discard(file.name)
            info = replace(info, train=count.totals)
            if not uncounted:  # not while it would count only a part of what is there
                info.write(folder)
        return info

    @property
    def _corpus(self) -> str:
        return f"{self._repository.name}@{self._repository.commit[:12]}"

    def _place(self, path: Path, file: RemoteFile) -> None:
        target = self._layout.folder / file.name
        if path != target:
            with atomic_path(target) as temporary:
                path.replace(temporary)


class _Count:
    """Totals of a stream of shards; a document may go on from one into the next.

    Attributes:
        totals: so far.
        last: the token before the next shard; BOS at the start.
    """

    def __init__(self, tokenizer: Tokenizer, totals: SplitTotals | None = None) -> None:
        self.totals = totals or SplitTotals(0, 0, 0, 0)
        self.last = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table()

    def add(self, tokens: Tokens, file: RemoteFile) -> None:
        """Count a shard.

        Raises:
            DataError: it holds an id the tokenizer has not.
        """
        documents = size = 0
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            histogram = np.bincount(chunk, minlength=len(self._table))
            if len(histogram) > self._tokenizer.vocab_size:
                raise DataError(
                    f"{file.path} holds token id {len(histogram) - 1}, but {self._tokenizer.name} has "
                    f"{self._tokenizer.vocab_size:,} ids; the tokenizer there did not make the shards there"
                )
            documents += int(histogram[self._tokenizer.bos_id])
            size += _bytes(self._table, histogram, chunk, self.last)
            self.last = int(chunk[-1])
        old = self.totals
        # the text before the tokenizer normalised it is not published: its size is given as that of the decoded text
        self.totals = SplitTotals(
            old.documents + documents, old.tokens + len(tokens), old.bytes + size, old.source_bytes + size
        )


def _bytes(table: ByteTable, histogram: NDArray[np.intp], chunk: Tokens, previous: int) -> int:
    """Sum of `table.count` of `chunk` (N,) after `previous`: by kinds of tokens, less the spaces after a boundary."""
    each = table.base_bytes.astype(np.int64) + table.has_leading_space
    after = np.flatnonzero(table.is_boundary[chunk[:-1]]) + 1
    unspaced = int(table.has_leading_space[chunk[after]].sum())
    unspaced += int(table.is_boundary[previous] and table.has_leading_space[chunk[0]])
    return int(histogram @ each) - unspaced


def _require_fit(tokens: Tokens, tokenizer: Tokenizer, file: RemoteFile) -> None:
    """Refuse a tokenizer that would cut the text of `tokens` otherwise than they are."""
    if tokens[:_PROBE].max() < tokenizer.vocab_size:  # a larger id is told where ids are counted
        share = reproduced(tokens[:_PROBE], tokenizer)
        if share < LEAST_REPRODUCED:
            raise DataError(
                f"only {share:.0%} of the tokens in {file.path} come back when their text by {tokenizer.name} is "
                "encoded again; the tokenizer there did not make the shards there"
            )


def _is_shard(path: Path) -> bool:
    try:
        read_shard(path)
    except DataError:
        return False
    return True


def _tokens_of(path: Path) -> int:
    return (path.stat().st_size - HEADER_BYTES) // 2
