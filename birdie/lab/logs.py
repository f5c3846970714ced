"""Training logs of the challenge's script and of birdie: times, bytes, seed and scores, each with its line.

    text ──► lines ──► `name:1.5ms` pairs and sizes ──► TrainingLog

A log may begin with a copy of the script, whose lines are no lines of the run.
"""

import math
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
_STEP = re.compile(r"^step:(\d+)/\d+\b")
_SIZE_LABELS = ("Total submission size", "Serialized model", "Code size")
_BYTES = re.compile(r":\s*(\d[\d,_]{0,30})\s*(?:bytes|B)\b")
_MILLISECONDS = {"ms": 1.0, "s": 1e3, "m": 6e4}
_RUN_BEGINS = re.compile(r"^Running Python \d", re.MULTILINE)


class Figure(NamedTuple):
    """A number of a log and its line, from 1."""

    value: float
    line: int


class ScoreLine(NamedTuple):
    """A line with a score."""

    name: str  # of the model or mode: "final_int8_zlib_roundtrip_exact", …
    bpb: float  # bits per byte
    loss: float | None  # nats per token
    digits: int  # decimals of the bits per byte
    ms: float | None  # time of the evaluation
    line: int  # from 1

    @property
    def base(self) -> str:
        """The name without _exact."""
        return self.name.replace("_exact", "")


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
    seed: Figure | None = None
    val_tokens: Figure | None = None  # targets that are scored
    train_ms: Figure | None = None  # the longest training time logged
    mean_step_ms: float | None = None  # at the end
    capped: bool = False  # whether the clock ended the training
    code: Figure | None = None  # bytes, the last of each kind
    model: Figure | None = None  # as submitted
    total: Figure | None = None  # code and model, as submitted
    validations: list[ScoreLine] = field(default_factory=list)  # of the float model in training, in order
    scores: list[ScoreLine] = field(default_factory=list)  # all others, in order
    curve: list[CurvePoint] = field(default_factory=list)  # losses and validations in training, in order

    @property
    def final(self) -> ScoreLine | None:
        """The last score, in its longest form: the score that a claim is made of."""
        last = [score for score in self.scores if score.base == self.scores[-1].base]
        return max(last, key=lambda score: (score.digits, score.line), default=None)

    @property
    def eval_s(self) -> Figure | None:
        """Seconds that the final score took."""
        timed = [score for score in self.scores if score.ms is not None and score.base == self.scores[-1].base]
        return Figure((timed[-1].ms or 0.0) / 1e3, timed[-1].line) if timed else None

    @property
    def empty(self) -> bool:
        """True if no line is one of a training run."""
        return not (self.scores or self.validations or self.train_ms or self.total)


def weight(path: Path) -> int:
    """Return what reading a log costs, in bytes of long lines."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_WEIGHT:
            return size
        data = file.read(MAX_WEIGHT)
    return size + LINE_WEIGHT * (data.count(b"\n") + data.count(b"\r"))


def read_log(path: Path) -> TrainingLog | None:
    """Read the log in `path`; None if no line of it is one of a training run."""
    if weight(path) > MAX_WEIGHT:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes in too many lines for a training log; move it away")
    log = parse_log(read_text(path), str(path))
    return None if log.empty else log


def parse_log(text: str, shown: str) -> TrainingLog:
    """Read the log in `text`; `shown` is its path in findings."""
    log, begin = TrainingLog(shown), _RUN_BEGINS.search(text)
    skipped = text.count("\n", 0, begin.start()) if begin else 0
    for number, line in enumerate(text.split("\n")[skipped:], skipped + 1):  # str.splitlines cuts at other characters
        _read_line(log, line[:MAX_LINE], number)
    return log


class _Pair(NamedTuple):
    """The value of `name:1.5ms`."""

    text: str
    unit: str

    @property
    def number(self) -> float:
        return _number(self.text)

    def ms(self) -> float:
        return self.number * _MILLISECONDS[self.unit or "ms"]


def _number(text: str) -> float:
    number = float(text.replace(",", "").replace("_", ""))
    return number if math.isfinite(number) else 0.0


def _read_line(log: TrainingLog, line: str, number: int) -> None:
    text = line.strip()
    for label, name in zip(_SIZE_LABELS, ("total", "model", "code"), strict=True):
        if text.startswith(label) and (match := _BYTES.search(text, len(label))) is not None:
            setattr(log, name, Figure(_number(match[1]), number))  # the raw model comes before the compressed one
            return
    pairs = {match[1]: _Pair(match[2], match[3] or "") for match in _PAIR.finditer(line)}
    step = _STEP.match(text)
    if "val_bpb" in pairs:
        (log.validations if step else log.scores).append(_score(line, number, pairs))
    if step and ("train_loss" in pairs or "val_bpb" in pairs):
        ms = pairs["train_time"].ms() if "train_time" in pairs else None
        loss, bpb = (pairs[name].number if name in pairs else None for name in ("train_loss", "val_bpb"))
        log.curve.append(CurvePoint(float(step[1]), ms, loss, bpb))
    if "train_time" in pairs and (log.train_ms is None or pairs["train_time"].ms() > log.train_ms.value):
        log.train_ms = Figure(pairs["train_time"].ms(), number)
    _read_settings(log, text, number, pairs)


def _score(line: str, number: int, pairs: dict[str, _Pair]) -> ScoreLine:
    bpb = pairs["val_bpb"]
    loss = pairs["val_loss"].number if "val_loss" in pairs else None
    ms = pairs["eval_time"].ms() if "eval_time" in pairs else None
    label = re.split(r"\bval_(?:loss|bpb)\b", line, maxsplit=1)[0].strip().rstrip(":")
    # "final_sliding_window_eval stride:64" is named final_sliding_window_eval
    name = " ".join(word for word in label.split() if not _PAIR.fullmatch(word)) or label
    return ScoreLine(name, bpb.number, loss, len(bpb.text.partition(".")[2]), ms, number)


def _read_settings(log: TrainingLog, text: str, number: int, pairs: dict[str, _Pair]) -> None:
    if "step_avg" in pairs:
        log.mean_step_ms = pairs["step_avg"].ms()
    if text.startswith("seed:") and "seed" in pairs:
        log.seed = Figure(pairs["seed"].number, number)
    if text.startswith("val_loader:") and "tokens" in pairs:
        log.val_tokens = Figure(pairs["tokens"].number, number)
    if text.startswith("stopping_early: wallclock_cap"):
        log.capped = True
