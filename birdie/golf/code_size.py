"""Source files that an entry point may load, and their bytes: what the challenge counts as code.

Imports of birdie's own modules are followed through the syntax trees, imports inside functions included, so the answer
does not depend on which modules are loaded. A module counts if it can be loaded, so the number is never too small. A
package whose modules are listed with `pkgutil.iter_modules(package.__path__)` counts as a whole.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def source_files(entry: str | Path) -> tuple[Path, ...]:
    """Return `entry` (a script or a module of birdie) and every file of birdie that it can import, sorted by path.

    Raises:
        OSError: `entry` cannot be read.
    """
    start = Path(entry).resolve()
    files = {start}
    queue = [start]
    while queue:
        for imported in _imports(queue.pop()):
            if imported not in files:
                files.add(imported)
                queue.append(imported)
    return tuple(sorted(files))


def code_bytes(entry: str | Path) -> int:
    """Return the bytes of `source_files(entry)` together."""
    return sum(path.stat().st_size for path in source_files(entry))


def _imports(path: Path) -> Iterator[Path]:
    packages: dict[str, str] = {}  # local name → dotted name
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            packages |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pkgutil.iter_modules":
            listed = ast.unparse(node.args[0]).removesuffix(".__path__")
            folder = PACKAGE.parent.joinpath(*packages[listed].split("."))
            names = [f"{packages[listed]}.{module.stem}" for module in sorted(folder.glob("*.py"))]
        else:
            continue
        for name in names:
            yield from _files_of(name)


def _files_of(name: str) -> Iterator[Path]:
    """Yield the files that importing the dotted `name` runs: the `__init__` of its packages and the module itself."""
    first, *rest = name.split(".")
    if first != PACKAGE.name:
        return
    folder = PACKAGE
    yield folder / "__init__.py"
    for part in rest:
        module = folder / f"{part}.py"
        folder = folder / part
        if module.is_file():
            yield module
            return
        if not (folder / "__init__.py").is_file():
            return
        yield folder / "__init__.py"
