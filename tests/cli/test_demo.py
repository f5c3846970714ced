"""The demonstration is a run like any other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app, demo
from birdie.cli.console import run
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
        validation = replace(recipe.validation, max_tokens=8192)
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
