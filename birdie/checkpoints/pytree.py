"""Nested checkpoints: any object that torch.save wrote ↔ its tensors by path and a skeleton of everything else.

    {"quantized": {"w": T}, "step": 3}  ◄──►  {"quantized/w": T},  ["dict", ["quantized", "step"], [["tensors", []], 3]]

The skeleton is JSON. null, booleans, integers, finite floats and strings stand for themselves; every other value is a
list that begins with its kind (docs/format.md names them all). A list of keys is written once: a dict with the keys of
an earlier dict refers to that list by number, and a dict of nothing but tensors stores only the order of its keys
(birdie.checkpoints.order), because the keys themselves are in the names of the tensors.

A path is the keys joined by "/": inside strings "~" is "~t", "/" is "~s", and a string that looks like a number has the
prefix "~:"; keys that are neither text nor integers are "~=" and their JSON; the key of a list item is its index. A
tensor that is the complete content is called "~". Only at the top level, a dict of nothing but tensors keeps its keys
unescaped.

Tensors that share one view of one memory stay one tensor, and views that overlap stay views of one memory
(birdie.checkpoints.views); lists and dicts that the content refers to several times become separate ones. What
consists of tensors, such as a sparse one, is stored as its parts (birdie.checkpoints.compound).
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from birdie.checkpoints.compound import KINDS, kind_of
from birdie.checkpoints.leaves import cost, put, refusal
from birdie.checkpoints.limits import require_count, require_names
from birdie.checkpoints.rebuild import (
    ATTRIBUTES,
    BASE,
    MAX_DEPTH,
    MAX_VALUES,
    TENSOR,
    Json,
    Path,
    name_of,
    rebuild,
    segment,
)
from birdie.checkpoints.stored_order import order_of
from birdie.checkpoints.views import Key, key_of, order_in_memory, views_in
from birdie.compress.state import lacks_elements, unstorable
from birdie.errors import WeightsError

__all__ = ["MAX_DEPTH", "MAX_VALUES", "TENSOR", "flatten", "rebuild", "tensors_in"]

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}


def flatten(content: Any) -> tuple[dict[str, Tensor], Json]:
    """Return (tensors by path, skeleton) of `content`, which is not changed; equal contents give equal results."""
    tensors = list(tensors_in(content))
    require_count(len({id(tensor) for tensor in tensors}))
    if isinstance(content, Mapping) and len(content) == len(tensors):
        require_names([key for key in content if isinstance(key, str)])
    writer = _NodeWriter(content)
    try:
        skeleton = writer.node(content, ())
    except RecursionError as error:
        raise WeightsError("the checkpoint nests too deep; save its tensors in one flat dict") from error
    return writer.tensors, skeleton


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that is stored as one, with all of its elements."""
    return type(value) in (Tensor, Parameter) and kind_of(value) is None and not lacks_elements(value)


def holds_values(skeleton: Json) -> bool:
    """Return whether a content has more than tensors in dicts and lists, as a step; `_metadata` do not count."""
    if not isinstance(skeleton, list) or not skeleton:
        return True
    kind, parts = skeleton[0], skeleton[1:]
    if kind in ("tensor", "tensors"):
        return False
    if kind in ("list", "tuple"):
        return any(map(holds_values, parts))
    if kind == "dict" and len(parts) == 2 and isinstance(parts[1], list):
        return any(map(holds_values, parts[1]))
    return kind not in _MAPPINGS.values() or holds_values(*parts[:1])


def _where(path: Path) -> str:
    """Return where in the checkpoint a value is, for messages."""
    if ATTRIBUTES in path:
        owner, key = path[: path.index(ATTRIBUTES)], path[path.index(ATTRIBUTES) + 1 :]
        return f"the attribute {name_of(key)!r} of the tensor {name_of(owner)!r}"
    return f"{name_of(path)!r} of the checkpoint" if path else "the checkpoint"


def _flag(weight: Tensor) -> int:
    """Return 2 for a Parameter, and 1 more if the tensor requires gradients."""
    return 2 * isinstance(weight, Parameter) + weight.requires_grad


def _trait(weight: Tensor) -> Json:
    """Return the flag of a tensor; if it is not in row-major order, a list of that and of its dimensions."""
    order = order_in_memory(weight)
    return [_flag(weight), *order] if order else _flag(weight)


class _NodeWriter:
    def __init__(self, content: Any) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, int] = {}  # JSON of a list of keys → its number
        self.values = 0
        self.views = views_in(tensor for tensor in tensors_in(content) if _is_plain(tensor))
        self.paths: dict[Key, str] = {}  # tensor → its first name
        self.waiting: dict[Key, list[list[Json]]] = {}  # base → nodes of views that came before it

    def node(self, value: Any, path: Path) -> Json:
        self._spend(1, path)
        kind = type(value)
        if isinstance(value, Tensor) or kind_of(value) is not None:
            return self._with_attributes(value, path)
        if kind is dict:
            return self._dict(value, path)
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], *(self.node(item, (*path, str(i))) for i, item in enumerate(value))]
        if kind is set:
            return ["set", *sorted((self._leaf(item, path) for item in value), key=json.dumps)]
        return self._leaf(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        extra = dict(vars(value))
        about = [extra.pop("_metadata")] if "_metadata" in extra else []
        if extra:
            raise WeightsError(
                f"{name_of(path)!r} of the checkpoint has the attribute {next(iter(extra))!r}, which a .birdie file "
                "cannot store; save it as a plain dict"
            )
        items = self._dict(value, path, explicit_keys=any(True for _ in tensors_in(about)))
        return [_MAPPINGS[type(value)], items, *(self.node(item, (*path, "~m")) for item in about)]

    def _dict(self, value: Mapping[Any, Any], path: Path, explicit_keys: bool = False) -> Json:
        """Return the node of a dict.

        Args:
            explicit_keys: write the keys even if all values are tensors: other tensors lie below the same path, so
                the names of the tensors there do not determine the keys.
        """
        names = [self._leaf(key, path) for key in value]
        number = self._number_of_keys(names)
        are_texts = all(type(key) is str for key in value)
        if explicit_keys or not value or not are_texts or not all(map(self._is_entry, value.values())):
            nodes = [self.node(item, (*path, segment(name))) for name, item in zip(names, value.values(), strict=True)]
            return ["dict", names if number is None else number, nodes]
        parts = [segment(key) if path else key for key in value]
        for part, item in zip(parts, value.values(), strict=True):
            self._add(name_of((*path, part)), item)
        order = order_of(parts) if number is None else number
        traits = [_trait(item) for item in value.values()]
        if any(trait != traits[0] for trait in traits) or isinstance(traits[0], list):
            return ["tensors", order, traits]
        return ["tensors", order, traits[0]] if traits[0] else ["tensors", order]

    def _is_entry(self, value: Any) -> bool:
        """Return whether a value is a tensor that the file holds as it is."""
        return _is_plain(value) and not vars(value) and not (self.views and key_of(value) in self.views)

    def _add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        if self.views:
            self.paths.setdefault(key_of(tensor), name)
            for node in self.waiting.pop(key_of(tensor), ()):
                node[1] = name

    def _with_attributes(self, value: Any, path: Path) -> Json:
        """Return the node of a tensor, or of what consists of tensors."""
        attributes = vars(value) if type(value) in (Tensor, Parameter) else {}
        for key, item in attributes.items():
            if hasattr(Tensor, key) or any(True for _ in tensors_in(item)):
                problem = "the name of one that all tensors have" if hasattr(Tensor, key) else "a tensor"
                raise refusal(f"the attribute {key!r} of the tensor {name_of(path)!r}", problem)
        node = self._tensor(value, path)
        return ["with", node, self.node(dict(attributes), (*path, ATTRIBUTES))] if attributes else node

    def _tensor(self, value: Any, path: Path) -> Json:
        kind = kind_of(value)
        flag = [_flag(value)] if isinstance(value, Tensor) and _flag(value) else []
        if kind is not None:
            parts = KINDS[kind].apart(value.detach() if isinstance(value, Tensor) else value)
            return ["made", kind, self.node(parts, path), *flag]
        if not _is_plain(value):
            raise unstorable(name_of(path), lacks_elements(value) or f"of the class {type(value).__name__}")
        view = self.views.get(key_of(value)) if self.views else None
        if view is None:
            self._add(name_of(path), value)
            trait = _trait(value)
            return ["tensor", trait] if trait else ["tensor"]
        base = key_of(view.base)
        if view.is_new and base not in self.paths:
            self._add(name_of((*path, BASE)), view.base)
        node = ["view", self.paths.get(base), view.offset, [*value.shape], [*value.stride()], *flag]
        if node[1] is None:
            self.waiting.setdefault(base, []).append(node)
        return node

    def _leaf(self, value: Any, path: Path) -> Json:
        self._spend(cost(value), path)
        return put(value, _where(path))

    def _spend(self, values: int, path: Path) -> None:
        self.values += values
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            problem = "nests too deep" if len(path) > MAX_DEPTH else "is too large"
            raise WeightsError(f"the checkpoint {problem} at {name_of(path)[:80]!r}; save its tensors in one flat dict")

    def _number_of_keys(self, keys: list[Json]) -> int | None:
        """Return the number of an earlier list with the same keys; None for a new list, which gets the next number."""
        text = json.dumps(keys)
        if text in self.keys:
            return self.keys[text]
        self.keys[text] = len(self.keys)
        return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield `value` if it is a tensor, and all tensors in its dicts, lists and tuples at any depth."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                waiting += [*value.values(), *getattr(value, "__dict__", {}).values()]
            elif isinstance(value, list | tuple):
                waiting += value
