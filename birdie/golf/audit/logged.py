"""What one training log proves about the rules: clocks, bytes, shards, coverage, and scores too good to believe.

A log is its author's word. What it admits fails a rule, what it says in order passes one, what it leaves out stays
open. A doubtful score, which openai/parameter-golf's readers review by hand, is never more than "could not tell".
"""

import math

from birdie.golf.audit import rules
from birdie.golf.audit.logs import Figure, Scored, TrainingLog
from birdie.golf.audit.rules import Finding, Rule, Verdict
from birdie.golf.audit.splits import (
    SHARDS_OF_SMALL_SPLIT,
    TEXT_BYTES,
    TRAIN_SHARDS,
    Split,
    bytes_of,
    of_vocabulary,
    whole,
)

CAP_BYTES = 16_000_000
CAP_MS = 600_000
CAP_S = 600.0
MEBI = 16 * 2**20
"""What "16 MB" is taken for by mistake."""

OLD_SPLIT = 63_779_840  # the targets of the export with other text: its bytes are not known to the byte
NEARLY = 0.9  # of a cap: above it, what a timer leaves out may matter
BELIEVABLE_BPB = 1.0
BELIEVABLE_GAIN = 0.03  # of adaptation, in bits per byte
NOISE_BPB = 5e-4  # by which an export may score better than the weights it was made of

TABLE_SPREAD = 2e-4  # of the text's bytes: the known tables differ by 7e-5, a score to eight decimals adds nothing
SPLIT_SPREAD = 0.01  # of bytes a token, between parts of the split
OWN_SPREAD = 0.1  # of bytes a token, between tokenizers with as large a vocabulary
SLOW = 2.0  # times the mean step that a late one may take: loops and longer sequences come late


def findings(log: TrainingLog, *, unlimited: bool = False) -> tuple[Finding, ...]:
    """All that `log` tells about the rules; `unlimited`: the track has no time cap."""
    said = [
        *_train_time(log, unlimited),
        *_eval_time(log, unlimited),
        *_size(log),
        *_coverage(log),
        *_bytes(log),
        *_shards(log),
        *_tuned(log),
        *_doubts(log),
    ]
    return tuple(said)


def _finding(log: TrainingLog, rule: Rule, verdict: Verdict, evidence: str, at: Figure | Scored | None) -> Finding:
    return Finding(rule, verdict, evidence, "log", log.path, at.line if at is not None else 0)


def _train_time(log: TrainingLog, unlimited: bool) -> list[Finding]:
    took = log.train_ms
    if took is None:
        return []
    if unlimited:
        said = f"training took {took.value / 1e3:,.1f} s; the track has no cap on it"
        return [_finding(log, rules.TRAIN_TIME, "unknown", said, took)]
    found = [_finding(log, rules.TRAIN_TIME, *_against_cap(log, took.value), took)]
    after = log.calibration_s
    if after is not None and took.value <= CAP_MS < took.value + 1e3 * after.value:
        total = took.value / 1e3 + after.value
        said = (
            f"the clock stopped at {took.value / 1e3:,.2f} s, and {after.value:g} s of calibration came after it: "
            f"{total:,.2f} s of a cap of {CAP_S:g}"
        )
        found.append(_finding(log, rules.TRAIN_TIME, "fail", said, after))
    if log.forced is not None and took.value > CAP_MS:
        said = (
            f"the run was set to end at step {log.forced.value:,.0f} whatever the clock said, at {took.value:,.0f} ms"
        )
        found.append(_finding(log, rules.TRAIN_TIME, "fail", said, log.forced))
    return found


def _against_cap(log: TrainingLog, ms: float) -> tuple[Verdict, str]:
    if ms <= CAP_MS:
        return "pass", f"training took {ms:,.0f} ms of {CAP_MS:,}"
    over = ms - CAP_MS
    cap_kept = log.cap_s is None or 0 < log.cap_s.value <= CAP_S
    last = max(SLOW * (log.step_ms or 0.0), log.last_ms or 0.0)
    if log.capped and cap_kept and over < last:
        known = ((log.step_ms, "in the mean"), (log.last_ms, "at last"))
        steps = ", ".join(f"{each:,.0f} ms {which}" for each, which in known if each is not None)
        return "pass", f"training took {ms:,.0f} ms: the cap of {CAP_MS:,} came within the last step ({steps})"
    set_ = f", and its cap was set to {log.cap_s.value:,g} s" if log.cap_s is not None and not cap_kept else ""
    return "fail", f"training took {ms:,.0f} ms, {over:,.0f} ms more than the {CAP_MS:,} allowed{set_}"


def _eval_time(log: TrainingLog, unlimited: bool) -> list[Finding]:
    claimed = log.claimed
    if unlimited:
        return []
    if log.eval_s is not None:
        seconds, at, whole_clock = log.eval_s.value, log.eval_s, True
    elif claimed is not None and (timed := _timed(log, claimed)) is not None:
        seconds, at, whole_clock = (timed.ms or 0.0) / 1e3, Figure(0, timed.line), False
    else:
        return []
    if seconds > CAP_S:
        said = f"evaluation took {seconds:,.1f} s of {CAP_S:g}"
        return [_finding(log, rules.EVAL_TIME, "fail", said, at)]
    if log.compile_s is not None and seconds + log.compile_s.value > CAP_S:
        said = (
            f"the timer says {seconds:,.1f} s, and {log.compile_s.value:g} s of compiling came before it: more than "
            f"{CAP_S:g} s together (whether compiling counts was never ruled)"
        )
        return [_finding(log, rules.EVAL_TIME, "unknown", said, log.compile_s)]
    if not whole_clock and seconds > NEARLY * CAP_S:
        said = f"scoring took {seconds:,.1f} s of {CAP_S:g}; import, decoding and compiling are in no timer"
        return [_finding(log, rules.EVAL_TIME, "unknown", said, at)]
    what = "evaluation" if whole_clock else "scoring"
    return [_finding(log, rules.EVAL_TIME, "pass", f"{what} took {seconds:,.1f} s of {CAP_S:g}", at)]


def _timed(log: TrainingLog, claimed: Scored) -> Scored | None:
    return next((each for each in reversed(log.scores) if each.base == claimed.base and each.ms is not None), None)


def _size(log: TrainingLog) -> list[Finding]:
    total = log.total
    if total is None:
        return []
    verdict, said = against_cap_bytes(round(total.value), "code and model by the log")
    found = [_finding(log, rules.SIZE, verdict, said, total)]
    model, codes = log.model, list(log.code_bytes.values())
    if model is not None and codes and not any(model.value + code.value == total.value for code in codes):
        added = " or ".join(f"{model.value + code.value:,.0f}" for code in codes)
        said = f"the log's total is {total.value:,.0f} bytes, but its model and code make {added}"
        found.append(_finding(log, rules.SIZE, "unknown", said, total))
    return found


def against_cap_bytes(size: int, what: str) -> tuple[Verdict, str]:
    """The verdict on `size` bytes, and the sentence for it."""
    if size <= CAP_BYTES:
        return "pass", f"{what}: {size:,} of {CAP_BYTES:,} bytes"
    mistaken = " (the cap is decimal: 16 MB, not 16 MiB)" if size <= MEBI else ""
    return "fail", f"{what}: {size:,} bytes, {size - CAP_BYTES:,} more than the {CAP_BYTES:,} allowed{mistaken}"


def _coverage(log: TrainingLog) -> list[Finding]:
    seen = log.val_tokens
    if seen is None:
        return []
    if (split := whole(seen.value)) is not None:
        said = f"{seen.value:,.0f} targets are the whole split of vocabulary {split.vocabulary}"
        return [_finding(log, rules.COVERAGE, "pass", said, seen)]
    known = of_vocabulary(log.vocabulary)
    if not known:
        said = f"{seen.value:,.0f} targets were scored; no total is known for this tokenizer"
        return [_finding(log, rules.COVERAGE, "unknown", said, seen)]
    said = (
        f"{seen.value:,.0f} targets were scored; the whole split has {known[0].targets:,} with the published tokenizer "
        f"of vocabulary {log.vocabulary}"
    )
    per_token = _per_token(log)
    text = per_token[0] * seen.value / TEXT_BYTES if per_token is not None else None
    if text is not None:
        said += f", and by its score these have {text:.1%} of the text's bytes"
    verdict: Verdict = "fail" if _is_part(seen.value, known, per_token, text) else "unknown"
    said += "" if verdict == "fail" else ": another tokenizer, or another text"
    return [_finding(log, rules.COVERAGE, verdict, said, seen)]


def _is_part(
    targets: float, known: tuple[Split, ...], per_token: tuple[float, float] | None, text: float | None
) -> bool:
    """Whether so few targets are a part of the split for certain: a vocabulary's size does not name its tokenizer.

    Either they are far too few for any, by their bytes, too; or they are too few and have as many bytes a token as the
    published tokenizer's.
    """
    few = targets < (1 - OWN_SPREAD) * min(split.targets for split in known)
    if per_token is None or text is None:
        return few
    same = any(abs(per_token[0] / split.bytes_per_token - 1) <= SPLIT_SPREAD + per_token[1] for split in known)
    return (few and text < 1 - OWN_SPREAD) or (same and text < 1 - 2 * SPLIT_SPREAD)


def _per_token(log: TrainingLog) -> tuple[float, float] | None:
    """Bytes a token by the score that is claimed, and what rounding may add to them, as a share; None: not known."""
    claimed = log.claimed
    if claimed is None or not claimed.loss or claimed.bpb <= 0:
        return None
    slack = 0.5 * 10.0**-claimed.digits * (1 / claimed.loss + 1 / claimed.bpb)
    return bytes_of(1, claimed.loss, claimed.bpb), slack


def _bytes(log: TrainingLog) -> list[Finding]:
    """The bytes a score was divided by follow from its nats, its bits per byte and its targets."""
    claimed, found = log.claimed, _per_token(log)
    if found is None:
        return []
    per_token, slack = found
    targets = log.val_tokens.value if log.val_tokens is not None else None
    split = whole(targets) if targets is not None else None
    total = per_token * targets if targets is not None else math.nan
    ratio = total / TEXT_BYTES - 1
    said = f"nats, bits per byte and targets make {total:,.0f} bytes of text; the split has {TEXT_BYTES:,}"
    if split is not None and split.targets != OLD_SPLIT:
        if abs(ratio) <= TABLE_SPREAD + slack:
            return [_finding(log, rules.BYTES, "pass", said, claimed)]
        return [_finding(log, rules.BYTES, "fail", f"{said}: {_off(ratio)}", claimed)]
    if split is None and abs(ratio) <= SPLIT_SPREAD + slack:
        said += f": {_off(ratio)}, unless it is another text" if abs(ratio) > TABLE_SPREAD + slack else ""
        return [_finding(log, rules.BYTES, "unknown", said, claimed)]
    known = of_vocabulary(log.vocabulary)
    if not known:
        return []
    ratio = per_token / known[0].bytes_per_token - 1
    said = f"{per_token:.4f} bytes a token; {known[0].bytes_per_token:.3f} with the published tokenizer of this size"
    if abs(ratio) <= SPLIT_SPREAD + slack:
        return [_finding(log, rules.BYTES, "unknown", f"{said}, over the whole split", claimed)]
    if ratio > OWN_SPREAD + slack:
        return [_finding(log, rules.BYTES, "fail", f"{said}: {_off(ratio)}", claimed)]
    return [_finding(log, rules.BYTES, "unknown", f"{said}: {_off(ratio)}, if it is that one", claimed)]


def _off(ratio: float) -> str:
    way = "too many, so the score is too good by as much" if ratio > 0 else "too few"
    return f"{abs(ratio):.2%} {way}"


def _shards(log: TrainingLog) -> list[Finding]:
    shards = log.train_shards
    if shards is None or not shards.value:
        return []
    if shards.value == SHARDS_OF_SMALL_SPLIT:
        said = (
            f"{SHARDS_OF_SMALL_SPLIT:,} training shards mark data prepared with 10,000 validation documents: "
            f"the other 40,000 are trained on (#2127; published data have {TRAIN_SHARDS})"
        )
        return [_finding(log, rules.OVERLAP, "fail", said, shards)]
    if shards.value > TRAIN_SHARDS and of_vocabulary(log.vocabulary):
        said = f"{shards.value:,.0f} training shards, of which the published data have {TRAIN_SHARDS}: prepared anew"
        return [_finding(log, rules.OVERLAP, "unknown", said, shards)]
    return []


def _tuned(log: TrainingLog) -> list[Finding]:
    if log.tuned is None:
        return []
    said = "the model learned from validation tokens before it was quantized (pre-quantization TTT)"
    return [_finding(log, rules.VALIDATION, "fail", said, log.tuned)]


def _doubts(log: TrainingLog) -> list[Finding]:
    """Scores that readers would look at twice."""
    claimed, found = log.claimed, []
    if claimed is None:
        return []
    if claimed.bpb < BELIEVABLE_BPB:
        said = f"{claimed.bpb:g} bits per byte is below {BELIEVABLE_BPB:g}: see that distributions are normalised"
        found.append(_finding(log, rules.NORMALISED, "unknown", said, claimed))
    before, after = _float_score(log), _quantized(log)
    if before is not None and after is not None and after.bpb < before.bpb - NOISE_BPB:
        said = (
            f"the export scores {after.bpb:g} and the weights it was made of {before.bpb:g} (line {before.line}), "
            "without learning in between"
        )
        found.append(_finding(log, rules.VALIDATION, "unknown", said, after))
    plain = [each for each in log.scores if not each.diagnostic and not each.adapted] + ([after] if after else [])
    best = min(plain, key=lambda each: each.bpb, default=None)
    if claimed.adapted and best is not None and best.bpb - claimed.bpb > BELIEVABLE_GAIN:
        said = (
            f"adaptation gains {best.bpb - claimed.bpb:.4f} bits per byte over {best.name} (line {best.line}), "
            f"more than {BELIEVABLE_GAIN:g}: see that it scores first"
        )
        found.append(_finding(log, rules.SCORE_FIRST, "unknown", said, claimed))
    return found


def _float_score(log: TrainingLog) -> Scored | None:
    """The float model's last score: a diagnostic one, or that of training if no weights were averaged after it."""
    for each in reversed(log.scores):
        if any(word in each.base for word in ("pre-quant", "pre_quant", "prequant", "post_ema")) and not each.adapted:
            return each
    return log.validations[-1] if log.validations and not log.averaged else None


def _quantized(log: TrainingLog) -> Scored | None:
    """The export's first score that is comparable with the float model's: windows not overlapping, nothing learned."""
    for each in log.scores:
        named = "roundtrip" in each.base or "quantized" in each.base
        other = "sliding" in each.base or "pre-quant" in each.base
        if named and not other and not each.adapted and math.isfinite(each.bpb):
            return each
    return None
