"""Tree shaking: what a few functions of birdie need, as one module that imports nothing of birdie.

    exports ──► names they mention ──► names those mention ──► … ──► one module, every top-level name unique

A definition is included when included code mentions it, a method when included code mentions any attribute of its name.
Annotations and docstrings are dropped first, so that what only types mention stays behind. Encoders stay behind because
no decoder calls them, in whichever module they are.

birdie's errors carry a number instead of a sentence: the sentences would add 8 % to the packed file (1.4 of 18 kB).
"""

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass

from birdie.errors import ConfigError
from birdie.golf.standalone.sources import (
    COMPREHENSIONS,
    Source,
    Target,
    defined_names,
    file_of,
    import_targets,
    local_names,
    read,
)

ERRORS = "birdie.errors"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One module cut out of birdie.

    Attributes:
        tree: imports of other packages, then definitions; every top-level name says which module it is from.
        origins: for each definition in `tree`, the module of birdie it is from.
        messages: the source text of the message behind each error number, from 1.
    """

    tree: ast.Module
    origins: tuple[str, ...]
    messages: tuple[str, ...]


def bundle(
    exports: Mapping[str, tuple[str, str]],
    replacements: Mapping[tuple[str, str, str], tuple[str, str]] | None = None,
    unnumbered: str = "",
    substitutes: Mapping[tuple[str, str], tuple[str, str]] | None = None,
    numbered: bool = True,
) -> Bundle:
    """Return the module that defines `exports` and everything they need.

    Args:
        exports: name in the bundle → (module, name in birdie).
        replacements: (module, name of a dictionary in it, source text of a key) → (module, name) of the value that the
            entry has in the bundle. So a table of decoders loses some of them, and the bundle need not include these.
        unnumbered: the module whose errors keep their sentences.
        substitutes: (module, name) → (module, name) of what the bundle has in place of a definition.
        numbered: whether errors carry numbers; False: their sentences.

    Raises:
        ConfigError: birdie has no such export, or no dictionary that is included has the key of a replacement.
    """
    linker = _Linker(replacements or {}, unnumbered, substitutes or {}, numbered)
    targets = {name: linker.resolve(Target(*origin)) for name, origin in exports.items()}
    linker.names |= {target: name for name, target in targets.items()}
    for target in targets.values():
        linker.include(target)
    return linker.finish()


class _Linker:
    """Follows names from the exports and collects the statements that define them, rewritten for the bundle."""

    def __init__(
        self,
        replacements: Mapping[tuple[str, str, str], tuple[str, str]],
        unnumbered: str,
        substitutes: Mapping[tuple[str, str], tuple[str, str]],
        numbered: bool,
    ) -> None:
        self.replacements = {entry: Target(*value) for entry, value in replacements.items()}
        self.substitutes = {Target(*name): Target(*value) for name, value in substitutes.items()}
        self.unnumbered, self.numbered = unnumbered, numbered
        self.sources: dict[str, Source] = {}
        self.names: dict[Target, str] = {}  # names in the bundle
        self.statements: dict[tuple[str, int], ast.stmt] = {}  # (module, line) → rewritten statement
        self.methods: list[tuple[Source, ast.ClassDef, ast.FunctionDef]] = []  # of included classes, left out so far
        self.attributes: set[str] = set()  # names of attributes that included code mentions
        self.messages: list[str] = []

    def source(self, module: str) -> Source:
        """Return `module` as syntax, parsed once."""
        if module not in self.sources:
            self.sources[module] = read(module)
        return self.sources[module]

    def resolve(self, target: Target) -> Target:
        """Follow substitutes and re-exports to the module that defines `target`."""
        while (target := self.substitutes.get(target, target)).internal and target.name is not None:
            source = self.source(target.module)
            if target.name in source.definitions:
                return target
            if target.name not in source.imports:
                raise ConfigError(f"{target.module} defines no {target.name}; name a function, class or constant of it")
            target = source.imports[target.name]
        return target

    def include(self, target: Target) -> str:
        """Put the definition of `target` into the bundle, or import it; return its name there."""
        target = self.resolve(target)
        if target not in self.names:
            name = _qualified(target)
            while name in self.names.values():
                name += "_"
            self.names[target] = name
        if target.internal:
            source = self.source(target.module)
            self._link(source, source.definitions[target.name or ""])
            for statement, mentions in source.statements:
                if target.name in mentions:
                    self._link(source, statement)
        return self.names[target]

    def _link(self, source: Source, node: ast.stmt) -> None:
        key = source.name, node.lineno
        if key in self.statements:
            return
        self.statements[key] = node  # before its names are followed: definitions may mention one another in a circle
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.name = self.names[Target(source.name, node.name)]
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            self.methods += [(source, node, method) for method in methods]
            node.body = [part for part in node.body if part not in methods]
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            self._replace_values(source, defined_names(node)[0], node.value)
        self.statements[key] = _Rewriter(self, source).visit(node)

    def _replace_values(self, source: Source, name: str, table: ast.Dict) -> None:
        """Edit the dictionary `name` as if its module imported the values that replace others."""
        for index, key in enumerate(table.keys):
            value = self.replacements.pop((source.name, name, ast.unparse(key)), None) if key else None
            if value is not None:
                source.imports[value.name or ""] = value
                table.values[index] = ast.Name(value.name or "", ast.Load())

    def finish(self) -> Bundle:
        """Return the module, its definitions in the order in which Python would have run birdie's."""
        while self._include_methods():
            pass
        if self.replacements:
            entries = ", ".join(f"{module}.{name}[{key}]" for module, name, key in self.replacements)
            raise ConfigError(f"the bundle includes no table entry {entries}; correct the module, the name or the key")
        order = self._import_order()
        keys = sorted(self.statements, key=lambda key: (order.index(key[0]), key[1]))
        external = sorted((name, target) for target, name in self.names.items() if not target.internal)
        imports: list[ast.stmt] = [
            ast.Import([ast.alias(target.module, name)])
            if target.name is None
            else ast.ImportFrom(target.module, [ast.alias(target.name, name)], 0)
            for name, target in external
        ]
        tree = ast.fix_missing_locations(ast.Module([*imports, *(self.statements[key] for key in keys)], []))
        return Bundle(tree, tuple(module for module, _ in keys), tuple(self.messages))

    def _include_methods(self) -> bool:
        """Include the methods that included code mentions; return False if there was none."""
        progress = False
        candidates, self.methods = self.methods, []
        for source, owner, method in candidates:
            if method.name in self.attributes or method.name.startswith("__"):
                owner.body.append(_Rewriter(self, source).visit(method))
                owner.body.sort(key=lambda node: node.lineno)
                progress = True
            else:
                self.methods.append((source, owner, method))
        return progress

    def _import_order(self) -> list[str]:
        """Modules in the order in which Python would have run them: each after those it imports."""
        order: list[str] = []
        visited: set[str] = set()

        def visit(module: str) -> None:
            if module in self.sources and module not in visited:
                visited.add(module)
                for target in self.sources[module].imports.values():
                    visit(self.substitutes.get(target, target).module)
                order.append(module)

        for module in sorted(self.sources):
            visit(module)
        return order


def _qualified(target: Target) -> str:
    """Return a top-level name that says where `target` is from; two underscores keep it apart from local names."""
    parts = [*target.module.split(".")[target.internal :], *filter(None, [target.name])]
    return "__".join(part.strip("_") for part in parts) + "__" * (len(parts) == 1)


class _Rewriter(ast.NodeTransformer):
    """Rewrites one top-level statement or method in place: names, error messages, annotations and docstrings."""

    def __init__(self, linker: _Linker, source: Source) -> None:
        self.linker, self.source = linker, source
        self.scopes: list[set[str]] = []  # local names, the outermost scope first
        self.imports = dict(source.imports)  # and those of functions

    def target(self, node: ast.AST) -> Target | None:
        """Return the object that a name or dotted path refers to; None for local names and all other expressions."""
        if isinstance(node, ast.Attribute):
            base = self.target(node.value)
            if base is None or base.name is not None or not base.internal:
                return None
            submodule = f"{base.module}.{node.attr}"
            return Target(submodule, None) if file_of(submodule) else Target(base.module, node.attr)
        if not isinstance(node, ast.Name) or self._is_local(node.id):
            return None
        if node.id in self.source.definitions:
            return Target(self.source.name, node.id)
        return self.imports.get(node.id)

    def _is_local(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        target = self.target(node)
        if target is not None:
            return ast.Name(self.linker.include(target), node.ctx)
        defined = node.id == "__file__" or hasattr(builtins, node.id)
        if self.scopes and not self._is_local(node.id) and not defined:
            raise ConfigError(f"{self.source.name} uses {node.id} in line {node.lineno} but does not define it")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        target, base = self.target(node), self.target(node.value)
        if target is not None and target.name is not None:
            return ast.Name(self.linker.include(target), node.ctx)
        if base is None or base.internal:  # an attribute of another package is no method of ours
            self.linker.attributes.add(node.attr)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if self.linker.numbered and self.source.name != self.linker.unnumbered and self._is_error(node.func):
            self.linker.messages.append(" ".join(ast.unparse(argument) for argument in node.args))
            node.args, node.keywords = [ast.Constant(len(self.linker.messages))], []
        self.generic_visit(node)
        return node

    def _is_error(self, node: ast.expr) -> bool:
        target = self.target(node)
        if target is None or not target.internal or target.name is None:
            return False
        return self.linker.resolve(target).module == ERRORS

    def visit_Try(self, node: ast.Try) -> ast.Try | list[ast.stmt]:
        """Drop handlers that only repeat an error in a longer sentence: their number would hide the first one."""
        if (
            self.linker.numbered
            and not node.finalbody
            and not node.orelse
            and all(map(self._repeats_error, node.handlers))
        ):
            return self._rewrite_block(node.body)
        self.generic_visit(node)
        return node

    def _repeats_error(self, handler: ast.ExceptHandler) -> bool:
        first = handler.body[0]
        if handler.type is None or not isinstance(first, ast.Raise) or not isinstance(first.exc, ast.Call):
            return False
        caught = self.target(handler.type)
        return caught is not None and caught.internal and caught == self.target(first.exc.func)

    def visit_Import(self, node: ast.Import) -> ast.Pass:
        self.imports |= dict(import_targets(node))
        return ast.copy_location(ast.Pass(), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.Pass:
        self.imports |= dict(import_targets(node))
        return ast.copy_location(ast.Pass(), node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Drop docstrings and other constants."""
        if isinstance(node.value, ast.Constant):
            return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([self.visit(node.target)], self.visit(node.value)), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = [self.visit(mark) for mark in node.decorator_list]
        node.bases = [self.visit(base) for base in node.bases]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        self.scopes.append(local_names(node))
        node.body = [self._field(part) if isinstance(part, ast.AnnAssign) else self.visit(part) for part in node.body]
        self.scopes.pop()
        return node

    def _field(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(0)  # without an annotation a dataclass would have no such field
        node.value = node.value and self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        node.decorator_list = [self.visit(mark) for mark in node.decorator_list]
        node.args = self.visit(node.args)  # defaults and decorators are evaluated outside the function's scope
        self.scopes.append(local_names(node))
        node.body = self._rewrite_block(node.body)
        self.scopes.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        node.args = self.visit(node.args)
        self.scopes.append(local_names(node))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def _rewrite_block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        block = ast.Module(body, [])
        self.generic_visit(block)
        return block.body

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, COMPREHENSIONS):
            return super().generic_visit(node)
        self.scopes.append(local_names(node))
        super().generic_visit(node)
        self.scopes.pop()
        return node
