"""The divergence is the KL of its definition, to relative precision however small, and its error bars are right."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.divergence import divergence, kl_divergence
from birdie.errors import DataError


def logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("size", [10.0, 1.0, 1e-2, 1e-3, 1e-4])
def test_kl_is_the_definitions_to_relative_precision_however_small(size: float) -> None:
    a = logits(4, 64, 1024)
    b = a + size * logits(4, 64, 1024, seed=1, scale=1.0)
    expected = by_definition(a, b).mean().item()
    assert kl_divergence(a, b).mean().item() == pytest.approx(expected, rel=1e-3 if size < 1e-3 else 1e-4)


def test_kl_is_never_negative_zero_for_equals_and_blind_to_shifts() -> None:
    a = logits(50, 17)
    assert (kl_divergence(a, a) == 0).all()
    assert (kl_divergence(a, logits(50, 17, seed=1)) > 0).all()
    assert kl_divergence(a, a + 5).max() < 1e-10


def test_impossible_classes_cost_nothing_unless_the_candidate_alone_rules_them_out() -> None:
    a, b = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([[0.5, 1.0, -math.inf]])
    assert kl_divergence(a, b).item() == pytest.approx(by_definition(a[:, :2], b[:, :2]).item(), rel=1e-5)
    assert kl_divergence(b, torch.tensor([[0.0, -math.inf, 0.0]])).item() == math.inf
    assert kl_divergence(torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])).item() == pytest.approx(200)


def test_batches_count_by_their_predictions() -> None:
    a, b = logits(7, 5, 11), logits(7, 5, 11, seed=1)
    full = divergence(lambda part: a[part], lambda part: b[part], [slice(0, 7)])
    parts = divergence(lambda part: a[part], lambda part: b[part], [slice(0, 1), slice(1, 1), slice(1, 5), slice(5, 7)])
    assert parts.count == full.count == 35
    assert parts.kl == pytest.approx(full.kl, rel=1e-12)
    assert parts.stderr == pytest.approx(full.stderr, rel=1e-12)
    assert full.kl == pytest.approx(by_definition(a, b).mean().item(), rel=1e-6)
    assert full.agreement == (a.argmax(-1) == b.argmax(-1)).double().mean().item()


def test_sequences_are_the_units_of_the_error() -> None:
    a, b = logits(40, 10), logits(40, 10, seed=1)
    flat = divergence(lambda _: a, lambda _: b, [0])
    nats = by_definition(a, b)
    assert flat.stderr == pytest.approx((nats.std() / math.sqrt(40)).item(), rel=1e-6)
    repeated = divergence(lambda _: a[:, None].expand(-1, 9, -1), lambda _: b[:, None].expand(-1, 9, -1), [0])
    assert repeated.stderr == pytest.approx(flat.stderr, rel=1e-9)  # nine copies of a token tell nothing new
    assert math.isnan(divergence(lambda _: a[:1], lambda _: b[:1], [0]).stderr)


def test_both_models_are_called_without_gradients_one_batch_at_a_time() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen: list[str] = []

    def batches() -> Iterator[Tensor]:
        for index in range(2):
            seen.append(f"batch {index}")
            yield torch.eye(3)

    def model(name: str) -> Tensor:
        seen.append(name)
        out = torch.eye(3) * weight
        assert not out.requires_grad
        return out

    divergence(lambda _: model("float"), lambda _: model("decoded"), batches())
    assert seen == ["batch 0", "float", "decoded", "batch 1", "float", "decoded"]


def test_logits_that_cannot_be_compared_are_refused() -> None:
    a = logits(4, 5)
    with pytest.raises(DataError, match="no predictions"):
        divergence(lambda _: a, lambda _: a, [])
    with pytest.raises(DataError, match=r"\(4, 5\) and \(4, 6\)"):
        divergence(lambda _: a, lambda _: logits(4, 6), [0])
    with pytest.raises(DataError, match="not finite"):
        divergence(lambda _: a, lambda _: a * math.nan, [0])
