"""Names in files are those without wrappers, wherever these are; and a file loads whichever wrappers a module has."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import birdie
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.compress.wrappers import COUNTER, unwrapped
from tests.nightly import mostly_nightly


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))


def around_one_part(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    module = plain()
    inner = module[1]
    assert isinstance(inner, nn.Sequential)
    inner[1] = wrap(inner[1])
    return module


def nested() -> nn.Module:
    module = around_one_part(lambda part: torch.compile(checkpoint_wrapper(part)))  # type: ignore[arg-type, return-value]
    return torch.compile(nn.DataParallel(module))  # type: ignore[return-value]


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "compiled": lambda: torch.compile(plain()),  # type: ignore[dict-item, return-value]
    "compiled part": lambda: around_one_part(lambda part: torch.compile(part)),  # type: ignore[arg-type, return-value]
    "parallel part": lambda: around_one_part(nn.DataParallel),
    "checkpoint": lambda: around_one_part(checkpoint_wrapper),
    "average": lambda: AveragedModel(plain()),
    "average of a part": lambda: around_one_part(AveragedModel),
    "several": nested,
}


def weights_of(module: nn.Module) -> list[Tensor]:
    return [weight for name, weight in module.state_dict().items() if COUNTER not in name]


@pytest.mark.parametrize("wrapped", mostly_nightly(WRAPPED, ("average", "several")))
def test_files_have_plain_names_and_the_module_stays_as_it_is(wrapped: str, tmp_path: Path) -> None:
    module = WRAPPED[wrapped]()
    kinds = [(name, type(part)) for name, part in module.named_modules()]
    summary = birdie.save(module, tmp_path / "m.birdie", lossless=True)
    assert [row.name for row in summary.tensors if COUNTER not in row.name] == list(plain().state_dict())
    birdie.load(tmp_path / "m.birdie", into=module)
    assert [(name, type(part)) for name, part in module.named_modules()] == kinds


@pytest.mark.parametrize(
    ("source", "lazy"),
    mostly_nightly(
        itertools.product(WRAPPED, (False, True)), [("compiled", False), ("parallel part", True), ("average", False)]
    ),
)
def test_a_file_loads_into_the_same_module_under_other_wrappers(source: str, lazy: bool, tmp_path: Path) -> None:
    module = WRAPPED[source]()
    birdie.save(module, tmp_path / "m.birdie", lossless=True)
    birdie.save(module.state_dict(), tmp_path / "state.birdie", lossless=True)
    for wrappers, name in itertools.product(("plain", "several"), ("m", "state")):
        target = WRAPPED[wrappers]()
        birdie.load(tmp_path / f"{name}.birdie", into=target, lazy=lazy)
        assert all(map(torch.equal, weights_of(target), weights_of(module)))


@pytest.mark.parametrize("wrapped", mostly_nightly(WRAPPED, ("checkpoint", "several")))
def test_checkpoints_of_wrapped_modules_are_read_under_plain_names(wrapped: str, tmp_path: Path) -> None:
    module = WRAPPED[wrapped]()
    torch.save({"state_dict": module.state_dict()}, tmp_path / "m.pt")
    state = read_state_dict(tmp_path / "m.pt")
    if "part" not in wrapped or "compiled" in wrapped:  # "module." inside of a name may be that of a module
        assert [name for name in state if name != COUNTER] == list(plain().state_dict())
    birdie.save(state, tmp_path / "m.birdie", lossless=True)
    target = birdie.load(tmp_path / "m.birdie", into=plain())
    assert all(map(torch.equal, weights_of(target), weights_of(module)))


def test_the_counter_of_an_average_is_kept(tmp_path: Path) -> None:
    average = AveragedModel(plain())
    for _ in range(3):
        average.update_parameters(plain())
    birdie.save(average, tmp_path / "m.birdie")
    target = birdie.load(tmp_path / "m.birdie", into=AveragedModel(plain()))
    assert int(target.n_averaged) == 3
    birdie.quantize_(average)
    assert int(average.n_averaged) == 3


def test_an_unwrapped_module_computes_the_same_and_shares_its_tensors() -> None:
    module = around_one_part(nn.DataParallel).eval()
    inner, x = unwrapped(module), torch.randn(3, 4)
    assert torch.equal(inner(x), module(x))
    assert [weight.data_ptr() for weight in inner.parameters()] == [weight.data_ptr() for weight in module.parameters()]
    assert not any(isinstance(part, nn.DataParallel) for part in inner.modules())
    assert list(copy.deepcopy(inner).state_dict()) == list(plain().state_dict())


def test_calibration_reaches_weights_inside_of_wrappers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    wrapped = nn.Sequential(nn.DataParallel(model[0]), model[1], checkpoint_wrapper(model[2]))
    batches = [(torch.randn(50, 64), torch.randint(0, 64, (50,))) for _ in range(5)]
    for name, module in (("plain", model), ("wrapped", wrapped)):
        calibration = (module, batches, nn.CrossEntropyLoss())
        birdie.save(module, tmp_path / name, calibration=calibration, bits=6.0)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "wrapped").read_bytes()
