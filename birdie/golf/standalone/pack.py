"""Python source as the smallest file that Python runs.

    #birdie 0.1.0 coding:L1          in Latin-1 every byte is a letter, so a string literal holds compressed bytes as
    import bz2;a='''…'''             they are, but for the few that need a backslash
    exec(compile(…a…,__file__,…))

bz2 and lzma are tried; zlib is 6 % longer, base85 instead of Latin-1 a quarter.

The code is compiled under the file's own name. So compiled kernels are kept beside the file, as for any module (or in
the user's cache folder where that is read-only): nothing is unpacked, and no two processes race.
Each statement is on a line of its own and the source begins below the last one: no traceback prints the packed line.
"""

import bz2
import lzma

_ESCAPES = {"\0": "\\0", "\\": "\\\\", "\r": "\\r", "\n": "\\n"}
_BLANK = "\n\n\n"  # as many lines as the packed file has: tracebacks look up lines by number


def pack(source: str, title: str) -> bytes:
    """Return a .py file that defines what `source` defines; its first line is a comment with `title`.

    The same source gives the same bytes with the same liblzma and libbz2.
    """
    return min(forms(source, title).values(), key=len)


def forms(source: str, title: str) -> dict[str, bytes]:
    """Return the packed file by the name of its compressor."""
    data = (_BLANK + source).encode()
    # Raw source is some 50 to 120 kB; pb=0 because text has no alignment; lc is worth trying, lp never pays.
    settings = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 17, "pb": 0, "lp": 0}
    by_lzma = [lzma.compress(data, lzma.FORMAT_ALONE, filters=[settings | {"lc": lc}]) for lc in range(5)]
    return {
        "bz2": _file(title, "bz2", bz2.compress(data, 9)),
        "lzma": min((_file(title, "lzma", packed) for packed in by_lzma), key=len),
    }


def _file(title: str, module: str, packed: bytes) -> bytes:
    """Return the three lines around `packed`, which the decompressor in `module` unpacks."""
    lines = (
        f"#{title} coding:L1",
        f"import {module};a={literal(packed)}",
        f"exec(compile({module}.decompress(a.encode('L1')),__file__,'exec'))",
    )
    return "\n".join(lines).encode("latin-1")


def literal(data: bytes) -> str:
    """Return a string literal whose characters are the bytes `data`, for source in Latin-1."""
    text = data.decode("latin-1")
    parts = []
    for letter, following in zip(text, [*text[1:], ""], strict=True):
        # A digit after \0 would become part of the escape.
        parts.append("\\x00" if letter == "\0" and following in "01234567" else _ESCAPES.get(letter, letter))
    inner = "".join(parts).replace("'''", "''\\'")
    if inner.endswith("'") and not inner.endswith("\\'"):
        inner = inner[:-1] + "\\'"
    return f"'''{inner}'''"
