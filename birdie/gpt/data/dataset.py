"""Data set: a folder of shards, its totals, and the check that a tokenizer matches it.

`prepare` writes a `dataset.json` beside its shards (tokenizer hash, totals). Shards from other sources have none; then
a tokenizer is checked by file names, by the largest id, and by decoding and encoding a sample.
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

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.byte_accounting import Tokens, split_documents
from birdie.gpt.data.byte_sidecar import is_sidecar
from birdie.gpt.data.shards import Split, load_tokens, read_shard
from birdie.gpt.data.tokenizer import Tokenizer
from birdie.system.files import write_bytes
from birdie.system.parsing import to_json
from birdie.system.regular import regular_file

INFO_NAME = "dataset.json"
_FORMAT = 1
_VOCABULARY = re.compile(r"_((?:sp|byte)\d+(?:_caseops)?)(?=[_.])")  # in file names such as "…_sp1024.bin"
_SAMPLE_TOKENS = 65_536
MIN_ROUNDTRIP = 0.95  # least `roundtrip_share` of a matching tokenizer; see check_tokenizer
_HEAD_TOKENS = 1 << 22  # tokens of a training shard that are checked for the largest id

_LABELS = {"bytes": "byte{}", "caseops": "sp{}_caseops"}  # tokenizer names in file names, by kind; default "sp{}"
_SPLITS: dict[Split, str] = {"train": "training", "val": "validation"}

Patterns = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class SplitTotals:
    """Totals of one split.

    Attributes:
        tokens: number of tokens, one BOS per document included.
        bytes: UTF-8 bytes of the text that the tokens decode to.
        source_bytes: UTF-8 bytes of the text before the tokenizer normalized it.
    """

    documents: int
    tokens: int
    bytes: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Content of `dataset.json`.

    Attributes:
        tokenizer_kind: "bytes", "sentencepiece" or "caseops".
        tokenizer_sha256: digest of the tokenizer.
        vocab_size: number of token ids.
        train: totals of the training shards.
        val: totals of the validation shards.
        source: digest of the paths that the text came from; empty: unknown.
    """

    corpus: str
    tokenizer_kind: str
    tokenizer_sha256: str
    vocab_size: int
    train: SplitTotals
    val: SplitTotals
    source: str = ""

    def write(self, folder: Path) -> None:
        """Write `dataset.json` into `folder`."""
        text = to_json({"format": _FORMAT, **asdict(self)}, indent=2)
        write_bytes(folder / INFO_NAME, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> "DatasetInfo | None":
        """Return the content of `dataset.json` in `folder`, or None if there is no such file."""
        path = folder / INFO_NAME
        if not path.exists():
            return None
        try:
            fields = json.loads(regular_file(path).read_bytes())
            if fields.pop("format") != _FORMAT:
                raise ValueError("unknown format")
            info = cls(**{**fields, "train": SplitTotals(**fields["train"]), "val": SplitTotals(**fields["val"])})
            numbers = [info.vocab_size, *asdict(info.train).values(), *asdict(info.val).values()]
            names = [info.corpus, info.tokenizer_kind, info.tokenizer_sha256, info.source]
            if not all(type(n) is int for n in numbers) or not all(type(n) is str for n in names):
                raise TypeError("a field has the wrong type")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is damaged or of another version; prepare the data again or remove it") from error
        return info


@dataclass(frozen=True)
class Dataset:
    """Training and validation shards.

    Attributes:
        train: training shards in order.
        val: validation shards in order.
        info: content of `dataset.json` beside them, if there is one.
    """

    train: tuple[Path, ...]
    val: tuple[Path, ...]
    info: DatasetInfo | None = None

    @cached_property
    def train_tokens(self) -> int:
        """Number of tokens in the training shards."""
        return sum(len(read_shard(path)) for path in self.train)

    @cached_property
    def val_tokens(self) -> int:
        """Number of tokens in the validation shards."""
        return sum(len(read_shard(path)) for path in self.val)

    def validation_tokens(self, limit: int | None = None) -> Tokens:
        """Return all validation tokens (N,), or the first `limit`, in memory."""
        if not self.val:
            raise DataError("the data set has no validation shards; give files named *_val_*.bin")
        return load_tokens(self.val, limit)


def open_dataset(
    folder: str | os.PathLike[str] | None = None,
    *,
    train: Patterns = (),
    val: Patterns = (),
    splits: Collection[Split] = ("train", "val"),
) -> Dataset:
    """Open the data set in `folder` (files `*_train_*.bin` and `*_val_*.bin`), or the data set of files and globs.

    The header of every shard is checked. Byte sidecars are ignored.

    Args:
        train: training shards, instead of a folder; may be empty if `val` is not.
        val: validation shards, instead of a folder; may be empty if `train` is not.
        splits: splits to open in the folder; the other split is empty in the result and may be missing in the folder.
    """
    if (folder is None) == (not train and not val):
        raise ConfigError("give either a data folder or shard files (train=…, val=…)")
    if folder is not None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"data folder {folder} does not exist; create it with birdie prepare or give another")
        train, val = (_in_folder(folder, split) if split in splits else [] for split in _SPLITS)
    files = Dataset(_expand(train), _expand(val))
    folders = {path.parent for path in files.train + files.val}
    info = DatasetInfo.read(folders.pop()) if len(folders) == 1 else None
    _check_one_vocabulary(files, info)
    in_shards = {"train": files.train_tokens, "val": files.val_tokens}  # reads every header
    if folder is not None and info is not None:
        in_info = {"train": info.train.tokens, "val": info.val.tokens}
        for split in splits:
            if in_shards[split] != in_info[split]:
                raise DataError(
                    f"{folder / INFO_NAME} counts {in_info[split]:,} {_SPLITS[split]} tokens, the shards have "
                    f"{in_shards[split]:,}; a shard is missing or from another data set, prepare the data again"
                )
    return Dataset(files.train, files.val, info)


def _in_folder(folder: Path, split: Split) -> list[Path]:
    pattern = f"*_{split}_*.bin"
    if not (paths := sorted(path for path in folder.glob(pattern) if not is_sidecar(path))):
        raise DataError(
            f"{folder} has no {_SPLITS[split]} ({pattern}) shards; prepare the data, or give the files or a glob"
        )
    return paths


def _expand(patterns: Patterns) -> tuple[Path, ...]:
    """Return the files of each pattern in name order, without duplicates; patterns keep their order."""
    paths: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        names = [] if "\0" in str(pattern) else sorted(glob(str(pattern)))  # noqa: PTH207 (pattern may be absolute)
        matches = [Path(pattern)] if Path(pattern).exists() else [Path(name) for name in names]
        matches = [path for path in matches if not is_sidecar(path)]
        if not matches:
            raise DataError(f"{pattern} matches no shard; check the path")
        paths.update(dict.fromkeys(matches))
    return tuple(paths)


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
    """Check that the shards were made with `tokenizer`, and return warnings.

    With a `dataset.json` the hashes are compared. Without one, all validation ids and the head of every training shard
    must be in the vocabulary, and a sample that is decoded and encoded again must give the same tokens: the right
    tokenizer reproduces all of them, a wrong one decodes them to a text that it encodes differently (12 to 94 % of the
    tokens were reproduced in trials).
    """
    info = dataset.info
    if info is not None:
        if info.tokenizer_sha256 != tokenizer.digest:
            raise DataError(
                f"the shards were made with {info.tokenizer_kind} tokenizer sha256 {info.tokenizer_sha256[:12]}… "
                f"(vocabulary {info.vocab_size:,}), but {tokenizer.name}, sha256 {tokenizer.digest[:12]}…, was given; "
                "give the tokenizer that was prepared with them"
            )
        return []
    for path in dataset.train + dataset.val:
        tokens = read_shard(path)
        largest = int((tokens if path in dataset.val else tokens[:_HEAD_TOKENS]).max())
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{path} has token id {largest}, but {tokenizer.name} has {tokenizer.vocab_size:,} ids; "
                "give the tokenizer that the shards were made with"
            )
    warnings = [f"no {INFO_NAME} beside the shards: {tokenizer.name} was checked by decoding only"]
    for path in dataset.train[:1] + dataset.val[:1]:
        warnings += _check_by_decoding(path, tokenizer)
    return warnings


def _check_by_decoding(path: Path, tokenizer: Tokenizer) -> list[str]:
    sample, warnings = read_shard(path)[:_SAMPLE_TOKENS], []
    if tokenizer.bos_id not in sample:
        warnings.append(f"{path} has no BOS (id {tokenizer.bos_id}), which documents begin with")
    share = roundtrip_share(sample, tokenizer)
    if share < MIN_ROUNDTRIP:
        raise DataError(
            f"only {share:.0%} of the tokens in {path} are reproduced when {tokenizer.name} decodes and encodes them; "
            "give the tokenizer that the shards were made with"
        )
    if share < 0.999:
        warnings.append(f"only {share:.1%} of the tokens in {path} are reproduced by decoding and encoding them")
    return warnings


def roundtrip_share(tokens: Tokens, tokenizer: Tokenizer) -> float:
    """Return the share of `tokens` (N,) that are the same at the same byte of the text after decoding and encoding."""
    table = tokenizer.byte_table()
    same = total = 0
    for document in split_documents(tokens, tokenizer.bos_id):
        encoded = tokenizer.encode(tokenizer.decode(document))
        # One key per token, made of its byte offset and its id: equal keys are equal tokens at equal offsets.
        keys = [np.cumsum(table.count_document(ids, tokenizer.bos_id)) * 65_536 + ids for ids in (document, encoded)]
        same += int(np.isin(keys[0], keys[1]).sum())
        total += len(document)
    return same / total if total else 1.0
