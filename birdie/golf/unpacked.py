"""Modules of a packed script, for those who read it: the script is parsed and decoded, and never runs.

    train_gpt.py ─► literals FIRST, MODULES ─► FIRST unpacked ─► SIZE, DIGEST ─► MODULES decoded, compared ─► texts

Lengths are compared with limits before anything of that length is allocated.
"""

import ast
import hashlib
import lzma
from typing import Any

from birdie.errors import DataError
from birdie.golf import first_stage, text_coder

MAX_SCRIPT, MAX_FIRST, MAX_MODULES = 500_000, 200_000, 2_000_000
"""Most bytes of a script, of what runs first, and of its modules; decoding 2 MB takes eight seconds."""

FIRST = "first stage"
"""Name of what runs first, among the modules."""


def is_packed(script: bytes) -> bool:
    """Return whether a script says in its first line that birdie packed it."""
    return script.startswith(b"#birdie ")


def modules_of(script: bytes) -> dict[str, str]:
    """Return the source texts in a packed script by path, and what runs first as `FIRST`.

    Raises:
        DataError: it is no packed script of this version, it is damaged, or it is longer than any.
    """
    if len(script) > MAX_SCRIPT:
        raise DataError(f"the packed script has {len(script):,} bytes, more than {MAX_SCRIPT:,}: it was not unpacked")
    try:
        outer = _constants(script)
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=1 << 28)
        first = decompressor.decompress(outer["FIRST"].encode("latin-1"), MAX_FIRST)
        if not decompressor.eof:
            raise DataError(f"what the packed script runs first is damaged, or longer than {MAX_FIRST:,} bytes")
        inner = _constants(first)
        size, coded = int(inner["SIZE"]), first_stage.read_letters(outer["MODULES"])
        if not 0 <= size <= MAX_MODULES:
            raise DataError(f"the packed script states {size:,} bytes of modules, more than {MAX_MODULES:,}")
        data = text_coder.decode(coded, size)
        if hashlib.sha256(data).hexdigest() != inner["DIGEST"]:
            raise DataError("the modules of the packed script do not have the digest that it states: it is damaged")
        parts = data.decode().split("\0")
        return {FIRST: first.decode(), **dict(zip(parts[::2], parts[1::2], strict=True))}
    except (
        KeyError,
        ValueError,
        OverflowError,
        TypeError,
        AttributeError,
        SyntaxError,
        RecursionError,
        lzma.LZMAError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the packed script cannot be unpacked: {str(error)[:100] or type(error).__name__}") from error


def _constants(source: bytes) -> dict[str, Any]:
    """Return the constants that a source assigns to names at its top level."""
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {
        target.id: node.value.value
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
    }
