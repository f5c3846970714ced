"""Refit: never worse than what it was given, never touches its inputs, and finds what quantization took away."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.refit import as_stored, refit
from birdie.compress.registry import decode
from birdie.compress.schemes.grid import Grid
from birdie.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(12, 32), nn.BatchNorm1d(32)
        self.down = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.norm(self.up(x))))
        return out


FLOATS = ("up.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "down.bias")


def net() -> Net:
    torch.manual_seed(0)
    module = Net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
        for _ in range(50):
            module(torch.randn(64, 12) * 2)
    return module.eval()


def some_batches(count: int = 10, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(64, 12, generator=generator) * 2, torch.randint(0, 6, (64,), generator=generator))
        for _ in range(count)
    ]


def nats(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def decoded(module: nn.Module, grid: Grid | None = None) -> dict[str, Tensor]:
    """The matrices from a grid, all else from 16 bits."""
    grid = grid or Grid(bits=3)
    return {
        name: decode(grid.encode(name, weight)) if weight.ndim == 2 else as_stored(name, weight)
        for name, weight in module.state_dict().items()
    }


def test_no_input_is_changed() -> None:
    module, batches = net().train(), some_batches()
    state = decoded(module)
    originals = {name: weight.clone() for name, weight in (module.state_dict() | state).items()}
    weights = {name: weight.clone() for name, weight in module.state_dict().items()}
    inputs = [x.clone() for x, _ in batches]
    refit(module, state, FLOATS, batches, nats, steps=8)
    assert all(torch.equal(weight, originals[name]) for name, weight in state.items())
    assert all(torch.equal(weight, weights[name]) for name, weight in module.state_dict().items())
    assert all(torch.equal(x, y) for (x, _), y in zip(batches, inputs, strict=True))
    assert module.training
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """KLs on the held-out batches, as they are measured: at first that of the decoded state."""
    measured: list[float] = []
    measure = HeldOut.__call__

    def recording(held_out: HeldOut, state: dict[str, Tensor]) -> float:
        measured.append(measure(held_out, state))
        return measured[-1]

    monkeypatch.setattr(HeldOut, "__call__", recording)
    return measured


def test_what_is_worse_is_not_returned(judged: list[float]) -> None:
    """A rate that throws everything about leaves the tensors that were given, bit for bit."""
    module = net()
    state = decoded(module, Grid(bits=8))
    tuned = refit(module, state, FLOATS, some_batches(), nats, steps=8, lr=50.0)
    assert len(judged) > 1
    assert min(judged[1:]) > judged[0]
    assert tuned.keys() == set(FLOATS)
    assert all(torch.equal(tuned[name], state[name]) for name in FLOATS)


def test_it_returns_the_best_that_it_measured(judged: list[float]) -> None:
    module = net()
    state = decoded(module)
    tuned = refit(module, state, FLOATS, some_batches(), nats, steps=30)
    lowest = min(judged)
    refit(module, state | tuned, FLOATS, some_batches(), nats, steps=0)
    assert judged[-1] == pytest.approx(lowest, rel=1e-6)


def test_what_it_returns_is_what_a_file_holds() -> None:
    module = net()
    tuned = refit(module, decoded(module), FLOATS, some_batches(), nats, steps=30)
    assert all(torch.equal(as_stored(name, weight), weight) for name, weight in tuned.items())
    assert all(weight.dtype is torch.float32 for weight in tuned.values())


def test_what_took_sixteen_bits_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias on its way through zero would be kept as float32 for one subnormal value."""
    module = net()
    bias = torch.tensor([1e-4, -1e-4, 0.0, 0.5, 0.3, 1.0])
    with torch.no_grad():
        module.down.bias.copy_(bias)
    seen: list[Tensor] = []

    def stored(name: str, weight: Tensor) -> Tensor:
        seen.append(as_stored(name, weight))
        return seen[-1]

    state = decoded(module)
    monkeypatch.setattr("birdie.compress.calibration.refit.as_stored", stored)
    for lr in (1e-4, 3e-4, 1e-3):
        refit(module, state, ["down.bias"], some_batches(), nats, steps=16, lr=lr)
    assert len(seen) == 24
    assert all(torch.equal(weight, weight.half().float()) for weight in seen)


def test_two_runs_are_equal() -> None:
    module = net()
    first, second = (refit(module, decoded(module), FLOATS, some_batches(), nats, steps=20) for _ in range(2))
    assert torch.equal(first["down.bias"], second["down.bias"])


def test_running_statistics_and_integers_stay() -> None:
    module = net()
    state = decoded(module)
    tuned = refit(module, state, FLOATS, some_batches(), nats, steps=20)
    assert torch.equal(tuned["norm.running_mean"], state["norm.running_mean"])
    with pytest.raises(ConfigError, match=r"cannot tune 'norm\.num_batches_tracked' of torch\.int64"):
        refit(module, state, ["norm.num_batches_tracked"], some_batches(), nats)


def test_what_the_loss_does_not_use_stays() -> None:
    module = net()
    module.spare = nn.Linear(3, 4)
    state = decoded(module)
    tuned = refit(module, state, ["spare.bias"], some_batches(), nats, steps=20)
    assert torch.equal(tuned["spare.bias"], state["spare.bias"])


def test_tied_tensors_stay_tied() -> None:
    module = net()
    module.other = nn.Module()
    module.other.bias = module.down.bias
    tuned = refit(module, decoded(module), ["down.bias", "other.bias"], some_batches(), nats, steps=20)
    assert torch.equal(tuned["down.bias"], tuned["other.bias"])
    assert not torch.equal(tuned["down.bias"], decoded(module)["down.bias"])


def test_labels_are_not_looked_at_but_for_what_is_ignored() -> None:
    module, batches = net(), some_batches()
    state = decoded(module)
    others = [(x, 5 - y) for x, y in batches]
    padded = [(torch.cat([x, 100 * x[:9]]), torch.cat([y, torch.full((9,), -100)])) for x, y in batches]
    plain = refit(module, state, FLOATS, batches, nats, steps=10)["down.bias"]
    assert torch.equal(refit(module, state, FLOATS, others, nats, steps=10)["down.bias"], plain)
    torch.testing.assert_close(refit(module, state, FLOATS, padded, nats, steps=10)["down.bias"], plain)


def test_an_exact_model_is_returned_as_it_is() -> None:
    module = net()
    state = {name: weight.clone() for name, weight in module.state_dict().items()}
    tuned = refit(module, state, FLOATS, some_batches(), nats, steps=10)
    assert all(torch.equal(tuned[name], state[name]) for name in FLOATS)


def test_what_cannot_be_refitted_is_refused() -> None:
    module = net()
    state = decoded(module)

    def several(module: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = module(batch[0]).square()
        return out

    def call(
        state: dict[str, Tensor] = state, names: Any = FLOATS, count: int = 4, loss: Any = nats, **more: Any
    ) -> None:
        refit(module, state, names, some_batches(count), loss, **more)

    with pytest.raises(DataError, match="needs two batches"):
        call(count=1)
    with pytest.raises(ConfigError, match="knows no tensor 'up'"):
        call(names=["up"])
    with pytest.raises(ConfigError, match="single number"):
        call(loss=several)
    with pytest.raises(ConfigError, match="out of range"):
        call(lr=0.0)
    with pytest.raises(ConfigError, match="out of range"):
        call(steps=-1)
    with pytest.raises(ConfigError, match=r"differ in tensor 'down\.bias'"):
        call(state={name: weight for name, weight in state.items() if name != "down.bias"})
    with pytest.raises(DataError, match="not finite"):
        call(state=state | {"down.bias": torch.full((6,), float("nan"))})
