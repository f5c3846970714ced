"""Text sources: training documents and held-out validation documents, always in the same order.

A corpus is a list of files and a rule that decides which documents are held out. The rule hashes file names or texts
with SHA-256 (Python's own hash differs between processes). So a document is in the same split on every machine, and
stays there when files are added. The exception is a corpus so small that one document had to be moved to have both
splits. Copies of a held-out document are not trained on.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Literal, TextIO, cast, get_args

from birdie.errors import ConfigError, DataError
from birdie.system.regular import files_below

Unit = Literal["file", "part", "line", "jsonl"]
Documents = Literal["auto", "file", "part", "line"]

STDLIB = "stdlib"
"""Name of the corpus of Python's standard library."""
VALIDATION_FRACTION = 0.05
_PART = 2_000  # least characters of a part of a file of at least twenty of them
_MIN_FILES_TO_SPLIT = 20  # with fewer files the split is by document, because one file is too large a share
_WILDCARDS = set("*?[")
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of documents.

    Attributes:
        key: its name relative to the corpus, with "/" on every system; a split by file hashes it.
        unit: a document is the entire "file", a "part" of some lines, a "line" without its end, or field "text" of each
            line ("jsonl").
        skip_undecodable: a file that is not UTF-8 has no documents instead of being an error.
    """

    path: Path
    key: str
    unit: Unit
    skip_undecodable: bool = False

    def documents(self) -> Iterator[str]:
        """Yield the documents that are more than whitespace, as they are but for a byte order mark.

        A file that gzip, bzip2 or xz compressed, whatever its name, is decompressed.
        """
        try:
            with _open_text(self.path) as file:
                if self.unit == "file":
                    texts: Iterator[str] = iter([file.read()])
                elif self.unit == "part":
                    texts = _parts(file)
                else:
                    texts = self._records(file) if self.unit == "jsonl" else (line.rstrip("\r\n") for line in file)
                yield from (text for text in texts if text and not text.isspace())
        except UnicodeDecodeError as error:
            if self.skip_undecodable:
                return
            raise DataError(f"{self.path} is not UTF-8 text; convert it or leave it out of the pattern") from error
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # the last three: compressed and damaged
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise DataError(f"cannot read {self.path}: {reason.lower()}") from error

    def _records(self, file: TextIO) -> Iterator[str]:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(
                    f'{self.path}, line {number} is not a JSON object with a string "text"; fix or remove the line'
                ) from error
            yield text


_REFUSED = {
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it first (zstd -d)",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "a Parquet file; write its texts as .jsonl first",
    b"\xff\xfe": "UTF-16; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16; convert it to UTF-8 first",
}
"""First bytes of a file → what it is, whatever its name."""
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")


def _parts(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file, joined to documents of 2,000 characters, or a twentieth of a file of fewer."""
    head = file.read(20 * _PART) + file.readline()
    least, part = min(_PART, len(head) // 20), ""
    for line in chain(io.StringIO(head, newline="\n"), file):
        part += line
        if len(part) >= least and not line.isspace():  # empty lines alone would be no document
            yield part
            part = ""
    yield part


def _open_text(path: Path) -> TextIO:
    """Open a file of text, which may be compressed; ends of lines stay as they are."""
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return bz2.open(path, "rt", encoding="utf-8-sig", newline="\n")
    for magic, opened in ((b"\x1f\x8b", gzip.open), (b"\xfd7zXZ\x00", lzma.open)):
        if head.startswith(magic):
            return cast(TextIO, opened(path, "rt", encoding="utf-8-sig", newline="\n"))
    for magic, kind in _REFUSED.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {kind}")
    if 10 * head.count(0) > len(head):  # so does UTF-16 look without a mark at its beginning
        raise DataError(f"{path} is not text but binary, or UTF-16; convert it to UTF-8 or leave it out of the pattern")
    return path.open(encoding="utf-8-sig", newline="\n")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Training documents that are validation documents as well.

    Attributes:
        documents: number of them.
        first: location of the first one; empty if there is none.
    """

    documents: int = 0
    first: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training documents and held-out validation documents.

    Attributes:
        name: for logs, and of the data set's folder and files; letters, digits, "." and "-".
        train_files: files with training documents.
        validation_files: files with held-out documents.
        held_out_fraction: set if both are the same files: the share of documents held out, by hash of their text (so
            copies of a document are in one split).
        excludes_copies: leave copies of held-out documents out of the training documents. It is set if birdie chose the
            held-out files itself; if the user chose them, copies are an error.
        source: digest of the paths that the text comes from, so that no data set replaces that of another text.
    """

    name: str
    train_files: tuple[TextFile, ...]
    validation_files: tuple[TextFile, ...]
    held_out_fraction: float | None = None
    excludes_copies: bool = False
    source: str = ""

    def train(self) -> Iterator[str]:
        """Yield the training documents, in order."""
        return self._documents(self.train_files, held_out=False)

    def validation(self) -> Iterator[str]:
        """Yield the held-out documents, in order; raises the same errors as `train`."""
        return self._documents(self.validation_files, held_out=True)

    def overlap(self) -> Overlap:
        """Count the documents of training files that are held out as well, by hash of their text; reads all files."""
        if self.held_out_fraction is not None:  # the split is by text, so copies are in the same split
            return Overlap()
        held_out, count, first = self._held_out(), 0, ""
        for file in self.train_files:
            for number, text in enumerate(file.documents(), 1):
                if _digest(text) in held_out:
                    first = first or (str(file.path) if file.unit == "file" else f"document {number} of {file.path}")
                    count += 1
        return Overlap(count, first)

    def _held_out(self) -> set[bytes]:
        return {_digest(text) for text in _all_documents(self.validation_files)}

    def _documents(self, files: tuple[TextFile, ...], *, held_out: bool) -> Iterator[str]:
        if self.held_out_fraction is None:
            chosen = _all_documents(files)
            if self.excludes_copies and not held_out:
                excluded = self._held_out()
                chosen = (text for text in chosen if _digest(text) not in excluded)
        else:
            threshold = _split_threshold(map(_split_hash, _all_documents(files)), self.held_out_fraction)
            chosen = (text for text in _all_documents(files) if (_split_hash(text) < threshold) == held_out)
        empty = True
        for text in chosen:
            empty = False
            yield text
        if empty and held_out:
            raise DataError(
                f"corpus {self.name} has no validation documents; give validation files (--validation), "
                "or split the text by lines (--documents line)"
            )
        if empty:
            raise DataError(f"corpus {self.name} has no training documents; give more text")


def _all_documents(files: Iterable[TextFile]) -> Iterator[str]:
    return chain.from_iterable(file.documents() for file in files)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _split_hash(key: str) -> int:
    """Return the first 64 bits of the SHA-256 of `key`: uniform in [0, 2**64)."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _split_threshold(hashes: Iterable[int], fraction: float) -> int:
    """Return the hash below which keys are held out: `fraction` of the range, moved so that both splits have a key."""
    threshold, least, greatest = math.ceil(fraction * 2**64), 2**64, 0
    for value in hashes:
        least, greatest = min(least, value), max(greatest, value)
        if least < threshold <= greatest:
            return threshold
    return min(max(threshold, least + 1), greatest)


def _split_by_file(name: str, files: Sequence[TextFile], fraction: float) -> Corpus:
    threshold = _split_threshold((_split_hash(file.key) for file in files), fraction)
    train = tuple(file for file in files if _split_hash(file.key) >= threshold)
    held_out = tuple(file for file in files if _split_hash(file.key) < threshold)
    return Corpus(name, train, held_out, excludes_copies=True)


def require_text_name(name: str) -> str:
    """Return a name of a text if it can be part of the names of files: shards end in `_train_000000.bin`."""
    if name != _text_name(name):
        raise ConfigError(f"the name {name!r} has more than letters, digits, '.' and '-'; try {_text_name(name)!r}")
    return name


def _text_name(name: str) -> str:
    return re.sub(r"[^\w.-]|_", "-", name).strip("-.") or "text"


def stdlib_corpus() -> Corpus:
    """Return the sources of Python's standard library, text that every machine has; each file is one document.

    Tests, installed packages and the file of build settings, which differs between machines, are excluded. About 5 % of
    the files are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, inner_folders, names in os.walk(root):
        inner_folders[:] = set(inner_folders) - _EXCLUDED_FOLDERS  # os.walk does not enter removed folders
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                files.append(TextFile(path, path.relative_to(root).as_posix(), "file", skip_undecodable=True))
    if not files:
        raise DataError(f"no .py files under {root}: this Python has no library sources; give text files instead")
    corpus = _split_by_file(STDLIB, sorted(files, key=lambda file: file.key), VALIDATION_FRACTION)
    return replace(corpus, source=STDLIB)


def file_corpus(
    patterns: Sequence[str | Path],
    *,
    validation: Sequence[str | Path] = (),
    documents: Documents = "auto",
    validation_fraction: float = VALIDATION_FRACTION,
    name: str | None = None,
) -> Corpus:
    """Return a corpus of local files, folders (without hidden files and `__pycache__`) or globs, in sorted order.

    A `.jsonl` file has one document per line, in field "text". In text files a document is the entire file, a part of
    it of some lines, or a line, as `documents` says; "auto" takes files, or parts if there is only one text file, which
    could not be split otherwise. Files that gzip, bzip2 or xz compressed are read as what they hold.

    Args:
        patterns: training text; unless `validation` is given, some of its documents are held out.
        validation: validation text, instead of a held-out share. Files in both are used for validation only.
        documents: unit of a document in text files.
        validation_fraction: share held out, by file with 20 files or more, else by document; at least one document and
            never all of them.
        name: of the corpus; default: that of its only file or folder, else of the folder that all are in.
    """
    if documents not in get_args(Documents):
        raise ConfigError(f"documents={documents!r} is unknown; choose {', '.join(get_args(Documents))}")
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"validation_fraction={validation_fraction} must be between 0 and 1")
    keys = _find_files(patterns)
    tops = [_top(str(pattern)).resolve() for pattern in patterns]
    common = Path(os.path.commonpath(tops))
    stem = common.name if common.is_dir() else (common.with_suffix("") if _is_compressed(common) else common).stem
    name = _text_name(stem) if name is None else require_text_name(name)
    held_out = _find_files(validation) if validation else {}
    unit: Unit = "part" if sum(not _is_jsonl(path) for path in keys) == 1 else "file"
    if documents != "auto":
        unit = documents
    train = _text_files({path: key for path, key in keys.items() if path not in held_out}, unit)
    if not train:
        raise DataError("every training file is a validation file as well; nothing is left to train on")
    if validation:
        corpus = Corpus(name, train, _text_files(held_out, unit))
    elif len(train) >= _MIN_FILES_TO_SPLIT:
        corpus = _split_by_file(name, train, validation_fraction)
    else:
        corpus = Corpus(name, train, train, validation_fraction)
    return replace(corpus, source=_digest("\n".join(sorted(map(str, tops)))).hex())


def _text_files(keys: dict[Path, str], unit: Unit) -> tuple[TextFile, ...]:
    """Return the files of `keys` (path → key), sorted by key."""
    return tuple(
        TextFile(path, key, "jsonl" if _is_jsonl(path) else unit)
        for path, key in sorted(keys.items(), key=lambda item: (item[1], item[0]))
    )


def _is_jsonl(path: Path) -> bool:
    return (path.with_suffix("") if _is_compressed(path) else path).suffix == ".jsonl"


def _is_compressed(path: Path) -> bool:
    return path.suffix in _COMPRESSED_SUFFIXES


def _find_files(patterns: Sequence[str | Path]) -> dict[Path, str]:
    """Return resolved path → key of every file that matches a pattern."""
    keys: dict[Path, str] = {}
    for pattern in patterns:
        matches = {} if "\0" in str(pattern) else dict(_matches(str(pattern)))
        if not matches:
            raise DataError(f"{pattern} matches no file; give text files, folders or globs")
        keys |= matches
    return keys


def _top(pattern: str) -> Path:
    """Return what `pattern` names, or its folder without wildcards."""
    top = Path(pattern)
    return top if top.exists() else next(path for path in top.parents if _WILDCARDS.isdisjoint(str(path)))


def _matches(pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield (resolved path, key) of the files that match `pattern`; keys are relative to its part without wildcards."""
    top = _top(pattern)
    matches, root = [top], top if top.is_dir() else top.parent
    if top != Path(pattern):
        try:
            matches = [Path(match) for match in glob(pattern, recursive=True)]  # noqa: PTH207 (pattern may be absolute)
        except RecursionError:
            raise DataError(f"{pattern} meets folders nested too deeply; name one of the folders instead") from None
    for match in matches:
        for path in files_below(match) if match.is_dir() else [match]:
            hidden = any(part.startswith(".") for part in path.relative_to(match).parts)
            if path.is_file() and not hidden and "__pycache__" not in path.relative_to(root).parts:
                yield path.resolve(), path.relative_to(root).as_posix()
