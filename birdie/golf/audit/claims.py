"""The claims of a submission folder (submission.json, README.md) against its own logs and script.

No schema is enforced on submission.json; all names that records use are read. A claim is the mean over seeds. A
contradiction fails the rule of the figure, scores "seeds" and bytes "size", if nothing but a mistake or worse explains
it. Folders also hold ablations, reruns and code that was packed after the runs: what one of these may explain is a
warning.
"""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.rules import Finding, Result, size_result
from birdie.golf.audit.source import Source, parse_source
from birdie.golf.packed import FIRST
from birdie.lab.logs import TrainingLog
from birdie.system.parsing import parse_object
from birdie.system.regular import open_regular

USUAL_SEEDS = 3
MAX_BYTES = 1_000_000
"""Largest submission.json and README.md that are read."""
MAX_COPIES = 16
"""Different scripts at the beginning of logs that are compared; parsing one of 250 kB takes a second."""

_MAX_FIGURE = 1e15

_WARNING: Result = "warning"
_T = TypeVar("_T")

_BPB = ("val_bpb", "mean_val_bpb", "val_bpb_mean", "bpb", "mean_bpb")
_TOTAL = (
    *("bytes_total", "total_bytes", "artifact_bytes", "max_artifact_bytes", "artifact_bytes_max"),
    "total_size_bytes",
)
_CODE = ("bytes_code", "code_bytes", "code_size_bytes")
_MODEL = ("bytes_model", "model_bytes", "model_size_bytes")
_SEEDS = ("seed_results", "seeds", "per_seed", "per_seed_results", "results_by_seed")
_OTHER_RESULTS = re.compile(r"pre_?fix|baseline|previous|prior|ablation|sota|reference|comparison", re.IGNORECASE)
_SEED_IN_NAME = re.compile(r"(?<![a-z])seeds?[_\-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_CAPPED_TRACK = re.compile(r"\d+_?min|record")
_README_BPB = re.compile(r"(?<![\d.])([0-4]\.\d{3,8})(?!\d)")
_BEST_OF = re.compile(r"\bbest\s+(?:of\s+)?\d+\s+(?:of|out of|from)\s+\d+\b|\bbest\s+of\s+\d+\b", re.IGNORECASE)


class Written(float):
    """A number, and how many decimals it is written with: 1.1200 has four.

    Attributes:
        decimals: negative for 112e1.
    """

    decimals: int

    def __new__(cls, text: str) -> Self:
        """Read a number of JSON."""
        number = super().__new__(cls, text)
        digits, _, exponent = text.lower().partition("e")
        number.decimals = len(digits.partition(".")[2]) - int(exponent or 0)
        return number


class SeedClaim(NamedTuple):
    """The claim about one seed; None for what it does not state."""

    bpb: Written | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A submission.json; None and empty for what it does not state."""

    path: str  # as the user would name it
    bpb: Written | None = None  # bits per byte
    total: int | None = None  # bytes of code and model
    code: int | None = None
    model: int | None = None
    seeds: Mapping[int, SeedClaim] = field(default_factory=dict)
    track: str = ""
    seed: int | None = None  # a single one that is named; whether it is the only one is not stated


def is_unlimited(claim: Claim | None, path: Path) -> bool:
    """Return whether the track has no time cap and asks for no significance: by the claim, else by the path."""
    folders = [part for part in path.resolve().parts if part.lower().startswith("track_")]
    for track in (claim.track if claim is not None else "", *folders[-1:]):
        name = re.sub(r"[-\s]", "_", track.lower())
        if "non_record" in name or "nonrecord" in name or "unlimited" in name:
            return True
        if _CAPPED_TRACK.search(name):
            return False
    return False


def read_claim(path: Path, shown: str) -> Claim:
    """Read the claim in a submission.json."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes, the limit is {MAX_BYTES:,}; it was not read")
    try:
        with open_regular(path) as file:
            content = parse_object(file.read(MAX_BYTES), parse_float=Written)
    except ValueError as error:
        raise DataError(f"{path} is no JSON object ({error}); correct it") from error
    # not those of single seeds, and not somebody else's result
    levels = [content]
    for name, value in content.items():
        if isinstance(value, dict) and not (name in _SEEDS or name.isdigit() or _OTHER_RESULTS.search(name)):
            levels.append(value)
    by_codec = next((_integer(value) for name, value in content.items() if name.startswith("bytes_model")), None)
    return Claim(
        shown,
        _first(levels, _BPB, _real),
        _first(levels, _TOTAL, _integer),
        _first(levels, _CODE, _integer),
        _first(levels, _MODEL, _integer) or by_codec,  # bytes_model_int6_zstd and the like
        next((seeds for level in levels for name in _SEEDS if (seeds := _seed_claims(level.get(name)))), {}),
        track if isinstance(track := content.get("track"), str) else "",
        seed if isinstance(seed := content.get("seed"), int) and not isinstance(seed, bool) else None,
    )


def _first(levels: Sequence[Mapping[str, Any]], names: Sequence[str], read: Callable[[Any], _T | None]) -> _T | None:
    values = (read(level.get(name)) for level in levels for name in names)
    return next((value for value in values if value is not None), None)


def _real(value: Any) -> Written | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) < _MAX_FIGURE:  # NaN
        return None
    return value if isinstance(value, Written) else Written(str(value))


def _integer(value: Any) -> int | None:
    real = _real(value)
    return int(real) if real is not None and real.is_integer() else None


def _seed_claims(value: Any) -> dict[int, SeedClaim]:
    if isinstance(value, dict):
        named = {re.sub(r"^seed[_ ]?", "", str(name)): item for name, item in value.items()}
        return {int(name): _seed_claim(item) for name, item in named.items() if name.isdecimal() and len(name) < 20}
    items = value if isinstance(value, list) else []
    plain = {item: SeedClaim() for item in items if isinstance(item, int) and not isinstance(item, bool)}
    objects = [item for item in items if isinstance(item, dict) and _integer(item.get("seed")) is not None]
    return plain | {int(item["seed"]): _seed_claim(item) for item in objects}


def _seed_claim(value: Any) -> SeedClaim:
    if not isinstance(value, dict):
        return SeedClaim(_real(value))
    return SeedClaim(_first([value], _BPB, _real), _first([value], _TOTAL, _integer))


def check_claims(
    claim: Claim | None, readme: tuple[str, str] | None, logs: Sequence[TrainingLog], *, unlimited: bool = False
) -> tuple[Finding, ...]:
    """Return whether claim, README (path and text) and logs agree, and how many seeds the claim rests on."""
    findings = [*_check_seeds(claim, logs, unlimited)]
    if claim is not None:
        findings += [*_check_scores(claim, logs), *_check_bytes(claim, logs)]
    if readme is not None:
        findings += _check_readme(claim, *readme)
    return tuple(findings)


def _seed_of(log: TrainingLog) -> int | None:
    """Return the seed of a log, else that in its name: train_seed42.log."""
    if log.seed is not None:
        return round(log.seed.value)
    match = _SEED_IN_NAME.search(Path(log.path).name)
    return int(match[1]) if match else None


def _by_seed(logs: Sequence[TrainingLog]) -> dict[int, list[TrainingLog]]:
    """Return the logs with a final score, by seed."""
    groups: dict[int, list[TrainingLog]] = {}
    for log in logs:
        seed = _seed_of(log)
        if seed is not None and log.final is not None:
            groups.setdefault(seed, []).append(log)
    return groups


def _series(log: TrainingLog) -> tuple[str, ...]:
    """Return what logs of one series share, and ablations do not: the name but for numbers, and the bytes of code."""
    sizes = sorted(f"{figure.value:.0f}" for figure in log.code_bytes.values())
    return (re.sub(r"\d+", "#", Path(log.path).name), *sizes)


def _check_seeds(claim: Claim | None, logs: Sequence[TrainingLog], unlimited: bool) -> Iterator[Finding]:
    logged, claimed = _by_seed(logs), claim.seeds if claim is not None else {}
    path = claim.path if claim is not None else None
    nameless = sum(_seed_of(log) is None for log in logs)
    scoreless = {_seed_of(log) for log in logs if log.final is None}
    missing = sorted(set(claimed) - set(logged))
    for seed in missing:
        reason = "there is no log of it"
        if seed in scoreless:
            reason = "no score was read in its log"
        elif nameless:
            reason = f"{nameless} of the logs do not state their seed"
        certain = bool(logs) and seed not in scoreless and not nameless
        yield Finding(rules.SEEDS, "fail" if certain else "unknown", f"seed {seed} is claimed; {reason}", "claim", path)
    series = {_series(log) for seed in claimed for log in logged.get(seed, ())}
    for seed in sorted(set(logged) - set(claimed)) if claimed else ():
        log = logged[seed][0]
        evidence = f"seed {seed} was run and scored {_bpb(log):.8g}, and the claim leaves it out"
        certain = _series(log) in series
        evidence += "" if certain else "; by its name or its code it is of another series"
        yield Finding(rules.SEEDS, "fail" if certain else "warning", evidence, "claim", log.path)
    named = [claim.seed] if claim is not None and claim.seed is not None else []
    seeds = sorted(claimed or logged or named)
    if not seeds and logs:
        yield Finding(rules.SEEDS, "unknown", f"{len(logs)} logs; none states its seed", "claim", logs[0].path)
    if not seeds:
        return
    evidence, certain = f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))})", len(seeds) == 1
    if unlimited:
        yield Finding(rules.SEEDS, "unknown", f"{evidence}; the track asks for no significance", "claim", path)
    elif len(seeds) < USUAL_SEEDS:
        certain &= bool(claimed or (claim and logged and not nameless))
        evidence += f"; {USUAL_SEEDS} are usual"
        yield Finding(rules.SEEDS, "fail" if certain else "unknown", evidence, "claim", path)
    elif logs and not missing:
        yield Finding(rules.SEEDS, "pass", evidence, "claim", path)


def _bpb(log: TrainingLog) -> float:
    return log.final.bpb if log.final is not None else float("nan")


def _check_scores(claim: Claim, logs: Sequence[TrainingLog]) -> Iterator[Finding]:
    logged = _by_seed(logs)
    for seed, single in sorted(claim.seeds.items()):
        scores = [score.bpb for log in logged.get(seed, ()) for score in log.scores]
        if scores and single.bpb is not None and not _is_one(single.bpb, scores, single.bpb.decimals):
            ends = ", ".join(f"{_bpb(log):.8g}" for log in logged[seed])
            evidence = f"seed {seed}: {single.bpb:.8g} bits per byte is claimed, its log ends at {ends}"
            better = single.bpb < min(scores)  # nobody gains by a claim that is too high
            yield Finding(rules.SEEDS, "fail" if better else "warning", evidence, "claim", claim.path)
    runs, certain = _runs_of(claim, logs)
    finals = [_bpb(log) for log in runs]
    if claim.bpb is None or not finals:
        return
    mean, scores = statistics.fmean(finals), [score.bpb for log in logs for score in log.scores]
    # most programs that write JSON leave zeros at the end out: a score that is repeated has the decimals of its log
    repeated = [log.final.digits for log in runs if log.final is not None and log.final.bpb == claim.bpb]
    decimals = max([claim.bpb.decimals, *repeated])
    evidence, result = f"{claim.bpb:.8g} bits per byte is ", _WARNING
    if _is_one(claim.bpb, [mean], decimals):
        evidence += f"the mean of {len(finals)} log{'s' * (len(finals) > 1)}"
        result = "pass" if len(finals) > 1 else "unknown"
    elif len(finals) > 1 and _is_one(claim.bpb, [min(finals)], decimals):
        evidence += f"the best seed's; the mean of {len(finals)} logs is {mean:.8g}"
        result = "fail" if certain else _WARNING
    elif _is_one(claim.bpb, scores, decimals):
        evidence += f"one score of the logs; the mean of their final scores is {mean:.8g}"
    else:
        evidence += f"claimed; the logs end at {', '.join(f'{value:.8g}' for value in finals)}"
        result = "fail" if claim.bpb < min(scores) and set(claim.seeds) <= set(logged) else "warning"
    yield Finding(rules.SEEDS, result, evidence, "claim", claim.path)


def _runs_of(claim: Claim, logs: Sequence[TrainingLog]) -> tuple[list[TrainingLog], bool]:
    """Return the logs whose mean the claim should be, and whether that is certain."""
    logged = _by_seed(logs)
    if claim.seeds:
        runs = [logged[seed] for seed in claim.seeds if seed in logged]
        return [run[-1] for run in runs], all(len(run) == 1 for run in runs)
    scored = [log for log in logs if log.final is not None]
    seeds = {_seed_of(log) for log in scored}
    one_series = len({_series(log) for log in scored}) == 1
    return scored, one_series and None not in seeds and len(seeds) == len(scored) and claim.seed is None


def _is_one(claimed: float, values: Sequence[float], decimals: int) -> bool:
    """Return whether `claimed` is one of `values`, rounded or cut to that many decimals."""
    return any(abs(claimed - value) <= 1.01 * 10.0 ** -max(2, min(decimals, 8)) for value in values)


def _check_bytes(claim: Claim, logs: Sequence[TrainingLog]) -> Iterator[Finding]:
    totals = [round(log.total.value) for log in logs if log.total is not None]
    largest = max([claim.total or 0, *(seed.bytes or 0 for seed in claim.seeds.values())])
    if largest:
        result, evidence = size_result(largest, "code and model by submission.json")
        yield Finding(rules.SIZE, result, evidence, "claim", claim.path)
    if claim.total is not None and totals and claim.total not in totals:  # packed again since, or their mean
        evidence = f"{claim.total:,} bytes are claimed; the logs have {', '.join(f'{total:,}' for total in totals)}"
        yield Finding(rules.SIZE, "warning", evidence, "claim", claim.path)
    if claim.code and claim.model and claim.total and claim.code + claim.model != claim.total:
        evidence = f"{claim.code:,} bytes of code and {claim.model:,} of the model do not add up to {claim.total:,}"
        yield Finding(rules.SIZE, "warning", evidence, "claim", claim.path)


def _check_readme(claim: Claim | None, path: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if match := _BEST_OF.search(line):
            evidence = f"the README has {match[0]!r}: were seeds chosen by their scores?"
            yield Finding(rules.SEEDS, "warning", evidence, "README", path, number)
    if claim is None or claim.bpb is None:
        return
    values = [value for line in lines if "bpb" in line.lower() or "|" in line for value in _README_BPB.findall(line)]
    if values and not any(_agrees(claim.bpb, value) for value in values):
        evidence = f"submission.json claims {claim.bpb:.8g} bits per byte; the README has {', '.join(values[:5])}"
        yield Finding(rules.SEEDS, "warning", evidence, "README", path)


def _agrees(value: Written, text: str) -> bool:
    """Return whether a number in a text is `value`, at the fewer decimals of the two."""
    digits = min(Written(text).decimals, value.decimals)
    return abs(round(value, digits) - round(float(text), digits)) <= 1.01 * 10.0**-digits


def check_script_of_logs(
    source: Source, shown: str, logs: Sequence[TrainingLog], claim: Claim | None = None
) -> Iterator[Finding]:
    """Yield a finding for each log of another script than `source`, which ships and is called `shown`.

    A log is compared by the copy of the script that it begins with, else by the bytes of code it counts. Ablations
    among the logs have scripts of their own, unless the claim names their seed.
    """
    parts = [source, *([parse_source(source.unpacked)] if source.unpacked else [])]
    modules = [_stripped(text) for name, text in source.modules.items() if name != FIRST]
    copies = list(dict.fromkeys(log.source for log in logs if log.source is not None))
    same = {copy: _is_copy(copy, parts, modules) for copy in copies[:MAX_COPIES]}
    packed = source.tree is None or source.unpacked is not None or bool(modules)
    for log in logs:
        sizes = [round(figure.value) for figure in log.code_bytes.values()]
        if log.source is not None and log.source not in same:
            evidence = f"its script was not compared: the logs begin with {len(copies)}, more than {MAX_COPIES}"
            yield Finding(rules.SEEDS, "unknown", evidence, "log", log.path, 1)
        elif log.source is not None and not same[log.source]:
            claimed = claim is not None and _seed_of(log) in claim.seeds
            certain = not packed and (claimed or not any(same.values()))
            reason = "" if certain else "; it may have been packed since" if packed else "; other logs begin with it"
            evidence = f"the log begins with another script than {shown}, which ships{reason}"
            yield Finding(rules.SEEDS, "fail" if certain else "warning", evidence, "log", log.path, 1)
        elif log.source is None and sizes and source.size not in sizes:
            evidence = f"the log counts {' or '.join(f'{size:,}' for size in sizes)} bytes of code; {shown} has "
            line = next(iter(log.code_bytes.values())).line
            yield Finding(rules.SEEDS, "warning", f"{evidence}{source.size:,}", "log", log.path, line)


def _is_copy(copy: str, parts: Sequence[Source], modules: Sequence[str]) -> bool:
    """Return whether a log's copy has all modules of a packed script, or is a part but for comments and layout."""
    stripped = _stripped(copy)
    if modules and all(text in stripped for text in modules):
        return True
    if any(part.data and _stripped(part.data.decode("utf-8", "replace")) in stripped for part in parts):
        return True
    program = parse_source(copy.encode("utf-8", "replace")).program
    return program is not None and program in [part.program for part in parts]


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
