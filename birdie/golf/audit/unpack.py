"""The source inside a script that unpacks itself: `exec(lzma.decompress(base64.b85decode("…")))` and its kin.

Records ship so, to save bytes. Nothing of the script runs: the constant is found in its syntax tree and unpacked here,
within a limit.
"""

import ast
import base64
import binascii
import bz2
import lzma
import zlib

from birdie.golf.audit.source import MOST, UNREADABLE

_CALLS = 16  # of exec that are looked into
_LAYERS = 4
_LONG = 200


def unpacked(tree: ast.Module) -> bytes | None:
    """The source that `tree` unpacks and executes; None: it does not, or not in a way that is known here."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")
    ]
    for inside in (*calls[:_CALLS], *([tree] if calls else [])):
        source = _text(inside)
        if source is not None:
            return source
    return None


def _text(inside: ast.AST) -> bytes | None:
    longest = b""
    for node in ast.walk(inside):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            data = node.value.encode("utf-8", "replace") if isinstance(node.value, str) else node.value
            longest = max(longest, data, key=len)
    return _layers(longest, _LAYERS) if len(longest) >= _LONG else None


def _layers(data: bytes, left: int) -> bytes | None:
    try:
        ast.parse(data)
        if b"\n" in data.strip() and any(word in data for word in (b"import", b"def ")):
            return data
    except UNREADABLE:
        pass
    if not left:
        return None
    for undo in (_inflate, _lzma, _bz2, base64.b85decode, _b64, base64.a85decode):
        try:
            inner = undo(data)
        except (ValueError, binascii.Error, zlib.error, lzma.LZMAError, OSError, EOFError):
            continue
        if inner and len(inner) < MOST and (source := _layers(inner, left - 1)) is not None:
            return source
    return None


def _b64(data: bytes) -> bytes:
    return base64.b64decode(data, validate=True)


def _inflate(data: bytes) -> bytes:
    for bits in (15, 31, -15):
        try:
            return zlib.decompressobj(bits).decompress(data, MOST)
        except zlib.error:
            continue
    raise ValueError("not deflate")


def _lzma(data: bytes) -> bytes:
    try:
        return lzma.LZMADecompressor(memlimit=1 << 28).decompress(data, MOST)
    except lzma.LZMAError:
        raw = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 24}]
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=raw).decompress(data, MOST)


def _bz2(data: bytes) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, MOST)
