"""Losses and batches of all kinds: calibration and tuning accept what training does, or one sentence says why not."""

import io
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import DataLoader

import birdie
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.kl import Predictions
from birdie.compress.calibration.sensitivity import measure
from birdie.errors import ConfigError, DataError, WeightsError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
INPUTS, CLASSES = 16, 8
Batches = Sequence[tuple[Tensor, Tensor]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def batches(count: int = 6, size: int = 12) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, INPUTS, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def nats(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def residual(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Loss of a physics-informed network: by second derivatives of the outputs by the inputs."""
    x = batch[0].clone().requires_grad_(True)
    outputs = module(x)
    (first,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    loss: Tensor = (second + torch.sin(x)).square().mean() + outputs.square().mean()
    return loss


def input_penalty(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy with a penalty on its gradient by the inputs, which are the batch itself."""
    loss = F.cross_entropy(module(batch[0].requires_grad_(True)), batch[1])
    (gradient,) = torch.autograd.grad(loss, batch[0], create_graph=True)
    return loss + gradient.square().sum()


def adversarial(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(module(x), batch[1]), x)
    return F.cross_entropy(module(batch[0] + 0.1 * gradient.sign()), batch[1])


def weight_penalty(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A penalty on the gradient by the weights."""
    loss = F.mse_loss(module(batch[0]), torch.zeros(len(batch[0]), CLASSES))
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    penalty: Tensor = torch.stack([one.square().sum() for one in gradients]).sum()
    return loss + penalty


def inner_step(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss after a step of training, as in meta-learning."""
    weights = dict(module.named_parameters())
    gradients = grad(lambda weights: F.cross_entropy(functional_call(module, weights, (batch[0],)), batch[1]))(weights)
    moved = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
    return F.cross_entropy(functional_call(module, moved, (batch[0],)), batch[1])


def sample_gradients(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A penalty on the gradients of each sample."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, weights, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(dict(module.named_parameters()), *batch)
    return nats(module, batch) + 0.01 * torch.stack([one.square().sum() for one in gradients.values()]).sum()


def mapped(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses: Tensor = vmap(lambda x, y: F.cross_entropy(module(x[None]), y[None]))(*batch)
    return losses.mean()


class Stacked(nn.Module):
    """An ensemble whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, CLASSES, INPUTS) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = vmap(F.linear, in_dims=(None, 0))(x, self.weight)
        return out.mean(0)


class Ensemble(nn.Module):
    """An ensemble of modules whose weights are stacked in each forward pass."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.members, self.detached = nn.ModuleList([nn.Linear(INPUTS, CLASSES) for _ in range(3)]), detached

    def forward(self, x: Tensor) -> Tensor:
        first = self.members[0]
        weights: Any = stack_module_state(list(self.members))[0]
        if not self.detached:
            weights = {name: torch.stack([m.get_parameter(name) for m in self.members]) for name in weights}
        out: Tensor = vmap(lambda weights: functional_call(first, weights, (x,)))(weights)
        return out.mean(0)


class Forces(nn.Module):
    """A force field: it differentiates its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -force


class Experts(nn.Module):
    """A mixture of experts, one of which gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(INPUTS, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = torch.zeros(len(x), CLASSES), (x[:, 0] > 0).long()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def squares(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = module(batch[0])
    return F.mse_loss(outputs, torch.ones_like(outputs))


WORKING: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "residual": (net, residual),
    "input penalty": (net, input_penalty),
    "adversarial": (net, adversarial),
    "weight penalty": (net, weight_penalty),
    "inner step": (net, inner_step),
    "sample gradients": (net, sample_gradients),
    "mapped": (net, mapped),
    "stacked": (Stacked, nats),
    "ensemble": (lambda: Ensemble(detached=False), nats),
    "forces": (Forces, squares),
    "experts": (Experts, nats),
}


@pytest.mark.parametrize("case", WORKING)
def test_a_loss_that_trains_calibrates_measures_and_tunes(case: str) -> None:
    torch.manual_seed(0)
    build, loss = WORKING[case]
    module, data = build(), batches()
    known, file = birdie.calibrate(module, data, loss), io.BytesIO()
    summary = birdie.save(module, file, effort="fast", quality=0.001, calibration=known)
    assert summary.error is not None
    assert 0 < summary.error <= 0.001
    other = birdie.load(file.getvalue(), into=build())
    outputs = [one(data[-1][0]).detach() for one in (module, other)]
    assert float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < 0.5
    tuned = birdie.save(module, io.BytesIO(), effort="fast", bits=8, tune=0.1, calibration=known)
    assert tuned.error is not None
    assert tuned.untuned is not None
    assert tuned.error <= tuned.untuned


@pytest.mark.parametrize("case", WORKING)
def test_offload_runs_or_says_to_leave_it(case: str) -> None:
    build, loss = WORKING[case]
    by_func = {"sample gradients", "inner step"}
    with nullcontext() if case not in by_func else pytest.raises(ConfigError, match="without offload"):
        birdie.calibrate(build(), batches(), loss, offload=True)


def test_measures_of_losses_that_differentiate_are_those_of_plain_arithmetic() -> None:
    torch.manual_seed(0)
    module, other, data = net(), net(), batches(2)
    measured = HeldOut(module, data, residual)(other.state_dict())
    pairs = [(float(residual(module, batch)), float(residual(other, batch))) for batch in data]
    expected = sum(abs(first - second) for first, second in pairs) / sum(abs(first) for first, _ in pairs)
    assert measured == pytest.approx(expected, rel=1e-5)


def test_measures_within_transforms_are_those_without() -> None:
    torch.manual_seed(0)
    module, other, data = net(), net(), batches(2)
    assert HeldOut(module, data, mapped)(other.state_dict()) == pytest.approx(
        HeldOut(module, data, nats)(other.state_dict()), rel=1e-5
    )


def test_predictions_keep_no_history() -> None:
    held_out = HeldOut(net(), batches(2), input_penalty)
    results: Predictions = held_out.predictions(0, held_out.batches[0])
    assert not any(tensor.requires_grad for tensor in results.tensors)


def test_gradients_that_a_loss_takes_on_its_way_do_not_count() -> None:
    """An adversarial step takes gradients of other inputs; only the gradient of the loss itself counts."""

    def twice(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_(True)
        torch.autograd.grad(1000 * module(x).square().sum(), x)
        return squares(module, batch)

    torch.manual_seed(0)
    module = net()
    plain, measured = (measure(module, batches(), loss)["2.weight"].row_fisher for loss in (squares, twice))
    assert plain is not None
    assert measured is not None
    torch.testing.assert_close(measured, plain)


Pair = namedtuple("Pair", ("x", "y"))


@dataclass
class Record:
    x: Tensor
    y: Tensor


def by_name(module: nn.Module, batch: Any) -> Tensor:
    return nats(module, (batch.x, batch.y))


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        ([{"x": x, "y": y} for x, y in batches()], lambda module, one: nats(module, (one["x"], one["y"]))),
        ([Pair(*one) for one in batches()], by_name),
        ([Record(*one) for one in batches()], by_name),
        ([None] * 6, lambda module, _: nats(module, batches(1)[0])),
        (batches(1), nats),
        (DataLoader(list(zip(*batches(1, 48)[0], strict=True)), 8), nats),  # type: ignore[arg-type]
    ],
    ids=["dicts", "named tuples", "records", "None", "one", "loader"],
)
def test_batches_may_be_anything(data: Any, loss: Any) -> None:
    module = net()
    birdie.save(module, io.BytesIO(), effort="fast", bits=8, tune=0.05, calibration=(module, data, loss))
    birdie.save(module, io.BytesIO(), effort="fast", bits=8, calibration=(module, iter(list(data)), loss))


EMPTY = (torch.zeros(0, INPUTS), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("data", "loss", "kind", "words"),
    [
        ([], nats, DataError, "no calibration batches"),
        ([EMPTY] * 6, nats, DataError, "no examples"),
        ([EMPTY] * 6, lambda module, one: module(one[0]).sum(), DataError, "no examples"),
        (5, nats, ConfigError, "loss"),
        (batches(), "mse", ConfigError, "loss"),
        (batches(), lambda module, one: float(nats(module, one)), ConfigError, "a float"),
        (batches(), lambda module, one: (nats(module, one), 1), ConfigError, "a tuple"),
        (batches(), lambda *_: None, ConfigError, "a NoneType"),
        (batches(), lambda module, one: module(one[0]), ConfigError, "numbers"),
        (batches(), lambda module, one: nats(module, one).detach(), ConfigError, "does not depend"),
        (batches(), lambda module, one: nats(module, one) * 1j, ConfigError, "complex"),
        (batches(), lambda module, one: nats(module, one) * torch.nan, DataError, "NaN"),
        ([(x * torch.nan, y) for x, y in batches()], nats, DataError, "NaN"),
    ],
)
@pytest.mark.parametrize("action", [birdie.calibrate, birdie.sensitivity])
def test_what_cannot_be_calibrated_on_is_one_sentence(
    action: Callable[..., Any], data: Any, loss: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        action(net(), data, loss)


def test_detached_copies_of_weights_are_named() -> None:
    with pytest.raises(ConfigError, match="stack_module_state"):
        birdie.calibrate(Ensemble(detached=True), batches(), nats)


def test_lazy_layers_have_to_run_once() -> None:
    module = nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(CLASSES))
    with pytest.raises(WeightsError, match="run the module once"):
        birdie.calibrate(module, batches(), nats)
    module(batches()[0][0])
    birdie.calibrate(module, batches(), nats)


@pytest.mark.parametrize("mode", ["rows", "mean", "sum", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients_calibrate_and_tune_like_dense_ones(mode: str, sparse: bool) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = (
                nn.Embedding(64, 16, sparse=sparse)
                if mode == "rows"
                else nn.EmbeddingBag(64, 16, mode=mode, sparse=sparse and mode != "max")
            )
            self.head = nn.Linear(16, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            rows: Tensor = self.table(ids)
            return self.head(rows.mean(1) if mode == "rows" else rows)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Table()
    data = [(torch.randint(0, 64, (12, 4)), torch.randint(0, CLASSES, (12,))) for _ in range(6)]
    known = birdie.calibrate(module, data, nats)
    assert set(known.sensitivities) == {"table.weight", "head.weight"}
    summary = birdie.save(module, io.BytesIO(), effort="fast", bits=6, tune=0.1, calibration=known)
    assert summary.error is not None
    assert summary.untuned is not None
    assert summary.error <= summary.untuned
