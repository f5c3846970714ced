"""What a submission folder claims, and whether its pieces bear it out: submission.json, README.md, logs.

No schema is enforced on submission.json; the names that records use are all looked for. A claim is the mean over seeds.
A contradiction fails the rule that the contradicted figure is evidence for, scores "seeds" and bytes "size", if nothing
but a mistake or worse explains it. Folders hold ablations, reruns and code that was packed after the runs, too: where
one of these may be the reason, nobody could tell.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.logged import against_cap_bytes
from birdie.golf.audit.logs import TrainingLog
from birdie.golf.audit.rules import Finding, Verdict
from birdie.golf.audit.source import Source, read_source, source_of
from birdie.golf.audit.unpack import unpacked

USUAL_SEEDS = 3
MAX_BYTES = 1_000_000
"""Largest submission.json and README.md that are read."""

_LARGE = 1e15  # no figure of a claim is

_T = TypeVar("_T")

_BPB = ("val_bpb", "mean_val_bpb", "val_bpb_mean", "bpb", "mean_bpb")
_TOTAL = (
    "bytes_total",
    "total_bytes",
    "artifact_bytes",
    "max_artifact_bytes",
    "artifact_bytes_max",
    "total_size_bytes",
)
_CODE = ("bytes_code", "code_bytes", "code_size_bytes")
_MODEL = ("bytes_model", "model_bytes", "model_size_bytes")
_SEEDS = ("seed_results", "seeds", "per_seed", "per_seed_results", "results_by_seed")
_OTHERS = re.compile(r"pre_?fix|baseline|previous|prior|ablation|sota|reference|comparison", re.IGNORECASE)
_IN_NAME = re.compile(r"(?<![a-z])seeds?[_\-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_CAPPED = re.compile(r"\d+_?min|record")
_README_BPB = re.compile(r"(?<![\d.])([0-4]\.\d{3,8})(?!\d)")
_CHOSEN = re.compile(r"\bbest\s+(?:of\s+)?\d+\s+(?:of|out of|from)\s+\d+\b|\bbest\s+of\s+\d+\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SeedClaim:
    """What is claimed of one seed; None: nothing."""

    bpb: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What submission.json says; None and empty: nothing.

    Attributes:
        path: of the file, as the user would find it.
        bpb: bits per byte.
        total, code, model: bytes.
        seeds: what is claimed of each seed.
        track: its name.
        seed: the one that is named by itself; whether it is the only one is not said.
    """

    path: str
    bpb: float | None = None
    total: int | None = None
    code: int | None = None
    model: int | None = None
    seeds: Mapping[int, SeedClaim] = field(default_factory=dict)
    track: str = ""
    seed: int | None = None


def has_no_cap(claim: Claim | None, path: Path) -> bool:
    """Whether the track has no time cap and asks for no significance: by the claim, else by the folder `track_…`.

    What else is in a path, such as the name of a submission, says nothing.
    """
    folders = [part for part in path.resolve().parts if part.lower().startswith("track_")]
    for track in (claim.track if claim is not None else "", *folders[-1:]):
        name = re.sub(r"[-\s]", "_", track.lower())
        if "non_record" in name or "nonrecord" in name or "unlimited" in name:
            return True
        if _CAPPED.search(name):
            return False
    return False


def read_claim(path: Path, shown: str) -> Claim:
    """The claim in a submission.json.

    Raises:
        DataError: it is not a JSON object, or more than MAX_BYTES.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes, more than a claim needs; it is not read")
    try:
        said = json.loads(path.read_bytes())
        if not isinstance(said, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON object ({error}); mend it") from error
    levels = list(_levels(said))
    return Claim(
        shown,
        _first(levels, _BPB, _real),
        _first(levels, _TOTAL, _whole),
        _first(levels, _CODE, _whole),
        _first(levels, _MODEL, _whole) or _model_by_codec(said),
        _seeds(levels),
        str(said.get("track", "")),
        seed if isinstance(seed := said.get("seed"), int) and not isinstance(seed, bool) else None,
    )


def _levels(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The object, then those in it by name, but not the ones of single seeds or of somebody else's result."""
    yield said
    for name, value in said.items():
        if isinstance(value, dict) and name not in _SEEDS and not name.isdigit() and not _OTHERS.search(name):
            yield value


def _first(levels: Sequence[Mapping[str, Any]], names: Sequence[str], read: Callable[[Any], _T | None]) -> _T | None:
    for level in levels:
        for name in names:
            if (value := read(level.get(name))) is not None:
                return value
    return None


def _real(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGE:  # as NaN is not
        return None
    return float(value)


def _whole(value: Any) -> int | None:
    real = _real(value)
    return int(real) if real is not None and real == int(real) else None


def _model_by_codec(said: Mapping[str, Any]) -> int | None:
    """`bytes_model_int6_zstd` and the like."""
    return next((_whole(value) for name, value in said.items() if name.startswith("bytes_model")), None)


def _seeds(levels: Sequence[Mapping[str, Any]]) -> dict[int, SeedClaim]:
    for level in levels:
        for name in _SEEDS:
            if found := _seeds_in(level.get(name)):
                return found
    return {}


def _seeds_in(value: Any) -> dict[int, SeedClaim]:
    if isinstance(value, dict):
        named = {re.sub(r"^seed[_ ]?", "", str(name)): each for name, each in value.items()}
        return {int(name): _seed(each) for name, each in named.items() if name.isdecimal() and len(name) < 20}
    if isinstance(value, list):
        plain = {each: SeedClaim() for each in value if isinstance(each, int) and not isinstance(each, bool)}
        objects = {
            int(each["seed"]): _seed(each)
            for each in value
            if isinstance(each, dict) and _whole(each.get("seed")) is not None
        }
        return plain | objects
    return {}


def _seed(said: Any) -> SeedClaim:
    if not isinstance(said, dict):
        return SeedClaim(_real(said))
    return SeedClaim(_first([said], _BPB, _real), _first([said], _TOTAL, _whole))


def findings(
    claim: Claim | None, readme: tuple[str, str] | None, logs: Sequence[TrainingLog], *, unlimited: bool = False
) -> tuple[Finding, ...]:
    """Whether claim, README (its path and text) and logs say the same, and how many seeds stand behind it."""
    found = [*_seed_findings(claim, logs, unlimited)]
    if claim is not None:
        found += [*_score_findings(claim, logs), *_byte_findings(claim, logs)]
    if readme is not None:
        found += _readme_findings(claim, *readme)
    return tuple(found)


def _seed_of(log: TrainingLog) -> int | None:
    """The seed a log says, else that in its name: train_seed42.log."""
    if log.seed is not None:
        return round(log.seed.value)
    named = _IN_NAME.search(Path(log.path).name)
    return int(named[1]) if named else None


def _by_seed(logs: Sequence[TrainingLog]) -> dict[int, list[TrainingLog]]:
    """The logs with a score, by seed."""
    found: dict[int, list[TrainingLog]] = {}
    for log in logs:
        seed = _seed_of(log)
        if seed is not None and log.claimed is not None:
            found.setdefault(seed, []).append(log)
    return found


def _series(log: TrainingLog) -> tuple[str, ...]:
    """What logs of one series share: the name but for its numbers, and the bytes of code. Ablations have others."""
    sizes = sorted(f"{figure.value:.0f}" for figure in log.code_bytes.values())
    return (re.sub(r"\d+", "#", Path(log.path).name), *sizes)


def _seed_findings(claim: Claim | None, logs: Sequence[TrainingLog], unlimited: bool) -> Iterator[Finding]:
    logged, claimed = _by_seed(logs), claim.seeds if claim is not None else {}
    where = claim.path if claim is not None else None
    nameless = sum(_seed_of(log) is None for log in logs)
    scoreless = {_seed_of(log) for log in logs if log.claimed is None}
    missing = sorted(set(claimed) - set(logged))
    for seed in missing:
        said, certain = f"seed {seed} is claimed, and no log is of it", bool(logs)
        if seed in scoreless:
            said, certain = f"seed {seed} is claimed, and no score was read in its log", False
        elif nameless:
            said, certain = f"seed {seed} is claimed, and {nameless} of the logs do not say their seed", False
        yield Finding(rules.SEEDS, "fail" if certain else "unknown", said, "claim", where)
    counted = {_series(log) for seed in claimed for log in logged.get(seed, ())}
    for seed in sorted(set(logged) - set(claimed)) if claimed else ():
        log = logged[seed][0]
        said = f"seed {seed} was run and scored {_scored(log):.8g}, and the claim leaves it out"
        alike = _series(log) in counted
        said += "" if alike else "; by its name or its code it is of another series"
        yield Finding(rules.SEEDS, "fail" if alike else "unknown", said, "claim", log.path)
    named = [claim.seed] if claim is not None and claim.seed is not None else []
    seeds = sorted(claimed or logged or named)
    if not seeds and logs:
        yield Finding(rules.SEEDS, "unknown", f"{len(logs)} logs, none of which says its seed", "claim", logs[0].path)
    if not seeds:
        return
    listed = ", ".join(map(str, seeds))
    if unlimited:
        yield Finding(rules.SEEDS, "unknown", f"seeds {listed}; the track asks for no significance", "claim", where)
    elif len(seeds) == 1:
        said = f"one seed stands behind {'the claim' if claim else 'it'} ({listed}); {USUAL_SEEDS} are usual"
        certain = bool(claimed or (claim and logged and not nameless))
        yield Finding(rules.SEEDS, "fail" if certain else "unknown", said, "claim", where)
    elif len(seeds) < USUAL_SEEDS:
        said = f"{len(seeds)} seeds stand behind the claim ({listed}); {USUAL_SEEDS} are usual"
        yield Finding(rules.SEEDS, "unknown", said, "claim", where)
    elif logs and not missing:
        yield Finding(rules.SEEDS, "pass", f"{len(seeds)} seeds stand behind the claim: {listed}", "claim", where)


def _scored(log: TrainingLog) -> float:
    return log.claimed.bpb if log.claimed is not None else float("nan")


def _score_findings(claim: Claim, logs: Sequence[TrainingLog]) -> Iterator[Finding]:
    logged = _by_seed(logs)
    for seed, said in sorted(claim.seeds.items()):
        scores = [each.bpb for log in logged.get(seed, ()) for each in log.scores]
        if scores and said.bpb is not None and not _same(said.bpb, scores):
            ends = ", ".join(f"{_scored(log):.8g}" for log in logged[seed])
            evidence = f"seed {seed}: {said.bpb:.8g} bits per byte is claimed, its log ends at {ends}"
            better = said.bpb < min(scores)  # a worse one gains nobody anything
            yield Finding(rules.SEEDS, "fail" if better else "unknown", evidence, "claim", claim.path)
    counted, certain = _counted(claim, logs)
    ends_ = [_scored(log) for log in counted]
    if claim.bpb is None or not ends_:
        return
    mean, every = statistics.fmean(ends_), [each.bpb for log in logs for each in log.scores]
    verdict: Verdict = "unknown"
    if _same(claim.bpb, [mean]):
        said_ = f"{claim.bpb:.8g} bits per byte is the mean of {len(ends_)} log{'s' if len(ends_) > 1 else ''}"
        verdict = "pass" if len(ends_) > 1 else "unknown"
    elif len(ends_) > 1 and _same(claim.bpb, [min(ends_)]):
        said_ = f"{claim.bpb:.8g} bits per byte is the best seed's; the mean of {len(ends_)} logs is {mean:.8g}"
        verdict = "fail" if certain else "unknown"
    elif not _same(claim.bpb, every):
        said_ = (
            f"{claim.bpb:.8g} bits per byte is claimed; the logs end at {', '.join(f'{each:.8g}' for each in ends_)}"
        )
        verdict = "fail" if claim.bpb < min(every) and set(claim.seeds) <= set(logged) else "unknown"
    else:
        said_ = f"{claim.bpb:.8g} bits per byte is one score of the logs, whose mean at the end is {mean:.8g}"
    yield Finding(rules.SEEDS, verdict, said_, "claim", claim.path)


def _counted(claim: Claim, logs: Sequence[TrainingLog]) -> tuple[list[TrainingLog], bool]:
    """The logs whose mean the claim should be, and whether these are they for certain."""
    logged = _by_seed(logs)
    if claim.seeds:
        runs = [logged[seed] for seed in claim.seeds if seed in logged]
        return [each[-1] for each in runs], all(len(each) == 1 for each in runs)
    scored = [log for log in logs if log.claimed is not None]
    seeds = {_seed_of(log) for log in scored}
    alike = len({_series(log) for log in scored}) == 1
    return scored, alike and None not in seeds and len(seeds) == len(scored) and claim.seed is None


def _same(said: float, among: Sequence[float]) -> bool:
    """Whether `said` is one of the numbers, rounded as it is."""
    digits = len(f"{said:.10g}".partition(".")[2])
    return any(abs(said - each) <= 1.01 * 10.0 ** -max(2, min(digits, 8)) for each in among)


def _byte_findings(claim: Claim, logs: Sequence[TrainingLog]) -> Iterator[Finding]:
    totals = {log.path: round(log.total.value) for log in logs if log.total is not None}
    largest = max([claim.total or 0, *(each.bytes or 0 for each in claim.seeds.values())])
    if largest:
        verdict, said = against_cap_bytes(largest, "code and model by submission.json")
        yield Finding(rules.SIZE, verdict, said, "claim", claim.path)
    if claim.total is not None and totals and claim.total not in totals.values():
        known = ", ".join(f"{size:,}" for size in totals.values())
        said = f"{claim.total:,} bytes are claimed; the logs say {known}"  # packed anew since, or their mean
        yield Finding(rules.SIZE, "unknown", said, "claim", claim.path)
    parts = (claim.code, claim.model, claim.total)
    if all(parts) and (claim.code or 0) + (claim.model or 0) != claim.total:
        said = (
            f"submission.json's {claim.code:,} bytes of code and {claim.model:,} of model are not its {claim.total:,}"
        )
        yield Finding(rules.SIZE, "unknown", said, "claim", claim.path)


def _readme_findings(claim: Claim | None, path: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if match := _CHOSEN.search(line):
            said = f"the README speaks of {match[0]!r}: seeds may have been chosen by their scores"
            yield Finding(rules.SEEDS, "unknown", said, "README", path, number)
    if claim is None or claim.bpb is None:
        return
    told = [value for line in lines if "bpb" in line.lower() or "|" in line for value in _README_BPB.findall(line)]
    if told and not any(_rounds_to(claim.bpb, value) for value in told):
        said = f"submission.json claims {claim.bpb:.8g} bits per byte, and the README has {', '.join(told[:5])}"
        yield Finding(rules.SEEDS, "unknown", said, "README", path)


def _rounds_to(value: float, told: str) -> bool:
    """Whether `told` is `value` at the digits either has."""
    digits = min(len(told.partition(".")[2]), len(f"{value:.10g}".partition(".")[2]))
    return abs(round(value, digits) - round(float(told), digits)) <= 1.01 * 10.0**-digits


def belongs(
    script: Path,
    shown: str,
    logs: Sequence[TrainingLog],
    claim: Claim | None = None,
    source: Source | None = None,
) -> Iterator[Finding]:
    """Whether the logs are of the script that ships: by the copy they begin with, else by the bytes they count.

    Args:
        script: that ships.
        shown: names it.
        logs: of the folder; ablations among them have scripts of their own.
        claim: names the seeds it rests on; None: there is none.
        source: of the script, if it was read already.
    """
    source = source or read_source(script)
    inner = unpacked(source.tree) if source.tree is not None else None
    texts = [text for text in (source.data, inner) if text]
    same = {copy: _same_script(texts, copy) for copy in {log.source for log in logs if log.source is not None}}
    nobody = not any(same.values())
    wrapped = source.tree is None or inner is not None
    for log in logs:
        counted = [round(figure.value) for figure in log.code_bytes.values()]
        if log.source is not None and not same[log.source]:
            said = f"the log begins with another script than {shown}, which ships"
            claimed = claim is not None and _seed_of(log) in claim.seeds
            certain = not wrapped and (nobody or claimed)
            said += "" if certain else "; it may have been packed since" if wrapped else "; other logs begin with that"
            yield Finding(rules.SEEDS, "fail" if certain else "unknown", said, "log", log.path, 1)
        elif log.source is None and counted and source.size not in counted:
            said = f"the log counts {' or '.join(f'{each:,}' for each in counted)} bytes of code; {shown} has "
            said += f"{source.size:,}"
            yield Finding(rules.SEEDS, "unknown", said, "log", log.path, next(iter(log.code_bytes.values())).line)


def _same_script(texts: Sequence[bytes], copy: str) -> bool:
    """Whether a log's copy of the script is one of the texts, but for comments and layout."""
    squeezed = _squeezed(copy)
    if any(_squeezed(text.decode("utf-8", "replace")) in squeezed for text in texts):
        return True
    program = source_of(copy.encode("utf-8", "replace")).program
    return program is not None and program in [source_of(text).program for text in texts]


def _squeezed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
