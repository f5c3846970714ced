"""An abstract run of a script: its statements in order, loops twice, calls of its own functions followed.

Nothing is executed. Each value is what `values` keeps of it: which validation tokens it was computed from
and what the objects behind it had learned from validation by then. Loops run two passes, whose parts of the tokens
are told apart, so "score the chunk, then learn from it" and "learn from the chunk, then score it" differ; branches run
both, one after the other, and those behind a switch that is off by default are marked so.
"""

import ast
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

from birdie.golf.audit import names
from birdie.golf.audit.loops import Loops
from birdie.golf.audit.memory import is_module
from birdie.golf.audit.patterns import reserves
from birdie.golf.audit.places import WHOLE, text, unknown
from birdie.golf.audit.values import NOTHING, UNKNOWN, Object, Scope, Value, join, known

DEPTH = 14
"""Calls of the script's own functions inside one another that are followed."""
PLAIN, TAINTED = 4, 60
"""Calls of one function that are followed: with arguments that have nothing to do with validation, and with others."""


class Flow(Loops):
    """Runs a module: its body, then every function that nothing has called, as if it were an entry point."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__()
        self.entered: set[ast.AST] = set()
        self.results: dict[tuple[ast.AST, frozenset[int]], list[Value]] = {}
        self.module = Scope(block=tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self.imported |= {each.asname or each.name: each.name for each in node.names}
            elif isinstance(node, ast.Import):
                self.imported |= {each.asname: each.name.split(".")[-1] for each in node.names if each.asname}
        self.tree = tree

    def run(self) -> None:
        """Everything there is.

        Raises:
            TooLargeError: the script is too large.
        """
        try:
            self._all()
        finally:  # what waited when the scan gave up
            for waiting in (self.exported, self.late, self.reread):
                self.doubt(waiting)

    def _all(self) -> None:
        with contextlib.suppress(RecursionError):  # an expression that is too deep says nothing of time
            self.reserves = reserves(self.tree)
        self.body(self.tree.body, self.module)
        self._close()
        runs = bool(self.entered) or any(isinstance(each, ast.If) and _guards(each) for each in self.tree.body)
        for node in self._unentered():
            self._alone(node, runs)
            self._close()

    def _close(self) -> None:
        """What waited for something that did not come."""
        self.found.update(self.late, self.reread)
        self.late.clear()
        self.reread.clear()
        self.doubt(self.exported)

    def _unentered(self) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node not in self.entered:
                yield node, None
            elif isinstance(node, ast.ClassDef) and not is_module(node):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part not in self.entered:
                        yield part, node

    def _alone(self, entry: tuple[ast.FunctionDef, ast.ClassDef | None], runs: bool) -> None:
        """A function that nobody in the script calls: it is called from outside, with what its parameters say.

        In a script that `runs` by itself it is perhaps never called; `score(tokens)` is what the probes call.
        """
        node, cls = entry
        if node in self.entered:
            return
        own = None
        if cls is not None:
            self.heap.append(Object(cls=cls, scope=self.module, made=True))
            own = Value(refs=frozenset((len(self.heap) - 1,)))
        self.restored, self.clock, self.hooked, self.pending = False, 0, 0, NOTHING
        self.noted.clear()
        protocol = node.name == "score" and cls is None and len(node.args.args) >= 1
        given: list[Value] = []
        if protocol:
            given = [replace(self.new(), val=frozenset((WHOLE,)))]
        asleep = runs and not protocol
        self.dormant += asleep
        result = self.inline(Object(code=node, scope=self.module, self=own), given, {})
        if protocol:
            self.final(result.plus("loss"))
        self.dormant -= asleep

    # Calls of the script's own functions.

    def inline(self, function: Object, args: list[Value], kwargs: dict[str, Value]) -> Value:
        code = function.code
        assert code is not None
        name = "lambda" if isinstance(code, ast.Lambda) else code.name
        if len(self.calls) >= DEPTH or self.calls.count(name) >= 2 + (name in ("lambda", "__init__", "__call__")) * 9:
            return replace(join((*args, *kwargs.values())), refs=frozenset())
        own = function.self is not None and self.taught
        given = (*args, *kwargs.values())
        plain = not own and not any(each.val or each.lessons or each.kinds or each.marks for each in given)
        before = self.results.setdefault((code, self._holder(function)), [])
        if len(before) >= (PLAIN if plain else TAINTED):
            return join((*before[-1:], *args, *kwargs.values())) if not plain else before[-1]
        self.entered.add(code)
        block = [] if isinstance(code, ast.Lambda) else code.body
        scope = Scope(above=function.scope, block=block, depth=len(self.stack))
        self._bind(code.args, ([function.self] if function.self else []) + args, kwargs, scope)
        if isinstance(code, ast.Lambda):
            self.calls.append(name)
            result = self.ev(code.body, scope)
            self.calls.pop()
            before.append(result)
            return result
        self.calls.append(name)
        judges = bool(names.SCORES.search(name))
        warms = 2 if names.WARMS.search(name) and not judges else self.warming[-1]
        self.warming.append(0 if judges and warms == 1 else warms)  # a loop that warms up may validate
        self.body(code.body, scope)
        self.warming.pop()
        result = functools.reduce(self._either, scope.returned) if scope.returned else NOTHING
        if result.items and any(isinstance(each, ast.Yield) for each in ast.walk(code)):
            result = result.plus("many")
        path = any(each.val and each.has("text") for each in (*args, *kwargs.values()))
        if not result.val and (names.loads_validation(name) or (path and names.LOADS.search(name))):
            result = replace(result, val=frozenset((WHOLE,)), items=None)
        if names.SCORES.search(name):
            self.final(result)
        self.calls.pop()
        before.append(result)
        return result

    def _holder(self, function: Object) -> frozenset[int]:
        """The object a method is bound to, if that holds validation tokens: another's results are not its own."""
        refs = function.self.refs if function.self is not None else frozenset()
        held = (value for ref in refs for value in self.heap[ref].attrs.values())
        return refs if any(value.val for value in held) else frozenset()

    def _bind(self, args: ast.arguments, given: list[Value], kwargs: dict[str, Value], scope: Scope) -> None:
        params = [*args.posonlyargs, *args.args]
        free = dict(zip([p.arg for p in params], given, strict=False))
        if args.vararg:
            rest = tuple(given[len(params) :])
            scope.names[args.vararg.arg] = replace(join(rest), items=rest or None)
        free |= {name: value for name, value in kwargs.items() if name != "**"}
        defaults = dict(zip([p.arg for p in params][::-1], args.defaults[::-1], strict=False))
        defaults |= {p.arg: d for p, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
        for param in (*params, *args.kwonlyargs):
            value = free.get(param.arg)
            if value is None:
                default = defaults.get(param.arg)
                value = self.ev(default, scope) if default is not None else self.new()
            value = self._named(param.arg, self._numbered(param.arg, value))
            scope.names[param.arg] = self._as_target(param.arg, value)
        if args.kwarg:
            scope.names[args.kwarg.arg] = join(kwargs.values())

    def instance(self, cls: ast.ClassDef, scope: Scope, args: list[Value], kwargs: dict[str, Value]) -> Value:
        self.heap.append(Object(cls=cls, scope=scope, made=True))
        own = Value(refs=frozenset((len(self.heap) - 1,)))
        made = self.heap[-1]
        holder = scope.find(cls.name)
        for ref in holder.refs if holder else ():
            made.attrs |= self.heap[ref].attrs
        start = self._method(len(self.heap) - 1, "__init__")
        if start is not None:
            for ref in start.refs:
                self.inline(self.heap[ref], args, kwargs)
        else:
            fields = [p.target.id for p in cls.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)]
            made.attrs |= dict(zip(fields, args, strict=False)) | kwargs
            if not fields:
                made.attrs["*"] = join((*args, *kwargs.values()))
        return own

    # Binding.

    def _as_target(self, name: str, value: Value) -> Value:
        plain = value.val and not value.has("loss") and not value.has("pred")
        return value.plus("target") if plain and name in names.TARGETS else value

    def _numbered(self, name: str, value: Value) -> Value:
        """`value` with a number, if only one without a name."""
        return value if value.number is not None else replace(value, form=self.opaque(name))

    def take(self, target: ast.expr, value: Value, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            if names.FINAL.search(target.id):
                self.final(value)
            if value.has("elapsed") and "train" in target.id and not known(value):
                self.clock = target.lineno
                self.doubt(self.late)  # it was running, it seems
            value = self._numbered(target.id, value)
            scope.bind(target.id, self._as_target(target.id, self._named(target.id, value)))
        elif isinstance(target, ast.Tuple | ast.List):
            for place, each in enumerate(target.elts):
                exact = value.items is not None and len(value.items) == len(target.elts)
                part = value.items[place] if exact and value.items else self._member(value, place)
                self.take(each.value if isinstance(each, ast.Starred) else each, part, scope)
        elif isinstance(target, ast.Attribute):
            self._set(target, value, scope)
        elif isinstance(target, ast.Subscript):
            self._store(target, value, scope)

    def _member(self, value: Value, place: int) -> Value:
        form = unknown(f"{text(value.form)}[{place}]") if value.form is not None else None
        return replace(value, items=None, form=form)

    def _set(self, target: ast.Attribute, value: Value, scope: Scope) -> None:
        if target.attr == "grad":
            self.pending = NOTHING if value.const is None else join((self.pending, value))
            return
        if names.FINAL.search(target.attr):
            self.final(value)
        base = self.ev(target.value, scope)
        if target.attr == "data" and value.lessons:
            self.restore(base.refs, value)
            return
        for ref in base.refs:
            self.heap[ref].attrs[target.attr] = self._named(target.attr, self._numbered(target.attr, value))

    def _store(self, target: ast.Subscript, value: Value, scope: Scope) -> None:
        index, value = self.ev(target.slice, scope), self.settled(value, target)
        said = target.slice
        if isinstance(said, ast.Constant) and names.FINAL.search(str(said.value)):
            self.final(value)
        if index.has("gate"):
            value = self._gated(target.value, value, scope, target)
        elif index.val and not value.has("loss"):
            place = self.place(target.value, scope)
            if not place.val:
                self.teach(place.refs, index.val | value.val, "table", target)
                return
        self.put(target.value, value.minus("target", "gathered", "picked"), scope)

    def put(self, node: ast.expr, value: Value, scope: Scope) -> None:
        if isinstance(node, ast.Name):
            old = scope.find(node.id)
            scope.bind(node.id, join((old, value)) if old else value)
        elif isinstance(node, ast.Attribute):
            for ref in self.ev(node.value, scope).refs:
                old = self.heap[ref].attrs.get(node.attr)
                self.heap[ref].attrs[node.attr] = join((old, value)) if old else value
        elif isinstance(node, ast.Subscript | ast.Starred):
            self.put(node.value, value, scope)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            self.put(node.func.value, value, scope)

    def place(self, node: ast.expr, scope: Scope) -> Value:
        value = self.ev(node, scope)
        if value.refs:
            return value
        made = replace(value, refs=self.new().refs, items=None, const=UNKNOWN)
        self.put(node, made, scope)
        return made

    # Statements; what they return is whether what follows can not be reached.

    def _do_expr(self, node: ast.Expr, scope: Scope) -> None:
        self.ev(node.value, scope)

    def _do_assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self.drawn(node.value, self.ev(node.value, scope), scope)
        for target in node.targets:
            if self._updates(target, node.value):
                old = self.ev(target, scope)
                if old.refs and self._learned(target, old, value, node, scope):
                    continue
            self.take(target, value, scope)

    def _updates(self, target: ast.expr, value: ast.expr) -> bool:
        """Whether an assignment is `a = a ± …`, or an average of that kind."""
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add | ast.Sub):
            return False
        said = ast.unparse(target)
        return any(ast.unparse(each) == said for each in ast.walk(value) if isinstance(each, ast.expr))

    def _learned(self, target: ast.expr, old: Value, value: Value, node: ast.stmt, scope: Scope) -> bool:
        """Whether what `target` names has learned from validation by being updated with `value`; it is noted."""
        new = {lesson.region for lesson in value.lessons - old.lessons}  # of a gradient or a count that has learned
        if (
            old.val
            or old.has("loss")
            or value.has("loss")
            or not (value.val or new)
            or value.has("text")
            or value.issues
        ):
            return False
        place = self.place(target, scope)
        self.teach(place.refs, value.val or new, "step" if value.has("grad") else "table", node)
        return True

    def _do_annassign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self.take(node.target, self.ev(node.value, scope), scope)

    def _do_augassign(self, node: ast.AugAssign, scope: Scope) -> None:
        old, value = self.ev(node.target, scope), self.settled(self.ev(node.value, scope), node)
        if isinstance(node.target, ast.Subscript):
            index = self.ev(node.target.slice, scope)
            if index.has("gate") and old.val:
                self.put(node.target.value, self._gated(node.target.value, value, scope, node), scope)
                return
            if index.val and not value.has("loss"):
                place = self.place(node.target.value, scope)
                self.teach(place.refs, index.val | value.val, "table", node)
                return
            if value.has("loss"):
                self.put(node.target.value, value, scope)
                return
        if value.has("loss") and value.has("bits"):  # added up, it is a score
            self.found |= value.issues
        adds = isinstance(node.op, ast.Add | ast.Sub)
        if adds and old.refs and self._learned(node.target, old, value, node, scope):
            return
        result = self.operation(node, old, value)
        if adds and old.refs and value.has("loss"):
            self.add(old.refs, result)
        self.take(node.target, result, scope)

    def _gated(self, name: ast.expr, value: Value, scope: Scope, node: ast.stmt | ast.expr) -> Value:
        return value if self.normalised(name, scope, node) else self.gate(value, node)

    def _do_with(self, node: ast.With, scope: Scope) -> bool:
        for item in node.items:
            value = self.ev(item.context_expr, scope)
            if item.optional_vars is not None:
                self.take(item.optional_vars, value, scope)
        return self.body(node.body, scope)

    def _do_try(self, node: ast.Try, scope: Scope) -> bool:
        ended = self.body(node.body, scope)
        for handler in node.handlers:
            self.body(handler.body, scope)
        self.body(node.orelse, scope)
        self.body(node.finalbody, scope)
        return ended and not node.handlers

    def _do_functiondef(self, node: ast.FunctionDef, scope: Scope) -> None:
        self.heap.append(Object(code=node, scope=scope))
        scope.bind(node.name, Value(refs=frozenset((len(self.heap) - 1,))))

    def _do_classdef(self, node: ast.ClassDef, scope: Scope) -> None:
        self.heap.append(Object(cls=node, scope=scope))
        ref = len(self.heap) - 1
        inner = Scope(above=scope)
        self.body([each for each in node.body if not isinstance(each, ast.FunctionDef)], inner)
        self.heap[ref].attrs |= inner.names
        scope.bind(node.name, Value(refs=frozenset((ref,))))

    def _do_return(self, node: ast.Return, scope: Scope) -> bool:
        scope.returned.append(self.ev(node.value, scope))
        return True

    def _do_raise(self, node: ast.Raise, scope: Scope) -> bool:
        return True

    def _do_continue(self, node: ast.Continue, scope: Scope) -> bool:
        return True

    _do_break = _do_continue

    def _do_global(self, node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
        scope.shared |= set(node.names)

    _do_nonlocal = _do_global


def _guards(node: ast.If) -> bool:
    return "__name__" in ast.unparse(node.test)
