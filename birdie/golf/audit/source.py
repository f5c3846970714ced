"""Python source that an audit looks at: within a size, read once and parsed once. Nothing of it runs.

A megabyte of two-byte statements takes a parser most of a gigabyte; the longest script of a record has 200 kB.
"""

import ast
import warnings
from dataclasses import dataclass
from pathlib import Path

MOST = 500_000
"""Bytes of one file that are looked at."""
MOST_NODES = 200_000
"""Nodes of its syntax tree; 200 kB of a record have some 50,000."""

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What parsing raises, and what walking a tree back into text does."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file.

    Attributes:
        size: its bytes.
        data: the bytes; empty if they are too many to be looked at.
        tree: of its syntax; None: it has none that is looked at.
        why: there is no tree.
        line: that is to blame; 0: none.
    """

    size: int
    data: bytes = b""
    tree: ast.Module | None = None
    why: str = ""
    line: int = 0

    @property
    def program(self) -> str | None:
        """It without comments, docstrings and blank lines, written one way; None: it has no tree, or too deep a one."""
        if self.tree is None:
            return None
        whole = []
        try:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    first = node.body[0] if node.body else None
                    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                        whole.append((node, node.body))
                        node.body = node.body[1:]
            return ast.unparse(self.tree)
        except UNREADABLE:
            return None
        finally:
            for node, body in whole:
                node.body = body


def read_source(path: Path, most: int = MOST) -> Source:
    """The source in `path`, of which no more than `most` bytes are looked at.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > most:
        return Source(size, why=f"it is {size:,} bytes, more than the {most:,} that are looked at")
    return source_of(path.read_bytes())


def source_of(data: bytes) -> Source:
    """The source that `data` is."""
    if len(data) > MOST:
        return Source(len(data), why=f"it is {len(data):,} bytes, more than the {MOST:,} that are looked at")
    try:
        with warnings.catch_warnings():  # of escapes that are none, say, in somebody else's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except UNREADABLE as error:
        why = f"it cannot be parsed as Python ({getattr(error, 'msg', None) or error})"
        return Source(len(data), data, None, why, getattr(error, "lineno", 0) or 0)
    nodes = sum(1 for _ in ast.walk(tree))
    if nodes > MOST_NODES:
        return Source(len(data), data, None, f"it has {nodes:,} parts, more than the {MOST_NODES:,} that are looked at")
    return Source(len(data), data, tree)
