"""Metadata of a file: one JSON object in the container, or nothing.

budget     byte budget of the file                  metadata   JSON of the caller of `save`
tree       how the tensors nest (birdie.artifact.pytree), if the file holds a complete checkpoint
schemes    code → name of the schemes in the file that do not ship with birdie
files      name → bytes of the files kept beside the tensors (birdie.artifact.kept_files)
copies     indices of those aliases, among all sorted by name, whose tensors are independent of their targets
state      versions and extra state of the modules (birdie.artifact.state_dict)
base       of a file of differences: "of", the base's file name, and "names", name → name in the base, where they differ
           ("inside": true if the base is the file itself)
order      how names are moved from their natural order to that of the state dict (birdie.artifact.order)
link       of a link of a chain: its checkpoint, and the link that it is a difference to (birdie.artifact.links)
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from birdie.errors import ArtifactError, ConfigError

MAX_VALUES = 1 << 22  # most commas and brackets in the JSON: parsed Python values take a hundred times their bytes


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
    return text


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return the arguments of `to_bytes`: a dict with some of its keys.

    Args:
        data: the container's metadata.
        where: name of the file, for error messages.
    """
    if not data:
        return {}
    if _has_too_many_values(data):
        raise ArtifactError(f"the metadata of {where} holds more values than birdie writes; the file is damaged")
    try:
        fields = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the metadata of {where} is not JSON; the file is damaged") from error
    valid = isinstance(fields, dict) and isinstance(fields.get("metadata", {}), dict)
    budget = fields.get("budget", 0) if valid else None
    if type(budget) is not int or budget < 0 or not _are_names(fields.get("schemes", {})):
        raise ArtifactError(f"the metadata of {where} is not what birdie writes; the file is damaged")
    return dict(fields)


def copies_of(aliases: Iterable[str], copies: Collection[str]) -> list[int]:
    """Return the field `copies`: the indices of the names `copies` among the aliases of a file."""
    return [index for index, name in enumerate(sorted(aliases)) if name in copies]


def copies_in(fields: Mapping[str, Any], aliases: Iterable[str], where: str) -> list[str]:
    """Return the names of aliases that are copies, from the fields of a file."""
    names, indices = sorted(aliases), fields.get("copies", [])
    valid = isinstance(indices, list) and all(type(index) is int for index in indices)
    if not valid or any(not low < high for low, high in pairwise([-1, *indices, len(names)])):
        raise ArtifactError(f"the copies in the metadata of {where} are no rising indices of aliases; it is damaged")
    return [names[index] for index in indices]


def base_in(fields: Mapping[str, Any], where: str) -> tuple[str, dict[str, str]]:
    """Return the file name of the base, and name → name in the base, from the fields of a file."""
    about = fields.get("base", {})
    file, names = (about.get("of", ""), about.get("names", {})) if isinstance(about, dict) else (None, {})
    if not isinstance(file, str) or not _are_names(names):
        raise ArtifactError(f"the base in the metadata of {where} is not what birdie writes; the file is damaged")
    return file, names


def is_inside(fields: Mapping[str, Any]) -> bool:
    """Return whether the base of a file of differences is the file itself."""
    about = fields.get("base")
    return isinstance(about, dict) and about.get("inside") is True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of `pairs`, none of whose keys is there twice."""
    content = dict(pairs)
    return content if len(content) == len(pairs) else _refuse("key")


def _refuse(what: str) -> NoReturn:
    """Refuse NaN, Infinity and repeated keys, which birdie never writes."""
    raise ValueError(what)


def _are_names(schemes: Any) -> bool:
    return isinstance(schemes, dict) and all(isinstance(name, str) for name in schemes.values())


def _has_too_many_values(text: bytes) -> bool:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES
