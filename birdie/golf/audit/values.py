"""What the static scan knows of a value, and of the objects of a script that is never run.

Lesson    an object learned from a region: by an optimizer's step, by counting, or because it was chosen by a loss
Issue     a rule broken if the value that carries it ends up in a score
Value     all of that for one expression; operations join it
"""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from birdie.golf.audit.places import Form, Mark, Region, number
from birdie.golf.audit.rules import Rule

UNKNOWN = object()
"""Not a constant."""

Way = tuple[int, int]
"""A fork, by the number it was met as, and which of its branches."""
How = Literal["step", "table", "choice"]
_MOST = 64  # regions or lessons one value carries; past that, the latest


@dataclass(frozen=True, slots=True)
class Lesson:
    """Something was learned from validation tokens.

    Attributes:
        region: those.
        line: where.
        how: by a gradient step, in a table or statistic, or as the choice of what scored best.
        stack: the passes of loops it happened in, outermost first.
        dormant: it happens behind a switch that is off by default.
        judged: those tokens' losses were noted before.
        evaluating: a function that evaluates was running.
        part: of those tokens only a part of the losses was learned from.
        ways: the branches it was in.
        runs: the loops it was in, by the number each was begun as.
    """

    region: Region
    line: int
    how: How
    stack: tuple[Mark, ...]
    dormant: bool
    judged: bool = False
    evaluating: bool = False
    part: bool = False
    ways: frozenset[Way] = frozenset()
    runs: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Issue:
    """A rule broken at a line.

    `sure` is False where it depends on a switch or on what the scan cannot follow; `gate` says that dividing by a sum
    mends it, `part` that taking a part of the losses may.
    """

    rule: Rule
    line: int
    evidence: str
    sure: bool = True
    gate: bool = False
    part: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an expression's value.

    Attributes:
        val: regions of the validation tokens it was computed from.
        lessons: what the objects it was computed with had learned by then.
        refs: objects it may be, or hold.
        via: objects whose state it was computed with.
        marks: passes of loops it depends on, as an index does.
        kinds: "loss", "pred", "target", "gathered", "picked", "keyed", "hashed", "gate", "weighed", "spread", "normed",
            "grad", "bits", "time", "elapsed", "train", "text"; "stored": it was packed; "many": it stands for many like
            it; "masked": a part of losses; "part": a slice of something; "options": those of the command line.
        issues: rules broken if it ends up in a score.
        items: of a tuple whose members are known.
        const: a constant, or UNKNOWN.
        form: what number it is, in terms of others that are not known; None: who knows.
    """

    val: frozenset[Region] = frozenset()
    lessons: frozenset[Lesson] = frozenset()
    refs: frozenset[int] = frozenset()
    via: frozenset[int] = frozenset()
    marks: frozenset[Mark] = frozenset()
    kinds: frozenset[str] = frozenset()
    issues: frozenset[Issue] = frozenset()
    items: "tuple[Value, ...] | None" = None
    const: Any = UNKNOWN
    form: Form | None = None

    @property
    def number(self) -> Form | None:
        """What number it is, as far as that can be told."""
        plain = isinstance(self.const, int | float) and abs(self.const) < 1e15
        return number(self.const) if plain else self.form

    def has(self, kind: str) -> bool:
        return kind in self.kinds

    def plus(self, *kinds: str) -> "Value":
        return replace(self, kinds=self.kinds | set(kinds))

    def minus(self, *kinds: str) -> "Value":
        return replace(self, kinds=self.kinds - set(kinds))


NOTHING = Value()


def join(values: Iterable[Value]) -> Value:
    """What is known of a value that depends on all of `values`; constants and members are forgotten."""
    found = [each for each in values if each is not NOTHING]
    if not found:
        return NOTHING
    if len(found) == 1:
        plain = not found[0].items and not known(found[0]) and found[0].form is None
        return found[0] if plain else replace(found[0], items=None, const=UNKNOWN, form=None)
    return Value(
        val=_few(frozenset().union(*(v.val for v in found))),
        lessons=_few(frozenset().union(*(v.lessons for v in found))),
        refs=_few(frozenset().union(*(v.refs for v in found))),
        via=_few(frozenset().union(*(v.via for v in found))),
        marks=frozenset().union(*(v.marks for v in found)),
        kinds=frozenset().union(*(v.kinds for v in found)),
        issues=frozenset().union(*(v.issues for v in found)),
    )


def known(value: Value) -> bool:
    """Whether it is a constant."""
    return value.const is not UNKNOWN


def _few(found: frozenset[Any]) -> frozenset[Any]:
    return found if len(found) <= _MOST else frozenset(sorted(found, key=repr)[-_MOST:])


def marked(value: Value, marks: frozenset[Mark]) -> Value:
    """`value` as seen through an index that depends on `marks`: the regions it stands for shrink to those passes."""
    if not marks or not value.val:
        return value
    return replace(value, val=frozenset(region.marked(marks) for region in value.val))


def placed(value: Value, cut: Callable[[Region], Region]) -> Value:
    """`value`, of which, and of whose members, `cut` is taken."""
    items = tuple(placed(each, cut) for each in value.items) if value.items else value.items
    return replace(value, val=frozenset(cut(region) for region in value.val), items=items) if value.val else value


@dataclass(slots=True)
class Scope:
    """Names of a module or a call, and those of the scope around it; `depth` loops were running when it began."""

    names: dict[str, Value] = field(default_factory=dict)
    above: "Scope | None" = None
    shared: set[str] = field(default_factory=set)
    depth: int = 0
    returned: list[Value] = field(default_factory=list)
    block: list[ast.stmt] = field(default_factory=list)

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.above
        return None

    def bind(self, name: str, value: Value) -> None:
        scope = self
        while name in scope.shared and scope.above is not None:
            scope = scope.above
            if name in scope.names:
                break
        scope.names[name] = value


@dataclass(slots=True)
class Object:
    """An object of the script.

    Attributes:
        attrs: its attributes; "*" is what it was made from.
        lessons: what it has learned from validation.
        code: a function's definition, and the scope it closes over.
        self: what a bound method is bound to.
        cls: the class it is, or is an instance of.
        made: it is an instance.
        sum: the losses that were added to it in place.
    """

    attrs: dict[str, Value] = field(default_factory=dict)
    lessons: set[Lesson] = field(default_factory=set)
    code: "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None" = None
    scope: Scope | None = None
    self: Value | None = None
    cls: ast.ClassDef | None = None
    made: bool = False
    sum: Value | None = None
