"""Units of a module, which blockwise calibration runs one at a time, and runs in which their calls are answered.

    loss(module, first batch) ──observed──► tree of calls ──► blocks, modules beside them, products outside of both

A block is a member of an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict` (the outermost one), or a module that the
caller names. A module that holds no block is a unit as well if it owns matrices: an embedding, a projection. A product
with a matrix that neither of them calls, such as `F.linear` in the forward function of the module itself, is a unit of
its own. A unit must not hold the loss. All that is called after the last block, usually the head, is the tail: it runs
together with the loss, so that its outputs, the logits, need not be kept.

    Capture   every unit runs, and its outputs go to files
    Answers   every unit is answered from its files, and gradients of the loss arrive at the answers;
              or all up to one call, which runs and ends the run: gradients pass from its outputs to earlier answers

What is between the units (skips, mixtures of streams, masks, norms) runs each time, as the module has it. So any
topology is right, and no inputs of units need to be kept.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from birdie.compress.calibration.sensitivity import PRODUCTS, Recorder, argument
from birdie.compress.calibration.stored import SUFFIX, read_list, read_tensors
from birdie.errors import ConfigError
from birdie.system.mapped import release
from birdie.system.tensor_files import write_tensors

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Forward = Callable[..., Any]
Run = Callable[[], Any]
_DIFFERENCE = 0.05  # most relative difference of a repeated output: anything above is another computation


class Call(NamedTuple):
    """One use of a unit within a batch.

    Attributes:
        name: of the module, or of the matrix where a product is its own unit.
        number: how many calls of that name come before it in the batch.
    """

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Units:
    """Units of a module.

    Attributes:
        modules: module → its name.
        tail: calls after the last block.
    """

    modules: Mapping[nn.Module, str]
    tail: frozenset[Call]


@dataclass(slots=True)
class Node:
    """One call of a module.

    Attributes:
        name: of the module.
        owns: whether the module has a parameter of two or more dimensions.
        parts: calls of other modules, and names of matrices that are multiplied, in their order.
        has_loss: whether it computes a cross-entropy, itself or in a part.
        uses: whether a matrix is multiplied, by itself or in a part.
    """

    name: str
    owns: bool
    parts: "list[Node | str]" = field(default_factory=list)
    has_loss: bool = False
    uses: bool = False


class Observer(TorchFunctionMode):
    """Notes which module calls which, and where matrices are multiplied."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.stack = [Node("", owns=False)]  # the loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            for node in self.stack:
                node.has_loss = True
        elif func in PRODUCTS and (name := self.recorder.name_of(argument(args, kwargs, 1, "weight"))) is not None:
            self.stack[-1].parts.append(name)
            for node in self.stack:
                node.uses = True
        return func(*args, **kwargs)

    def forward(self, part: nn.Module, name: str, forward: Forward) -> Forward:
        """Return a forward function that notes the call."""
        owns = any(weight.ndim > 1 for weight in part.parameters())

        def observed(*args: Any, **kwargs: Any) -> Any:
            node = Node(name, owns)
            self.stack[-1].parts.append(node)
            self.stack.append(node)
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()

        return observed


@contextmanager
def replaced_forwards(
    modules: Mapping[nn.Module, str], replace: Callable[[nn.Module, str, Forward], Forward]
) -> Iterator[None]:
    """Replace the forward function of each module by `replace(module, name, forward)` for the body of the context."""
    originals = [(part, part.__dict__.get("forward")) for part in modules]
    try:
        for part, name in modules.items():
            part.__dict__["forward"] = replace(part, name, part.forward)
        yield
    finally:
        for part, original in originals:
            if original is None:
                part.__dict__.pop("forward", None)
            else:
                part.__dict__["forward"] = original


def find_units(
    module: nn.Module, recorder: Recorder, run: Callable[[int], Any], blocks: Collection[str] | None = None
) -> Units:
    """Return the units of a module, as the first batch uses them.

    Args:
        module: in evaluation mode.
        recorder: knows the module's matrices.
        run: computes the loss of a batch by its index.
        blocks: names of the modules to take as blocks; None finds them.
    """
    modules = {part: name for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule)}
    chosen = _members(module) if blocks is None else set(blocks)
    if blocks is not None:
        _require_names(chosen, set(modules.values()))
    observer = Observer(recorder)
    with replaced_forwards(modules, observer.forward), recorder, observer:
        recorder.active = False
        run(0)
    root = observer.stack[0]
    parts = list(_units(root, chosen))
    while len(parts) == 1 and isinstance(only := parts[0], Node) and only.name not in chosen and _has_nodes(only):
        parts = list(_units(only, chosen))
    called = {part.name for part in parts if isinstance(part, Node)}
    if blocks is not None and (missing := sorted(chosen - called)):
        raise ConfigError(
            f"block {missing[0]!r} is not called as a module, lies in another block or computes the loss; "
            "name its parts, or let blocks be found"
        )
    by_name = {name: part for part, name in modules.items()}
    return Units({by_name[name]: name for name in sorted(called)}, _tail(parts, chosen))


def _members(module: nn.Module) -> set[str]:
    """Return the names of all members of containers that are no containers themselves."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, container in module.named_modules()
        if isinstance(container, _CONTAINERS)
        for name, member in container.named_children()
        if not isinstance(member, _CONTAINERS)
    }


def _require_names(blocks: Collection[str], names: Collection[str]) -> None:
    for name in sorted(blocks):
        if name not in names:
            nearest = difflib.get_close_matches(name, sorted(names), 1, 0.0)[0]
            raise ConfigError(f"the module has no part {name!r} to take as a block; did you mean {nearest!r}?")


def _units(node: Node, blocks: Collection[str]) -> "Iterator[Node | str]":
    """Yield the units in a call, in their order."""
    for part in node.parts:
        if isinstance(part, str):
            yield part
        elif part.has_loss or (part.name not in blocks and _holds(part, blocks)):
            yield from _units(part, blocks)
        elif part.uses or (part.name in blocks and part.owns):
            yield part


def _holds(node: Node, blocks: Collection[str]) -> bool:
    """Return whether a call calls a block."""
    return any(
        (part.name in blocks and (part.uses or part.owns)) or _holds(part, blocks)
        for part in node.parts
        if isinstance(part, Node)
    )


def _has_nodes(node: Node) -> bool:
    return any(isinstance(part, Node) and part.uses for part in node.parts)


def _tail(parts: "list[Node | str]", blocks: Collection[str]) -> frozenset[Call]:
    """Return the calls after the last block; the last call alone if there are no blocks."""
    counts: Counter[str] = Counter()
    calls, last = [], -1
    for position, part in enumerate(parts):
        name = part if isinstance(part, str) else part.name
        calls.append(Call(name, counts[name]))
        counts[name] += 1
        if any(name == block or name.startswith(f"{block}.") for block in blocks):
            last = position
    return frozenset(calls[(last if last >= 0 else len(calls) - 2) + 1 :])


class Interception(TorchFunctionMode):
    """Lets `Capture` or `Answers` answer the calls of units, above the recorder.

    Args:
        recorder: of all runs.
        units: of the module.

    Attributes:
        used: matrices that the last call multiplied.
    """

    def __init__(self, recorder: Recorder, units: Units) -> None:
        super().__init__()
        self.recorder, self.units = recorder, units
        self.used: set[str] = set()
        self._stage: Capture | Answers | None = None
        self._inside: Call | None = None
        self._counts: Counter[str] = Counter()

    @contextmanager
    def running(self, stage: "Capture | Answers") -> Iterator[None]:
        """Let `stage` answer the calls of the units in the body of the context: one batch."""
        self._stage, self._inside, self._counts = stage, None, Counter()
        self.recorder.active = isinstance(stage, Answers) and stage.target is None
        with replaced_forwards(self.units.modules, self._intercepted), self.recorder, self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and self._inside is not None and self._inside not in self.units.tail:
            raise ConfigError(
                f"the block {self._inside.name!r} computes a cross-entropy; name blocks without the loss, or calibrate "
                "without blockwise"
            )
        weight = argument(args, kwargs, 1, "weight") if func in PRODUCTS else None
        weight = argument(args, kwargs, 2, "mat2") if func is torch.addmm else weight
        name = self.recorder.name_of(weight)
        if name is not None and self._inside is None and func in PRODUCTS:
            return self._answer(name, lambda: self._noted(name, func, args, kwargs), (args, kwargs))
        return self._noted(name, func, args, kwargs)

    def _noted(self, name: str | None, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name is not None:
            self.used.add(name)
        return func(*args, **kwargs)

    def _intercepted(self, part: nn.Module, name: str, forward: Forward) -> Forward:
        def answered(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:  # a unit that another unit calls
                return forward(*args, **kwargs)
            try:
                return self._answer(name, lambda: forward(*args, **kwargs), (args, kwargs))
            finally:
                for weight in part.parameters():
                    release(weight)

        return answered

    def _answer(self, name: str, run: Run, inputs: Any) -> Any:
        assert self._stage is not None
        self._inside = call = Call(name, self._counts[name])
        self._counts[name] += 1
        self.used.clear()
        try:
            return self._stage.call(call, run, inputs, in_tail=call in self.units.tail)
        finally:
            self._inside = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs of one call in a batch: the tensors are in a file, the rest is here.

    Attributes:
        call: the call.
        index: of the call in its batch.
        structure: of the outputs, by `torch.utils._pytree`; empty in the tail, of which nothing is kept.
        leaves: the outputs one by one: a list with its device for each tensor, and plain values.
        matrices: names of those that the call used, and perhaps more.
    """

    call: Call
    index: int
    structure: str
    leaves: tuple[Any, ...]
    matrices: tuple[str, ...]

    @property
    def in_tail(self) -> bool:
        """Return whether the call is not answered but runs every time."""
        return not self.structure

    @property
    def file(self) -> str:
        """Return the name of the file of the tensors."""
        return f"{self.index}{SUFFIX}"


CALLS = "calls.json"


def read_answers(folder: Path) -> dict[Call, Answer]:
    """Return the answers of a batch, in the order of its calls."""
    answers = {}
    for (name, number), index, *rest in read_list(folder / CALLS):
        structure, leaves, matrices = rest
        call = Call(name, number)
        answers[call] = Answer(call, index, structure, tuple(leaves), tuple(matrices))
    return answers


@dataclass(slots=True)
class Capture:
    """Stage in which units run, without gradients, and their outputs go to files.

    Attributes:
        folder: an empty one.
        used: matrices of the last call; `Interception.used`.
        answers: so far.
    """

    folder: Path
    used: Set[str]
    answers: list[Answer] = field(default_factory=list)

    def call(self, call: Call, run: Run, inputs: Any, *, in_tail: bool) -> Any:
        """Run the unit and keep its outputs."""
        tensors = [tensor for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)]
        versions = [tensor._version for tensor in tensors]
        outputs = run()
        if in_tail:
            self._add(call, "", ())
            return outputs
        if [tensor._version for tensor in tensors] != versions:
            raise ConfigError(
                f"the block {call.name!r} changes its inputs in place, so it cannot be repeated; name other blocks, or "
                "calibrate without blockwise"
            )
        with torch._C.DisableTorchFunction():
            self._write(call, outputs)
        return outputs

    def finish(self) -> None:
        """Write the list of the calls."""
        last = max((answer.index for answer in self.answers if not answer.in_tail), default=-1)
        if early := [answer.call.name for answer in self.answers[: last + 1] if answer.in_tail]:
            raise ConfigError(
                f"{early[0]!r} is called after all blocks in the first batch and before one in another; "
                "calibrate without blockwise"
            )
        text = json.dumps([(one.call, one.index, one.structure, one.leaves, one.matrices) for one in self.answers])
        (self.folder / CALLS).write_text(text, encoding="utf-8")

    def _add(self, call: Call, structure: str, leaves: tuple[Any, ...]) -> Answer:
        answer = Answer(call, len(self.answers), structure, leaves, tuple(sorted(self.used)))
        self.answers.append(answer)
        return answer

    def _write(self, call: Call, outputs: Any) -> None:
        values, structure = tree_flatten(outputs)
        tensors: dict[str, Tensor] = {}
        leaves: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                tensors[str(len(leaves))] = value
                leaves.append([str(value.device)])
            elif value is None or isinstance(value, bool | int | float | str):
                leaves.append(value)
            else:
                _refuse(call, type(value).__name__)
        try:
            answer = self._add(call, treespec_dumps(structure), tuple(leaves))
        except NotImplementedError:  # a namedtuple, or a class that did not register how it is written
            _refuse(call, type(outputs).__name__)
        if tensors:
            write_tensors(self.folder / answer.file, tensors)


def _refuse(call: Call, kind: str) -> NoReturn:
    raise ConfigError(
        f"the block {call.name!r} returns a {kind}, which cannot be kept on disk; name other blocks, or calibrate "
        "without blockwise"
    )


class _Answered(torch.autograd.Function):
    """Identity whose result has the memory of its input, yet may be changed in place as no leaf may."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # noqa: ARG004 (as autograd calls it)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


class Reached(BaseException):
    """Ends a run that repeats one call, after that call; no handler of ordinary errors catches it."""


@dataclass(slots=True)
class Answers:
    """Stage in which every unit is answered from its files, and the tail is recorded.

    Attributes:
        folder: of the batch.
        answers: call → answer.
        recorder: of the run, which records the target.
        target: call that is not answered but runs and ends the run; None answers all.
        leaves: (call, number of an output) → the answer, to which gradients can be taken.
        outputs: number of an output → tensor, of the target.
    """

    folder: Path
    answers: Mapping[Call, Answer]
    recorder: Recorder
    target: Call | None = None
    leaves: dict[tuple[Call, int], Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def call(self, call: Call, run: Run, inputs: Any, *, in_tail: bool) -> Any:  # noqa: ARG002 (as `Capture` has it)
        """Return the outputs of a call."""
        if in_tail and self.target is None:
            return run()
        if in_tail or call not in self.answers:
            raise not_repeated(call)
        if call == self.target:
            self.recorder.active = True
            outputs = run()
            with torch._C.DisableTorchFunction():
                self._compare(call, outputs)
            raise Reached
        with torch._C.DisableTorchFunction():
            return self._answer(self.answers[call])

    def _answer(self, answer: Answer) -> Any:
        tensors = self._tensors(answer)
        values = list(answer.leaves)
        for number, tensor in tensors.items():
            value = tensor.to(answer.leaves[number][0])
            if value.is_floating_point() or value.is_complex():
                self.leaves[answer.call, number] = value.requires_grad_(True)
                value = _Answered.apply(value)  # type: ignore[no-untyped-call]
            values[number] = value
        return tree_unflatten(values, treespec_loads(answer.structure))

    def _compare(self, call: Call, outputs: Any) -> None:
        expected = self._tensors(self.answers[call])
        values = tree_leaves(outputs)
        self.outputs = {number: values[number] for number in expected if number < len(values)}
        for number, tensor in expected.items():
            value = self.outputs.get(number)
            if not isinstance(value, Tensor) or value.shape != tensor.shape or not _is_near(value, tensor):
                raise not_repeated(call)

    def _tensors(self, answer: Answer) -> dict[int, Tensor]:
        path = self.folder / answer.file
        if not any(isinstance(leaf, list) for leaf in answer.leaves):
            return {}
        return {int(number): tensor for number, tensor in read_tensors(path)[0].items()}


def not_repeated(call: Call) -> ConfigError:
    """Return the error of a run that differs from an earlier one on the same batch."""
    return ConfigError(
        f"{call.name!r} computes something else when a batch is repeated; calibrate without blockwise, or make module "
        "and loss depend on nothing but the batch"
    )


def _is_near(value: Tensor, expected: Tensor) -> bool:
    """Return whether a repeated output is the same up to rounding; outputs that are not finite are for others."""
    if not value.is_floating_point():
        return torch.equal(value.detach().cpu(), expected)
    first, second = value.detach().float(), expected.to(value.device).float()
    norm = float(second.norm())
    return not math.isfinite(norm) or float((first - second).norm()) <= _DIFFERENCE * norm
