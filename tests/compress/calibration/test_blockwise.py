"""Laws of blockwise calibration: the sums of the complete module, the same after a kill, on any number of ranks."""

import shutil
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.compress.calibration import sensitivity
from birdie.compress.calibration.blockwise import calibrate_blockwise
from birdie.compress.calibration.identity import digest_of
from birdie.compress.calibration.sensitivity import Recorder, calibrate
from birdie.compress.calibration.stored import WorkFolder
from birdie.compress.calibration.units import Interception
from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError, DataError, OutputError
from tests.compress.calibration.block_models import (
    CASES,
    WIDTH,
    Case,
    Named,
    chain,
    classify,
    gpt,
    project,
    seeded,
    vectors,
)
from tests.nightly import mostly_nightly


def parts(known: Sensitivity) -> dict[str, Tensor | None]:
    blocks = None if known.blocks is None else known.blocks.blocks
    return {"hessian": known.hessian, "blocks": blocks, "rows": known.row_fisher, "output": known.output}


def require_same(measured: Any, expected: Any, *, tolerance: float = 1e-5) -> None:
    """Compare sensitivities by name; tolerance 0 is the same bits."""
    assert sorted(measured) == sorted(expected)
    for name in expected:
        ours, theirs = parts(measured[name]), parts(expected[name])
        for part, tensor in theirs.items():
            other = ours[part]
            assert (other is None) == (tensor is None), (name, part)
            if tensor is not None and other is not None:
                difference = float((tensor - other).norm() / tensor.norm().clamp_min(1e-30))
                assert difference <= tolerance, (name, part, difference)
        assert measured[name].samples == pytest.approx(expected[name].samples)
        assert measured[name].gradients == expected[name].gradients


NIGHTLY = {"a GPT with value residual and repeated layers"}  # the one with more techniques has them, too


@pytest.mark.parametrize("name", mostly_nightly(CASES, CASES.keys() - NIGHTLY))
def test_the_sums_are_those_of_the_complete_module(name: str, tmp_path: Path) -> None:
    module, batches, loss = CASES[name]()
    measured = calibrate_blockwise(module, batches, loss, tmp_path / "work")
    expected = calibrate(module, batches, loss)
    others = {name for name, known in expected.items() if known.rows_have_inputs}  # not by products alone
    require_same(
        *({name: known for name, known in every.items() if name not in others} for every in (measured, expected))
    )


def test_columns_in_blocks_are_those_of_the_complete_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "MAX_COLUMNS", WIDTH // 2)
    module, batches, loss = chain()
    measured = calibrate_blockwise(module, batches, loss, tmp_path)
    require_same(measured, calibrate(module, batches, loss))
    assert all(known.blocks is not None for known in measured.values())


def test_blocks_may_be_named(tmp_path: Path) -> None:
    module, batches, loss = gpt(num_layers=2)
    expected = calibrate(module, batches, loss)
    names = [f"blocks.{layer}.{part}" for layer in range(2) for part in ("attn", "mlp")]
    require_same(calibrate_blockwise(module, batches, loss, tmp_path / "1", blocks=names), expected)
    require_same(calibrate_blockwise(module, batches, loss, tmp_path / "2", blocks=["blocks.1"]), expected)


def test_only_one_block_is_summed_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sums, nor gradients, nor outputs of finished units are kept."""
    module, batches, loss = chain(6)
    most, forget = [0], Recorder.forget

    def counting(recorder: Recorder) -> None:
        most[0] = max(most[0], len(recorder.sums))
        forget(recorder)

    monkeypatch.setattr(Recorder, "forget", counting)
    files: list[int] = []
    saved = WorkFolder.save_progress

    def listing(work: WorkFolder, progress: dict[str, Any]) -> None:
        saved(work, progress)
        files.append(sum(1 for file in work.rank.rglob("*.safetensors") if not file.name.startswith("sensitivity")))

    monkeypatch.setattr(WorkFolder, "save_progress", listing)
    calibrate_blockwise(module, batches, loss, tmp_path)
    assert most == [1]
    assert files[1:] == sorted(files[1:], reverse=True)
    assert files[-1] < files[1] / 3
    assert not list(tmp_path.rglob("gradients*"))
    assert not list(tmp_path.rglob("outputs"))


class Stopped(BaseException):
    """Ends a calibration, as a kill does but for the temporary files."""


@contextmanager
def stopping_after(runs: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop in the middle of a later run of the module."""
    original, count = Interception._answer, [0]

    def answer(recorder: Interception, name: str, run: Callable[[], Any], inputs: Any) -> Any:
        count[0] += 1
        if count[0] > runs:
            raise Stopped
        return original(recorder, name, run, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Interception, "_answer", answer)
        yield


LOOPED = pytest.param(lambda: gpt(num_loops=1, loop_start=1, loop_end=2), marks=pytest.mark.nightly)


@pytest.mark.parametrize("case", [chain, LOOPED], ids=["chain", "gpt"])
def test_a_calibration_that_was_stopped_anywhere_resumes_with_the_same_bits(
    case: Callable[[], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batches, loss = case()
    expected = dict(calibrate_blockwise(module, batches, loss, tmp_path / "undisturbed"))
    stops = 0
    for runs in (3, 8, 11, 17, 20, 26, 31, 40, 200):
        try:
            with stopping_after(runs, monkeypatch):
                calibrate_blockwise(module, batches, loss, tmp_path / "stopped")
        except Stopped:
            stops += 1
            leave_torn_files(tmp_path / "stopped")
    assert stops > 2
    require_same(calibrate_blockwise(module, batches, loss, tmp_path / "stopped"), expected, tolerance=0)
    assert not [path for path in (tmp_path / "stopped").rglob("*") if "torn" in path.name or path.suffix == ".part"]


def leave_torn_files(folder: Path) -> None:
    """Leave a part of a folder under a temporary name, as a process that is killed does."""
    for parent in (folder / "rank-0" / "outputs", folder / "rank-0" / "steps"):
        if parent.is_dir():
            torn = parent / f".birdie-{parent.stat().st_ino}-abcdefgh.part" / "torn"
            torn.mkdir(parents=True, exist_ok=True)
            (torn / "gradients-0-0.safetensors").write_bytes(b"torn")


def test_batches_are_told_apart_by_their_content() -> None:
    class Slotted:
        __slots__ = ("tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    x = seeded(4)
    kinds: list[Callable[[Tensor], Any]] = [
        lambda x: x, lambda x: {"x": [x]}, lambda x: x.numpy(), lambda x: UserDict(x=x), lambda x: float(x[0]),
        Result, Slotted,
    ]  # fmt: skip
    digests = [digest_of([kind(x)]) for kind in kinds]
    assert digests == [digest_of([kind(x.clone())]) for kind in kinds]
    assert all(digest_of([kind(x + 1)]) != digest for kind, digest in zip(kinds, digests, strict=True))
    assert digest_of([x]) != digest_of([x.view(2, 2)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Sensitivity]]:
    """Return the folder of a finished calibration of `chain()`, and its sums."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, dict(calibrate_blockwise(*chain(), folder))


def test_a_finished_calibration_runs_nothing_again(
    finished: tuple[Path, dict[str, Sensitivity]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, expected), (module, batches, loss) = finished, chain()
    monkeypatch.setattr("birdie.compress.calibration.blockwise.BlockRuns", None)
    require_same(calibrate_blockwise(module, batches, loss, folder), expected, tolerance=0)


def other_weights(case: Case) -> Case:
    with torch.no_grad():
        next(case.module.parameters()).mul_(1.5)
    return case


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (other_weights, {}, "another module"),
        (lambda case: case._replace(batches=vectors(4)), {}, "other batches"),
        (lambda case: case._replace(loss=project), {}, "another loss"),
        (lambda case: case, {"blocks": ["0", "2"]}, "other settings"),
    ],
)
def test_the_folder_of_another_calibration_is_refused(
    change: Callable[[Case], Case], settings: dict[str, Any], message: str, finished: tuple[Path, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate_blockwise(*change(chain()), finished[0], **settings)


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match=r"thesis\.tex"):
        calibrate_blockwise(*chain(), tmp_path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped), stopping_after(33, patch):
        calibrate_blockwise(*chain(), folder)
    return folder


@pytest.mark.parametrize(
    "pattern",
    [
        *("outputs/1/2.safetensors", "outputs/0/calls.json", "gradients-2-*.safetensors"),
        *("calibration.json", "progress.json"),
    ],
)
def test_a_file_that_was_cut_is_noticed_when_a_calibration_resumes(pattern: str, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    file = next(tmp_path.rglob(pattern))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{file.name} (is damaged|cannot be read)"):
        calibrate_blockwise(*chain(), tmp_path)


class InPlace(nn.Linear):
    """A block that changes its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.add_(1))


class Noisy(nn.Linear):
    """A block that computes something else each time."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.randn(())


class Opaque(nn.Linear):
    """A block that returns an object."""

    def forward(self, input: Tensor) -> Any:
        return Result(super().forward(input))


class Result:
    """An object with a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def of_blocks(kind: Callable[[int, int], nn.Module]) -> nn.Module:
    class Blocks(nn.Module):
        """Blocks of one kind, and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x = x.tensor if isinstance(x, Result) else x
            logits: Tensor = self.head(x)
            return logits

    return Blocks()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InPlace, "'blocks.0' changes its inputs in place"),
        (Noisy, "'blocks.2' computes something else"),
        (Opaque, "returns a Result"),
    ],
)
def test_blocks_that_cannot_be_run_alone_are_refused(
    kind: Callable[[int, int], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate_blockwise(of_blocks(kind), vectors(), classify, tmp_path)


class Reordered(nn.Module):
    """Blocks in an order that the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 1) if x[0, 0] > 0 else (1, 0)
        for index in order:
            x = self.blocks[index](x)
        return x[:, :4]


class Unseen(nn.Module):
    """A block with one use of a weight that is seen block by block, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.recurrent = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.raw = nn.Parameter(seeded(WIDTH, WIDTH))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.normed(torch.tanh(self.seen(x) @ self.raw)) + self.recurrent(x[:, None])[0][:, 0]
        return out


class WithUnseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outside, self.unused = nn.Parameter(seeded(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Unseen(), Unseen()]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.outside
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def test_what_is_not_reached_block_by_block_is_in_the_log_and_in_the_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "birdie")
    module = WithUnseen()
    calibration = module, vectors(4), classify
    known = birdie.calibrate(*calibration, blockwise=True)
    summary = birdie.save(module, tmp_path / "x.birdie", calibration=known)
    block = {"raw", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "normed.parametrizations.weight.original1"}
    missing = {f"blocks.{index}.{name}" for index in (0, 1) for name in block} | {"outside", "unused.weight"}
    gains = {name for name in summary.uncalibrated if name.endswith("original0")}  # of weight norm
    assert {*summary.uncalibrated} - gains == missing
    assert f"do not reach {len(summary.uncalibrated)} of " in caplog.text
    complete = birdie.save(module, tmp_path / "y.birdie", calibration=calibration)
    assert {name for name in complete.uncalibrated if not name.endswith("original0")} == {"unused.weight"}
    with torch.no_grad():
        module.blocks = nn.ModuleList()
        module.head = module.unused = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="calibrate without blockwise"):
        birdie.calibrate(*calibration, blockwise=True)


def test_blocks_and_data_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    module, batches, loss = chain()
    mixed = [(seeded(7, WIDTH).abs() * sign, torch.arange(7) % 4) for sign in (1, -1)]
    for case, blocks, message in (
        (Case(Reordered(), mixed, classify), None, "different orders"),
        (Case(module, batches, loss), ["22"], "did you mean '2'"),
        (Case(Named(), batches, classify), ["inner"], "'inner' is not called"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrate_blockwise(*case, tmp_path / message, blocks=blocks)
