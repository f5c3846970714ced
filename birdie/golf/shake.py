"""Tree shaking: the parts of birdie that a few functions need, each module a module still.

    entries ──► names they mention ──► names those mention ──► … ──► the same modules with less in them

A definition stays when code that stays mentions it; a method when code that stays mentions its name as an attribute or
as a string, when it is special, or when it overrides a method of another package's class, which calls it. Docstrings
go, and annotations that nothing reads: those of decorated functions stay. What cannot be followed stays too: statements
that are no definition, and imports of which no name is used.

Unlike a bundle of one module (`birdie.golf.standalone`) the result is imported as birdie is, so whatever looks up
modules, sources or classes by name finds them.
"""

import ast
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from birdie.errors import ConfigError
from birdie.golf.standalone.sources import Target, defined_names, file_of, import_targets

Rewrite = Callable[[str, list[ast.stmt]], list[ast.stmt]]

_PLAIN = {"property", "staticmethod", "classmethod", "override", "abstractmethod", "contextmanager", "cache", "njit"}
_UNREAD = {"Parameter": {"help"}}  # of cyclopts: texts for --help


@dataclass(slots=True)
class _Module:
    """A module of birdie: its statements, the names they bind, and which of them stay."""

    name: str
    body: list[ast.stmt]
    bound: dict[str, ast.stmt] = field(default_factory=dict)  # name → statement that defines or imports it
    imports: dict[str, Target] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)


def shake(
    entries: Iterable[tuple[str, str]],
    *,
    complete: Collection[str] = (),
    cut: Collection[tuple[str, str]] = (),
    replaced: Mapping[tuple[str, str], str] = MappingProxyType({}),
    typed: Collection[tuple[str, str]] = (),
    unread: Mapping[str, Collection[str]] = MappingProxyType({}),
    absent: Collection[str] = (),
    rewrite: Rewrite | None = None,
) -> dict[str, ast.Module]:
    """Return {module: syntax tree} of what `entries`, pairs of a module and a name in it, need.

    Args:
        entries: where the program begins.
        complete: modules of which every definition stays: those that a registry collects by walking a folder.
        cut: (module, `function`, `Class` or `Class.method`) pairs, whose bodies are replaced by an error.
        replaced: such pairs → source text of the body that they get; of classes, the methods that they keep.
        typed: (module, class) pairs whose fields keep their annotations, because something reads them.
        unread: name of a class → its variables, and keywords of its constructor, that nothing reads.
        absent: modules to leave out although functions that stay import them.
        rewrite: called with the name and the statements of a module before they are followed; returns others.

    Raises:
        ConfigError: birdie has no such module or name, or no such function to cut.
    """
    bodies = {pair: _refusal(*pair) for pair in cut} | dict(replaced)
    shaker = _Shaker(bodies, frozenset(typed), {**_UNREAD, **unread}, absent, rewrite)
    for owner, entry in entries:
        shaker.require(Target(owner, entry))
    for name in complete:
        if (module := shaker.module(name)) is None:
            raise ConfigError(f"birdie has no module {name}; correct the name")
        for bound in [*module.bound]:
            if bound not in module.imports:
                shaker.use(module, bound)
    return shaker.finish()


class _Shaker:
    """Marks what stays, until nothing new is mentioned."""

    def __init__(
        self,
        bodies: dict[tuple[str, str], str],
        typed: frozenset[tuple[str, str]],
        unread: Mapping[str, Collection[str]],
        absent: Collection[str],
        rewrite: Rewrite | None,
    ) -> None:
        self.bodies, self.typed, self.unread, self.absent, self.rewrite = bodies, typed, unread, absent, rewrite
        self.modules: dict[str, _Module] = {}
        self.queue: list[tuple[_Module, ast.AST]] = []  # code that stays, whose names are still to be followed
        self.attributes: set[str] = set()
        self.methods: list[tuple[_Module, ast.ClassDef, ast.FunctionDef]] = []  # of classes that stay, not yet wanted
        self.seen: set[int] = set()  # ids of statements that stay
        self.kept_methods: set[int] = set()

    def module(self, name: str) -> _Module | None:
        """Return the module `name` of birdie, which now is one of the result, and its packages with it."""
        if name in self.modules:
            return self.modules[name]
        file = file_of(name)
        if file is None:
            return None
        if "." in name:
            self.module(name.rpartition(".")[0])
        typed = {kind for module, kind in self.typed if module == name}
        tree = ast.parse(file.read_bytes())
        mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        mentioned |= {text for text in texts if isinstance(text, str)}  # quoted annotations
        body = _without_types(tree.body, typed, self.unread)
        for (owner, path), text in self.bodies.items():
            if owner == name and not _replace(body, path, text):
                raise ConfigError(f"{name} has no {path} to leave out; correct the name")
        if self.rewrite is not None:
            body = self.rewrite(name, body)
        module = self.modules[name] = _Module(name, body)
        for statement in module.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                targets = dict(import_targets(statement))
                module.imports |= targets
                module.bound |= dict.fromkeys(targets, statement)
                for bound in targets.keys() - mentioned:  # imported for what importing does
                    if file.name != "__init__.py":
                        self.use(module, bound)
            else:
                module.bound |= dict.fromkeys(_bound_names(statement), statement)
        for statement in module.body:
            binds = isinstance(statement, ast.Import | ast.ImportFrom) or _bound_names(statement)
            if not binds and not self._mentions(module, statement):
                self._keep(module, statement)
        return module

    def require(self, target: Target) -> None:
        """Keep the object that `target` names, and the module that defines it."""
        if not target.internal or target.module in self.absent:
            return
        if target.name is None:
            self.module(target.module)
            return
        submodule = f"{target.module}.{target.name}"
        module = self.module(target.module)
        if module is not None and target.name in module.bound:
            self.use(module, target.name)
        elif self.module(submodule) is None:
            raise ConfigError(f"{target.module} has no {target.name}; correct the name")

    def finish(self) -> dict[str, ast.Module]:
        """Follow all mentions and return the trees."""
        while self.queue or self._methods_wanted():
            while self.queue:
                self._follow(*self.queue.pop())
        return {name: self._emit(module) for name, module in sorted(self.modules.items())}

    def use(self, module: _Module, name: str) -> None:
        """Keep what `name` is bound to in `module`."""
        if name in module.live or name not in module.bound:
            return
        module.live.add(name)
        if name in module.imports:
            self._import(module.bound[name], {name: module.imports[name]})
            return
        self._keep(module, module.bound[name])
        for statement in module.body:
            if not _bound_names(statement) and name in self._mentions(module, statement):
                self._keep(module, statement)

    def _import(self, statement: ast.stmt, targets: Mapping[str, Target]) -> None:
        """Keep what an import statement binds, and what it loads besides: `import a.b` binds a."""
        for target in targets.values():
            self.require(target)
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self.require(Target(alias.name, None))

    def _mentions(self, module: _Module, statement: ast.stmt) -> set[str]:
        """Return the definitions of `module` that a statement which defines nothing is about."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return set()
        about = statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
        names = {node.id for part in about for node in ast.walk(part) if isinstance(node, ast.Name)}
        return {name for name in names & module.bound.keys() if name not in module.imports}

    def _keep(self, module: _Module, statement: ast.stmt) -> None:
        if id(statement) in self.seen:
            return
        self.seen.add(id(statement))
        module.live.update(_bound_names(statement))
        if not isinstance(statement, ast.ClassDef):
            self.queue.append((module, statement))
            return
        foreign = list(self._ancestors(module, statement))
        for part in [*statement.decorator_list, *statement.bases, *statement.keywords]:
            self.queue.append((module, part))
        for part in statement.body:
            if isinstance(part, ast.FunctionDef):
                special = part.name.startswith("__") and part.name.endswith("__")
                if special or any(hasattr(base, part.name) for base in foreign):
                    self.kept_methods.add(id(part))
                    self.queue.append((module, part))
                else:
                    self.methods.append((module, statement, part))
            else:
                self.queue.append((module, part))

    def _foreign(self, module: _Module, node: ast.expr) -> type | None:
        """Return the class of another package that `node` names in `module`, or None."""
        target = _target(module, node)
        if target is None or target.internal:
            return None
        try:
            package = importlib.import_module(target.module)
            value = getattr(package, target.name) if target.name else package
        except (ImportError, AttributeError):
            return None
        return value if isinstance(value, type) else None

    def _ancestors(self, module: _Module, node: ast.ClassDef) -> Iterator[type]:
        """Yield the classes of other packages that a class of birdie inherits from, directly or not."""
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            foreign = self._foreign(module, expression)
            if foreign is not None:
                yield foreign
                continue
            owner, name = module, getattr(expression, "id", None)
            while name in owner.imports and (following := self.module(owner.imports[name].module)):
                owner, name = following, owner.imports[name].name
            definition = owner.bound.get(name or "")
            if isinstance(definition, ast.ClassDef):
                yield from self._ancestors(owner, definition)

    def _methods_wanted(self) -> bool:
        """Keep the methods that code which stays mentions; return False if there was none."""
        waiting, self.methods = self.methods, []
        for module, owner, method in waiting:
            if method.name in self.attributes:
                self.kept_methods.add(id(method))
                self.queue.append((module, method))
            else:
                self.methods.append((module, owner, method))
        return bool(self.queue)

    def _follow(self, module: _Module, tree: ast.AST) -> None:
        """Keep what `tree`, which stays, mentions."""
        imports: dict[str, Target] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                local = dict(import_targets(node))
                imports |= local
                self._import(node, local)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                self.attributes.add(node.value)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self.use(module, node.id)
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
                owner = _target(module, node.value, imports)
                if owner is not None and owner.internal:
                    self._require_member(owner, node.attr)

    def _require_member(self, owner: Target, name: str) -> None:
        path = owner.module if owner.name is None else f"{owner.module}.{owner.name}"
        if file_of(path) is not None and not name.startswith("__"):
            self.require(Target(path, name))

    def _emit(self, module: _Module) -> ast.Module:
        body: list[ast.stmt] = []
        for statement in module.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                pairs = zip(statement.names, dict(import_targets(statement)), strict=True)
                statement.names = [alias for alias, bound in pairs if bound in module.live]
                if statement.names:
                    body.append(statement)
            elif id(statement) in self.seen:
                if isinstance(statement, ast.ClassDef):
                    statement.body = [
                        part
                        for part in statement.body
                        if not isinstance(part, ast.FunctionDef) or id(part) in self.kept_methods
                    ] or [ast.Pass()]
                body.append(statement)
        return ast.fix_missing_locations(ast.Module(body, []))


def _refusal(module: str, name: str) -> str:
    message = f"{module}.{name} is not in this script; pack a recipe that uses it"
    return f"from birdie.errors import ConfigError\nraise ConfigError({message!r})"


def _replace(body: list[ast.stmt], name: str, text: str) -> bool:
    """Replace the body of `name`, a function, `Class.method` or class, by `text`; return False if there is none.

    A class is left with a constructor alone, or with the methods that `text` defines.
    """
    first, _, rest = name.partition(".")
    for statement in body:
        if rest and isinstance(statement, ast.ClassDef) and statement.name == first:
            return _replace(statement.body, rest, text)
        if isinstance(statement, ast.ClassDef) and statement.name == first:
            statement.bases, statement.keywords, statement.decorator_list = [], [], []
            body = ast.parse(text).body
            if isinstance(body[0], ast.FunctionDef):
                statement.body = body
            else:
                statement.body = ast.parse("def __init__(self, *_, **__): ...").body
                _replace(statement.body, "__init__", text)
            return True
        if isinstance(statement, ast.FunctionDef) and statement.name == first:
            statement.body = ast.parse(text, mode="exec").body
            statement.decorator_list = [mark for mark in statement.decorator_list if ast.unparse(mark) in _PLAIN]
            return True
    return False


def _target(module: _Module, node: ast.expr, imports: Mapping[str, Target] | None = None) -> Target | None:
    """Return what an imported name, or a dotted path that begins with one, refers to; None for all else."""
    if isinstance(node, ast.Name):
        return (imports or {}).get(node.id) or module.imports.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _target(module, node.value, imports)
        if base is None:
            return None
        path = base.module if base.name is None else f"{base.module}.{base.name}"
        return Target(path, node.attr)
    return None


def _bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines; none for a function that a decorator registers with another."""
    if isinstance(statement, ast.FunctionDef) and statement.name == "_":
        return []
    if isinstance(statement, ast.Try | ast.If):
        names = [name for part in [*statement.body, *statement.orelse] for name in defined_names(part)]
        for handler in getattr(statement, "handlers", []):
            names += [name for part in handler.body for name in defined_names(part)]
        imports = [part for part in ast.walk(statement) if isinstance(part, ast.Import | ast.ImportFrom)]
        return names + [name for part in imports for name, _ in import_targets(part)]
    return defined_names(statement)


def _without_types(
    body: list[ast.stmt], typed: Collection[str], unread: Mapping[str, Collection[str]]
) -> list[ast.stmt]:
    """Return statements without docstrings, overloads, imports for types, and annotations that nothing reads."""
    tree = _Types(typed, unread).visit(ast.Module(body, []))
    return tree.body  # type: ignore[no-any-return]


class _Types(ast.NodeTransformer):
    """Removes what only people and type checkers read."""

    def __init__(self, typed: Collection[str], unread: Mapping[str, Collection[str]]) -> None:
        self.typed, self.unread = typed, unread
        self.kind: ast.ClassDef | None = None  # whose body is visited

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # type: ignore[return-value]

    def visit_If(self, node: ast.If) -> list[ast.stmt] | ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return [part for part in map(self.visit, node.orelse) if part is not None]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        if ast.unparse(node.targets[0]) == "__all__":
            return None
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if self.kind is not None:
            if self.kind.name not in self.typed and "ClassVar" not in ast.unparse(node.annotation):
                node.annotation = ast.Name("int", ast.Load())  # a field needs one, whichever
            return self.generic_visit(node)  # type: ignore[return-value]
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        unread = self.unread.get(ast.unparse(node.func), ())
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in unread]
        if ast.unparse(node.func) == "Spec":
            node.args[1] = ast.Constant("")  # its description
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self.kind = self.kind, node
        unread = self.unread.get(node.name, ())
        node.body = [
            part for part in node.body if not (isinstance(part, ast.AnnAssign) and ast.unparse(part.target) in unread)
        ]
        self.generic_visit(node)
        self.kind = outer
        node.body = node.body or [ast.Pass()]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        marks = [ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list]
        if "overload" in marks:
            return None
        if all(mark.rpartition(".")[2] in _PLAIN for mark in marks):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        outer, self.kind = self.kind, None
        self.generic_visit(node)
        self.kind = outer
        node.body = node.body or [ast.Pass()]
        return node
