"""Nested checkpoints: any object that torch.save wrote ↔ its tensors by path and a skeleton of everything else.

    {"quantized": {"w": T}, "step": 3}  ◄──►  {"quantized/w": T},  ["dict", ["quantized", "step"], [["tensors", []], 3]]

The skeleton is JSON. null, booleans, integers, finite floats and strings stand for themselves; every other value is a
list that begins with its kind (docs/format.md names them all). A list of keys is written once: a dict with the keys of
an earlier dict refers to that list by number, and a dict of nothing but tensors stores only the order of its keys,
because the keys themselves are in the names of the tensors.

A path is the keys joined by "/": inside strings "~" is "~t", "/" is "~s", and a string that looks like a number has the
prefix "~:"; keys that are neither text nor integers are "~=" and their JSON; the key of a list item is its index. A
tensor that is the complete content is called "~". Only at the top level, a dict of nothing but tensors keeps its keys
unescaped.

Tensors that share one view of one memory stay one tensor; views that merely overlap become separate tensors, and so do
lists and dicts that the content refers to several times.
"""

import base64
import json
import math
import re
import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from birdie.artifact import numpy_values
from birdie.errors import ArtifactError, WeightsError
from birdie.runtime.device import dtype_name

Json = Any
Path = tuple[str, ...]

MAX_VALUES = 1 << 20  # in one tree, for writing and reading
MAX_DEPTH = 100
MAX_INTEGER_BITS = 4096
TENSOR = "~"  # the name of a tensor that is the complete content
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_DTYPES = {dtype_name(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}


def flatten(content: Any) -> tuple[dict[str, Tensor], Json]:
    """Return (tensors by path, skeleton) of `content`, which is not changed; equal contents give equal results."""
    writer = _Writer()
    try:
        skeleton = writer.node(content, ())
    except RecursionError as error:
        raise WeightsError("the checkpoint nests too deep; save its tensors in one flat dict") from error
    return writer.tensors, skeleton


def rebuild(skeleton: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the content that `flatten` took apart, with `tensors` at their paths."""
    reader = _Reader(tensors)
    try:
        content = reader.node(skeleton, ())
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        if isinstance(error, ArtifactError):
            raise
        raise _damaged(f"has a part that cannot be read ({str(error).splitlines()[0][:80] or 'no reason'})") from error
    unused = len(tensors) - len(reader.used)
    if unused:
        raise _damaged(f"does not use {unused:,} of its {len(tensors):,} tensors")
    return content


def _damaged(what: str) -> ArtifactError:
    return ArtifactError(f"the tree of the file {what}; the file is damaged")


def _name(path: Path) -> str:
    return "/".join(path) if path else TENSOR


def _segment(key: Json) -> str:
    """Return a dict's key (as JSON) as one part of a path."""
    if type(key) is str:
        return f"~:{key}" if _INTEGER.fullmatch(key) else key.replace("~", "~t").replace("/", "~s")
    if type(key) is int:
        return str(key)
    return "~=" + json.dumps(key).replace("~", "~t").replace("/", "~s")


def _text_key(segment: str) -> str:
    """Return the text key that `_segment` escaped to `segment`."""
    key = segment[2:] if segment.startswith("~:") else segment.replace("~s", "/").replace("~t", "~")
    if _segment(key) != segment:
        raise _damaged(f"has a tensor at {segment[:80]!r}, which is no path")
    return key


def _put_leaf(value: Any, path: Path) -> Json:
    """Return the JSON of a value without parts, or of a tuple of such values."""
    kind = type(value)
    if value is None or kind is bool or (kind is float and math.isfinite(value)):
        return value
    if kind is str and _is_text(value):
        return value
    if kind is int and value.bit_length() <= MAX_INTEGER_BITS:
        return value
    if kind is float:
        return ["float", struct.pack(">d", value).hex()]
    if kind is complex:
        return ["complex", struct.pack(">dd", value.real, value.imag).hex()]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, base64.b64encode(value).decode()]
    if kind is torch.Size:
        return ["size", *value]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is tuple:
        return ["tuple", *(_put_leaf(item, path) for item in value)]
    if (number := numpy_values.put(value)) is not None:
        return ["numpy", *number]
    problem = f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"
    problem += " that is no text or too long" if kind in (str, int) else ""
    where = f"{_name(path)!r} of the checkpoint" if path else "the checkpoint"
    raise WeightsError(
        f"{where} is or holds {problem}, which a .birdie file cannot store; save the checkpoint again without it, "
        "or compress its weights alone (--weights-only)"
    )


def _is_text(value: str) -> bool:
    """Return whether UTF-8 can encode `value`: it has no unpaired surrogate."""
    try:
        return bool(value.encode()) or not value
    except UnicodeEncodeError:
        return False


def _sized(form: str) -> Callable[[str], tuple[float, ...]]:
    return lambda text: struct.unpack(form, bytes.fromhex(text))


_LEAVES: dict[str, Callable[..., Any]] = {
    "float": lambda text: _sized(">d")(text)[0],
    "complex": lambda text: complex(*_sized(">dd")(text)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "size": lambda *sizes: torch.Size(sizes),
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
    "numpy": lambda code, text: numpy_values.number(code, bytes.fromhex(text)),
    "tuple": lambda *items: tuple(_take_leaf(item) for item in items),
}


def _take_leaf(node: Json) -> Any:
    """Return the value of a node that `_put_leaf` wrote."""
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise _damaged("holds a JSON object")
        return node
    if not node or not isinstance(node[0], str) or node[0] not in _LEAVES:
        raise _damaged(f"has a value of unknown kind {str(node[:1])[:80]}")
    return _LEAVES[node[0]](*node[1:])


def _flag(weight: Tensor) -> int:
    """Return 2 for a Parameter, and 1 more if the tensor requires gradients."""
    return 2 * isinstance(weight, Parameter) + weight.requires_grad


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, int] = {}  # JSON of a list of keys → its number
        self.values = 0

    def node(self, value: Any, path: Path) -> Json:
        self._spend(1, path)
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            self.tensors[_name(path)] = value
            return ["tensor", _flag(value)] if _flag(value) else ["tensor"]
        if kind is dict:
            return self._dict(value, path)
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], *(self.node(item, (*path, str(i))) for i, item in enumerate(value))]
        if kind is set:
            return ["set", *sorted((self._leaf(item, path) for item in value), key=json.dumps)]
        if (array := numpy_values.tensor_of(value)) is not None:
            self.tensors[_name(path)] = array
            return ["array"]
        return self._leaf(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        extra = dict(vars(value))
        about = [extra.pop("_metadata")] if "_metadata" in extra else []
        if extra:
            raise WeightsError(
                f"{_name(path)!r} of the checkpoint has the attribute {next(iter(extra))!r}, which a .birdie file "
                "cannot store; save it as a plain dict"
            )
        items = self._dict(value, path, explicit_keys=any(True for _ in tensors_in(about)))
        return [_MAPPINGS[type(value)], items, *(self.node(item, (*path, "~m")) for item in about)]

    def _dict(self, value: Mapping[Any, Any], path: Path, explicit_keys: bool = False) -> Json:
        """Return the node of a dict.

        Args:
            value: the dict.
            path: of the dict.
            explicit_keys: write the keys even if all values are tensors: other tensors lie below the same path, so
                the names of the tensors there do not determine the keys.
        """
        names = [self._leaf(key, path) for key in value]
        number = self._number_of_keys(names)
        flags = {_flag(item) if type(item) in (Tensor, Parameter) else None for item in value.values()}
        if explicit_keys or len(flags) != 1 or None in flags or any(type(key) is not str for key in value):
            nodes = [self.node(item, (*path, _segment(name))) for name, item in zip(names, value.values(), strict=True)]
            return ["dict", names if number is None else number, nodes]
        paths = [_name((*path, _segment(key))) if path else key for key in value]
        self.tensors |= dict(zip(paths, value.values(), strict=True))
        order = _order(paths) if number is None else number
        return ["tensors", order, *flags] if any(flags) else ["tensors", order]

    def _leaf(self, value: Any, path: Path) -> Json:
        self._spend(_cost(value), path)
        return _put_leaf(value, path)

    def _spend(self, values: int, path: Path) -> None:
        self.values += values
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            problem = "nests too deep" if len(path) > MAX_DEPTH else "is too large"
            raise WeightsError(f"the checkpoint {problem} at {_name(path)[:80]!r}; save its tensors in one flat dict")

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


def _cost(value: Any) -> int:
    """Return how many values a leaf counts as towards `MAX_VALUES`: long texts count as several."""
    if type(value) is tuple:
        return 1 + sum(_cost(item) for item in value)
    return 1 + len(value) // 64 if isinstance(value, str | bytes | bytearray) else 1


def _order(names: Sequence[str]) -> list[int]:
    """Return the ranks of `names` in sorted order as differences, each minus 1; empty if the names are sorted."""
    rank = {name: index for index, name in enumerate(sorted(names))}
    gaps = [rank[name] - previous - 1 for name, previous in zip(names, [-1, *(rank[n] for n in names)], strict=False)]
    return gaps if any(gaps) else []


class _Reader:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.names = tensors, sorted(tensors)
        self.used: set[str] = set()
        self.keys: list[list[tuple[Any, str]]] = []  # (key, its part of a path) of every list of keys
        self.flagged: dict[tuple[int, int], Tensor] = {}  # (id of the plain tensor, flag) → Parameter or leaf
        self.values = 0

    def _spend(self, values: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise _damaged("holds too many values")

    def node(self, node: Json, path: Path) -> Any:
        self._spend(1)
        if len(path) > MAX_DEPTH:
            raise _damaged("nests too deep")
        if not isinstance(node, list) or not node:
            return _take_leaf(node)
        kind, parts = node[0], node[1:]
        if kind == "tensor":
            return self._tensor(_name(path), *parts)
        if kind in ("list", "tuple"):
            items = (self.node(item, (*path, str(i))) for i, item in enumerate(parts))
            return list(items) if kind == "list" else tuple(items)
        if kind == "dict":
            return self._dict(path, *parts)
        if kind == "tensors":
            return self._tensors(path, *parts)
        if kind in ("ordered", "counter"):
            return self._mapping(kind, path, *parts)
        if kind == "array":
            return self._tensor(_name(path)).numpy()
        if kind == "set":
            return {_take_leaf(item) for item in parts}
        return _take_leaf(node)

    def _mapping(self, kind: str, path: Path, inner: Json, about: Json = None) -> Any:
        items = self.node(inner, path)
        if type(items) is not dict:
            raise _damaged(f"has {'an OrderedDict' if kind == 'ordered' else 'a Counter'} that is no dict")
        if kind == "counter":
            return Counter(items)
        ordered = OrderedDict(items)
        if about is not None:
            vars(ordered)["_metadata"] = self.node(about, (*path, "~m"))
        return ordered

    def _dict(self, path: Path, keys: Json, values: Json) -> dict[Any, Any]:
        names = self._keys(keys) if isinstance(keys, list) else self._earlier(keys)
        self._spend(sum(_cost(name) for name, _ in names))
        if not isinstance(values, list) or len(values) != len(names):
            raise _damaged("has a dict without a value for each key")
        content = {key: self.node(item, (*path, part)) for (key, part), item in zip(names, values, strict=True)}
        if len(content) != len(names):
            raise _damaged("has a dict with the same key twice")
        return content

    def _keys(self, keys: list[Json]) -> list[tuple[Any, str]]:
        names = [(_take_leaf(key), _segment(key)) for key in keys]
        self.keys.append(names)
        return names

    def _earlier(self, number: Json) -> list[tuple[Any, str]]:
        if type(number) is not int or not 0 <= number < len(self.keys):
            raise _damaged(f"refers to list of keys {str(number)[:20]}, which does not exist")
        return self.keys[number]

    def _tensors(self, path: Path, order: Json, flag: Json = 0) -> dict[str, Tensor]:
        if not isinstance(order, list):
            keys = self._earlier(order)
            if len(keys) > len(self.names) - len(self.used) or not all(type(key) is str for key, _ in keys):
                raise _damaged("has a dict of tensors that the file does not hold")
            return {key: self._tensor(_name((*path, part)) if path else key, flag) for key, part in keys}
        names = self._below(path)
        ranks = list(accumulate((step + 1 for step in order), initial=-1))[1:] if order else list(range(len(names)))
        if sorted(ranks) != list(range(len(names))) or not names:
            raise _damaged(f"orders the tensors of {_name(path)[:80]!r} by numbers that are no permutation")
        start = len(_name(path)) + 1 if path else 0
        texts = [_text_key(names[rank][start:]) if path else names[rank] for rank in ranks]
        self.keys.append([(text, _segment(text)) for text in texts])
        return {text: self._tensor(names[rank], flag) for text, rank in zip(texts, ranks, strict=True)}

    def _below(self, path: Path) -> list[str]:
        """Return the names of all tensors in the dict at `path`, sorted."""
        if not path:
            return self.names
        prefix = _name(path)
        return self.names[bisect_left(self.names, prefix + "/") : bisect_left(self.names, prefix + "0")]  # "/" < "0"

    def _tensor(self, name: str, flag: Json = 0) -> Tensor:
        """Return the tensor called `name`, as a Parameter or with gradients as `flag` says.

        Tied names with the same flag get the same object.
        """
        if name not in self.tensors or name in self.used:
            raise _damaged(f"has no tensor, or the same one twice, at {name[:80]!r}")
        self.used.add(name)
        weight = self.tensors[name]
        if type(flag) is not int or not 0 <= flag <= 3:
            raise _damaged(f"gives the tensor {name[:80]!r} flag {str(flag)[:20]}, which means nothing")
        if not flag:
            return weight
        if flag & 1 and not (weight.is_floating_point() or weight.is_complex()):
            raise _damaged(f"wants gradients of {name[:80]!r}, which holds integers")
        if (id(weight), flag) not in self.flagged:
            leaf = Parameter(weight, requires_grad=bool(flag & 1)) if flag & 2 else weight.detach().requires_grad_()
            self.flagged[id(weight), flag] = leaf
        return self.flagged[id(weight), flag]
