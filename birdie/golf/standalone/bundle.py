"""Tree shaking: what a few functions of birdie need, as one module that imports nothing of birdie.

    exports ──► names they mention ──► names those mention ──► … ──► one module, every name unique

A definition comes along when reached code mentions it, a method when reached code mentions an attribute of its name.
Docstrings and annotations go first, so what only types mention stays behind, and so do encoders beside decoders.
Messages of birdie's own errors become numbers: their words, and what is looked up only to word them, are not carried.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from birdie.errors import ConfigError
from birdie.golf.standalone.sources import (
    Source,
    Target,
    bindings,
    bodied,
    bound_names,
    file_of,
    names_defined,
    names_stored,
    read,
)

ERRORS = "birdie.errors"
_N = TypeVar("_N", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Bundle:
    """One module cut out of birdie.

    Attributes:
        tree: the module; every top-level name is unique and tells where it came from.
        messages: what each numbered error says in birdie.
        owners: the module of birdie that each top-level name came from; imports have none.
    """

    tree: ast.Module
    messages: tuple[str, ...]
    owners: Mapping[str, str]


def bundle(
    exports: Mapping[str, tuple[str, str]], omit: Iterable[str] = (), instead: tuple[str, str] | None = None
) -> Bundle:
    """The module that defines `exports` (its name → module and name in birdie) and all they need.

    Modules whose name begins with one of `omit` stay out: what dictionaries of reached code hold of them is left out,
    or becomes `instead` (a module and a function in it whose errors keep their words).

    Raises:
        ConfigError: an export is not there, or something other than an entry of a dictionary needs an omitted module.
    """
    linker = _Linker(tuple(omit), instead)
    linker.export(exports)
    return linker.finish()


class _Linker:
    """Follows names from the exports and collects, rewritten, what they reach."""

    def __init__(self, omit: tuple[str, ...], instead: tuple[str, str] | None) -> None:
        self.omit = omit
        self.instead = None if instead is None else Target(*instead)
        self.sources: dict[str, Source] = {}
        self.reached: dict[tuple[str, int], ast.stmt] = {}  # (module, line) → linked statement
        self.external: dict[Target, str] = {}
        self.named: dict[tuple[str, str], str] = {}
        self.attributes: set[str | tuple[str, str]] = set()  # mentioned: by name, or of a known class (class, name)
        self.waiting: list[tuple[Source, ast.ClassDef, ast.FunctionDef]] = []  # methods nobody mentioned yet
        self.messages: list[str] = []
        self.typed: dict[tuple[str, str], list[ast.AST]] = {}  # (class, attribute) → where, methods themselves included
        self.untyped: set[str] = set()  # attributes of what may be anything

    def source(self, module: str) -> Source:
        """`module`, read once."""
        if module not in self.sources:
            self.sources[module] = read(module)
        return self.sources[module]

    def resolve(self, target: Target) -> Target:
        """Through re-exports to the module that defines it."""
        while target.ours and target.name is not None:
            source = self.source(target.module)
            if target.name in source.definitions:
                return target
            if target.name not in source.imports:
                raise ConfigError(f"{target.module} has no {target.name} that a bundle could carry; name another")
            target = source.imports[target.name]
        return target

    def export(self, exports: Mapping[str, tuple[str, str]]) -> None:
        """Reach each (module, name) of `exports` and call it as its key says."""
        targets = {alias: self.resolve(Target(*place)) for alias, place in exports.items()}
        self.named |= {(target.module, target.name or ""): alias for alias, target in targets.items()}
        for target in targets.values():
            self.reach(target)

    def is_omitted(self, target: Target) -> bool:
        """Whether `target` lies in an omitted module or is a function that needs one."""
        if not target.ours:
            return False
        if target.module.startswith(self.omit or ("\0",)):
            return True
        node = self.source(target.module).definitions.get(target.name or "")
        if not isinstance(node, ast.FunctionDef):
            return False
        probe = _Rewriter(self, self.source(target.module), follow=False)
        probe.visit(_copy(node))
        return any(each.module.startswith(self.omit or ("\0",)) for each in probe.mentioned)

    def reach(self, target: Target) -> str:
        """The name `target` has in the bundle, which from now on holds it."""
        target = self.resolve(target)
        if not target.ours:
            return self.external.setdefault(target, _mangled(target))
        if target.module.startswith(self.omit or ("\0",)):
            raise ConfigError(f"{target.module} is left out of this bundle but {target.name} is needed; keep it")
        source, name = self.source(target.module), target.name or ""
        node = source.definitions[name]
        chosen = self._unique((target.module, name), _mangled(target))
        place = (target.module, node.lineno)
        if place not in self.reached:
            self.reached[place] = ast.Pass()
            self.reached[place] = self._link(source, node)
            for other in source.statements:
                mentions = {each.id for each in ast.walk(other) if isinstance(each, ast.Name)}
                at = (target.module, other.lineno)
                if at not in self.reached and name in mentions:
                    self.reached[at] = ast.Pass()
                    self.reached[at] = self._link(source, other)
        return chosen

    def _unique(self, key: tuple[str, str], wanted: str) -> str:
        while key not in self.named:
            if wanted in self.named.values():
                wanted += "_"
            else:
                self.named[key] = wanted
        return self.named[key]

    def _link(self, source: Source, node: ast.stmt) -> ast.stmt:
        copied = _copy(node)
        if isinstance(copied, ast.ClassDef):
            methods = [part for part in copied.body if isinstance(part, ast.FunctionDef)]
            copied.body = [part for part in copied.body if part not in methods]
            copied.name = self.named[source.name, copied.name]
            linked: ast.ClassDef = _Rewriter(self, source).visit(copied)
            self.waiting += [(source, linked, method) for method in methods]
            return linked
        names = names_defined(copied)
        worded = self.instead is not None and self.instead.module == source.name and self.instead.name in names
        result: ast.stmt = _Rewriter(self, source, worded=worded).visit(copied)
        return result

    def finish(self) -> Bundle:
        """The whole module, in the order in which Python would have run birdie's."""
        while self._wake():
            pass
        self._settle_attributes()
        order: list[str] = []
        first = [] if self.instead is None else [self.instead.module]  # no import tells that it is needed
        for module in first + sorted({module for module, _ in self.reached}):
            self._ordered(module, order, set())
        body: list[ast.stmt] = list(self._imports())
        owners: dict[str, str] = {}
        for module, line in sorted(self.reached, key=lambda place: (order.index(place[0]), place[1])):
            node = _settled(self.reached[module, line])
            body.append(node)
            owners |= dict.fromkeys(names_defined(node), module)
        tree = ast.fix_missing_locations(ast.Module(body, []))
        return Bundle(tree, tuple(self.messages), owners)

    def _settle_attributes(self) -> None:
        """Give attributes that are always reached through a known class a name that tells which."""
        for (owner, name), nodes in self.typed.items():
            method = any(isinstance(node, ast.FunctionDef) for node in nodes)
            if method and name not in self.untyped and not name.startswith("__"):
                for node in nodes:
                    if isinstance(node, ast.Attribute):
                        node.attr = f"{name}__{owner}"
                    elif isinstance(node, ast.FunctionDef):
                        node.name = f"{name}__{owner}"

    def _ordered(self, module: str, order: list[str], seen: set[str]) -> None:
        if module in order or module in seen:
            return
        seen.add(module)
        for other in self.source(module).above:
            if file_of(other) is not None:
                self._ordered(other, order, seen)
        order.append(module)

    def _wake(self) -> bool:
        """Link the waiting methods that reached code mentions; whether there were any."""
        ready = [each for each in self.waiting if self._mentioned(each[1].name, each[2].name)]
        self.waiting = [each for each in self.waiting if each not in ready]
        for source, owner, method in ready:
            linked = _Rewriter(self, source, owner=owner.name).visit(_copy(method))
            self.typed.setdefault((owner.name, method.name), []).append(linked)
            owner.body.append(linked)
        return bool(ready)

    def _mentioned(self, owner: str, method: str) -> bool:
        return method in self.attributes or (owner, method) in self.attributes or method.startswith("__")

    def class_of(self, target: Target | None) -> str | None:
        """The bundle's name for the class that `target` is; None for all else and for classes with parents."""
        if target is None or not target.ours or target.name is None or target.module.startswith(self.omit or ("\0",)):
            return None
        target = self.resolve(target)
        node = self.sources[target.module].definitions.get(target.name or "") if target.ours else None
        known = isinstance(node, ast.ClassDef) and not node.bases
        return self.named.get((target.module, target.name or "")) or _mangled(target) if known else None

    def _imports(self) -> Iterator[ast.stmt]:
        for target, name in sorted(self.external.items(), key=lambda item: item[1]):
            if target.name is None:
                yield ast.Import([ast.alias(target.module, None if target.module == name else name)])
            else:
                yield ast.ImportFrom(target.module, [ast.alias(target.name, name)], 0)


def _mangled(target: Target) -> str:
    """A top-level name that tells where it came from; two underscores keep it apart from every local name."""
    parts = [*target.module.split(".")[target.ours :], *filter(None, [target.name])]
    return "__".join(part.strip("_") for part in parts) + "__" * (len(parts) == 1)


def _settled(node: ast.stmt) -> ast.stmt:
    """`node`, its methods in the order of the source."""
    if isinstance(node, ast.ClassDef):
        node.body = bodied(sorted((part for part in node.body if not isinstance(part, ast.Pass)), key=_line))
    return node


def _line(node: ast.stmt) -> int:
    return node.lineno


def _copy(node: _N) -> _N:
    """A deep copy: a definition is linked anew for each bundle."""
    copied = type(node)()
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            value = [_copy(part) if isinstance(part, ast.AST) else part for part in value]
        setattr(copied, name, _copy(value) if isinstance(value, ast.AST) else value)
    return ast.copy_location(copied, node)


class _Rewriter(ast.NodeTransformer):
    """Gives the names of one definition their names in the bundle, and reaches what they stand for."""

    def __init__(
        self, linker: _Linker, source: Source, follow: bool = True, owner: str | None = None, worded: bool = False
    ) -> None:
        self.linker, self.source, self.follow, self.owner, self.worded = linker, source, follow, owner, worded
        self.scopes: list[set[str]] = []
        self.types: list[dict[str, str]] = []  # of each scope: names that hold an object of a class of ours
        self.imports = dict(source.imports)
        self.mentioned: list[Target] = []

    def target(self, node: ast.AST) -> Target | None:
        """What of birdie or of another package `node`, a name or a dotted path, stands for; None for all else."""
        if isinstance(node, ast.Attribute):
            base = self.target(node.value)
            if base is None or base.name is not None or not base.ours:
                return None
            inner = f"{base.module}.{node.attr}"
            return Target(inner, None) if file_of(inner) else Target(base.module, node.attr)
        if not isinstance(node, ast.Name) or any(node.id in scope for scope in self.scopes):
            return None
        if node.id in self.source.definitions:
            return Target(self.source.name, node.id)
        return self.imports.get(node.id)

    def chosen(self, node: ast.expr, target: Target) -> ast.expr:
        """The bundle's name for `target`, in the place of `node`."""
        self.mentioned.append(target)
        if not self.follow:
            return node
        context = node.ctx if isinstance(node, ast.Name | ast.Attribute) else ast.Load()
        return ast.copy_location(ast.Name(self.linker.reach(target), context), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        target = self.target(node)
        if target is not None:
            return self.chosen(node, target)
        if not any(node.id in scope for scope in self.scopes) and not hasattr(builtins, node.id) and self.scopes:
            raise ConfigError(f"{self.source.name} uses {node.id} at line {node.lineno}, which it does not define")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        target = self.target(node)
        if target is not None and target.name is not None:
            return self.chosen(node, target)
        owner = self._type(node.value)
        if self.follow and owner is not None:
            self.linker.attributes.add((owner, node.attr))
        elif self.follow and not self._is_package(node.value):
            self.linker.attributes.add(node.attr)
            self.linker.untyped.add(node.attr)
        self.generic_visit(node)
        if self.follow and owner is not None:
            self.linker.typed.setdefault((owner, node.attr), []).append(node)
        return node

    def _is_package(self, node: ast.expr) -> bool:
        target = self.target(node)
        return target is not None and not target.ours

    def _type(self, node: ast.expr) -> str | None:
        """The class of `node`, if it can be told; of a class, itself."""
        if isinstance(node, ast.Name):
            for scope, types in zip(reversed(self.scopes), reversed(self.types), strict=True):
                if node.id in scope:
                    return types.get(node.id)
        return self.linker.class_of(self.target(node))

    def _typed(self, node: ast.AST) -> dict[str, str]:
        """Parameters annotated with a class of ours and names bound once, to a new object of one."""
        if not isinstance(node, ast.FunctionDef):
            return {}
        found: dict[str, str | None] = {}
        for arg in node.args.args:
            if arg.type_comment and arg.type_comment.isidentifier():
                found[arg.arg] = self.linker.class_of(self.target(ast.Name(arg.type_comment, ast.Load())))
        if self.owner is not None and len(self.scopes) == 0 and node.args.args:
            found[node.args.args[0].arg] = self.owner
        for each in ast.walk(node):
            pairs: list[tuple[ast.AST | None, ast.expr]] = []
            if isinstance(each, ast.Assign) and len(each.targets) == 1:
                pairs = [(each.targets[0], each.value)]
            elif isinstance(each, ast.With):
                pairs = [(item.optional_vars, item.context_expr) for item in each.items]
            for bound, value in pairs:
                if isinstance(bound, ast.Name) and isinstance(value, ast.Call):
                    found.setdefault(bound.id, self.linker.class_of(self.target(value.func)))
        stores = [name for part in node.body for name in names_stored(part)]
        arguments = {arg.arg for arg in node.args.args}
        return {n: t for n, t in found.items() if t is not None and stores.count(n) == (n not in arguments)}

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        pairs = []
        for key, value in zip(node.keys, node.values, strict=True):
            if not self._left_out(value):
                pairs.append((key and self.visit(key), self.visit(value)))
            elif self.linker.instead is not None:
                pairs.append((key and self.visit(key), self.chosen(value, self.linker.instead)))
        node.keys, node.values = [key for key, _ in pairs], [value for _, value in pairs]
        return node

    def _left_out(self, value: ast.expr) -> bool:
        target = self.target(value)
        return target is not None and target.name is not None and self.linker.is_omitted(self.linker.resolve(target))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        target = self.target(node.func)
        known = target is not None and target.ours and target.name and not self.worded
        if target is not None and known and self.linker.resolve(target).module == ERRORS:
            if self.follow:
                self.linker.messages.append(_words(node))
            node.args, node.keywords = [ast.Constant(len(self.linker.messages))], []
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        node.cause = None
        self.generic_visit(node)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST | list[ast.stmt]:
        if not node.finalbody and not node.orelse and all(self._rewords(handler) for handler in node.handlers):
            return [each for part in node.body for each in _listed(self.visit(part))]
        self.generic_visit(node)
        return node

    def _rewords(self, handler: ast.ExceptHandler) -> bool:
        """Whether `handler` only gives an error of ours a longer message, so that without words nothing is left."""
        last = handler.body[0]
        if handler.type is None or not isinstance(last, ast.Raise) or not isinstance(last.exc, ast.Call):
            return False
        caught, raised = self.target(handler.type), self.target(last.exc.func)
        return caught is not None and caught.ours and caught == raised

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        self.imports |= dict(bindings(node))
        return ast.copy_location(ast.Pass(), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        self.imports |= dict(bindings(node))
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        key = (self.source.name, node.name)
        if not self.scopes and self.source.definitions.get(node.name) is not None and key in self.linker.named:
            original = self.source.definitions[node.name]
            node.name = self.linker.named[key] if original.lineno == node.lineno else node.name
        return self._scoped(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return self._scoped(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.ListComp:
        return self._scoped(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.SetComp:
        return self._scoped(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.DictComp:
        return self._scoped(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.GeneratorExp:
        return self._scoped(node)

    def _scoped(self, node: _N) -> _N:
        if isinstance(node, ast.FunctionDef):  # decorators and defaults belong to the scope around
            node.decorator_list = [self.visit(each) for each in node.decorator_list]
            decorators, node.decorator_list = node.decorator_list, []
        types = self._typed(node)
        self.scopes.append(bound_names(node))
        self.types.append(types)
        self.generic_visit(node)
        self.scopes.pop()
        self.types.pop()
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = decorators
            node.body = bodied([part for part in node.body if not isinstance(part, ast.Pass)])
        return node


def _listed(result: ast.AST | list[ast.stmt]) -> list[ast.stmt]:
    return result if isinstance(result, list) else [result]  # type: ignore[list-item]


def _words(node: ast.Call) -> str:
    """A message as its source reads."""
    return " ".join(ast.unparse(each) for each in node.args)
