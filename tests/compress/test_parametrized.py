"""Parametrized weights: files of about the bytes of plain weights, and outputs that err no more."""

import copy
import warnings
from collections.abc import Callable
from io import BytesIO

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import birdie


class Mask(nn.Module):
    """Keeps some weights, by a buffer of the weight's shape."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(96 * 64).view(96, 64) % 3 > 0).float())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


def old(name: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(layer: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: nn.Module = getattr(nn.utils, name)(layer)
        return wrapped

    return wrap


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "exponential": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "householder": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"),
    "reflections": lambda layer: parametrizations.orthogonal(
        layer, orthogonal_map="householder", use_trivialization=False
    ),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old weight norm": old("weight_norm"),
    "old spectral norm": old("spectral_norm"),
    "mask": lambda layer: parametrize.register_parametrization(layer, "weight", Mask()),
}
LARGER = {"reflections": 8}  # exact: they have no base


def network(way: str, *, trained: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96))
    for layer in (net[0], net[2]) if way != "mask" else (net[0],):
        WAYS[way](layer)
    if trained:  # parameters of a parametrization begin at zero, or at one
        net(torch.randn(8, 64))
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if "original" in name and parameter.ndim > 1 and parameter.shape[1] > 1:
                    parameter.add_(0.02 * torch.randn(parameter.shape).tril(-1))  # the diagonal has no gradient
    return net.eval()


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_a_parametrized_weight_is_stored_as_well_as_a_plain_one(way: str, scheme: str | None) -> None:
    net, x = network(way, trained=True), torch.randn(200, 64)
    original = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96))
    plain.load_state_dict(
        {
            f"{index}.{part}": getattr(net.get_submodule(str(index)), part).detach()
            for index in (0, 2)
            for part in ("weight", "bias")
        }
    )
    errors, sizes = [], []
    for model, other in ((net, network(way, trained=False)), (plain, copy.deepcopy(plain))):
        file = BytesIO()
        sizes.append(birdie.save(model, file, scheme=scheme).bytes)
        birdie.load(file.getvalue(), into=other)
        errors.append(float((other.eval()(x) - model(x)).detach().square().mean()))
    assert errors[0] <= 1.5**2 * errors[1]
    assert sizes[0] <= LARGER.get(way, 1.25) * sizes[1] + 600
    assert all(torch.equal(tensor, original[name]) for name, tensor in net.state_dict().items()), (
        "the model is unchanged"
    )


@pytest.mark.parametrize("way", ["exponential", "householder"])
def test_a_lossless_file_keeps_every_tensor_of_a_parametrization(way: str) -> None:
    net, file = network(way, trained=True), BytesIO()
    birdie.save(net, file, lossless=True)
    back = birdie.load(file.getvalue())
    assert all(torch.equal(tensor, back[name]) for name, tensor in net.state_dict().items())
