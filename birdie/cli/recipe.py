"""`birdie recipe`: the recipes that ship."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, emit, plain, say, show
from birdie.errors import ConfigError
from birdie.run.estimate import parameters
from birdie.run.presets import apply_preset
from birdie.run.recipe import Recipe, to_toml
from birdie.run.recipe_file import ABOUT
from birdie.run.registry import RegisteredRecipe, changes, find, shipped_recipes


def recipe(
    action: Annotated[Literal["list", "show", "diff"], Parameter(help="list; show A; diff A B.")],
    /,
    *names: Annotated[str, Parameter(help="Names from the list, or .toml files.")],
    scale: Annotated[str | None, Parameter(help="Show them shrunk: cpu or smoke (birdie train --scale).")] = None,
    json: Json = False,
) -> None:
    """List the recipes that ship, show all settings of one, or what two have different.

    A recipe is run by `birdie train`, with the path that the list shows, or by the program that the list names.
    Records' figures are their authors', on eight H100s.
    """
    wanted = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != wanted:
        raise ConfigError(f"birdie recipe {action} takes {wanted or 'no'} names, not {len(names)}")
    if action == "list":
        _list(list(shipped_recipes()), scale, json=json)
    elif action == "show":
        _show(find(names[0]), scale, json=json)
    else:
        _diff(find(names[0]), find(names[1]), scale, json=json)


def settings_of(known: RegisteredRecipe, scale: str | None) -> Recipe:
    """The recipe's settings, at a scale if there is one."""
    whole = known.recipe()
    return whole if scale is None else apply_preset(whole, scale, known.about.step_ms)


def _settings(known: RegisteredRecipe, scale: str | None) -> dict[str, Any]:
    return known.settings() if scale is None or known.about.runs is not None else settings_of(known, scale).to_dict()


def _facts(known: RegisteredRecipe, scale: str | None) -> dict[str, Any]:
    about = known.about
    if scale is not None and about.runs is None:  # a record's figures are not those of its recipe at a scale
        about = about.unmeasured()
    return {
        "name": known.name,
        "path": str(known.path),
        "title": about.title,
        "source": about.source,
        "runs": f"birdie train {known.path}" if about.runs is None else f"{about.runs} --recipe {known.path}",
        "parameters": about.parameters if about.runs is not None else parameters(settings_of(known, scale)),
        "expected": {name: getattr(about, name) for name in ("bytes", "step_ms", "bpb", "accuracy")},
        "needs": list(about.needs),
    }


def _list(recipes: list[RegisteredRecipe], scale: str | None, *, json: bool) -> None:
    facts = [_facts(known, scale) for known in recipes]
    if json:
        emit({"recipes": facts})
        return
    table = Table(title="recipes")
    for name in ("recipe", "what", "parameters", "bytes", "ms/step", "bpb, accuracy"):
        table.add_column(name, justify="left" if name in ("recipe", "what") else "right", overflow="fold")
    for each in facts:
        expected = each["expected"]
        table.add_row(
            each["name"],
            plain(each["title"]),
            _number(each["parameters"]),
            _number(expected["bytes"]),
            "" if expected["step_ms"] is None else f"{expected['step_ms']:g}",
            _quality(expected),
        )
    show(table)
    if recipes:
        say(f"files: {recipes[0].path.parent}")
    for known, each in zip(recipes, facts, strict=True):
        if known.about.runs is not None:
            say(f"{known.name} is run by: {each['runs']}")


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _quality(expected: dict[str, Any]) -> str:
    if expected["accuracy"] is not None:
        return f"{expected['accuracy']:.2%}"
    return "" if expected["bpb"] is None else f"{expected['bpb']:.4f}"


def _show(known: RegisteredRecipe, scale: str | None, *, json: bool) -> None:
    facts, settings = _facts(known, scale), _settings(known, scale)
    if json:
        emit({**facts, "recipe": settings})
        return
    say(f"# {known.path}: {facts['title'] or 'a recipe'}{', ' + facts['source'] if facts['source'] else ''}")
    if facts["parameters"] is not None:
        say(f"# {facts['parameters']:,} parameters")
    if facts["needs"]:
        say(f"# not here yet: {', '.join(facts['needs'])}")
    say(f"# {facts['runs']}")
    say("")
    if known.about.runs is None:
        say(to_toml(settings).rstrip())
        return
    say(to_toml({ABOUT: {"runs": known.about.runs}, **settings}).rstrip())


def _diff(one: RegisteredRecipe, other: RegisteredRecipe, scale: str | None, *, json: bool) -> None:
    if one.about.runs != other.about.runs:
        raise ConfigError(f"{one.name} and {other.name} are run by different programs and have no setting in common")
    found = list(changes(_settings(one, scale), _settings(other, scale)))
    if json:
        emit({"differences": [{"setting": name, one.name: mine, other.name: its} for name, mine, its in found]})
        return
    table = Table(title=plain(f"{one.name} and {other.name}"))
    for name in ("setting", one.name, other.name):
        table.add_column(plain(name), overflow="fold")
    for name, mine, its in found:
        table.add_row(name, plain(str(mine)), plain(str(its)))
    table.add_section()
    table.add_row("parameters", *(_number(_facts(known, scale)["parameters"]) for known in (one, other)))
    show(table)
