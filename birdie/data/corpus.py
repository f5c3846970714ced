"""Text sources: documents for training and held-out documents for validation, always in the same order.

A corpus is a list of files and a rule that says which of their documents are held out. The rule hashes names or text
(SHA-256, never Python's own hash), so a document is on the same side on every machine, and stays there when files are
added, unless so few were there before that one had to be chosen. Copies of a held-out document are not for training.
"""

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Literal, TextIO

from birdie.errors import ConfigError, DataError

Unit = Literal["file", "line", "jsonl"]
Documents = Literal["auto", "file", "line"]

VALIDATION_FRACTION = 0.05
_FILES_TO_SPLIT = 20  # with fewer files, whole files are too coarse to hold out
_WILDCARDS = set("*?[")
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of documents.

    Attributes:
        path: where it is.
        key: its name relative to the corpus, with "/" on every system: what the split by file hashes.
        unit: what a document is: the whole "file", a "line", or field "text" of each line ("jsonl").
        skip_undecodable: a file that is not UTF-8 holds no documents instead of being an error.
    """

    path: Path
    key: str
    unit: Unit
    skip_undecodable: bool = False

    def documents(self) -> Iterator[str]:
        """The documents that hold more than whitespace; line ends become "\\n".

        Raises:
            DataError: the file cannot be read, is not UTF-8, or a JSON line is malformed; names the file and line.
        """
        try:
            with self.path.open(encoding="utf-8-sig") as file:
                if self.unit == "file":
                    texts: Iterator[str] = iter([file.read()])
                else:
                    texts = self._records(file) if self.unit == "jsonl" else (line.rstrip("\n") for line in file)
                yield from (text for text in texts if text and not text.isspace())
        except UnicodeDecodeError as error:
            if self.skip_undecodable:
                return
            raise DataError(f"{self.path} is not UTF-8 text; convert it or leave it out of the pattern") from error
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {(error.strerror or str(error)).lower()}") from error

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


@dataclass(frozen=True, slots=True)
class Overlap:
    """Training documents that are held out, too.

    Attributes:
        documents: how many.
        first: where the first of them stands; empty without any.
    """

    documents: int = 0
    first: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to train on and documents to validate on.

    Attributes:
        name: for logs and data sets.
        train_files: files with documents to train on.
        validation_files: files with held-out documents.
        held_out_fraction: set when both are the same files: the share of documents held out, by hash of their text
            (so copies of a document are on one side).
        leaves_out_copies: documents of training files that are held out, too, are no training documents: where the
            split is birdie's own choice of files, copies are nobody's mistake.
    """

    name: str
    train_files: tuple[TextFile, ...]
    validation_files: tuple[TextFile, ...]
    held_out_fraction: float | None = None
    leaves_out_copies: bool = False

    def train(self) -> Iterator[str]:
        """The training documents, in order.

        Raises:
            DataError: a file cannot be used, or (at the end) there was no document.
        """
        return self._documents(self.train_files, held_out=False)

    def validation(self) -> Iterator[str]:
        """The held-out documents, in order; raises as `train`."""
        return self._documents(self.validation_files, held_out=True)

    def overlap(self) -> Overlap:
        """The documents of training files that are held out, too, by hash of their text; reads all files.

        Raises:
            DataError: a file cannot be used.
        """
        if self.held_out_fraction is not None:  # the text itself decides on its side
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
            if self.leaves_out_copies and not held_out:
                copied = self._held_out()
                chosen = (text for text in chosen if _digest(text) not in copied)
        else:
            end = _held_out_below(map(_place, _all_documents(files)), self.held_out_fraction)
            chosen = (text for text in _all_documents(files) if (_place(text) < end) == held_out)
        empty = True
        for text in chosen:
            empty = False
            yield text
        if empty and held_out:
            raise DataError(
                f"corpus {self.name} has no validation documents; give files to validate on (--validation), "
                "or split the text by lines (--documents line)"
            )
        if empty:
            raise DataError(f"corpus {self.name} has no training documents; give more text")


def _all_documents(files: Iterable[TextFile]) -> Iterator[str]:
    return chain.from_iterable(file.documents() for file in files)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _place(name: str) -> int:
    """Where `name` lies among all names: the head of its SHA-256, in [0, 2**64)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _held_out_below(places: Iterable[int], fraction: float) -> int:
    """The place below which names are held out: `fraction` of the way, but so that both sides get at least one."""
    end, least, greatest = math.ceil(fraction * 2**64), 2**64, 0
    for place in places:
        least, greatest = min(least, place), max(greatest, place)
        if least < end <= greatest:
            return end
    return min(max(end, least + 1), greatest)


def _split_by_file(name: str, files: Sequence[TextFile], fraction: float) -> Corpus:
    end = _held_out_below((_place(file.key) for file in files), fraction)
    train = tuple(file for file in files if _place(file.key) >= end)
    held_out = tuple(file for file in files if _place(file.key) < end)
    return Corpus(name, train, held_out, leaves_out_copies=True)


def stdlib_corpus() -> Corpus:
    """The sources of Python's own standard library: text that is on every machine. One file, one document.

    Tests and installed packages are left out, and the file of build settings that differs between machines. About 5 %
    of the files are held out.

    Raises:
        DataError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, inner_folders, names in os.walk(root):
        inner_folders[:] = set(inner_folders) - _NOT_SOURCES  # os.walk then stays out of these
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                files.append(TextFile(path, path.relative_to(root).as_posix(), "file", skip_undecodable=True))
    if not files:
        raise DataError(f"no .py files under {root}: this Python comes without its sources; give text files instead")
    return _split_by_file("stdlib", sorted(files, key=lambda file: file.key), VALIDATION_FRACTION)


def file_corpus(
    patterns: Sequence[str | Path],
    *,
    validation: Sequence[str | Path] = (),
    documents: Documents = "auto",
    validation_fraction: float = VALIDATION_FRACTION,
    name: str = "files",
) -> Corpus:
    """Local text: files, folders (everything in them but hidden files and `__pycache__`) or globs, in sorted order.

    A `.jsonl` file has one document a line, in field "text". In text files a document is the whole file or a line, as
    `documents` says; "auto" takes whole files, or lines when there is just one text file, which could not be split.

    Args:
        patterns: the text, to train on and (unless `validation` is given) to hold documents out of.
        validation: text to validate on, instead of a held-out share. Files in both are used for validation only.
        documents: what a document of a text file is.
        validation_fraction: share held out, by file with 20 files or more, else by document; at least one and never
            all of them.

    Raises:
        ConfigError: a setting is out of range.
        DataError: a pattern matches no file, or nothing is left to train on.
    """
    if documents not in ("auto", "file", "line"):
        raise ConfigError(f"documents={documents!r} is unknown; choose auto, file or line")
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"validation_fraction={validation_fraction} must lie between 0 and 1")
    found = _find(patterns)
    held_out = _find(validation) if validation else {}
    unit = documents
    if unit == "auto":
        unit = "line" if sum(path.suffix != ".jsonl" for path in found) == 1 else "file"
    train = _text_files({path: key for path, key in found.items() if path not in held_out}, unit)
    if not train:
        raise DataError("every training file is a validation file too; nothing is left to train on")
    if validation:
        return Corpus(name, train, _text_files(held_out, unit))
    if len(train) >= _FILES_TO_SPLIT:
        return _split_by_file(name, train, validation_fraction)
    return Corpus(name, train, train, validation_fraction)


def _text_files(found: dict[Path, str], unit: Literal["file", "line"]) -> tuple[TextFile, ...]:
    """`found` as files of the corpus, sorted by key."""
    return tuple(
        TextFile(path, key, "jsonl" if path.suffix == ".jsonl" else unit)
        for path, key in sorted(found.items(), key=lambda item: (item[1], item[0]))
    )


def _find(patterns: Sequence[str | Path]) -> dict[Path, str]:
    """Resolved path → key of every file the patterns match."""
    found: dict[Path, str] = {}
    for pattern in patterns:
        matched = dict(_matches(str(pattern)))
        if not matched:
            raise DataError(f"{pattern} matches no file; give text files, folders or globs")
        found |= matched
    return found


def _matches(pattern: str) -> Iterator[tuple[Path, str]]:
    """(resolved path, key) of the files one pattern matches; the key is relative to the part without wildcards."""
    top = Path(pattern)
    if top.exists():
        matches, root = [top], top if top.is_dir() else top.parent
    else:
        matches = [Path(match) for match in glob(pattern, recursive=True)]  # noqa: PTH207 (pattern may be absolute)
        root = next(parent for parent in top.parents if _WILDCARDS.isdisjoint(str(parent)))
    for match in matches:
        inside = match.rglob("*") if match.is_dir() else [match]
        for path in inside:
            hidden = any(part.startswith(".") for part in path.relative_to(match).parts)
            if path.is_file() and not hidden and "__pycache__" not in path.relative_to(root).parts:
                yield path.resolve(), path.relative_to(root).as_posix()
