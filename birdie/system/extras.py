"""Packages that birdie works without, and that extras of its distribution install: `birdie-compress[lab]`."""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]


def install_line(extra: str) -> str:
    """Return the command that installs an extra: from the checkout that is running, if it is one."""
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{_CHECKOUT}[{extra}]'"
    return f"pip install 'birdie-compress[{extra}]'"
