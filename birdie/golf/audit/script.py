"""A parsed script in flat tables: scopes, calls, and the expressions that may be computed from validation tokens.

    names of validation files, streams behind a printed val_bpb ──► names ──assignments, arguments, loops──► more names

Names are followed, the order of statements is not: `x = tokens; x = 0` makes a validation name of x. That is enough to
point at lines worth reading, and too little to accuse anybody. Variables may have any name; what counts is which files
are read, which library functions are called, and what is printed as the score.
"""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

from birdie.golf.audit.deadline import Deadline

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
VALIDATION_FILE = re.compile(r"(?:^|[/_\-.*])(?:val|valid|validation)(?:[_\-.*/]|$)", re.IGNORECASE)
TRAINING_FILE = re.compile(r"(?:^|[/_\-.*])train(?:ing)?(?:[_\-.*/]|$)", re.IGNORECASE)
MAX_PASSES = 40
"""Rounds of following names; scripts of records need five to ten."""

_FILE = re.compile(r"[/*]|\.(?:bin|npy|npz|pt|txt|json|jsonl|dat)\b")
_SCORE_LABEL = re.compile(r"(?:val_?loss|bpb|bits)\W*$", re.IGNORECASE)
_WITHOUT_TOKENS = {
    *("len", "numel", "size", "dim", "range", "isinstance", "type", "id", "manual_seed"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
}
"""Calls whose result has no token of their arguments."""
_SHAPES = {"shape", "dtype", "device", "ndim", "nbytes", "itemsize"}
_GROWS = {"append", "appendleft", "extend", "add", "insert", "put", "push", "update", "copy_"}
_OF_ALL_TENSORS = {"data", "grad", "weight", "bias"}
"""Attributes of which one object's says nothing about another's."""
_NOT_NODES = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Key = tuple[ast.AST | None, str]
"""A variable: the scope that binds it and its name; an attribute has no scope."""


def names_file(text: object, split: re.Pattern[str]) -> bool:
    """Return whether a constant is a path or a pattern for files of a split."""
    return isinstance(text, str) and len(text) < 4096 and bool(_FILE.search(text) and split.search(text))


class Script:
    """Tables of one syntax tree.

    Attributes:
        nodes: all statements and expressions, parents before children.
        parent, scope: of each node; a scope is a function or the module.
        functions: by name, methods included; a class has its `__init__`.
        calls: of each scope, nested functions excluded.
        values: expressions that a variable is assigned, or that are added to it.
        names: variables that may be computed from validation tokens.
        holds: expressions that may be.
    """

    def __init__(self, tree: ast.Module, deadline: Deadline) -> None:
        self.tree = tree
        self.nodes: list[ast.AST] = [tree]
        self.parent: dict[ast.AST, ast.AST] = {}
        self.scope: dict[ast.AST, ast.AST] = {tree: tree}
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.calls: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        self.values: dict[Key, list[ast.expr]] = defaultdict(list)
        self.holds: set[ast.AST] = set()
        self._bound: dict[ast.AST, set[str]] = defaultdict(set)
        self._modules: dict[str, str] = {}
        self._sources: set[ast.AST] = set()
        for node in self.nodes:  # the list grows while it is read
            inner = node if isinstance(node, FUNCTIONS) else self.scope[node]
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, _NOT_NODES):
                    self.parent[child], self.scope[child] = node, inner
                    self.nodes.append(child)
        for node in self.nodes:
            self._define(node)
        for node in self.nodes:
            for target, value in _assignments(node):
                for key in self.keys(target):
                    self.values[key].append(value)
        self.names = self._scored_streams()
        self._follow(deadline)

    def _define(self, node: ast.AST) -> None:
        """Enter the names that `node` binds, and the call that it is."""
        scope = self.scope[node]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._bound[scope].add(node.id)
        elif isinstance(node, ast.arg):
            self._bound[scope].add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[node.name].append(node)
            if node.name == "__init__" and isinstance(holder := self.parent[node], ast.ClassDef):
                self.functions[holder.name].append(node)
        elif isinstance(node, ast.Import):
            self._modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            self._modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            self.calls[scope].append(node)

    def full_name(self, function: ast.expr) -> str:
        """Return the name of what is called, import aliases resolved: "torch.nn.functional.cross_entropy"."""
        parts: list[str] = []
        while isinstance(function, ast.Attribute):
            parts.append(function.attr)
            function = function.value
        if isinstance(function, ast.Name):
            parts.append(self._modules.get(function.id, function.id))
        return ".".join(reversed(parts))

    def called(self, call: ast.Call) -> str:
        """Return the last part of the name of what is called."""
        return self.full_name(call.func).rpartition(".")[2]

    def callees(self, call: ast.Call) -> list[Function]:
        """Return the script's own functions that a call may mean, by their name."""
        return self.functions.get(getattr(call.func, "id", getattr(call.func, "attr", "")), [])

    def reached(self, scope: ast.AST) -> set[ast.AST]:
        """Return `scope` and all functions of the script that it may call, directly or through others."""
        seen, queue = {scope}, [scope]
        while queue:
            new = {callee for call in self.calls[queue.pop()] for callee in self.callees(call)} - seen
            seen |= new
            queue += new
        return seen

    def key(self, node: ast.AST) -> Key | None:
        """Return the variable that a name stands for, or an attribute of a name."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr not in _OF_ALL_TENSORS:
            return None, node.attr
        if not isinstance(node, ast.Name):
            return None
        scope = self.scope[node]
        while scope is not self.tree and node.id not in self._bound[scope]:
            scope = self.scope[scope]
        return scope, node.id

    def keys(self, target: ast.expr) -> Iterator[Key]:
        """Yield the variables that assigning to `target` changes."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                yield from self.keys(part)
        elif isinstance(target, ast.Subscript | ast.Starred):
            yield from self.keys(target.value)
        elif (key := self.key(target)) is not None:
            yield key
            if isinstance(self.parent.get(self.parent[target]), ast.ClassDef):
                yield None, key[1]  # a field of a class is read as an attribute

    def passed(self, call: ast.Call) -> Iterator[tuple[Key, ast.expr]]:
        """Yield (parameter, argument) of a call of the script's own functions.

        A function that is passed on, as to `map` or `submit`, may get any of the other arguments.
        """
        for function in self.callees(call):
            names = parameters(function)
            method = isinstance(self.parent[function], ast.ClassDef) and bool(names)
            yield from (((function, name), value) for name, value in zip(names[method:], call.args, strict=False))
            yield from (((function, keyword.arg), keyword.value) for keyword in call.keywords if keyword.arg)
        for passed in call.args:
            for function in self.functions.get(passed.id, ()) if isinstance(passed, ast.Name) else ():
                for name in parameters(function):
                    yield from (((function, name), value) for value in call.args if value is not passed)

    def _follow(self, deadline: Deadline) -> None:
        count = -1
        for _ in range(MAX_PASSES):
            deadline.check()
            self.holds = set()
            for node in reversed(self.nodes):  # children before parents
                if isinstance(node, ast.expr | ast.keyword | ast.comprehension) and self._is_held(node):
                    self.holds.add(node)
            for node in self.nodes:
                for target, value in _assignments(node):
                    if value in self.holds:
                        self.names.update(self.keys(target))
                if isinstance(node, ast.Call):
                    self.names.update(parameter for parameter, value in self.passed(node) if value in self.holds)
                elif isinstance(node, ast.Return | ast.Yield) and node.value in self.holds:
                    function = self.scope[node]
                    if not any((function, name) in self.names for name in parameters(function)):
                        self._sources.add(function)  # it gives validation tokens whatever it is given
            if count == (count := len(self.names) + len(self._sources)):
                return

    def _is_held(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return names_file(node.value, VALIDATION_FILE)
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and self.key(node) in self.names
        if isinstance(node, ast.Attribute):
            return (node.value in self.holds and node.attr not in _SHAPES) or self.key(node) in self.names
        if isinstance(node, ast.Call):
            if self.called(node) in _WITHOUT_TOKENS:
                return False
            if not self._sources.isdisjoint(self.callees(node)):
                return True
        return any(child in self.holds for child in ast.iter_child_nodes(node))

    def _scored_streams(self) -> set[Key]:
        """Return the streams that a printed score is made of: those that are cut or measured on the way to it."""
        streams = self._streams()
        scored: set[Key] = {
            (function, parameters(function)[0])
            for function in self.functions.get("score", ())  # what probes call
            if parameters(function) and self.scope[function] is self.tree
        }
        queue: list[ast.AST] = [value for node in self.nodes for value in _labeled(node)]
        seen: set[ast.AST] = set()
        while queue:
            node = queue.pop()
            key = self.key(node)
            if node in seen or not isinstance(node, ast.expr | ast.keyword | ast.comprehension):
                continue
            seen.add(node)
            if key is not None and key in streams:
                scored.add(key)
            elif key is not None:
                queue += self.values[key]
            elif isinstance(node, ast.Call):
                # of a function that is given streams, these; a model that is called is none
                cut = [value for parameter, value in self.passed(node) if parameter in streams]
                queue += cut or [*node.args, *node.keywords]
                queue += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                bodies = (part for callee in self.callees(node) for part in ast.walk(callee))
                queue += [part.value for part in bodies if isinstance(part, ast.Return) and part.value]
            else:
                queue += ast.iter_child_nodes(node)
        return scored

    def _streams(self) -> set[Key | None]:
        """Return the variables that are cut or measured, as tokens are and models are not."""
        streams: set[Key | None] = set()
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        for node in self.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                streams.add(self.key(node.value))
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("numel", "split"):
                streams.add(self.key(call.func.value))
            elif self.called(call) == "len" and call.args:
                streams.add(self.key(call.args[0]))
        pairs = [pair for call in calls for pair in self.passed(call)]
        for _ in range(MAX_PASSES):
            new = {self.key(value) for parameter, value in pairs if parameter in streams} - streams
            streams |= new
            if not new:
                break
        return streams - {None}


def parameters(function: ast.AST) -> list[str]:
    """Return the names of a function's parameters; a module has none."""
    if not isinstance(function, FUNCTIONS):
        return []
    arguments = function.args
    rest = [parameter for parameter in (arguments.vararg, arguments.kwarg) if parameter is not None]
    return [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest)]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of an assignment, a loop, a `with` or an `append`; of tuples and `zip` part by part."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _looped(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS:
        yield from ((node.func.value, value) for value in node.args)


def _looped(target: ast.expr, values: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    name = getattr(values.func, "id", "") if isinstance(values, ast.Call) and isinstance(target, ast.Tuple) else ""
    if name == "enumerate":
        yield from _looped(target.elts[-1], values.args[0])  # type: ignore[attr-defined]
    elif name == "zip":
        for part, value in zip(target.elts, values.args, strict=False):  # type: ignore[attr-defined]
            yield from _looped(part, value)
    else:
        yield target, values


def _labeled(node: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that are printed after `val_bpb`, `val_loss` or the like."""
    parts = node.values if isinstance(node, ast.JoinedStr) else node.args if isinstance(node, ast.Call) else []
    for label, value in itertools.pairwise(parts):
        if isinstance(label, ast.Constant) and isinstance(label.value, str) and _SCORE_LABEL.search(label.value[-80:]):
            yield value.value if isinstance(value, ast.FormattedValue) else value
