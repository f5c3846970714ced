"""The demonstration, and the line that announces a compilation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numba import njit

from birdie.cli import build_app, demo
from birdie.cli.console import compiling_notice, run
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab.run_ledger import find_runs


def test_the_demo_leaves_a_run_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_recipe = demo.demo_recipe

    def smaller(*arguments: Any, **options: Any) -> Recipe:
        recipe = demo_recipe(*arguments, **options)
        model = replace(recipe.model, num_layers=2, model_dim=32)
        validation = replace(recipe.validation, max_tokens=4096)
        return replace(recipe, model=model, validation=validation, export=replace(recipe.export, budget="30kB"))

    monkeypatch.setattr(demo, "demo_recipe", smaller)
    sources = Path(__file__).resolve().parents[2] / "birdie" / "cli" / "*.py"
    monkeypatch.setattr("birdie.cli.demo.stdlib_corpus", lambda: file_corpus([sources], name="stdlib"))
    assert run(build_app, ["demo", "--folder", str(tmp_path), "--seconds", "0.1", "--json"]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert "steps in 0.1 s, too few for a good model" in output.err
    (record,) = find_runs(tmp_path)
    assert record.summary.items() <= answer.items()
    assert Path(answer["path"]) == record.folder / "model.birdie"
    assert record.columns["bytes"] == (record.folder / "model.birdie").stat().st_size == answer["bytes"]
    assert (answer["bpb_artifact"], answer["budget"]) == (record.score["bpb"] if record.score else None, 30_000)
    assert run(build_app, ["runs", str(tmp_path)]) == 0


def test_a_compilation_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    @njit
    def halved(value):  # type: ignore[no-untyped-def]
        return value / 2

    @compiling_notice()
    def command(value: float) -> float:
        return float(halved(value))

    assert command(3.0) == 1.5
    first = capsys.readouterr()
    assert "ompiling" in first.err
    assert first.err.count("\n") == 1
    assert first.out == ""
    assert command(5.0) == 2.5
    assert capsys.readouterr().err == ""


def test_only_rank_0_announces_a_compilation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @njit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value + value

    monkeypatch.setenv("RANK", "1")
    with compiling_notice():
        assert doubled(3) == 6
    assert capsys.readouterr().err == ""
