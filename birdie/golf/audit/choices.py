"""Calls that choose or count: the smaller of two losses, the setting of the least loss, statistics of tokens."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from birdie.golf.audit import names
from birdie.golf.audit.memory import Memory
from birdie.golf.audit.rules import ONE_PASS
from birdie.golf.audit.values import Scope, Value, join


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose function is not in the script.

    Attributes:
        node: of it.
        name: last part of the function's name, as it was called where it was imported from.
        base: first part of it, "" if it has one part.
        receiver: what it is a method of.
        callee: what is called, where that is an object.
        args, kwargs: of it.
        scope: it is called in.
    """

    node: ast.Call
    name: str
    base: str
    receiver: Value
    callee: Value
    args: Sequence[Value]
    kwargs: Mapping[str, Value]
    scope: Scope

    @property
    def given(self) -> tuple[Value, ...]:
        return (*self.args, *self.kwargs.values())


class Choices(Memory):
    """Choices and counts."""

    def called(self, function: Value, args: list[Value]) -> Value:
        """What a function of the script returns; `function` itself, if it is none."""
        raise NotImplementedError

    def element(self, iterable: Value) -> Value:
        """One of what is iterated over."""
        raise NotImplementedError

    def choice(self, call: Call, inner: Value) -> Value | None:
        """The value of a call that chooses; None: it does not."""
        name, args, node = call.name, call.args, call.node
        if name in ("min", "max", "sorted") and "key" in call.kwargs and call.kwargs["key"].has("loss"):
            return self.chosen(call.kwargs["key"], node)
        if name in ("min", "max", "sorted") and len(args) == 1:
            rows = args[0].items or ()
            row = rows if args[0].has("many") else rows[0].items if rows else None
            if row and _judged(row[0]):  # tuples are compared by what comes first in them
                return self.chosen(row[0], node)
        if name in names.SEARCHES:
            losses = join([self.called(each, [self.new()]) for each in args if self._code(each)])
            if _judged(losses):
                return self.chosen(losses, node)
        if name in ("argmin", "argmax", "nanargmin") and inner.has("loss") and inner.val:
            return self.chosen(inner, node)
        if self._least(call):
            issue = self.broken(ONE_PASS, node, "of two losses of each token the smaller one is kept")
            return replace(inner, issues=inner.issues | {issue}, items=None).minus("stacked")
        if name == "stack" and args and len(args[0].items or ()) > 1 and self._alike(args[0].items or ()):
            return inner.plus("stacked")
        return None

    def _code(self, value: Value) -> bool:
        return any(self.heap[ref].code is not None for ref in value.refs)

    def _alike(self, values: Sequence[Value]) -> bool:
        """Whether these are losses of the same tokens."""
        running = [run for run, _ in self.runs]
        tokens = [{region.swept(running, self.bounds) for region in each.val} for each in values]
        return all(map(_judged, values)) and all(each == tokens[0] for each in tokens)

    def _least(self, call: Call) -> bool:
        """Whether the smaller of two losses of the same tokens is taken."""
        name, args = call.name, call.args
        if name in ("min", "amin", "nanmin") and call.receiver.has("stacked"):
            return bool(call.given)  # along a dimension
        if name == "where":
            return len(args) == 3 and _judged(args[0]) and self._alike(args[1:])
        if len(args) != 2 or not self._alike(args):
            return False
        if name == "min" and not call.base:  # not the best so far
            return all(isinstance(each, ast.Call) for each in call.node.args)
        return name in ("min", "minimum", "fmin") and isinstance(call.node.func, ast.Attribute)

    def chosen(self, losses: Value, node: ast.AST) -> Value:
        """What is chosen by the loss of validation tokens."""
        made = self.new()
        self.teach(made.refs, losses.val, "choice", node)
        return self.read(made)

    def tally(self, call: Call, given: Value) -> Value | None:
        """The value of a call that counts tokens; None: it does not."""
        name, node, receiver = call.name, call.node, call.receiver
        if name in names.STATISTICS and given.val and not given.has("loss"):
            return self.counted(given, node)
        if name in ("scatter_add", "index_add") and given.val and not receiver.val and not given.has("loss"):
            return join((receiver, self.counted(given, node)))
        if name == "one_hot" and given.val:
            return replace(join((receiver, given)), refs=frozenset()).plus("onehot")
        if name in ("sum", "mean") and receiver.has("onehot"):
            along = [*call.args[:1], *(call.kwargs[key] for key in ("dim", "axis") if key in call.kwargs)]
            return self.counted(receiver, node) if along and along[0].const == 0 else None
        if name == "count" and len(call.args) == 1 and given.val and receiver.val:
            made = self.lessons(receiver.val, "table", node)
            counts = join((replace(receiver, val=frozenset(), refs=frozenset()), given))
            return replace(counts, lessons=counts.lessons | made, refs=frozenset()).plus("picked")
        return None

    def counted(self, tokens: Value, node: ast.AST) -> Value:
        """Statistics of `tokens`."""
        made = self.new()
        self.teach(made.refs, tokens.val, "table", node)
        return self.read(made)

    def helper(self, call: Call) -> Value | None:
        """The value of a call that calls one of the script's own functions; None: it does not."""
        name, args = call.name, call.args
        if name not in names.HELPERS or not args or not self._code(args[0]):
            return None
        if name in names.MAPS:
            return self.called(args[0], [self.element(each) for each in args[1:]]).plus("many")
        return self.called(args[0], list(args[1:]))


def _judged(value: Value) -> bool:
    return value.has("loss") and bool(value.val)
