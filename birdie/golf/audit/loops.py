"""Loops of the abstract run: two passes each, whose parts of the tokens are told apart, and where each of them begins.

What a loop counts is a number with a name of its own in each pass (`places`); what it draws from a stream
is an item of it. A comprehension makes one pass, for all of its elements at once.
"""

import ast
from dataclasses import dataclass, replace

from birdie.golf.audit import names
from birdie.golf.audit.branches import Branches
from birdie.golf.audit.places import END, ZERO, Form, Mark, add, constant, number, text, unknown
from birdie.golf.audit.values import UNKNOWN, Scope, Value, placed

_SAME = frozenset(("tqdm", "list", "tuple", "iter", "reversed", "trange"))
"""Calls around what is iterated over that change nothing of it."""


@dataclass(frozen=True, slots=True)
class _Over:
    """What is iterated over: the name of the call that makes it, its arguments, and it itself."""

    name: str
    args: tuple[Value, ...]
    whole: Value
    part: bool


class Loops(Branches):
    """`for`, `while` and what comprehensions draw from.

    Attributes:
        whiles: the `while` loops that are running, and the scope each runs in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[int, set[str]] = {}
        self.whiles: list[tuple[Mark, Scope]] = []

    def run_over(self, target: ast.expr, iterable: ast.expr, scope: Scope) -> int:
        run = self.fork()
        self.take(target, self._element(self._over(iterable, scope), (run, 0)), scope)
        return run

    def _over(self, node: ast.expr, scope: Scope) -> _Over:
        name = ""
        while isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name not in _SAME or not node.args or isinstance(node.func, ast.Attribute) or name == "trange":
                break
            node = node.args[0]
        name = "range" if name == "trange" else name
        counted = isinstance(node, ast.Call) and name in ("range", "enumerate", "zip")
        args = tuple(self.ev(each, scope) for each in node.args) if isinstance(node, ast.Call) and counted else ()
        return _Over(name if counted else "", args, self.ev(node, scope), isinstance(node, ast.Subscript))

    def _element(self, over: _Over, mark: Mark) -> Value:
        """What is drawn from `over` in a pass."""
        at = unknown(f"@{mark[0]}.{mark[1]}")
        self.bounds.lows[at[0][0][0]] = ZERO
        if over.name == "range":
            return replace(over.whole, form=self._counted(over, mark), const=UNKNOWN, items=None)
        name = f"@{mark[0]}.{mark[1]}:each"
        if over.name == "enumerate" and over.args:
            start = over.args[1].number if len(over.args) > 1 else ZERO
            index = Value(form=add(at, start) if start is not None else None)
            return replace(over.whole, items=(index, self._drawn(over.args[0], at, name, over.part)), form=None)
        if over.name == "zip" and over.args:
            parts = enumerate(over.args)
            items = tuple(self._drawn(each, at, f"{name}{place}", over.part) for place, each in parts)
            return replace(over.whole, items=items, form=None)
        return self._drawn(over.whole, at, name, over.part)

    def _drawn(self, iterable: Value, at: Form, name: str, part: bool) -> Value:
        """The item of `iterable` at `at`; as a number, it is `name`."""
        self.bounds.lows[name] = self._low(iterable, part)
        one = placed(self.element(iterable), lambda region: region.item(at))
        return _called(replace(one, const=UNKNOWN), name)

    def _low(self, iterable: Value, part: bool) -> Form:
        """The first of `iterable`, if that is all of something: its zeroth."""
        for cut in sorted((region.path[-1] for region in iterable.val if region.path), key=repr):
            begin, left = constant(cut.begin), constant(add(END, cut.stop, -1))
            if begin not in (0.0, 1.0) or left not in (0.0, 1.0):
                return unknown(f"{text(cut.begin)}..{text(cut.stop)}")
        if iterable.has("part"):
            return unknown(f"part{text(iterable.form)}") if iterable.form is not None else self.opaque("part")
        return self.opaque("part") if part and not iterable.val else ZERO

    def _counted(self, over: _Over, mark: Mark) -> Form:
        name = f"@{mark[0]}.{mark[1]}:v"
        numbers = [each.number for each in over.args]
        low = ZERO if len(numbers) < 2 else numbers[0]
        if len(over.args) == 3 and isinstance(over.args[2].const, int) and over.args[2].const < 0:
            low = add(numbers[1], number(1)) if numbers[1] is not None else None
        self.bounds.lows[name] = low if low is not None else self.opaque("low")
        high = numbers[min(len(numbers), 2) - 1] if numbers else None
        if high is not None:
            self.bounds.highs[name] = high
        return unknown(name)

    def _do_for(self, node: ast.For, scope: Scope) -> bool:
        over, run = self._over(node.iter, scope), self.fork()
        if not any(isinstance(each, ast.Break | ast.Return) for each in ast.walk(node)):
            self.bounds.whole.add(run)
        self.warming.append(max(self.warming[-1], int(_warms(node))))
        for count in (1, 2):
            mark: Mark = (place_of(node), count)
            self.stack.append(mark)
            self.runs.append((run, count))
            one = self._one(self._element(over, (run, count)), mark)
            if isinstance(node.target, ast.Name) and node.target.id in names.TOKENS and one.val:
                one = one.plus("target")
            self.take(node.target, one, scope)
            self._counters(node.body, mark, run, scope)
            self.body(node.body, scope)
            self.runs.pop()
            self.stack.pop()
        self._over_with(place_of(node), run, scope)
        self.warming.pop()
        self.body(node.orelse, scope)
        return False

    def _one(self, value: Value, mark: Mark) -> Value:
        items = tuple(self._one(each, mark) for each in value.items) if value.items else None
        marks = frozenset({**dict(value.marks), mark[0]: mark[1]}.items())
        said = placed(value, lambda region: region.marked((mark,)))
        return replace(said, marks=marks, items=items, const=UNKNOWN)

    def _counters(self, body: list[ast.stmt], mark: Mark, run: int, scope: Scope) -> None:
        """Numbers that the body of a loop moves on are different in each pass."""
        if mark[0] not in self.moved:
            nodes = [each for statement in body for each in ast.walk(statement)]
            targets = [t for each in nodes if isinstance(each, ast.Assign) for t in each.targets]
            targets += [each.target for each in nodes if isinstance(each, ast.AugAssign)]
            self.moved[mark[0]] = {each.id for each in targets if isinstance(each, ast.Name)}
        for name in sorted(self.moved[mark[0]]):
            value = scope.find(name)
            if value is None or value.val or value.refs or value.has("loss"):
                continue
            counted, first = f"@{run}.{mark[1]}:{name}", f"@{run}.1:{name}"
            if mark[1] == 1 and value.number is not None:
                self.bounds.lows[counted] = value.number
            elif first in self.bounds.lows:
                self.bounds.lows[counted] = self.bounds.lows[first]
            scope.bind(name, replace(self._one(value, mark), const=UNKNOWN, form=unknown(counted)))

    def _do_while(self, node: ast.While, scope: Scope) -> bool:
        run = self.fork()
        for count in (1, 2):
            mark = (place_of(node), count)
            self.stack.append(mark)
            self.runs.append((run, count))
            self.whiles.append((mark, scope))
            self._counters(node.body, mark, run, scope)
            self.ev(node.test, scope)
            self.body(node.body, scope)
            self.whiles.pop()
            self.runs.pop()
            self.stack.pop()
        self._over_with(place_of(node), run, scope)
        self.body(node.orelse, scope)
        return False

    def _over_with(self, loop: int, run: int, scope: Scope) -> None:
        """What a loop has counted is a number of its own when the loop is over."""
        for name in self.moved.get(loop, ()):
            value = scope.names.get(name)
            if value is not None and f"@{run}." in text(value.form or ()):
                scope.bind(name, replace(value, form=self.opaque(name)))

    def drawn(self, node: ast.expr, value: Value, scope: Scope) -> Value:
        """`value`, assigned from `node`: what a call gives in a pass of a `while`, as of a queue, is that pass's."""
        if not self.whiles or self.whiles[-1][1] is not scope or value.val or value.lessons or value.has("loss"):
            return value
        called = [ast.unparse(each.func).split(".")[-1] for each in ast.walk(node) if isinstance(each, ast.Call)]
        plain = names.PURE | names.SIZES | names.FRESH | names.ALIASES | {"range"}
        if all(each in plain for each in called):
            return value
        held = (each for ref in self.reach(value.refs) for each in self.heap[ref].attrs.values())
        return value if any(each.val for each in held) else self._one(value, self.whiles[-1][0])


def _called(value: Value, name: str) -> Value:
    """`value`, a number or several of which nothing is known but what they are drawn from."""
    items = tuple(_called(each, f"{name}[{place}]") for place, each in enumerate(value.items)) if value.items else None
    return replace(value, form=unknown(name), items=items)


def place_of(node: ast.stmt | ast.expr) -> int:
    """A place in the file, as a number."""
    return node.lineno * 1000 + node.col_offset


def _warms(node: ast.For) -> bool:
    """Whether a loop is a warm-up: by what it counts with, or by how many it is of."""
    if names.WARMS.search(ast.unparse(node.target)):
        return True
    counted = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range" and len(node.iter.args) == 1
    said = node.iter.args[0] if counted else node.iter  # type: ignore[attr-defined]
    return not isinstance(said, ast.BinOp) and bool(names.WARMS.search(ast.unparse(said)))
