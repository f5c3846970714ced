"""A GPT-2-shaped model under spectral compression: Conv1D, a tied head, learned positions; and the example runs."""

import copy
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.compress.spectral.wrap import remove, wrapped

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "spectral_gpt2.py"
SMALL = ("--width=32", "--layers=1", "--heads=2", "--context=24", "--steps=15", "--smaller=3")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = util.spec_from_file_location("spectral_gpt2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(example: ModuleType, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    built: nn.Module = example.GPT2(32, 1, 2, 16)
    return built


def tokens() -> Tensor:
    return torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))


def test_conv1d_is_a_linear_layer_with_its_weight_turned(example: ModuleType) -> None:
    layer, linear = example.Conv1D(6, 4), nn.Linear(4, 6)
    linear.load_state_dict({"weight": layer.weight.detach().T, "bias": layer.bias.detach() + 1})
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x) + 1, linear(x))


def test_every_matrix_is_wrapped_once_and_the_head_stays_tied(example: ModuleType) -> None:
    net = model(example)
    plain = {name: weight for name, weight in net.state_dict().items() if weight.ndim == 2}
    birdie.spectral(net, transform="identity", init_bits=3)
    names = {layer.name for layer in wrapped(net)}
    assert names == set(plain)
    parts = {layer.name: layer.weight for layer in wrapped(net)}
    assert parts["lm_head.weight"] is parts["transformer.wte.weight"]
    assert len({id(part) for part in parts.values()}) == len(plain) - 1
    assert remove(net).lm_head.weight is net.transformer.wte.weight  # type: ignore[union-attr]


def test_a_file_gives_the_same_model_with_the_plain_names(example: ModuleType, tmp_path: Path) -> None:
    net = model(example)
    names = set(net.state_dict())
    q_net = birdie.spectral(net, transform="identity", init_bits=3)
    loss = nn.functional.cross_entropy(net(tokens()).flatten(0, 1), tokens().flatten())
    torch.autograd.backward(loss + 0.1 * birdie.quantization_loss(net))
    for layer in wrapped(net):
        assert layer.original.grad is not None, layer.name
        assert bool(layer.original.grad.any()), layer.name
    with torch.no_grad():
        for weight in net.parameters():
            assert weight.grad is not None
            weight.sub_(0.1 * weight.grad)
    q_net.settle()
    birdie.save(net, tmp_path / "x.birdie")
    assert set(birdie.load(tmp_path / "x.birdie")) == names
    fresh = birdie.load(tmp_path / "x.birdie", into=model(example, seed=1))
    assert torch.equal(fresh(tokens()), net(tokens()))
    assert fresh.get_parameter("lm_head.weight") is fresh.get_parameter("transformer.wte.weight")
    lazy = birdie.load(tmp_path / "x.birdie", into=model(example, seed=2), lazy=True)
    assert torch.equal(lazy(tokens()), fresh(tokens()))
    assert torch.equal(copy.deepcopy(net)(tokens()), net(tokens()))


@pytest.mark.slow
def test_the_example_makes_a_smaller_model_that_loads(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(torch.__file__).parent.parent  # any text: the whole library takes a second to read
    monkeypatch.setattr(example.sysconfig, "get_path", lambda _: str(source / "torch" / "nn"))
    outcome = example.main([*SMALL])
    output = capsys.readouterr().out
    assert f"{outcome['small']:,} bytes" in output
    assert outcome["small"] <= outcome["bytes"] / 3
    assert outcome["apart"] < 1e-4
    assert outcome["tied"]
    assert outcome["after"] < 8  # bits of a byte of which nothing is known
