"""What the scan makes of expressions: joins of what they are made of, and the few shapes that mean more."""

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from birdie.golf.audit import names
from birdie.golf.audit.choices import Call
from birdie.golf.audit.effects import Effects
from birdie.golf.audit.memory import is_module
from birdie.golf.audit.places import WHOLE, Form, add, multiply, number, text, unknown
from birdie.golf.audit.rules import NORMALISED
from birdie.golf.audit.values import NOTHING, UNKNOWN, Object, Scope, Value, join, known, marked, placed

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class Expressions(Effects):
    """Values of expressions.

    Attributes:
        imported: what names were called where they were imported from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.imported: dict[str, str] = {}

    def inline(self, function: Object, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a function of the script returns."""
        raise NotImplementedError

    def instance(self, cls: ast.ClassDef, scope: Scope, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """A new object of a class of the script."""
        raise NotImplementedError

    def ev(self, node: ast.expr | None, scope: Scope) -> Value:
        """What is known of the value of `node`."""
        if node is None:
            return NOTHING
        self.spend()
        method = getattr(self, f"_ev_{type(node).__name__.lower()}", None)
        value: Value = method(node, scope) if method else self._any(node, scope)
        return value

    def _any(self, node: ast.AST, scope: Scope) -> Value:
        return join([self.ev(each, scope) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)])

    def _ev_constant(self, node: ast.Constant, scope: Scope) -> Value:
        if isinstance(node.value, str) and names.FILE.search(node.value):
            if names.VALIDATION_FILE.search(node.value):
                return Value(val=frozenset((WHOLE,)), kinds=frozenset(("text",)), const=node.value)
            if names.TRAINING_FILE.search(node.value):
                return Value(kinds=frozenset(("train", "text")), const=node.value)
        return Value(const=node.value)

    def _ev_joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Value:
        said = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        parts = [self.ev(part.value, scope) for part in node.values if isinstance(part, ast.FormattedValue)]
        if names.FINAL.search(said):
            self.final(join(parts))
        return join((self._ev_constant(ast.Constant(said), scope), *(each for each in parts if each.has("text"))))

    def _ev_name(self, node: ast.Name, scope: Scope) -> Value:
        found = scope.find(node.id)
        if found is None:
            return self._named(node.id, NOTHING)
        return self.read(found)

    def _named(self, name: str, value: Value) -> Value:
        """`value` under `name`, which may tell that it is validation or training data."""
        if name.lower() in names.RANKS and not known(value) and not value.val:
            value = replace(value, form=number(names.RANKS[name.lower()]))
        if value.val or isinstance(value.const, int | float):
            return value
        if names.validation(name):
            return replace(value, val=frozenset((WHOLE,)))
        return value.plus("train") if names.TRAINING.match(name) else value

    def _ev_attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        return self.attribute(node, self.ev(node.value, scope))

    def attribute(self, node: ast.Attribute, base: Value) -> Value:
        """An attribute of `base`."""
        if node.attr in names.SHAPES:
            return Value(items=(Value(form=self.length(base)),)) if node.attr == "shape" and base.val else NOTHING
        if node.attr == "grad":
            return replace(self.pending, refs=frozenset(), lessons=frozenset(), kinds=frozenset(("grad",)))
        held = [self.heap[ref].attrs[node.attr] for ref in sorted(base.refs) if node.attr in self.heap[ref].attrs]
        if held:
            value = join(held) if len(held) > 1 else held[0]
            return self.read(self._named(node.attr, marked(value, base.marks)))
        bound = [each for ref in sorted(base.refs) if (each := self._method(ref, node.attr)) is not None]
        if bound:
            return Value(refs=frozenset(ref for each in bound for ref in each.refs))
        if node.attr in ("loss", "nll") and base.has("pred"):
            return self.scored(base, base, node)
        if base.has("options") and node.attr in self.options:
            return self._named(node.attr, self.options[node.attr])
        form = f"{text(base.form)}.{node.attr}" if base.form is not None else ast.unparse(node)
        plain = replace(base, items=None, const=UNKNOWN, form=unknown(form))
        return self._named(node.attr, plain)

    def _method(self, ref: int, name: str) -> Value | None:
        """A method bound to an object of the script, or a function of a class."""
        each = self.heap[ref]
        if each.cls is None:
            return None
        found = self._definition(each.cls, name, each.scope)
        if found is None:
            return None
        plain = any(ast.unparse(d).endswith("staticmethod") for d in found.decorator_list)
        own = Value(refs=frozenset((ref,)))
        bound = None if plain or not each.made else own
        self.heap.append(Object(code=found, scope=each.scope, self=bound))
        made = Value(refs=frozenset((len(self.heap) - 1,)))
        is_property = any(ast.unparse(d).endswith("property") for d in found.decorator_list)
        return self.inline(self.heap[-1], [], {}) if is_property and each.made else made

    def _definition(self, cls: ast.ClassDef, name: str, scope: Scope | None) -> ast.FunctionDef | None:
        for part in cls.body:
            if isinstance(part, ast.FunctionDef) and part.name == name:
                return part
        for base in cls.bases:
            above = scope.find(base.id) if isinstance(base, ast.Name) and scope else None
            for ref in above.refs if above else ():
                inner = self.heap[ref].cls
                if inner is not None and inner is not cls:
                    return self._definition(inner, name, self.heap[ref].scope)
        return None

    def _ev_subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        base, index = self.ev(node.value, scope), self.ev(node.slice, scope)
        which = index.const if isinstance(index.const, int) and not base.has("many") else None
        if base.items and which is not None and -len(base.items) <= which < len(base.items):
            return base.items[which]
        named = base.form is not None and index.number is not None
        form = unknown(f"{text(base.form or ())}[{text(index.number or ())}]") if named else None
        value = marked(replace(base, items=None, const=UNKNOWN, form=form), index.marks)
        if isinstance(node.slice, ast.Slice) and not base.val and ast.unparse(node.slice) not in (":", "1:", ":-1"):
            value = replace(value.plus("part"), form=self.opaque("part"))
        if (
            base.val
            and not base.lessons
            and not base.kinds & {"loss", "pred", "text"}
            and not isinstance(index.const, str)
        ):
            value = self._part(value, node.slice, index)
        if base.val and base.has("loss") and not isinstance(index.const, int | str):
            value = self.masked(value)
        if base.val and not base.has("loss") and _ahead(node.slice):
            value = value.plus("target")
        data = base.val and not base.lessons and not base.has("loss")
        if (not index.val and not index.lessons) or (data and not index.has("target")):  # where a document begins, say
            return replace(value, marks=value.marks | index.marks)
        result = self.picked(value, index, node)
        if index.has("hashed"):
            evidence = (
                "the table's key is a hash of the context and of the token itself: the probability of that one token "
                "alone is made, none over the vocabulary"
            )
            result = replace(result, issues=result.issues | {self.broken(NORMALISED, node, evidence)})
        return result

    def _part(self, value: Value, node: ast.expr, index: Value) -> Value:
        """The part of `value` at `index`, which `node` says."""
        if isinstance(node, ast.Tuple) and index.items:
            pairs = zip(node.elts, index.items, strict=True)
            shown = [(each, inner) for each, inner in pairs if not _everything(each)]
            if len(shown) < 2:
                return self._part(value, *shown[0]) if shown else value
        if isinstance(node, ast.Slice) and index.items:
            lower, upper = (
                self._number_of(inner) if each else None
                for each, inner in zip((node.lower, node.upper), index.items, strict=True)
            )
            return placed(value, lambda region: region.slice(lower, upper))
        at = self._number_of(index)
        return placed(value, lambda region: region.item(at))

    def _number_of(self, value: Value) -> Form:
        return self.opaque("index") if value.number is None else value.number

    def _ev_slice(self, node: ast.Slice, scope: Scope) -> Value:
        parts = [self.ev(each, scope) for each in (node.lower, node.upper)]
        return replace(join(parts), kinds=frozenset(), items=tuple(parts))

    def _ev_binop(self, node: ast.BinOp, scope: Scope) -> Value:
        left, right = self.ev(node.left, scope), self.ev(node.right, scope)
        return self.operation(node, left, right)

    def operation(self, node: ast.BinOp | ast.AugAssign, left: Value, right: Value) -> Value:
        """An operation of two values."""
        if (
            isinstance(node.op, ast.Div) and left.has("loss") and not right.has("loss")
        ):  # by how many, or by their bytes
            right = replace(right, lessons=frozenset(each for each in right.lessons if each.how != "table"))
        if (
            isinstance(node.op, ast.Add | ast.Sub)
            and right.has("grad")
            and right.val
            and not left.val
            and not right.has("loss")
        ):
            moved = self.new()  # weights a step away, or a momentum
            self.teach(moved.refs, right.val, "step", node)
            right = replace(self.read(moved), kinds=right.kinds)
        result, op = join((left, right)), node.op
        if not isinstance(op, ast.Add) or result.val or result.has("loss"):  # a number, not two lists
            result = replace(result, refs=left.refs if isinstance(node, ast.AugAssign) else frozenset())
        kinds = result.kinds - {"target", "gate", "keyed", "hashed", "onehot", "stacked"}
        both, mixing = (left, right), isinstance(op, ast.BitXor | ast.Mult | ast.Add | ast.LShift | ast.BitOr)
        if isinstance(op, ast.Mod | ast.BitAnd) and any(each.has("keyed") for each in both):
            kinds |= {"hashed"}
        elif mixing and any(each.has("keyed") for each in both):
            kinds |= {"keyed"}
        elif mixing and any(each.has("target") for each in both):
            mixed = all(each.val for each in both)
            kinds |= {"keyed"} if mixed else {"target"}
        if isinstance(op, ast.Sub) and left.has("time"):
            kinds |= {"elapsed"}
        if isinstance(op, ast.BitAnd | ast.BitOr) and any(each.has("gate") for each in both):
            kinds |= {"gate"}
        if isinstance(op, ast.Div | ast.FloorDiv | ast.Pow) and right.has("gathered") and left.val:
            kinds |= {"spread"}
        if isinstance(op, ast.Sub | ast.Div) and right.val and not right.has("gathered") and not right.has("gate"):
            kinds |= {"normed"}
            result = replace(result, issues=frozenset(each for each in result.issues if not each.gate))
        result = replace(result, kinds=kinds)
        if isinstance(op, ast.Mult | ast.Add | ast.Pow):
            gates = [each.has("gate") for each in both]
            other = right if gates[0] else left
            masks = isinstance(op, ast.Mult) and other.has("loss") and not result.has("weighed")  # picks losses
            if any(gates) and not all(gates) and not masks:
                whole = other.val and not other.has("normed")
                result = self.gate(result, node) if whole else result.plus("gate", "weighed")
        if isinstance(op, ast.Div) and isinstance(node, ast.BinOp) and _is_ln2(node.right):
            self.final(result)
            result = result.plus("bits")
        if isinstance(op, ast.Mult) and result.val and result.has("loss") and "mask" in ast.unparse(node):
            result = self.masked(result)
        constant = known(left) and known(right) and isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div)
        if constant:
            return replace(result, const=_calculated(op, left.const, right.const))
        return replace(result, form=self._formed(op, left.number, right.number))

    def _formed(self, op: ast.operator, left: Form | None, right: Form | None) -> Form | None:
        if left is None or right is None:
            return None
        if isinstance(op, ast.Add | ast.Sub):
            return add(left, right, 1 if isinstance(op, ast.Add) else -1)
        if isinstance(op, ast.Mult):
            return multiply(left, right)
        if isinstance(op, ast.FloorDiv):
            return self.bounds.divided(left, right)
        return unknown(f"({text(left)}{type(op).__name__}{text(right)})")

    def _ev_unaryop(self, node: ast.UnaryOp, scope: Scope) -> Value:
        value = self.ev(node.operand, scope)
        if isinstance(node.op, ast.Not) and known(value):
            return Value(const=not value.const)
        if isinstance(node.op, ast.USub) and isinstance(value.const, int | float):
            return replace(value, const=-value.const)
        minus = isinstance(node.op, ast.USub) and value.form is not None
        return replace(value, const=UNKNOWN, form=add((), value.form or (), -1) if minus else None)

    def _ev_boolop(self, node: ast.BoolOp, scope: Scope) -> Value:
        values = [self.ev(each, scope) for each in node.values]
        off = isinstance(node.op, ast.And)
        if any(known(each) and bool(each.const) is not off for each in values):
            return replace(join(values), const=not off)
        if all(known(each) for each in values):
            return replace(join(values), const=off)
        return join(values)

    def _ev_compare(self, node: ast.Compare, scope: Scope) -> Value:
        values = [self.ev(each, scope) for each in (node.left, *node.comparators)]
        whole = join(values)
        compare = _COMPARE.get(type(node.ops[0]))
        if len(values) == 2 and compare and known(values[0]) and (known(values[1]) or values[1].items):
            among = [each.const for each in values[1].items or ()]
            if UNKNOWN not in among:
                try:
                    return Value(const=compare(values[0].const, among if values[1].items else values[1].const))
                except TypeError:
                    return NOTHING
        kinds = whole.kinds - {"target", "gathered"}
        if isinstance(node.ops[0], ast.Eq) and len(values) == 2:
            a, b = values
            if (a.has("target") and (b.val or b.lessons)) or (b.has("target") and (a.val or a.lessons)):
                kinds = kinds | {"gate"}
        return replace(whole, kinds=kinds, refs=frozenset())

    def _ev_ifexp(self, node: ast.IfExp, scope: Scope) -> Value:
        test = self.ev(node.test, scope)
        off = None if not known(test) else node.orelse if test.const else node.body
        body, orelse = self.either(lambda: self._way(node.body, off, scope), lambda: self._way(node.orelse, off, scope))
        if off is not None:
            return orelse if off is node.body else body
        result = join((body, orelse))
        if test.has("gate") and result.val and ast.unparse(node.orelse) in ast.unparse(node.body):
            return self.gate(result, node)
        return result

    def take(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Bind `target` to `value`."""
        raise NotImplementedError

    def _ev_namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Value:
        value = self.ev(node.value, scope)
        self.take(node.target, value, scope)
        return value

    def _ev_lambda(self, node: ast.Lambda, scope: Scope) -> Value:
        self.heap.append(Object(code=node, scope=scope))
        return Value(refs=frozenset((len(self.heap) - 1,)))

    def _way(self, node: ast.expr, off: ast.expr | None, scope: Scope) -> Value:
        self.dormant += node is off
        value = self.ev(node, scope)
        self.dormant -= node is off
        return value

    def _ev_starred(self, node: ast.Starred, scope: Scope) -> Value:
        return self.ev(node.value, scope)

    def _ev_call(self, node: ast.Call, scope: Scope) -> Value:
        func, receiver = node.func, NOTHING
        if isinstance(func, ast.Attribute):
            receiver = self.ev(func.value, scope)
            callee = self.attribute(func, receiver)
        else:
            callee = self.ev(func, scope)
        args = [self.ev(each, scope) for each in node.args]
        kwargs = {each.arg or "**": self.ev(each.value, scope) for each in node.keywords}
        dotted = ast.unparse(node.func).split(".") if isinstance(node.func, ast.Name | ast.Attribute) else [""]
        name = self.imported.get(dotted[0], dotted[0]) if len(dotted) == 1 else dotted[-1]
        for said, value in zip(node.args, args, strict=True):
            if isinstance(said, ast.Constant | ast.BinOp) and names.FINAL.search(ast.unparse(said)):
                self.final(join((value, *args)))
        if name in ("min", "max", "sorted") and "key" in kwargs and args:
            kwargs["key"] = self.called(kwargs["key"], [self.element(args[0])])
        if name in names.TEXTS and isinstance(receiver.const, str) and not args:
            return Value(const=getattr(receiver.const, name)())
        functions = [self.heap[ref] for ref in sorted(callee.refs) if self.heap[ref].code is not None]
        classes = [self.heap[ref] for ref in sorted(callee.refs) if self.heap[ref].cls and not self.heap[ref].made]
        if functions:
            self.calibrating(name, join((*args, *kwargs.values())), node)
            self.exporting(name, join((*args, *kwargs.values())), node)
            which = isinstance(func, ast.Subscript | ast.Call) and len({each.code for each in functions}) > 1
            self.dormant += which  # one of a table of functions: perhaps not this one
            calls = [functools.partial(self.inline, each, list(args), dict(kwargs)) for each in functions[:3]]
            result = join(self.either(*calls))
            self.dormant -= which
            return result
        if classes and classes[0].cls is not None:
            return self.instance(classes[0].cls, classes[0].scope or scope, list(args), dict(kwargs))
        called = [self.heap[ref] for ref in sorted(callee.refs) if (cls := self.heap[ref].cls) and not is_module(cls)]
        ways = [m for each in called if (m := self._method(self.heap.index(each), "__call__")) is not None]
        if ways:
            return join([self.called(way, list(args)) for way in ways])
        held = not isinstance(func, ast.Attribute) or any(func.attr in self.heap[r].attrs for r in receiver.refs)
        direct = replace(callee, via=callee.via | callee.refs) if held and callee.refs else NOTHING
        receiver = replace(receiver, const=UNKNOWN) if known(receiver) else receiver
        base = self.imported.get(dotted[0], dotted[0]) if len(dotted) > 1 else ""
        base = dotted[-2] if len(dotted) > 2 and base not in names.NETWORK_MODULES else base
        return self.external(Call(node, name, base, receiver, direct, args, kwargs, scope))

    def either(self, *ways: Callable[[], Value]) -> list[Value]:
        """Values of which one is made, each as if the others were not."""
        fork, found = self.fork(), []
        for place, way in enumerate(ways):
            self.ways.append((fork, place))
            found.append(way())
            self.ways.pop()
        return found

    def normalised(self, name: ast.expr, scope: Scope, inside: ast.AST) -> bool:
        """Whether, outside of `inside`, something that is not constant is taken off `name`, or divides it."""
        said, within = ast.unparse(name), {id(each) for each in ast.walk(inside)}
        for statement in scope.block:
            for each in ast.walk(statement):
                if id(each) in within or not isinstance(each, ast.BinOp | ast.AugAssign):
                    continue
                left, right = (each.left, each.right) if isinstance(each, ast.BinOp) else (each.target, each.value)
                taken = isinstance(each.op, ast.Sub | ast.Div) and not isinstance(right, ast.Constant)
                parts = [part for part in ast.walk(left) if isinstance(part, ast.expr)] if taken else []
                if any(ast.unparse(part) == said for part in parts):
                    return True
        return False

    def called(self, function: Value, args: list[Value]) -> Value:
        found = [self.heap[ref] for ref in sorted(function.refs) if self.heap[ref].code is not None]
        return join([self.inline(each, list(args), {}) for each in found]) if found else function


def _ahead(index: ast.expr) -> bool:
    """Whether an index is shifted by one: [1:], [i + 1], [a + 1 : b + 1]."""
    if isinstance(index, ast.Tuple):
        return any(_ahead(each) for each in index.elts)
    if isinstance(index, ast.Slice):
        lower = index.lower
        return (isinstance(lower, ast.Constant) and lower.value == 1 and index.upper is None) or _plus_one(lower)
    return _plus_one(index)


def _plus_one(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(isinstance(each, ast.Constant) and each.value == 1 for each in (node.left, node.right))
    )


def _is_ln2(node: ast.expr) -> bool:
    said = ast.unparse(node)
    return "log(2" in said or said.split(".")[-1].upper() in ("LN2", "LOG2", "LN_2") or said.startswith("0.693")


def _everything(index: ast.expr) -> bool:
    """Whether an index leaves a dimension as it is: `:`, `...` and `None`."""
    if isinstance(index, ast.Slice):
        return index.lower is None and index.upper is None
    return isinstance(index, ast.Constant) and index.value in (None, Ellipsis)


def _calculated(op: ast.operator, left: object, right: object) -> object:
    if not isinstance(left, int | float) or not isinstance(right, int | float) or abs(left) + abs(right) > 1e15:
        return UNKNOWN
    if isinstance(op, ast.Div):
        return left / right if right else UNKNOWN
    return left + right if isinstance(op, ast.Add) else left - right if isinstance(op, ast.Sub) else left * right
