"""Weights in the object that torch.save wrote: which of its dicts of tensors are meant.

    {"model": {…}, "ema": {…}, "optimizer": {…}, "step": 3} ──► model; others: ema; beside: optimizer, step

Names are read last: an optimizer is known by its groups of parameters, a network by its matrices, two copies of one
network by their shapes and values. A dict of several different networks gives all of them, with their keys as prefixes.
A key path that ends in a dot, "state_dict.model.", stands for the names of a dict that begin so.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from birdie.checkpoints import int8_export
from birdie.checkpoints.name_patterns import ALL, NamePatterns
from birdie.checkpoints.nested import has_stand_ins, is_optimizer, items, memories, tensor_bytes
from birdie.checkpoints.network_copies import are_copies, copies_inside, is_average, pairs
from birdie.checkpoints.pytree import tensors_in
from birdie.compress.state import is_extra, named_tensors
from birdie.compress.wrappers import without_prefixes
from birdie.errors import WeightsError

Keys: TypeAlias = tuple[Any, ...]
_USUAL = ("state_dict", "model", "params_ema", "params")  # also before "_state_dict"
_DEEPEST, _LISTED = 16, 20


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights of a checkpoint, and what else it holds."""

    state: dict[str, Tensor]  # name → tensor, with the prefixes that wrappers add to all of them
    taken: tuple[str, ...] = ()  # key paths of the dicts that were taken; none if the checkpoint is nothing but one
    # key path of each other dict of tensors, which could be taken instead → bytes
    others: dict[str, int] = field(default_factory=dict)
    # key path of everything beside the weights → bytes of the tensors there that `state` lacks
    dropped: dict[str, int] = field(default_factory=dict)
    at: tuple[str, ...] = ()  # keys of the dict that was taken, if it is one and all of them are texts
    notes: tuple[str, ...] = ()  # sentences on what was taken


@dataclass(frozen=True, slots=True)
class _Pick:
    """Weights that are meant."""

    start: Keys  # keys that name them
    at: Keys  # keys to the weights there
    beginning: str = ""  # of their names in that dict; "" for all of it

    @property
    def name(self) -> str:
        return _dotted((*self.at, self.beginning) if self.beginning else self.at)


def choose(content: Any, path: Path, wanted: Sequence[str] = (), patterns: NamePatterns = ALL) -> Choice:
    """Return the weights of an object that torch.save wrote.

    Args:
        path: its file, for error messages.
        wanted: key paths, "model.ema", of the dicts that are meant; several become one, with prefixes. A path that ends
            in a dot, "model.ema.", stands for the names that begin so; alone, it gives the rest of the names. None: the
            usual layouts are understood.
        patterns: names of the tensors to take, without the prefixes of wrappers.
    """
    if isinstance(content, Mapping) and content.get("__quant_format__") == int8_export.FORMAT:
        for group in ("quantized", "scales", "passthrough"):
            if isinstance(content.get(group), Mapping):
                named_tensors(content[group])
        return _by_name(Choice(int8_export.dequantize(content)), path, patterns)
    leaves = dict(_leaves(content))
    numbered = dict(_leaves(content, numbered=True))
    named = {keys: tensors for keys, tensors in numbered.items() if _rank(tensors) > 1} | leaves
    if not named:
        keys = ", ".join(repr(key) for key, _ in list(items(content))[:_LISTED])
        where = f" under its keys {keys}" if keys else f": it is a {type(content).__name__}"
        kept = ", or keep all of it with birdie compress --lossless" if tensor_bytes(content) else ""
        raise WeightsError(f"{path} holds no dict of tensors{where}; save torch.save(model.state_dict(), …){kept}")
    if wanted or max(map(_rank, leaves.values()), default=-1) < min(2, max(map(_rank, named.values()))):
        leaves = named if wanted else numbered | leaves
    picks = [_resolve(content, key, leaves, path) for key in wanted] if wanted else _usual(leaves, path)
    picks = list(dict.fromkeys(picks))
    choice = _by_name(Choice(_joined(content, leaves, picks, path)), path, patterns)
    state = choice.state
    dropped, others, matrices = _beside(content, state, leaves, named, picks)
    taken = tuple(pick.name for pick in picks if pick.name)
    if not wanted and not patterns and matrices and _rank(state) < 2:
        keyed = next((key for key in others if key in matrices), None)
        raise WeightsError(
            f"{path} has its matrices in {', '.join(matrices[:_LISTED])}, and {' and '.join(taken) or 'the dict'} that "
            "would be taken has none; "
            + ("" if keyed is None else f"name the dict that is meant with --key {keyed}, or ")
            + "save torch.save(model.state_dict(), …)"
            + ("" if has_stand_ins(content) else ", or keep all of it with --lossless")
        )
    at = picks[0].at if len(picks) == 1 and not picks[0].beginning else ()
    at = at if all(isinstance(key, str) for key in at) else ()
    return Choice(state, taken, others, dropped, at, (*_notes(state, picks, others), *choice.notes))


def _by_name(choice: Choice, path: Path, patterns: NamePatterns) -> Choice:
    """Return the tensors whose names match, with a note on the others."""
    if not patterns:
        return choice
    state, note = patterns.chosen(without_prefixes(choice.state), path)
    return replace(choice, state=state, notes=(note,))


def _joined(
    content: Any, leaves: Mapping[Keys, dict[str, Tensor]], picks: Sequence[_Pick], path: Path
) -> dict[str, Tensor]:
    """Return the tensors of all picks: those of one under their names, those of several with their keys as prefixes."""
    if len(picks) == 1:
        (pick,) = picks
        part = _named(leaves, pick.at, path)
        if pick.beginning:
            return _below(part, pick.beginning)
        part |= _extra_of(content, pick.at)
        return part
    common = len(list(takewhile(lambda keys: len(set(keys)) == 1, zip(*(pick.start for pick in picks), strict=False))))
    state: dict[str, Tensor] = {}
    for pick in picks:
        prefix, part = "", _named(leaves, pick.at, path)
        if pick.beginning:
            part = {name: tensor for name, tensor in part.items() if name.startswith(pick.beginning)}
        else:
            prefix, part = "".join(f"{key}." for key in pick.start[common:]), without_prefixes(part)
        for name, tensor in part.items():
            if state.setdefault(prefix + name, tensor) is not tensor:
                raise WeightsError(f"{path} has two tensors named {prefix + name!r}; name one dict with --key")
    return state


def _notes(state: Mapping[str, Tensor], picks: Sequence[_Pick], others: Mapping[str, int]) -> Iterator[str]:
    """Yield sentences on the tensors that were taken; `others` has the key path of each other dict → bytes."""
    if len(picks) == 1 and picks[0].beginning:
        yield f"names are without the prefix {picks[0].beginning}"
    elif len(picks) == 1:
        at = _dotted(picks[0].at)
        for pair in copies_inside(state):
            keys = [f"{at}.{prefix}" if at else prefix for prefix in pair]
            both = [f"{key} {_bytes_below(state, prefix):,} B" for key, prefix in zip(keys, pair, strict=True)]
            yield f"two copies of one network: {' and '.join(both)}; --key {keys[0]} takes one alone"
    size = tensor_bytes(state)
    if larger := [key for key in others if others[key] > size and not is_average(key)]:
        yield f"larger than what was taken: {', '.join(larger[:_LISTED])}; --key takes it, --lossless keeps all"


def _bytes_below(state: Mapping[str, Tensor], prefix: str) -> int:
    return tensor_bytes([tensor for name, tensor in state.items() if name.startswith(prefix)])


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, under the rest of their names, with the versions there."""
    part = OrderedDict((name.removeprefix(prefix), tensor) for name, tensor in state.items() if name.startswith(prefix))
    if hasattr(state, "_metadata"):
        vars(part)["_metadata"] = OrderedDict(
            (f"{path}.".removeprefix(prefix).rstrip("."), about)
            for path, about in state._metadata.items()
            if f"{path}.".startswith(prefix)
        )
    return part


def _leaves(content: Any, *, numbered: bool = False) -> Iterator[tuple[Keys, dict[str, Tensor]]]:
    """Yield the keys to each dict with named tensors, and these; not those of optimizers, nor one dict twice.

    Args:
        numbered: take lists of tensors as well, and dicts with numbers for keys, as averages are often kept.
    """
    waiting: deque[tuple[Keys, Any]] = deque([((), content)])
    seen: set[int] = set()
    while waiting:
        keys, node = waiting.popleft()
        if id(node) in seen or len(keys) > _DEEPEST or is_optimizer(node):
            continue
        seen.add(id(node))
        if (isinstance(node, Mapping) or numbered) and (tensors := _named_tensors(node, numbered)):
            yield keys, tensors
        kinds: tuple[type, ...] = (str, int) if numbered or not isinstance(node, Mapping) else (str,)
        waiting += [
            ((*keys, key), item)
            for key, item in items(node)
            if isinstance(item, Mapping | list | tuple) and type(key) in kinds
        ]


def _named_tensors(node: Any, numbered: bool) -> dict[str, Tensor]:
    """Return the named tensors of a dict, with the versions of modules if it is a state dict that has them.

    Numbers become names of equal lengths, so that the order of the names is theirs.
    """
    tensors = {name: item for name, item in items(node) if isinstance(item, Tensor) and isinstance(name, str)}
    if numbered:
        numbers = {key: item for key, item in items(node) if isinstance(item, Tensor) and type(key) is int}
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


def _usual(leaves: Mapping[Keys, dict[str, Tensor]], path: Path) -> list[_Pick]:
    """Return the dicts that are taken if none is named."""
    at: Keys = ()
    while True:
        groups = _groups(leaves, at)
        ranks = {key: max(map(_rank, group)) for key, group in groups.items()}
        rank = _rank(leaves[at]) if at in leaves else -1
        best = max([rank, *ranks.values()])
        networks = [key for key in ranks if ranks[key] == best]
        if usual := next((key for name in _USUAL for key in networks if _stem(key) == name), None):
            return [_Pick((*at, usual), _inside(leaves, (*at, usual)))]
        if rank == best:
            return [_Pick(at, at)]
        networks = [key for key in networks if not is_average(key)] or networks
        if len(networks) > 1:
            break
        if len(groups) > 1 and _is_layer(groups[networks[0]]):
            return [_Pick(at, at)]
        at = (*at, networks[0])
    states = {key: _plain(leaves, (*at, key)) for key in networks}
    if any(are_copies(states[one], states[other]) for one, other in pairs(networks)):
        raise WeightsError(
            f"{path} holds several dicts of tensors, and nothing tells which one is meant: {_sizes(leaves)}; name it "
            f"with --key {_dotted((*at, networks[0]))} (several become one file)"
        )
    if all(_is_layer(groups[key]) for key in networks):
        return [_Pick(at, at)]
    return [_Pick((*at, key), _inside(leaves, (*at, key))) for key in networks]


def _inside(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys) -> Keys:
    """Return the keys to the weights in a dict that is meant: the only dict in it, or all of it."""
    while at not in leaves:
        groups = _groups(leaves, at)
        networks = [key for key in groups if not is_average(key)]
        usual = [key for key in networks if _stem(key) in _USUAL]
        if len(groups) == 1:
            at = (*at, *groups)
        elif usual and len(usual) == len(networks):
            at = (*at, min(usual, key=lambda key: _USUAL.index(_stem(key))))
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


def _stem(key: Any) -> str:
    return str(key).removesuffix("_state_dict")


def _plain(leaves: Mapping[Keys, dict[str, Tensor]], at: Keys) -> dict[Any, Tensor]:
    """Return the tensors of a network by the keys to their dicts and their names without wrappers."""
    return {
        (keys[len(at) :], name): tensor
        for keys, tensors in leaves.items()
        if keys[: len(at)] == at
        for name, tensor in without_prefixes(tensors).items()
    }


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


def _resolve(content: Any, wanted: str, leaves: Mapping[Keys, dict[str, Tensor]], path: Path) -> _Pick:
    """Return what a text stands for, "model.ema", "model/ema" or "model.ema."; a key may have dots itself."""
    waiting: list[tuple[Keys, Any, str]] = [((), content, wanted)]
    hint = ""
    while waiting:
        keys, node, rest = waiting.pop()
        if any(name.startswith(f"{rest}.") for name in leaves.get(keys, ())):
            hint = f", and names that begin so: --key {wanted}."
        if rest.endswith(".") and any(name.startswith(rest) for name in leaves.get(keys, ())):
            return _Pick(keys, keys, rest)
        for key, item in items(node):
            text = str(key)
            if rest == text:
                if any(leaf[: len(keys) + 1] == (*keys, key) for leaf in leaves):
                    return _Pick((*keys, key), _inside(leaves, (*keys, key)))
            elif rest.startswith((f"{text}.", f"{text}/")):
                waiting.append(((*keys, key), item, rest[len(text) + 1 :]))
    raise WeightsError(f"{path} has no dict of tensors under the key {wanted!r}; it has {_sizes(leaves)}{hint}")


def _beside(
    content: Any,
    state: Mapping[str, Tensor],
    leaves: Mapping[Keys, object],
    keyed: Iterable[Keys],
    picks: Sequence[_Pick],
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return the path of everything beside the weights → bytes of its tensors, and of those that a key can name.

    Memory that several tensors share counts where it occurs first. Also returns the key paths of what holds matrices.

    Args:
        leaves: keys to each dict of tensors.
    """
    taken = {pick.at for pick in picks}
    parts = [(pick.at, pick.beginning) for pick in picks if pick.beginning]
    seen, stored = memories(state), set(map(id, state.values()))
    dropped: dict[str, int] = {}
    others: dict[str, int] = {}
    matrices: list[str] = []
    named, on_the_way, others_of = _beginnings(leaves), _beginnings(taken), _beginnings(keyed)
    waiting: deque[tuple[Keys, Any, bool]] = deque([((), content, () in taken)])
    while waiting:
        at, node, inside = waiting.popleft()
        for key, item in items(node):
            keys = (*at, key)
            if inside and isinstance(item, Tensor) and id(item) in stored:
                continue
            if keys in on_the_way or (inside and keys in named):
                waiting.append((keys, item, inside or keys in taken))
                continue
            beginnings = tuple(beginning for path, beginning in parts if path == at)
            is_named = isinstance(item, Tensor) and isinstance(key, str) and "." in key
            if beginnings and is_named and not key.startswith(beginnings):  # the prefix leaves it out
                keys = (*at, f"{key.partition('.')[0]}.")
                others[_dotted(keys)] = others.get(_dotted(keys), 0) + tensor_bytes(item)
            arrays = memories(item) - seen
            path = "/".join(map(str, keys))
            dropped[path] = dropped.get(path, 0) + sum(size for _, size in arrays)
            if keys in others_of:
                others[_dotted(keys)] = tensor_bytes(item)
            if any(tensor.ndim > 1 for tensor in tensors_in(item)):
                matrices.append(_dotted(keys))
            seen |= arrays
    return dropped, others, matrices


def _beginnings(paths: Iterable[Keys]) -> set[Keys]:
    return {keys[:length] for keys in paths for length in range(1, len(keys) + 1)}


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _sizes(leaves: Mapping[Keys, dict[str, Tensor]]) -> str:
    """Return the dicts of tensors with their bytes, largest first."""
    sizes = sorted(((tensor_bytes(tensors), _dotted(keys)) for keys, tensors in leaves.items()), reverse=True)
    texts = [f"{ascii(name)[1:-1][:80] or 'the tensors beside them'} {size:,} B" for size, name in sizes]
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED:,} more" * (len(texts) > _LISTED))
