"""Training logs: times, bytes, seeds, shards and scores, each with its line.

The challenge's own lines are read, those of its later records ("val_loss: 2.35" beside "val_loss:2.35", "train_time:
1.6m", `legal_ttt_exact`, `quantized_ttt_phased`, `Total submission size quantized+brotli`) and birdie's. A log may
begin with a copy of the script, whose lines are no lines of the run.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from birdie.errors import DataError
from birdie.system.regular import open_regular, read_text

MAX_WEIGHT = 16_000_000
"""Largest log that is read, as `weight` counts; one of a record has 100 kB."""
LINE_WEIGHT = 64
"""Bytes that reading a line costs, however short it is."""
MAX_LINE = 4096
"""Characters of one line that are read: on foreign text a pattern may take the square of its length."""

_PAIR = re.compile(
    r"(?<![\w.])([A-Za-z_][\w.]*)\s*[:=]\s*([-+]?\d[\d,_]{0,30}(?:\.\d{1,30})?(?:e[-+]?\d{1,2})?)\s*(ms|s|m)?(?!\w|\.\d)"
)
_STEP = re.compile(r"^(?:step\s*(?:[:=]\s*)?)?(\d+)/\d+\b")
_SIZE_LABELS = ("Total submission size", "Serialized model", "Code size")
_BYTES = re.compile(r":\s*(\d[\d,_]{0,30})\s*(?:bytes|B)\b")
_IN_SECONDS = re.compile(r"\bin\s+(\d{1,9}(?:\.\d{1,9})?)\s*s\b")
_COMPILED = re.compile(r"\bcompile warm-?up (?:done|took)\D{0,80}?(\d{1,9}(?:\.\d{1,9})?)\s*s\b", re.IGNORECASE)
_PREQUANT_TTT = re.compile(r"^\s*pre_?quant_?ttt\s*:\s*epoch\b", re.IGNORECASE)
_AVERAGED = re.compile(r"^\s*(?:ema|swa|lawa)\s*:\s*(?:applying|loaded)|applying EMA", re.IGNORECASE)
_OF_DATA = re.compile(r"^(?:val_bpb:enabled|tokenizer_path|train_loader:|val_loader:|datasets_dir|vocab_size)")
_VOCABULARY = re.compile(r"(?:(?<![a-z])sp|fineweb_)(\d{3,5})(?=_|\b)")
_MILLISECONDS = {"ms": 1.0, "s": 1e3, "m": 6e4}
_RUN_BEGINS = re.compile(r"^Running Python \d")
_RULER = re.compile(r"^={20,}\s*$")
_FLOAT_MODEL = ("pre-quant", "prequant", "pre_quant", "post_ema")


class Figure(NamedTuple):
    """A number of a log and its line, from 1."""

    value: float
    line: int


class ScoreLine(NamedTuple):
    """A line with a score."""

    name: str  # of the model or mode: "final_int8_zlib_roundtrip_exact", "diagnostic quantized", …
    bpb: float  # bits per byte
    loss: float | None  # nats per token
    digits: int  # decimals of the bits per byte
    ms: float | None  # time of the evaluation
    line: int  # from 1

    @property
    def base(self) -> str:
        """The name in lower case, without _exact."""
        return self.name.lower().replace("_exact", "")

    @property
    def of_float_model(self) -> bool:
        """True for weights before quantization."""
        return any(word in self.base for word in _FLOAT_MODEL)

    @property
    def diagnostic(self) -> bool:
        """True for a model that does not ship, or a score that is declared no result."""
        return self.of_float_model or "diagnostic" in self.base

    @property
    def adapted(self) -> bool:
        """True if the model learned during its evaluation."""
        return any(word in self.base for word in ("ttt", "adapt", "slot", "ngram", "n-gram", "cache"))


class CurvePoint(NamedTuple):
    """A training loss or a validation at a step."""

    step: float
    ms: float | None  # training time
    loss: float | None  # of the batch, nats per token
    bpb: float | None  # of the validation


@dataclass(slots=True)
class TrainingLog:
    """The figures of one log; None and empty if the log does not have them."""

    path: str  # as the user would name it
    source: str | None = None  # the script that the log begins with
    seed: Figure | None = None
    train_shards: Figure | None = None
    val_tokens: Figure | None = None  # targets that are scored
    vocabulary: str = ""  # "1024", … as paths of tokenizer and data spell it; "8192 caseops" where they do
    cap_s: Figure | None = None  # the wall-clock cap that was set
    stop_step: Figure | None = None  # the step that was set to end at, whatever the clock
    train_ms: Figure | None = None  # the longest training time logged
    mean_step_ms: float | None = None  # at the end
    last_step_ms: float | None = None  # between the last two timed lines: late steps may be slower than the mean
    capped: bool = False  # whether the clock ended the training
    calibration_s: Figure | None = None  # spent on Hessians after the clock stopped
    compile_s: Figure | None = None  # for evaluation, where it is logged apart
    eval_s: Figure | None = None  # of the whole evaluation
    code_bytes: dict[str, Figure] = field(default_factory=dict)  # by the name in their line, "" for none
    model_bytes: dict[str, Figure] = field(default_factory=dict)
    total_bytes: dict[str, Figure] = field(default_factory=dict)
    validations: list[ScoreLine] = field(default_factory=list)  # of the float model in training, in order
    scores: list[ScoreLine] = field(default_factory=list)  # all others, in order
    curve: list[CurvePoint] = field(default_factory=list)  # losses and validations in training, in order
    averaged: bool = False  # whether weights were averaged after the last validation
    prequant_ttt: Figure | None = None  # the line of learning from validation tokens before export
    _last_timed: tuple[float, float] | None = None  # step, ms

    @property
    def final(self) -> ScoreLine | None:
        """The last score of what ships, in its longest form: the score that a claim is made of."""
        shipped = [score for score in self.scores if not score.diagnostic]
        last = [score for score in shipped if score.base == shipped[-1].base]
        return max(last, key=lambda score: (score.digits, score.line), default=None)

    @property
    def total(self) -> Figure | None:
        """Bytes of code and model as submitted."""
        return _submitted(self.total_bytes)

    @property
    def model(self) -> Figure | None:
        """Bytes of the model as submitted."""
        return _submitted(self.model_bytes)

    @property
    def empty(self) -> bool:
        """True if no line is one of a training run."""
        return not (self.scores or self.validations or self.train_ms or self.total_bytes)


def _submitted(sizes: dict[str, Figure]) -> Figure | None:
    """Return the last size that has a name, as that of the raw model has none."""
    named = {name: figure for name, figure in sizes.items() if name}
    return list((named or sizes).values())[-1] if sizes else None


def weight(path: Path) -> int:
    """Return what reading a log costs, in bytes of long lines."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_WEIGHT:
            return size
        data = file.read(MAX_WEIGHT)
    return size + LINE_WEIGHT * (data.count(b"\n") + data.count(b"\r"))


def read_log(path: Path, shown: str | None = None) -> TrainingLog | None:
    """Read the log in `path`; None if no line of it is one of a training run."""
    if weight(path) > MAX_WEIGHT:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes in too many lines for a training log; move it away")
    log = parse_log(read_text(path), shown or str(path))
    return None if log.empty else log


def parse_log(text: str, shown: str) -> TrainingLog:
    """Read the log in `text`; `shown` is its path in findings."""
    lines = text.split("\n")  # str.splitlines would cut at other characters as well
    log = TrainingLog(shown)
    begin = next((number for number, line in enumerate(lines) if _RUN_BEGINS.match(line)), 0)
    if begin:
        log.source = _script(lines[:begin])
    for number, line in enumerate(lines[begin:], begin + 1):
        _read_line(log, line[:MAX_LINE], number)
    return log


def _script(lines: list[str]) -> str | None:
    """Return the script that a log begins with, without the log's own name before it and the ruler after it."""
    end = len(lines)
    while end and (not lines[end - 1].strip() or _RULER.match(lines[end - 1][:MAX_LINE])):
        end -= 1
    named = end and re.fullmatch(r"\S+\.(?:txt|log)", lines[0][:MAX_LINE])
    text = "\n".join(lines[1 if named else 0 : end])
    return text if "import " in text else None


class _Pair(NamedTuple):
    """The value of `name:1.5ms`."""

    text: str
    unit: str

    @property
    def number(self) -> float:
        return _number(self.text)

    def ms(self, default: str) -> float:
        return self.number * _MILLISECONDS[self.unit or default]


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _read_line(log: TrainingLog, line: str, number: int) -> None:
    text = line.strip()
    for label, sizes in zip(_SIZE_LABELS, (log.total_bytes, log.model_bytes, log.code_bytes), strict=True):
        if text.startswith(label) and (match := _BYTES.search(text, len(label))) is not None:
            name = text[len(label) : match.start()].strip()
            name = name[1:-1].strip() if name.startswith("(") and name.endswith(")") else name
            sizes.pop(name, None)  # the last one counts, and goes to the end of the dict
            sizes[name] = Figure(_number(match[1]), number)
            return
    pairs = {match[1]: _Pair(match[2], match[3] or "") for match in _PAIR.finditer(line)}
    step = _STEP.match(text)
    if "val_bpb" in pairs:
        score = _score(line, number, pairs)
        (log.validations if step else log.scores).append(score)
    if step and ("train_loss" in pairs or "val_bpb" in pairs):
        loss, bpb = (pairs[name].number if name in pairs else None for name in ("train_loss", "val_bpb"))
        log.curve.append(CurvePoint(float(step[1]), _train_ms(pairs), loss, bpb))
    if "train_time" in pairs and pairs["train_time"].unit != "m":  # "9.9m" is no evidence against 600.0 s
        _read_train_time(log, number, pairs, float(step[1]) if step else None)
    _read_times(log, text, number, pairs)
    _read_settings(log, text, number, pairs)
    if _PREQUANT_TTT.match(line) and log.prequant_ttt is None:
        log.prequant_ttt = Figure(0, number)
    if _AVERAGED.search(line):
        log.averaged = True


def _train_ms(pairs: dict[str, _Pair]) -> float | None:
    return pairs["train_time"].ms("ms") if "train_time" in pairs else None


def _score(line: str, number: int, pairs: dict[str, _Pair]) -> ScoreLine:
    bpb = pairs["val_bpb"]
    loss = pairs["val_loss"].number if "val_loss" in pairs else None
    ms = pairs["eval_time"].ms("ms") if "eval_time" in pairs else None
    label = re.split(r"\bval_(?:loss|bpb)\b", line, maxsplit=1)[0].strip().rstrip(":")
    # "final_sliding_window_eval stride:64" is named final_sliding_window_eval
    name = " ".join(word for word in label.split() if not _PAIR.fullmatch(word)) or label
    return ScoreLine(name, bpb.number, loss, len(bpb.text.partition(".")[2]), ms, number)


def _read_train_time(log: TrainingLog, number: int, pairs: dict[str, _Pair], step: float | None) -> None:
    ms = pairs["train_time"].ms("ms")
    if log.train_ms is None or ms > log.train_ms.value:
        log.train_ms = Figure(ms, number)
    if step is None:
        step = pairs["step"].number if "step" in pairs else None
    if step is not None:
        last_step, last_ms = log._last_timed or (step, ms)
        if step > last_step and ms > last_ms:
            log.last_step_ms = (ms - last_ms) / (step - last_step)
        if log._last_timed is None or step > last_step:
            log._last_timed = step, ms


def _read_times(log: TrainingLog, text: str, number: int, pairs: dict[str, _Pair]) -> None:
    if "step_avg" in pairs:
        log.mean_step_ms = pairs["step_avg"].ms("ms")
    if text.startswith("stopping_early") and "wallclock" in text:
        log.capped = True
        if "step" in pairs and log.train_ms is not None and pairs["step"].number:
            log.mean_step_ms = log.train_ms.value / pairs["step"].number
    if log.capped and (seconds := _hessian_seconds(text)) is not None:
        log.calibration_s = Figure(seconds, number)
    if match := _COMPILED.search(text):
        log.compile_s = Figure(float(match[1]), number)
    if text.startswith("birdie:evaluation:") and "score" in pairs:  # birdie's clock, around all of it
        parts = ("import", "decode", "compile", "score", "adapt")
        log.eval_s = Figure(sum(pairs[name].ms("s") for name in parts if name in pairs) / 1e3, number)
    if "total_eval_time" in pairs:
        log.eval_s = Figure(pairs["total_eval_time"].ms("s") / 1e3, number)


def _hessian_seconds(text: str) -> float | None:
    """Return the seconds of "GPTQ:collected 67 Hessians in 3.6s"; None for another line."""
    lower = text.lower()
    collected = lower.find("collected")  # two searches: one pattern for both would take the square of the line
    at = lower.find("hessian", collected)
    match = _IN_SECONDS.search(lower, at) if 0 <= collected < at else None
    return float(match[1]) if match else None


def _read_settings(log: TrainingLog, text: str, number: int, pairs: dict[str, _Pair]) -> None:
    figures = {name: Figure(pair.number, number) for name, pair in pairs.items()}
    if text.startswith("seed"):
        log.seed = figures.get("seed", log.seed)
    log.train_shards = figures.get("train_shards", log.train_shards)
    targets = figures.get("target_tokens") or figures.get("val_tokens")
    targets = figures.get("tokens", targets) if text.startswith("val_loader:") else targets
    log.val_tokens = targets or log.val_tokens
    log.cap_s = figures.get("max_wallclock_seconds", log.cap_s)
    stop = figures.get("force_stop_step") or figures.get("FORCE_STOP_STEP")
    log.stop_step = stop if stop and stop.value > 0 else log.stop_step
    if _OF_DATA.match(text):
        names = _VOCABULARY.findall(text) or ([pairs["vocab_size"].text] if "vocab_size" in pairs else [])
        caseops = "caseops" in text.lower() or log.vocabulary.endswith("caseops")
        log.vocabulary = f"{names[-1]}{' caseops' * caseops}" if names else log.vocabulary
