"""The memory of an abstract run: objects, what each has learned from validation, and what that means for a score.

loss.backward() ──► pending ──opt.step()──► teach(objects) ──► Lesson
                                                                │ read by a prediction
cross_entropy(prediction, target) ──► scored: does a lesson overlap the target? ──► Issue, carried by the loss
                                                                │ once it reaches a score
                                                              found
"""

import ast
from collections.abc import Collection, Iterable
from dataclasses import replace

from birdie.golf.audit.names import EVALUATES, RUNS
from birdie.golf.audit.places import Bounds, Form, Mark, Region, newest, overlap, surely, unknown
from birdie.golf.audit.rules import NORMALISED, ONE_PASS, SCORE_FIRST, VALIDATION, Rule
from birdie.golf.audit.values import NOTHING, How, Issue, Lesson, Object, Value, Way, join

STEPS = 150_000
"""Statements and expressions the scan visits before it gives up."""


def is_module(cls: ast.ClassDef) -> bool:
    """Whether a class is a torch module, as far as its bases tell."""
    return any(ast.unparse(base).split(".")[-1].endswith("Module") for base in cls.bases)


class TooLargeError(Exception):
    """The script is too large for the scan."""


class Memory:
    """Objects and lessons.

    Attributes:
        found: rules that are broken.
        pending: regions and objects of the gradients there are, not yet applied.
        stack: passes of the loops that are running, outermost first.
        runs: the same, by the number each loop was begun as.
        calls: names of the functions that are running, outermost first.
        ways: the branches that are taken, of which others exclude each other.
        dormant: how many switches that are off by default we are behind.
        warming: whether what runs is a warm-up: 2 by its function's name, 1 by its loop's, 0 not.
        hooked: hooks that are registered.
        restored: a model was read back from its artifact.
        bounds: where what loops count begins and ends.
        noted: regions whose losses were added up or kept.
        clock: the line where the train clock was last stopped; reserves: the script keeps time back for what follows.
        exported, late, reread: rules that are broken if something is scored after that, if the train clock is not read
            after that, if nothing is trained after that.
    """

    def __init__(self) -> None:
        self.heap: list[Object] = []
        self.found: set[Issue] = set()
        self.pending: Value = NOTHING
        self.stack: list[Mark] = []
        self.calls: list[str] = []
        self.warming: list[int] = [0]
        self.runs: list[Mark] = []
        self.ways: list[Way] = []
        self.dormant = 0
        self.hooked = 0
        self.restored = False
        self.bounds = Bounds()
        self.noted: set[Region] = set()
        self.exported: list[Issue] = []
        self.late: list[Issue] = []
        self.reread: list[Issue] = []
        self.unknowns = 0
        self.clock: int = 0
        self.reserves = False
        self.summed = False
        self.left = STEPS
        self.taught = False

    def spend(self) -> None:
        """One more visit.

        Raises:
            TooLargeError: there were too many.
        """
        self.left -= 1
        if self.left < 0:
            raise TooLargeError

    def opaque(self, name: str) -> Form:
        """A number of which nothing is known but that it was made here, in these passes."""
        self.unknowns += 1
        return unknown(f"{name}#{self.unknowns}" + "".join(f"@{run}.{number}" for run, number in self.runs))

    def fork(self) -> int:
        """A number for a fork of which one branch is taken."""
        self.unknowns += 1
        return self.unknowns

    def new(self, made_from: Value = NOTHING) -> Value:
        """A new object."""
        self.heap.append(Object({"*": made_from} if made_from is not NOTHING else {}))
        return Value(refs=frozenset((len(self.heap) - 1,)))

    def reach(self, refs: Iterable[int], *, teachable: bool = False) -> set[int]:
        """Objects that can be got at from these; `teachable`: not through settings that happen to be at hand."""
        seen: set[int] = set()
        queue = list(refs)
        while queue:
            ref = queue.pop()
            if ref in seen:
                continue
            seen.add(ref)
            each = self.heap[ref]
            for name, value in each.attrs.items():
                queue.extend(r for r in value.refs if name == "*" or not teachable or self._has_weights(r))
            if each.self is not None:
                queue.extend(each.self.refs)
        return seen

    def add(self, refs: Iterable[int], value: Value) -> None:
        """A loss is added to these objects in place: whoever holds one of them has it."""
        self.summed = True
        for ref in refs:
            old = self.heap[ref].sum
            plain = replace(value, refs=frozenset(), items=None)
            self.heap[ref].sum = plain if old is None else join((old, plain))

    def _has_weights(self, ref: int) -> bool:
        each = self.heap[ref]
        return each.code is None and (each.cls is None or is_module(each.cls))

    def read(self, value: Value) -> Value:
        """`value` with what its objects have learned by now."""
        if self.summed and value.refs:
            sums = [each for ref in value.refs if (each := self.heap[ref].sum) is not None]
            value = replace(join((value, *sums)), items=value.items, const=value.const) if sums else value
        if not value.refs or not self.taught:
            return value
        reached = self.reach(value.refs)
        lessons = frozenset(lesson for ref in reached for lesson in self.heap[ref].lessons)
        return replace(value, lessons=value.lessons | lessons)

    def teach(self, refs: Iterable[int], regions: Iterable[Region], how: How, node: ast.AST) -> None:
        """These objects learn from validation here."""
        made = self.lessons(list(regions), how, node)
        for ref in refs:
            self.heap[ref].lessons |= made
        self.taught = self.taught or bool(made)

    def lessons(self, regions: Collection[Region], how: How, node: ast.AST) -> set[Lesson]:
        """What is learned of validation here."""
        stack, line = tuple(self.stack), getattr(node, "lineno", 0)
        judged, evaluating = all(region in self.noted for region in regions), self.judging
        part = how == "step" and self.pending.has("masked")
        ways, asleep = frozenset(self.ways), self.dormant > 0
        runs = frozenset(run for run, _ in self.runs)
        return {Lesson(each, line, how, stack, asleep, judged, evaluating, part, ways, runs) for each in regions}

    def restore(self, refs: Iterable[int], value: Value) -> None:
        """These objects are what `value` is; what they had learned before is gone."""
        for ref in self.reach(refs):
            self.heap[ref].lessons = set(value.lessons)

    def step(self, receiver: Value, node: ast.AST) -> None:
        """An optimizer applies the gradients there are."""
        if not self.pending.val:  # training, still or again
            self.restored = False
            self.doubt(self.reread)
            return
        reached = self.reach(receiver.refs, teachable=True)
        models = reached if len(reached) > 1 else reached | self.reach(self.pending.via, teachable=True)
        self.teach(models, self.pending.val, "step", node)

    def scored(self, prediction: Value, target: Value, node: ast.AST) -> Value:
        """The loss of `target` (or the logarithm of a probability, target None in it) under `prediction`."""
        whole = join((prediction, target))
        line = getattr(node, "lineno", 0)
        regions = newest(target.val or prediction.val)
        issues = {
            issue
            for lesson in whole.lessons
            for region in regions
            if (issue := self._early(lesson, region, line)) is not None
        }
        return replace(
            whole,
            kinds=(whole.kinds - {"target", "gathered", "picked", "pred", "gate", "grad", "many"}) | {"loss"},
            issues=whole.issues | issues,
            refs=frozenset(),
            lessons=frozenset(),
        )

    def _early(self, lesson: Lesson, region: Region, line: int) -> Issue | None:
        """The rule broken by scoring `region` at `line` with what has learned `lesson`."""
        taken = dict(self.ways)
        if not overlap(lesson.region, region) or any(taken.get(fork, way) != way for fork, way in lesson.ways):
            return None
        shared = {loop for loop, _ in lesson.region.marks} & {loop for loop, _ in region.marks}
        here = dict(self.stack)
        apart = any(here.get(loop, number) != number for loop, number in lesson.stack)
        both = [run for run, _ in self.runs if run in lesson.runs]  # others are over, or began after that
        learned, judged = lesson.region.swept(both, self.bounds), region.swept(both, self.bounds)
        sure = not lesson.dormant and not self.dormant and (bool(shared) or not apart) and surely(learned, judged)
        if lesson.how == "choice":
            rule: Rule = VALIDATION
            what = "a setting is chosen here by the loss of validation tokens"
        elif lesson.how == "step":
            rule, what = SCORE_FIRST, "a step here learns from validation tokens"
        else:
            rule = SCORE_FIRST if shared else ONE_PASS
            what = "statistics are gathered here from validation tokens"
        more = "" if sure else "; only behind a switch that is off, or perhaps of other tokens"
        evidence = f"{what}, and line {line} then scores the same tokens{more}"
        return Issue(rule, lesson.line, evidence, sure, part=lesson.part)

    def masked(self, losses: Value) -> Value:
        """A part of `losses`; if what is learned from is a part too, it may be another."""
        doubts = frozenset(replace(each, sure=each.sure and not each.part) for each in losses.issues)
        return replace(losses, issues=doubts).plus("masked")

    def broken(self, rule: Rule, node: ast.AST, evidence: str, sure: bool = True) -> Issue:
        """An issue at `node`."""
        return Issue(rule, getattr(node, "lineno", 0), evidence, sure and not self.dormant)

    def tell(self, rule: Rule, node: ast.AST, evidence: str, sure: bool = True) -> None:
        """A rule is broken here, whatever is done with the result."""
        self.found.add(self.broken(rule, node, evidence, sure))

    def final(self, value: Value) -> None:
        """`value` is, or goes into, a score; perhaps not, while a loop goes through parts and it is of one."""
        here = dict(self.stack)
        part = bool(value.val) and all(any(loop in here for loop, _ in region.marks) for region in value.val)
        if value.has("loss") and part:
            self.doubt(list(value.issues))
        elif value.has("loss"):
            self.found |= value.issues
            if value.val:
                self.found.update(self.exported)
                self.exported.clear()
        for item in value.items or ():
            self.final(item)

    def gate(self, value: Value, node: ast.AST) -> Value:
        """A probability that is changed where a guess is the target."""
        evidence = (
            "the probability of the token is raised where a guess equals it, and nowhere lowered: it does not sum to 1"
        )
        return replace(value, issues=value.issues | {replace(self.broken(NORMALISED, node, evidence), gate=True)})

    def doubt(self, issues: list[Issue]) -> None:
        """What would have been broken perhaps is not."""
        self.found.update(replace(each, sure=False) for each in issues)
        issues.clear()

    @property
    def judging(self) -> bool:
        """Whether the function that is running evaluates, or was called by one that does and does not also train."""
        name = next((each for each in reversed(self.calls) if EVALUATES.search(each)), "")
        return bool(name) and not RUNS.search(name)

    @property
    def evaluating(self) -> bool:
        """Whether a function that evaluates is running, or a model was read back from its artifact."""
        return self.restored or self.judging
