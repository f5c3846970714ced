"""Shipped recipes are valid, have the records' numbers of parameters, and list what birdie does not support."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import main
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import RegisteredRecipe, changes, find, shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_estimate import parameters

RECIPES = [entry for entry in shipped_recipes() if entry.about.runs is None]
SPECTRAL = find("resnet_spectral")


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_registry_and_command_line_read_the_same_recipe(entry: RegisteredRecipe) -> None:
    assert entry.recipe() == load_recipe(entry.path)


@pytest.mark.parametrize("entry", [entry for entry in RECIPES if entry.about.parameters], ids=lambda entry: entry.name)
def test_parameters_equal_those_of_the_record(entry: RegisteredRecipe) -> None:
    assert parameters(entry.recipe()) == entry.about.parameters


def test_the_records_are_shipped() -> None:
    names = {entry.name for entry in shipped_recipes()}
    assert names >= {"baseline", "10l_mixed_precision", "parallel_muon", "leaky_ttt", "no_flash_mixed_q456"}
    assert names >= {"simple_sota", "sota", "ternary", "bench", "laptop", "demo", "cpu_best", "resnet_spectral"}
    assert find("baseline").recipe() == Recipe()


def test_an_unknown_recipe_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'sotta'; did you mean sota"):
        find("sotta")
    with pytest.raises(ConfigError, match="there are 10l_mixed_precision, baseline"):
        find("zzzzzz")


def test_the_error_for_a_recipe_of_another_program_names_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = "is not a recipe of birdie train; run it with: python -m benchmarks.spectral_tune --recipe"
    for read in (SPECTRAL.recipe, lambda: load_recipe(SPECTRAL.path)):
        with pytest.raises(ConfigError, match=message):
            read()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(SPECTRAL.path)])
    assert ended.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[about]\nruns = "python -m x"\n', "go together"),
        ("[program]\nsteps = 3\n", "go together"),
        ('[about]\nruns = "python -m x"\n[program]\n[model]\nnum_layers = 3\n', "for one of them"),
        ("program = 3\n", r"write \[program\]"),
    ],
)
def test_a_recipe_is_for_one_program(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find(str(tmp_path / "x.toml"))


def test_about_holds_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[about]\nbits = 3\n")
    with pytest.raises(ConfigError, match=r"\[about\] has no 'bits'"):
        find(str(tmp_path / "x.toml"))


def test_the_error_for_a_value_of_the_wrong_type_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[model]\nnum_layers = "many"\n')
    with pytest.raises(ConfigError, match="num_layers"):
        find(str(tmp_path / "x.toml")).recipe()


def test_applying_the_changes_turns_one_recipe_into_the_other() -> None:
    one, other = find("simple_sota").recipe().to_dict(), find("sota").recipe().to_dict()
    assert not list(changes(one, one))
    for name, old, new in changes(one, other):
        *tables, key = name.split(".")
        values = reduce(getitem, tables, one)
        assert values[key] == old
        values[key] = new
    assert one == other


def recipe_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", *tokens, "--json"])
    assert ended.value.code == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_command_lists_shows_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {facts["name"]: facts for facts in recipe_json(capsys, "list")["recipes"]}
    assert listed["sota"]["parameters"] == 35_945_671
    assert listed["sota"]["expected"]["bpb"] == 1.0611
    shown = recipe_json(capsys, "show", "ternary")
    assert Recipe.from_dict(shown["recipe"]) == find("ternary").recipe()
    assert "z-loss 1e-4" in shown["needs"]
    differences = recipe_json(capsys, "diff", "baseline", "10l_mixed_precision")["differences"]
    assert {"setting": "model.num_layers", "baseline": 9, "10l_mixed_precision": 10} in differences


def test_the_command_lists_shows_and_compares_recipes_of_another_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listed = {facts["name"]: facts for facts in recipe_json(capsys, "list")["recipes"]}["resnet_spectral"]
    assert listed["runs"] == f"python -m benchmarks.spectral_tune --recipe {SPECTRAL.path}"
    assert (listed["parameters"], listed["expected"]["accuracy"], listed["expected"]["bpb"]) == (464_154, 0.8256, None)
    assert recipe_json(capsys, "show", "resnet_spectral")["recipe"]["program"]["smaller"] == [28]
    with pytest.raises(SystemExit):
        main(["recipe", "show", "resnet_spectral"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert find(str(tmp_path / "shown.toml")).settings() == SPECTRAL.settings()
    (tmp_path / "shown.toml").write_text(SPECTRAL.path.read_text().replace("steps = 6000", "").replace("[28]", "[20]"))
    differences = recipe_json(capsys, "diff", "resnet_spectral", str(tmp_path / "shown.toml"))["differences"]
    assert differences == [
        {"setting": "program.smaller", "resnet_spectral": [28], "shown": [20]},
        {"setting": "program.steps", "resnet_spectral": 6000, "shown": None},
    ]
    with pytest.raises(SystemExit):
        main(["recipe", "diff", "resnet_spectral", "sota"])
    assert "different programs" in capsys.readouterr().err


def test_the_output_of_show_is_a_recipe_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["recipe", "show", "sota"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert load_recipe(tmp_path / "shown.toml") == find("sota").recipe()


@pytest.mark.parametrize("tokens", [("list", "sota"), ("show",), ("diff", "sota")])
def test_a_wrong_number_of_names_is_an_error(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", *tokens])
    assert ended.value.code == 1
    assert "names, not" in capsys.readouterr().err
