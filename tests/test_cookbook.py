"""The recipes that ship are understood, have the records' parameters, and say what they lack."""

import json
from pathlib import Path

import pytest

from birdie.cli import main
from birdie.cli.recipe import parameters
from birdie.cookbook import Known, book, changes, find
from birdie.errors import ConfigError
from birdie.recipe import Recipe, load_recipe

BOOK = list(book())


@pytest.mark.parametrize("known", BOOK, ids=lambda known: known.name)
def test_every_recipe_is_the_same_to_the_book_and_to_the_command_line(known: Known) -> None:
    assert known.recipe() == load_recipe(known.path)


@pytest.mark.parametrize("known", [each for each in BOOK if each.about.parameters], ids=lambda known: known.name)
def test_parameters_are_the_records_to_the_unit(known: Known) -> None:
    assert parameters(known.recipe()) == known.about.parameters


def test_the_records_are_there() -> None:
    names = {known.name for known in BOOK}
    assert names >= {"baseline", "10l_mixed_precision", "parallel_muon", "leaky_ttt", "no_flash_mixed_q456"}
    assert names >= {"simple_sota", "sota", "ternary", "bench", "laptop"}
    assert find("baseline").recipe() == Recipe()


def test_what_is_not_there_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'sotta'; did you mean sota"):
        find("sotta")
    with pytest.raises(ConfigError, match="there are 10l_mixed_precision, baseline"):
        find("zzzzzz")


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
        table, _, key = name.rpartition(".")
        place = one[table] if table else one
        assert place[key] == here
        place[key] = there
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
