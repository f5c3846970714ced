"""`birdie report`: one HTML page about runs: curves, bytes and quality, where the bytes went, samples, significance."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, Output, Overwrite, log, print_json, print_line
from birdie.errors import ConfigError, DataError
from birdie.lab.run_ledger import find_runs_and_logs
from birdie.lab.selection import by_recipe
from birdie.system.figures import require_matplotlib
from birdie.system.files import write_bytes
from birdie.system.outputs import Kind, require_output

GROUP = "Lab"
_PAGE = Kind("an HTML page", rb"(?i)<!doctype html>")


def command(
    *runs: Annotated[Path, Parameter(help="Run folders, folders of runs, or logs of the challenge's scripts.")],
    output: Annotated[Output, Parameter(help="File of the page.")] = Path("report.html"),
    title: Annotated[str, Parameter(help="Heading of the page.")] = "birdie report",
    samples: Annotated[bool, Parameter(help="Let the models write a sample of text.")] = True,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about runs, which loads nothing from the network.

    Runs that differ only in the seed are one group; the first group is the reference of the significance test.
    """
    if not runs:
        raise ConfigError("name the runs: birdie report runs/first, or a folder that holds runs")
    require_matplotlib()
    from birdie.lab.report.html import render
    from birdie.lab.report.sections import Subject, sections

    records = {record.folder.resolve(): record for path in runs for record in find_runs_and_logs(path)}
    folders = [record.folder for record in records.values() if record.folder.is_dir()]
    logs = [record.log for record in records.values() if record.log is not None]
    read = [*logs, *(file for folder in folders for file in folder.iterdir())]
    output = require_output(output, read, kind=_PAGE, overwrite=overwrite)
    for folder, record in list(records.items()):
        for problem in record.problems:
            log(f"warning: {problem}" + ("; the run is left out" if record.damage else ""))
        if record.damage:
            del records[folder]
    if not records:
        raise DataError("all these runs are damaged; name others, or restore their files")
    log(f"reading {len(records)} run{'s' * (len(records) != 1)}")
    subject = Subject(by_recipe(list(records.values())), samples)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"{len(records)} run{'s' * (len(records) != 1)}, {date}"
    page = render(title, subtitle, sections(subject)).encode(errors="backslashreplace")  # file names that are not UTF-8
    write_bytes(output, page)
    if json:
        print_json(
            {"path": str(output), "bytes": len(page), "runs": [str(record.folder) for record in records.values()]}
        )
    else:
        print_line(f"report: {output} ({len(page):,} bytes)")
