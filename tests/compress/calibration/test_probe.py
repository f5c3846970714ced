"""Laws of calibration without gradients: Hessians as ever, prices that explain what was measured, models left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.probe import SIGMA, probe
from birdie.compress.calibration.sensitivity import measure
from birdie.compress.calibration.shrinkage import shrink_rows
from birdie.compress.registry import decode
from birdie.compress.schemes.grid import Grid

Batch = tuple[Tensor, Tensor]


class Convolved(nn.Module):
    """Embedded tokens, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 20)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(self.embed(ids).transpose(1, 2)))
        logits: Tensor = 3 * self.head(hidden.transpose(1, 2))
        return logits


def batches(count: int = 6, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(ids, ids.roll(-1, 1)) for ids in torch.randint(0, 20, (count, 8, 32), generator=generator)]


def loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def without_gradients(module: nn.Module, batch: Batch) -> Tensor:
    assert not any(weight.requires_grad for weight in module.parameters())
    return loss(module, batch)


def test_hessians_are_those_of_a_full_calibration_and_rows_are_counted() -> None:
    module, data = Convolved().eval(), batches()
    full = measure(module, data, loss)
    calibrated = measure(module, data, without_gradients, gradients=False)
    assert list(calibrated) == list(full)
    for name in ("conv.weight", "head.weight"):
        ours, theirs = calibrated[name].hessian, full[name].hessian
        assert ours is not None
        torch.testing.assert_close(ours, theirs)
        assert calibrated[name].row_fisher is None
    rows = calibrated["embed.weight"].row_fisher
    assert rows is not None
    used = torch.bincount(torch.cat([ids for ids, _ in data]).flatten(), minlength=20).float()
    counts = shrink_rows(used[:, None], used)[:, 0]
    torch.testing.assert_close(rows / rows.sum(), counts / counts.sum())


def test_what_a_matrix_is_worth_explains_the_kl_of_rounding_it() -> None:
    module, data = Convolved().eval(), batches()
    originals = {name: weight.clone() for name, weight in module.state_dict().items()}
    judge = HeldOut(module, data[-2:], loss)
    probed = probe(judge, data[:-2], without_gradients)
    for name, weight in originals.items():
        assert torch.equal(module.state_dict()[name], weight)
        if weight.ndim < 2:
            continue
        rounded = decode(Grid(sigma=SIGMA).encode(name, weight))
        errors, rows, hessian = (rounded - weight).flatten(1), probed[name].row_fisher, probed[name].hessian
        assert rows is not None
        assert hessian is not None
        nats = 0.5 * float(torch.einsum("i,ij,jk,ik->", rows, errors, hessian, errors))
        assert nats == pytest.approx(judge(originals | {name: rounded}), rel=1e-3)
