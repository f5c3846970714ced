"""Bytes against a measure of the user's own, and the smallest file that holds it.

sizes ──► a file of each ──► decoded into a copy of the module ──► metric(module) ──┐
at_least ──► sizes by bisection, until the smallest is known within 2 % ────────────┴──► Curve
"""

import copy
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from numbers import Real
from typing import Any

from torch import nn

from birdie.artifact.loading import load
from birdie.artifact.options import SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.artifact.saving import write_model
from birdie.artifact.summary import Summary
from birdie.checkpoints.checkpoint import Checkpoint
from birdie.compress.calibration.calibrate import calibrate
from birdie.compress.rate.target import Target, size_of
from birdie.compress.state import ModelState
from birdie.compress.tensors import count_reals
from birdie.compress.wrappers import unwrapped
from birdie.errors import BudgetError, ConfigError
from birdie.system.figures import image_path, new_figure, write_figure
from birdie.system.files import write_bytes
from birdie.system.outputs import Source, require_writable
from birdie.system.parsing import parse_object, to_json
from birdie.system.text_table import as_html, as_text

Metric = Callable[[nn.Module], float]
"""Module → a number, the higher the better."""
BITS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
_FIRST, _MOST = 4.0, 16.0  # bits a weight that a search begins with, and beyond which it does not go
_WITHIN = 1.02  # a size over the next smaller one that does not hold the measure
_RECORD = "measured.json"


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A file of a curve.

    Attributes:
        budget: bytes it was made for, by which `birdie.save` makes it again.
        bytes: it has.
        bits: per weight, everything included.
        value: of the metric, of the decoded file.
    """

    budget: int
    bytes: int
    bits: float
    value: float


@dataclass(frozen=True, slots=True, repr=False)
class Curve:
    """Bytes against a metric: print it, plot it, or take `points`.

    Attributes:
        points: smallest file first.
        float_value: of the metric, of the model itself.
        at_least: value that a file had to hold, or None.
        floor: a budget that no file meets, if one was tried: bytes, or None.
    """

    points: tuple[SizePoint, ...]
    float_value: float
    at_least: float | None = None
    floor: int | None = None

    @property
    def smallest(self) -> SizePoint | None:
        """The smallest file that was measured and holds `at_least`; None if there is none."""
        if self.at_least is None:
            return None
        return next((point for point in self.points if point.value >= self.at_least), None)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain values for JSON."""
        smallest = None if self.smallest is None else asdict(self.smallest)
        return {
            "float_value": self.float_value,
            "at_least": self.at_least,
            "smallest": smallest,
            "floor": self.floor,
            "points": [asdict(point) for point in self.points],
        }

    def plot(self, path: Source, *, overwrite: bool = False) -> None:
        """Draw the metric against the bytes into an image: .png, .svg, .pdf.

        Raises:
            ConfigError: matplotlib is not installed, or does not know the kind of image.
            OutputError: the file cannot be written.
        """
        image, figure = image_path(path, overwrite=overwrite), new_figure(7, 4)
        axes = figure.add_subplot()
        axes.plot([point.bytes for point in self.points], [point.value for point in self.points], "o-", markersize=4)
        axes.axhline(self.float_value, color="gray", linewidth=1, label="float model")
        if self.at_least is not None:
            axes.axhline(self.at_least, color="gray", linewidth=1, linestyle="--", label="at least")
        axes.set_xscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("metric")
        axes.grid(alpha=0.2)
        axes.legend()
        write_figure(figure, image)

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("bytes", "bits/weight", "metric", "")]
        for point in self.points:
            mark = "smallest" if point == self.smallest else ""
            rows.append((f"{point.bytes:,}", f"{point.bits:.2f}", f"{point.value:.6g}", mark))
        return [*rows, ("float", "", f"{self.float_value:.6g}", "")]

    @property
    def _notes(self) -> list[str]:
        notes = []
        if self.at_least is not None and self.smallest is None:
            notes.append(f"no file holds {self.at_least:g}")
        if self.floor is not None:
            notes.append(f"no file has {self.floor:,} bytes or fewer")
        return notes

    def __repr__(self) -> str:
        return f"<curve of {len(self.points)} files>"

    def __str__(self) -> str:
        return "\n".join([as_text(self._rows), *self._notes])

    def _repr_html_(self) -> str:
        return as_html("bytes against the metric", self._rows, self._notes)


def curve(
    model: nn.Module,
    metric: Metric,
    *,
    sizes: Sequence[int | str] | None = None,
    at_least: float | None = None,
    calibration: Any = None,
    scheme: Any = None,
    effort: Any = "auto",
    folder: Source | None = None,
    progress: Callable[[SizePoint], None] | None = None,
) -> Curve:
    """Measure files of several sizes by a metric of one's own, or search for the smallest that holds a value of it.

        print(birdie.curve(model, accuracy, at_least=0.98, calibration=known))

    Every file is written in memory as `birdie.save` does it, and decoded into a copy of the module, which the metric
    gets. A search assumes that larger files are not worse, so a metric of few samples may end it a little beside the
    smallest; what it returns was measured.

    Args:
        model: a module; it is not changed.
        metric: (module) → a number, the higher the better; called once for each file, and for `model` itself.
        sizes: of the files, bytes or such as "20kB". Default: 8 to 1 bits a weight, or those that a search tries.
        at_least: value of the metric that the file has to hold.
        calibration: what `birdie.calibrate` returned, or its arguments, as for `birdie.save`.
        scheme, effort: as for `birdie.save`.
        folder: keeps what was measured, by the digest of each file: the same call, stopped and repeated, measures only
            what is missing. Give another metric another folder.
        progress: called with each point as it is measured.

    Returns:
        Table, JSON and plot; `smallest.budget` for `birdie.save(budget=…)` makes the smallest file again.

    Raises:
        ConfigError: the float model itself does not hold `at_least`, both that and sizes are given, or the metric gives
            no number.
        BudgetError: no file has any of the sizes.
        OutputError: the folder cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}, not a module, which the metric needs")
    budgets, measured = require_search(sizes, at_least), Measurements(folder)  # before the long work
    options = SaveOptions(scheme=scheme, effort=effort, calibration=calibration)
    if isinstance(calibration, tuple | list):
        options = replace(options, calibration=calibrate(*calibration))
    bare = unwrapped(model)

    def write(file: BytesIO, budget: int) -> Summary:
        return write_model(bare, file, replace(options, budget=budget))

    return _Files(bare, metric, write, measured, progress).curve(budgets, at_least, model)


def checkpoint_curve(
    checkpoint: Checkpoint,
    module: nn.Module,
    metric: Metric,
    options: SaveOptions,
    *,
    budgets: Sequence[int] = (),
    at_least: float | None = None,
    measured: "Measurements",
    progress: Callable[[SizePoint], None] | None = None,
) -> tuple[Curve, "FoundFile | None"]:
    """Measure files of a checkpoint, as `curve` does; return the curve, and the smallest file that holds `at_least`.

    Args:
        checkpoint: that was read.
        module: with its weights, which the metric gets.
        options: of the files; they have no target.
        metric, at_least, progress: as for `curve`.
        budgets: of the files, in bytes, that `require_search` returned.
        measured: values that are known.
    """

    def write(file: BytesIO, budget: int) -> Summary:
        return write_checkpoint(checkpoint, file, replace(options, budget=budget))

    files = _Files(module, metric, write, measured, progress)
    return files.curve(budgets, at_least, module), files.found


def require_search(sizes: Sequence[int | str] | None, at_least: float | None) -> list[int]:
    """Check what `curve` measures or searches for; return the sizes in bytes, none if they are the usual ones.

    Raises:
        ConfigError: one of the two is wrong, or both are given.
    """
    if sizes is not None and at_least is not None:
        raise ConfigError("sizes and at_least are two searches; give one of them")
    value: object = at_least
    if value is not None and not (isinstance(value, Real) and math.isfinite(float(value))):
        raise ConfigError(f"at_least={at_least!r} is not a finite number; give a value of the metric")
    if isinstance(sizes, str) or not isinstance(sizes, Iterable | None):
        raise ConfigError(f"sizes={sizes!r} is no list; give for example [20_000, '40kB']")
    budgets = [size_of("sizes", size) for size in sizes or ()]
    if sizes is not None and (not budgets or None in budgets):
        raise ConfigError("sizes holds no size; give for example [20_000, '40kB'], or leave it out")
    return [int(size) for size in budgets if size is not None]


def _search(files: "_Files") -> None:
    """Measure files until the smallest that holds a value is known within 2 %."""
    fails, holds = 0, 0  # bytes
    bits = _FIRST
    while not (fails and holds):  # a bracket
        budget = files.bytes_of(bits)
        if point := files.holding(budget):
            holds, bits = point.bytes, bits / 2
        else:
            fails, bits = budget, 2 * bits
        if bits > _MOST or min(fails or 2, holds or 2) <= 1:
            return
    while holds > _WITHIN * fails and holds - fails > 1:
        middle = math.isqrt(fails * holds)
        if point := files.holding(middle):
            holds = point.bytes
        else:
            fails = middle


@dataclass(frozen=True, slots=True)
class FoundFile:
    """Bytes and summary of a file in memory."""

    data: bytes
    summary: Summary


class Measurements:
    """Values by the digest of a file, kept in a folder if there is one."""

    def __init__(self, folder: Source | None) -> None:
        self._path = None if folder is None else require_writable(folder) / _RECORD
        self._values: dict[str, float] = {}
        if self._path is not None and self._path.is_file():
            try:
                self._values = {str(key): float(value) for key, value in parse_object(self._path.read_bytes()).items()}
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"{self._path} is not what birdie.curve writes ({error}); choose another folder"
                ) from error

    def __call__(self, data: bytes, measure: Callable[[], float]) -> float:
        key = hashlib.sha256(data).hexdigest()
        if key not in self._values:
            self._values[key] = measure()
            if self._path is not None:
                write_bytes(self._path, to_json(self._values, indent=1).encode())
        return self._values[key]


class _Files:
    """Files of a model by their budgets, each measured once."""

    def __init__(
        self,
        model: nn.Module,
        metric: Metric,
        write: Callable[[BytesIO, int], Summary],
        measured: Measurements,
        progress: Callable[[SizePoint], None] | None,
    ) -> None:
        self.metric, self.write, self.measured, self.progress = metric, write, measured, progress
        self.points: dict[int, SizePoint] = {}
        self.floor: int | None = None
        self.at_least = math.inf
        self.found: FoundFile | None = None  # the smallest that holds `at_least`
        self._copy = copy.deepcopy(model)
        self._weights = sum(map(count_reals, ModelState.of(model).tensors.values()))

    def curve(self, budgets: Sequence[int], at_least: float | None, original: nn.Module) -> Curve:
        """Measure files of some sizes, or search for the smallest that holds a value, which `original` has to hold."""
        value = self.value_of(original)
        if at_least is None:
            budgets = budgets or [self.bytes_of(bits) for bits in BITS]
            for budget in budgets:
                self.point(budget)
            if not self.points:
                raise BudgetError(f"no file has {max(budgets):,} bytes; give larger sizes")
        elif not value >= at_least:
            text = f"the float model has {value:.6g} by the metric, less than at_least={at_least:g}"
            raise ConfigError(f"{text}; ask for less")
        else:
            self.at_least = at_least
            _search(self)
        by_bytes = {point.bytes: point for point in self.points.values()}  # two budgets may have one file
        return Curve(tuple(point for _, point in sorted(by_bytes.items())), value, at_least, self.floor)

    def bytes_of(self, bits: float) -> int:
        """Return the bytes of a file of so many bits a weight."""
        return max(1, Target(bits=bits).in_bytes(self._weights) or 0)

    def value_of(self, module: nn.Module) -> float:
        """Return the metric of a module."""
        try:
            value = float(self.metric(module))
        except Exception as error:  # whatever the code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(f"the metric failed ({reason}); it takes a module and returns a number") from error
        if math.isnan(value):
            raise ConfigError("the metric is not a number; return one, the higher the better")
        return value

    def point(self, budget: int) -> SizePoint | None:
        """Return the file of a budget; None if none is as small."""
        if budget in self.points:
            return self.points[budget]
        if self.floor is not None and budget <= self.floor:
            return None
        file = BytesIO()
        try:
            summary = self.write(file, budget)
        except BudgetError:
            self.floor = budget
            return None
        data = file.getvalue()
        value = self.measured(data, lambda: self._decoded(data))
        self.points[budget] = SizePoint(budget, summary.bytes, summary.bits_per_weight, value)
        if value >= self.at_least and (self.found is None or summary.bytes < self.found.summary.bytes):
            self.found = FoundFile(data, summary)
        if self.progress is not None:
            self.progress(self.points[budget])
        return self.points[budget]

    def holding(self, budget: int) -> SizePoint | None:
        """Return the file of a budget if it holds `at_least`."""
        point = self.point(budget)
        return point if point is not None and point.value >= self.at_least else None

    def _decoded(self, data: bytes) -> float:
        limit = sys.maxsize  # limits are for files from elsewhere
        load(data, into=self._copy, max_bytes=limit, max_operations=limit)
        return self.value_of(self._copy)
