"""Small modules whose forward pass changes something, and a picture of all that one could see of a change."""

import random
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

INPUTS, CLASSES = 16, 8


class Base(nn.Module):
    """Two layers; subclasses do something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 24), nn.Linear(24, CLASSES)
        self.build()

    def build(self) -> None:
        """Add what the effect needs."""

    def effect(self, hidden: Tensor) -> Tensor:
        """Change something on the way."""
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.effect(self.first(x))
        out: Tensor = self.last(torch.tanh(hidden))
        return out


class StreamingConvolution(Base):
    """Keeps the last inputs of a stream in a buffer."""

    def build(self) -> None:
        self.register_buffer("past", torch.zeros(3, 24))
        self.conv = nn.Conv1d(24, 24, 4)

    def effect(self, hidden: Tensor) -> Tensor:
        joined = torch.cat([self.past, hidden])  # type: ignore[list-item]
        self.past.copy_(joined[-3:].detach())  # type: ignore[operator]
        out: Tensor = self.conv(joined.T[None])[0].T
        return out


class NewShape(Base):
    """Has a buffer that is None at first, and one that grows."""

    empty: Tensor | None
    grown: Tensor

    def build(self) -> None:
        self.register_buffer("empty", None)
        self.register_buffer("grown", torch.zeros(1, 24))

    def effect(self, hidden: Tensor) -> Tensor:
        self.empty = hidden.detach().mean(0)
        self.grown = torch.cat([self.grown, self.empty[None]])
        return hidden + self.grown.mean(0)


class OddBuffers(Base):
    """Changes buffers of all kinds of numbers, a view of another, and has one that is expanded."""

    view: Tensor
    number: Tensor

    def build(self) -> None:
        self.register_buffer("view", torch.zeros(4, 24)[1:3])
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.register_buffer("short", torch.zeros(8, dtype=torch.bfloat16))
        self.register_buffer("complex", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("masked", torch.tensor([0.0, -0.0, -torch.inf]))
        self.register_buffer("expanded", torch.ones(1).expand(24))

    def effect(self, hidden: Tensor) -> Tensor:
        self.number += 1
        for name in ("short", "complex", "view"):
            self.get_buffer(name).add_(1)
        return (hidden + self.view[0] / self.number) * self.get_buffer("expanded")


class ChangedAttribute(Base):
    """Changes a tensor that is no buffer, in place, and what a tuple and an array hold."""

    def build(self) -> None:
        self.cache = (torch.zeros(24), np.zeros(3))

    def effect(self, hidden: Tensor) -> Tensor:
        self.cache[0].add_(hidden.detach().mean(0))
        self.cache[1][:] += 1
        return hidden + self.cache[0] * float(self.cache[1][0])


class SpectralNorm(Base):
    """The spectral norm of torch, in training mode."""

    def build(self) -> None:
        self.middle = parametrizations.spectral_norm(nn.Linear(24, 24))

    def effect(self, hidden: Tensor) -> Tensor:
        self.middle.train()
        out: Tensor = self.middle(hidden)
        return out


class OldWeightNorm(Base):
    """A weight of two parameters that is an attribute, computed by a hook."""

    def build(self) -> None:
        norm: Any = torch.nn.utils.weight_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.middle = norm(nn.Linear(24, 24))

    def effect(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.middle(hidden)
        return out


class OwnGenerators(Base):
    """Draws from generators of its own."""

    def build(self) -> None:
        self.generator, self.rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.old, self.plain = np.random.RandomState(3), random.Random(3)

    def effect(self, hidden: Tensor) -> Tensor:
        noise = torch.randn(24, generator=self.generator)
        return hidden + noise * (self.rng.random() + self.old.rand() + self.plain.random())


class GlobalGenerators(Base):
    """Draws from the generators of NumPy and Python."""

    def effect(self, hidden: Tensor) -> Tensor:
        return hidden * float(1 + np.random.rand() + random.random())


class NewHooks(Base):
    """Adds a hook in every forward pass, to a layer and to a parameter."""

    def effect(self, hidden: Tensor) -> Tensor:
        self.last.register_forward_hook(lambda *_: None)
        if self.last.weight.requires_grad:
            self.last.weight.register_hook(lambda gradient: gradient)
        return hidden


class MixedModes(Base):
    """Has parts in both modes."""

    def build(self) -> None:
        self.parts = nn.ModuleList([nn.BatchNorm1d(24), nn.Dropout(), nn.BatchNorm1d(24)])
        self.parts[1].eval()

    def effect(self, hidden: Tensor) -> Tensor:
        for part in self.parts:
            hidden = part(hidden)
        return hidden


class FrozenPart(Base):
    """Has parameters without gradients, and one with a gradient."""

    def build(self) -> None:
        self.first.requires_grad_(False)
        self.last.bias.grad = torch.ones(CLASSES)


class OwnMode(Base):
    """Changes its mode, and which parameters have gradients."""

    def effect(self, hidden: Tensor) -> Tensor:
        self.train(not self.training)
        self.last.bias.requires_grad_(not self.last.bias.requires_grad)
        return hidden


class ParameterData(Base):
    """Changes parameters behind the back of autograd."""

    def effect(self, hidden: Tensor) -> Tensor:
        self.first.bias.data.mul_(0.9)
        self.last.bias.data = self.last.bias.data * 0.9
        return hidden


class NewParameter(Base):
    """Assigns a parameter anew."""

    def effect(self, hidden: Tensor) -> Tensor:
        self.last.bias = nn.Parameter(self.last.bias.detach() * 0.9)
        return hidden


class KeysAndValues(Base):
    """Keeps keys and values by the number of a layer, in a dict of lists."""

    def build(self) -> None:
        self.kept: dict[int, list[Tensor]] = {0: [torch.zeros(1, 24), torch.zeros(1, 24)]}

    def effect(self, hidden: Tensor) -> Tensor:
        for number, part in enumerate((hidden, 2 * hidden)):
            self.kept[0][number] = torch.cat([self.kept[0][number], part.detach()])[-64:]
        keys, values = self.kept[0]
        return hidden + (hidden @ keys.T / 5).softmax(-1) @ values


class LazyBuffer(Base):
    """Registers a buffer when it first runs, and a part."""

    def effect(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "statistics"):
            self.register_buffer("statistics", hidden.detach().mean(0), persistent=False)
            self.more = nn.Dropout()
        return hidden + self.statistics  # type: ignore[operator]


@dataclass
class Cache:
    """Object of a module that is no module."""

    layers: list[Tensor] = field(default_factory=list)
    seen: int = 0


class Slots:
    """Object whose attributes are slots."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = torch.zeros(24)


class CacheObject(Base):
    """Keeps a cache in objects."""

    def build(self) -> None:
        self.cache, self.slots = Cache(), Slots()

    def effect(self, hidden: Tensor) -> Tensor:
        self.cache.layers.append(hidden.detach().mean(0))
        self.cache.seen += len(hidden)
        self.slots.value = self.slots.value + hidden.detach().mean(0)
        return hidden + self.slots.value / self.cache.seen


class Settings(Base):
    """Changes settings of the process."""

    def effect(self, hidden: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_num_threads(1 + torch.get_num_threads() % 2)
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        return hidden


class Scripted(Base):
    """Has a scripted part that counts and keeps."""

    def build(self) -> None:
        self.part = torch.jit.script(ScriptedPart())

    def effect(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.part(hidden)
        return out


class ScriptedPart(nn.Module):
    """Counts calls, and assigns a buffer anew."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.register_buffer("mean", torch.zeros(24))
        self.calls: int = 0
        self.kept: list[Tensor] = [torch.zeros(24)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + x.detach().mean(0)
        self.kept.append(self.mean)
        out: Tensor = self.inner(x) + self.mean / self.calls + self.kept[-1]
        return out


def subclasses() -> list[type[Base]]:
    """Return the modules, in the order of this file."""
    return Base.__subclasses__()


def seeded(kind: type[Base]) -> Base:
    """Return a module with weights that do not depend on others."""
    torch.manual_seed(0)
    return kind()


def picture(module: nn.Module) -> list[Any]:
    """Return all that one can see of a module and of the process, to compare: identities, and values to the bit."""
    seen: dict[int, Any] = {}
    listed = [*_seen(module, seen)]
    state = [torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()]
    settings = [
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        np.geterr(),
        list(warnings.filters),
    ]
    kept = list(seen.values())  # so that no address is used twice
    return [listed, state, settings, len(kept)]


def _seen(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    yield type(value).__name__
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield value
        return
    if id(value) in seen:
        yield id(value)
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield id(value) if isinstance(value, nn.Parameter) or value.is_leaf else 0
        plain = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield plain.numpy().tobytes(), value.shape, value.stride(), value.requires_grad
        yield None if not value.is_leaf or value.grad is None else (id(value.grad), value.grad.numpy().tobytes())
        yield len(value._backward_hooks or {})
    elif isinstance(value, torch.Generator):
        yield value.get_state().numpy().tobytes()
    elif isinstance(value, np.random.Generator):
        yield repr(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield repr(value.get_state())
    elif isinstance(value, random.Random):
        yield value.getstate()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, torch.jit.ScriptModule):
        for name in sorted(value._concrete_type.get_attributes()):
            item = value._c.getattr(name)  # its lists are made anew at every look
            for one in item if isinstance(item, list) else [item]:
                yield from _seen(one, {})
    elif isinstance(value, dict):
        yield id(value)
        for key, item in value.items():
            yield repr(key)
            yield from _seen(item, seen)
    elif isinstance(value, list | tuple | set | deque):
        yield id(value)
        for item in value:
            yield from _seen(item, seen)
    elif isinstance(value, nn.Module | Cache):
        yield id(value)
        yield from _seen(vars(value), seen)
    elif isinstance(value, Slots):
        yield from _seen(value.value, seen)
