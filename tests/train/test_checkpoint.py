"""A checkpoint holds everything: a resumed run is bit-identical, even after kill -9."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birdie.data.batches import Batches
from birdie.data.sampler import Order
from birdie.data.shards import write_shard
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.train.checkpoint import Checkpoint, load_checkpoint, require_same_checkpoint, save_checkpoint
from birdie.train.loop import Fit, fit
from birdie.train.optimizers import OptimizerSettings
from tests.tiny_run import OPTIMIZERS, VOCAB, TinyBatches, tiny_model, tiny_settings

ITERATIONS = 40


def start(folder: Path | None = None, optimizers: OptimizerSettings = OPTIMIZERS, **changes: Any) -> Fit:
    """Start a run, or resume the checkpoint in `folder` with a model of other initial weights."""
    settings = tiny_settings(**({"iterations": ITERATIONS} | changes))
    if folder is None:
        return fit(tiny_model(), TinyBatches(), settings, optimizers)
    return fit(tiny_model(seed=5), TinyBatches(), settings, optimizers, resume=load_checkpoint(folder))


def curve(run: Fit) -> dict[int, float]:
    return {step.number: step.loss for step in run}


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_resumed_run_is_bit_identical(warmup_steps: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"warmup_steps": warmup_steps, "iterations": 14}
    run, losses = start(**changes), {}
    for step in run:
        losses[step.number] = step.loss
        if step.number == 6:
            run.save(tmp_path)
    resumed = start(tmp_path, **changes)
    assert curve(resumed) == {number: loss for number, loss in losses.items() if number > 6}
    a, b = run.state(), resumed.state()
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a.optimizer[name], b.optimizer[name]) for name in a.optimizer)
    assert a.loader == b.loader


@pytest.mark.parametrize(("order", "warmup_steps"), [("sequential", 2), ("shuffled", 0), ("coprime", 2)])
def test_a_resumed_run_continues_in_the_shards(order: Order, warmup_steps: int, tmp_path: Path) -> None:
    """The real loader is ahead of the run by its prefetched batches, which must not be skipped."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 3000, dtype=np.uint16)
    for index, part in enumerate(np.split(tokens, [1000])):
        write_shard(tmp_path / f"fineweb_train_{index:06d}.bin", part)
    settings = tiny_settings(warmup_steps=warmup_steps, iterations=6)

    def train(model: GPT, resume: Checkpoint | None = None) -> dict[int, float]:
        batches = Batches(
            sorted(tmp_path.glob("*.bin")),
            batch_tokens=settings.train_batch_tokens,
            seq_len=settings.train_seq_len,
            accumulation=settings.accumulation,
            order=order,
        )
        curve = {}
        for step in (run := fit(model, batches, settings, OPTIMIZERS, resume=resume)):
            curve[step.number] = step.loss
            if step.number == 3 and resume is None:
                run.save(tmp_path / "run")
        batches.close()
        return curve

    losses = train(tiny_model())
    resumed = train(tiny_model(seed=5), load_checkpoint(tmp_path / "run"))
    assert resumed == {number: loss for number, loss in losses.items() if number > 3}


def test_after_kill_9_the_curve_is_bit_identical(tmp_path: Path) -> None:
    """The process saves after every step and is killed at an arbitrary moment."""
    command = [sys.executable, "-m", "tests.train.test_checkpoint", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 10:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    checkpoint = load_checkpoint(tmp_path)
    assert 10 <= checkpoint.step < ITERATIONS
    losses = curve(start())
    assert curve(start(tmp_path)) == {number: loss for number, loss in losses.items() if number > checkpoint.step}


def test_under_a_cap_the_saved_clock_continues(tmp_path: Path) -> None:
    run = start(max_wallclock_seconds=1000)
    steps = iter(run)
    first = [next(steps) for _ in range(3)]
    run.save(tmp_path)
    resumed = next(iter(start(tmp_path, max_wallclock_seconds=1000)))
    assert resumed.number == 4
    assert resumed.train_ms > first[-1].train_ms


def test_a_finished_run_has_no_more_steps(tmp_path: Path) -> None:
    run = start(iterations=3)
    curve(run)
    run.save(tmp_path)
    assert curve(start(tmp_path, iterations=3)) == {}


def test_changed_settings_are_reported(tmp_path: Path) -> None:
    start().save(tmp_path)
    lines: list[str] = []
    changed = OptimizerSettings(matrix_lr=0.5, newton_schulz_dtype="float32")
    resume = load_checkpoint(tmp_path)
    settings = tiny_settings(iterations=ITERATIONS)
    fit(tiny_model(), TinyBatches(), settings, changed, resume=resume, notify=lines.append)
    assert lines == ["resuming with matrix_lr = 0.5; the checkpoint was trained with 0.02"]


def test_notes_of_the_caller_round_trip(tmp_path: Path) -> None:
    about = {"tokenizer": "abc", "model": {"num_layers": 3, "tied": True, "softcap": None}}
    fit(tiny_model(), TinyBatches(), tiny_settings(), OPTIMIZERS, about=about).save(tmp_path)
    assert load_checkpoint(tmp_path).about == about


def test_only_the_latest_checkpoint_is_kept(tmp_path: Path) -> None:
    run = start(iterations=3)
    (tmp_path / ".step-00000009.abc.part").mkdir()  # left by a killed writer
    for _ in run:
        run.save(tmp_path)
    run.save(tmp_path)  # the same step again never overwrites the complete one
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000003-1"]
    assert load_checkpoint(tmp_path).step == 3


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(iterations=3)
    steps = iter(run)
    next(steps)
    run.save(tmp_path)
    next(steps)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("birdie.train.checkpoint.save_file", no_space)
    with pytest.raises(OutputError, match="no space left"):
        run.save(tmp_path)
    assert load_checkpoint(tmp_path).step == 1


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no checkpoint in"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "", "step-00000001/.."])
def test_the_pointer_cannot_lead_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(name)
    with pytest.raises(WeightsError, match="latest"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_refused(file: str, damage: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, start().state()) / file
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, start().state()) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(WeightsError, match="format 99"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "tensor"),
    [({"num_layers": 2}, "'blocks.2"), ({"vocab_size": 31}, "'tok_emb.weight'")],
)
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, int], tensor: str, tmp_path: Path) -> None:
    start().save(tmp_path)
    with pytest.raises(WeightsError, match=tensor):
        fit(tiny_model(**change), TinyBatches(), tiny_settings(), OPTIMIZERS, resume=load_checkpoint(tmp_path))


class Different(World):
    """A world whose other rank sees no checkpoint."""

    def all_gather_strings(self, value: str) -> list[str]:
        return [value, "none"]


def test_ranks_that_see_different_checkpoints_do_not_resume(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=8, clock_ms=1.0, weights={}, optimizer={}, rng={}, loader={}, settings={}, about={})
    require_same_checkpoint(checkpoint, tmp_path, World())
    require_same_checkpoint(None, tmp_path, Different(1, 2))
    with pytest.raises(ConfigError, match=r"rank 0 .* step 8 .* rank 1 none"):
        require_same_checkpoint(checkpoint, tmp_path, Different(0, 2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = start()
    for step in run:
        run.save(Path(sys.argv[1]))
        sys.stdout.write(f"{step.number}\n")
        sys.stdout.flush()
