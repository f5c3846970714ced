"""Laws of storing what was trained: the file is the model in memory under plain names, its size as predicted."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import birdie
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.small.spectral.wrap import quantization_loss, spectral, wrapped
from tests.forked import run_python
from tests.nightly import mostly_nightly
from tests.small.spectral.test_wrap import MODELS, built, mlp, trained

FRESH = """
import sys, torch, birdie
from tests.small.spectral.test_wrap import built
model, x = built(sys.argv[1])
birdie.load(sys.argv[2], into=model.train(False))
torch.save(model(x).detach(), sys.argv[3])
"""


@pytest.mark.parametrize(
    ("name", "transform"),
    mostly_nightly(
        itertools.product(MODELS, ("identity", "wavelet97")),
        [("conv1d", "identity"), ("tied", "wavelet97"), ("lstm", "identity")],
    ),
)
def test_the_file_is_the_model_in_memory(name: str, transform: str, tmp_path: Path) -> None:
    model, x = built(name)
    q_net = spectral(model.train(False), transform=transform, init_bits=5)
    q_net.settle()
    expected = model(x).detach()
    summary = birdie.save(model, tmp_path / "x.birdie")
    plain, _ = built(name)
    assert {row.name for row in summary.tensors} == set(plain.state_dict())
    logits = birdie.load(tmp_path / "x.birdie", into=plain.train(False))(x).detach()
    lazy = birdie.load(tmp_path / "x.birdie", into=built(name)[0].train(False), lazy=True)
    assert torch.equal(lazy(x), logits)
    if transform == "identity":
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_fresh_process_gives_the_same(tmp_path: Path) -> None:
    model, x = built("lstm")
    q_net = spectral(model.train(False), transform="identity", init_bits=5)
    q_net.settle()
    birdie.save(model, tmp_path / "x.birdie")
    done = run_python("-c", FRESH, "lstm", str(tmp_path / "x.birdie"), str(tmp_path / "out.pt"))
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), model(x).detach())


@pytest.mark.parametrize(("transform", "bits"), [("identity", 2.0), ("dct", 6.0)])
def test_the_loss_is_what_the_file_takes(transform: str, bits: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 128, bias=False), nn.Linear(128, 96, bias=False))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    spectral(model, transform=transform, init_bits=bits)
    summary = birdie.save(model, tmp_path / "x.birdie", effort="max")  # the estimate is of this coder
    held = sum(row.bytes for row in summary.tensors)
    assert 8 * held / summary.weights == pytest.approx(float(quantization_loss(model).detach()), rel=0.05)


def test_training_shrinks_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    q_net = spectral(model, transform="dct")
    unpruned = birdie.save(model, tmp_path / "unpruned").bytes
    trained(model, 80, 0.1, list(q_net.parameters()))
    assert birdie.save(model, tmp_path / "after").bytes < 0.6 * unpruned


def test_what_was_loaded_goes_on_training(tmp_path: Path) -> None:
    model = trained(spectral(mlp(), transform="dct").model, 20, 0.1, [])
    birdie.save(model, tmp_path / "x.birdie")
    again = mlp()
    q_net = spectral(again, transform="dct", init_bits=6)
    birdie.load(tmp_path / "x.birdie", into=again)
    size = float(quantization_loss(again).detach())
    trained(again, 20, 0.1, list(q_net.parameters()))
    assert float(quantization_loss(again).detach()) < size


@pytest.mark.parametrize("name", ["sequential", "tied"])
def test_compressed_weights_load_back(name: str, tmp_path: Path) -> None:
    model, x = built(name)
    q_net = spectral(model, transform="dct", init_bits=4)
    q_net.settle()
    compressed = birdie.compress_weights(model)
    torch.save(compressed, tmp_path / "x.pt")
    plain, _ = built(name)
    assert compressed.keys() == plain.state_dict().keys()
    birdie.load_weights(torch.load(tmp_path / "x.pt", weights_only=True), into=plain)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)


def test_compressed_weights_that_are_none_are_refused() -> None:
    compressed = birdie.compress_weights(mlp())
    name = next(iter(compressed))
    for bad in (torch.zeros(3), torch.zeros(9, dtype=torch.uint8), compressed[name][:-3]):
        with pytest.raises(ArtifactError, match=name):
            birdie.load_weights(compressed | {name: bad})
    with pytest.raises(WeightsError):
        birdie.load_weights({name: compressed[name]}, into=mlp())


def test_coefficients_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = mlp()
    spectral(model, transform="dct")
    with torch.no_grad():
        next(wrapped(model)).original[0, 0] = float("nan")
    with pytest.raises(WeightsError, match=r"0\.weight"):
        birdie.save(model, tmp_path / "x.birdie")
    assert not (tmp_path / "x.birdie").exists()


def test_a_spectral_model_takes_no_calibration(tmp_path: Path) -> None:
    model, x = built("sequential")
    spectral(model, transform="dct")
    with pytest.raises(ConfigError, match="as it was trained"):
        birdie.save(
            model, tmp_path / "x", bits=3, calibration=(model, [x], lambda net, batch: net(batch).sum()), effort="fast"
        )
