"""Lazy loading: whatever reads a weight gets what eager loading gives, and no more is held than was allowed."""

import copy
import math
import pickle
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import birdie
from benchmarks.processes import reset_peak, resident
from birdie.artifact.file import File
from birdie.artifact.tensor_cache import Slot, TensorCache
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.gpt.model.gpt import GPT, GPTConfig
from tests.nightly import mostly_nightly

Build = Callable[[], nn.Module]


class Tied(nn.Module):
    """A head that reads the weight of the embedding without calling it, and a matrix of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) @ self.mix
        logits: Tensor = self.head(hidden)
        return F.linear(hidden, self.embedding.weight) + logits


class Normed(nn.Sequential):
    """BatchNorm whose statistics are not those of a new one."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
        for _ in range(2):
            self(torch.randn(6, 3, 8, 8) * 3 + 1)


class Counting(nn.Module):
    """A counter that forward writes into, in place, and one that it replaces; a buffer that is not saved."""

    calls: Tensor
    total: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + x.sum(0)
        hidden: Tensor = self.linear(x)
        return hidden * self.scale + self.calls + self.total


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)


def gpt() -> GPT:
    config = GPTConfig(vocab_size=50, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config)
    with torch.no_grad():
        for weight in model.parameters():  # new ones have zeros
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


IDS = torch.arange(30).remainder(17).view(2, 15)
CASES: dict[str, tuple[Build, tuple[Tensor, ...]]] = {
    "sequential": (lambda: nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 2)), (torch.randn(3, 12),)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2), (torch.randn(2, 4, 9, 9),)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (torch.randn(2, 4, 5, 5),)),
    "embedding": (lambda: nn.Embedding(20, 6), (IDS,)),
    "lstm": (lambda: nn.LSTM(6, 8, num_layers=2, bidirectional=True), (torch.randn(5, 2, 6),)),
    "gru": (lambda: nn.GRU(6, 8, num_layers=2), (torch.randn(5, 2, 6),)),
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), (torch.randn(2, 5, 16),) * 3),
    "attention of other widths": (lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=7),
                                  (torch.randn(5, 2, 16), torch.randn(5, 2, 6), torch.randn(5, 2, 7))),
    "encoder": (attention, (torch.randn(2, 5, 16),)),
    "normed": (Normed, (torch.randn(2, 3, 8, 8),)),
    "tied": (Tied, (IDS,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (torch.randn(2, 6),)),
    "counting": (Counting, (torch.randn(3, 4),)),
    "gpt": (gpt, (IDS,)),
}  # fmt: skip


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in output if part is not None for tensor in tensors(part)]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> "Decoded":
    """Names and tensors that files decode, in order."""
    record, decode = Decoded(), File.decode

    def watched(file: File, name: str, threads: int | None = None) -> Tensor:
        record.most = max(record.most, record.alive + math.prod(file.entry(name).shape) * 4)
        tensor = decode(file, name, threads)
        record.names.append(name)
        record.memory.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(File, "decode", watched)
    return record


class Decoded:
    """Record of the tensors that files have decoded: most of their bytes in memory at a time, the next one included."""

    def __init__(self) -> None:
        self.names, self.memory, self.most = list[str](), list[weakref.ref[torch.UntypedStorage]](), 0

    @property
    def alive(self) -> int:
        return sum(memory.nbytes() for ref in self.memory if (memory := ref()) is not None)


def saved(model: nn.Module, folder: Path, **settings: Any) -> Path:
    birdie.save(model, folder / "model.birdie", **settings)
    return folder / "model.birdie"


def deep(width: int = 64, depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


@pytest.mark.parametrize(
    ("case", "where"),
    mostly_nightly(
        [*((case, "cpu") for case in CASES), *((case, "meta") for case in ("encoder", "lstm", "sequential"))],
        [
            *((case, "cpu") for case in ("sequential", "attention", "normed", "tied", "counting", "gpt")),
            ("lstm", "meta"),
        ],
    ),
)
def test_outputs_are_those_of_eager_loading(case: str, where: str, tmp_path: Path) -> None:
    build, inputs = CASES[case]
    path = saved(build(), tmp_path)
    eager = birdie.load(path, into=build()).eval().requires_grad_(False)  # torch takes other kernels for gradients
    with torch.device(where):
        lazy = build()
    lazy = birdie.load(path, into=lazy, lazy=True)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert same(lazy(*inputs), eager(*inputs))


def test_nothing_is_decoded_when_loading_and_each_tensor_once_a_pass(tmp_path: Path, decoded: Decoded) -> None:
    model = birdie.load(saved(deep(), tmp_path), into=deep(), lazy=True)
    assert decoded.names == []
    for _ in range(2):
        model(torch.randn(2, 64))
    assert decoded.names == [f"{i}.weight" for i in range(6)] * 2


def test_memory_of_the_module_is_given_back(tmp_path: Path) -> None:
    model = deep()
    references = [weakref.ref(weight) for weight in model.parameters()]
    birdie.load(saved(model, tmp_path), into=model, lazy=True)
    assert [ref() for ref in references] == [None] * len(references)


@pytest.mark.parametrize(("layers", "decodings"), [(None, 18), (3.5, 14), (100, 6)])
def test_the_cache_holds_what_was_allowed_and_never_more(
    layers: float | None, decodings: int, tmp_path: Path, decoded: Decoded
) -> None:
    size = 64 * 64 * 4
    allowed = None if layers is None else int(layers * size)
    model = birdie.load(saved(deep(), tmp_path), into=deep(), lazy=True, cache_bytes=allowed)
    for _ in range(3):
        model(torch.randn(2, 64))
        assert decoded.alive <= (allowed or size)
    assert decoded.most <= (allowed or size)
    assert len(decoded.names) == decodings


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak of memory")
def test_the_memory_of_a_forward_is_that_of_a_few_layers(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = deep(1024, 16)  # 67 MB
    path = tmp_path / "model.birdie"
    birdie.save({name: torch.zeros(w.shape) for name, w in module.state_dict().items()}, path, lossless=True)
    model = birdie.load(path, into=module, lazy=True)
    model[:2](torch.ones(1, 1024))
    reset_peak()
    idle = resident("VmRSS")
    model(torch.ones(1, 1024))
    assert resident("VmHWM") - idle < 25


def weight_of(model: nn.Sequential, index: int) -> Tensor:
    weight = model[index].weight
    assert isinstance(weight, Tensor)
    return weight


def test_a_tensor_in_use_is_not_decoded_again(tmp_path: Path) -> None:
    model = birdie.load(saved(deep(), tmp_path), into=deep(), lazy=True)
    first = weight_of(model, 0)
    model(torch.randn(2, 64))
    assert weight_of(model, 0) is first
    state = model.state_dict()
    assert weight_of(model, 0).data_ptr() == state["0.weight"].data_ptr()


def test_a_model_is_still_a_model(tmp_path: Path) -> None:
    path = saved(Tied(), tmp_path)
    eager, lazy = birdie.load(path, into=Tied()), birdie.load(path, into=Tied(), lazy=True)
    assert isinstance(lazy, Tied)
    assert repr(lazy) == repr(eager)
    assert lazy.head.weight is lazy.embedding.weight
    assert isinstance(lazy.mix, nn.Parameter)
    assert [name for name, _ in lazy.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert sum(p.numel() for p in lazy.parameters()) == sum(p.numel() for p in eager.parameters())
    state = lazy.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in eager.state_dict().items())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    birdie.save(lazy, tmp_path / "again.birdie", lossless=True)
    assert same(birdie.load(tmp_path / "again.birdie", into=Tied())(IDS), eager(IDS))
    torch.save(lazy.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True).keys() == state.keys()


@pytest.mark.parametrize("case", mostly_nightly(["sequential", "normed", "lstm", "tied", "gpt"], ("normed", "tied")))
def test_a_dtype_to_load_is_that_of_the_eager_model(case: str, tmp_path: Path) -> None:
    build, inputs = CASES[case]
    path, dtype = saved(build(), tmp_path), torch.bfloat16
    eager = birdie.load(path, into=build(), dtype=dtype).eval()
    lazy = birdie.load(path, into=build(), lazy=True, dtype=dtype, cache_bytes=1 << 20)
    kinds = {name: weight.dtype for name, weight in lazy.state_dict().items()}
    assert kinds == {name: weight.dtype for name, weight in eager.state_dict().items()}
    assert all(torch.equal(lazy.state_dict()[name], weight) for name, weight in eager.state_dict().items())
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
    assert same(lazy(*inputs), eager(*inputs))


def test_a_file_of_another_precision_is_cast_as_it_is_copied(tmp_path: Path) -> None:
    path = saved(deep().double(), tmp_path, lossless=True)
    eager, lazy = birdie.load(path, into=deep()), birdie.load(path, into=deep(), lazy=True)
    assert same(lazy(torch.ones(1, 64)), eager(torch.ones(1, 64)))


class Migrating(nn.Module):
    """Joins what older files hold in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out = nn.Linear(8, 24, bias=False), nn.Linear(24, 8)
        self._register_load_state_dict_pre_hook(self.migrate)

    def migrate(self, state: dict[str, Tensor], *_: Any) -> None:
        if "q" in state:
            state["joined.weight"] = torch.cat([state.pop(name) for name in "qkv"])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(self.joined(x))
        return hidden


@pytest.mark.filterwarnings("ignore:for joined.weight. copying from a non-meta parameter")
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_what_a_migration_computes_stays_in_memory(where: str, tmp_path: Path, decoded: Decoded) -> None:
    model, x = Migrating(), torch.ones(2, 8)
    state = model.state_dict()
    state |= dict(zip("qkv", state.pop("joined.weight").clone().split(8), strict=True))
    birdie.save(state, tmp_path / "old.birdie", lossless=True)
    with torch.device(where):
        lazy = Migrating()
    birdie.load(tmp_path / "old.birdie", into=lazy, lazy=True)
    assert sorted(decoded.names) == ["k", "q", "v"]
    assert same(lazy(x), model(x))


def test_what_a_forward_writes_is_kept(tmp_path: Path) -> None:
    path = saved(Counting(), tmp_path)
    eager, lazy = birdie.load(path, into=Counting()).eval(), birdie.load(path, into=Counting(), lazy=True)
    x = torch.ones(2, 4)
    for model in (eager, lazy):
        with torch.no_grad():
            model.linear.weight.mul_(2)
            model.calls.add_(7)
            model.linear.bias = nn.Parameter(torch.ones(4))
        for _ in range(3):
            model(x)
    assert same(lazy(x), eager(x))
    assert lazy.state_dict()["calls"] == 11


def test_gradients_reach_what_stands_before_it(tmp_path: Path) -> None:
    """Adapters around a frozen model can be trained; the model itself cannot."""
    path = saved(deep(), tmp_path)
    adapters = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))]
    for lazy, adapter in zip((False, True), adapters, strict=True):
        birdie.load(path, into=deep(), lazy=lazy).eval()(adapter * torch.linspace(0, 1, 64)).sum().backward()
    gradients = [adapter.grad for adapter in adapters]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.train(),
        lambda model: nn.Sequential(model).train(),
        lambda model: model.requires_grad_(True),
    ],
    ids=["train", "from outside", "gradients"],
)
def test_training_is_refused(tmp_path: Path, use: Callable[[nn.Module], Any]) -> None:
    model = birdie.load(saved(deep(), tmp_path), into=deep(), lazy=True)
    with pytest.raises(ConfigError, match=r"cannot be trained; load it without lazy"):
        use(model)
    assert not model.training


def test_what_cannot_work_says_so(tmp_path: Path) -> None:
    path = saved(deep(), tmp_path)
    model = birdie.load(path, into=deep(), lazy=True)
    for dump in (pickle.dumps, lambda item: torch.save(item, tmp_path / "x.pt"), copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match="cannot be copied or pickled; save its state_dict"):
            dump(model)
    for move in (nn.Module.half, lambda item: nn.Sequential(item).to("cpu"), nn.Module.share_memory):
        with pytest.raises(ConfigError, match=r"cannot be moved or cast; .* give device or dtype to birdie.load"):
            move(model)
    with pytest.raises(TypeError, match="offload"):
        birdie.load(path, into=deep(), lazy=True, offload=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="takes no other weights"):
        model.load_state_dict(deep().state_dict())
    with pytest.raises(ConfigError, match="already reads its weights from a file"):
        birdie.load(path, into=model, lazy=True)
    with pytest.raises(ConfigError, match=r"24,576 is less than the 32,768 of tensor '0.weight' in float64"):
        birdie.load(path, into=deep(), lazy=True, cache_bytes=24_576, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"cache_bytes 5 is less than the 16,384 of tensor '0.weight' in float32"):
        birdie.load(path, into=deep(), lazy=True, cache_bytes=5)
    with pytest.raises(ConfigError, match="give into="):
        birdie.load(path, lazy=True)
    with pytest.raises(ConfigError, match="add lazy"):
        birdie.load(path, cache_bytes=5)
    with pytest.raises(WeightsError, match=r"missing: 6.weight"):
        birdie.load(path, into=deep(depth=7), lazy=True)
    with pytest.raises(WeightsError, match=r"different shape: 0.weight"):
        birdie.load(path, into=deep(width=32), lazy=True)
    with pytest.raises(ArtifactError, match="max_bytes"):
        birdie.load(path, into=deep(), lazy=True, max_bytes=1000)


def test_a_refused_module_is_as_it_was(tmp_path: Path) -> None:
    model, x = deep(depth=7), torch.ones(1, 64)
    original = model(x)
    with pytest.raises(WeightsError):
        birdie.load(saved(deep(), tmp_path), into=model, lazy=True)
    assert type(model) is nn.Sequential
    assert model.training
    assert torch.equal(model(x), original)


def test_damage_is_found_at_first_use_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = saved(deep(), tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model = birdie.load(path, into=deep(), lazy=True)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"'5.weight' of .* fails its checksum"):
            model(torch.ones(1, 64))
    assert model[:5](torch.ones(1, 64)).shape == (1, 64)


def test_the_file_closes_with_the_last_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[bool](), File.close

    def watched(file: File) -> None:
        closed.append(True)
        close(file)

    monkeypatch.setattr(File, "close", watched)
    model = birdie.load(saved(deep(), tmp_path), into=deep(), lazy=True)
    closed.clear()
    part = model[2]
    del model
    assert not closed
    del part
    assert closed


def test_a_lazy_module_can_be_saved_over_its_own_file(tmp_path: Path) -> None:
    """The open file stays what it was, so the module goes on decoding it; the new file holds the same weights."""
    torch.manual_seed(0)
    path, model = tmp_path / "m.birdie", deep()
    birdie.save(model, path, lossless=True)
    lazy = birdie.load(path, into=deep(), lazy=True, cache_bytes=20_000)
    birdie.save(lazy, path, lossless=True)
    saved, weights = birdie.load(path), model.state_dict()
    assert saved.keys() == weights.keys()
    assert all(
        torch.equal(saved[name], weight) and torch.equal(lazy.state_dict()[name], weight)
        for name, weight in weights.items()
    )


class Rows(Dataset[Tensor]):
    """Outputs of a model, computed in the workers of a DataLoader."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> Tensor:
        return self.model(IDS)[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_and_workers_of_a_data_loader_may_share_a_model(tmp_path: Path) -> None:
    """Workers are forked while two threads are inside of the cache."""
    path = saved(gpt(), tmp_path)
    lazy, expected = birdie.load(path, into=gpt(), lazy=True, cache_bytes=60_000), birdie.load(path, into=gpt())(IDS)
    done, wrong = threading.Event(), []

    def work() -> None:
        while not done.is_set():
            if not same(lazy(IDS), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        loader = DataLoader(Rows(lazy), batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork")
        rows = list(loader)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(rows) == 8
    assert all(torch.equal(row, expected[0]) for row in rows)


Item = TypeVar("Item")


class Abstract(nn.Linear, ABC):
    @abstractmethod
    def width(self) -> int: ...


class Concrete(Abstract):
    def width(self) -> int:
        return self.in_features


class Parametric(nn.Linear, Generic[Item]):
    """A class with a type parameter."""


class Registering(nn.Linear):
    """Enters each subclass into a list, under a name that the subclass must give."""

    classes: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str) -> None:
        cls.classes[name] = cls


class Registered(Registering, name="first"):
    pass


class Meta(type):
    """A metaclass that wants an argument of every class."""

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any], *, tag: int) -> "Meta":  # noqa: ARG004
        return super().__new__(cls, name, bases, content)

    def __init__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any], *, tag: int) -> None:  # noqa: ARG002
        super().__init__(name, bases, content)


class OfMeta(nn.Linear, metaclass=Meta, tag=1):
    pass


class Sized(Protocol):
    def width(self) -> int: ...


class AbstractFirst(ABC, nn.Linear):
    @abstractmethod
    def width(self) -> int: ...


class OfAbstractFirst(AbstractFirst):
    def width(self) -> int:
        return self.in_features


class ParametricFirst(Generic[Item], nn.Linear):
    """A class with a type parameter, before the module."""


class OfProtocol(Sized, nn.Linear):
    def width(self) -> int:
        return self.in_features


class Counted(type):
    """A metaclass that counts what it makes and lets nobody change it."""

    names: ClassVar[list[str]] = []

    def __call__(cls, *args: Any, **options: Any) -> Any:
        cls.names.append(cls.__name__)
        return super().__call__(*args, **options)

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(name)


class OfCounted(nn.Linear, metaclass=Counted):
    pass


class Slotted(ABC, nn.Linear):
    __slots__ = ("extra",)


@final
class Delegating(nn.Linear):
    """Looks up attributes in ways of its own."""

    def __getattr__(self, name: str) -> Any:
        return 8 if name == "width" else super().__getattr__("weight" if name == "matrix" else name)

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("bias" if name == "shift" else name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = F.linear(x, self.matrix, self.bias)
        return hidden * float(self.width)


class Copied(ABC, nn.Linear):
    """Is copied by code of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Copied":
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


KINDS = [
    *(Concrete, Parametric, Parametric[int], Registered, OfMeta, OfAbstractFirst, ParametricFirst),
    *(ParametricFirst[int], OfProtocol, OfCounted, Slotted, Delegating, Copied),
]


@pytest.mark.parametrize("kind", KINDS)
def test_classes_of_any_kind_load_lazily(kind: Any, tmp_path: Path) -> None:
    model, x = nn.Sequential(kind(8, 8), nn.ReLU()), torch.ones(1, 8)
    lazy = birdie.load(saved(model, tmp_path, lossless=True), into=nn.Sequential(kind(8, 8), nn.ReLU()), lazy=True)
    assert same(lazy(x), model(x))
    assert type(lazy[0]) is getattr(kind, "__origin__", kind)
    assert Registering.classes == {"first": Registered}
    for dump in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match="cannot be copied or pickled"):
            dump(lazy[0])
    for use in (nn.Module.half, nn.Module.train):
        with pytest.raises(ConfigError, match="cannot be"):
            use(lazy)
    assert not lazy.eval().training


class Recurrent(ABC, nn.LSTM):
    pass


def test_a_recurrent_layer_of_any_kind_keeps_no_tensor_alive(tmp_path: Path, decoded: Decoded) -> None:
    model, x = Recurrent(6, 8, 2), torch.ones(5, 2, 6)
    lazy = birdie.load(saved(model, tmp_path, lossless=True), into=Recurrent(6, 8, 2), lazy=True, cache_bytes=2048)
    assert same(lazy(x), model(x))
    assert same(lazy(x), model(x))
    assert [name for name, _ in lazy.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [len(group) for group in lazy.all_weights] == [len(group) for group in model.all_weights]
    assert decoded.alive <= 2048 < sum(weight.nbytes for weight in model.parameters())


def test_a_hook_that_reads_weights_too_early_is_refused(tmp_path: Path) -> None:
    model = deep()
    model.register_load_state_dict_post_hook(lambda module, _: module[0].weight.sum())
    with pytest.raises(ConfigError, match=r"reads '0\.weight' while it is loaded"):
        birdie.load(saved(deep(), tmp_path), into=model, lazy=True)
    assert type(model) is nn.Sequential


SIZE = 64
CPU = torch.device("cpu")


@dataclass
class Decoder:
    """Decodes names to tensors that hold their number, and notes the names."""

    log: list[str] = field(default_factory=list)

    def decode(self, name: str) -> Tensor:
        self.log.append(name)
        return torch.full((SIZE,), float(name))


def slot(name: str) -> Slot:
    return Slot(name, (SIZE,), (torch.float32,), CPU, parameter=True)


def cache_of(decoder: Decoder, layers: float = 1.0) -> TensorCache:
    return TensorCache(decoder.decode, lambda: decoder.log.append("close"), [slot("0")], int(layers * 4 * SIZE))


def read(cache: TensorCache, names: str) -> None:
    for name in names:
        assert cache.get(slot(name))[0].item() == float(name)


@pytest.mark.parametrize(("layers", "later"), [(1.0, "0123"), (1.5, "0123"), (2.5, "123"), (3.5, "23"), (5.5, "")])
def test_the_first_tensors_that_fit_are_kept(layers: float, later: str) -> None:
    decoder = Decoder()
    cache = cache_of(decoder, layers)
    for _ in range(3):
        read(cache, "0123")
    assert "".join(decoder.log) == "0123" + 2 * later


def test_the_tensor_that_was_read_last_is_not_decoded_again() -> None:
    decoder = Decoder()
    cache = cache_of(decoder)
    read(cache, "00111")
    assert "".join(decoder.log) == "01"


def test_a_buffer_without_memory_is_named(tmp_path: Path) -> None:
    path = saved(Counting(), tmp_path)
    with torch.device("meta"):
        model = Counting()
    with pytest.raises(WeightsError, match=r"buffer 'scale' of the module is not in .* and has no memory"):
        birdie.load(path, into=model, lazy=True)


def test_a_weight_held_in_another_place_is_named(tmp_path: Path) -> None:
    model = deep()
    vars(model)["kept"] = {"first": model[0].weight}
    with pytest.raises(ConfigError, match=r"kept of the module also holds tensor '0.weight'"):
        birdie.load(saved(deep(), tmp_path), into=model, lazy=True)


def test_torch_compile_does_not_enter_the_decoder(tmp_path: Path) -> None:
    for seed in range(2):  # what is compiled for one module is tried with the next
        module, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4)), torch.ones(2, 32)
        torch.manual_seed(seed)
        birdie.save(module, tmp_path / "x.birdie", bits=5, effort="max")
        eager = birdie.load(tmp_path / "x.birdie", into=module)
        lazy = birdie.load(tmp_path / "x.birdie", into=nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 4)), lazy=True)
        assert torch.equal(torch.compile(lazy, backend="eager")(x), eager(x))
