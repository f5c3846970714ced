"""What a file says about itself besides its tensors: one JSON object in the container's metadata, or nothing.

budget     bytes the file was allowed          metadata   what the caller of save had to say
tree       how the tensors nest (birdie.artifact.pytree), where the file holds a whole checkpoint
"""

import json
from collections.abc import Mapping
from typing import Any

from birdie.errors import ArtifactError, ConfigError

MAX_VALUES = 1 << 22  # as many commas and brackets: what Python makes of them takes a hundred times their bytes


def to_bytes(metadata: Mapping[str, Any] | None, budget: int | None, tree: Any = None) -> bytes:
    """The JSON of what is there; the same facts give the same bytes.

    Raises:
        ConfigError: `metadata` is not JSON.
    """
    fields = {"budget": budget, "metadata": dict(metadata) if metadata else None, "tree": tree}
    present = {key: value for key, value in fields.items() if value is not None}
    if not present:
        return b""
    try:
        text = json.dumps(present, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"metadata cannot be written as JSON ({error}); keep to text, finite numbers, lists and dicts"
        ) from error
    if _too_many(text):
        raise ConfigError("metadata holds too many values for a file's header; store them as a tensor")
    return text


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Undo `to_bytes`: a dict with at most budget, metadata and tree; `where` names the file.

    Raises:
        ArtifactError: it is not what `to_bytes` makes.
    """
    if not data:
        return {}
    if _too_many(data):
        raise ArtifactError(f"the metadata of {where} holds more values than birdie writes; the file is damaged")
    try:
        about = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the metadata of {where} is not JSON; the file is damaged") from error
    whole = isinstance(about, dict) and isinstance(about.get("metadata", {}), dict)
    if not whole or not isinstance(about.get("budget", 0), int):
        raise ArtifactError(f"the metadata of {where} is not what birdie writes; the file is damaged")
    return dict(about)


def _too_many(text: bytes) -> bool:
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES
