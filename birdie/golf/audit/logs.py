"""What a training log says: times, bytes, seeds, shards and scores, with the line that says each.

    logs/RUN_ID.txt, train_seed42.log, … ──read_log──► TrainingLog ──logged.findings──► Finding, …

The challenge's own lines are known, those of its later records ("val_loss: 2.35" beside "val_loss:2.35", "train_time:
1.6m", `legal_ttt_exact`, `quantized_ttt_phased`, `Total submission size quantized+brotli`) and ours. A log may begin
with a copy of the script; what stands in it is no line of the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from birdie.errors import DataError

MAX_WEIGHT = 16_000_000
"""Most that a log may weigh to be read; one of a record has 100 kB."""
LINE_WEIGHT = 64
"""Bytes that a line takes as long as, however short it is."""
MAX_LINE = 4096
"""Characters of one line that are read; in foreign text a pattern may take the square of it."""

_PAIR = re.compile(
    r"(?<![\w.])([A-Za-z_][\w.]*)\s*[:=]\s*([-+]?\d[\d,_]{0,30}(?:\.\d{1,30})?(?:e[-+]?\d{1,2})?)\s*(ms|s|m)?(?!\w|\.\d)"
)
_VALIDATION = re.compile(r"^(?:step\s*(?:[:=]\s*)?)?(\d+)/\d+\b")
_SIZES = ("Total submission size", "Serialized model", "Code size")
_BYTES = re.compile(r":\s*(\d[\d,_]{0,30})\s*(?:bytes|B)\b")
_IN_SECONDS = re.compile(r"\bin\s+(\d{1,9}(?:\.\d{1,9})?)\s*s\b")
_COMPILED = re.compile(r"\bcompile warm-?up (?:done|took)\D{0,80}?(\d{1,9}(?:\.\d{1,9})?)\s*s\b", re.IGNORECASE)
_TUNED = re.compile(r"^\s*pre_?quant_?ttt\s*:\s*epoch\b", re.IGNORECASE)
_VOCABULARY = re.compile(r"(?:(?<![a-z])sp|fineweb_)(\d{3,5})(?=_|\b)")
_UNITS = {"ms": 1.0, "s": 1e3, "m": 6e4}
_BEGUN = re.compile(r"^Running Python \d")
_RULE = re.compile(r"^={20,}\s*$")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a log.

    Attributes:
        value: it.
        line: where it stands, from 1.
    """

    value: float
    line: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A line with a score.

    Attributes:
        name: what was scored: "final_int8_zlib_roundtrip_exact", "diagnostic quantized", ….
        bpb: bits per byte.
        loss: nats per token; None: not said.
        digits: decimals of the bits per byte.
        ms: time it took; None: not said.
        line: where it stands, from 1.
    """

    name: str
    bpb: float
    loss: float | None
    digits: int
    ms: float | None
    line: int

    @property
    def base(self) -> str:
        """Its name in small letters, the same with and without _exact."""
        return self.name.lower().replace("_exact", "")

    @property
    def diagnostic(self) -> bool:
        """Whether it is of a model that does not ship, or said to be no result."""
        return any(word in self.base for word in ("diagnostic", "pre-quant", "prequant", "pre_quant", "post_ema"))

    @property
    def adapted(self) -> bool:
        """Whether the model learned while it was scored."""
        return any(word in self.base for word in ("ttt", "adapt", "slot", "ngram", "n-gram", "cache"))


@dataclass(slots=True)
class TrainingLog:
    """What one log says; None and empty: nothing.

    Attributes:
        path: of the file, as the user would find it.
        source: the script it begins with.
        seed, train_shards, val_tokens: as named; `val_tokens` counts targets.
        vocabulary: "1024", "8192", … as paths of tokenizer and data spell it; "caseops" after it where they do.
        cap_s: the wall-clock cap that was set.
        forced: the step that was set to end at, whatever the clock said.
        train_ms: the longest training time it tells of.
        step_ms: the mean step at the end.
        last_ms: the mean step of the last stretch that was timed: late steps may be slower than the mean.
        timed: the last step whose time is said, and that, in ms.
        capped: whether the clock ended the training.
        calibration_s: seconds spent on Hessians after the clock stopped.
        compile_s: seconds of compiling for evaluation, said apart.
        eval_s: what the whole evaluation took, by its own words.
        code_bytes, model_bytes, total_bytes: by what the line calls them; "" for no name.
        validations: bits per byte of the float model in training, in order.
        scores: all other scores, in order.
        averaged: whether weights were averaged after the last validation.
        tuned: a line that tells of learning from validation tokens before export.
    """

    path: str
    source: str | None = None
    seed: Figure | None = None
    train_shards: Figure | None = None
    val_tokens: Figure | None = None
    vocabulary: str = ""
    cap_s: Figure | None = None
    forced: Figure | None = None
    train_ms: Figure | None = None
    step_ms: float | None = None
    last_ms: float | None = None
    capped: bool = False
    calibration_s: Figure | None = None
    compile_s: Figure | None = None
    eval_s: Figure | None = None
    code_bytes: dict[str, Figure] = field(default_factory=dict)
    model_bytes: dict[str, Figure] = field(default_factory=dict)
    total_bytes: dict[str, Figure] = field(default_factory=dict)
    validations: list[Scored] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    averaged: bool = False
    tuned: Figure | None = None
    timed: tuple[float, float] | None = None

    @property
    def claimed(self) -> Scored | None:
        """The score a claim rests on: the last that is of what ships, in its longest form."""
        shipped = [score for score in self.scores if not score.diagnostic]
        if not shipped:
            return None
        last = shipped[-1].base
        return max((score for score in shipped if score.base == last), key=lambda score: (score.digits, score.line))

    @property
    def total(self) -> Figure | None:
        """Bytes of code and model as submitted: the last total that has a name, as that of the raw model has none."""
        return _named(self.total_bytes)

    @property
    def model(self) -> Figure | None:
        """Bytes of the model as submitted."""
        return _named(self.model_bytes)

    @property
    def empty(self) -> bool:
        """Whether this is no training log at all."""
        return not (self.scores or self.validations or self.train_ms or self.total_bytes)


def _named(sizes: dict[str, Figure]) -> Figure | None:
    named = {name: figure for name, figure in sizes.items() if name}
    return list((named or sizes).values())[-1] if sizes else None


def weight(path: Path) -> int:
    """What reading the log in `path` takes, in bytes of long lines.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_WEIGHT:
        return size
    data = path.read_bytes()
    return size + LINE_WEIGHT * (data.count(b"\n") + data.count(b"\r"))


def read_log(path: Path, shown: str | None = None) -> TrainingLog | None:
    """The log in `path`; None if no line of it is one of a training run.

    Raises:
        DataError: it weighs more than MAX_WEIGHT.
        OSError: it cannot be read.
    """
    if weight(path) > MAX_WEIGHT:
        raise DataError(
            f"{path} has {path.stat().st_size:,} bytes in too many lines for a log of a training run; "
            "take it out of the folder"
        )
    log = parse_log(path.read_text(encoding="utf-8", errors="replace"), shown or str(path))
    return None if log.empty else log


def parse_log(text: str, shown: str) -> TrainingLog:
    """What `text` says; `shown` names it in findings."""
    lines = text.split("\n")  # and at no other of the characters that can end a line
    log = TrainingLog(shown)
    begins = _run_begins(lines)
    if begins:
        log.source = _source(lines[:begins])
    for number, line in enumerate(lines[begins:], begins + 1):
        _read_line(log, line, number)
    return log


def _run_begins(lines: list[str]) -> int:
    """Lines of the copy of the script before the run's own."""
    return next((number for number, line in enumerate(lines) if _BEGUN.match(line)), 0)


def _source(lines: list[str]) -> str | None:
    """The script a log begins with, without the rule that ends it and the log's own name before it."""
    end = len(lines)
    while end and (not lines[end - 1].strip() or _RULE.match(lines[end - 1][:MAX_LINE])):
        end -= 1
    named = end and re.fullmatch(r"\S+\.(?:txt|log)", lines[0][:MAX_LINE])
    text = "\n".join(lines[1 if named else 0 : end])
    return text if "import " in text else None


def _read_line(log: TrainingLog, line: str, number: int) -> None:
    line = line[:MAX_LINE]
    for begins, sizes in zip(_SIZES, (log.total_bytes, log.model_bytes, log.code_bytes), strict=True):
        if (said := _size(line.strip(), begins)) is not None:
            sizes.pop(said[0], None)  # the last counts, and its place is the last
            sizes[said[0]] = Figure(said[1], number)
            return
    pairs = dict(_pairs(line))
    _read_score(log, line, number, pairs)
    _read_times(log, line, number, pairs)
    _read_setting(log, line, number, pairs)
    if _TUNED.match(line) and log.tuned is None:
        log.tuned = Figure(0, number)
    if re.match(r"\s*(?:ema|swa|lawa)\s*:\s*(?:applying|loaded)", line, re.IGNORECASE) or "applying EMA" in line:
        log.averaged = True


def _size(line: str, begins: str) -> tuple[str, float] | None:
    """(name, bytes) of "Total submission size int8+zlib: 15,863,489 bytes" and the like; None: it is no such line."""
    if not line.startswith(begins) or (match := _BYTES.search(line, len(begins))) is None:
        return None
    name = line[len(begins) : match.start()].strip()
    if name.startswith("(") and name.endswith(")"):
        name = name[1:-1].strip()
    return name, _number(match[1])


def _pairs(line: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (number, unit)) of every `name:number` and `name: number`."""
    for match in _PAIR.finditer(line):
        yield match[1], (match[2], match[3] or "")


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _ms(pair: tuple[str, str], otherwise: str) -> float:
    return _number(pair[0]) * _UNITS[pair[1] or otherwise]


def _read_score(log: TrainingLog, line: str, number: int, pairs: dict[str, tuple[str, str]]) -> None:
    if "val_bpb" not in pairs:
        return
    bpb = pairs["val_bpb"][0]
    loss = _number(pairs["val_loss"][0]) if "val_loss" in pairs else None
    took = _ms(pairs["eval_time"], "ms") if "eval_time" in pairs else None
    name = re.split(r"\bval_(?:loss|bpb)\b", line, maxsplit=1)[0].strip().rstrip(":")
    scored = Scored(_words(name), _number(bpb), loss, len(bpb.partition(".")[2]), took, number)
    (log.validations if _VALIDATION.match(line.strip()) else log.scores).append(scored)


def _words(name: str) -> str:
    """A name without the settings in it: "final_sliding_window_eval stride:64" is "final_sliding_window_eval"."""
    kept = " ".join(word for word in name.split() if not _PAIR.fullmatch(word))
    return kept or name


def _read_times(log: TrainingLog, line: str, number: int, pairs: dict[str, tuple[str, str]]) -> None:
    if "train_time" in pairs:
        ms = _ms(pairs["train_time"], "ms")
        rounded = pairs["train_time"][1] == "m"  # "9.9m" is no evidence against 600.0 s
        if not rounded and (log.train_ms is None or ms > log.train_ms.value):
            log.train_ms = Figure(ms, number)
        if not rounded:
            _read_pace(log, line, ms, pairs)
    if "step_avg" in pairs:
        log.step_ms = _ms(pairs["step_avg"], "ms")
    stripped = line.strip()
    if stripped.startswith("stopping_early") and "wallclock" in stripped:
        log.capped = True
        step = pairs.get("step")
        if step is not None and log.train_ms is not None and _number(step[0]):
            log.step_ms = log.train_ms.value / _number(step[0])
    if log.capped and (seconds := _hessians(line)) is not None:
        log.calibration_s = Figure(seconds, number)
    if match := _COMPILED.search(line):
        log.compile_s = Figure(float(match[1]), number)
    if stripped.startswith("birdie:evaluation:") and "score" in pairs:  # our clock around all of it
        parts = [pairs[name] for name in ("import", "decode", "compile", "score", "adapt") if name in pairs]
        log.eval_s = Figure(sum(_ms(part, "s") for part in parts) / 1e3, number)
    if "total_eval_time" in pairs:
        log.eval_s = Figure(_ms(pairs["total_eval_time"], "s") / 1e3, number)


def _read_pace(log: TrainingLog, line: str, ms: float, pairs: dict[str, tuple[str, str]]) -> None:
    counted = _VALIDATION.match(line.strip())
    step = float(counted[1]) if counted else _number(pairs["step"][0]) if "step" in pairs else None
    if step is None:
        return
    if log.timed is not None and step > log.timed[0] and ms > log.timed[1]:
        log.last_ms = (ms - log.timed[1]) / (step - log.timed[0])
    if log.timed is None or step > log.timed[0]:
        log.timed = step, ms


def _hessians(line: str) -> float | None:
    """Seconds of "GPTQ:collected 67 Hessians in 3.6s"; None: it is no such line."""
    low = line.lower()
    collected = low.find("collected")
    at = low.find("hessian", collected)
    match = _IN_SECONDS.search(low, at) if 0 <= collected < at else None
    return float(match[1]) if match else None


def _read_setting(log: TrainingLog, line: str, number: int, pairs: dict[str, tuple[str, str]]) -> None:
    stripped = line.strip()
    for name in ("seed", "train_shards"):
        if name in pairs and (name != "seed" or stripped.startswith("seed")):
            setattr(log, name, Figure(_number(pairs[name][0]), number))
    for name in ("target_tokens", "val_tokens"):
        if name in pairs:
            log.val_tokens = Figure(_number(pairs[name][0]), number)
            break
    if stripped.startswith("val_loader:") and "tokens" in pairs:
        log.val_tokens = Figure(_number(pairs["tokens"][0]), number)
    if "max_wallclock_seconds" in pairs:
        log.cap_s = Figure(_number(pairs["max_wallclock_seconds"][0]), number)
    for name in ("force_stop_step", "FORCE_STOP_STEP"):
        if name in pairs and _number(pairs[name][0]) > 0:
            log.forced = Figure(_number(pairs[name][0]), number)
    if re.match(r"(?:val_bpb:enabled|tokenizer_path|train_loader:|val_loader:|datasets_dir|vocab_size)", stripped):
        found = _VOCABULARY.findall(line) or ([pairs["vocab_size"][0]] if "vocab_size" in pairs else [])
        if found:
            caseops = "caseops" in line.lower() or log.vocabulary.endswith("caseops")
            log.vocabulary = f"{found[-1]} caseops" if caseops else found[-1]
