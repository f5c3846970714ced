"""Modules that torch compiled, traced or left without shapes: saved, loaded, quantized and calibrated like others."""

import copy
import io
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.errors import ConfigError, WeightsError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
INPUTS, CLASSES = 32, 16


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, CLASSES)).eval()


class Holder(nn.Module):
    """A module with another one in it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.part, self.head = part, nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.part(x)))
        return out


class Steps(nn.Module):
    """A loop, as people script it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(INPUTS, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[0], 24)
        for _ in range(3):
            hidden = self.cell(x, hidden)
        return self.out(hidden)  # type: ignore[no-any-return]


def inputs() -> Tensor:
    return torch.randn(12, INPUTS, generator=torch.Generator().manual_seed(2))


def reopened() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(plain()), file)
    file.seek(0)
    module: nn.Module = torch.jit.load(file)
    return module


def steps() -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = torch.jit.script(Steps())
    return module


def compiled() -> nn.Module:
    module = plain()
    module.compile(backend="eager")
    return module


MODULES: dict[str, Callable[[], Any]] = {
    "scripted": lambda: torch.jit.script(plain()),
    "scripted part": lambda: Holder(torch.jit.script(plain())),
    "scripted loop": steps,
    "loaded": reopened,
    "traced": lambda: torch.jit.trace(plain(), inputs()),
    "traced part": lambda: Holder(torch.jit.trace(plain(), inputs())),
    "graph": lambda: torch.fx.symbolic_trace(plain()),
    "graph part": lambda: Holder(torch.fx.symbolic_trace(plain())),
    "exported": lambda: torch.export.export(plain(), (inputs(),)).module(),
    "compiled": compiled,
    "compiled part": lambda: Holder(torch.compile(plain(), backend="eager")),  # type: ignore[arg-type]
}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, INPUTS, generator=generator), torch.randint(0, CLASSES, (12,), generator=generator))
        for _ in range(6)
    ]


def nats(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def values(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


@pytest.mark.parametrize("kind", MODULES)
def test_values_come_back_and_the_module_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    module, other = MODULES[kind](), MODULES[kind]()
    expected, outputs = values(module), module(inputs())
    birdie.save(module, tmp_path / "m.birdie", lossless=True)
    for weight in other.parameters():
        weight.data.zero_()
    birdie.load(tmp_path / "m.birdie", into=other)
    assert all(map(torch.equal, values(other), expected))
    torch.testing.assert_close(other(inputs()), outputs)
    assert all(map(torch.equal, values(module), expected))
    packed = birdie.compress_weights(module)
    birdie.load_weights(packed, into=other)
    assert not all(map(torch.equal, values(other), expected))


@pytest.mark.parametrize("kind", MODULES)
def test_quantization_in_place_is_that_of_a_file(kind: str, tmp_path: Path) -> None:
    module, other = MODULES[kind](), MODULES[kind]()
    birdie.save(module, tmp_path / "m.birdie", scheme="int6")
    birdie.load(tmp_path / "m.birdie", into=module)
    birdie.quantize_(other, scheme="int6")
    assert all(map(torch.equal, values(other), values(module)))


@pytest.mark.parametrize("kind", MODULES)
def test_calibrations_reach_all_matrices_and_leave_the_module_as_it_is(kind: str) -> None:
    module = MODULES[kind]()
    expected, outputs = values(module), module(inputs()).detach()
    known = birdie.calibrate(module, batches(), nats)
    assert not known.unreached
    assert {"weight", "weight_ih", "weight_hh"} >= {name.rpartition(".")[2] for name in known.sensitivities}
    assert birdie.save(module, io.BytesIO(), quality=0.01, calibration=known, effort="fast").error is not None
    tuned = birdie.save(module, io.BytesIO(), bits=8, tune=0.1, calibration=known, effort="fast")
    assert tuned.error is not None
    assert tuned.untuned is not None
    assert tuned.error <= tuned.untuned
    birdie.calibrate(module, example_inputs=inputs())
    assert len(birdie.sensitivity(module, batches(), nats, at=(4.0,)).rows) == len(known.sensitivities)
    assert all(map(torch.equal, values(module), expected))
    assert torch.equal(module(inputs()), outputs)


@pytest.mark.parametrize("kind", MODULES)
def test_offload_runs(kind: str) -> None:
    known = birdie.calibrate(MODULES[kind](), batches(), nats)
    measured = birdie.calibrate(MODULES[kind](), batches(), nats, offload=True)
    assert measured.sensitivities.keys() == known.sensitivities.keys()


@pytest.mark.parametrize("kind", [kind for kind in MODULES if "compiled" not in kind])
def test_lazy_loading_runs_or_says_what_else_to_do(kind: str, tmp_path: Path) -> None:
    module = MODULES[kind]()
    birdie.save(module, tmp_path / "m.birdie", lossless=True)
    has_dicts = "graph" in kind or kind == "exported"
    with nullcontext() if has_dicts else pytest.raises(ConfigError, match="without lazy"):
        other = birdie.load(tmp_path / "m.birdie", into=MODULES[kind](), lazy=True)
        torch.testing.assert_close(other(inputs()), module(inputs()))


def test_a_scripted_part_has_the_sensitivities_of_a_plain_one() -> None:
    """Its weights are known by their gradients, which estimate the same in another way."""
    data = batches() * 8
    plain_part, scripted = (birdie.calibrate(module, data, nats) for module in (plain(), MODULES["scripted"]()))
    for name, expected in plain_part.sensitivities.items():
        measured = scripted.sensitivities[name]
        assert expected.row_fisher is not None
        assert measured.row_fisher is not None
        both = torch.stack([expected.row_fisher.float(), measured.row_fisher.float()])
        assert float(torch.corrcoef(both)[0, 1]) > 0.5


def test_frozen_modules_have_no_weights_to_store(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    frozen = torch.jit.freeze(torch.jit.script(plain()))
    for action in (
        lambda: birdie.save(frozen, tmp_path / "m.birdie"),
        lambda: birdie.quantize_(frozen),
        lambda: birdie.calibrate(frozen, batches(), nats),
    ):
        with pytest.raises(WeightsError, match=r"torch\.jit\.freeze"):
            action()
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING, "birdie"):
        birdie.save(Holder(frozen), tmp_path / "m.birdie")
    assert "'part'" in caplog.text


def lazy(classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(), nn.LazyLinear(classes)).eval()


def test_lazy_layers_take_the_shapes_of_a_file(tmp_path: Path) -> None:
    module, other = lazy(), lazy()
    with pytest.raises(WeightsError, match="run the module once"):
        birdie.save(module, tmp_path / "m.birdie")
    module(inputs())
    birdie.save(module, tmp_path / "m.birdie", lossless=True)
    parameters = [*other.parameters()]
    birdie.load(tmp_path / "m.birdie", into=other)
    assert torch.equal(other(inputs()), module(inputs()))
    assert all(one is two for one, two in zip(parameters, other.parameters(), strict=True))


def test_a_lazy_layer_that_a_file_does_not_fit_stays_lazy(tmp_path: Path) -> None:
    module = nn.Sequential(lazy(), nn.Linear(CLASSES, 4))
    module(inputs())
    birdie.save(module, tmp_path / "m.birdie", lossless=True)
    other = nn.Sequential(lazy(), nn.Linear(CLASSES, 5))
    kinds = [type(weight) for weight in other.parameters()]
    with pytest.raises(WeightsError, match="shape"):
        birdie.load(tmp_path / "m.birdie", into=other)
    assert [type(weight) for weight in other.parameters()] == kinds
    assert other(inputs()).shape == (12, 5)
    assert isinstance(copy.deepcopy(other)[0], nn.Sequential)


def test_an_error_about_a_file_in_memory_does_not_print_its_bytes() -> None:
    file = io.BytesIO()
    birdie.save(nn.Linear(8, 8), file)
    with pytest.raises(WeightsError) as caught:
        birdie.load(file.getvalue(), into=nn.Linear(8, 9))
    assert len(str(caught.value)) < 500


def test_an_expanded_buffer_gets_memory_of_its_own(tmp_path: Path) -> None:
    module, other = plain(), plain()
    for number, one in enumerate((module, other)):
        one.register_buffer("expanded", torch.full((1,), float(number)).expand(5))
    birdie.save(module, tmp_path / "m.birdie")
    birdie.load(tmp_path / "m.birdie", into=other)
    assert torch.equal(other.get_buffer("expanded"), module.get_buffer("expanded"))
    birdie.quantize_(module)
