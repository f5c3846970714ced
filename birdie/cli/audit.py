"""`birdie audit`: whether a score was come by legally, rule by rule, with evidence."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from birdie.cli.console import Json, compiling_told, emit, plain, progress_bar, say, show
from birdie.golf.audit.audit import audit as audit_path
from birdie.golf.audit.rules import RULES, Finding, Report, Rule, Verdict

_MARKS: dict[Verdict, tuple[str, str]] = {
    "pass": ("✓ pass", "green"),
    "fail": ("✗ fail", "bold red"),
    "unknown": ("? could not tell", "yellow"),
}
_MOST: dict[Verdict, int] = {"fail": 8, "pass": 2, "unknown": 3}
"""Findings of a rule that the table shows, what decides first; JSON has all."""

_NOTHING = "nothing that was looked at speaks of it"


@compiling_told()
def audit(
    path: Annotated[Path, Parameter(help="A .birdie file, a submission folder, or a script such as train_gpt.py.")],
    /,
    *,
    run: Annotated[
        bool, Parameter(negative=(), help="Run foreign code, in a sandbox without network; time an artifact.")
    ] = False,
    data: Annotated[
        str | None, Parameter(help="Validation shards of an artifact; default: those of its recipe.")
    ] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the one of its training.")
    ] = None,
    train: Annotated[
        tuple[str, ...], Parameter(help="Training shards to look for validation documents in; files or globs.")
    ] = (),
    log: Annotated[tuple[str, ...], Parameter(help="Training logs beside those in the folder.")] = (),
    tokens: Annotated[int, Parameter(help="Tokens of validation text that the probes run over.")] = 4096,
    json: Json = False,
) -> None:
    """Look for what the challenge's rules forbid: a verdict a rule, pass, fail or could not tell, with evidence.

    Exit code 1 when a rule is broken. Foreign code is read and never run unless --run asks for it.
    """
    with progress_bar(f"auditing {path.name}", "tokens") as update:
        report = audit_path(
            path,
            run=run,
            data=data,
            tokenizer=tokenizer,
            train=train,
            logs=log,
            tokens=tokens,
            progress=lambda _, done, total: update(done, total),
        )
    if json:
        emit(report_json(report))
    else:
        show(_table(report))
        say(_told(report))
    raise SystemExit(1 if report.failed else 0)


def report_json(report: Report) -> dict[str, object]:
    """The pinned keys of `birdie audit --json`."""
    return {
        "path": report.path,
        "kind": report.kind,
        "verdicts": {rule.name: report.verdict(rule) for rule in RULES},
        "findings": [
            {
                "rule": each.rule.name,
                "verdict": each.verdict,
                "evidence": each.evidence,
                "by": each.by,
                "path": each.path,
                "line": each.line,
            }
            for each in report.findings
        ],
    }


def _table(report: Report) -> Table:
    table = Table(title=plain(f"{report.path}: {report.kind}"), show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for rule in RULES:
        mark, style = _MARKS[report.verdict(rule)]
        table.add_row(rule.name, Text(mark, style=style), _evidence(report, rule))
    return table


def _evidence(report: Report, rule: Rule) -> Text:
    """What was found, each thing once."""
    found = list(dict.fromkeys(report.of(rule)))
    if not found:
        return Text(_NOTHING, style="dim")
    lines: list[Text] = []
    for verdict, most in _MOST.items():
        same = [each for each in found if each.verdict == verdict]
        lines += [_line(each, report.path) for each in same[:most]]
        if len(same) > most:
            mark, style = _MARKS[verdict]
            lines.append(Text.assemble((mark[:2], style), (f"and {len(same) - most} more of these", "dim")))
    return Text("\n").join(lines)


def _line(finding: Finding, audited: str) -> Text:
    mark, style = _MARKS[finding.verdict]
    where = _where(finding, audited)
    return Text.assemble((mark[:2], style), (str(plain(where)), "cyan"), plain(finding.evidence))


def _where(finding: Finding, audited: str) -> str:
    """File and line, the file by its name within what was audited; nothing where it is that itself, as a whole."""
    if finding.path is None or (finding.path == audited and not finding.line):
        return ""
    name = finding.path
    if Path(name).is_relative_to(audited):
        name = str(Path(name).relative_to(audited))
    name = Path(audited).name if name == "." else name
    return f"{name}:{finding.line}: " if finding.line else f"{name}: "


def _told(report: Report) -> str:
    verdicts = [report.verdict(rule) for rule in RULES]
    broken = ", ".join(rule.name for rule in report.failed)
    counted = (
        f"{verdicts.count('pass')} pass, {verdicts.count('fail')} fail, {verdicts.count('unknown')} could not tell"
    )
    return f"{counted}{f'; broken: {broken}' if broken else ''}"
