"""Calibration reaches a weight however it is used: a small change of it costs about the KL that is predicted."""

import copy
import io
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration.sensitivity import measure
from birdie.compress.row_blocks import used_as_matrix, with_rows
from birdie.compress.scheme import Sensitivity

INPUTS, OUTPUTS, EXPERTS, CLASSES = 10, 16, 3, 4
Batch = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


def mode(x: Tensor, w: Tensor) -> Tensor:
    """Return a product of complex numbers, whose real parts are the weights."""
    return torch.matmul(x.to(torch.complex64), w.to(torch.complex64)).real


PRODUCTS: dict[str, tuple[tuple[int, ...], Product]] = {
    "@": ((INPUTS, OUTPUTS), lambda x, w: x @ w),
    "@ of a transpose": ((OUTPUTS, INPUTS), lambda x, w: x @ w.t()),
    "@ from the left": ((OUTPUTS, INPUTS), lambda x, w: (w @ x.t()).t()),
    "F.linear of a slice": ((2 * OUTPUTS, INPUTS), lambda x, w: F.linear(x, w[:OUTPUTS]) + F.linear(x, w[OUTPUTS:])),
    "F.linear with a gain": ((OUTPUTS, INPUTS), lambda x, w: F.linear(x, w * torch.linspace(0.5, 2, INPUTS))),
    "F.linear of a cast product": ((OUTPUTS, INPUTS), lambda x, w: F.linear(x, (w.double() * 2).float() / 2)),
    "einsum": ((INPUTS, OUTPUTS), lambda x, w: torch.einsum("bi,io->bo", x, w)),
    "einsum of heads": ((EXPERTS, INPUTS, OUTPUTS), lambda x, w: torch.einsum("bi,hio->bho", x, w).sum(1)),
    "einsum into heads": ((INPUTS, 2, OUTPUTS // 2), lambda x, w: torch.einsum("bi,iho->bho", x, w).flatten(1)),
    "bmm": ((EXPERTS, INPUTS, OUTPUTS), lambda x, w: torch.bmm(x.expand(EXPERTS, *x.shape), w).sum(0)),
    "linear of each expert": (
        (EXPERTS, OUTPUTS, INPUTS),
        lambda x, w: sum((F.linear(x, e) for e in w), 0.0 * x[:, :1]),
    ),
    "tensordot": ((INPUTS, OUTPUTS), lambda x, w: torch.tensordot(x, w, dims=1)),
    "baddbmm": ((1, INPUTS, OUTPUTS), lambda x, w: torch.baddbmm(torch.zeros(1, 1, OUTPUTS), x[None], w)[0]),
    "bilinear": ((OUTPUTS, INPUTS, 2), lambda x, w: F.bilinear(x, x[:, :2], w)),
    "transposed convolution": ((INPUTS, OUTPUTS, 1), lambda x, w: F.conv_transpose1d(x[..., None], w)[..., 0]),
    "both ways": ((INPUTS, INPUTS), lambda x, w: F.pad(F.linear(torch.tanh(x @ w), w), (0, OUTPUTS - INPUTS))),
    "a square, turned": ((INPUTS, INPUTS), lambda x, w: F.pad(F.linear(x, w.t()), (0, OUTPUTS - INPUTS))),
    "table added by a slice": (
        (INPUTS, OUTPUTS),
        lambda x, w: x @ torch.eye(INPUTS, OUTPUTS) + w[:1] + x[:, :1] * w[2],
    ),
    "product of elements": ((INPUTS, OUTPUTS), lambda x, w: (x[:, :, None] * w).sum(1)),
    "complex": ((INPUTS, OUTPUTS), mode),
}


class Network(nn.Module):
    def __init__(self, shape: tuple[int, ...], product: Product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.head, self.product = nn.Parameter(torch.randn(shape) / 3), nn.Linear(OUTPUTS, CLASSES), product

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.product(x, self.w)))
        return out


def inputs(seed: int, count: int = 500) -> Tensor:
    """Return inputs of which some combinations hardly vary."""
    generator = torch.Generator().manual_seed(seed)
    mixture = torch.randn(INPUTS, INPUTS, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, -1.5, INPUTS)
    return torch.randn(count, INPUTS, generator=generator) @ mixture.t()


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def batches(count: int = 4) -> list[Batch]:
    return [(inputs(seed), torch.zeros(500, dtype=torch.long)) for seed in range(count)]


def predicted(known: Sensitivity, change: Tensor) -> float:
    assert known.hessian is not None
    assert known.output is not None
    error = with_rows(change, known).flatten(1)
    return 0.5 * float(torch.trace(known.output @ error @ known.hessian @ error.T))


def kl_of(module: nn.Module, name: str, change: Tensor) -> float:
    """Return the KL of a change of one weight, in nats per target."""
    changed, x = copy.deepcopy(module), inputs(77, 4000)
    with torch.no_grad():
        changed.get_parameter(name).add_(change)
        reference, outputs = (torch.log_softmax(one(x).double(), -1) for one in (module, changed))
    return float((reference.exp() * (reference - outputs)).sum(-1).mean())


def ratio_of(module: nn.Module, name: str, known: Sensitivity) -> float:
    """Return the KL of small changes of a weight, as a share of what is predicted."""
    weight, measured, expected = module.get_parameter(name), 0.0, 0.0
    for seed in range(8):
        change = 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        measured += kl_of(module, name, change)
        expected += predicted(known, change)
    return measured / expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_small_changes_cost_about_the_kl_that_is_predicted(name: str) -> None:
    module = Network(*PRODUCTS[name])
    known = measure(module, batches(), classify)
    assert sorted(known) == ["head.weight", "w"]
    assert 0.5 < ratio_of(module, "w", known["w"]) < 1.6
    assert 0.5 < ratio_of(module, "head.weight", known["head.weight"]) < 2


class Tied(nn.Module):
    """A table that is looked up, and multiplied as the head."""

    def __init__(self, head: Product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, OUTPUTS), head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(3 * self.table(ids)), self.table.weight)


def test_a_weight_that_one_product_explains_in_part_is_taken_as_a_whole() -> None:
    """The gradient has both uses, so what the look-up alone would tell is not added."""
    ids = [torch.randint(0, 12, (400,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(module(batch), batch, reduction="sum")

    module = Tied(lambda x, w: torch.einsum("bi,oi->bo", x, w))
    known = measure(module, ids, loss)["table.weight"]
    measured = expected = 0.0
    for seed in range(8):
        change, changed = (
            0.02 * torch.randn(12, OUTPUTS, generator=torch.Generator().manual_seed(seed)),
            Tied(module.head),
        )
        with torch.no_grad():
            changed.table.weight.add_(change)
            reference, outputs = (torch.log_softmax(one(torch.arange(12)).double(), -1) for one in (module, changed))
        measured += float((reference.exp() * (reference - outputs)).sum(-1).mean())
        expected += predicted(known, change)
    assert 0.5 < measured / expected < 2
    assert not measure(Tied(F.linear), ids, loss)["table.weight"].rows_have_inputs, "two products explain it"


class Scarcely(nn.Module):
    """Calls one of two layers, and has a table that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(INPUTS, CLASSES), nn.Linear(INPUTS, 3 * CLASSES)
        self.register_buffer("table", torch.ones(INPUTS, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_what_no_data_reached_is_in_the_log_and_in_the_summary(caplog: pytest.LogCaptureFixture) -> None:
    module = Scarcely()
    with caplog.at_level(logging.INFO, "birdie"):
        summary = birdie.save(module, io.BytesIO(), calibration=(module, batches(), classify))
    assert summary.uncalibrated == ("unused.weight",)
    assert "1 of 2 matrices, 75 % of the weights" in caplog.text
    assert "unused.weight" in caplog.text
    full = nn.Linear(INPUTS, CLASSES)
    assert birdie.save(full, io.BytesIO(), calibration=(full, batches(), classify)).uncalibrated == ()


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.BatchNorm1d(OUTPUTS), nn.ReLU(), nn.Linear(OUTPUTS, CLASSES))


def test_a_tensor_of_inference_mode_that_cannot_be_copied_is_one_sentence() -> None:
    class Holder:
        def __init__(self) -> None:
            self.x = inputs(0)

    def loss(module: nn.Module, batch: Holder) -> Tensor:
        return F.cross_entropy(module(batch.x), torch.zeros(500, dtype=torch.long))

    with torch.inference_mode():
        held = [Holder(), Holder()]
    with pytest.raises(birdie.ConfigError, match=r"inference_mode.*clone\(\)"):
        birdie.calibrate(normalized(), held, loss)


def test_stacks_are_matrices_of_all_their_rows_where_calibration_says_so() -> None:
    for shape, expected in (
        ((3, 48, 96), (144, 96)),
        ((1, 48, 96), (48, 96)),
        ((96, 48, 2), (96, 48, 2)),
        ((48, 12, 64), (48, 12, 64)),
        ((12, 64, 48), (768, 48)),
        ((64, 48), (64, 48)),
        ((64, 32, 3, 3), (64, 32, 3, 3)),
        ((64, 1, 25), (64, 1, 25)),
    ):
        weight = torch.zeros(shape)
        matrix = used_as_matrix(weight)
        assert matrix.shape == expected
        assert with_rows(weight, Sensitivity(row_fisher=torch.ones(len(matrix)))).shape == expected
        assert with_rows(weight, None) is weight
