"""What every benchmark prints: versions, machine, commit and rows, as one JSON object."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from birdie import provenance


def report(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print `rows` on stdout: as JSON, or as aligned columns."""
    if as_json:
        answer = {
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "commit": provenance.commit(),
            "rows": list(rows),
        }
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    for row in rows:
        sys.stdout.write("  ".join(f"{key} {value}" for key, value in row.items()) + "\n")
