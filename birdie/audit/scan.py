"""A static scan of a script for what scores were withdrawn for. The script is parsed, never imported or run.

    source ──parse──► tree ──Flow: an abstract run──► issues with lines ──► Finding, Finding, …
                        └───patterns──────────────────┘

It follows validation tokens from where they are loaded to what learns from them and to the losses that make the score
(`birdie.audit.flow`), and looks for a few shapes that need no data flow (`birdie.audit.patterns`). A failure is
reported only where the pattern is there; that none was found proves nothing, and is a finding of "unknown".
"""

import ast

from birdie.audit.flow import Flow
from birdie.audit.memory import TooLargeError
from birdie.audit.patterns import patterns
from birdie.audit.rules import (
    BYTES,
    NORMALISED,
    ONE_PASS,
    SCORE_FIRST,
    SELF_CONTAINED,
    TRAIN_TIME,
    VALIDATION,
    Finding,
)
from birdie.audit.unpack import MOST, unpacked
from birdie.audit.values import Issue

BY = "scan"
JUDGED = {
    SCORE_FIRST: "learning from validation tokens before they are scored",
    ONE_PASS: "scoring with what was gathered from all of validation",
    NORMALISED: "probabilities of the one token that is known",
    VALIDATION: "validation tokens in training, calibration, choices or warm-up",
    BYTES: "byte counts that are known to be wrong",
    TRAIN_TIME: "ways past the train clock",
    SELF_CONTAINED: "network access, and training data in evaluation",
}
"""Rules the scan can see broken, and the patterns it knows of each."""


def scan(source: bytes, shown: str) -> tuple[Finding, ...]:
    """Look `source`, shown to the user as `shown`, over; at least one finding for each rule in `JUDGED`.

    A script that unpacks and executes another is looked through: lines are then those of the inner one.
    """
    inner = ""
    try:
        tree = _parsed(source)
        packed = unpacked(tree)
        if packed is not None:
            tree, inner = _parsed(packed), "in the source it unpacks: "
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or 0
        why = f"it cannot be parsed as Python ({getattr(error, 'msg', None) or error})"
        return (Finding(SCORE_FIRST, "unknown", why, BY, shown, line),)
    issues = set(patterns(tree))
    flow, stopped = Flow(tree), ""
    try:
        flow.run()
    except (TooLargeError, RecursionError):
        stopped = "; the script is too large for the scan, which looked at a part of it"
    issues |= flow.found
    findings = [
        Finding(each.rule, "fail" if each.sure else "unknown", inner + each.evidence, BY, shown, each.line)
        for each in _distinct(issues)
    ]
    failed = {each.rule for each in findings}
    findings += [
        Finding(rule, "unknown", f"{inner}none of the known patterns was found: {what}{stopped}", BY, shown)
        for rule, what in JUDGED.items()
        if rule not in failed
    ]
    return tuple(findings)


def _parsed(source: bytes) -> ast.Module:
    if len(source) > MOST:
        raise ValueError(f"it is {len(source):,} bytes, more than {MOST:,}")
    return ast.parse(source)


def _distinct(issues: set[Issue]) -> list[Issue]:
    """One issue for each rule and line, a sure one first."""
    kept: dict[tuple[str, int], Issue] = {}
    for each in sorted(issues, key=lambda issue: (issue.line, issue.rule.name, not issue.sure, issue.evidence)):
        kept.setdefault((each.rule.name, each.line), each)
    return list(kept.values())
