"""A dry run says what a run then gives: bytes within two per cent, errors within a third, and it writes nothing."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import birdie
from birdie.artifact.file_forecast import LOSSLESS, forecast
from birdie.artifact.options import SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.checkpoints.checkpoint import Checkpoint, open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.rate import forecast as some_rows
from birdie.compress.rate.target import Target
from tests.nightly import mostly_nightly

NUMBERS = torch.Generator().manual_seed(0)


def rough(*shape: int) -> Tensor:
    """Return a matrix with heavy tails, whose rows and columns have sizes of their meant."""
    values = torch.randn(shape, generator=NUMBERS) * torch.randn(shape[1:], generator=NUMBERS).exp().pow(0.3)
    return values * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=NUMBERS).mul(0.5).exp() / 20


MODELS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "layers": lambda: {f"{i}.weight": rough(256, 96 + 32 * (i % 2)) * 2.0**-i for i in range(6)},
    "bfloat16": lambda: {f"{i}.weight": rough(300, 128).bfloat16() for i in range(3)},
    "convolution": lambda: {"conv.weight": rough(96, 48, 3, 3), "norm.weight": torch.rand(96), "norm.bias": rough(96)},
    "experts": lambda: {"experts": rough(4, 128, 128), "router.weight": rough(4, 128)},
    "tied": lambda: dict.fromkeys(("in.weight", "out.weight"), rough(512, 128)),
    "large vectors": lambda: {"table": rough(40_000), "scale": torch.tensor(2.0), "empty": torch.zeros(0, 4)},
    "adapters": lambda: {f"{i}.lora.weight": rough(8, 40) for i in range(150)} | {"head.weight": rough(200, 256)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"effort": "max"},
    "default, fast": {"effort": "fast"},
    "lossless": {"lossless": True},
    "grid": {"scheme": "int5"},
    "trellis": {"scheme": "trellis:sigma=0.3", "effort": "fast"},
    "ternary": {"scheme": "ternary"},
    "low rank": {"scheme": "lowrank:rank=4,base=int6"},
    "bits": {"bits": 4.0, "effort": "fast"},
    "rules": {"bits": 5.0, "scheme": [("*e*", "int4")]},
}


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a part of small matrices, too."""
    monkeypatch.setattr(some_rows, "_WEIGHTS", 1 << 16)
    monkeypatch.setattr(some_rows, "_CODED_WEIGHTS", 1 << 15)


def checkpoint(state: Mapping[str, Tensor]) -> Checkpoint:
    return Checkpoint(Path("model"), dict(state), [], [])


def relative_error(state: Mapping[str, Tensor], decoded: Mapping[str, Tensor]) -> float:
    """Return Σ ‖decoded − weights‖² / Σ ‖weights‖² of the tensors that changed."""
    pairs = [(state[name].double(), decoded[name].double()) for name in state]
    changed = [(weight, other) for weight, other in pairs if not torch.equal(weight, other)]
    errors = sum(float((other - weight).square().sum()) for weight, other in changed)
    return errors / max(sum(float(weight.square().sum()) for weight, _ in changed), 1e-300)


PAIRS = [(model, "default, fast") for model in MODELS] + [(model, "bits") for model in MODELS]
PAIRS += [("layers", setting) for setting in SETTINGS] + [("experts", "lossless"), ("convolution", "rules")]
DAILY = [("layers", "default"), ("bfloat16", "default, fast"), ("experts", "lossless"), ("layers", "grid")]
DAILY += [("layers", "trellis"), ("layers", "ternary"), ("layers", "low rank"), ("convolution", "rules")]
DAILY += [("adapters", "bits"), ("large vectors", "bits"), ("tied", "default, fast"), ("layers", "bits")]
"""Every model, and every setting."""


@pytest.mark.parametrize(("model", "setting"), mostly_nightly(dict.fromkeys(PAIRS), DAILY))
@pytest.mark.usefixtures("few_rows")
def test_the_forecast_is_near_the_run(model: str, setting: str, tmp_path: Path) -> None:
    state, settings = MODELS[model](), SETTINGS[setting]
    options = {**settings}
    scheme, coder = options.pop("scheme", None), options.pop("effort", "auto")
    expected, _ = forecast(checkpoint(state), Target(**options), scheme=scheme, effort=coder, bits=())
    file = tmp_path / "model.birdie"
    summary = birdie.save(state, file, **settings)
    assert abs(expected.bytes - summary.bytes) <= max(0.02 * summary.bytes, 64)
    assert expected.weights == summary.weights
    error = relative_error(state, birdie.load(file))
    assert expected.error == pytest.approx(error, rel=0.34, abs=1e-12)
    assert expected.seconds > 0


@pytest.mark.usefixtures("few_rows")
def test_more_bits_make_larger_files_of_lower_errors() -> None:
    meant, others = forecast(checkpoint(MODELS["layers"]()), Target(bits=4.0), bits=(6.0, 4.0))
    assert others[Target(bits=4.0)] == meant
    lossless, *rows = others.values()
    assert lossless == others[LOSSLESS]
    assert lossless.error == 0 < rows[0].error
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert [row.error for row in rows] == sorted(row.error for row in rows)


def test_a_budget_above_the_lossless_file_is_lossless() -> None:
    meant, others = forecast(checkpoint(MODELS["bfloat16"]()), Target(bits=16.0), bits=())
    assert meant.lossless
    assert meant.error == 0
    assert meant.bytes == pytest.approx(others[LOSSLESS].bytes, abs=32)  # its budget is written down


def test_a_budget_that_cannot_be_met_has_the_bytes_of_the_smallest_file(tmp_path: Path) -> None:
    state = MODELS["layers"]()
    meant, _ = forecast(checkpoint(state), Target(budget=300), bits=())
    assert not meant.fits
    with pytest.raises(birdie.errors.BudgetError, match="the smallest file takes") as error:
        birdie.save(state, tmp_path / "model.birdie", budget=300)
    smallest = int(str(error.value).partition("takes ")[2].partition(" ")[0].replace(",", ""))
    assert meant.bytes == pytest.approx(smallest, rel=0.1)


def test_a_complete_object_has_the_forecast_of_all_it_holds(tmp_path: Path) -> None:
    content = {"model": MODELS["layers"](), "optimizer": {"exp_avg": rough(256, 96)}, "step": 7}
    torch.save(content, tmp_path / "state.pt")
    source = open_checkpoint(tmp_path / "state.pt", complete=True)
    meant, others = forecast(source, Target(lossless=True))
    assert not others
    summary = write_checkpoint(source, tmp_path / "state.birdie", SaveOptions(lossless=True))
    assert meant.bytes == pytest.approx(summary.bytes, rel=0.02)


def test_the_command_shows_a_table_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": rough(64, 64)}, file)
    assert run(build_app, ["compress", str(file), "--dry-run", "--budget", "2kB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    settings = [row["setting"] for row in answer["forecasts"]]
    assert settings == ["--budget 2000", "--lossless", *(f"--bits {bits}" for bits in (8, 6, 5, 4, 3))]
    assert run(build_app, ["compress", str(file), "--dry-run", "-o", str(tmp_path / "model.birdie")]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "add -o FILE.birdie, or --dry-run"),
        (["--dry-run", "--budget", "0"], "from 1 up"),
    ],
)
def test_what_has_no_forecast_is_said(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": rough(8, 8)}, file)
    assert run(build_app, ["compress", str(file), *flags]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
