"""The rules a score must keep, and what an audit finds about each: pass, fail or could not tell, with evidence.

    scan, probes, logs, bytes, … ──► Finding, Finding, … ──► Report: one verdict a rule, the worst of its findings

The first four are the conditions of openai/parameter-golf #1017 (C1 to C4), the others what its records were withdrawn
or questioned for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["pass", "fail", "unknown"]

_WORST: tuple[Verdict, ...] = ("fail", "pass", "unknown")  # one failure outweighs all; one proof outweighs a doubt


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold.

    Attributes:
        name: a word, for machines.
        says: what must hold, in a sentence.
    """

    name: str
    says: str


CAUSAL = Rule("causal", "the distribution of a token depends on the artifact and on earlier tokens alone (C1)")
NORMALISED = Rule("normalised", "every distribution is over the whole vocabulary, sums to 1, blind to its token (C2)")
SCORE_FIRST = Rule("score-first", "a token is learned from only after its loss is final (C3)")
ONE_PASS = Rule("one-pass", "every target is scored exactly once, in one pass, and none is scored anew (C4)")
VALIDATION = Rule("validation-unseen", "no validation token reaches training, calibration, tuning or warm-up")
OVERLAP = Rule("no-overlap", "no validation document is among the training documents")
BYTES = Rule("byte-count", "the bytes that bits are divided by are those of the decoded text")
COVERAGE = Rule("whole-split", "the whole validation split is scored, and it is the official one")
SIZE = Rule("size", "code and model, all that evaluation reads, take no more than 16,000,000 bytes")
TRAIN_TIME = Rule("train-time", "training takes no more than 600 s, calibration included")
EVAL_TIME = Rule("eval-time", "evaluation takes no more than 600 s: import, decoding, compiling, scoring, adapting")
SEEDS = Rule("seeds", "the claim rests on several seeds, none of them left out")
SELF_CONTAINED = Rule("self-contained", "evaluation needs no network and no training data")
RUNS = Rule("runs", "the script imports, builds its model and predicts on a CPU")

RULES = (
    *(CAUSAL, NORMALISED, SCORE_FIRST, ONE_PASS, VALIDATION, OVERLAP, BYTES, COVERAGE),
    *(SIZE, TRAIN_TIME, EVAL_TIME, SEEDS, SELF_CONTAINED, RUNS),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at one rule found.

    Attributes:
        rule: in question.
        verdict: "unknown" is could not tell.
        evidence: a sentence with figures.
        by: what looked: "scan", "perturbation", "log", ….
        path: file in question, as the user would find it; None: none.
        line: in it, from 1; 0: the file as a whole.
    """

    rule: Rule
    verdict: Verdict
    evidence: str
    by: str
    path: str | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """An audit.

    Attributes:
        path: what was audited.
        kind: "artifact", "folder" or "script".
        findings: all there are; a rule nobody looked at has none.
    """

    path: str
    kind: str
    findings: tuple[Finding, ...] = field(default=())

    def of(self, rule: Rule) -> tuple[Finding, ...]:
        """The findings about one rule."""
        return tuple(each for each in self.findings if each.rule == rule)

    def verdict(self, rule: Rule) -> Verdict:
        """The worst of its findings; without any, unknown."""
        return worst(each.verdict for each in self.of(rule))

    @property
    def failed(self) -> tuple[Rule, ...]:
        """Rules that are broken."""
        return tuple(rule for rule in RULES if self.verdict(rule) == "fail")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """What several verdicts on one rule come to: a failure if there is one, else a pass if there is one."""
    found = set(verdicts)
    return next((each for each in _WORST if each in found), "unknown")
