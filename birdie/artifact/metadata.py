"""What a file says about itself besides its tensors: one JSON object in the container's metadata, or nothing.

budget     bytes the file was allowed               metadata   what the caller of `save` added
tree       how the tensors nest (birdie.artifact.pytree), where the file holds a whole checkpoint
schemes    number → name of the schemes in the file that are not birdie's own
"""

import json
from collections.abc import Mapping
from typing import Any

from birdie.errors import ArtifactError, ConfigError

MAX_VALUES = 1 << 22  # as many commas and brackets: parsed Python values take a hundred times their bytes


def to_bytes(
    metadata: Mapping[str, Any] | None = None,
    budget: int | None = None,
    tree: Any = None,
    schemes: Mapping[str, str] | None = None,
) -> bytes:
    """Return the JSON of what there is; the same facts give the same bytes.

    Raises:
        ConfigError: `metadata` is not JSON.
    """
    fields = {
        "budget": budget,
        "metadata": dict(metadata) if metadata else None,
        "tree": tree,
        "schemes": dict(schemes) if schemes else None,
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
    """Return what `to_bytes` was given: a dict with some of budget, metadata, tree and schemes.

    Args:
        data: the container's metadata.
        where: the file's name, for errors.

    Raises:
        ArtifactError: it is not what `to_bytes` makes.
    """
    if not data:
        return {}
    if _has_too_many_values(data):
        raise ArtifactError(f"the metadata of {where} holds more values than birdie writes; the file is damaged")
    try:
        about = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the metadata of {where} is not JSON; the file is damaged") from error
    known = isinstance(about, dict) and isinstance(about.get("metadata", {}), dict)
    if not known or not isinstance(about.get("budget", 0), int) or not _are_names(about.get("schemes", {})):
        raise ArtifactError(f"the metadata of {where} is not what birdie writes; the file is damaged")
    return dict(about)


def _are_names(schemes: Any) -> bool:
    return isinstance(schemes, dict) and all(isinstance(name, str) for name in schemes.values())


def _has_too_many_values(text: bytes) -> bool:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES
