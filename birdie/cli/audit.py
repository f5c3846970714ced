"""`birdie audit`: check an artifact, a submission folder or a script against the challenge's rules."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from birdie.cli.console import Json, plain, print_json, print_line, print_table, progress_bar
from birdie.golf.audit.rules import RULES, Finding, Report, Result, Rule

GROUP = "Evaluate"

_MARKS: dict[Result, tuple[str, str]] = {
    "fail": ("✗ fail", "bold red"),
    "pass": ("✓ pass", "green"),
    "unknown": ("? unknown", "yellow"),
}
_SHOWN: dict[Result, int] = {"fail": 8, "pass": 2, "unknown": 2}
"""Findings of a rule that the table shows, in this order; JSON has all."""


def command(
    path: Annotated[Path, Parameter(help="A .birdie file, a submission folder, or a script such as train_gpt.py.")],
    /,
    *,
    run: Annotated[bool, Parameter(negative=(), help="Also load the script, in a sandbox of bubblewrap.")] = False,
    data: Annotated[
        str | None, Parameter(help="Validation shards for an artifact; default: those of its recipe.")
    ] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the tokenizer of the training run.")
    ] = None,
    train: Annotated[
        tuple[str, ...], Parameter(help="Training shards to search for validation documents; files or globs.")
    ] = (),
    tokens: Annotated[
        int, Parameter(help="Number of validation tokens for the tests of causality and normalization.")
    ] = 4096,
    json: Json = False,
) -> None:
    """Check a score against the challenge's rules: pass, fail or unknown for each rule, with the evidence.

    The exit code is 1 if a rule is broken. Code of others is read and not run, except with --run.
    """
    from birdie.golf.audit.folder_audit import audit

    with progress_bar(f"auditing {path.name}", "tokens") as update:
        report = audit(
            path,
            run=run,
            data=data,
            tokenizer=tokenizer,
            train=train,
            tokens=tokens,
            progress=update,
        )
    if json:
        print_json(report_json(report))
    else:
        print_table(_table(report))
        print_line(_summary(report))
    raise SystemExit(1 if report.failed else 0)


def report_json(report: Report) -> dict[str, object]:
    """Return the object of `birdie audit --json`; programs depend on its keys."""
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
    table.add_column("evidence", overflow="fold")
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
    counts = ", ".join(f"{results.count(result)} {result}" for result in ("pass", "fail", "unknown"))
    broken = ", ".join(rule.name for rule in report.failed)
    return f"{counts}{f'; broken: {broken}' if broken else ''}"
