"""`birdie recipe`: list, show and compare the recipes that come with birdie."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, plain, print_json, print_line, print_table
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_file import ABOUT

if TYPE_CHECKING:
    from birdie.gpt.run.recipe_registry import RegisteredRecipe

GROUP = "Train"


def command(
    action: Annotated[Literal["list", "show", "diff"], Parameter(help="list; show A; diff A B.")],
    /,
    *names: Annotated[str, Parameter(help="Names from the list, or .toml files.")],
    preset: Annotated[
        str | None, Parameter(help="Shrink the recipes as `birdie train --preset` does: cpu or smoke.")
    ] = None,
    json: Json = False,
) -> None:
    """List the recipes that come with birdie, show all settings of one, or the settings in which two differ.

    Run a recipe by its name with `birdie train`, or with the program that the list names. The figures of records are
    their authors', measured on eight H100s.
    """
    wanted = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != wanted:
        raise ConfigError(f"birdie recipe {action} takes {wanted or 'no'} names, not {len(names)}")
    from birdie.gpt.run.recipe_registry import find, shipped_recipes

    if action == "list":
        _list(list(shipped_recipes()), preset, json=json)
    elif action == "show":
        _show(find(names[0]), preset, json=json)
    else:
        _diff(find(names[0]), find(names[1]), preset, json=json)


def _settings(known: "RegisteredRecipe", preset: str | None) -> dict[str, Any]:
    return known.settings() if preset is None or known.about.runs is not None else known.recipe(preset).to_dict()


def _facts(known: "RegisteredRecipe", preset: str | None) -> dict[str, Any]:
    from birdie.gpt.run.run_estimate import parameters

    about = known.about
    if preset is not None and about.runs is None:  # the figures are of the recipe that is not shrunk
        about = about.unmeasured()
    return {
        "name": known.name,
        "path": str(known.path),
        "title": about.title,
        "source": about.source,
        "runs": f"birdie train {known.path}" if about.runs is None else f"{about.runs} --recipe {known.path}",
        "parameters": about.parameters if about.runs is not None else parameters(known.recipe(preset)),
        "expected": {name: getattr(about, name) for name in ("bytes", "step_ms", "bpb", "accuracy")},
        "needs": list(about.needs),
    }


def _list(recipes: list["RegisteredRecipe"], preset: str | None, *, json: bool) -> None:
    facts = [_facts(known, preset) for known in recipes]
    if json:
        print_json({"recipes": facts})
        return
    table = Table(title="recipes")
    for name in ("recipe", "title", "parameters", "bytes", "ms/step", "bpb, accuracy"):
        table.add_column(name, justify="left" if name in ("recipe", "title") else "right", overflow="fold")
    for entry in facts:
        expected = entry["expected"]
        table.add_row(
            entry["name"],
            plain(entry["title"]),
            _number(entry["parameters"]),
            _number(expected["bytes"]),
            "" if expected["step_ms"] is None else f"{expected['step_ms']:g}",
            _quality(expected),
        )
    print_table(table)
    if recipes:
        print_line(f"files: {recipes[0].path.parent}")
    for known, entry in zip(recipes, facts, strict=True):
        if known.about.runs is not None:
            print_line(f"{known.name} is run by: {entry['runs']}")


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _quality(expected: dict[str, Any]) -> str:
    if expected["accuracy"] is not None:
        return f"{expected['accuracy']:.2%}"
    return "" if expected["bpb"] is None else f"{expected['bpb']:.4f}"


def _show(known: "RegisteredRecipe", preset: str | None, *, json: bool) -> None:
    from birdie.gpt.run.recipe_settings import to_toml

    facts, settings = _facts(known, preset), _settings(known, preset)
    if json:
        print_json({**facts, "recipe": settings})
        return
    print_line(f"# {known.path}: {facts['title'] or 'a recipe'}{', ' + facts['source'] if facts['source'] else ''}")
    if facts["parameters"] is not None:
        print_line(f"# {facts['parameters']:,} parameters")
    if facts["needs"]:
        print_line(f"# not supported yet: {', '.join(facts['needs'])}")
    print_line(f"# {facts['runs']}")
    print_line("")
    if known.about.runs is None:
        print_line(to_toml(settings).rstrip())
        return
    print_line(to_toml({ABOUT: {"runs": known.about.runs}, **settings}).rstrip())


def _diff(one: "RegisteredRecipe", other: "RegisteredRecipe", preset: str | None, *, json: bool) -> None:
    from birdie.gpt.run.recipe_registry import changes

    if one.about.runs != other.about.runs:
        raise ConfigError(
            f"{one.name} and {other.name} are recipes of different programs and have no settings in common"
        )
    differences = list(changes(_settings(one, preset), _settings(other, preset)))
    if json:
        print_json(
            {"differences": [{"setting": name, one.name: left, other.name: right} for name, left, right in differences]}
        )
        return
    table = Table(title=plain(f"{one.name} and {other.name}"))
    for name in ("setting", one.name, other.name):
        table.add_column(plain(name), overflow="fold")
    for name, left, right in differences:
        table.add_row(name, plain(str(left)), plain(str(right)))
    table.add_section()
    table.add_row("parameters", *(_number(_facts(known, preset)["parameters"]) for known in (one, other)))
    print_table(table)
