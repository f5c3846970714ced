"""Forecast of what `birdie compress --dry-run` would write."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from birdie.cli.account import show_left_out, show_taken
from birdie.cli.console import plain, print_json, print_line, print_table, seconds

if TYPE_CHECKING:
    from birdie.checkpoints import Checkpoint
    from birdie.cli.compress_flags import CompressFlags


def show_forecast(source: "Checkpoint", flags: "CompressFlags", *, lossless: bool) -> None:
    """Print the forecast for the flags of the command, and those for other sizes."""
    from birdie.artifact import LOSSLESS, forecast, load_seconds
    from birdie.compress import as_near_as
    from birdie.entropy import effort_for

    target = replace(flags.target, lossless=lossless)
    with source.mapped():
        meant, others = forecast(source, target, scheme=flags.scheme, effort=flags.effort)
    rows = {_setting(flags) or ("--lossless" if lossless else "default"): meant}
    for other, expected in others.items():
        rows.setdefault("--lossless" if other == LOSSLESS else f"--bits {other.bits:g}", expected)
    load_s = load_seconds(effort_for(flags.effort, meant.weights), meant.weights)
    if flags.json:
        about = {"path": str(source.path), "weights": meant.weights, **source.to_json()}
        print_json(
            about
            | {"load_seconds": round(load_s, 3)}
            | {"forecasts": [{"setting": name, **expected.to_json()} for name, expected in rows.items()]}
        )
        return
    table = Table()
    table.add_column("setting")
    for name in ("bytes", "bits a weight", "error", "dB", "as near as", "time"):
        table.add_column(name, justify="right")
    for name, expected in rows.items():
        error, near = "lossless" if expected.lossless else "", "" if expected.fits else "cannot be met"
        ratio = ""
        if expected.fits and expected.integer_bits is not None and not expected.lossless:
            error, ratio, near = f"{expected.error:.2g}", f"{expected.decibels:.1f}", as_near_as(expected.integer_bits)
        bits = f"{expected.bits_per_weight:.2f}"
        table.add_row(plain(name), f"{expected.bytes:,}", bits, error, ratio, near, seconds(expected.seconds))
    print_table(table)
    show_left_out(source)
    print_line(f"input: {source.path}: {source.size_text}; {meant.weights:,} weights")
    if not all(expected.fits for expected in rows.values()):
        print_line(
            "a budget that cannot be met has the bytes of the smallest file without calibration; one reaches less"
        )
    print_line(f"loads in about {seconds(load_s)} on one core")
    print_line(
        "forecast without calibration, which distributes errors better, by some rows of each matrix; error: squares of "
        "the weights' errors over those of the weights; dB: the same as a signal-to-quantization-noise ratio (SQNR); "
        "as near as: integers rounded to a scale by row; nothing was written"
    )
    show_taken(source)


def _setting(flags: "CompressFlags") -> str:
    """Return the size and the schemes that are meant, as flags."""
    scheme: Any = flags.scheme
    texts = [scheme] if isinstance(scheme, str) else [f"{pattern}={spec}" for pattern, spec in scheme or ()]
    sizes = [] if flags.budget is None else [f"--budget {flags.budget}"]
    sizes += [] if flags.bits is None else [f"--bits {flags.target.bits:g}"]
    return " ".join([*sizes, *(f"--scheme {text}" for text in texts)])
