"""The recipes that ship are understood, have the records' parameters, and say what they lack."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from birdie.cli import main
from birdie.errors import ConfigError
from birdie.run.estimate import parameters
from birdie.run.recipe import Recipe, load_recipe
from birdie.run.registry import RegisteredRecipe, changes, find, shipped_recipes

BOOK = [known for known in shipped_recipes() if known.about.runs is None]
SPECTRAL = find("resnet_spectral")


@pytest.mark.parametrize("known", BOOK, ids=lambda known: known.name)
def test_every_recipe_is_the_same_to_the_book_and_to_the_command_line(known: RegisteredRecipe) -> None:
    assert known.recipe() == load_recipe(known.path)


@pytest.mark.parametrize("known", [each for each in BOOK if each.about.parameters], ids=lambda known: known.name)
def test_parameters_are_the_records_to_the_unit(known: RegisteredRecipe) -> None:
    assert parameters(known.recipe()) == known.about.parameters


def test_the_records_are_there() -> None:
    names = {known.name for known in shipped_recipes()}
    assert names >= {"baseline", "10l_mixed_precision", "parallel_muon", "leaky_ttt", "no_flash_mixed_q456"}
    assert names >= {"simple_sota", "sota", "ternary", "bench", "laptop", "demo", "cpu_best", "resnet_spectral"}
    assert find("baseline").recipe() == Recipe()


def test_what_is_not_there_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'sotta'; did you mean sota"):
        find("sotta")
    with pytest.raises(ConfigError, match="there are 10l_mixed_precision, baseline"):
        find("zzzzzz")


def test_a_recipe_of_another_program_says_what_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "is no recipe of birdie train; run it with: python -m benchmarks.spectral_tune --recipe"
    for ask in (SPECTRAL.recipe, lambda: load_recipe(SPECTRAL.path)):
        with pytest.raises(ConfigError, match=said):
            ask()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(SPECTRAL.path)])
    assert ended.value.code == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[about]\nruns = "python -m x"\n', "go together"),
        ("[program]\nsteps = 3\n", "go together"),
        ('[about]\nruns = "python -m x"\n[program]\n[model]\nnum_layers = 3\n', "for one of them"),
        ("program = 3\n", r"write \[program\]"),
    ],
)
def test_a_recipe_is_for_one_program(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        find(str(tmp_path / "x.toml"))


def test_about_holds_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[about]\nbits = 3\n")
    with pytest.raises(ConfigError, match=r"\[about\] has no 'bits'"):
        find(str(tmp_path / "x.toml"))


def test_a_value_of_another_kind_is_told_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[model]\nnum_layers = "many"\n')
    with pytest.raises(ConfigError, match="num_layers"):
        find(str(tmp_path / "x.toml")).recipe()


def test_changes_are_what_makes_one_the_other() -> None:
    one, other = find("simple_sota").recipe().to_dict(), find("sota").recipe().to_dict()
    assert not list(changes(one, one))
    for name, here, there in changes(one, other):
        *tables, key = name.split(".")
        values = reduce(getitem, tables, one)
        assert values[key] == here
        values[key] = there
    assert one == other


def told(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", *tokens, "--json"])
    assert ended.value.code == 0
    answer: dict = json.loads(capsys.readouterr().out)
    return answer


def test_the_command_lists_shows_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {each["name"]: each for each in told(capsys, "list")["recipes"]}
    assert listed["sota"]["parameters"] == 35_945_671
    assert listed["sota"]["expected"]["bpb"] == 1.0611
    shown = told(capsys, "show", "ternary")
    assert Recipe.from_dict(shown["recipe"]) == find("ternary").recipe()
    assert "z-loss 1e-4" in shown["needs"]
    differences = told(capsys, "diff", "baseline", "10l_mixed_precision")["differences"]
    assert {"setting": "model.num_layers", "baseline": 9, "10l_mixed_precision": 10} in differences


def test_the_command_lists_shows_and_compares_what_another_program_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listed = {each["name"]: each for each in told(capsys, "list")["recipes"]}["resnet_spectral"]
    assert listed["runs"] == f"python -m benchmarks.spectral_tune --recipe {SPECTRAL.path}"
    assert (listed["parameters"], listed["expected"]["accuracy"], listed["expected"]["bpb"]) == (464_154, 0.821, None)
    assert told(capsys, "show", "resnet_spectral")["recipe"]["program"]["smaller"] == [20]
    with pytest.raises(SystemExit):
        main(["recipe", "show", "resnet_spectral"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert find(str(tmp_path / "shown.toml")).settings() == SPECTRAL.settings()
    (tmp_path / "shown.toml").write_text(SPECTRAL.path.read_text().replace("steps = 800", "").replace("[20]", "[28]"))
    differences = told(capsys, "diff", "resnet_spectral", str(tmp_path / "shown.toml"))["differences"]
    assert differences == [
        {"setting": "program.smaller", "resnet_spectral": [20], "shown": [28]},
        {"setting": "program.steps", "resnet_spectral": 800, "shown": None},
    ]
    with pytest.raises(SystemExit):
        main(["recipe", "diff", "resnet_spectral", "sota"])
    assert "different programs" in capsys.readouterr().err


def test_what_is_shown_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["recipe", "show", "sota"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert load_recipe(tmp_path / "shown.toml") == find("sota").recipe()


@pytest.mark.parametrize("tokens", [("list", "sota"), ("show",), ("diff", "sota")])
def test_the_wrong_number_of_names_is_told(capsys: pytest.CaptureFixture[str], tokens: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", *tokens])
    assert ended.value.code == 1
    assert "names, not" in capsys.readouterr().err
