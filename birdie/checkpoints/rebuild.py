"""Nested checkpoints from their tensors by path and a skeleton of everything else (birdie.checkpoints.pytree)."""

import json
import re
import struct
import warnings
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from birdie.checkpoints.compound import KINDS
from birdie.checkpoints.leaves import cost, damaged, take
from birdie.checkpoints.order import in_order
from birdie.checkpoints.views import laid_out, view_of
from birdie.errors import ArtifactError

Json = Any
Path = tuple[str, ...]

MAX_VALUES = 1 << 20  # in one tree, for writing and reading
MAX_DEPTH = 100
TENSOR = "~"  # the name of a tensor that is the complete content
ATTRIBUTES, BASE = "~a", "~b"  # parts of paths: of the attributes of a tensor, and of a vector made for views
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def rebuild(skeleton: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the content that `flatten` took apart, with `tensors` at their paths."""
    return _rebuilt(skeleton, tensors)[0]


def with_views(skeleton: Json, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by path, also those that are views of others; without vectors made for views."""
    return dict(_rebuilt(skeleton, tensors)[1].used)


def has_views(skeleton: Json) -> bool:
    """Return whether tensors are views of others, which have no entry in the file."""
    waiting = [skeleton]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            if node[:1] == ["view"]:
                return True
            waiting += node
    return False


def _rebuilt(skeleton: Json, tensors: Mapping[str, Tensor]) -> tuple[Any, "_NodeReader"]:
    reader = _NodeReader(tensors)
    try:
        content = reader.node(skeleton, ())
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        if isinstance(error, ArtifactError):
            raise
        raise damaged(f"has a part that cannot be read ({str(error).splitlines()[0][:80] or 'no reason'})") from error
    unused = len(tensors.keys() - reader.used.keys() - reader.bases)
    if unused:
        raise damaged(f"does not use {unused:,} of its {len(tensors):,} tensors")
    return content, reader


def name_of(path: Path) -> str:
    """Return the name of the tensor at a path."""
    return "/".join(path) if path else TENSOR


def segment(key: Json) -> str:
    """Return a dict's key (as JSON) as one part of a path."""
    if type(key) is str:
        return f"~:{key}" if _INTEGER.fullmatch(key) else key.replace("~", "~t").replace("/", "~s")
    if type(key) is int:
        return str(key)
    return "~=" + json.dumps(key).replace("~", "~t").replace("/", "~s")


def _text_key(part: str) -> str:
    """Return the text key that `segment` escaped to `part`."""
    key = part[2:] if part.startswith("~:") else part.replace("~s", "/").replace("~t", "~")
    if segment(key) != part:
        raise damaged(f"has a tensor at {part[:80]!r}, which is no path")
    return key


class _NodeReader:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.names = tensors, sorted(tensors)
        self.used: dict[str, Tensor] = {}  # by path, in the order of the content
        self.bases: set[str] = set()  # of views, which no node of their own uses
        self.keys: list[list[tuple[Any, str]]] = []  # (key, its part of a path) of every list of keys
        self.restored: dict[tuple[int, str], Any] = {}  # (id of the tensor in the file, JSON) → what stands for it
        self.values = 0

    def _spend(self, values: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise damaged("holds too many values")

    def node(self, node: Json, path: Path) -> Any:
        self._spend(1)
        if len(path) > MAX_DEPTH:
            raise damaged("nests too deep")
        if not isinstance(node, list) or not node:
            return take(node)
        kind, parts = node[0], node[1:]
        if kind == "tensor":
            return self._tensor(name_of(path), *parts)
        if kind in ("list", "tuple"):
            items = (self.node(item, (*path, str(i))) for i, item in enumerate(parts))
            return list(items) if kind == "list" else tuple(items)
        if kind == "dict":
            return self._dict(path, *parts)
        if kind == "tensors":
            return self._tensors(path, *parts)
        if kind in ("ordered", "counter"):
            return self._mapping(kind, path, *parts)
        if kind == "set":
            return {take(item) for item in parts}
        if kind == "made":
            return self._compound(path, *parts)
        if kind == "view":
            return self._view(path, *parts)
        if kind == "with":
            return self._with_attributes(path, *parts)
        return take(node)

    def _mapping(self, kind: str, path: Path, inner: Json, about: Json = None) -> Any:
        items = self.node(inner, path)
        if type(items) is not dict:
            raise damaged(f"has {'an OrderedDict' if kind == 'ordered' else 'a Counter'} that is no dict")
        if kind == "counter":
            return Counter(items)
        ordered = OrderedDict(items)
        if about is not None:
            vars(ordered)["_metadata"] = self.node(about, (*path, "~m"))
        return ordered

    def _dict(self, path: Path, keys: Json, values: Json) -> dict[Any, Any]:
        names = self._keys(keys) if isinstance(keys, list) else self._earlier(keys)
        self._spend(sum(cost(name) for name, _ in names))
        if not isinstance(values, list) or len(values) != len(names):
            raise damaged("has a dict without a value for each key")
        content = {key: self.node(item, (*path, part)) for (key, part), item in zip(names, values, strict=True)}
        if len(content) != len(names):
            raise damaged("has a dict with the same key twice")
        return content

    def _keys(self, keys: list[Json]) -> list[tuple[Any, str]]:
        names = [(take(key), segment(key)) for key in keys]
        self.keys.append(names)
        return names

    def _earlier(self, number: Json) -> list[tuple[Any, str]]:
        if type(number) is not int or not 0 <= number < len(self.keys):
            raise damaged(f"refers to list of keys {str(number)[:20]}, which does not exist")
        return self.keys[number]

    def _tensors(self, path: Path, order: Json, traits: Json = 0) -> dict[str, Tensor]:
        if isinstance(order, list):
            start = len(name_of(path)) + 1 if path else 0
            parts = in_order([name[start:] for name in self._below(path)], order, "the tree of the file")
            texts = [_text_key(part) if path else part for part in parts]
            names = list(zip(texts, parts, strict=True))
            self.keys.append([(text, segment(text)) for text in texts])
        else:
            names = self._earlier(order)
            if len(names) > len(self.names) or not all(type(key) is str for key, _ in names):
                raise damaged("has a dict of tensors that the file does not hold")
            names = names if path else [(key, key) for key, _ in names]
        if not names or (isinstance(traits, list) and len(traits) != len(names)):
            raise damaged(f"has not as many tensors in {name_of(path)[:80]!r} as it says")
        traits = traits if isinstance(traits, list) else [traits] * len(names)
        return {
            key: self._tensor(name_of((*path, part)), trait) for (key, part), trait in zip(names, traits, strict=True)
        }

    def _below(self, path: Path) -> list[str]:
        """Return the names of all tensors in the dict at `path`, sorted."""
        if not path:
            return self.names
        prefix = name_of(path)
        return self.names[bisect_left(self.names, prefix + "/") : bisect_left(self.names, prefix + "0")]  # "/" < "0"

    def _tensor(self, name: str, trait: Json = 0, *, attributes: Mapping[str, Any] | None = None) -> Tensor:
        """Return the tensor called `name`, with its traits; tied names with the same ones get the same object."""
        if name not in self.tensors or name in self.used:
            raise damaged(f"has no tensor, or the same one twice, at {name[:80]!r}")
        weight = self.used[name] = self.tensors[name]
        flag, *order = trait if isinstance(trait, list) and trait else [trait]
        key = id(weight), json.dumps([order, flag, attributes], default=repr)
        if key not in self.restored:
            if order and (id(weight), str(order)) not in self.restored:  # of all flags there is one memory
                self.restored[id(weight), str(order)] = laid_out(weight, order)
            plain = self.restored[id(weight), str(order)] if order else weight
            self.restored[key] = self._marked(plain, flag, attributes, name)
        return self.restored[key]  # type: ignore[no-any-return]

    def _marked(self, value: Any, flag: Json, attributes: Mapping[str, Any] | None, name: str) -> Any:
        """Return a tensor as a Parameter or with gradients as `flag` says, and with attributes."""
        if type(flag) is not int or not 0 <= flag <= 3 or (flag and not isinstance(value, Tensor)):
            raise damaged(f"gives the tensor {name[:80]!r} flag {str(flag)[:20]}, which means nothing")
        if flag & 1 and not (value.is_floating_point() or value.is_complex()):
            raise damaged(f"wants gradients of {name[:80]!r}, which holds integers")
        if flag:
            value = Parameter(value, requires_grad=bool(flag & 1)) if flag & 2 else value.detach().requires_grad_()
        if attributes is not None:
            value = value if flag else value.detach()
            vars(value).update(attributes)
        return value

    def _compound(self, path: Path, kind: Json, parts: Json, flag: Json = 0) -> Any:
        items = self.node(parts, path)
        if kind not in KINDS or type(items) is not list:
            raise damaged(f"has a value of unknown kind {str(kind)[:80]}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that quantized and nested tensors may change
            value = KINDS[kind].together(*items)
        return self._marked(value, flag, None, name_of(path))

    def _view(self, path: Path, base: Json, offset: Json, size: Json, stride: Json, flag: Json = 0) -> Any:
        if base not in self.tensors:
            raise damaged(f"has a view of {str(base)[:80]!r}, which does not exist")
        if base.rpartition("/")[2] == BASE:
            self.bases.add(base)
        view = self.used[name_of(path)] = view_of(self.tensors[base], offset, size, stride)
        return self._marked(view, flag, None, name_of(path))

    def _with_attributes(self, path: Path, inner: Json, attributes: Json) -> Any:
        content = self.node(attributes, (*path, ATTRIBUTES))
        if type(content) is not dict or not all(type(key) is str and not hasattr(Tensor, key) for key in content):
            raise damaged(f"has attributes of {name_of(path)[:80]!r} that no tensor has")
        if isinstance(inner, list) and inner[:1] == ["tensor"]:
            return self._tensor(name_of(path), *inner[1:2], attributes=content)
        return self._marked(self.node(inner, path), 0, content, name_of(path))
