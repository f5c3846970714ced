"""Doors: what a package offers to others stands once, in the imports of its `__init__.py` for type checkers.

    if TYPE_CHECKING:
        from birdie.artifact.saving import save as save        ◄── the name, and the module it is defined in
    else:
        __getattr__, __dir__, __all__ = door(__name__)       ──► imported when it is first used

So `import birdie` costs nothing, a module that needs one name loads what defines it alone, and type checkers see all.
Scientific Python's `lazy_loader` does the same from stub files (SPEC 1).
"""

import ast
import gc
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def for_types(node: ast.AST) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def offered(source: str) -> dict[str, tuple[str, str]]:
    """Return name → (module, its name there) of a package, from the source of its `__init__.py`."""
    blocks = [node for node in ast.parse(source).body if for_types(node)]
    imports = [line for block in blocks for line in getattr(block, "body", []) if isinstance(line, ast.ImportFrom)]
    return {alias.asname: (str(line.module), alias.name) for line in imports for alias in line.names if alias.asname}


@cache
def offers(package: str) -> dict[str, tuple[str, str]]:
    """Return name → (module, its name there) of all that a package offers, without importing it."""
    spec = find_spec(package)
    source = getattr(spec.loader, "get_source", lambda _: None)(package) if spec else None
    if source is None:
        raise ImportError(f"the source of {package} is missing; install birdie with its .py files")
    return offered(source)


def _module(name: str) -> ModuleType:
    """Import a module. Meanwhile nothing looks for garbage, of which torch's import makes none: a tenth faster."""
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.enable()


def door(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package (PEP 562)."""
    names = offers(package)

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = names[name]  # not kept here: whoever replaces it there replaces it for all
        return _module(f"{module}.{original}") if module == package else getattr(_module(module), original)

    return get, lambda: sorted(names), sorted(names)
