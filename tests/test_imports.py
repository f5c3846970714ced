"""The layout's one rule: a module imports only from the rows above its own, and importing birdie is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "birdie"

# Top to bottom. Names on one row may import what stands above the row, and of the row only themselves.
ROWS: list[set[str]] = [
    {"errors"},
    {"runtime"},
    {"data", "model", "train", "entropy"},
    {"compress"},
    {"schemes"},  # the public names of compress
    {"artifact"},
    {"score"},
    {"run"},
    {"golf"},
    {"cli"},
    {"__init__", "__main__"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The first name below `birdie`: the row a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "birdie":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("birdie."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("birdie.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path: Path) -> None:
    own = part(path)
    for other in imported_parts(path) - {own}:
        assert other in ROW_OF, f"{path} imports {other}, which is on no row"
        assert ROW_OF[other] < ROW_OF[own], f"{path} imports {other}, which is not above {own}"


def test_every_module_is_on_a_row() -> None:
    assert {part(path) for path in modules()} <= set(ROW_OF)


def test_no_module_is_a_drawer() -> None:
    assert not [p for p in modules() if p.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_the_container_needs_no_torch() -> None:
    code = "import sys, birdie.artifact.container; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, birdie.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compress" in done.stdout
