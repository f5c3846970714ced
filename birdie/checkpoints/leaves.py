"""Values without parts in the JSON of a nested checkpoint (birdie.checkpoints.pytree, docs/format.md)."""

import base64
import math
import struct
from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch

from birdie.checkpoints import numpy_values
from birdie.errors import ArtifactError, WeightsError

Json = Any
MAX_INTEGER_BITS = 4096
# Kinds of constants of torch → their names → constants.
_CONSTANTS = {
    kind.__name__: {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is kind}
    for kind in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
}


def damaged(what: str) -> ArtifactError:
    """Return the error of a tree that birdie does not write."""
    return ArtifactError(f"the tree of the file {what}; the file is damaged")


def refusal(where: str, problem: str) -> WeightsError:
    """Return the error of a value that no tree holds."""
    return WeightsError(
        f"{where} is or holds {problem}, which a .birdie file cannot store; save the checkpoint again without it, "
        "or compress its weights alone (--weights-only)"
    )


def put(value: Any, where: str) -> Json:
    """Return the JSON of a value without parts, or of a tuple of such values; `where` names it in messages."""
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
    if kind is BytesIO and not value.closed:
        return ["buffer", base64.b64encode(value.getbuffer()).decode(), value.tell()]
    if kind is torch.Size:
        return ["size", *value]
    if _CONSTANTS.get(kind.__name__, {}).get(str(value).removeprefix("torch.")) is value:
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is tuple:
        return ["tuple", *(put(item, where) for item in value)]
    if (number := numpy_values.put(value)) is not None:
        return ["numpy", *number]
    problem = f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"
    raise refusal(where, problem + (" that is no text or too long" if kind in (str, int) else ""))


def take(node: Json) -> Any:
    """Return the value of a node that `put` wrote."""
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise damaged("holds a JSON object")
        return node
    if not node or not isinstance(node[0], str) or node[0] not in _LEAVES:
        raise damaged(f"has a value of unknown kind {str(node[:1])[:80]}")
    return _LEAVES[node[0]](*node[1:])


def cost(value: Any) -> int:
    """Return how many values a leaf counts as: long texts count as several."""
    if type(value) is tuple:
        return 1 + sum(cost(item) for item in value)
    if type(value) is BytesIO and not value.closed:
        return 1 + value.getbuffer().nbytes // 64
    return 1 + len(value) // 64 if isinstance(value, str | bytes | bytearray) else 1


def _is_text(value: str) -> bool:
    """Return whether UTF-8 can encode `value`: it has no unpaired surrogate."""
    try:
        return bool(value.encode()) or not value
    except UnicodeEncodeError:
        return False


def _sized(form: str) -> Callable[[str], tuple[float, ...]]:
    return lambda text: struct.unpack(form, bytes.fromhex(text))


def _buffer(content: bytes, position: int) -> BytesIO:
    buffer = BytesIO(content)
    buffer.seek(position)
    return buffer


_LEAVES: dict[str, Callable[..., Any]] = {
    "float": lambda text: _sized(">d")(text)[0],
    "complex": lambda text: complex(*_sized(">dd")(text)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "buffer": lambda text, position: _buffer(base64.b64decode(text, validate=True), position),
    "size": lambda *sizes: torch.Size(sizes),
    "device": torch.device,
    "numpy": lambda code, text: numpy_values.number(code, bytes.fromhex(text)),
    "tuple": lambda *items: tuple(take(item) for item in items),
    **{kind: names.__getitem__ for kind, names in _CONSTANTS.items()},
}
