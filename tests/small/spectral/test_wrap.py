"""Laws of wrapping: the function stays, the model owns its network, and what is trained gets smaller."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.spectral.transforms import Transform
from birdie.errors import ConfigError, WeightsError
from birdie.small.spectral.wrap import quantization_loss, remove, spectral, wrapped
from tests.nightly import mostly_nightly


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


class Bare(nn.Module):
    """A parameter of no layer, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 20))
        self.more = nn.ParameterList([nn.Parameter(torch.randn(20, 16)), nn.Parameter(torch.randn(3))])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ self.matrix @ self.more[0]
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 10))


MODELS = {
    "sequential": (mlp, lambda: torch.randn(4, 20)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 16, 5), nn.BatchNorm1d(16)), lambda: torch.randn(2, 8, 20)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        lambda: torch.randn(2, 8, 9, 9),
    ),
    "conv3d": (lambda: nn.Conv3d(4, 8, 3), lambda: torch.randn(1, 4, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 12, 4, 2), lambda: torch.randn(1, 8, 5, 5)),
    "tied": (Tied, lambda: torch.arange(12)),
    "bare": (Bare, lambda: torch.randn(3, 32)),
    "lstm": (Recurrent, lambda: torch.randn(2, 6, 8)),
    "attention": (Attention, lambda: torch.randn(2, 6, 32)),
}

SHAPES = ("sequential", "conv2d", "tied", "lstm")
"""Models that daily tests take: matrices, kernels, a shared weight, weights that are attributes of one module."""


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    return build(), inputs()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, generator=generator)
    return x, (x @ torch.randn(20, 10, generator=generator)).argmax(1)


def trained(model: nn.Module, steps: int, weight: float, extra: list[nn.Parameter]) -> nn.Module:
    x, y = data()
    optimizer = torch.optim.Adam(list(model.parameters()) + extra, lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + weight * quantization_loss(model)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("name", "transform"),
    mostly_nightly(
        itertools.product(MODELS, ("dct", "hadamard")), [*((name, "dct") for name in SHAPES), ("bare", "hadamard")]
    ),
)
def test_the_function_stays_to_fine_rounding_and_every_coefficient_gets_a_gradient(name: str, transform: str) -> None:
    model, x = built(name)
    model.train(False)
    plain = model(x).detach()
    spectral(model, transform=transform, init_bits=16)
    after = model(x)
    assert float((after - plain).detach().norm() / plain.norm()) < 1e-3
    (after.square().sum() + quantization_loss(model)).backward()
    for layer in wrapped(model):
        assert layer.original.grad is not None
        assert bool(layer.original.grad.any())


@pytest.mark.parametrize("name", mostly_nightly(MODELS, SHAPES))
def test_removing_leaves_plain_parameters_quantized_or_as_training_moved_them(name: str) -> None:
    model, x = built(name)
    original, names = model.train(False)(x).detach(), sorted(key for key, _ in model.named_parameters())
    spectral(model, transform="dct", init_bits=3)
    quantized, twin = model(x).detach(), copy.deepcopy(model)
    assert not torch.allclose(quantized, original, atol=1e-4)
    assert sorted(key for key, _ in remove(model).named_parameters()) == names
    assert torch.equal(model(x), quantized)
    torch.testing.assert_close(remove(twin, rounded=False)(x), original, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", mostly_nightly(MODELS, SHAPES))
def test_copies_and_state_dicts_carry_everything(name: str) -> None:
    model, x = built(name)
    model.train(False)
    spectral(model, transform="dct", init_bits=5)
    model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    changed = model(x).detach()
    assert not torch.equal(twin(x), changed)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), changed)
    remove(twin)
    assert torch.equal(model(x), changed)


@pytest.mark.parametrize(
    ("name", "bits"), mostly_nightly(itertools.product(MODELS, (3.0, 10.0)), [("conv2d", 3.0), ("lstm", 10.0)])
)
def test_the_rate_starts_where_it_is_told_to(name: str, bits: float) -> None:
    model, _ = built(name)
    spectral(model, init_bits=bits, transform="dct")
    assert float(quantization_loss(model).detach()) == pytest.approx(bits, abs=0.1)


def test_the_loss_of_two_wrapped_halves_is_their_mean() -> None:
    torch.manual_seed(0)
    halves = [mlp(), mlp()]
    for half, bits in zip(halves, (4.0, 8.0), strict=True):
        spectral(half, transform="dct", init_bits=bits)
    apart = sum(float(quantization_loss(half).detach()) for half in halves) / 2
    assert float(quantization_loss(nn.Sequential(*halves)).detach()) == pytest.approx(apart, rel=1e-5)


def test_the_readmes_optimizer_line_runs_without_a_warning() -> None:
    model = mlp()
    q_net = spectral(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.Adam(list(model.parameters()) + list(q_net.parameters()))
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert {id(weight) for weight in q_net.network.parameters()} <= held


def test_training_makes_it_small_and_the_network_takes_part() -> None:
    torch.manual_seed(0)
    model = mlp()
    q_net = spectral(model, transform="dct")
    originals = [weight.clone() for weight in q_net.network.parameters()]
    trained(model, 60, 0.1, list(q_net.parameters()))
    assert float(quantization_loss(model).detach()) < 6
    assert all(not torch.equal(one, two) for one, two in zip(originals, q_net.network.parameters(), strict=True))


def test_tied_weights_stay_one_parametrization() -> None:
    model, x = built("tied")
    count = len(list(model.parameters()))
    q_net = spectral(model, transform="dct")
    assert len(list(model.parameters())) == count + len(list(q_net.network.parameters()))
    first, second = wrapped(model)
    assert first.weight is second.weight
    assert first.original is second.original
    twin = copy.deepcopy(model)
    first, second = wrapped(twin)
    assert first.original is second.original
    model(x).sum().backward()
    assert isinstance(model, Tied)
    remove(model)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("rounding", ["straight", "noise", "leaky"])
def test_evaluation_is_the_same_whatever_training_sees(rounding: str) -> None:
    model, x = built("sequential")
    spectral(model, transform="identity", rounding=rounding, init_bits=3)  # type: ignore[arg-type]
    seen = model(x).detach()
    model.train(False)
    assert torch.equal(model(x), model(x))
    assert torch.equal(seen, model(x)) == (rounding == "straight")
    for layer in wrapped(model):
        scale = layer.weight.spread(layer.weight.steps()[0])
        assert torch.equal(getattr(layer.module, layer.attribute), layer.weight.symbols(layer.original) * scale)


def test_zeros_and_constants_are_wrapped_like_anything() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator]
        model[1].weight.fill_(0.5)  # type: ignore[operator]
    spectral(model, transform="dct")
    out = model(torch.randn(4, 32))
    assert bool(torch.isfinite(out).all())
    (out.sum() + quantization_loss(model)).backward()
    assert all(bool(torch.isfinite(w.grad).all()) for w in model.parameters() if w.grad is not None)


def test_automatically_smooth_kernels_take_a_transform_and_noise_takes_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 5), nn.Conv2d(16, 16, 5), nn.Linear(32, 32))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
        model[0].weight.copy_(torch.randn(16, 8, 1, 1).expand(16, 8, 5, 5) + 0.1 * torch.randn(16, 8, 5, 5))  # type: ignore[operator]
    spectral(model)
    kinds = [(layer.weight.transform.kind, layer.weight.transform.axes) for layer in wrapped(model)]
    assert kinds == [("dct", "kernel"), ("identity", "all"), ("identity", "all")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_is_wrapped(bad: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = bad  # type: ignore[index]
    with pytest.raises(WeightsError, match=r"2\.weight"):
        spectral(model)
    assert not list(wrapped(model))


def test_tensors_by_pattern_and_a_transform_for_each() -> None:
    model = mlp()
    spectral(model, tensors="0.*", transform=lambda name, weight: Transform("dct", edge=4 if "0" in name else 8))  # noqa: ARG005
    (layer,) = wrapped(model)
    assert (layer.name, layer.weight.transform.edge) == ("0.weight", 4)


@pytest.mark.parametrize(
    "arguments",
    [{"init_bits": 0}, {"init_bits": 99}, {"transform": "nonsense"}, {"rounding": "up"}, {"tensors": ("nothing",)}],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        spectral(mlp(), **arguments)  # type: ignore[arg-type]


def test_wrapping_twice_and_a_loss_of_nothing_are_refused() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match=r"spectral\(model\)"):
        quantization_loss(model)
    spectral(model, transform="dct")
    with pytest.raises(ConfigError, match="already"):
        spectral(model, transform="dct")
