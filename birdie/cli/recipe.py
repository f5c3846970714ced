"""`birdie recipe`: the recipes that ship."""

from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, emit, plain, say, show
from birdie.cookbook import Known, book, changes, find
from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.recipe import Recipe


def recipe(
    action: Annotated[Literal["list", "show", "diff"], Parameter(help="list; show A; diff A B.")],
    /,
    *names: Annotated[str, Parameter(help="Names from the list, or .toml files.")],
    json: Json = False,
) -> None:
    """List the recipes that ship, show all settings of one, or what two have different.

    A recipe is run by `birdie train`, with the path that the list shows. Records' figures are their authors', on eight
    H100s.
    """
    wanted = {"list": 0, "show": 1, "diff": 2}[action]
    if len(names) != wanted:
        raise ConfigError(f"birdie recipe {action} takes {wanted or 'no'} names, not {len(names)}")
    if action == "list":
        _list(list(book()), json=json)
    elif action == "show":
        _show(find(names[0]), json=json)
    else:
        _diff(*(find(name) for name in names), json=json)


def parameters(recipe: Recipe) -> int:
    """Of the recipe's model, which is not built for that."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(recipe.model).parameters())


def _facts(known: Known) -> dict[str, Any]:
    about = known.about
    return {
        "name": known.name,
        "path": str(known.path),
        "title": about.title,
        "source": about.source,
        "parameters": parameters(known.recipe()),
        "expected": {"bytes": about.bytes, "step_ms": about.step_ms, "bpb": about.bpb},
        "needs": list(about.needs),
    }


def _list(recipes: list[Known], *, json: bool) -> None:
    facts = [_facts(known) for known in recipes]
    if json:
        emit({"recipes": facts})
        return
    table = Table(title="recipes")
    for name in ("recipe", "what", "parameters", "bytes", "ms/step", "bits per byte"):
        table.add_column(name, justify="left" if name in ("recipe", "what") else "right")
    for each in facts:
        expected = each["expected"]
        table.add_row(
            each["name"],
            plain(each["title"]),
            f"{each['parameters']:,}",
            "" if expected["bytes"] is None else f"{expected['bytes']:,}",
            "" if expected["step_ms"] is None else f"{expected['step_ms']:g}",
            "" if expected["bpb"] is None else f"{expected['bpb']:.4f}",
        )
    show(table)
    if recipes:
        say(f"files: {recipes[0].path.parent}")


def _show(known: Known, *, json: bool) -> None:
    facts, settings = _facts(known), known.recipe()
    if json:
        emit({**facts, "recipe": settings.to_dict()})
        return
    say(f"# {known.path}: {facts['title'] or 'a recipe'}{', ' + facts['source'] if facts['source'] else ''}")
    say(f"# {facts['parameters']:,} parameters")
    if facts["needs"]:
        say(f"# not here yet: {', '.join(facts['needs'])}")
    say("")
    say(settings.to_toml().rstrip())


def _diff(one: Known, other: Known, *, json: bool) -> None:
    found = list(changes(one.recipe().to_dict(), other.recipe().to_dict()))
    if json:
        emit({"differences": [{"setting": name, one.name: here, other.name: there} for name, here, there in found]})
        return
    table = Table(title=plain(f"{one.name} and {other.name}"))
    for name in ("setting", one.name, other.name):
        table.add_column(plain(name), overflow="fold")
    for name, here, there in found:
        table.add_row(name, plain(str(here)), plain(str(there)))
    table.add_section()
    table.add_row("parameters", f"{parameters(one.recipe()):,}", f"{parameters(other.recipe()):,}")
    show(table)
