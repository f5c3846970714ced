"""A folder of shards: which files, how many tokens, made with which tokenizer.

`prepare` leaves a `dataset.json` beside its shards (tokenizer hash, totals); shards from elsewhere come without it, and
then only their names, their largest id and what they decode to can speak for a tokenizer.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from glob import glob
from pathlib import Path

import numpy as np

from birdie.data.byte_accounting import Tokens, split_documents
from birdie.data.shards import Split, read_shard
from birdie.data.sidecar import is_sidecar
from birdie.data.tokenizer import Tokenizer
from birdie.errors import ConfigError, DataError
from birdie.runtime.files import write_bytes

INFO_NAME = "dataset.json"
_FORMAT = 1
_VOCABULARY = re.compile(r"_((?:sp|byte)\d+(?:_caseops)?)(?=[_.])")  # as file names spell it: "…_sp1024.bin"
_SAMPLE_TOKENS = 65_536
LEAST_REPRODUCED = 0.95  # share of tokens that come back from text; see check_tokenizer
_HEAD_TOKENS = 1 << 22  # of a train shard, looked at for the largest id

_LABELS = {"bytes": "byte{}", "caseops": "sp{}_caseops"}  # of tokenizers, by their kind
_SPLITS: dict[Split, str] = {"train": "training", "val": "validation"}

Patterns = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class SplitTotals:
    """Totals of one split.

    Attributes:
        documents: number of documents.
        tokens: number of tokens, a BOS for each document included.
        bytes: UTF-8 bytes of the text the tokens decode to.
        source_bytes: UTF-8 bytes of the text before the tokenizer normalised it.
    """

    documents: int
    tokens: int
    bytes: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What `dataset.json` says.

    Attributes:
        corpus: name of the corpus.
        tokenizer_kind: "bytes", "sentencepiece" or "caseops".
        tokenizer_sha256: the tokenizer's digest.
        vocab_size: its number of ids.
        train: totals of the training shards.
        val: totals of the validation shards.
    """

    corpus: str
    tokenizer_kind: str
    tokenizer_sha256: str
    vocab_size: int
    train: SplitTotals
    val: SplitTotals

    def write(self, folder: Path) -> None:
        """Write `dataset.json` into `folder`."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)
        write_bytes(folder / INFO_NAME, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> "DatasetInfo | None":
        """What `dataset.json` in `folder` says, or None without one.

        Raises:
            DataError: it is malformed.
        """
        path = folder / INFO_NAME
        if not path.exists():
            return None
        try:
            fields = json.loads(path.read_bytes())
            if fields.pop("format") != _FORMAT:
                raise ValueError("another format")
            info = cls(**{**fields, "train": SplitTotals(**fields["train"]), "val": SplitTotals(**fields["val"])})
            numbers = [info.vocab_size, *asdict(info.train).values(), *asdict(info.val).values()]
            names = [info.corpus, info.tokenizer_kind, info.tokenizer_sha256]
            if not all(type(n) is int for n in numbers) or not all(type(n) is str for n in names):
                raise TypeError("a field of another type")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is damaged or of another version; prepare the data again or remove it") from error
        return info


@dataclass(frozen=True)
class Dataset:
    """Shards to train on and to validate on.

    Attributes:
        train: training shards in stream order.
        val: validation shards in stream order.
        info: what `dataset.json` beside them says, if there is one.
    """

    train: tuple[Path, ...]
    val: tuple[Path, ...]
    info: DatasetInfo | None = None

    @cached_property
    def train_tokens(self) -> int:
        """Tokens in the training shards."""
        return sum(len(read_shard(path)) for path in self.train)

    @cached_property
    def val_tokens(self) -> int:
        """Tokens in the validation shards."""
        return sum(len(read_shard(path)) for path in self.val)

    def validation_tokens(self) -> Tokens:
        """The validation stream (N,); a memory map when it is one shard.

        Raises:
            DataError: there are no validation shards.
        """
        if not self.val:
            raise DataError("the data set has no validation shards; give files named *_val_*.bin")
        parts = [read_shard(path) for path in self.val]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def open_dataset(
    folder: str | os.PathLike[str] | None = None,
    *,
    train: Patterns = (),
    val: Patterns = (),
    splits: Collection[Split] = ("train", "val"),
) -> Dataset:
    """The data set in `folder` (files `*_train_*.bin` and `*_val_*.bin`), or of the files and globs given.

    Every header is checked. With files given, one of the splits may be left out. Byte sidecars are passed over.

    Args:
        folder: where the shards lie.
        train: training shards, instead of a folder.
        val: validation shards, instead of a folder.
        splits: the splits to take from the folder; one that is left out comes back empty and need not be there.

    Raises:
        ConfigError: neither or both of folder and files are given.
        DataError: shards are missing, malformed, of different vocabularies, or not those `dataset.json` counted.
    """
    if (folder is None) == (not train and not val):
        raise ConfigError("give either a data folder or shard files (train=…, val=…)")
    if folder is not None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"data folder {folder} does not exist; make it with birdie prepare or give another")
        train, val = (_in_folder(folder, split) if split in splits else [] for split in _SPLITS)
    files = Dataset(_expand(train), _expand(val))
    folders = {path.parent for path in files.train + files.val}
    info = DatasetInfo.read(folders.pop()) if len(folders) == 1 else None
    _check_one_vocabulary(files, info)
    held = {"train": files.train_tokens, "val": files.val_tokens}  # reads every header
    if folder is not None and info is not None:
        counted = {"train": info.train.tokens, "val": info.val.tokens}
        for split in splits:
            if held[split] != counted[split]:
                raise DataError(
                    f"{folder / INFO_NAME} counts {counted[split]:,} {_SPLITS[split]} tokens, the shards hold "
                    f"{held[split]:,}; a shard is missing or foreign, prepare the data again"
                )
    return Dataset(files.train, files.val, info)


def _in_folder(folder: Path, split: Split) -> list[Path]:
    pattern = f"*_{split}_*.bin"
    if not (found := sorted(path for path in folder.glob(pattern) if not is_sidecar(path))):
        raise DataError(
            f"{folder} has no {_SPLITS[split]} ({pattern}) shards; prepare the data or give the files one by one"
        )
    return found


def _expand(patterns: Patterns) -> tuple[Path, ...]:
    """The files of each pattern in name order, patterns in the order given, none twice."""
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        matches = [Path(pattern)] if Path(pattern).exists() else [Path(p) for p in sorted(glob(str(pattern)))]  # noqa: PTH207
        matches = [path for path in matches if not is_sidecar(path)]
        if not matches:
            raise DataError(f"{pattern} matches no shard; check the path")
        found.update(dict.fromkeys(matches))
    return tuple(found)


def _check_one_vocabulary(files: Dataset, info: DatasetInfo | None) -> None:
    by_label: dict[str, str] = {}
    if info is not None:
        by_label[_LABELS.get(info.tokenizer_kind, "sp{}").format(info.vocab_size)] = INFO_NAME
    for path in files.train + files.val:
        for label in _VOCABULARY.findall(path.name)[-1:]:
            by_label.setdefault(label, path.name)
    if len(by_label) > 1:
        kinds = ", ".join(f"{label} ({name})" for label, name in sorted(by_label.items()))
        raise DataError(
            f"the shards mix vocabularies: {kinds}; choose one by globs, such as train='*_train_*_{min(by_label)}.bin'"
        )


def check_tokenizer(dataset: Dataset, tokenizer: Tokenizer) -> list[str]:
    """Make sure that `tokenizer` made the shards; the warnings it leaves.

    With a `dataset.json` the hashes decide. Without one, every validation id and the head of every training shard must
    be in the vocabulary, and a sample, decoded and encoded again, must give its own tokens back: the right tokenizer
    reproduces them all, a wrong one decodes to word salad that it cuts otherwise (12 to 94 % came back in trials).

    Raises:
        DataError: it did not.
    """
    info = dataset.info
    if info is not None:
        if info.tokenizer_sha256 != tokenizer.digest:
            raise DataError(
                f"the shards were made with {info.tokenizer_kind} tokenizer sha256 {info.tokenizer_sha256[:12]}… "
                f"(vocabulary {info.vocab_size:,}), but {tokenizer.name}, sha256 {tokenizer.digest[:12]}…, was given; "
                "give the tokenizer prepared with them"
            )
        return []
    for path in dataset.train + dataset.val:
        tokens = read_shard(path)
        largest = int((tokens if path in dataset.val else tokens[:_HEAD_TOKENS]).max())
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{path} holds token id {largest}, but {tokenizer.name} has {tokenizer.vocab_size:,} ids; "
                "give the tokenizer the shards were made with"
            )
    warnings = [f"no {INFO_NAME} beside the shards: {tokenizer.name} was checked by decoding only"]
    for path in dataset.train[:1] + dataset.val[:1]:
        warnings += _check_by_decoding(path, tokenizer)
    return warnings


def _check_by_decoding(path: Path, tokenizer: Tokenizer) -> list[str]:
    sample, warnings = read_shard(path)[:_SAMPLE_TOKENS], []
    if tokenizer.bos_id not in sample:
        warnings.append(f"{path} has no BOS (id {tokenizer.bos_id}) where documents begin")
    share = reproduced(sample, tokenizer)
    if share < LEAST_REPRODUCED:
        raise DataError(
            f"only {share:.0%} of the tokens in {path} come back when their text by {tokenizer.name} is encoded again; "
            "give the tokenizer the shards were made with"
        )
    if share < 0.999:
        warnings.append(f"only {share:.1%} of the tokens in {path} come back when their text is encoded again")
    return warnings


def reproduced(tokens: Tokens, tokenizer: Tokenizer) -> float:
    """Share of `tokens` (N,) that come back, at the same byte of the text, when it is decoded and encoded again."""
    table = tokenizer.byte_table()
    same = total = 0
    for document in split_documents(tokens, tokenizer.bos_id):
        again = tokenizer.encode(tokenizer.decode(document))
        placed = [np.cumsum(table.count_document(ids, tokenizer.bos_id)) * 65_536 + ids for ids in (document, again)]
        same += int(np.isin(placed[0], placed[1]).sum())
        total += len(document)
    return same / total if total else 1.0
