"""The CIFAR ResNets: parameter-free shortcuts, strict loading, normalized pixels, and the accuracy of real weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import quality
from benchmarks.resnet import CLASSES, Block, ResNet, load_resnet, normalized
from benchmarks.rivals import NotInstalledError
from birdie.errors import WeightsError
from tests.benchmarks.small_gpt import generator


def test_shortcuts_have_no_weights_and_halve_the_image() -> None:
    model = ResNet(1)
    block = model.get_submodule("layer2.0")
    assert isinstance(block, Block)
    assert not [name for name, _ in block.named_parameters() if "conv" not in name and "bn" not in name]
    nn.init.zeros_(block.bn2.weight)
    nn.init.zeros_(block.bn2.bias)
    x = torch.rand(2, 16, 8, 8, generator=generator())
    output = block.eval()(x)
    assert torch.equal(output[:, 8:24], x[:, :, ::2, ::2])
    assert (output[:, :8] == 0).all()
    assert (output[:, 24:] == 0).all()


def test_resnets_are_loaded_strictly(tmp_path: Path) -> None:
    model = ResNet(2)
    state = {f"module.{name}": weight for name, weight in model.state_dict().items() if "tracked" not in name}
    torch.save({"state_dict": state, "best_prec1": 1.0}, tmp_path / "a.th")
    loaded, loaded_state = load_resnet(tmp_path / "a.th")
    assert loaded.blocks == 2
    assert torch.equal(loaded_state["linear.weight"], model.linear.weight)
    state["module.linear.extra"] = torch.ones(1)
    torch.save({"state_dict": state}, tmp_path / "b.th")
    with pytest.raises(WeightsError, match=r"b\.th"):
        load_resnet(tmp_path / "b.th")


def test_pixels_are_normalized_by_channel() -> None:
    black, white = torch.zeros(1, 32, 32, 3, dtype=torch.uint8), torch.full((1, 32, 32, 3), 255, dtype=torch.uint8)
    assert normalized(black)[0, :, 0, 0].tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert normalized(white).shape == (1, 3, 32, 32)
    assert len(CLASSES) == 10


@pytest.mark.nightly  # decodes ten thousand images
def test_the_accuracy_of_a_real_resnet_is_the_published_one(shared_data: Path, tmp_path: Path) -> None:
    try:
        subject = quality.load_subject("resnet20", quality.Folders(tmp_path, shared_data), quality.Amounts(images=500))
    except NotInstalledError as error:
        pytest.skip(str(error))
    measured = subject.measure(subject.state)
    assert measured.kl == 0
    assert measured.accuracy is not None
    assert 0.7 < measured.accuracy < 0.95
    inputs, targets = subject.calibration[0]
    assert (subject.module(inputs).argmax(-1) == targets).double().mean() > 0.97  # its training images
