"""Checks of one training log: clocks, bytes, shards, coverage, and scores that are too good to believe.

A log is its author's word. What it admits fails a rule, what it reports in order passes one, what it leaves out stays
unknown. A doubtful score, which readers of the challenge review by hand, is never more than a warning.
"""

import math
from collections.abc import Iterator

from birdie.golf.audit import rules
from birdie.golf.audit.rules import CAP_SECONDS, Finding, Result, Rule, size_result
from birdie.golf.audit.splits import (
    OLD_EXPORT,
    SHARDS_OF_SMALL_SPLIT,
    TEXT_BYTES,
    TRAIN_SHARDS,
    complete_split,
    scored_bytes,
    splits_of,
)
from birdie.lab.logs import Figure, ScoreLine, TrainingLog

CAP_MS = 1000 * CAP_SECONDS
LOW_BPB = 1.0
LARGE_GAIN_BPB = 0.03  # of adaptation
NOISE_BPB = 5e-4  # by which an export may score better than the weights it was made of

NEAR_CAP = 0.9  # of evaluation: above it, what a timer leaves out may matter
TABLE_TOLERANCE = 2e-4  # of the text's bytes: the known tables differ by 7e-5
SPLIT_TOLERANCE = 0.01  # of bytes per token, between parts of the split
TOKENIZER_TOLERANCE = 0.1  # of bytes per token, between tokenizers with as large a vocabulary
SLOW_STEP = 2.0  # times the mean step that a late one may take: loops and longer sequences come late


def check_log(log: TrainingLog, *, unlimited: bool = False) -> tuple[Finding, ...]:
    """Return all findings about one log; `unlimited`: the track has no time cap."""
    return tuple(
        Finding(rule, result, evidence, "log", log.path, figure.line if figure is not None else 0)
        for checks in (
            _train_time(log, unlimited),
            () if unlimited else _eval_time(log),
            _size(log),
            _coverage(log),
            _byte_count(log),
            _shards(log),
            _doubtful_scores(log),
        )
        for rule, result, evidence, figure in checks
    )


_Check = tuple[Rule, Result, str, Figure | ScoreLine | None]


def _train_time(log: TrainingLog, unlimited: bool) -> Iterator[_Check]:
    train = log.train_ms
    if train is None:
        return
    seconds, after = train.value / 1e3, log.calibration_s
    if unlimited:
        yield rules.TRAIN_TIME, "unknown", f"training took {seconds:,.1f} s; the track has no cap on it", train
        return
    yield rules.TRAIN_TIME, *_train_cap(log, train.value), train
    if after is not None and seconds <= CAP_SECONDS < seconds + after.value:
        total = f"{seconds + after.value:,.2f} s of a cap of {CAP_SECONDS:g}"
        evidence = (
            f"the clock stopped at {seconds:,.2f} s, then {after.value:g} s of calibration came after it: {total}"
        )
        yield rules.TRAIN_TIME, "fail", evidence, after
    if log.stop_step is not None and train.value > CAP_MS:
        evidence = (
            f"training was set to end at step {log.stop_step.value:,.0f}, not by the clock: {train.value:,.0f} ms"
        )
        yield rules.TRAIN_TIME, "fail", evidence, log.stop_step


def _train_cap(log: TrainingLog, ms: float) -> tuple[Result, str]:
    if ms <= CAP_MS:
        return "pass", f"training took {ms:,.0f} ms of {CAP_MS:,.0f}"
    excess = ms - CAP_MS
    official = log.cap_s is None or 0 < log.cap_s.value <= CAP_SECONDS
    longest = max(SLOW_STEP * (log.mean_step_ms or 0.0), log.last_step_ms or 0.0)
    if log.capped and official and excess < longest:  # as records that end at 600,028 ms were accepted
        steps = ((log.mean_step_ms, "mean"), (log.last_step_ms, "last"))
        known = ", ".join(f"{name} {step:,.0f} ms" for step, name in steps if step is not None)
        return "pass", f"training took {ms:,.0f} ms: the cap of {CAP_MS:,.0f} passed within the last step ({known})"
    cap = f"; its cap was set to {log.cap_s.value:,g} s" if log.cap_s is not None and not official else ""
    return "fail", f"training took {ms:,.0f} ms, {excess:,.0f} ms more than the {CAP_MS:,.0f} allowed{cap}"


def _eval_time(log: TrainingLog) -> Iterator[_Check]:
    final, total = log.final, log.eval_s
    timed = [score for score in log.scores if final is not None and score.base == final.base and score.ms is not None]
    if total is None and not timed:
        return
    figure = total or Figure((timed[-1].ms or 0.0) / 1e3, timed[-1].line)
    seconds, part = figure.value, "evaluation" if total else "scoring"
    if seconds > CAP_SECONDS:
        yield rules.EVAL_TIME, "fail", f"evaluation took {seconds:,.1f} s of {CAP_SECONDS:g}", figure
    elif log.compile_s is not None and seconds + log.compile_s.value > CAP_SECONDS:
        evidence = (
            f"the timer has {seconds:,.1f} s, and {log.compile_s.value:g} s of compiling came before it: more than"
        )
        evidence += f" {CAP_SECONDS:g} s together (whether compiling counts was never ruled)"
        yield rules.EVAL_TIME, "warning", evidence, log.compile_s
    elif total is None and seconds > NEAR_CAP * CAP_SECONDS:
        evidence = f"scoring took {seconds:,.1f} s of {CAP_SECONDS:g}; import, decoding and compiling are in no timer"
        yield rules.EVAL_TIME, "unknown", evidence, figure
    else:
        yield rules.EVAL_TIME, "pass", f"{part} took {seconds:,.1f} s of {CAP_SECONDS:g}", figure


def _size(log: TrainingLog) -> Iterator[_Check]:
    total, model, codes = log.total, log.model, list(log.code_bytes.values())
    if total is None:
        return
    yield rules.SIZE, *size_result(round(total.value), "code and model by the log"), total
    if model is not None and codes and not any(model.value + code.value == total.value for code in codes):
        sums = " or ".join(f"{model.value + code.value:,.0f}" for code in codes)
        yield (
            rules.SIZE,
            "warning",
            f"the log's total is {total.value:,.0f} bytes; its model and code make {sums}",
            total,
        )


def _coverage(log: TrainingLog) -> Iterator[_Check]:
    targets = log.val_tokens
    if targets is None:
        return
    if (split := complete_split(targets.value)) is not None:
        evidence = f"{targets.value:,.0f} targets are the whole split of vocabulary {split.vocabulary}"
        yield rules.COVERAGE, "pass", evidence, targets
        return
    known = splits_of(log.vocabulary)
    evidence = f"{targets.value:,.0f} targets were scored"
    if not known:
        yield rules.COVERAGE, "unknown", f"{evidence}; no total is known for this tokenizer", targets
        return
    evidence += (
        f"; the whole split has {known[0].targets:,} with the published tokenizer of vocabulary {log.vocabulary}"
    )
    # A vocabulary's size does not name its tokenizer. A part of the split are targets that are far too few for any, by
    # their bytes as well; or too few with as many bytes per token as the published tokenizer has.
    partial = targets.value < (1 - TOKENIZER_TOLERANCE) * min(split.targets for split in known)
    if (ratio := _bytes_per_token(log)) is not None:
        share = ratio[0] * targets.value / TEXT_BYTES
        evidence += f", and by its score these have {share:.1%} of the text's bytes"
        same = any(abs(ratio[0] / split.bytes_per_token - 1) <= SPLIT_TOLERANCE + ratio[1] for split in known)
        partial = (partial and share < 1 - TOKENIZER_TOLERANCE) or (same and share < 1 - 2 * SPLIT_TOLERANCE)
    evidence += "" if partial else ": another tokenizer, or another text"
    yield rules.COVERAGE, "fail" if partial else "unknown", evidence, targets


def _bytes_per_token(log: TrainingLog) -> tuple[float, float] | None:
    """Return bytes per token by the final score, and the relative error that its rounding makes."""
    final = log.final
    if final is None or not final.loss or final.bpb <= 0:
        return None
    rounding = 0.5 * 10.0**-final.digits * (1 / final.loss + 1 / final.bpb)
    return scored_bytes(1, final.loss, final.bpb), rounding


def _byte_count(log: TrainingLog) -> Iterator[_Check]:
    """The bytes that a score was divided by follow from its nats, its bits per byte and its targets."""
    if (ratio := _bytes_per_token(log)) is None:
        return
    per_token, rounding = ratio
    targets = log.val_tokens.value if log.val_tokens is not None else math.nan
    split, total = complete_split(targets), per_token * targets
    excess = total / TEXT_BYTES - 1
    evidence = f"nats, bits per byte and targets make {total:,.0f} bytes of text; the split has {TEXT_BYTES:,}"
    if split is not None and split is not OLD_EXPORT:
        exact = abs(excess) <= TABLE_TOLERANCE + rounding
        yield rules.BYTES, "pass" if exact else "fail", evidence + ("" if exact else _excess(excess)), log.final
    elif split is None and abs(excess) <= SPLIT_TOLERANCE + rounding:
        exact = abs(excess) <= TABLE_TOLERANCE + rounding
        yield rules.BYTES, "unknown", evidence + ("" if exact else f"{_excess(excess)}, or another text"), log.final
    elif known := splits_of(log.vocabulary):
        published = known[0].bytes_per_token
        excess = per_token / published - 1
        evidence = f"{per_token:.4f} bytes per token; the published tokenizer of this size has {published:.3f}"
        evidence += _excess(excess) if abs(excess) > SPLIT_TOLERANCE + rounding else " over the whole split"
        yield rules.BYTES, "fail" if excess > TOKENIZER_TOLERANCE + rounding else "unknown", evidence, log.final


def _excess(ratio: float) -> str:
    return f": {abs(ratio):.2%} too {'many, so the score is too good by as much' if ratio > 0 else 'few'}"


def _shards(log: TrainingLog) -> Iterator[_Check]:
    shards = log.train_shards
    if shards is not None and shards.value == SHARDS_OF_SMALL_SPLIT:
        evidence = f"{SHARDS_OF_SMALL_SPLIT:,} training shards are those of data with 10,000 validation documents: the "
        evidence += f"other 40,000 are trained on (parameter-golf#2127; published data have {TRAIN_SHARDS})"
        yield rules.OVERLAP, "fail", evidence, shards
    elif shards is not None and shards.value > TRAIN_SHARDS and splits_of(log.vocabulary):
        evidence = f"{shards.value:,.0f} training shards; the published data have {TRAIN_SHARDS}: another preparation"
        yield rules.OVERLAP, "unknown", evidence, shards
    if log.prequant_ttt is not None:
        evidence = "the model learned from validation tokens before it was quantized (pre-quantization TTT)"
        yield rules.VALIDATION, "fail", evidence, log.prequant_ttt


def _doubtful_scores(log: TrainingLog) -> Iterator[_Check]:
    final = log.final
    if final is None:
        return
    if final.bpb < LOW_BPB:
        evidence = f"{final.bpb:g} bits per byte is below {LOW_BPB:g}: are the distributions normalized?"
        yield rules.NORMALIZED, "warning", evidence, final
    weights, export = _float_score(log), _export_score(log)
    if weights is not None and export is not None and export.bpb < weights.bpb - NOISE_BPB:
        evidence = (
            f"the export scores {export.bpb:g}, the weights it was made of {weights.bpb:g} (line {weights.line}),"
        )
        yield rules.VALIDATION, "warning", f"{evidence} without learning in between", export
    fixed = [score for score in log.scores if not score.diagnostic and not score.adapted] + ([export] if export else [])
    best = min(fixed, key=lambda score: score.bpb, default=None)
    if final.adapted and best is not None and best.bpb - final.bpb > LARGE_GAIN_BPB:
        evidence = (
            f"adaptation gains {best.bpb - final.bpb:.4f} bits per byte over {best.name} (line {best.line}), more "
        )
        yield rules.SCORE_FIRST, "warning", f"{evidence}than {LARGE_GAIN_BPB:g}: does it score first?", final


def _float_score(log: TrainingLog) -> ScoreLine | None:
    """Return the float model's last score; that of training only if no weights were averaged after it."""
    labeled = [score for score in log.scores if score.of_float_model and not score.adapted]
    return next(reversed(labeled or ([] if log.averaged else log.validations)), None)


def _export_score(log: TrainingLog) -> ScoreLine | None:
    """Return the export's first score that compares with the float model's: non-overlapping windows, no learning."""
    for score in log.scores:
        exported = "roundtrip" in score.base or "quantized" in score.base
        other = "sliding" in score.base or "pre-quant" in score.base or score.adapted
        if exported and not other and math.isfinite(score.bpb):
            return score
    return None
