"""Facts inside a checkpoint that tell which run it is of, and where in it: its numbers and its networks.

    {"epoch": 3, "model": {"w": T}, "optimizer": …} ──► {"epoch": 3, …}, [{"w": T}]

The key that holds the step has any name. It is the one whose value, in checkpoints with the step in their names, is
that number; or else one that is ahead of it by as much everywhere (an epoch counted from 0), or grows with it.
"""

import json
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.checkpoints.checkpoints import format_of, is_foreign_pickle, read_header, read_object, read_state_dict
from birdie.checkpoints.layouts import choose
from birdie.checkpoints.pytree import tensors_in
from birdie.delta.delta_coding import digest
from birdie.errors import BirdieError, WeightsError

Network = Mapping[str, Tensor]
_MOST_NODES = 1 << 14  # values of a file in which numbers are looked for, those of few keys first
_MOST_JSON = 1 << 24  # bytes
_SAMPLES = 8  # checkpoints that tell which number is the step
_DIGITS = 19


@dataclass(frozen=True, slots=True)
class Facts:
    """Numbers and networks of a checkpoint."""

    # key path → integer, those of few keys first; in a folder the name of the file precedes it
    numbers: Mapping[str, int] = field(default_factory=dict)
    networks: tuple[Network, ...] = ()  # the weights of each of its files; tensors are mapped
    problem: str = ""  # why a file of weights cannot be read; "" if it can, or is none

    @property
    def has_copies(self) -> bool:
        """Fact that one network is in two of its files."""
        shapes = [shapes_of(network) for network in self.networks]
        return any(one == other for one, other in combinations(shapes, 2))

    def is_same_network(self, other: "Facts") -> bool:
        """Return whether both hold a network with the same names and shapes."""
        shapes = [shapes_of(network) for network in self.networks]
        return any(shapes_of(network) in shapes for network in other.networks)

    def has_same_weights(self, other: "Facts") -> bool:
        """Return whether both hold a network with the same values."""
        return any(_is_equal(one, two) for one in self.networks for two in other.networks)


def facts_of(path: Path) -> Facts:
    """Return the facts of a file or folder; what cannot be read has none."""
    if not path.is_dir():
        return _facts_of_file(path)
    numbers: dict[str, int] = {}
    networks: list[Network] = []
    files: list[Path] = []
    with suppress(OSError):
        files = sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        facts = _facts_of_file(file)
        numbers |= {f"{file.name}/{key}": number for key, number in facts.numbers.items()}
        networks += facts.networks
    return Facts(numbers, tuple(networks))


def shapes_of(network: Network) -> dict[str, tuple[int, ...]]:
    """Return name → shape."""
    return {name: tuple(tensor.shape) for name, tensor in network.items()}


def step_inside(path: Path, numbered: Mapping[int, Path], facts: Callable[[Path], Facts] = facts_of) -> int | None:
    """Return the step of a checkpoint without one in its name, from what it holds; None if that does not tell.

    Args:
        numbered: step → others of its run.
    """
    inner, steps = facts(path), sorted(numbered)
    if key := step_key({step: facts(numbered[step]).numbers for step in _sample(steps)}, inner.numbers):
        known = {step: number for step in steps if (number := facts(numbered[step]).numbers.get(key)) is not None}
        return _placed(inner.numbers[key], known)
    return next((step for step in reversed(steps) if inner.has_same_weights(facts(numbered[step]))), None)


def step_key(numbers: Mapping[int, Mapping[str, int]], among: Iterable[str] | None = None) -> str | None:
    """Return the key of the number that is the step, or grows with it; None if there is none.

    Args:
        numbers: step in the name → the numbers of that checkpoint.
        among: keys that may be it; None: all.
    """
    steps = sorted(numbers)
    ranks: dict[str, int] = {}
    for key in numbers[steps[0]] if among is None else among:
        if all(key in numbers[step] for step in steps):
            ahead = {numbers[step][key] - step for step in steps}
            grows = all(numbers[one][key] < numbers[two][key] for one, two in pairwise(steps))
            if ahead == {0} or (len(steps) > 1 and grows):
                ranks[key] = 0 if ahead == {0} else 1 if len(ahead) == 1 else 2
    return min(ranks, key=lambda key: (ranks[key], key.count("/")), default=None)


def _placed(number: int, known: Mapping[int, int]) -> int | None:
    """Return the step of a number, from step → number of others: between two of them, or beyond, in proportion."""
    steps, numbers = [*known], [*known.values()]
    if len(steps) < 2:
        return number if steps == numbers else None
    right = min(max(bisect_left(numbers, number), 1), len(steps) - 1)
    left = right - 1
    step = steps[left] + (number - numbers[left]) * (steps[right] - steps[left]) // (numbers[right] - numbers[left])
    return step if step >= 0 else None


def _sample(steps: list[int]) -> list[int]:
    count = min(len(steps), _SAMPLES)
    return [steps[index * (len(steps) - 1) // max(count - 1, 1)] for index in range(count)]


def _facts_of_file(path: Path) -> Facts:
    form = None
    try:
        form = None if is_foreign_pickle(path) else format_of(path)
        if form == "safetensors":
            network = read_state_dict(path)
            return Facts(dict(_numbers({**read_header(path), **network})), _networks(network))
        if form in ("torch", "packed"):
            content = read_object(path, skip_objects=True)
            return Facts(dict(_numbers(content)), _networks(_weights(content, path)))
        if form == "index" and path.stat().st_size <= _MOST_JSON:
            return Facts(dict(_numbers(json.loads(path.read_bytes()))))
    except (BirdieError, OSError, ValueError, RuntimeError) as error:
        return Facts(problem=str(error) if form == "safetensors" or _is_zip(path) else "")
    return Facts()


def _is_zip(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
    return False


def _weights(content: Any, path: Path) -> Network:
    """Return the weights in an object; of two networks in it all tensors, and none of an optimizer."""
    try:
        return choose(content, path).state
    except WeightsError:
        is_optimizer = isinstance(content, Mapping) and "param_groups" in content
        return {} if is_optimizer else {f"{index}": one for index, one in enumerate(tensors_in(content))}


def _networks(weights: Network) -> tuple[Network, ...]:
    """Return the weights, if they are a network of dense tensors: random states and statistics are vectors."""
    is_dense = all(one.layout is torch.strided and not one.is_quantized for one in weights.values())
    has_matrix = any(one.is_floating_point() and one.ndim > 1 for one in weights.values())
    return (weights,) if is_dense and has_matrix else ()


def _numbers(content: Any) -> Iterator[tuple[str, int]]:
    """Yield (key path, integer) of whole numbers, also in texts and tensors of one element; those of few keys first."""
    waiting, seen = deque([("", content)]), 0
    while waiting and seen < _MOST_NODES:
        seen += 1
        path, value = waiting.popleft()
        if isinstance(value, Mapping):
            waiting += [(f"{path}/{key}" if path else f"{key}", item) for key, item in _first(value.items())]
        elif type(value) in (list, tuple):
            waiting += [(f"{path}/{index}", item) for index, item in enumerate(_first(value))]
        elif (number := _integer(value)) is not None:
            yield path, number


def _first(items: Iterable[Any]) -> list[Any]:
    return list(islice(items, _MOST_NODES))


def _integer(value: Any) -> int | None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.layout is not torch.strided or value.is_meta or value.is_complex():
            return None
        value = value.item()
    if isinstance(value, str):
        return int(value) if value.isdecimal() and value.isascii() and len(value) <= _DIGITS else None
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else None
    return value if type(value) is int else None


def _is_equal(one: Network, other: Network) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and digest(tensor) == digest(other[name]) for name, tensor in one.items()
    )


def copies(networks: Mapping[Path, Network], root: Path) -> tuple[Path, Path] | None:
    """Return two files of a folder that hold one network twice, as best.pt and last.pt do; None if there are none.

    Files in folders below may be parts of a pipeline, or of trainings beside one another. Files that differ in a number
    may be parts of a network, unless their weights are nearly equal, as those of two steps are.
    """
    groups: dict[Any, list[Path]] = {}
    for path, network in networks.items():
        if _networks(network) and not Path(path.stem).suffix[1:].isdigit():  # consolidated.00.pth: of one GPU
            groups.setdefault(frozenset(shapes_of(network).items()), []).append(path)
    for paths in groups.values():
        for one, two in combinations(paths, 2):
            if one.parent != two.parent:
                continue
            if _without_numbers(one) == _without_numbers(two):
                if _is_near(networks[one], networks[two]):
                    return one, two
            elif one.parent == root:
                return one, two
    return None


def _without_numbers(path: Path) -> str:
    return re.sub(r"[0-9]+", "0", str(path))


def _is_near(one: Network, other: Network) -> bool:
    """Return whether the largest matrices differ by less than two that have nothing to do with one another."""
    name = max((name for name, tensor in one.items() if tensor.ndim > 1), key=lambda name: one[name].numel())
    first, second = one[name].float(), other[name].float()
    return bool((first - second).square().sum() < (first.square().sum() + second.square().sum()) / 2)
