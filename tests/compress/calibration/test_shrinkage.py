"""Few samples lean on the prior, many do not, and what is assumed and true is found at once."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from birdie.compress.calibration.shrinkage import ENOUGH, oracle_share, shrink, shrink_covariance
from birdie.compress.prior import prior
from birdie.compress.scheme import Sensitivity, TapCovariance
from birdie.compress.trellis.feedback import feedback

TAPS = TapCovariance(np.array([[1.0, 0.6], [0.6, 1.0]]), 0.3)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moments(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def dense(channels: int) -> Tensor:
    return torch.from_numpy(np.kron(np.eye(channels), TAPS.taps) + TAPS.shared).float()


def test_shrinkage_is_nearer_to_the_truth_than_either_end() -> None:
    mixture = torch.linalg.cholesky(dense(20) + torch.diag(torch.linspace(0, 2, 40)))
    truth = mixture @ mixture.T
    for samples in (5, 20, 80):
        measured = moments(seeded(samples, 40, seed=samples) @ mixture.T)
        target = dense(20) * (measured.trace() / dense(20).trace())
        nearest = (shrink_covariance(measured, samples, TAPS) - truth).norm()
        assert nearest < (measured - truth).norm()
        assert nearest < 1.05 * (target - truth).norm()


def test_the_share_falls_with_samples_until_nothing_is_shrunk() -> None:
    measured = moments(seeded(500, 10) * torch.arange(1.0, 11))
    shares = [oracle_share(measured, samples) for samples in (2, 20, 200)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    assert shares[2] < 0.1
    assert torch.equal(shrink_covariance(measured, ENOUGH * 10), measured)
    assert oracle_share(torch.eye(4), 100) == 1


def shrunk_all(known: Mapping[str, Sensitivity], weights: Mapping[str, Tensor]) -> dict[str, Sensitivity]:
    return dict(shrink(known, weights, known))


def known(rows: int, columns: int, count: float, seed: int = 0) -> Sensitivity:
    g = seeded(64, rows, seed=seed)
    output = moments(g)
    hessian = moments(seeded(64, columns, seed=seed + 1))
    return Sensitivity(hessian, output.diagonal().clone(), output, samples=count, gradients=count)


def test_rows_shrink_to_the_priors_in_the_units_of_the_calibration() -> None:
    weights = {"a.weight": seeded(6, 4, 3, 3), "b.weight": seeded(5, 4, 3, 3, seed=3)}
    few, many = (
        shrunk_all({"a.weight": known(6, 36, n), "b.weight": known(5, 36, n, 7)}, weights) for n in (1e-9, 1e9)
    )
    assumed = prior(weights)
    for name, weight in weights.items():
        rows = few[name].row_fisher
        expected = assumed[name].row_fisher
        assert rows is not None
        assert expected is not None
        torch.testing.assert_close(rows / rows.sum(), (expected / expected.sum()).float())
        output = few[name].output
        assert output is not None
        torch.testing.assert_close(output, torch.diag(rows), atol=1e-5, rtol=1e-5)
        original = known(6, 36, 1) if name == "a.weight" else known(5, 36, 1, 7)
        for part in ("hessian", "row_fisher", "output"):
            torch.testing.assert_close(getattr(many[name], part), getattr(original, part))
        first, last = (feedback(item[name], len(weight), 36).row_weight.mean() for item in (few, many))
        assert 0.1 < first / last < 10
