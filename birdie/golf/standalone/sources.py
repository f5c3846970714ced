"""Modules of birdie as syntax trees: their definitions, their imports, and the names that a scope binds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from birdie.errors import ConfigError
from birdie.runtime.outputs import Kind

PACKAGE = Path(__file__).resolve().parents[2]
SCRIPT = Kind("a script that birdie writes", rb"# ?birdie ")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Target:
    """The object that a name refers to: `name` of `module`, or the module itself where `name` is None."""

    module: str
    name: str | None

    @property
    def internal(self) -> bool:
        """True for birdie's own modules, which a bundle includes; all others it imports."""
        return self.module.split(".")[0] == PACKAGE.name


@dataclass(slots=True)
class Source:
    """A module of birdie as written.

    Attributes:
        name: dotted name of the module.
        definitions: top-level name → the statement that binds it.
        imports: top-level name → the object it is imported from.
        statements: the other top-level statements, each with the names that occur in it.
    """

    name: str
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, Target] = field(default_factory=dict)
    statements: list[tuple[ast.stmt, set[str]]] = field(default_factory=list)


def read(module: str) -> Source:
    """Parse `module` of birdie; signatures marked as overloads are left out.

    Raises:
        ConfigError: birdie has no such module.
    """
    path = file_of(module)
    if path is None:
        raise ConfigError(f"birdie has no module {module}; name one of its modules")
    source = Source(module)
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.imports |= dict(import_targets(node))
        elif names := defined_names(node):
            source.definitions |= dict.fromkeys(names, node)
        elif not isinstance(node, ast.AnnAssign) and not _is_overload(node):
            mentions = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            source.statements.append((node, mentions))
    return source


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines; none for an overload or a bare annotation."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [] if _is_overload(node) else [node.name]
    if isinstance(node, ast.Assign):
        return [name for target in node.targets for name in _stored(target)]
    return list(_stored(node.target)) if isinstance(node, ast.AnnAssign) and node.value else []


def _is_overload(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in decorators)


def file_of(module: str) -> Path | None:
    """Return the file of `module`, or None if birdie has no such module."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def import_targets(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Target]]:
    """Yield (name, target) of each name that an import statement binds."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            first = alias.name.split(".")[0]
            yield alias.asname or first, Target(alias.name if alias.asname else first, None)
        else:
            module, submodule = node.module or "", f"{node.module}.{alias.name}"
            is_module = module.split(".")[0] == PACKAGE.name and file_of(submodule) is not None
            yield alias.asname or alias.name, Target(submodule, None) if is_module else Target(module, alias.name)


def _stored(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def local_names(scope: ast.AST) -> set[str]:
    """Return the names bound in the scope that `scope` opens: parameters, assignments, definitions, handlers.

    Scopes inside it are skipped, for they bind names of their own. The one exception is a walrus in a comprehension,
    which binds in the function around it.
    """
    names: set[str] = set()
    if isinstance(scope, ast.FunctionDef | ast.Lambda):
        names |= {part.arg for part in ast.walk(scope.args) if isinstance(part, ast.arg)}
    queue: list[ast.AST] = []
    if isinstance(scope, ast.FunctionDef | ast.ClassDef):
        queue += scope.body  # decorators and defaults are outside the scope
    else:
        queue += ast.iter_child_nodes(scope)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, COMPREHENSIONS):
            if not isinstance(scope, COMPREHENSIONS):
                walruses = [part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
                names |= {target.id for target in walruses}
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.add(node.name)
            queue.extend(ast.iter_child_nodes(node))
    return names
