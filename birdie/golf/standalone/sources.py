"""birdie's modules as syntax: what each defines and imports, and which names a scope binds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from birdie.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Target:
    """What an imported name stands for: `name` in `module`, or the module itself when `name` is None."""

    module: str
    name: str | None

    @property
    def ours(self) -> bool:
        return self.module.split(".")[0] == PACKAGE.name


@dataclass(slots=True)
class Source:
    """A module of birdie: its definitions and imports by name, and its other statements."""

    name: str
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, Target] = field(default_factory=dict)
    statements: list[ast.stmt] = field(default_factory=list)
    above: list[str] = field(default_factory=list)


def read(module: str) -> Source:
    """What `module` of birdie defines, without docstrings, annotations and overloads.

    Raises:
        ConfigError: there is no such module.
    """
    path = file_of(module)
    if path is None:
        raise ConfigError(f"birdie has no module {module}; name one of its modules")
    source = Source(module)
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.imports |= dict(bindings(node))
            continue
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "overload" for d in node.decorator_list):
            continue
        bare: ast.stmt = _Bare().visit(node)
        defined = names_defined(bare)
        source.definitions |= dict.fromkeys(defined, bare)
        if not defined and not isinstance(bare, ast.Pass) and _undocumented([bare]):
            source.statements.append(bare)
    source.above = [target.module for target in source.imports.values() if target.ours]
    return source


def names_defined(node: ast.stmt) -> list[str]:
    """Names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [name for each in node.targets for name in names_stored(each)] if isinstance(node, ast.Assign) else []


def file_of(module: str) -> Path | None:
    """The file of `module`, or None if birdie has no such module."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Target]]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            short = alias.asname or alias.name.split(".")[0]
            yield short, Target(alias.name if alias.asname else short, None)
        else:
            module, inner = node.module or "", f"{node.module}.{alias.name}"
            within = module.split(".")[0] == PACKAGE.name and file_of(inner) is not None
            yield alias.asname or alias.name, Target(inner, None) if within else Target(module, alias.name)


def names_stored(target: ast.AST) -> Iterator[str]:
    """Names that an assignment to `target` binds."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def bound_names(scope: ast.AST) -> set[str]:
    """Names bound in the scope that `scope` opens; scopes inside it bind their own, but for walruses."""
    found: set[str] = set()
    if isinstance(scope, _Function):
        a = scope.args
        parts = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        found |= {part.arg for part in parts}
    queue: list[ast.AST] = [*scope.body] if isinstance(scope, ast.FunctionDef) else [*ast.iter_child_nodes(scope)]
    inside = not isinstance(scope, _COMPREHENSIONS)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, _COMPREHENSIONS):
            walruses = [each.target for each in ast.walk(node) if isinstance(each, ast.NamedExpr)]
            found |= {each.id for each in walruses} if inside else set()
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                continue
            queue.extend(ast.iter_child_nodes(node))
    return found


class _Bare(ast.NodeTransformer):
    """Drops docstrings and annotations; fields of classes keep theirs as 0, which is enough to be a field."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                arg.type_comment = ast.unparse(arg.annotation).strip("'") if arg.annotation else None  # for `_typed`
                arg.annotation = None
        node.body = bodied([self._plain(part) for part in _undocumented(node.body)])
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = bodied(_undocumented(node.body))
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                part.annotation = ast.Constant(0)
            else:
                self.visit(part)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return self._plain(node)

    def _plain(self, node: ast.stmt) -> ast.stmt:
        if not isinstance(node, ast.AnnAssign):
            return node
        plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.fix_missing_locations(ast.copy_location(plain, node))


def _undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    return [part for part in body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]


def bodied(body: list[ast.stmt]) -> list[ast.stmt]:
    """A body that is never empty."""
    return body or [ast.Pass()]
