"""Quantization-aware training on the weights that any scheme would store, also a scheme from another package."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.compress import registry
from birdie.compress.qat.fake_quantization import storage_rules
from birdie.compress.qat.settings import Qat
from birdie.compress.registry import decode, parse_spec
from birdie.errors import ConfigError
from birdie.runtime.callbacks import no_message
from tests.compress.example_scheme import SQUARES

SPECS = ("int4", "codebook:k=16", "rotation:bits=4", "trellis:states=8,sigma=0.4", SQUARES.decoder.name)


@pytest.fixture(autouse=True)
def _register_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_foreign", {})
    registry.register(SQUARES)
    yield
    registry.words.cache_clear()


class Network(nn.Module):
    """Two layers, the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)))
        return y


def float_weight(layer: nn.Linear) -> Tensor:
    """Return the parameter behind the quantized weight."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


@pytest.mark.parametrize("spec", SPECS)
def test_layers_use_what_the_scheme_would_store(spec: str) -> None:
    model = Network()
    weight = model.first.weight.detach().clone()
    Qat(scheme=spec).prepare(model).switch(True)
    assert torch.allclose(model.first.weight, decode(parse_spec(spec).encode("weight", weight)), atol=1e-7)
    assert torch.equal(model.eval().first.weight, weight)  # validation scores the float model


def test_gradients_go_straight_through() -> None:
    plain, trained = Network(), Network()
    prepared = Qat(scheme="squares").prepare(trained)
    x = torch.randn(8, 64)
    for on, same in ((False, True), (True, False)):
        prepared.switch(on)
        grads = [
            torch.autograd.grad(model(x).square().sum(), float_weight(model.second))[0] for model in (plain, trained)
        ]
        assert torch.equal(*grads) == same
    stored = trained.second.weight
    (gradient,) = torch.autograd.grad((stored * x[:1, :1]).sum(), float_weight(trained.second))
    assert torch.equal(gradient, x[:1, :1].expand_as(gradient))


def test_one_graph_serves_on_and_off() -> None:
    """The compiled graph calls the encoder, and reads the switch: turning it on compiles nothing."""
    model = Network()
    prepared = Qat(scheme="squares").prepare(model)
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled, x = torch.compile(model, backend=count, fullgraph=True), torch.randn(4, 64)
    for on in (False, True, False):
        prepared.switch(on)
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1


def test_training_lowers_the_loss_of_the_stored_model(tmp_path: Path) -> None:
    """A network fitted under `int2` loses less once it is stored than one fitted in float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 64, generator=generator)
    y = torch.tanh(x @ torch.randn(64, 64, generator=generator) / 8)

    def loss_when_stored(scheme: str | None) -> float:
        model = Network()
        prepared = Qat(scheme=scheme).prepare(model, no_message) if scheme else None
        if prepared:
            prepared.switch(True)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if prepared:
            prepared.remove()
        birdie.save(model, tmp_path / "net.birdie", scheme=[("*weight", "int2:group_size=32")], coder="fast")
        birdie.load(tmp_path / "net.birdie", into=model)
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(x), y))

    assert loss_when_stored("int2:group_size=32") < 0.8 * loss_when_stored(None)


def test_the_file_stores_what_was_trained() -> None:
    model = Network()
    rules = storage_rules(Qat(scheme="squares", tensors=("second.*",)), model)
    assert rules == [("second.weight", "squares")]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"scheme": "int9"}, "int9"),
        ({"scheme": "int4", "bits": 4}, "bits 4 and scheme int4"),
        ({"scheme": "int4", "rate": 0.1}, "rate"),
        ({"scheme": "int4", "rounding": "soft"}, "rounding"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Qat(**settings)  # type: ignore[arg-type]
