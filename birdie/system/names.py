"""Names that come from a file: of a tensor's shard, of a file that is kept, of a file in a repository.

Whoever wrote the file chose them, so a name is checked before it is joined to a folder: it has to mean a file in that
folder, the same one on every system. And it is escaped before it is shown: it could steer a terminal or be markup.
"""

import os
import re
from pathlib import PurePosixPath

_MOST_NAME, _MOST_PART = 1 << 10, 255  # bytes
_SPECIAL = frozenset('\\:*?"<>|')
_PLAIN, _PUNCTUATION = re.compile(r"[\w./ -]+"), re.compile(r"[!-/:-@\[-`{-~]")
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def is_name(name: object) -> bool:
    """Return whether a value is the relative name of a file in a folder, with / between its parts, on any system."""
    if not isinstance(name, str) or not name.isprintable() or set(name) & _SPECIAL:
        return False
    parts = name.split("/")
    return (
        0 < len(os.fsencode(name)) <= _MOST_NAME
        and str(PurePosixPath(name)) == name
        and all(part and part not in (".", "..") and len(os.fsencode(part)) <= _MOST_PART for part in parts)
        and not any(part[-1] in ". " or _DEVICE.fullmatch(part) for part in parts)
        and not any(part.lower() in (".git", "git~1") for part in parts)
    )


def is_part(name: object) -> bool:
    """Return whether a value is a name without folders."""
    return is_name(name) and "/" not in str(name)


def is_hidden(name: str) -> bool:
    """Return whether a relative name is that of a hidden file, or of a file in a hidden folder.

    Programs read such files unasked, and people do not see them: no file of somebody else's choice gets such a name in
    a folder that has content.
    """
    return any(part.startswith(".") for part in name.split("/"))


def shown(text: object, *, keep: str = "") -> str:
    r"""Return text as it may be shown on a terminal: what is not printable, control characters above all, is escaped.

    Args:
        text: a str, or what becomes one.
        keep: characters that stay as they are, such as line feeds.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in str(text))


def in_markdown(text: object) -> str:
    """Return text as code in Markdown if it is a plain name, else with all punctuation escaped: no markup, no HTML."""
    plain = shown(text)
    if _PLAIN.fullmatch(plain):
        return f"`{plain}`"
    return _PUNCTUATION.sub(r"\\\g<0>", plain)
