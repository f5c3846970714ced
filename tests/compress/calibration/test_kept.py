"""Code that runs a caller's module leaves everything as it was, to the bit, and files hold the earlier values."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import birdie
from tests.compress.calibration.side_effects import CLASSES, INPUTS, Base, picture, seeded, subclasses
from tests.nightly import mostly_nightly

pytestmark = pytest.mark.filterwarnings("ignore")
Batches = list[tuple[Tensor, Tensor]]


def batches(count: int = 6) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, INPUTS, generator=generator), torch.randint(0, CLASSES, (12,), generator=generator))
        for _ in range(count)
    ]


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def saved(module: nn.Module, **options: Any) -> None:
    """Save with every bit, and compare with the module, which is as it was."""
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    file = io.BytesIO()
    birdie.save(module, file, scheme=[("*", "lossless")], **options)
    state = birdie.load(file.getvalue())
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(bits(state[name]), bits(value)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def again(module: nn.Module) -> nn.Module:
    assert isinstance(module, Base)
    return seeded(type(module))


def quantized(module: nn.Module) -> None:
    """Quantize a copy, whose buffers stay."""
    twin = copy.deepcopy(module) if "middle" not in vars(module)["_modules"] else again(module)
    birdie.quantize_(twin, scheme="int6", calibration=(twin, batches(), loss))
    for (name, one), (_, other) in zip(module.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(bits(one), bits(other)), name


def searched(module: nn.Module, **options: Any) -> None:
    file = io.BytesIO()
    birdie.save(module, file, effort="fast", calibration=(module, batches(), loss), **options)
    state = birdie.load(file.getvalue())
    for name, buffer in module.named_buffers():
        if name in state:
            assert torch.equal(bits(state[name]), bits(buffer)), name


ACTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "calibrate": lambda module: birdie.calibrate(module, batches(), loss),
    "offload": lambda module: birdie.calibrate(module, batches(), loss, offload=True),
    "example inputs": lambda module: birdie.calibrate(module, example_inputs=[x for x, _ in batches()]),
    "sensitivity": lambda module: birdie.sensitivity(module, batches(), loss, at=(4.0,)),
    "budget": lambda module: searched(module, budget=3_500),
    "tune": lambda module: searched(module, quality=0.3, tune=0.1),
    "quantize_": quantized,
}


EVERY = [(action, kind) for action in ACTIONS for kind in subclasses()]
THOROUGH = "tune"  # which calibrates, measures and trains: the one action of each daily run that all kinds go through


@pytest.mark.parametrize(
    ("action", "kind"),
    mostly_nightly(
        EVERY, [pair for index, pair in enumerate(EVERY) if pair[0] == THOROUGH or index % (len(ACTIONS) - 1) == 0]
    ),
)
def test_a_module_is_the_same_before_and_after(action: str, kind: type[Base], one_thread: None) -> None:  # noqa: ARG001
    module = seeded(kind)
    earlier = picture(module)
    ACTIONS[action](module)
    assert picture(module) == earlier


class Images(nn.Module):
    """An image network that counts, and keeps the mean of what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        out: Tensor = self.head(hidden - self.mean / self.calls)
        return out


class Text(nn.Module):
    """A language model that keeps its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru, self.head = nn.Embedding(64, 16), nn.GRU(16, 16), nn.Linear(16, 64)
        self.last: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        hidden, last = self.gru(self.table(ids), self.last)
        self.last = last.detach()
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("kind", [Images, Text])
@pytest.mark.parametrize("options", [{}, {"tune": 0.1}], ids=str)
def test_made_up_inputs_leave_a_module_as_it_was(
    kind: type[nn.Module], options: dict[str, float], one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    del one_thread
    monkeypatch.setattr("birdie.compress.calibration.synthetic.TOKENS", 2560)
    monkeypatch.setattr("birdie.compress.calibration.synthetic.IMAGES", 20)
    torch.manual_seed(0)
    module = kind()
    earlier = picture(module)
    birdie.save(module, io.BytesIO(), effort="fast", bits=12, calibration="synthetic", **options)  # type: ignore[arg-type]
    assert picture(module) == earlier


@pytest.mark.parametrize("kind", subclasses(), ids=lambda kind: kind.__name__)
def test_a_loss_that_raises_leaves_the_module_as_it_was(kind: type[Base], one_thread: None) -> None:  # noqa: ARG001
    module, calls = seeded(kind), [0]
    earlier = picture(module)

    def failing(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls[0] += 1
        nats = loss(module, batch)
        if calls[0] > 2:
            raise KeyError("labels")
        return nats

    with pytest.raises(KeyError):
        birdie.calibrate(module, batches(), failing)
    assert picture(module) == earlier


def test_a_batch_that_a_loss_changes_is_as_it_was() -> None:
    module = nn.Linear(INPUTS, CLASSES)
    data: list[dict[str, Tensor]] = [{"x": x, "y": y} for x, y in batches()]
    expected = [one["x"].clone() for one in data]

    def popping(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("y")
        batch["x"].mul_(2)
        return F.cross_entropy(module(batch["x"]), labels)

    birdie.save(module, io.BytesIO(), quality=0.01, calibration=(module, data, popping))
    assert all(torch.equal(one["x"], x) and "y" in one for one, x in zip(data, expected, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_shuffles_leaves_the_random_generators_as_they_were(workers: int) -> None:
    pairs: Any = list(zip(*batches(1)[0], strict=True))
    loader: DataLoader[Any] = DataLoader(pairs, 3, shuffle=True, num_workers=workers)
    module = nn.Linear(INPUTS, CLASSES)
    earlier = picture(module)
    birdie.calibrate(module, loader, loss)
    birdie.save(module, io.BytesIO(), bits=12, calibration=(module, loader, loss))
    birdie.sensitivity(module, loader, loss, at=(4.0,))
    assert picture(module) == earlier


def test_gradients_that_a_loss_adds_are_removed() -> None:
    module = nn.Linear(INPUTS, CLASSES)
    module.weight.grad = torch.ones(CLASSES, INPUTS)
    gradient = module.weight.grad

    def backward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss(module, batch).backward()
        return loss(module, batch)

    birdie.save(module, io.BytesIO(), quality=0.01, calibration=(module, batches(), backward))
    assert module.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(CLASSES, INPUTS))
    assert module.bias.grad is None


def test_a_parameter_that_changes_later_is_an_error_that_names_it() -> None:
    class Later(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 100:
                with torch.no_grad():
                    self.bias.add_(1)
            return super().forward(x)

    module, data = Later(INPUTS, CLASSES), batches()
    data[2][0][0, 0] = 101.0
    with pytest.raises(birdie.ConfigError, match="bias"):
        birdie.calibrate(module, data, loss)
