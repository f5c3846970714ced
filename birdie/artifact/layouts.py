"""Weights in the object that torch.save wrote: which of its dicts of tensors are meant.

    {"model": {…}, "ema": {…}, "optimizer": {…}, "step": 3} ──► model; others: ema; beside: optimizer, step

Names are read last: an optimizer is known by its groups of parameters, a network by its matrices, two copies of one
network by their shapes. A dict of several different networks gives all of them, with their keys as prefixes.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from birdie.artifact import int8_export
from birdie.artifact.pytree import tensors_in
from birdie.compress.state import is_extra, named_tensors
from birdie.compress.wrappers import without_prefixes
from birdie.errors import WeightsError

Keys: TypeAlias = tuple[Any, ...]
_USUAL = ("state_dict", "model_state_dict", "model", "params_ema", "params")
_AVERAGES = {"ema", "avg", "average", "averages", "averaged", "shadow", "swa", "target"}
_PARTS = {"generator", "discriminator", "gen", "disc", "g", "d", "netg", "netd"}
_PARTS |= {"encoder", "decoder", "enc", "dec", "actor", "critic"}
_DEEPEST, _LISTED = 16, 20


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights of a checkpoint, and what else it holds.

    Attributes:
        state: name → tensor, with the prefixes that wrappers add to all of them.
        taken: key paths of the dicts that were taken; none if the checkpoint is nothing but one.
        at: keys of the dict that was taken, if it is one and all of them are texts.
        others: key path of each other dict of tensors, which could be taken instead → bytes.
        dropped: key path of everything beside the weights → bytes of the tensors there that `state` lacks.
        notes: sentences on what was taken.
    """

    state: dict[str, Tensor]
    taken: tuple[str, ...] = ()
    others: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose(content: Any, path: Path, wanted: Sequence[str] = ()) -> Choice:
    """Return the weights of an object that torch.save wrote.

    Args:
        content: the object.
        path: its file, for error messages.
        wanted: key paths, "model.ema", of the dicts that are meant; several become one, with prefixes. None: the usual
            layouts are understood.
    """
    if isinstance(content, Mapping) and content.get("__quant_format__") == int8_export.FORMAT:
        for group in ("quantized", "scales", "passthrough"):
            if isinstance(content.get(group), Mapping):
                named_tensors(content[group])
        return Choice(int8_export.dequantize(content))
    leaves = dict(_leaves(content))
    named = {keys: tensors for keys, tensors in _leaves(content, numbered=True) if _rank(tensors) > 1} | leaves
    if not named:
        keys = ", ".join(repr(key) for key, _ in list(_items(content))[:_LISTED])
        where = f" under its keys {keys}" if keys else f": it is a {type(content).__name__}"
        kept = ", or keep all of it with birdie compress --lossless" if tensor_bytes(content) else ""
        raise WeightsError(f"{path} holds no dict of tensors{where}; save torch.save(model.state_dict(), …){kept}")
    if wanted or not leaves:
        leaves = named
    if wanted:
        starts = [_resolve(content, key, leaves, path) for key in wanted]
        picked = {start: _inside(leaves, start) for start in starts}
    else:
        picked = _usual(leaves, path)
    state: dict[str, Tensor] = {}
    common = len(list(takewhile(lambda keys: len(set(keys)) == 1, zip(*picked, strict=False))))
    for start, at in picked.items():
        prefix, part = "", _named(leaves, at, path)
        if len(picked) > 1:
            prefix, part = "".join(f"{key}." for key in start[common:]), without_prefixes(part)
        if len(picked) == 1:
            state = part
            state |= _extra_of(content, at)
            continue
        for name, tensor in part.items():
            if state.setdefault(prefix + name, tensor) is not tensor:
                raise WeightsError(f"{path} has two tensors named {prefix + name!r}; name one dict with --key")
    dropped, others = _beside(content, state, leaves, named, set(picked.values()))
    taken = tuple(_dotted(keys) for keys in picked.values() if keys)
    at = next(iter(picked.values())) if len(picked) == 1 else ()
    return Choice(state, taken, others, dropped, at if all(isinstance(key, str) for key in at) else ())


def tensor_bytes(content: Any) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples; tied tensors are counted once."""
    return sum(size for _, size in _memories(content))


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, or the positions and items of a list; stand-ins have none."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif type(node) in (list, tuple):
        yield from enumerate(node)


def _leaves(content: Any, *, numbered: bool = False) -> Iterator[tuple[Keys, dict[str, Tensor]]]:
    """Yield the keys to each dict with named tensors, and these; not those of optimizers, nor one dict twice.

    Args:
        content: the object.
        numbered: take lists of tensors as well, and dicts with numbers for keys, as averages are often kept.
    """
    waiting: deque[tuple[Keys, Any]] = deque([((), content)])
    seen: set[int] = set()
    while waiting:
        keys, node = waiting.popleft()
        if id(node) in seen or len(keys) > _DEEPEST or (isinstance(node, Mapping) and "param_groups" in node):
            continue
        seen.add(id(node))
        if (isinstance(node, Mapping) or numbered) and (tensors := _named_tensors(node, numbered)):
            yield keys, tensors
        kinds: tuple[type, ...] = (str, int) if numbered or not isinstance(node, Mapping) else (str,)
        waiting += [
            ((*keys, key), item)
            for key, item in _items(node)
            if isinstance(item, Mapping | list | tuple) and type(key) in kinds
        ]


def _named_tensors(node: Any, numbered: bool) -> dict[str, Tensor]:
    """Return the named tensors of a dict, with the versions of modules if it is a state dict that has them.

    Numbers become names of equal lengths, so that the order of the names is theirs.
    """
    tensors = {name: item for name, item in _items(node) if isinstance(item, Tensor) and isinstance(name, str)}
    if numbered:
        numbers = {key: item for key, item in _items(node) if isinstance(item, Tensor) and type(key) is int}
        width = len(str(max(numbers, default=0)))
        tensors |= {f"{key:0{width}}": item for key, item in numbers.items()}
    if not hasattr(node, "_metadata"):
        return tensors
    state = OrderedDict(tensors)
    vars(state)["_metadata"] = node._metadata
    return state


def _extra_of(content: Any, at: Keys) -> dict[str, Any]:
    """Return the extra state of modules, other than tensors, in the dict at `at`."""
    for key in at:
        content = content[key]
    if not isinstance(content, Mapping):
        return {}
    return {
        name: item
        for name, item in content.items()
        if isinstance(name, str) and not isinstance(item, Tensor) and is_extra(name, item, of_module=False)
    }


def _usual(leaves: Mapping[Keys, dict[str, Tensor]], path: Path) -> dict[Keys, Keys]:
    """Return the keys to each dict that is taken → the keys to the weights in it."""
    at: Keys = ()
    while True:
        groups = _groups(leaves, at)
        ranks = {key: max(map(_rank, group)) for key, group in groups.items()}
        rank = _rank(leaves[at]) if at in leaves else -1
        best = max([rank, *ranks.values()])
        networks = [key for key in ranks if ranks[key] == best]
        if usual := next((key for key in _USUAL if key in networks), None):
            return {(*at, usual): _inside(leaves, (*at, usual))}
        if rank == best:
            return {at: at}
        networks = [key for key in networks if not _is_average(key)] or networks
        if len(networks) > 1:
            break
        if len(groups) > 1 and _is_layer(groups[networks[0]]):
            return {at: at}
        at = (*at, networks[0])
    shapes = {key: _shapes(leaves, (*at, key)) for key in networks}
    copies = {key for pair in combinations(networks, 2) if _are_copies(*(shapes[key] for key in pair)) for key in pair}
    if any(not _words(key) & _PARTS for key in copies):
        raise WeightsError(
            f"{path} holds several dicts of tensors, and nothing tells which one is meant: {_sizes(leaves)}; name it "
            f"with --key {_dotted((*at, networks[0]))} (several become one file)"
        )
    return {(*at, key): _inside(leaves, (*at, key)) for key in networks}


def _inside(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys) -> Keys:
    """Return the keys to the weights in a dict that is meant: the only dict in it, or all of it."""
    while at not in leaves:
        groups = _groups(leaves, at)
        networks = [key for key in groups if not _is_average(key)]
        usual = [key for key in networks if key in _USUAL]
        if len(groups) == 1:
            at = (*at, *groups)
        elif usual and len(usual) == len(networks):
            at = (*at, min(usual, key=_USUAL.index))
        else:
            break
    return at


def _groups(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys) -> dict[Any, list[dict[str, Tensor]]]:
    """Return key → the dicts of named tensors below it, for the keys of the dict at `at`."""
    groups: dict[Any, list[dict[str, Tensor]]] = {}
    for keys, tensors in leaves.items():
        if len(keys) > len(at) and keys[: len(at)] == at:
            groups.setdefault(keys[len(at)], []).append(tensors)
    return groups


def _rank(tensors: Mapping[str, Tensor]) -> int:
    """Return 2 for a dict with a matrix, 1 with a vector, 0 with numbers."""
    return max(min(tensor.ndim, 2) for tensor in tensors.values())


def _is_layer(group: list[dict[str, Tensor]]) -> bool:
    """Return whether a dict is one layer of nested ones, {"weight": …, "bias": …}, and not the state of a module."""
    return len(group) == 1 and not any("." in name for name in group[0])


def _is_average(key: Any) -> bool:
    return bool(_words(key) & _AVERAGES)


def _words(key: Any) -> set[str]:
    return set(re.split(r"[^a-z]+", str(key).lower()))


def _shapes(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys) -> frozenset[Any]:
    return frozenset(
        (keys[len(at) :], name, tensor.shape)
        for keys, tensors in leaves.items()
        if keys[: len(at)] == at
        for name, tensor in without_prefixes(tensors).items()
    )


def _are_copies(one: frozenset[Any], other: frozenset[Any]) -> bool:
    """Return whether two dicts are one network twice; an average often lacks the buffers."""
    return (one <= other or other <= one) and 2 * min(len(one), len(other)) > max(len(one), len(other))


def _named(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys, path: Path) -> dict[str, Tensor]:
    """Return all named tensors at and below `at`; keys on the way to them are joined to their names by dots."""
    if [keys for keys in leaves if keys[: len(at)] == at] == [at]:
        return leaves[at]
    state: dict[str, Tensor] = {}
    for keys, tensors in leaves.items():
        if keys[: len(at)] == at:
            prefix = "".join(f"{key}." for key in keys[len(at) :])
            for name, tensor in (without_prefixes(tensors) if prefix else tensors).items():
                if prefix + name in state:
                    raise WeightsError(f"{path} has two tensors named {prefix + name!r}; name one dict with --key")
                state[prefix + name] = tensor
    return state


def _resolve(content: Any, wanted: str, leaves: Mapping[Keys, dict[str, Tensor]], path: Path) -> Keys:
    """Return the keys that a text stands for, "model.ema" or "model/ema"; a key may have dots itself."""
    waiting: list[tuple[Keys, Any, str]] = [((), content, wanted)]
    while waiting:
        keys, node, rest = waiting.pop()
        for key, item in _items(node):
            text = str(key)
            if rest == text:
                if any(leaf[: len(keys) + 1] == (*keys, key) for leaf in leaves):
                    return (*keys, key)
            elif rest.startswith((f"{text}.", f"{text}/")):
                waiting.append(((*keys, key), item, rest[len(text) + 1 :]))
    raise WeightsError(f"{path} has no dict of tensors under the key {wanted!r}; it has {_sizes(leaves)}")


def _beside(
    content: Any,
    state: Mapping[str, Tensor],
    leaves: Mapping[Keys, object],
    keyed: Iterable[Keys],
    taken: Collection[Keys],
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the path of everything beside the weights → bytes of its tensors, and of those that a key can name.

    Memory that several tensors share counts where it occurs first.
    """
    seen, stored = _memories(state), set(map(id, state.values()))
    dropped: dict[str, int] = {}
    others: dict[str, int] = {}
    named, on_the_way, others_of = _beginnings(leaves), _beginnings(taken), _beginnings(keyed)
    waiting: deque[tuple[Keys, Any, bool]] = deque([((), content, () in taken)])
    while waiting:
        at, node, inside = waiting.popleft()
        for key, item in _items(node):
            keys = (*at, key)
            if inside and isinstance(item, Tensor) and (isinstance(key, str) or id(item) in stored):
                continue
            if keys in on_the_way or (inside and keys in named):
                waiting.append((keys, item, inside or keys in taken))
                continue
            memories = _memories(item) - seen
            dropped["/".join(map(str, keys))] = sum(size for _, size in memories)
            if keys in others_of:
                others[_dotted(keys)] = tensor_bytes(item)
            seen |= memories
    return dropped, others


def _beginnings(paths: Iterable[Keys]) -> set[Keys]:
    return {keys[:length] for keys in paths for length in range(1, len(keys) + 1)}


def _memories(content: Any) -> set[tuple[int, int]]:
    """Return the address and the bytes of all tensors in `content` that are one array in memory."""
    memories = set()
    for tensor in tensors_in(content):
        with suppress(RuntimeError, NotImplementedError):  # sparse tensors and subclasses that wrap other tensors
            memories.add((tensor.data_ptr(), tensor.nbytes))
    return memories


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _sizes(leaves: Mapping[Keys, dict[str, Tensor]]) -> str:
    """Return the dicts of tensors with their bytes, largest first."""
    sizes = sorted(((tensor_bytes(tensors), _dotted(keys)) for keys, tensors in leaves.items()), reverse=True)
    texts = [f"{ascii(name)[1:-1][:80] or 'the tensors beside them'} {size:,} B" for size, name in sizes]
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED:,} more" * (len(texts) > _LISTED))
