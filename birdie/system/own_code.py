"""Code of the user's own that a flag names: FILE.py:NAME, or package.module:NAME.

Whoever writes it on the command line means that it runs. No name from a file ever comes here.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from birdie.errors import ConfigError


def is_code(text: str) -> bool:
    """Return whether a text names code, and not a path."""
    module, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (module.endswith(".py") or _is_dotted(module))


def imported(flag: str, text: str) -> Any:
    """Import what a flag names, and return it.

    Args:
        flag: for errors.
        text: FILE.py:NAME, whose folder is importable then, as for `python FILE.py`; or package.module:NAME.

    Raises:
        ConfigError: it is written in another way, is not there, or raises as it is imported.
    """
    module, _, name = text.rpartition(":")
    if not is_code(text):
        raise ConfigError(f"{flag} {text} names no code; write FILE.py:NAME or package.module:NAME")
    try:
        values = vars(_of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module))
    except Exception as error:  # whatever the code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{flag} {text} cannot be imported ({reason})") from error
    if name not in values:
        raise ConfigError(f"{flag}: {module} has no {name}")
    return values[name]


def called(flag: str, text: str, *arguments: Any) -> Any:
    """Call a function, or a class, that a flag names; errors are one sentence.

    Raises:
        ConfigError: it cannot be imported, or raises.
    """
    function = imported(flag, text)
    try:
        return function(*arguments)
    except Exception as error:  # whatever the code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{flag} {text} failed ({reason})") from error


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _of_file(path: Path) -> Any:
    """Import a file once, under its own name."""
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem) if known is None else _apart(path)


def _apart(path: Path) -> Any:
    """Import a file whose name another module has."""
    spec = importlib.util.spec_from_file_location(f"_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look it up
    spec.loader.exec_module(module)
    return module
