"""Run folders as `birdie train` leaves them, written without training."""

import json
from pathlib import Path
from typing import Any

from birdie.lab.run_ledger import RunRecord, read_run

RECIPE: dict[str, Any] = {
    "device": "cpu",
    "model": {"num_layers": 2, "mixing": [1, 2], "tied": True},
    "train": {"seed": 1},
    "optimizer": {"matrix_lr": 0.02},
}


def toml(settings: dict[str, Any]) -> str:
    """Return nested tables of one level as TOML."""
    top = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    for table, values in settings.items():
        if isinstance(values, dict):
            top += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(top) + "\n"


def write_run(
    folder: Path, bpb: float | None = 1.5, *, seed: int = 1, started: str = "2026-01-01T10:00:00+00:00", **model: Any
) -> RunRecord:
    """Write a run folder, complete if it has a score, and return its record."""
    folder.mkdir(parents=True)
    recipe = {**RECIPE, "model": RECIPE["model"] | model, "train": {"seed": seed}}
    (folder / "recipe.toml").write_text(toml(recipe))
    (folder / "environment.json").write_text(json.dumps({"starts": [started], "log": None}))
    (folder / "log.txt").write_text("step:1/2 val_loss:1.0 val_bpb:1.0 train_time:5ms\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train_ms": 500, "loss": 3.0}\n{"step": 2, "tr')
    (folder / "history.jsonl").write_text('{"step": 2, "train_ms": 900, "bpb": 1.75}\n')
    if bpb is not None:
        summary: dict[str, Any] = {
            "bytes": 900,
            "bpb_float": bpb - 0.1,
            "bpb_artifact": 9.0,
            "steps": 4,
            "train_seconds": 2.5,
        }
        summary["evaluation"], summary["evaluation_asked"] = {"bpb": 9.0}, {"bpb": bpb}
        (folder / "summary.json").write_text(json.dumps(summary))
    return read_run(folder)
