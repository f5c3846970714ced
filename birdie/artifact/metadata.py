"""Metadata of a file: one JSON object in the container, or nothing.

budget     byte budget of the file                  metadata   JSON of the caller of `save`
tree       how the tensors nest (birdie.checkpoints.pytree), if the file holds a complete checkpoint
schemes    code → name of the schemes in the file that do not ship with birdie
files      name → bytes of the files kept beside the tensors (birdie.artifact.kept_files)
copies     indices of those aliases, among all sorted by name, whose tensors are independent of their targets
state      versions and extra state of the modules (birdie.artifact.state_dict)
base       of a file of deltas: "of", the base's file name, and "names", name → name in the base, where they differ
           ("inside": true if the base is the file itself)
order      how names are moved from their natural order to that of the state dict (birdie.checkpoints.order)
link       of a link of a chain: its checkpoint, and the link that it is a delta to (birdie.artifact.links)
onnx       of an ONNX model: where its tensors lie in its files (birdie.checkpoints.onnx_file)
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from birdie.checkpoints.order import is_order
from birdie.errors import ArtifactError, ConfigError

MAX_VALUES = 1 << 22  # most commas and brackets in the JSON: parsed Python values take a hundred times their bytes
MAX_DEPTH = 500  # of brackets in brackets: half of the calls that Python allows, by which its parser goes down
MAX_BYTES = 1 << 48  # of a file that is kept: as many as an entry has elements
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def to_bytes(
    metadata: Mapping[str, Any] | None = None,
    budget: int | None = None,
    tree: Any = None,
    schemes: Mapping[str, str] | None = None,
    files: Mapping[str, int] | None = None,
    copies: Sequence[int] | None = None,
    state: Any = None,
    base: Mapping[str, Any] | None = None,
    link: Mapping[str, Any] | None = None,
    order: Any = None,
    onnx: Sequence[Any] | None = None,
) -> bytes:
    """Return the JSON of the arguments that are not None; equal arguments give equal bytes."""
    fields = {
        "budget": budget,
        "metadata": dict(metadata) if metadata else None,
        "tree": tree,
        "schemes": dict(schemes) if schemes else None,
        "files": files,
        "copies": copies or None,
        "state": state,
        "base": base,
        "link": link,
        "order": order,
        "onnx": onnx,
    }
    present = {key: value for key, value in fields.items() if value is not None}
    if not present:
        return b""
    try:
        text = json.dumps(present, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"metadata cannot be written as JSON ({error}); keep to text, finite numbers, lists and dicts"
        ) from error
    if _has_too_many_values(text):
        raise ConfigError("metadata holds too many values for a file's header; store them as a tensor")
    if _is_too_deep(text):
        raise ConfigError(f"metadata nests deeper than {MAX_DEPTH} lists and dicts; flatten it")
    return text


def parse(data: bytes, where: str, aliases: int) -> dict[str, Any]:
    """Return the arguments of `to_bytes`: a dict with some of its keys, each of the kind that `to_bytes` writes.

    Args:
        where: name of the file, for error messages.
    """
    if not data:
        return {}
    if _has_too_many_values(data) or _is_too_deep(data):
        raise ArtifactError(f"the metadata of {where} holds more values than birdie writes; the file is damaged")
    try:  # as text: of bytes, json would also take UTF-16 and what is no Unicode
        fields = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the metadata of {where} is not JSON; the file is damaged") from error
    if not isinstance(fields, dict):
        raise ArtifactError(f"the metadata of {where} is not what birdie writes; the file is damaged")
    for key, is_sound in _KINDS.items():
        if key in fields and not is_sound(fields[key]):
            raise ArtifactError(f"{key!r} in the metadata of {where} is not what birdie writes; the file is damaged")
    if max(fields.get("copies", []), default=-1) >= aliases:
        raise ArtifactError(f"'copies' in the metadata of {where} are no indices of aliases; the file is damaged")
    return fields


def copies_of(aliases: Iterable[str], copies: Collection[str]) -> list[int]:
    """Return the field `copies`: the indices of the names `copies` among the aliases of a file."""
    return [index for index, name in enumerate(sorted(aliases)) if name in copies]


def copies_in(fields: Mapping[str, Any], aliases: Iterable[str]) -> list[str]:
    """Return the names of aliases that are copies, from the fields of a file."""
    names = sorted(aliases)
    return [names[index] for index in fields.get("copies", [])]


def base_in(fields: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the file name of the base, and name → name in the base, from the fields of a file."""
    about = fields.get("base", {})
    return about.get("of", ""), about.get("names", {})


def is_inside(fields: Mapping[str, Any]) -> bool:
    """Return whether the base of a file of deltas is the file itself."""
    return bool(fields.get("base", {}).get("inside"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of `pairs`, none of whose keys is there twice."""
    content = dict(pairs)
    return content if len(content) == len(pairs) else _refuse("key")


def _refuse(what: str) -> NoReturn:
    """Refuse NaN, Infinity and repeated keys, which birdie never writes."""
    raise ValueError(what)


def _finite(text: str) -> float:
    """Return a number; refuse one that is beyond all finite ones."""
    number = float(text)
    return number if math.isfinite(number) else _refuse("number")


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _are_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_natural(size) and size <= MAX_BYTES for size in value.values())


def _are_rising(value: Any) -> bool:
    is_list = isinstance(value, list) and all(map(_is_natural, value))
    return is_list and all(low < high for low, high in pairwise(value))


def _is_state(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(key, {}), dict) for key in ("versions", "extra")):
        return False
    return all(type(version) in (int, list) for version in value.get("versions", {}).values())


def _is_base(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("of", ""), str):
        return False
    return type(value.get("inside", False)) is bool and _are_names(value.get("names", {}))


def _is_node(value: Any) -> bool:
    return not isinstance(value, dict)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "budget": _is_natural,
    "metadata": _is_object,
    "tree": _is_node,
    "schemes": _are_names,
    "files": _are_sizes,
    "copies": _are_rising,
    "state": _is_state,
    "base": _is_base,
    "order": is_order,
    "link": _is_object,
    "onnx": _is_list,
}
"""Kinds of the values of all keys that are known (docs/format.md, "Metadata"; birdie/standalone/c/birdie.c)."""


def _has_too_many_values(text: bytes) -> bool:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES


def _is_too_deep(text: bytes) -> bool:
    """Return whether brackets nest too deep for the parsers of some readers."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    marks = np.frombuffer(_TEXT.sub(b"", text), np.uint8) | 32  # [ ] as { }
    steps = (marks == ord("{")).astype(np.int32) - (marks == ord("}"))
    return int(steps.cumsum().max(initial=0)) > MAX_DEPTH
