"""A static scan of a script for what scores were withdrawn for. The script is parsed, never imported or run.

    source ──parse──► tree ──Flow: an abstract run──► issues with lines ──► Finding, Finding, …
                        └───patterns──────────────────┘

It follows validation tokens from where they are loaded to what learns from them and to the losses that make the score
(`flow`), and looks for a few shapes that need no data flow (`birdie.golf.audit.patterns`). A failure is
reported only where the pattern is there; that none was found proves nothing, and is a finding of "unknown".
"""

from birdie.golf.audit.flow import Flow
from birdie.golf.audit.memory import TooLargeError
from birdie.golf.audit.patterns import patterns
from birdie.golf.audit.rules import (
    BYTES,
    NORMALISED,
    ONE_PASS,
    SCORE_FIRST,
    SELF_CONTAINED,
    TRAIN_TIME,
    VALIDATION,
    Finding,
)
from birdie.golf.audit.source import UNREADABLE, Source, source_of
from birdie.golf.audit.unpack import unpacked
from birdie.golf.audit.values import Issue

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

_PART = "; the script is too large for the scan, which looked at a part of it"


def scan(source: bytes | Source, shown: str, *, unlimited: bool = False) -> tuple[Finding, ...]:
    """Look `source`, shown to the user as `shown`, over; at least one finding for each rule in `JUDGED`.

    A script that unpacks and executes another is looked through: lines are then those of the inner one.

    Args:
        source: of a file, or its bytes.
        shown: names it in findings.
        unlimited: the track has no cap on training time, so nothing gets past it.
    """
    source = source_of(source) if isinstance(source, bytes) else source
    inner = ""
    if source.tree is not None and (packed := unpacked(source.tree)) is not None:
        source, inner = source_of(packed), "in the source it unpacks: "
    if source.tree is None:
        return (Finding(SCORE_FIRST, "unknown", inner + source.why, BY, shown, source.line),)
    flow, stopped = Flow(source.tree), ""
    issues: set[Issue] = set()
    try:
        issues.update(patterns(source.tree))
    except UNREADABLE:
        stopped = _PART
    try:
        flow.run()
    except (TooLargeError, *UNREADABLE):
        stopped = _PART
    issues |= flow.found
    findings = [
        Finding(each.rule, "fail" if each.sure else "unknown", inner + each.evidence, BY, shown, each.line)
        for each in _distinct(issues)
        if not (unlimited and each.rule == TRAIN_TIME)
    ]
    failed = {each.rule for each in findings}
    nothing = {rule: f"{inner}none of the known patterns was found: {what}{stopped}" for rule, what in JUDGED.items()}
    if unlimited:
        nothing[TRAIN_TIME] = "the track has no cap on training time"
    findings += [Finding(rule, "unknown", why, BY, shown) for rule, why in nothing.items() if rule not in failed]
    return tuple(findings)


def _distinct(issues: set[Issue]) -> list[Issue]:
    """One issue for each rule and line, a sure one first."""
    kept: dict[tuple[str, int], Issue] = {}
    for each in sorted(issues, key=lambda issue: (issue.line, issue.rule.name, not issue.sure, issue.evidence)):
        kept.setdefault((each.rule.name, each.line), each)
    return list(kept.values())
