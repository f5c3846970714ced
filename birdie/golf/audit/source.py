"""Python source that an audit reads: within a size, unpacked, parsed once. Nothing of it runs.

A megabyte of two-byte statements takes a parser most of a gigabyte; the longest script of a record has 200 kB. Many
records ship as `exec(lzma.decompress(base64.b85decode("…")))`: the constant is found in the syntax tree and unpacked
here, within the same size. A script that birdie packed has many modules, which are read one by one.
"""

import ast
import base64
import binascii
import bz2
import lzma
import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from birdie.errors import DataError
from birdie.golf.packed import is_packed, sources_of
from birdie.system.regular import open_regular

MAX_BYTES = 500_000
"""Bytes of one file that are parsed."""
MAX_NODES = 200_000
"""Nodes of its syntax tree; 200 kB of a record have some 50,000."""
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of the parser, and of turning a tree back into text."""

_MAX_CALLS = 16  # of exec that are looked into
_MAX_LAYERS = 4
_MIN_PACKED = 200


@dataclass(frozen=True)
class Source:
    """The source of one file.

    Attributes:
        size: bytes of the file.
        data: the bytes; empty if there are too many to be read.
        tree: the syntax tree; None if there is none within the limits.
        problem: the reason why there is no tree.
        line: the line of that problem; 0 if unknown.
    """

    size: int
    data: bytes = b""
    tree: ast.Module | None = None
    problem: str = ""
    line: int = 0

    @cached_property
    def program(self) -> str | None:
        """The program in one layout, without comments, docstrings and blank lines; None if there is no tree."""
        if self.tree is None:
            return None
        bodies = []
        try:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    first = node.body[0] if node.body else None
                    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                        bodies.append((node, node.body))
                        node.body = node.body[1:]
            return ast.unparse(self.tree)
        except UNREADABLE:
            return None
        finally:
            for node, body in bodies:
                node.body = body

    @cached_property
    def unpacked(self) -> bytes | None:
        """The source that this one decompresses and executes; None if it does not, or in a way that is not known."""
        calls = [
            node
            for node in ast.walk(self.tree or ast.Module([], []))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")
        ]
        for node in (*calls[:_MAX_CALLS], *([self.tree] if calls and self.tree else [])):
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            packed = [text.encode("utf-8", "replace") if isinstance(text, str) else text for text in texts]
            longest = max((data for data in packed if isinstance(data, bytes)), key=len, default=b"")
            inner = _unpack(longest, _MAX_LAYERS) if len(longest) >= _MIN_PACKED else None
            if inner is not None:
                return inner
        return None

    @property
    def modules(self) -> Mapping[str, str]:
        """Texts of the modules in a script that birdie packed, by path; empty for any other, or a damaged one."""
        return self._packed[0]

    @property
    def damage(self) -> str:
        """The reason why a script that birdie packed was not unpacked; empty if it was, and for any other."""
        return self._packed[1]

    @cached_property
    def _packed(self) -> tuple[Mapping[str, str], str]:
        try:
            return sources_of(self.data) if self.tree is not None and is_packed(self.data) else {}, ""
        except DataError as error:
            return {}, str(error)


def read_source(path: Path, limit: int = MAX_BYTES) -> Source:
    """Read and parse the source in `path`, unless it has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _too_large(size, limit) if size > limit else parse_source(file.read(limit))


def parse_source(data: bytes) -> Source:
    """Parse the source in `data`."""
    if len(data) > MAX_BYTES:
        return _too_large(len(data), MAX_BYTES)
    try:
        tree = _parse(data)
    except UNREADABLE as error:
        problem = f"cannot be parsed as Python ({getattr(error, 'msg', None) or error})"
        return Source(len(data), data, None, problem, getattr(error, "lineno", 0) or 0)
    nodes = sum(1 for _ in ast.walk(tree))
    if nodes > MAX_NODES:
        return Source(len(data), data, None, f"not scanned: {nodes:,} syntax nodes, the limit is {MAX_NODES:,}")
    return Source(len(data), data, tree)


def _parse(data: bytes) -> ast.Module:
    with warnings.catch_warnings():  # invalid escapes in somebody else's strings
        warnings.simplefilter("ignore")
        return ast.parse(data)


def _too_large(size: int, limit: int) -> Source:
    return Source(size, problem=f"not scanned: {size:,} bytes, the limit is {limit:,}")


def _unpack(data: bytes, layers: int) -> bytes | None:
    """Undo up to `layers` encodings or compressions, until Python comes out."""
    try:
        _parse(data)
        if b"\n" in data.strip() and any(word in data for word in (b"import", b"def ")):
            return data
    except UNREADABLE:
        pass
    for undo in (_inflate, _lzma, _bz2, base64.b85decode, _b64, base64.a85decode) if layers else ():
        try:
            inner = undo(data)
        except (ValueError, binascii.Error, zlib.error, lzma.LZMAError, OSError, EOFError):
            continue
        if inner and len(inner) < MAX_BYTES and (source := _unpack(inner, layers - 1)) is not None:
            return source
    return None


def _b64(data: bytes) -> bytes:
    return base64.b64decode(data, validate=True)


def _inflate(data: bytes) -> bytes:
    for bits in (15, 31, -15):
        try:
            return zlib.decompressobj(bits).decompress(data, MAX_BYTES)
        except zlib.error:
            continue
    raise ValueError("not deflate")


def _lzma(data: bytes) -> bytes:
    try:
        return lzma.LZMADecompressor(memlimit=1 << 28).decompress(data, MAX_BYTES)
    except lzma.LZMAError:
        raw = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 24}]
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=raw).decompress(data, MAX_BYTES)


def _bz2(data: bytes) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, MAX_BYTES)
