"""Shaken modules do what the whole ones do, and have nothing that their entries cannot reach."""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from birdie.errors import ConfigError
from birdie.golf.shake import shake

PACKAGE = {
    "__init__": "",
    "errors": "class ConfigError(Exception):\n    pass\n",
    "effect": "import os\nos.environ['SHAKEN'] = 'imported'\n",
    "kinds": """
from dataclasses import dataclass, field
from typing import ClassVar
from birdie.other import Only
@dataclass
class Shape:
    sides: Only
    name: ClassVar[str] = "shape"
    other: list[Only] = field(default_factory=list)
    def area(self) -> Only:
        return self.sides
    def unused(self):
        return unreached()
def unreached():
    return 1
""",
    "other": "class Only:\n    pass\n",
    "program": """
\"\"\"Docstring.\"\"\"
import json
import threading
from typing import TYPE_CHECKING, overload
import birdie.effect
from birdie import kinds
if TYPE_CHECKING:
    from birdie.other import Only
__all__ = ["main"]
LIMIT: int = 3
UNREACHED = json.dumps([])
@overload
def main(x: int) -> int: ...
def main(x: "Only") -> int:
    \"\"\"Docstring.\"\"\"
    from birdie.late import twice
    def inner(y: int) -> int:
        return y + kinds.Shape(x).area()
    return twice(inner(LIMIT)) + getattr(Worker(), "value")()
class Worker(threading.Thread):
    def run(self):
        return 1
    def value(self):
        return 0
    def gone(self):
        return UNREACHED
def report():
    return heavy(main)
def heavy(f):
    return json.dumps(str(f))
""",
    "late": "def twice(x):\n    return 2 * x\ndef thrice(x):\n    return 3 * x\n",
    "folder/__init__": "",
    "folder/listed": "def one():\n    return 1\nclass Two:\n    def method(self):\n        return one()\n",
}
ENTRY = [("birdie.program", "main")]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "birdie"
    (folder / "folder").mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr("birdie.golf.standalone.sources.PACKAGE", folder)
    return folder


def imported(trees: dict[str, ast.Module], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write the modules below `folder` and import the program from there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "birdie"]:
        monkeypatch.delitem(sys.modules, name)
    for name, tree in trees.items():
        path = folder.joinpath(*name.split("."))
        is_package = any(other.startswith(f"{name}.") for other in trees)
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ast.unparse(tree))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("birdie.program")


def text(trees: dict[str, ast.Module]) -> str:
    return "\n".join(map(ast.unparse, trees.values()))


def test_it_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAKEN", "")
    program = imported(shake(ENTRY), tmp_path / "shaken", monkeypatch)
    assert program.main(4) == 14
    assert __import__("os").environ["SHAKEN"] == "imported"  # by a module that is imported for its effect


def test_what_nothing_mentions_is_gone() -> None:
    trees = shake(ENTRY)
    assert trees.keys() == {f"birdie{name}" for name in ("", ".program", ".kinds", ".late", ".effect")}
    gone = ("Docstring", "unreached", "UNREACHED", "heavy", "report", "thrice", "gone", "overload", "__all__", "Only")
    assert [word for word in gone if word in text(trees)] == []
    assert "TYPE_CHECKING" not in text(trees)


def test_what_another_package_calls_stays() -> None:
    assert "def run(self)" in text(shake(ENTRY))  # threading.Thread has a method of this name
    assert "def value(self)" in text(shake(ENTRY))  # named by a string


def test_annotations_stay_where_something_reads_them() -> None:
    assert "sides: int" in text(shake(ENTRY))
    assert "name: ClassVar[str]" in text(shake(ENTRY))
    typed = shake(ENTRY, typed=[("birdie.kinds", "Shape")])
    assert "sides: Only" in text(typed)
    assert "class Only" in text(typed)


def test_a_module_can_stay_as_it_is() -> None:
    trees = shake(ENTRY, complete=["birdie.folder.listed"])
    assert "def one" in ast.unparse(trees["birdie.folder.listed"])
    assert "class Two" in ast.unparse(trees["birdie.folder.listed"])
    with pytest.raises(ConfigError, match=r"birdie\.absent"):
        shake(ENTRY, complete=["birdie.absent"])


def test_what_is_cut_is_an_error_and_its_needs_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = shake(ENTRY, cut=[("birdie.kinds", "Shape")])
    assert "area" not in ast.unparse(trees["birdie.kinds"])
    program = imported(trees, tmp_path / "cut", monkeypatch)
    with pytest.raises(Exception, match=r"birdie\.kinds\.Shape") as error:
        program.main(4)
    assert error.typename == "ConfigError"
    for name in "Absent", "Shape.absent", "absent":
        with pytest.raises(ConfigError, match=name):
            shake(ENTRY, cut=[("birdie.kinds", name)])


def test_what_is_skipped_returns_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = shake(ENTRY, cut=[("birdie.kinds", "Shape.unused")], replaced={("birdie.late", "twice"): "return None"})
    with pytest.raises(TypeError, match="NoneType"):
        imported(trees, tmp_path / "skipped", monkeypatch).main(4)


def test_the_same_entries_give_the_same_trees() -> None:
    assert text(shake(ENTRY)) == text(shake(ENTRY))


def test_an_entry_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"birdie\.program has no absent"):
        shake([("birdie.program", "absent")])
