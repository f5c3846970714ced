"""A checkpoint with right digests and wrong contents is refused in one sentence, and an older one is taken."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from birdie.errors import WeightsError
from birdie.gpt.train.resuming import require_resumable
from birdie.gpt.train.settings import AverageSettings, BanditSettings, OptimizerSettings, TrainingTables
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import FILES, SUMS, TrainingCheckpoint, load_checkpoint
from tests.tiny_run import TinyBatches, save, tiny_model, tiny_settings, tiny_training

OPTIMIZERS = OptimizerSettings(newton_schulz_dtype="float32", muon_beta2=0.95)
EMA, BANDIT = AverageSettings("ema"), BanditSettings(every=2)
MATRIX, VECTOR = "blocks.0.attn.c_q.weight", "tok_emb.weight"


def start(resume: TrainingCheckpoint | None = None) -> Training:
    parts = tiny_model(), TinyBatches(), tiny_settings(), OPTIMIZERS
    return tiny_training(*parts, average=EMA, bandit=BANDIT, saved=resume)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 3 of a run with an average and a bandit."""
    folder = tmp_path_factory.mktemp("run")
    for step in (run := start()):
        if step.number in (2, 3):
            save(run, folder)
        if step.number == 3:
            break
    return folder


def require(checkpoint: TrainingCheckpoint) -> None:
    require_resumable(checkpoint, tiny_model(), TrainingTables(tiny_settings(), OPTIMIZERS, EMA, BANDIT))


def sign(path: Path) -> None:
    """Write the digests of a checkpoint anew."""
    lines = [f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}\n" for n in FILES if (path / n).exists()]
    (path / SUMS).write_text("".join(lines))


def copy_of(saved: Path, folder: Path) -> Path:
    """Copy the run's checkpoints; return the path of the newest."""
    for path in saved.rglob("*.*"):
        target = folder / path.relative_to(saved)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for path in folder.iterdir():
        sign(path)
    return folder / "step-00000003"


def test_a_sound_checkpoint_is_resumed_without_a_word(saved: Path) -> None:
    lines: list[str] = []
    checkpoint = load_checkpoint(saved, notify=lines.append, require=require)
    assert (checkpoint.step, lines) == (3, [])
    assert start(checkpoint).number == 3


def without(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {key: t for key, t in tensors.items() if not any(name in key for name in names)}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {**tensors, name: change(tensors[name]).contiguous()}


def plus(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {**tensors, name: tensor}


TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "no rng": ("rng", without("cpu")),
    "rng of another shape": ("rng", changed("cpu", lambda t: t[:-1])),
    "rng of garbage": ("rng", changed("cpu", lambda t: torch.full_like(t, 255))),
    "no optimizer state": ("optimizer", without("")),
    "no moments of a vector": ("optimizer", without(VECTOR)),
    "momentum of another shape": ("optimizer", changed(f"{MATRIX}/momentum_buffer", lambda t: t[1:])),
    "momentum that is not finite": ("optimizer", changed(f"{MATRIX}/momentum_buffer", lambda t: t / 0)),
    "steps to come": ("optimizer", changed(f"{VECTOR}/step", lambda t: t + 99)),
    "an unknown entry": ("optimizer", plus(f"{VECTOR}/max", torch.zeros(2))),
    "no weight": ("model", without(MATRIX)),
    "weight of another shape": ("model", changed(MATRIX, lambda t: t[1:])),
    "weight that is not finite": ("model", changed(MATRIX, lambda t: t * math.nan)),
    "no average": ("average", without("")),
    "negative terms": ("average", changed("ema/terms", lambda t: -t)),
    "an average without a weight": ("average", without(MATRIX)),
    "a second average": ("average", plus(f"swa/0/{MATRIX}", torch.zeros(2))),
    "an average that is not finite": ("average", changed(f"ema/0/{MATRIX}", lambda t: t * math.inf)),
}


def refused(folder: Path) -> None:
    """Check that the newest checkpoint is refused in one sentence and the older one is taken."""
    lines: list[str] = []
    assert load_checkpoint(folder, notify=lines.append, require=require).step == 2
    assert len(lines) == 1
    assert lines[0].startswith("warning: ")
    assert lines[0].endswith("; going back to step-00000002")
    assert "\n" not in lines[0]


@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors_under_right_digests_are_refused(case: str, saved: Path, tmp_path: Path) -> None:
    newest, (name, change) = copy_of(saved, tmp_path), TENSORS[case]
    path = newest / f"{name}.safetensors"
    save_file(change(load_file(path)), path)
    sign(newest)
    refused(tmp_path)
    for older in (tmp_path / "step-00000002").iterdir():
        older.unlink()
    with pytest.raises(WeightsError, match="has no other"):
        load_checkpoint(tmp_path, require=require)


def with_value(*keys: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        table = state
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value
        return state

    return change


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda _: [],
    "no loader": lambda state: {key: value for key, value in state.items() if key != "loader"},
    "no settings": lambda state: {key: value for key, value in state.items() if key != "settings"},
    "clock without end": with_value("clock_ms", value=10**400),
    "another format": with_value("format", value=99),
    "loader of text": with_value("loader", value="abc"),
    "settings that nest": with_value("settings", "matrix_lr", value={"a": 1}),
    "no average though it has one": with_value("averaged", value=False),
    "no bandit though it has one": with_value("bandit", value={}),
    "bandit with no such arm": with_value("bandit", "arms", value=[0, 99]),
    "bandit that is not finite": with_value("bandit", "squares", value=math.nan),
    "bandit of negative weights": with_value("bandit", "weight", value=[-1.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", STATES)
def test_wrong_values_under_right_digests_are_refused(case: str, saved: Path, tmp_path: Path) -> None:
    newest = copy_of(saved, tmp_path)
    path = newest / "state.json"
    path.write_text(json.dumps(STATES[case](json.loads(path.read_text()))))
    sign(newest)
    refused(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 99, b"[" * 100_000, b'{"step": ' + b"9" * 5000, b'{"step"', b"\xff\xfe"]
)
def test_a_state_that_is_no_json_is_refused(content: bytes, saved: Path, tmp_path: Path) -> None:
    newest = copy_of(saved, tmp_path)
    (newest / "state.json").write_bytes(content)
    sign(newest)
    refused(tmp_path)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to nowhere": lambda path: path.symlink_to("elsewhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["state.json", SUMS])
def test_a_file_that_is_none_is_never_opened(kind: str, name: str, saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path) / name
    path.unlink()
    SPECIAL[kind](path)
    refused(tmp_path)


def test_an_optimizer_state_has_every_parameter() -> None:
    """One without a gradient as well, whose state is that before its first step."""
    model = tiny_model()
    model.unused = torch.nn.Parameter(torch.ones(3))
    groups = model.parameter_groups()
    model.parameter_groups = lambda: {**groups, "unused": "scalars"}  # type: ignore[method-assign]
    run = tiny_training(model, TinyBatches(), tiny_settings(iterations=1), OPTIMIZERS)
    assert run.checkpoint().optimizer == {}
    list(run)
    checkpoint = run.checkpoint()
    assert not checkpoint.optimizer["unused/exp_avg"].any()
    require_resumable(checkpoint, model, TrainingTables(tiny_settings(), OPTIMIZERS))
