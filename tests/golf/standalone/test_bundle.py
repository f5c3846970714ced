"""Bundles: a module cut out of a package has what its exports need, does the same, and has nothing else."""

import ast
from pathlib import Path
from typing import Any

import pytest

from birdie.errors import ConfigError
from birdie.golf.standalone.bundle import Bundle, bundle

PACKAGE = {
    "__init__": "",
    "errors": "class ArtifactError(Exception):\n    pass\n",
    "codec": '''
from typing import TYPE_CHECKING
from birdie.errors import ArtifactError
from birdie.tables import SHIFT, Table
import math
if TYPE_CHECKING:
    from birdie.types import Number

LIMIT = 1 << 4
_table: "Table" = Table(3)

def encode(value: int) -> int:
    """Return the code of `value`."""
    return value + only_encoding(value)

def only_encoding(value):
    return SHIFT

def decode(code: int, *, limit: int = LIMIT) -> int:
    """Return the value of `code`."""
    value: int = code - SHIFT
    try:
        check(value, limit)
    except ArtifactError as error:
        raise ArtifactError(f"code {describe(code)}: {error}") from error
    from birdie import late
    # Local names shadow those of the module: this `encode` is a number.
    encode = [math for math in range(2)][1]
    return late.scale(value, lambda only_encoding: only_encoding + encode) + _table.get()

def check(value, limit):
    if value > limit:
        raise ArtifactError(f"{value} is over {limit}")

def describe(code):
    return str(code)
''',
    "late": "import math\ndef scale(value, change):\n    return change(math.floor(value / 2))\n",
    "tables": '''
from dataclasses import dataclass
SHIFT, UNUSED = range(1, 3)
@dataclass(frozen=True)
class Table:
    """A number."""
    number: int
    get_all: int = 0
    def get(self) -> int:
        return self.number
    def put(self) -> None:
        only_encoding()
def only_encoding():
    return UNUSED
''',
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "birdie"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr("birdie.golf.standalone.sources.PACKAGE", folder)
    return folder


def executed(result: Bundle) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(compile(result.tree, "bundle", "exec"), space)
    return space


def names(result: Bundle) -> set[str]:
    nodes = [node for node in ast.walk(result.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name.split("__")[-1] for node in nodes}


@pytest.mark.usefixtures("package")
def test_a_bundle_does_what_its_package_does() -> None:
    space = executed(bundle({"go": ("birdie.codec", "decode")}))
    assert [space["go"](code) for code in (1, 7, 17)] == [0 // 2 + 1 + 3, 6 // 2 + 1 + 3, 16 // 2 + 1 + 3]
    assert space["go"](29, limit=100) == 28 // 2 + 1 + 3


@pytest.mark.usefixtures("package")
def test_encoders_stay_behind_even_in_the_module_of_their_decoder() -> None:
    result = bundle({"go": ("birdie.codec", "decode")})
    assert names(result) == {"ArtifactError", "go", "check", "Table", "get", "scale"}
    assert set(result.origins) == {"birdie.errors", "birdie.codec", "birdie.late", "birdie.tables"}
    assert len(result.origins) == sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in result.tree.body)


@pytest.mark.usefixtures("package")
def test_errors_have_numbers_and_a_longer_sentence_does_not_replace_them() -> None:
    result = bundle({"go": ("birdie.codec", "decode")})
    with pytest.raises(Exception, match=r"^1$"):
        executed(result)["go"](40)
    assert result.messages == ("f'{value} is over {limit}'",)
    assert "describe" not in ast.unparse(result.tree)


def test_an_entry_of_a_table_is_replaced_and_its_value_stays_behind(package: Path) -> None:
    (package / "heavy.py").write_text("def run(x):\n    return 2 * x\n")
    (package / "light.py").write_text(
        "from birdie import heavy\nTABLE: dict = {'one': heavy.run, 2: str}\n"
        "def go(x, key):\n    return TABLE[key](x)\ndef need():\n    return heavy.run(1)\n"
    )
    (package / "other.py").write_text(
        "from birdie.errors import ArtifactError\ndef refuse(*_):\n    raise ArtifactError('left out')\n"
    )
    export, entry, value = {"go": ("birdie.light", "go")}, ("birdie.light", "TABLE"), ("birdie.other", "refuse")
    full = executed(bundle(export))
    assert (full["go"](4, "one"), full["go"](4, 2)) == (8, "4")
    result = bundle(export, {(*entry, "'one'"): value}, unnumbered="birdie.other")
    assert "heavy" not in ast.unparse(result.tree)
    space = executed(result)
    assert space["go"](4, 2) == "4"
    with pytest.raises(Exception, match=r"^left out$"):
        space["go"](4, "one")
    with pytest.raises(Exception, match=r"^1$"):
        executed(bundle(export, {(*entry, "'one'"): value}))["go"](4, "one")
    for absent in ("'two'",), ("3",):
        with pytest.raises(ConfigError, match=absent[0]):
            bundle(export, {(*entry, *absent): value})


def test_what_does_not_exist_is_refused_by_name(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"birdie\.codec.*nothing"):
        bundle({"go": ("birdie.codec", "nothing")})
    with pytest.raises(ConfigError, match=r"birdie\.nowhere"):
        bundle({"go": ("birdie.nowhere", "go")})
    (package / "wrong.py").write_text("def go():\n    return absent\n")
    with pytest.raises(ConfigError, match=r"birdie\.wrong.*absent.*2"):
        bundle({"go": ("birdie.wrong", "go")})
