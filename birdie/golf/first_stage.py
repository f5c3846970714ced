"""First stage of a packed script: writes the modules that it carries into a folder, and imports them from there.

    coded ─► decoded, once for each user ─► compared with its digest ─► files ─► first in sys.path

A packed script contains the source of this module and of `birdie.golf.text_coder`, so both use nothing else of birdie.
Several processes may do this at once: files appear complete, and all write the same.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

LETTERS = [chr(code) for code in range(256) if code not in b"\0\n\r'\\"]
"""The 251 letters of Latin-1 that a string literal holds as they are."""


def unpack(digest: str, decode: Callable[[], bytes], recipe: bytes) -> tuple[Path, Path]:
    """Return the folder of the modules, first in sys.path now, and the file of the recipe.

    Args:
        digest: SHA-256 of the data, which also names the folder.
        decode: returns the data, names and texts in turn, each but the last followed by a zero byte; slow.
        recipe: content of the recipe file.
    """
    folder = own_folder(digest[:16])
    kept = folder / "modules"
    data = kept.read_bytes() if kept.is_file() else b""
    if hashlib.sha256(data).hexdigest() != digest:
        data = decode()
        if hashlib.sha256(data).hexdigest() != digest:
            sys.exit("this script is damaged: its modules do not have the digest that it states; pack it again")
        write(kept, data)
    parts = data.split(b"\0")
    files = {folder / name.decode(): text for name, text in zip(parts[::2], parts[1::2], strict=True)}
    file = folder / f"recipe-{hashlib.sha256(recipe).hexdigest()[:16]}.toml"
    for path, text in {**files, file: recipe}.items():
        if not path.is_file() or path.read_bytes() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, text)
    sys.path.insert(0, str(folder))
    return folder, file


def read_letters(text: str) -> bytes:
    """Return the bytes that `letters` wrote as text, with zeros behind them."""
    digits = {letter: digit for digit, letter in enumerate(LETTERS)}
    data = b""
    for start in range(0, len(text), 281):
        number = 0
        for letter in text[start : start + 281]:
            number = number * 251 + digits[letter]
        data += number.to_bytes(280, "big")
    return data


def own_folder(name: str) -> Path:
    """Return a folder that only this user can write: in the user's cache, or a temporary one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "birdie" / "packed" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
        if owner.st_uid == os.getuid() and not owner.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp())


def write(path: Path, data: bytes) -> None:
    """Write a file that appears complete or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(temporary).replace(path)
