"""Laws of seeing what a loss predicts: whatever way it calls the cross-entropy; and of the KL that is told by it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.kl import difference, kl, predictions, summed_kl
from birdie.errors import ConfigError, DataError

CLASSES = 5
Batch = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, CLASSES))


def some_batches(count: int = 3, size: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def nats(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def log_probabilities(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(-1)


def captured(call: Callable[[Tensor], Any], logits: Tensor) -> list[Tensor]:
    """Return the log-probabilities that are seen when a loss gives `logits` to `call`."""
    return list(predictions(nn.Identity(), logits, lambda module, batch: call(module(batch))).log_probabilities)


@pytest.mark.parametrize("loss", [nats, lambda module, batch: F.mse_loss(module(batch[0]).sum(1), batch[1].float())])
def test_weights_that_predict_nan_are_worse_than_any(loss: Callable[[nn.Module, Batch], Tensor]) -> None:
    """Weight norm predicts NaN where all weights of a row came back as zeros."""
    module = net().eval()
    held_out = HeldOut(module, some_batches(), loss)
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    assert held_out(weights) < 1e-6
    assert held_out(weights | {"0.bias": torch.full((8,), torch.nan)}) == math.inf
    assert held_out(weights) < 1e-6


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.cross_entropy(x, torch.arange(4)),
        lambda x: F.cross_entropy(input=x, target=torch.arange(4), reduction="none").sum(),
        lambda x: nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.rand(CLASSES))(x, torch.arange(4)),
        lambda x: F.cross_entropy(x, torch.full((4, CLASSES), 1 / CLASSES)),
        lambda x: F.cross_entropy(x.view(2, 2, CLASSES).transpose(1, 2), torch.arange(4).view(2, 2)),
        lambda x: F.cross_entropy(x.repeat_interleave(2, 0), torch.tensor([0, -100] * 4)),
        lambda x: F.cross_entropy(x.repeat_interleave(2, 0), torch.tensor([0, 3] * 4), ignore_index=3),
    ],
)
def test_however_it_is_called_the_same_is_seen(call: Callable[[Tensor], Tensor]) -> None:
    logits = torch.randn(4, CLASSES)
    (seen,) = captured(call, logits)
    assert torch.equal(seen, logits.log_softmax(-1))


def test_a_loss_that_compares_nothing_and_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="single number"):
        captured(torch.exp, torch.randn(4, CLASSES))


def measured(call: Callable[[Tensor], Any], ours: Tensor, theirs: Tensor) -> float:
    """Return the difference of two models that predict `ours` and `theirs`."""
    sides = [predictions(nn.Identity(), x, lambda module, batch: call(module(batch))) for x in (ours, theirs)]
    mean = difference(*sides).mean()
    assert mean is not None
    return float(mean)


TARGETS = torch.rand(6, CLASSES, generator=torch.Generator().manual_seed(5))


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    return (theirs - ours).square().sum() / (ours - ours.mean()).square().sum()


def kl_of_two_classes(ours: Tensor, theirs: Tensor) -> Tensor:
    p, q = (torch.sigmoid(x.double()) for x in (ours, theirs))
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


def kl_of_classes(ours: Tensor, theirs: Tensor) -> Tensor:
    return kl(ours.log_softmax(-1), theirs.log_softmax(-1)).mean()


DIFFERENCES: dict[Callable[[Tensor, Tensor], Tensor], list[Callable[[Tensor], Tensor]]] = {
    relative_error: [
        lambda x: F.mse_loss(x, TARGETS),
        lambda x: F.mse_loss(TARGETS, x),
        lambda x: nn.L1Loss(reduction="sum")(x, TARGETS),
        lambda x: F.smooth_l1_loss(input=x, target=TARGETS),
        lambda x: F.huber_loss(x, TARGETS, delta=0.1),
        lambda x: F.cosine_embedding_loss(x, TARGETS, torch.ones(6)),
        lambda x: F.triplet_margin_loss(TARGETS, x, 1 - TARGETS),
        lambda x: F.margin_ranking_loss(x, TARGETS, torch.ones(6, CLASSES)),
        lambda x: F.poisson_nll_loss(x, TARGETS),
        lambda x: F.soft_margin_loss(x, TARGETS.round() * 2 - 1),
        lambda x: F.gaussian_nll_loss(x, TARGETS, torch.ones(6, CLASSES)),
    ],
    kl_of_two_classes: [
        lambda x: F.binary_cross_entropy_with_logits(x, TARGETS),
        lambda x: F.binary_cross_entropy(torch.sigmoid(x), TARGETS),
        lambda x: nn.BCEWithLogitsLoss(pos_weight=torch.full((CLASSES,), 2.0))(x, TARGETS),
        lambda x: F.multilabel_soft_margin_loss(x, TARGETS),
    ],
    kl_of_classes: [
        lambda x: F.nll_loss(x.log_softmax(-1), torch.arange(6) % CLASSES),
        lambda x: nn.NLLLoss(ignore_index=4)(x.log_softmax(-1), torch.arange(6) % 4),
        lambda x: F.kl_div(x.log_softmax(-1), TARGETS.softmax(-1), reduction="batchmean"),
        lambda x: F.ctc_loss(
            x.log_softmax(-1)[:, None], torch.ones(1, 1, dtype=torch.long), torch.tensor([6]), torch.tensor([1])
        ),
    ],
}


@pytest.mark.parametrize(
    ("call", "by_hand"), [(call, by_hand) for by_hand, calls in DIFFERENCES.items() for call in calls]
)
def test_predictions_differ_by_the_measure_of_their_loss(
    call: Callable[[Tensor], Tensor], by_hand: Callable[[Tensor, Tensor], Tensor]
) -> None:
    ours, theirs = (torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert measured(call, ours, theirs) == pytest.approx(float(by_hand(ours, theirs)), rel=1e-4)
    assert measured(call, ours, ours.clone()) == 0


def test_a_loss_of_classes_and_boxes_adds_both() -> None:
    labels = torch.arange(6) % CLASSES
    ours, theirs = torch.randn(6, CLASSES), torch.randn(6, CLASSES)
    parts: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.cross_entropy(x, labels),
        lambda x: F.smooth_l1_loss(x, TARGETS),
    ]
    total = measured(lambda x: parts[0](x) + parts[1](x), ours, theirs)
    assert total == pytest.approx(sum(measured(part, ours, theirs) for part in parts), rel=1e-5)


def test_kl_is_the_definitions_and_so_is_its_gradient() -> None:
    p, logits = log_probabilities(7, 40), torch.randn(7, 40, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kl(p, logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(gradient, logits.detach().softmax(-1) - p.exp().double(), rtol=1e-5, atol=1e-6)
    expected = (p.exp().double() * (p - logits.detach().log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl(p, logits.detach().log_softmax(-1)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("far", [math.inf, 300.0])
def test_classes_ruled_out_leave_gradients_finite(far: float) -> None:
    """Both of a mask that both models share, and of a class that one of them makes all but impossible."""
    ours, theirs = torch.randn(3, 6), torch.randn(3, 6, requires_grad=True)
    mask = torch.tensor([0.0, 0, 0, 0, -far, -far])
    masked = kl((ours + mask).log_softmax(-1), (theirs + mask).log_softmax(-1))
    four = kl(ours[:, :4].log_softmax(-1), theirs[:, :4].log_softmax(-1))
    torch.testing.assert_close(masked, four, rtol=1e-5, atol=1e-7)
    for other in (theirs, theirs + mask):
        (gradient,) = torch.autograd.grad(kl((ours + mask).log_softmax(-1), other.log_softmax(-1)).sum(), theirs)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("theirs", [[(4, 7)], [(4, 7), (3, 8)], [(4, 7), (2, 9)]])
def test_different_predictions_do_not_compare(theirs: list[tuple[int, int]]) -> None:
    ours = [log_probabilities(4, 7), log_probabilities(3, 9)]
    with pytest.raises(ConfigError, match=r"\(3, 9\).*do not compare"):
        summed_kl(ours, [log_probabilities(*shape) for shape in theirs])


def test_a_judge_means_over_targets_however_they_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.cat(parts) for parts in zip(*some_batches(4), strict=True))
    complete = HeldOut(net(), [(x, y)], nats)(net(1).state_dict())
    uneven = HeldOut(net(), [(x[:5], y[:5]), (x[5:], y[5:])], nats)(net(1).state_dict())
    assert uneven == pytest.approx(complete, rel=1e-6)
    monkeypatch.setattr("birdie.compress.calibration.held_out._CACHED", 0)
    forgetful = HeldOut(net(), [(x, y)], nats)
    assert [forgetful(net(1).state_dict()) for _ in range(2)] == [complete, complete]


def test_a_judge_refuses_what_tells_nothing() -> None:
    module, (x, y) = net(), some_batches(1)[0]
    with pytest.raises(DataError, match="no targets"):
        HeldOut(module, [(x, torch.full_like(y, -100))], nats)(module.state_dict())
    with pytest.raises(DataError, match="predicts NaN"):
        HeldOut(module, [(x * math.nan, y)], nats)(module.state_dict())
