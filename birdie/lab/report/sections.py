"""The sections of the report, each from what the runs have; what is missing is said."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from birdie.compress import parse_size
from birdie.errors import ArtifactError, BirdieError, ConfigError, DataError
from birdie.gpt.run.recipe_registry import changes
from birdie.lab.report import html as page
from birdie.lab.report.figures import COLORS, Bar, Line, columns, curves, histogram, scatter, stacked
from birdie.lab.report.html import Section
from birdie.lab.report.samples import TOKENS, sample
from birdie.lab.report.sizes import Sizes, sizes_of
from birdie.lab.run_ledger import RunRecord
from birdie.lab.selection import RunGroup

MOST_RUNS = 24
CAP = 16_000_000
"""Bytes of code and model that the challenge allows."""
_LARGEST = 12  # tensors of a table


@dataclass(frozen=True)
class Subject:
    """The runs of a report.

    Attributes:
        groups: runs that differ in nothing but their seeds.
        samples: whether the models write a sample.
        names: of the runs, no two the same.
        colors: of the runs: those of a group share one.
        sizes: of each run with an artifact, by its index.
    """

    groups: Sequence[RunGroup]
    samples: bool = True
    names: list[str] = field(init=False)
    colors: list[str] = field(init=False)
    sizes: dict[int, Sizes] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.runs) > MOST_RUNS:
            raise ConfigError(f"{len(self.runs)} runs are too many for a report; choose at most {MOST_RUNS}")
        colors = [COLORS[number % len(COLORS)] for number, one in enumerate(self.groups) for _ in one.records]
        if len(self.groups) == 1:
            colors = [COLORS[number % len(COLORS)] for number in range(len(self.runs))]
        names = [record.name for record in self.runs]
        if len(set(names)) < len(names):
            names = [f"{record.folder.parent.name}/{record.name}" for record in self.runs]
        if len(set(names)) < len(names):
            names = [str(record.folder) for record in self.runs]
        object.__setattr__(self, "colors", colors)
        object.__setattr__(self, "names", names)
        object.__setattr__(
            self, "sizes", {n: _sizes(run) for n, run in enumerate(self.runs) if run.artifact is not None}
        )

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, group by group."""
        return [record for one in self.groups for record in one.records]


def sections(subject: Subject) -> list[Section]:
    """Return the sections of the page."""
    makers: Sequence[Callable[[Subject], Section | None]] = (
        *(_runs, _comparison, _curves, _quality, _bytes, _layers, _histograms, _time, _samples, _recipes, _missing),
    )
    return [section for maker in makers if (section := maker(subject)) is not None]


def _sizes(run: RunRecord) -> Sizes:
    assert run.artifact is not None
    try:
        return sizes_of(run.artifact)
    except ArtifactError as error:
        raise DataError(f"the artifact of the run {run.name} cannot be read: {error}; leave the run out") from error


def _runs(subject: Subject) -> Section:
    rows = []
    for name, run in zip(subject.names, subject.runs, strict=True):
        row = run.columns
        total = None if row["bytes"] is None or row["code_bytes"] is None else row["bytes"] + row["code_bytes"]
        commit = str(run.environment.get("commit") or "")[:9]
        state = [name, run.state, commit, _count(row["seed"], ""), _count(row["steps"])]
        sizes = [_count(row["bytes"]), _count(row["code_bytes"]), _count(total)]
        scores = [_decimal(row["bpb_float"], 4), _decimal(row["bpb_artifact"], 4)]
        rows.append([*state, _decimal(row["train_seconds"], 1), *sizes, *scores])
    head = ["run", "state", "commit", "seed", "steps", "training, s", "model, bytes", "code, bytes", "both, bytes"]
    head += ["bpb, floats", "bpb, artifact"]
    note = page.paragraph(
        "bpb: bits per byte of the validation text. Floats: the last validation. Artifact: the decoded file, scored by "
        "the recipe's evaluation."
    )
    return Section("Runs", page.table(head, rows, left=3, marks=subject.colors) + note)


def _comparison(subject: Subject) -> Section | None:
    if len(subject.groups) < 2:
        return None
    first, rows = subject.groups[0], []
    for one in subject.groups:
        test = None if one is first else one.against(first)
        rows.append(
            [one.name, str(len(one.scores)), _decimal(one.mean("bpb_artifact"), 4), _decimal(one.mean("bytes"), 0)]
        )
        if test is None:
            rows[-1] += ["", "", ""]
        else:
            error = "" if math.isnan(test.error) else f" ± {test.error:.4f}"
            p = "one seed: unknown" if math.isnan(test.p) else f"{test.p:.2g}"
            rows[-1] += [f"{test.difference:+.4f}{error}", p, "paired" if test.paired else "Welch"]
    head = ["recipe", "scored runs", "bpb, mean", "bytes, mean", "difference, bpb", "p, lower", "t-test"]
    note = f"Against {first.name}: p is that of the one-sided test that the recipe scores lower, over the seeds."
    return Section("Significance", page.table(head, rows) + page.paragraph(note))


def _curves(subject: Subject) -> Section | None:
    figures = []
    kinds = ("loss", "training loss, nats per token"), ("bpb", "validation, bits per byte")
    axes = ("step", "step", 1.0), ("train_ms", "training time, s", 1e-3)
    for key, x_label, factor in axes:
        for value, y_label in kinds:
            lines = []
            for name, color, run in zip(subject.names, subject.colors, subject.runs, strict=True):
                table = run.metrics if value == "loss" else run.history
                points = [(row[key] * factor, row[value]) for row in table if key in row and value in row]
                if len(points) > 1:
                    lines.append(Line(name, color, points))
            if lines:
                title = f"{y_label.partition(',')[0].capitalize()} by {x_label.partition(',')[0]}"
                svg, cut = curves(lines, x_label, y_label, marks=value == "bpb")
                figures.append(page.figure(svg, title, "The first steps are cut off at the top." if cut else ""))
    return Section("Curves", _key(subject) + page.grid(figures)) if figures else None


def _quality(subject: Subject) -> Section | None:
    points, totals = [], []
    for name, color, run in zip(subject.names, subject.colors, subject.runs, strict=True):
        row = run.columns
        if row["bytes"] is not None and row["bpb_artifact"] is not None and math.isfinite(row["bpb_artifact"]):
            totals.append(row["bytes"] + (row["code_bytes"] or 0))
            points.append(Line(name, color, [(totals[-1] / 1000, row["bpb_artifact"])]))
    if not points:
        return None
    limits = {}
    for run in subject.runs:
        if (budget := run.settings.get("export.budget")) is not None:
            limits[f"budget {budget}"] = parse_size(str(budget)) / 1000
    if max(totals) > CAP / 4:
        limits["cap of the challenge"] = CAP / 1000
    svg = scatter(points, "model and code, kB", "artifact, bits per byte", list(limits.items()))
    caption = "Lower and further left is better. kB: 1,000 bytes; code is counted where the run counted it."
    return Section(
        "Bytes and quality", _key(subject) + page.grid([page.figure(svg, "Bits per byte by bytes", caption)])
    )


def _bytes(subject: Subject) -> Section | None:
    if not subject.sizes:
        return None
    bars, tables = [], []
    for number, sizes in subject.sizes.items():
        code = subject.runs[number].columns["code_bytes"] or 0
        weights, side = sum(one.symbols for one in sizes.tensors), sum(one.side for one in sizes.tensors)
        parts = [("weights", weights), ("scales and side information", side), ("header and metadata", sizes.header)]
        bars.append(
            Bar(subject.names[number], [(name, value / 1000) for name, value in (*parts, ("code", code)) if value])
        )
    svg, names, colors = stacked(bars, "size, kB")
    number = _best(subject)
    shown = subject.sizes[number]
    largest = sorted(shown.tensors, key=lambda one: -one.bytes)
    total = sum(one.bytes for one in largest) + shown.header
    for one in largest[:_LARGEST]:
        shape = "×".join(map(str, one.shape)) or "scalar"
        row = [
            one.name,
            one.scheme,
            shape,
            f"{one.symbols:,}",
            f"{one.side:,}",
            f"{one.bits:.2f}",
            f"{one.bytes / total:.1%}",
        ]
        tables.append(row)
    if rest := largest[_LARGEST:]:
        symbols, side = sum(one.symbols for one in rest), sum(one.side for one in rest)
        bits = 8 * (symbols + side) / max(1, sum(one.weights for one in rest))
        share = f"{(symbols + side) / total:.1%}"
        tables.append([f"{len(rest)} more", "", "", f"{symbols:,}", f"{side:,}", f"{bits:.2f}", share])
    tables.append(["header and metadata", "", "", "", f"{shown.header:,}", "", f"{shown.header / total:.1%}"])
    head = ["tensor", "stored as", "shape", "weights, bytes", "side information, bytes", "bits per weight", "share"]
    body = page.key(names, colors) + page.grid(
        [page.figure(svg, "Size of each artifact, and of the code where counted")]
    )
    return Section(
        "Where the bytes went", body + page.paragraph(f"{subject.names[number]}:") + page.table(head, tables, left=3)
    )


def _layers(subject: Subject) -> Section | None:
    figures = []
    for number, sizes in _one_of_each_group(subject):
        layers: dict[str, list[int]] = {}
        for one in sizes.tensors:
            match = re.search(r"\.(\d+)\.", f".{one.name}.")
            total = layers.setdefault(match[1] if match else "other", [0, 0])
            total[0] += one.bytes
            total[1] += one.weights
        ordered = sorted(
            layers.items(), key=lambda item: (item[0] == "other", int(item[0]) if item[0] != "other" else 0)
        )
        values = [(name, 8 * size / weights) for name, (size, weights) in ordered if weights]
        if len(values) > 1:
            svg = columns(values, "layer", "bits per weight", subject.colors[number])
            figures.append(page.figure(svg, f"Bits per weight by layer: {subject.names[number]}"))
    return Section("Bits per weight", page.grid(figures)) if figures else None


def _histograms(subject: Subject) -> Section | None:
    if not subject.sizes:
        return None
    number = _best(subject)
    figures = [
        page.figure(
            histogram(one.values, one.shares, one.probabilities, subject.colors[number]),
            one.name,
            f"{one.bits:.2f} bits per weight in the file; entropy of the histogram: {one.entropy:.2f}",
        )
        for one in subject.sizes[number].histograms
    ]
    note = (
        f"Quantized weights of {subject.names[number]}, the largest tensors. Line: the probabilities that context "
        "mixing starts from, before it adapts to rows and columns; none where another coder took fewer bytes."
    )
    return Section("Weights", page.paragraph(note) + page.grid(figures)) if figures else None


def _time(subject: Subject) -> Section | None:
    bars = []
    for name, run in zip(subject.names, subject.runs, strict=True):
        parts = [(part, seconds) for part, seconds in _seconds(run) if seconds > 0]
        if parts:
            bars.append(Bar(name, parts))
    if not bars:
        return None
    svg, names, colors = stacked(bars, "time, s")
    note = "Training is the time on the training clock; start-up, calibration and scoring are outside of it."
    body = page.key(names, colors) + page.grid([page.figure(svg, "Where the time went")]) + page.paragraph(note)
    return Section("Time", body)


def _seconds(run: RunRecord) -> list[tuple[str, float]]:
    summary: Any = run.summary
    startup = ((summary.get("startup") or {}).get("seconds") or {}).values()
    parts = [
        ("start-up", sum(startup)),
        ("training", run.columns["train_seconds"] or 0.0),
        ("calibration", (summary.get("calibration") or {}).get("seconds") or 0.0),
    ]
    for name, key in (("scoring", "evaluation"), ("scoring by the recipe", "evaluation_asked")):
        seconds = (summary.get(key) or {}).get("seconds")
        parts.append((name, sum(seconds.values()) if isinstance(seconds, dict) else 0.0))
    return parts


def _samples(subject: Subject) -> Section | None:
    if not subject.samples or not subject.sizes:
        return None
    parts = []
    for number, _ in _one_of_each_group(subject):
        try:
            body = page.preformatted(sample(subject.runs[number]))
        except BirdieError as error:
            body = page.paragraph(f"No sample: {error}")
        parts.append(page.paragraph(f"{subject.names[number]}:") + body)
    return Section(f"Samples, {TOKENS} tokens each at temperature 0.8", "".join(parts))


def _recipes(subject: Subject) -> Section | None:
    groups = [one for one in subject.groups if one.settings]
    if len(groups) < 2:
        return None
    first = groups[0].settings
    keys = dict.fromkeys(name for other in groups[1:] for name, _, _ in changes(first, other.settings))
    rows = [[name, *(_setting(one.settings.get(name)) for one in groups)] for name in keys]
    return Section("Recipes", page.table(["setting", *(one.name for one in groups)], rows)) if rows else None


def _missing(subject: Subject) -> Section | None:
    lines = []
    for title, run in zip(subject.names, subject.runs, strict=True):
        lacks = [
            name
            for name, recorded in (
                ("a recipe", bool(run.settings)),
                ("training losses", len(run.metrics) > 1),
                ("validations", len(run.history) > 1),
                ("an artifact", run.artifact is not None),
                ("a score of the artifact", run.columns["bpb_artifact"] is not None),
            )
            if not recorded
        ]
        if lacks:
            lines.append(page.paragraph(f"{title} has no record of {', '.join(lacks)}."))
    return Section("Missing", "".join(lines)) if lines else None


def _best(subject: Subject) -> int:
    """Return the index of the run with the lowest score among those with an artifact, else the first of them."""
    scores = {number: subject.runs[number].columns["bpb_artifact"] for number in subject.sizes}
    return min(scores, key=lambda number: math.inf if scores[number] is None else scores[number])


def _one_of_each_group(subject: Subject) -> list[tuple[int, Sizes]]:
    """Return the first run with an artifact of each group, as index and sizes."""
    chosen, start = [], 0
    for one in subject.groups:
        numbers = [number for number in range(start, start + len(one.records)) if number in subject.sizes]
        chosen += [(number, subject.sizes[number]) for number in numbers[:1]]
        start += len(one.records)
    return chosen


def _key(subject: Subject) -> str:
    if len(subject.groups) > 1:
        starts = [sum(len(one.records) for one in subject.groups[:number]) for number in range(len(subject.groups))]
        return page.key([one.name for one in subject.groups], [subject.colors[start] for start in starts])
    return page.key(subject.names, subject.colors)


def _count(value: Any, form: str = ",") -> str:
    return "" if value is None else f"{value:{form}.0f}" if isinstance(value, float) else f"{value:{form}}"


def _setting(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _decimal(value: float | None, digits: int) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"
