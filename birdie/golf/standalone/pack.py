"""Python source as the smallest file that Python runs.

    #birdie 0.1.0 coding:L1          in Latin-1 every byte is a letter, so a string holds compressed bytes as they are,
    import lzma;a='''…'''            but for four that need a backslash
    exec(compile(…a…,__file__,…))

The better of lzma and bz2 is taken; `forms` measures all: base85 is a quarter longer, zlib and a zip with __main__ are
longer too. The code is compiled under the file's own name: numba then keeps its kernels beside the file (or in the
user's cache folder where that is read-only) as for any module, so nothing is unpacked, no folder of ours is written,
and no two processes race.
Code lies on its own line and the source begins below the last one: a traceback never prints the compressed line.
"""

import base64
import bz2
import io
import lzma
import zipfile
import zlib
from itertools import product

_ESCAPES = {"\0": "\\0", "\\": "\\\\", "\r": "\\r", "\n": "\\n"}
_BLANK = "\n\n\n"  # lines of the packed file, which tracebacks must not look up


def pack(source: str, about: str) -> bytes:
    """A .py file that defines what `source` defines; `about` is one line that says what it is.

    The same source gives the same bytes with the same liblzma.
    """
    return min(_candidates(source, about), key=len)


def forms(source: str, about: str) -> dict[str, int]:
    """Bytes of each form of a packed file, the one in use among them."""
    data = (_BLANK + source).encode()
    short = min((_lzma(data, lc, lp) for lc, lp in product(range(5), range(2)) if lc + lp <= 4), key=len)
    deflated = zlib.compress(data, 9)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.writestr(zipfile.ZipInfo("__main__.py"), source, zipfile.ZIP_DEFLATED, 9)
    return {
        "best": len(pack(source, about)),
        "bz2, Latin-1": len(_latin(about, "bz2", bz2.compress(data, 9))),
        "lzma, Latin-1": len(_latin(about, "lzma", short)),
        "lzma, base85": len(_text(about, "lzma", f"base64.b85decode({base64.b85encode(short).decode()!r})")),
        "zlib, Latin-1": len(_latin(about, "zlib", deflated)),
        "zlib, base85": len(_text(about, "zlib", f"base64.b85decode({base64.b85encode(deflated).decode()!r})")),
        "zip with __main__": len(archive.getvalue()),
        "source": len(source.encode()),
    }


def _candidates(source: str, about: str) -> list[bytes]:
    data = (_BLANK + source).encode("ascii")
    found = [_latin(about, "bz2", bz2.compress(data, 9))]
    for lc, lp, nice in product(range(5), range(2), (273, 128, 64, 48, 32, 24, 16, 12)):
        if lc + lp <= 4:
            found.append(_latin(about, "lzma", _lzma(data, lc, lp, nice)))
    return found


def _lzma(data: bytes, lc: int, lp: int, nice: int = 273) -> bytes:
    best = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 16, "pb": 0}
    return lzma.compress(
        data, lzma.FORMAT_ALONE, filters=[best | {"lc": lc, "lp": lp, "nice_len": nice, "depth": 1000}]
    )


def _latin(about: str, module: str, packed: bytes) -> bytes:
    text = packed.decode("latin-1")
    parts = []
    for letter, after in zip(text, [*text[1:], ""], strict=True):
        escaped = _ESCAPES.get(letter, letter)
        parts.append("\\x00" if letter == "\0" and after in "01234567" else escaped)
    inner = "".join(parts).replace("'''", "''\\'")
    if inner.endswith("'") and not inner.endswith("\\'"):
        inner = inner[:-1] + "\\'"
    lines = (
        f"#{about} coding:L1",
        f"import {module};a='''{inner}'''",
        f"exec(compile({module}.decompress(a.encode('L1')),__file__,'exec'))",
    )
    return "\n".join(lines).encode("latin-1")


def _text(about: str, module: str, data: str) -> bytes:
    return f"#{about}\nimport base64,{module}\nexec(compile({module}.decompress({data}),__file__,'exec'))".encode()
