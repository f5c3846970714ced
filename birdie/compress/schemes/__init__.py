"""Quantization schemes: one file each, with number, options, encoder, layout and decoder.

    NAME.py   DECODER = Decoder("NAME", NUMBER, …)    what a file needs, found by listing this folder
              class …(Scheme), with its specs         what encoders, the command line and the docs need

A scheme is added by adding its file. Names and numbers are read from the text of the files, because to import them
takes torch, and whoever looks at the header of a file does without.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.compress.scheme import Decoder

FOREIGN, MOST = 64, 65_535
"""Numbers of schemes that other packages define."""

_DECODER = re.compile(r"""\bDECODER ?= ?Decoder\(\s*["'](\w+)["'], ?(\d+)\b""")


@cache
def numbers() -> Mapping[int, str]:
    """Return number → name of birdie's own schemes, in the order of the numbers; imports none of them.

    Raises:
        ConfigError: two have one number, or one is not of 1 to 63.
    """
    names: dict[int, str] = {}
    paths = [path for folder in __path__ for path in Path(folder).glob("*.py")]
    for path in sorted(paths, key=lambda path: path.name):
        if match := _DECODER.search(path.read_text(encoding="utf-8")):
            name, number = match[1], int(match[2])
            if name != path.stem or not 0 < number < FOREIGN:
                raise ConfigError(
                    f"{path} has scheme {name!r} of number {number}; name it as its file, and choose a number of 1 to "
                    f"{FOREIGN - 1}"
                )
            if number in names:
                raise ConfigError(f"schemes {names[number]!r} and {name!r} both have number {number}; change one")
            names[number] = name
    return dict(sorted(names.items()))


def number_of(name: str) -> int:
    """Return the number of one of birdie's own schemes."""
    return next(number for number, other in numbers().items() if other == name)


def modules() -> Iterator[ModuleType]:
    """Import and yield the module of each scheme."""
    for info in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{info.name}")


@cache
def decoders() -> "Mapping[str, Decoder]":
    """Return the decoders of birdie's own schemes by name, in the order of the numbers; imports all of them."""
    every: list[Decoder] = [module.DECODER for module in modules()]
    return {decoder.name: decoder for decoder in sorted(every, key=lambda decoder: decoder.number)}
