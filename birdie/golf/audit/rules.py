"""The challenge's rules, and what an audit finds about each: one result per rule, with its evidence.

    probes, ledger, byte counts, files, logs, … ──► Finding, Finding, … ──► Report: fail > pass > unknown, per rule

The first four are the conditions C1 to C4 of parameter-golf#1017 (github.com/openai/parameter-golf/issues/1017), the
others are what records were withdrawn or questioned for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Result = Literal["pass", "fail", "unknown"]

_ORDER: tuple[Result, ...] = ("fail", "pass")  # a failure outweighs everything, a pass what is not known


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """A rule of the challenge: its name, which is a JSON key, and what must hold."""

    name: str
    statement: str


CAUSAL = Rule("causal", "the distribution of a token depends on the artifact and on earlier tokens alone (C1)")
NORMALIZED = Rule("normalised", "every distribution covers the whole vocabulary, sums to 1, ignores its target (C2)")
SCORE_FIRST = Rule("score-first", "a token is learned from only after its loss is final (C3)")
ONE_PASS = Rule("one-pass", "every target is scored exactly once, in one pass, and none is scored again (C4)")
VALIDATION = Rule("validation-unseen", "no validation token reaches training, calibration, tuning or warm-up")
OVERLAP = Rule("no-overlap", "no validation document is among the training documents")
BYTES = Rule("byte-count", "the bytes that bits are divided by are those of the decoded text")
COVERAGE = Rule("whole-split", "the whole validation split is scored, and it is the official one")
SIZE = Rule("size", "code and model, all that evaluation reads, take no more than 16,000,000 bytes")
TRAIN_TIME = Rule("train-time", "training takes no more than 600 s, calibration included")
EVAL_TIME = Rule("eval-time", "evaluation takes no more than 600 s: import, decoding, compiling, scoring, adapting")
SEEDS = Rule("seeds", "the claim is the mean over several seeds, none of them left out")
SELF_CONTAINED = Rule("self-contained", "evaluation needs no network and no training data")
RUNS = Rule("runs", "the script loads on a CPU, and the model of an artifact is rebuilt from its file")

RULES = (
    *(CAUSAL, NORMALIZED, SCORE_FIRST, ONE_PASS, VALIDATION, OVERLAP, BYTES, COVERAGE),
    *(SIZE, TRAIN_TIME, EVAL_TIME, SEEDS, SELF_CONTAINED, RUNS),
)

CAP_BYTES = 16_000_000
CAP_SECONDS = 600.0
FREE_LISTING = 4096
"""Bytes of names and targets of links that count for nothing: ordinary folders have no more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of one rule; "unknown" decides nothing."""

    rule: Rule
    result: Result
    evidence: str  # a sentence with figures
    check: str  # "probe", "ledger", "log", …
    path: str | None = None  # of the file, as the user would name it
    line: int = 0  # from 1; 0 for the file as a whole


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of an audit of `path`, which is an "artifact", a "folder" or a "script"."""

    path: str
    kind: str
    findings: tuple[Finding, ...] = ()

    def of(self, rule: Rule) -> tuple[Finding, ...]:
        """Return the findings about one rule."""
        return tuple(finding for finding in self.findings if finding.rule == rule)

    def result(self, rule: Rule) -> Result:
        """Return the result of a rule: "pass", "fail" or, without evidence, "unknown"."""
        return combined(finding.result for finding in self.of(rule))

    @property
    def failed(self) -> tuple[Rule, ...]:
        """Rules that are broken."""
        return tuple(rule for rule in RULES if self.result(rule) == "fail")


def combined(results: Iterable[Result]) -> Result:
    """Return the result of several checks of one rule: fail if one failed, else pass if one passed, else unknown."""
    results = set(results)
    return next((result for result in _ORDER if result in results), "unknown")


def size_result(size: int, name: str, listed: int = 0) -> tuple[Result, str]:
    """Return whether `size` bytes of what `name` says keep the cap, and the sentence for it.

    Beyond FREE_LISTING, `listed` bytes of names and targets of links count as well: data can be hidden in them.
    """
    if listed > FREE_LISTING:
        size, name = size + listed, f"{name}, and {listed:,} of names, sizes and targets of links"
    if size <= CAP_BYTES:
        return "pass", f"{name}: {size:,} of {CAP_BYTES:,} bytes"
    hint = " (the cap is decimal: 16 MB, not 16 MiB)" if size <= 16 * 2**20 else ""
    return "fail", f"{name}: {size:,} bytes, {size - CAP_BYTES:,} more than the {CAP_BYTES:,} allowed{hint}"
