"""The command line: one file per command, and the only package that prints, parses flags or exits.

A file `birdie/cli/NAME.py`, or `NAME_.py` where NAME is a keyword of Python, is a command if its first line is a
docstring that begins with "`birdie NAME`:". The rest of that line is its help, `GROUP = "…"` names its panel in
`birdie --help`, and its function `command` is what runs. A command whose settings depend on its arguments also defines
`build_app` (`train` does). Files are listed and read, and only the command that runs is imported, so that
`birdie --help` does not wait for torch and numba. A command imports those inside its functions, and what needs them:
its flags are then read, explained and refused in a fraction of a second.
"""

import gc
import importlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App, Group

from birdie.cli.console import leave, leave_imports_out, new_app, run, version

GROUPS = ("Train", "Compress", "Evaluate")
"""Panels of `birdie --help`, in this order; other names follow, in the order of the alphabet."""

_HELP = re.compile(r'"""`birdie (\w+)`: (.+?)(?:""")?\n')
_GROUP = re.compile(r'^GROUP = "(.+)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command as its file describes it.

    Attributes:
        module: full name of its module.
        help: one line for `birdie --help`.
        group: the panel that lists it.
    """

    module: str
    help: str
    group: str


def commands() -> dict[str, Command]:
    """Return the commands by name, from the first line of each file of this package."""
    table = {}
    for path in sorted(path for folder in __path__ for path in Path(folder).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        first = _HELP.match(source)
        if first and first[1] == path.stem.removesuffix("_"):
            group, text = _GROUP.search(source), first[2][0].upper() + first[2][1:]
            table[first[1]] = Command(f"birdie.cli.{path.stem}", text, group[1] if group else "Other")
    return table


def build_app(tokens: Sequence[str]) -> tuple[App, list[str]]:
    """Return the cyclopts application for the command line `tokens`, and the tokens to call it with."""
    table = commands()
    if tokens and tokens[0] in table:
        module = importlib.import_module(table[tokens[0]].module)
        arguments = list(tokens[1:])
        if hasattr(module, "build_app"):
            return module.build_app(arguments), arguments
        app = new_app(f"birdie {tokens[0]}")
        app.default(module.command)
        return app, arguments
    about = "Train, compress, pack and score models under a byte budget."
    app = new_app("birdie", kind=App, help=about, version=version)  # cyclopts suggests commands of its own class alone
    names = sorted({command.group for command in table.values()} - set(GROUPS))
    groups = {name: Group(name, sort_key=index) for index, name in enumerate((*GROUPS, *names))}
    for name, command in table.items():  # for the help, and for the suggestion after a misspelled name
        app.command(f"{command.module}:command", name=name, help=command.help, group=groups[command.group])
    return app, list(tokens)


def main(tokens: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error in one sentence, 130 Ctrl-C, 143 SIGTERM."""
    tokens = sys.argv[1:] if tokens is None else tokens
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal cannot show must not end the command
            stream.reconfigure(errors="replace")
    gc.callbacks.append(leave_imports_out)
    leave(run(build_app, tokens))
