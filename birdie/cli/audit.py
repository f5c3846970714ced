"""`birdie audit`: check a score against the challenge's rules, one result per rule, with evidence."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from birdie.cli.console import Json, compiling_told, emit, plain, progress_bar, say, show
from birdie.golf.audit.audit import audit as audit_path
from birdie.golf.audit.rules import RULES, Finding, Report, Result, Rule

_MARKS: dict[Result, tuple[str, str]] = {
    "fail": ("✗ fail", "bold red"),
    "pass": ("✓ pass", "green"),
    "warning": ("! read", "magenta"),
    "unknown": ("? unknown", "yellow"),
}
_SHOWN: dict[Result, int] = {"fail": 8, "pass": 2, "warning": 4, "unknown": 2}
"""Findings of a rule that the table shows, in this order; JSON has all."""


@compiling_told()
def audit(
    path: Annotated[Path, Parameter(help="A .birdie file, a submission folder, or a script such as train_gpt.py.")],
    /,
    *,
    run: Annotated[
        bool, Parameter(negative=(), help="Run foreign code, in a sandbox without network; time an artifact.")
    ] = False,
    data: Annotated[
        str | None, Parameter(help="Validation shards for an artifact; default: those of its recipe.")
    ] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the one of its training.")
    ] = None,
    train: Annotated[
        tuple[str, ...], Parameter(help="Training shards to search for validation documents; files or globs.")
    ] = (),
    log: Annotated[tuple[str, ...], Parameter(help="Training logs beside those in the folder.")] = (),
    tokens: Annotated[int, Parameter(help="Validation tokens that the probes run over.")] = 4096,
    seconds: Annotated[
        float | None,
        Parameter(help="Time limit; parts not reached are unknown. Default: 30 for a folder or script, else none."),
    ] = None,
    json: Json = False,
) -> None:
    """Check a score against the challenge's rules: pass, fail or unknown for each, with evidence and lines to read.

    Exit code 1 when a rule is broken. Foreign code is read and never run unless --run asks for it.
    """
    with progress_bar(f"auditing {path.name}", "tokens") as update:
        report = audit_path(
            path,
            run=run,
            data=data,
            tokenizer=tokenizer,
            train=train,
            log_files=log,
            tokens=tokens,
            seconds=seconds,
            progress=update,
        )
    if json:
        emit(report_json(report))
    else:
        show(_table(report))
        say(_summary(report))
    raise SystemExit(1 if report.failed else 0)


def report_json(report: Report) -> dict[str, object]:
    """Return the object of `birdie audit --json`, whose keys are pinned."""
    return {
        "path": report.path,
        "kind": report.kind,
        "verdicts": {rule.name: report.result(rule) for rule in RULES},
        "findings": [
            {
                "rule": finding.rule.name,
                "verdict": finding.result,
                "evidence": finding.evidence,
                "by": finding.check,
                "path": finding.path,
                "line": finding.line,
            }
            for finding in report.findings
        ],
    }


def _table(report: Report) -> Table:
    table = Table(title=plain(f"{report.path}: {report.kind}"), show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("evidence, and lines to read (!)", overflow="fold")
    for rule in RULES:
        mark, style = _MARKS[report.result(rule)]
        table.add_row(rule.name, Text(mark, style=style), _evidence(report, rule))
    return table


def _evidence(report: Report, rule: Rule) -> Text:
    findings = list(dict.fromkeys(report.of(rule)))
    lines: list[Text] = []
    for result, limit in _SHOWN.items():
        mark, style = _MARKS[result]
        same = [finding for finding in findings if finding.result == result]
        for finding in same[:limit]:
            location = str(plain(_location(finding, report.path)))
            lines.append(Text.assemble((mark[:2], style), (location, "cyan"), plain(finding.evidence)))
        if len(same) > limit:
            lines.append(Text.assemble((mark[:2], style), (f"and {len(same) - limit} more of these", "dim")))
    return Text("\n").join(lines) if lines else Text("no evidence", style="dim")


def _location(finding: Finding, audited: str) -> str:
    """Return file and line, the file by its name within the audited folder; "" for the audited file as a whole."""
    if finding.path is None or (finding.path == audited and not finding.line):
        return ""
    inside = Path(finding.path).is_relative_to(audited)
    name = str(Path(finding.path).relative_to(audited)) if inside else finding.path
    name = Path(audited).name if name == "." else name
    return f"{name}:{finding.line}: " if finding.line else f"{name}: "


def _summary(report: Report) -> str:
    results = [report.result(rule) for rule in RULES]
    lines = sum(finding.result == "warning" for finding in report.findings)
    counts = ", ".join(f"{results.count(result)} {result}" for result in ("pass", "fail", "unknown"))
    broken = ", ".join(rule.name for rule in report.failed)
    return f"{counts}; {lines} warning{'s' * (lines != 1)}{f'; broken: {broken}' if broken else ''}"
