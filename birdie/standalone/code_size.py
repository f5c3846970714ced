"""Source files that an entry point may load, and their bytes: what the challenge counts as code.

Imports of birdie's own modules are followed through the syntax trees, imports inside functions included, so the answer
does not depend on which modules are loaded. A module counts if it can be loaded, so the number is never too small. A
package that lists its modules with `pkgutil.iter_modules(__path__)` counts as a whole.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path

from birdie.system.door import for_types, offered
from birdie.system.outputs import Kind

PACKAGE = Path(__file__).resolve().parents[1]
SCRIPT = Kind("a script that birdie writes", rb"# ?birdie ")
C_DECODER = tuple(PACKAGE / "standalone" / "c" / name for name in ("birdie.c", "birdie.h"))
"""The decoder in C: its source and its header."""

_LISTING = b"pkgutil.iter_modules(__path__)"

Follow = Callable[[str], bool]


def source_files(
    entry: str | Path, follow: Follow = lambda _: True, listed: Follow = lambda _: True
) -> tuple[Path, ...]:
    """Return `entry` (a script or a module of birdie) and every file of birdie that it can import, sorted by path.

    Args:
        entry: where the program begins.
        follow: whether imports of a dotted name inside functions count.
        listed: whether a module counts that is found by listing its package.
    """
    start = Path(entry).resolve()
    files = {start}
    queue = [start]
    while queue:
        for imported in _imports(queue.pop(), follow, listed):
            if imported not in files:
                files.add(imported)
                queue.append(imported)
    return tuple(sorted(files))


def code_bytes(entry: str | Path) -> int:
    """Return the bytes of `source_files(entry)` together."""
    return sum(path.stat().st_size for path in source_files(entry))


@cache
def behind(package: str) -> dict[str, tuple[str, str]]:
    """Return name → (module, its name there) of what a package of birdie offers at its door (birdie.system.door)."""
    path = PACKAGE.parent.joinpath(*package.split("."), "__init__.py")
    return offered(path.read_text(encoding="utf-8")) if path.is_file() and path.is_relative_to(PACKAGE) else {}


def _imports(path: Path, follow: Follow, listed: Follow) -> Iterator[Path]:
    content = path.read_bytes()
    for name, late in _imported(content):
        if not late or follow(name):
            yield from _files_of(name)
    if _LISTING in content and path.is_relative_to(PACKAGE):
        package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        for file in sorted(path.parent.glob("*.py")):
            if listed(name := f"{package}.{file.stem}"):
                yield from _files_of(name)


@lru_cache(maxsize=1024)  # packing a script asks twice, and parsing is most of its time
def _imported(content: bytes) -> tuple[tuple[str, bool], ...]:
    """Return (dotted name, whether it is inside a function) of each import."""
    imported: list[tuple[str, bool]] = []
    queue: list[tuple[ast.AST, bool]] = [(ast.parse(content), False)]
    while queue:
        node, late = queue.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            homes = behind(node.module)
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names += [homes[alias.name][0] for alias in node.names if alias.name in homes]
        imported += [(name, late) for name in names]
        late = late or isinstance(node, ast.FunctionDef)
        children = getattr(node, "orelse", []) if for_types(node) else ast.iter_child_nodes(node)
        queue += ((child, late) for child in children if not isinstance(child, ast.expr))  # which holds no import
    return tuple(imported)


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
