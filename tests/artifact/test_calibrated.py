"""Laws of files from an offloaded calibration: those of one in memory, and nothing left behind."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.offload import calibrate_offloaded
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.scheme import Sensitivity
from birdie.compress.trellis.feedback import BlockFeedback, Feedback
from birdie.errors import ConfigError, WeightsError
from birdie.system.distributed import World
from tests.compress.calibration.block_models import Bank, Case, chain, gpt, project, seeded, vectors
from tests.ranks import run_in_process_group


def small_gpt() -> Case:
    module, batches, loss = gpt(num_layers=1, model_dim=48, tie_embeddings=True)
    return Case(module, [*batches, *batches[::-1]], loss)


@pytest.fixture(scope="module")
def both() -> tuple[Case, CalibrationResult, CalibrationResult]:
    case = small_gpt()
    return case, birdie.calibrate(*case), birdie.calibrate(*case, offload=True)


def same(measured: Tensor | None, expected: Tensor | None) -> None:
    assert (measured is None) == (expected is None)
    if measured is not None and expected is not None:
        assert torch.equal(measured, expected)


def test_the_result_is_that_of_the_complete_module(
    both: tuple[Case, CalibrationResult, CalibrationResult],
) -> None:
    """Shrunk, with a floor, and with the units of every layer sorted alike."""
    case, complete, offloaded = both
    assert offloaded.files is not None
    assert offloaded.state.keys() == complete.state.keys()
    moved = 0
    for name, weight in complete.state.items():
        assert torch.equal(offloaded.state[name], weight), name
        moved += not torch.equal(weight, case.module.state_dict()[name])
    assert moved
    assert sorted(offloaded.sensitivities) == sorted(complete.sensitivities)
    for name, expected in complete.sensitivities.items():
        measured = offloaded.sensitivities[name]
        for part in ("hessian", "row_fisher", "output"):
            same(getattr(measured, part), getattr(expected, part))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "gptq:bits=4,clip_sigmas=6"},
        *(pytest.param(settings, marks=pytest.mark.nightly) for settings in ({"quality": 0.01}, {}, {"bits": 3.0})),
    ],
    ids=str,
)
def test_files_are_those_of_a_complete_calibration(
    settings: dict[str, Any], both: tuple[Case, CalibrationResult, CalibrationResult], tmp_path: Path
) -> None:
    case, *results = both
    names = ("complete", "offloaded")
    one, two = (
        birdie.save(case.module, tmp_path / name, calibration=result, **settings)
        for name, result in zip(names, results, strict=True)
    )
    assert one.error is not None
    assert two.error is not None
    if "bits" in settings:  # a search that begins elsewhere may end elsewhere
        assert two.bytes == pytest.approx(one.bytes, rel=0.02)
        assert two.error == pytest.approx(one.error, rel=0.3)
    else:
        assert two.bytes == pytest.approx(one.bytes, rel=1e-3)
        assert two.error == pytest.approx(one.error, rel=0.05)
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_temporary_files_live_as_long_as_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    result = birdie.calibrate(*chain(), offload=True)
    sensitivities = result.sensitivities
    del result
    gc.collect()
    assert sensitivities["2.weight"].hessian is not None
    assert [*tmp_path.iterdir()] != []
    del sensitivities
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_has_the_temporary_files_and_keeps_none(tmp_path: Path) -> None:
    case = chain()
    known = birdie.calibrate(*case, offload=tmp_path / "work")
    assert [*(tmp_path / "work").iterdir()] != []
    birdie.save(case.module, tmp_path / "a", scheme="int6", calibration=known)
    del known
    gc.collect()
    assert [*(tmp_path / "work").iterdir()] == []


def test_what_needs_the_complete_model_is_refused(tmp_path: Path) -> None:
    module, batches, loss = chain()
    calibration = module, batches, loss
    result = birdie.calibrate(*calibration, offload=tmp_path / "work")
    with pytest.raises(ConfigError, match="tuning has the complete model in memory"):
        birdie.save(module, tmp_path / "x", bits=4, calibration=result, tune=5)
    with pytest.raises(ConfigError, match="5 is not a path"):
        birdie.calibrate(*calibration, offload=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offload=True"):
        birdie.calibrate(*calibration, world=World(size=2))
    with pytest.raises(WeightsError, match="calibrate with the model"):
        calibrate_offloaded({"other": torch.zeros(3)}, calibration, folder=tmp_path / "work")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


class Tied(nn.Module):
    """A module with a tied weight, a buffer of integers, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.short = nn.Parameter(torch.randn(5).half())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def test_a_mapped_module_has_the_divergence_of_one_in_memory(tmp_path: Path) -> None:
    module, batches, loss = small_gpt()
    mapped = HeldOut(module, batches, loss, file=tmp_path / "weights")
    plain = HeldOut(module, batches, loss)
    for seed in (0, 1):
        state = {name: weight + 0.02 * seeded(*weight.shape, seed=seed) for name, weight in module.state_dict().items()}
        assert mapped(state) == pytest.approx(plain(state), rel=1e-6)
    assert all(not part._forward_hooks for part in module.modules())


def arrays(factors: Feedback) -> list[Any]:
    columns = factors.columns
    blocks = columns.blocks if isinstance(columns, BlockFeedback) else ()
    dense = [part for block in blocks for part in block]
    return [factors.order, factors.rows, factors.column_weight, factors.row_weight, *dense]


GPTQ = "gptq:bits=4,clip_sigmas=6"


def calibrate_as_rank(world: World, folder: Path) -> None:
    module, batches, loss = small_gpt()
    known = birdie.calibrate(module, batches, loss, offload=folder / "work", world=world)
    summary = write_model(
        module, folder / "two.birdie", SaveOptions(scheme=GPTQ, effort="fast", calibration=known), world=world
    )
    torch.save(summary.error, folder / f"error.{world.rank}")
    banks = birdie.calibrate(Bank(), vectors(), project, offload=folder / "work", world=world).sensitivities
    torch.save({name: parts(banks[name]) for name in banks}, folder / f"banks.{world.rank}")


def parts(known: Sensitivity) -> dict[str, Tensor]:
    named = {"hessian": known.hessian, "rows": known.row_fisher, "output": known.output}
    return {name: part for name, part in named.items() if part is not None}


@pytest.mark.nightly
def test_two_ranks_have_the_sums_of_one_and_write_one_file_between_them(tmp_path: Path) -> None:
    """Each sensitivity is written by one rank, and all read it; a loss without targets has no random signs."""
    run_in_process_group(calibrate_as_rank, 2, tmp_path)
    expected = birdie.calibrate(Bank(), vectors(), project).sensitivities
    ranks = [torch.load(tmp_path / f"banks.{rank}", weights_only=True) for rank in range(2)]
    assert sorted(ranks[0]) == sorted(expected)
    for name, sensitivity in expected.items():
        for part, tensor in parts(sensitivity).items():
            torch.testing.assert_close(ranks[0][name][part], tensor, rtol=1e-4, atol=1e-6)
            assert torch.equal(ranks[0][name][part], ranks[1][name][part])
    module, batches, loss = small_gpt()
    known = birdie.calibrate(module, batches, loss, offload=True)
    alone = birdie.save(module, tmp_path / "one.birdie", scheme=GPTQ, calibration=known)
    errors = [torch.load(tmp_path / f"error.{rank}", weights_only=True) for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0] == pytest.approx(alone.error, rel=0.6)  # other signs on other batches
    assert (tmp_path / "two.birdie").stat().st_size == pytest.approx(alone.bytes, rel=0.02)
    assert not list((tmp_path / "work").iterdir())


class Holder(nn.Module):
    """A module that is no wrapper, and calls its part `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.module(inputs)
        return out


@pytest.mark.parametrize(
    ("wrap", "offload"),
    [
        pytest.param(nn.DataParallel, True, marks=pytest.mark.nightly),
        pytest.param(torch.compile, False, marks=pytest.mark.nightly),
        (lambda module: AveragedModel(module), False),
        (Holder, True),
    ],
)
def test_the_state_dict_of_a_wrapped_module_is_calibrated(wrap: Any, offload: bool, tmp_path: Path) -> None:
    module, batches, loss = chain()
    wrapped = wrap(module)
    result = birdie.calibrate(wrapped, batches, loss, offload=offload)
    plain = birdie.save(wrapped, tmp_path / "a.birdie", calibration=result)
    state = wrapped.state_dict()
    other = birdie.save(state, tmp_path / "b.birdie", calibration=(wrapped, batches, loss))
    assert other.uncalibrated == plain.uncalibrated == ()
    tensors, expected = birdie.load(tmp_path / "b.birdie"), birdie.load(tmp_path / "a.birdie")
    assert tensors.keys() == expected.keys()
    assert all(name.startswith("module.") == (wrap is Holder) for name in tensors if name != "n_averaged")
    birdie.save(state, tmp_path / "c.birdie", calibration=result)
    assert birdie.load(tmp_path / "c.birdie").keys() == expected.keys()
