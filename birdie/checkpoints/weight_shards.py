"""Shards of a model, and the index that says from which of them each tensor is read.

    model.safetensors.index.json: name ──► shard
    shards ──► the tensors that the index gives to each; copies that lie elsewhere, and names that it lacks, are left

Edits of a model add a small shard and change the index; the old copies stay in the large files.
"""

import copy
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.compress.state import is_text
from birdie.errors import WeightsError
from birdie.system.names import is_name
from birdie.system.regular import regular_file

INDEX = ".index.json"  # the end of its name
MAX_INDEX_BYTES = 1 << 26
_LISTED = 6  # names in a note


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of shards."""

    state: dict[str, Tensor]  # name → tensor
    shards: dict[str, str]  # name → the shard that it was read from
    left: dict[str, tuple[int, str]]  # "shard: name" of each tensor that the index does not read → (bytes, why)
    notes: tuple[str, ...]  # sentences on what was left, and what the index names in vain


def join(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> Joined:
    """Return the tensors that an index names, each from its shard.

    Args:
        read: returns the tensors of a shard.
    """
    where, files = weight_map(index), shard_files(index)
    state: dict[str, Tensor] = {}
    shards: dict[str, str] = {}
    others: dict[tuple[str, str], Tensor] = {}
    for shard, path in sorted(files.items()):
        for name, tensor in read(path).items():
            if where.get(name) == shard:
                state[name], shards[name] = tensor, shard
            else:
                others[shard, name] = tensor
    notes = []
    for name, tensor in [(name, tensor) for (_, name), tensor in others.items() if name in where]:
        if name not in state:  # the only copy
            shard = next(shard for shard, other in others if other == name)
            del others[shard, name]
            state[name], shards[name] = tensor, shard
            notes.append(f"{name} was read from {shard}, since {where[name]}, where {index.name} has it, lacks it")
    absent = [name for name in where if name not in state]
    if not state:
        raise WeightsError(
            f"{files[where[absent[0]]]} lacks {absent[0]!r}, a tensor that {index.name} lists for it; copy it again"
        )
    if absent:
        notes.append(f"{index.name} names tensors that none of its shards holds: {_names(absent)}")
    left = {key: (tensor.nbytes, _reason(key[1], where, index)) for key, tensor in others.items()}
    return Joined(
        state,
        shards,
        {f"{shard}: {name}": about for (shard, name), about in left.items()},
        (*notes, *_notes([name for _, name in left], where, index)),
    )


def read_by_index(content: Any, file: Path) -> tuple[Any, dict[str, tuple[int, str]], tuple[str, ...]]:
    """Return the content of one shard without the tensors that the index beside it reads from elsewhere.

    Also returns what `Joined` has as `left` and `notes`. Without an index that names the file, all of it is returned.
    """
    index, where = _index_of(file)
    if index is None or not isinstance(content, Mapping):
        return content, {}, ()
    tensors = {name: item for name, item in content.items() if isinstance(item, Tensor)}
    names = [name for name in tensors if where.get(name) != file.name]
    if len(names) == len(tensors) or not names:
        return content, {}, ()
    rest: Any = copy.copy(content)
    for name in names:
        del rest[name]
    left = {f"{file.name}: {name}": (tensors[name].nbytes, _reason(name, where, index)) for name in names}
    return rest, left, _notes(names, where, index)


def _index_of(file: Path) -> tuple[Path | None, dict[str, str]]:
    """Return the index in the folder of a file that names it, and its map of weights."""
    for index in sorted(file.parent.glob("*.index*.json")):
        with suppress(WeightsError):  # that it is damaged matters to those alone who read it
            if file.name in (where := weight_map(index)).values():
                return index, where
    return None, {}


def _reason(name: str, where: Mapping[str, str], index: Path) -> str:
    return f"{index.name} reads it from {where[name]}" if name in where else f"{index.name} does not name it"


def _notes(names: Collection[str], where: Mapping[str, str], index: Path) -> tuple[str, ...]:
    stale, unnamed = [name for name in names if name in where], [name for name in names if name not in where]
    notes = {f"not taken, since {index.name} reads them from other shards: ": stale}
    notes[f"not taken, since {index.name} does not name them: "] = unnamed
    return tuple(text + _names(those) for text, those in notes.items() if those)


def _names(names: Collection[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join([*names][:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def shard_files(index: Path) -> dict[str, Path]:
    """Return the shards that an index names, each in its folder; all of them must be there."""
    names = sorted({*weight_map(index).values()})
    for name in names:
        if not os.path.lexists(index.parent / name):
            raise WeightsError(f"{index.parent / name} is missing, a shard that {index.name} lists; copy it again")
    return {name: own_file(index.parent / name, index.parent) for name in names}


def weight_map(index: Path) -> dict[str, str]:
    """Return tensor name → shard file of an index, every shard inside the folder of the index."""
    try:
        if regular_file(index).stat().st_size > MAX_INDEX_BYTES:
            raise WeightsError(
                f"{index} has more than {MAX_INDEX_BYTES:,} bytes, too many for an index; check the file"
            )
        shards = json.loads(index.read_bytes())["weight_map"]
        pairs = dict(shards.items())
    except OSError as error:
        raise WeightsError(f"cannot open {index}: {(error.strerror or str(error)).lower()}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{index} is not an index with a weight_map; copy it again") from error
    if not pairs:
        raise WeightsError(f"{index} has an empty weight_map; copy it again")
    for name, shard in pairs.items():
        if not is_text(name) or (isinstance(shard, str) and not is_text(shard)):
            raise WeightsError(f"{index} lists {name!r} in shard {shard!r}, which are not both text; copy it again")
        if not is_name(shard):
            raise WeightsError(
                f"{index} lists {name!r} in shard {shard!r}, outside its own folder; do not trust this checkpoint"
            )
    return pairs


def own_file(path: Path, folder: Path) -> Path:
    """Return `path`, found in `folder`, if its links stay there or lead to the blobs of the same Hugging Face cache."""
    try:
        file, folder = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise WeightsError(f"cannot open {path}: {reason}; check the links, or copy it again") from error
    caches = [parent.parents[1] for parent in (folder, *folder.parents) if parent.parent.name == "snapshots"]
    if not file.is_relative_to(folder) and file.parent not in [cache / "blobs" for cache in caches]:
        raise WeightsError(
            f"{path} is a link to {file}, outside its own folder; do not trust this checkpoint, or copy the file there"
        )
    return path
