"""Checks of training logs: clocks, bytes, coverage and seeds, and the figures of submission.json against them.

A log is its author's word. What it admits fails a rule, what it reports in order passes one, what it leaves out stays
unknown.
"""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from birdie.golf.audit import rules
from birdie.golf.audit.rules import CAP_SECONDS, Finding, Result, Rule, size_result
from birdie.golf.audit.splits import OLD_EXPORT, TEXT_BYTES, complete_split, scored_bytes
from birdie.lab.logs import Figure, ScoreLine, TrainingLog

CAP_MS = 1000 * CAP_SECONDS
USUAL_SEEDS = 3
TABLE_TOLERANCE = 2e-4  # of the text's bytes: the known tables differ by 7e-5
ROUNDING = 1e-4  # bits per byte by which a claim may be below the mean of the logs
SLOW_STEP = 2.0  # times the mean step that a late one may take: loops and longer sequences come late

_Check = tuple[Rule, Result, str, Figure | ScoreLine]


def is_unlimited(claim: Mapping[str, Any]) -> bool:
    """Return whether submission.json names a track without a cap on time, which asks for no significance either."""
    track = str(claim.get("track", "")).lower().replace("_", "-")
    return "non-record" in track or "unlimited" in track


def check_log(log: TrainingLog, *, unlimited: bool = False) -> tuple[Finding, ...]:
    """Return all findings about one log; `unlimited`: the track has no time cap."""
    checks = [*_size(log), *_coverage(log), *([] if unlimited else _times(log))]
    return tuple(Finding(rule, result, text, "log", log.path, figure.line) for rule, result, text, figure in checks)


def _times(log: TrainingLog) -> Iterator[_Check]:
    if (train := log.train_ms) is not None:
        excess, step = train.value - CAP_MS, log.mean_step_ms or 0.0
        evidence = f"training takes {train.value:,.0f} ms of {CAP_MS:,.0f}"
        if excess > 0:  # records that end at 600,028 ms were accepted
            within = log.capped and excess < SLOW_STEP * step
            evidence += f": {excess:,.0f} ms too many; the mean step takes {step:,.0f} ms"
            yield rules.TRAIN_TIME, "pass" if within else "fail", evidence, train
        else:
            yield rules.TRAIN_TIME, "pass", evidence, train
    if (seconds := log.eval_s) is not None:
        evidence = f"evaluation took {seconds.value:,.1f} s of {CAP_SECONDS:g}"
        yield rules.EVAL_TIME, "pass" if seconds.value <= CAP_SECONDS else "fail", evidence, seconds


def _size(log: TrainingLog) -> Iterator[_Check]:
    if log.total is not None:
        yield rules.SIZE, *size_result(round(log.total.value), "code and model by the log"), log.total


def _coverage(log: TrainingLog) -> Iterator[_Check]:
    """The bytes that a score was divided by follow from its nats, its bits per byte and its targets."""
    targets, final = log.val_tokens, log.final
    if targets is None:
        return
    if (split := complete_split(targets.value)) is None:
        evidence = f"{targets.value:,.0f} targets are scored, which is no known cut of the whole split"
        yield rules.COVERAGE, "unknown", evidence, targets
        return
    evidence = f"{targets.value:,.0f} targets are the whole split of vocabulary {split.vocabulary}"
    yield rules.COVERAGE, "pass", evidence, targets
    if final is None or not final.loss or final.bpb <= 0 or split is OLD_EXPORT:
        return
    total, rounding = scored_bytes(targets.value, final.loss, final.bpb), 0.5 * 10.0**-final.digits
    excess, allowed = total / TEXT_BYTES - 1, TABLE_TOLERANCE + rounding * (1 / final.loss + 1 / final.bpb)
    evidence = f"nats, bits per byte and targets make {total:,.0f} bytes of text; the split has {TEXT_BYTES:,}"
    if abs(excess) <= allowed:
        yield rules.BYTES, "pass", evidence, final
    else:
        score = "too good" if excess > 0 else "too poor"
        yield rules.BYTES, "fail", f"{evidence}: the score is {score} by {abs(excess):.2%}", final


def seeds_result(seeds: Collection[int], *, unlimited: bool = False) -> tuple[Result, str]:
    """Return whether as many seeds are scored as is usual, and the sentence for it."""
    names = ", ".join(map(str, sorted(seeds)))
    result: Result = "pass" if len(seeds) >= USUAL_SEEDS and not unlimited else "unknown"
    return result, f"{len(seeds)} seeds are scored ({names}); {USUAL_SEEDS} are usual"


def check_seeds(claim: Mapping[str, Any], logs: Sequence[TrainingLog], shown: str) -> Iterator[Finding]:
    """Yield findings on the seeds that were scored, and on the figures of submission.json.

    Args:
        claim: content of submission.json; empty if there is none.
        logs: all logs of the folder that were read.
    """
    total, bpb, claimed = (claim.get(name) for name in ("bytes_total", "val_bpb", "seeds"))
    scored = {int(log.seed.value): log.final.bpb for log in logs if log.seed is not None and log.final is not None}
    if isinstance(total, int):
        yield Finding(rules.SIZE, *size_result(total, "code and model by submission.json"), "claim", shown)
    if not scored:
        return
    result, evidence = seeds_result(scored, unlimited=is_unlimited(claim))
    if isinstance(claimed, list) and {str(seed) for seed in claimed} != {str(seed) for seed in scored}:
        evidence += f"; submission.json claims {', '.join(map(str, claimed))}"
        result = "fail"
    yield Finding(rules.SEEDS, result, evidence, "log", shown)
    mean = statistics.fmean(scored.values())
    if isinstance(bpb, float) and bpb < mean - ROUNDING:  # nobody gains by a claim that is too high
        evidence = f"submission.json claims {bpb:.8g} bits per byte; the mean of the logs is {mean:.8g}"
        yield Finding(rules.SEEDS, "fail", evidence, "claim", shown)
