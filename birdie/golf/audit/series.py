"""Values made of many: tuples, comprehensions, and what a generator gives.

A tuple's members are known one by one. A list that a comprehension makes, or what a generator yields, is one value that
stands for all of its elements, and so for every pass of the loops they are made in.
"""

import ast
from dataclasses import replace

from birdie.golf.audit import names
from birdie.golf.audit.expressions import Expressions
from birdie.golf.audit.values import NOTHING, UNKNOWN, Scope, Value, join, placed


class Series(Expressions):
    """Values made of many."""

    def _ev_tuple(self, node: ast.Tuple | ast.List, scope: Scope) -> Value:
        items = tuple(self.ev(each, scope) for each in node.elts)
        return replace(join(items).minus("many"), items=items, const=UNKNOWN)

    _ev_list = _ev_set = _ev_tuple

    def _ev_dict(self, node: ast.Dict, scope: Scope) -> Value:
        keys = [self.ev(key, scope) for key in node.keys if key is not None]
        values = [self.ev(value, scope) for value in node.values]
        for key, value in zip(node.keys, values, strict=True):
            if isinstance(key, ast.Constant) and names.FINAL.search(str(key.value)):
                self.final(value)
        return join((self.new(), *values, *(each for each in keys if each.val)))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope) -> Value:
        inner = Scope(above=scope)
        own = set()
        for each in node.generators:
            own.add(self.run_over(each.target, each.iter, inner))
            for test in each.ifs:
                self.ev(test, inner)
        self.bounds.whole |= own
        if not isinstance(node, ast.DictComp):
            made = self.swept(self.ev(node.elt, inner), own).plus("many")
            some = self.opaque("some")
            return placed(made, lambda region: region.item(some)) if any(each.ifs for each in node.generators) else made
        key, value = (self.swept(self.ev(each, inner), own) for each in (node.key, node.value))
        made = self.new(value)
        if key.val:
            self.teach(made.refs, key.val | value.val, "table", node)
        return join((made, value))

    def swept(self, value: Value, over: set[int]) -> Value:
        """`value` as it is for all passes of these loops together."""
        kept = {loop for region in value.val for cut in region.path for loop in cut.loops()} - over
        return placed(value, lambda region: region.swept(kept, self.bounds))

    _ev_listcomp = _ev_setcomp = _ev_generatorexp = _ev_dictcomp = _comprehension

    def element(self, iterable: Value) -> Value:
        """One of what is iterated over."""
        own = self._own_element(iterable)
        if own is not None:
            return own
        if iterable.has("many"):
            return iterable.minus("many")
        if iterable.items:
            return join(iterable.items) if len(iterable.items) > 1 else iterable.items[0]
        return iterable

    def run_over(self, target: ast.expr, iterable: ast.expr, scope: Scope) -> int:
        """Bind `target` to what a comprehension draws from all of `iterable`; the number of that loop."""
        raise NotImplementedError

    def _own_element(self, iterable: Value) -> Value | None:
        """What an object of the script gives that is iterated over, as a data set in a loader."""
        if iterable.val or iterable.items:
            return None
        held = {inner for ref in iterable.refs for inner in self.heap[ref].attrs.get("*", NOTHING).refs}
        for ref in sorted(iterable.refs | held):
            for name in ("__iter__", "__getitem__") if self.heap[ref].made else ():
                method = self._method(ref, name)
                if method is not None:
                    given = [] if name == "__iter__" else [Value(form=self.opaque("index"))]
                    result = self.called(method, given)
                    return result.minus("many") if result.val else None
        return None

    def _ev_yield(self, node: ast.Yield, scope: Scope) -> Value:
        runs = {run for run, _ in self.runs[scope.depth :]}
        given = self._given(self.swept(self.ev(node.value, scope), runs), dict(self.stack[scope.depth :]))
        if given not in scope.returned:
            scope.returned.append(given)
        return NOTHING

    def _given(self, value: Value, loops: dict[int, int]) -> Value:
        """What a generator gives in `loops` of its own, for all of their passes at once."""
        said = replace(value, form=None)
        val = frozenset(replace(r, marks=frozenset(m for m in r.marks if m[0] not in loops)) for r in said.val)
        items = tuple(self._given(each, loops) for each in said.items) if said.items else said.items
        marks = frozenset(each for each in value.marks if each[0] not in loops)
        return replace(said, val=val, items=items, marks=marks, const=UNKNOWN)

    def _ev_yieldfrom(self, node: ast.YieldFrom, scope: Scope) -> Value:
        scope.returned.append(self.element(self.ev(node.value, scope)))
        return NOTHING
