"""Branches of the abstract run: all are taken, one after the other, and what they leave behind is joined.

A branch behind a switch that is off by default is dormant: what it does is a doubt, and so is all that follows a guard
(`if not ADAPT: return`) that leaves by default.
"""

import ast
from dataclasses import replace

from birdie.golf.audit.series import Series
from birdie.golf.audit.values import Scope, Value, join, known


class Branches(Series):
    """`if` and `match`."""

    def body(self, statements: list[ast.stmt], scope: Scope) -> bool:
        """Statements in order; whether what follows can not be reached."""
        asleep, taken = self.dormant, len(self.ways)
        ended = False
        for node in statements:
            self.spend()
            method = getattr(self, f"_do_{type(node).__name__.lower()}", None)
            if method is not None and method(node, scope):
                ended = True
                break
        self.dormant = asleep
        del self.ways[taken:]
        return ended

    def _do_if(self, node: ast.If, scope: Scope) -> bool:
        test = self.ev(node.test, scope)
        forced = isinstance(node.test, ast.Compare) and "__name__" in ast.unparse(node.test)
        off = known(test) and not forced
        before, fork = dict(scope.names), self.fork()
        self.dormant += off and not test.const
        self.ways.append((fork, 0))
        ended = self.body(node.body, scope)
        self.ways.pop()
        self.dormant -= off and not test.const
        after = before if ended else scope.names
        if test.has("loss") and test.val:
            self._choices(node.body, test, before, after)
        elif test.has("gate"):
            self._branch(node, before, after, scope)
        scope.names = dict(before)
        self.dormant += off and bool(test.const)
        self.ways.append((fork, 1))
        other = self.body(node.orelse, scope)
        self.ways.pop()
        self.dormant -= off and bool(test.const)
        if other:
            scope.names = dict(after)
        elif not ended:
            self._merge(after, scope)
        self.dormant += off and (ended if test.const else other)  # the rest of the block; `body` wakes up after it
        if ended != other:
            self.ways.append((fork, int(ended)))
        return ended and other and bool(node.orelse)

    def _merge(self, after: dict[str, Value], scope: Scope) -> None:
        for name, value in after.items():
            here = scope.names.get(name)
            if here is None or here is value:
                scope.names[name] = value
            elif here != value:
                scope.names[name] = replace(self._either(here, value), form=self.opaque(name))

    def _either(self, a: Value, b: Value) -> Value:
        if a.items and b.items and len(a.items) == len(b.items):
            pairs = zip(a.items, b.items, strict=True)
            return replace(join((a, b)), items=tuple(join(pair) for pair in pairs))
        return join((a, b)) if a != b else a

    def _choices(self, body: list[ast.stmt], test: Value, before: dict[str, Value], after: dict[str, Value]) -> None:
        """What a branch assigns is chosen by the loss that the branch depends on."""
        for statement in body:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                for each in ast.walk(target):
                    if not isinstance(each, ast.Name) or each.id not in after:
                        continue
                    value = after[each.id]
                    if value is before.get(each.id) or value.has("loss") or value.refs or value.val:
                        continue
                    after[each.id] = join((value, self.chosen(test, statement)))

    def _branch(self, node: ast.If, before: dict[str, Value], after: dict[str, Value], scope: Scope) -> None:
        """A branch on whether a guess is the target changes what is known before, and the other branch does not."""
        other = {n.id for each in node.orelse for n in ast.walk(each) if isinstance(n, ast.Name)}
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AugAssign) else targets
            for target in targets:
                if not isinstance(target, ast.Name) or target.id not in before or target.id in other:
                    continue
                if before[target.id].val and not self.normalised(target, scope, node):
                    after[target.id] = self.gate(after[target.id], node)

    def _do_match(self, node: ast.Match, scope: Scope) -> bool:
        subject, taken, ends = self.ev(node.subject, scope), False, []
        before, left, fork = dict(scope.names), [], self.fork()
        for place, case in enumerate(node.cases):
            scope.names = dict(before)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    self.take(ast.Name(name, ast.Store(), lineno=node.lineno, col_offset=0), subject, scope)
            self.ev(case.guard, scope)
            said = [each.value for each in ast.walk(case.pattern) if isinstance(each, ast.MatchValue)]
            fits = not said or any(self.ev(each, scope).const == subject.const for each in said)
            off = known(subject) and case.guard is None and (taken or not fits)
            self.dormant += off
            self.ways.append((fork, place))
            ends.append(self.body(case.body, scope))
            self.ways.pop()
            self.dormant -= off
            taken = taken or (known(subject) and fits and case.guard is None)
            if not ends[-1]:
                left.append(dict(scope.names))
        scope.names = dict(before)
        for names in left:
            self._merge(names, scope)
        last = node.cases[-1]
        every = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        return all(ends) and every
