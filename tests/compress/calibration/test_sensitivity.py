"""Sensitivities by hand, and how they shrink to the prior with few samples."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from birdie.compress.calibration import sensitivity as sensitivity_module
from birdie.compress.calibration.sensitivity import measure
from birdie.compress.calibration.shrinkage import ENOUGH, oracle_share, shrink, shrink_covariance, shrink_rows
from birdie.compress.prior import prior
from birdie.compress.scheme import BlockDiagonal, Sensitivity, TapCovariance
from birdie.compress.trellis.feedback import feedback

Batch = tuple[Tensor, Tensor]


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def project(module: nn.Module, batch: Batch) -> Tensor:
    """Return a loss whose gradient at the outputs is the batch's second part, so that sums can be computed by hand."""
    outputs: Tensor = module(batch[0])
    return (outputs * batch[1]).sum()


def close(measured: Tensor | None, expected: Tensor) -> None:
    assert measured is not None
    torch.testing.assert_close(measured, expected.to(measured.dtype), rtol=1e-4, atol=1e-5)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, w: torch.addmm(torch.ones(w.shape[1]), x, w),  # as GPT-2 does
        lambda x, w: x @ w,
        lambda x, w: torch.matmul(x.view(2, 3, -1), w).flatten(0, 1),
        lambda x, w: F.linear(x, w.t()),
    ],
)
def test_a_weight_of_inputs_by_outputs_has_the_sensitivity_of_its_transpose(
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Also if the weight is square."""

    class Added(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(layer.weight.detach().T.contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return multiply(x, self.weight)

    for outputs in (7, 5):
        layer = nn.Linear(5, outputs)
        batches = [(seeded(6, 5, seed=seed), seeded(6, outputs, seed=10 + seed)) for seed in range(3)]
        one, other = measure(layer, batches, project)["weight"], measure(Added(layer), batches, project)["weight"]
        change = seeded(outputs, 5, seed=20)
        costs = []
        for item, error in ((one, change), (other, change.T)):
            assert item.output is not None
            assert item.hessian is not None
            costs.append(torch.trace(item.output @ error @ item.hessian @ error.T))
        torch.testing.assert_close(costs[0], costs[1])
        assert one.hessian is not None
        close(other.row_fisher, one.hessian.diagonal() * 18 / 3)  # of uses, of batches


def test_two_layers_by_hand() -> None:
    module = mlp()
    batches = [(seeded(6, 5, seed=seed), seeded(6, 4, seed=10 + seed)) for seed in range(3)]
    measured = measure(module, batches, project)
    assert list(measured) == ["0.weight", "2.weight"]
    x = torch.cat([batch[0] for batch in batches])
    g = torch.cat([batch[1] for batch in batches])
    weights = module.state_dict()
    hidden = torch.tanh(F.linear(x, weights["0.weight"], weights["0.bias"]))
    back = (g @ weights["2.weight"]) * (1 - hidden**2)
    for name, inputs, outputs in (("0.weight", x, back), ("2.weight", hidden, g)):
        close(measured[name].hessian, inputs.T @ inputs / len(x))
        close(measured[name].output, outputs.T @ outputs / 3)  # a unit is a batch where no cross-entropy counts targets
        close(measured[name].row_fisher, (outputs**2).sum(0) / 3)


def test_an_activation_in_place_hides_no_layer() -> None:
    module, x, g = mlp(), seeded(6, 5), seeded(6, 4, seed=1)
    in_place = nn.Sequential(module[0], nn.ReLU(inplace=True), module[2])
    apart = nn.Sequential(module[0], nn.ReLU(), module[2])
    measured, expected = (measure(network, [(x, g)], project) for network in (in_place, apart))
    assert list(measured) == list(expected) == ["0.weight", "2.weight"]
    for name in expected:
        close(measured[name].hessian, expected[name].hessian)  # type: ignore[arg-type]
        close(measured[name].output, expected[name].output)  # type: ignore[arg-type]


def curvature(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, -1)
    return torch.diag(p) - torch.outer(p, p)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_gradients_at_logits_have_the_curvature_of_the_kl(reduction: str) -> None:
    """Diag(p) − p pᵀ, statistically, in nats per target, whatever the labels and the reduction."""
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0])
    module = nn.Linear(1, 4, bias=False)
    module.weight.data = logits[:, None]
    count = 20_000
    batch = torch.ones(count, 1), torch.zeros(count, dtype=torch.long)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        losses = F.cross_entropy(module(batch[0]), batch[1], reduction=reduction)
        return losses.sum() * (count if reduction == "mean" else 1)

    measured = measure(module, [batch], loss)["weight"]
    assert measured.output is not None
    torch.testing.assert_close(measured.output, curvature(logits), rtol=0, atol=0.01)
    assert measured.hessian is not None
    assert measured.hessian.item() == pytest.approx(1)
    other = measure(module, [(batch[0], batch[1] + 3)], loss)["weight"]
    assert torch.equal(other.output, measured.output), "labels are not used"  # type: ignore[arg-type]


def test_targets_that_are_ignored_count_for_nothing() -> None:
    module, x = mlp(), seeded(8, 5)
    labels = torch.tensor([0, 1, -100, 2, -100, 3, 1, -100])
    kept = labels != -100
    often = [(x[kept].repeat(2000, 1), labels[kept].repeat(2000)), (x.repeat(2000, 1), labels.repeat(2000))]
    alone, many = (measure(module, [batch], classify)["2.weight"].output for batch in often)
    torch.testing.assert_close(alone, many, rtol=0, atol=0.02)


CONVOLUTIONS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(3, 4, 3, bias=False), (2, 3, 7, 6)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=False), (2, 4, 7, 6)),
    (nn.Conv2d(3, 4, 3, padding="same", dilation=2, bias=False), (2, 3, 7, 6)),
    (nn.Conv2d(3, 4, (2, 4), padding="same", bias=False), (1, 3, 6, 7)),
    (nn.Conv2d(4, 4, 3, padding="valid", groups=4, bias=False), (2, 4, 5, 5)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, groups=2, bias=False), (3, 4, 9)),
    (nn.Conv1d(3, 5, 4, padding="same", bias=False), (2, 3, 8)),
    (nn.Conv2d(3, 4, 3, bias=False), (3, 7, 6)),
    (nn.Conv1d(3, 4, 3, bias=False), (3, 9)),
    (nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), groups=2, bias=False), (2, 2, 3, 7, 4)),
]


@pytest.mark.parametrize("case", range(len(CONVOLUTIONS)))
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_convolution_is_a_matrix_of_its_patches(case: int) -> None:
    """Patches by hand: the output's Jacobian in the weights of one kernel is what it multiplied."""
    module, shape = CONVOLUTIONS[case]
    x = seeded(*shape)
    out = module(x)
    g = seeded(*out.shape, seed=1)
    measured = measure(module, [(x, g)], project)["weight"]
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, groups = len(weight), int(module.groups)  # type: ignore[arg-type]
    channels = out.ndim - weight.ndim + 1
    sums, count = torch.zeros(weight[0].numel(), weight[0].numel()), 0
    for first in range(0, rows, rows // groups):  # any output of the group sees the group's patches
        seen = out.movedim(channels, 0)[first].reshape(-1)
        for value in seen:
            patch = torch.autograd.grad(value, weight, retain_graph=True)[0][first].reshape(-1)
            sums += torch.outer(patch, patch)
            count += 1
    close(measured.hessian, sums / count)
    gradients = g.movedim(channels, 0).reshape(rows, -1)
    close(measured.output, gradients @ gradients.T)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, bias=False), (3, 4, 5)),
        (nn.ConvTranspose2d(4, 6, (3, 2), stride=(1, 2), dilation=2, bias=False), (2, 4, 3, 4)),
        (nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, bias=False), (3, 3, 3)),
        (nn.ConvTranspose3d(2, 3, 2, stride=2, bias=False), (1, 2, 2, 3, 2)),
    ],
)
def test_a_transposed_convolution_is_a_product_at_each_of_its_inputs(module: nn.Module, shape: tuple[int, ...]) -> None:
    """By hand: the weights' gradient of an input that is one at a single position is what that position multiplies."""
    x, weight = seeded(*shape), module.weight
    g = seeded(*module(x).shape, seed=1)
    measured = measure(module, [(x, g)], project)["weight"]
    assert isinstance(weight, Tensor)
    inputs = x.movedim(x.ndim - weight.ndim + 1, 0)
    sums, count = torch.zeros(weight[0].numel(), weight[0].numel()), 0
    for position in np.ndindex(*inputs.shape[1:]):
        single = torch.zeros_like(x)
        single.movedim(x.ndim - weight.ndim + 1, 0)[0][position] = 1
        seen = torch.autograd.grad((module(single) * g).sum(), weight)[0][0].reshape(-1)
        sums += torch.outer(seen, seen)
        count += 1
    close(measured.hessian, sums / count)
    inputs = inputs.reshape(len(weight), -1)
    close(measured.output, inputs @ inputs.T)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Conv1d(8, 3, 5), (4, 8, 20)), (nn.Conv2d(8, 6, (2, 3), groups=2), (4, 8, 5, 7)), (nn.Linear(24, 3), (50, 24))],
)
def test_many_columns_keep_the_blocks_of_the_dense_hessian(
    module: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = seeded(*shape), seeded(*module(seeded(*shape)).shape, seed=1)
    dense = measure(module, [batch], project)["weight"]
    assert dense.hessian is not None
    columns = len(dense.hessian)
    monkeypatch.setattr(sensitivity_module, "MAX_COLUMNS", columns // 2)
    measured = measure(module, [batch], project)["weight"]
    assert measured.hessian is None
    assert measured.blocks is not None
    assert measured.blocks.columns.tolist() == torch.arange(columns).view(2, -1).tolist()
    for index, block in zip(measured.blocks.columns, measured.blocks.blocks, strict=True):
        close(block, dense.hessian[index][:, index])
    close(measured.input_power(), dense.hessian.diagonal())
    close(measured.row_fisher, dense.row_fisher)  # type: ignore[arg-type]
    rows = seeded(3, columns)
    masked = torch.block_diag(*measured.blocks.blocks)
    close(measured.blocks.product(rows), rows @ masked)


def test_embeddings_know_how_often_and_how_much() -> None:
    module = nn.Embedding(6, 3)
    ids = torch.tensor([[0, 2, 2], [5, 2, 0]])
    g = seeded(2, 3, 3, seed=1)
    measured = measure(module, [(ids, g)], project)["weight"]
    squares = torch.zeros(6, 3).index_add_(0, ids.reshape(-1), g.reshape(-1, 3) ** 2)
    squares = shrink_rows(squares, torch.tensor([2.0, 0, 3, 0, 0, 1]))
    assert measured.hessian is not None
    assert measured.row_fisher is not None
    close(measured.hessian.diagonal().sum() * measured.row_fisher, squares.sum(1))
    close(measured.hessian.diagonal() * measured.row_fisher.sum(), squares.sum(0))
    torch.testing.assert_close(measured.row_fisher[[1, 3, 4]], torch.full((3,), measured.row_fisher[1].item()))
    assert (measured.samples, measured.gradients) == (6, 6)


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


def test_a_tied_embedding_has_both_uses_in_one() -> None:
    module, ids, g = Tied(), torch.tensor([0, 2, 2, 5]), seeded(4, 6, seed=1)
    measured = measure(module, [(ids, g)], project)
    assert list(measured) == ["embedding.weight"]
    weight = module.embedding.weight.detach()
    x, back = weight[ids], g @ weight
    looked_up = shrink_rows(torch.zeros(6, 3).index_add_(0, ids, back**2), torch.tensor([1.0, 0, 2, 0, 0, 1]) + 4)
    used, fisher = x.T @ x / 4, (g**2).sum(0)
    one = measured["embedding.weight"]
    assert one.output is None
    # Diagonals of the Fisher information, over rows and over columns, are the sums of both uses'.
    total = fisher.sum() * used.trace() + looked_up.sum()
    close(one.hessian, fisher.sum() * used + torch.diag(looked_up.sum(0)))
    close(one.row_fisher, (fisher * used.trace() + looked_up.sum(1)) / total)


class Bank(nn.Module):
    """Two matrices in one parameter, one of them used by a functional call after a cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.bank = nn.Parameter(torch.randn(2, 4, 4))

    def named_matrices(self) -> list[tuple[str, Tensor]]:
        return [(f"matrix.{index}", self.bank[index]) for index in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.bank[0])), self.bank[1].to(torch.bfloat16).float())


TAPS = TapCovariance(np.array([[1.0, 0.6], [0.6, 1.0]]), 0.3)


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


def test_blocks_shrink_as_the_matrices_they_are() -> None:
    hessian = moments(seeded(3, 18))
    blocks = BlockDiagonal(torch.arange(36).view(2, 18), torch.stack([hessian, 2 * hessian]))
    result = shrunk_all({"w": Sensitivity(blocks=blocks, samples=3)}, {"w": seeded(6, 4, 3, 3)})["w"].blocks
    assert result is not None
    torch.testing.assert_close(result.blocks[1], 2 * result.blocks[0])
    assert float(torch.linalg.eigvalsh(result.blocks[0].double())[0]) > 1e-3
    assert float(torch.linalg.eigvalsh(hessian.double())[0]) < 1e-6


class _LargestTensor(TorchDispatchMode):
    """Records the most elements that a tensor of any operation has memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def test_memory_is_bounded_by_slices_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfolded, the inputs of this convolution have 1,296,000 elements, and its Hessian 186,624."""
    monkeypatch.setattr(sensitivity_module, "_SLICE", 20_000)
    monkeypatch.setattr(sensitivity_module, "MAX_COLUMNS", 144)
    module = nn.Conv1d(48, 4, 9, padding=4)
    x = seeded(3, 48, 1000)
    with _LargestTensor() as largest:
        measure(module, [(x, seeded(3, 4, 1000, seed=1))], project)
    assert largest.elements <= 1.02 * x.numel()  # padded
    x = seeded(300, 48, 10)
    with _LargestTensor() as largest:
        measure(module, [(x, seeded(300, 4, 10, seed=1))], project)
    assert largest.elements <= 2 * x.numel()  # padded
