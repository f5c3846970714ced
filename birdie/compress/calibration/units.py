"""Units of a module, which blockwise calibration runs one at a time: found in the calls of one batch.

    loss(module, first batch) ──observed──► tree of calls ──► blocks, modules beside them, products outside of both

A block is a member of an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict` (the outermost one), or a module that the
caller names. A module that holds no block is a unit as well if it owns matrices: an embedding, a projection. A product
with a matrix that neither of them calls, such as `F.linear` in the forward function of the module itself, is a unit of
its own. A unit must not hold the loss. All that is called after the last block, usually the head, is the tail: it runs
together with the loss, so that its outputs, the logits, need not be kept.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from birdie.compress.calibration.sensitivity import PRODUCTS, Key, Recorder, argument
from birdie.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Forward = Callable[..., Any]


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


class Observer(Recorder):
    """Records which module calls which, and where matrices are multiplied."""

    def __init__(self, names: Mapping[Key, str]) -> None:
        super().__init__(names, torch.Generator(), 1.0, torch.device("cpu"), gradients=True)
        self.stack = [Node("", owns=False)]  # the loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note products and cross-entropies."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            for node in self.stack:
                node.has_loss = True
            return func(*args, **kwargs)
        if func in PRODUCTS and (name := self._name(argument(args, kwargs, 1, "weight"))) is not None:
            self.stack[-1].parts.append(name)
            for node in self.stack:
                node.uses = True
        return super().__torch_function__(func, types, args, kwargs)

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
    module: nn.Module, names: Mapping[Key, str], run: Callable[[], Any], blocks: Collection[str] | None = None
) -> Units:
    """Return the units of a module, as one batch uses them.

    Args:
        module: in evaluation mode.
        names: memory → name of its matrices.
        run: computes the loss of the batch, without gradients.
        blocks: names of the modules to take as blocks; None finds them.
    """
    modules = {part: name for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule)}
    chosen = _members(module) if blocks is None else set(blocks)
    if blocks is not None:
        _require_names(chosen, set(modules.values()))
    observer = Observer(names)
    with replaced_forwards(modules, observer.forward), observer:
        run()
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
