"""What every benchmark prints: its rows as a table, or with versions, machine and commit as one JSON object."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from birdie.runtime import provenance

Row = Mapping[str, Any]


def report(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print `rows` on stdout."""
    if as_json:
        head = {"versions": provenance.versions(), "machine": provenance.machine(), "commit": provenance.commit()}
        sys.stdout.write(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n")
        return
    table = Table()
    for key in rows[0]:
        words = isinstance(rows[0][key], str)
        table.add_column(key, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
