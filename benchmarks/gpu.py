"""Everything that only a GPU can show, in one command: `python -m benchmarks.gpu [--minutes 10] [--json FILE]`.

    python -m benchmarks.gpu --json gpu.json               all checks, those that are worth most first
    python -m benchmarks.gpu --checks attention,muon       some of them
    python -m benchmarks.gpu --page gpu.json               the figures of docs/gpu.md, from a file

Needs no network and no data. Each check runs in a process of its own with a time limit, so that a crash or a hang costs
the rest of one check; the file is written after every check. Without CUDA, checks that mean something on a CPU run at a
tiny size, which tests their logic and measures nothing, and the others say so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import comma_separated, log, one_of
from benchmarks.gpu_checks import CHECKS, Check, Setup
from birdie.system import provenance
from birdie.system.device import choose_device
from birdie.system.files import write_bytes

Row = dict[str, Any]
NO_CUDA = "skipped: no CUDA"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"


def run_check(name: str, device: str, limit: float) -> list[Row]:
    """Return the rows of a check, run in a new process; a last row says what ended it early."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "rows", Path(folder) / "stderr"
        command = [sys.executable, "-m", "benchmarks.gpu", "--worker", name, "--device", device, "--rows", str(out)]
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stderr, stderr=stderr, start_new_session=True)
            try:
                code = process.wait(limit)
                ended = f"ended with exit code {code}: {_last_line(errors)}" if code else None
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit:.0f} s: {_last_line(errors)}"
            finally:
                _kill_session(process)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if ended is not None:
        rows.append(row_of(name, "failed", note=ended, met=False))
    seconds = round(time.perf_counter() - start, 1)
    return [{**row, "check_s": seconds} for row in rows]


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and all it has started, which would use the GPU under the next check."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def row_of(check: str, what: str, **values: Any) -> Row:
    """Return a complete row; keys without a value are None."""
    return {"check": check, "what": what, **dict.fromkeys(("figure", "unit", "target", "met", "note")), **values}


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() or ["no message"]
    return lines[-1][:300]


def work(name: str, device: torch.device, out: Path) -> None:
    """Run a check in this process; append each row to `out` as it comes."""
    setup = Setup(device, small=device.type != "cuda")
    with out.open("a") as file:
        for row in CHECKS[name].run(setup):
            file.write(json.dumps(row_of(name, **row)) + "\n")
            file.flush()


def measure(names: Sequence[str], minutes: float, device: str, path: Path | None) -> list[Row]:
    """Run checks in turn until the time is over; write all rows to `path` after each."""
    rows: list[Row] = []
    end = time.perf_counter() + 60 * minutes
    for name in names:
        check: Check = CHECKS[name]
        left = end - time.perf_counter()
        if device == "cpu" and not check.on_cpu:
            rows.append(row_of(name, check.question, note=NO_CUDA))
        elif left < 10:
            rows.append(row_of(name, check.question, note=f"skipped: the {minutes:g} minutes are over"))
        else:
            log(f"{name}: {check.question}")
            rows += run_check(name, device, min(check.seconds, left))
        if path is not None:
            write_bytes(path, (json.dumps({**head(), "rows": rows}, indent=1) + "\n").encode())
    return rows


def head() -> dict[str, Any]:
    """Return versions, machine and commit."""
    return {"versions": provenance.versions(), "machine": provenance.machine(), "commit": provenance.commit()}


def show(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Print the table."""
    title = "tiny sizes on a CPU: the logic of the checks, not a measurement" if device == "cpu" else None
    table = Table("check", "what", "figure", "target", "note", title=title)
    for row in rows:
        table.add_row(row["check"], row["what"], _figure(row), _target(row), row["note"] or "")
    Console().print(table)


def _figure(row: Mapping[str, Any]) -> str:
    if row["figure"] is None:
        return ""
    value = row["figure"]
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{text} {row['unit'] or ''}".strip()


def _target(row: Mapping[str, Any]) -> str:
    if row["met"] is None:
        return row["target"] or ""
    return f"{row['target'] or ''} {'yes' if row['met'] else 'no'}".strip()


def page(results: Mapping[str, Any], text: str) -> str:
    """Return the text of docs/gpu.md with the figures of a run in place of those that it has."""
    intro, _, rest = text.partition("## Measured\n")
    _, _, checks = rest.partition("## The checks\n")
    lines = [
        "## Measured",
        "",
        f"On: {results['machine']}; {_versions(results['versions'])}; commit `{results['commit']}`.",
        "",
        "| check | what | figure | target | note |",
        "|---|---|--:|---|---|",
    ]
    for row in results["rows"]:
        cells = (row["check"], row["what"], _figure(row), _target(row), row["note"] or "")
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return intro + "\n".join(lines) + "\n\n## The checks\n" + checks


def _versions(versions: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table, write the page, or run one check for the parent process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = list(CHECKS)
    parser.add_argument("--minutes", type=float, default=10.0, help="limit on the whole (default: 10)")
    parser.add_argument("--checks", type=comma_separated(one_of(names, "check")), default=names, help=", ".join(names))
    parser.add_argument("--json", type=Path, help="file for all rows, written after each check")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: auto)")
    parser.add_argument("--page", type=Path, help="write docs/gpu.md's figures from this file of rows; measure nothing")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.page is not None:
        write_bytes(PAGE, page(json.loads(options.page.read_text()), PAGE.read_text()).encode())
        return
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.worker is not None:
        work(options.worker, choose_device(device), options.rows)
        return
    show(measure(options.checks, options.minutes, device, options.json), device)


if __name__ == "__main__":
    main()
