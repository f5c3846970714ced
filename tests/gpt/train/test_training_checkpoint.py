"""A checkpoint holds everything: a resumed run is bit-identical, even after kill -9."""

import dataclasses
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.data_order import Order
from birdie.gpt.data.shards import write_shard
from birdie.gpt.model.gpt import GPT
from birdie.gpt.train.loop import rng_state, set_rng_state
from birdie.gpt.train.settings import OptimizerSettings
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import (
    FILES,
    SUMS,
    TrainingCheckpoint,
    checkpoint_paths,
    load_checkpoint,
    remove_newer,
    require_same_checkpoint,
    save_checkpoint,
)
from birdie.system.distributed import World
from tests.forked import Program
from tests.kills import kill_at_each_call
from tests.tiny_run import CHUNK_TOKENS, OPTIMIZERS, VOCAB, TinyBatches, save, tiny_model, tiny_settings, tiny_training

ITERATIONS = 30
SHORT = {"iterations": ITERATIONS, "accumulation": 2, "train_batch_tokens": 2 * CHUNK_TOKENS}


def start(folder: Path | None = None, optimizers: OptimizerSettings = OPTIMIZERS, **changes: Any) -> Training:
    """Start a run, or resume the checkpoint in `folder` with a model of other initial weights."""
    settings = tiny_settings(**(SHORT | changes))
    if folder is None:
        return tiny_training(tiny_model(), TinyBatches(), settings, optimizers)
    return tiny_training(tiny_model(seed=5), TinyBatches(), settings, optimizers, saved=load_checkpoint(folder))


def curve(run: Training) -> dict[int, float]:
    return {step.number: step.loss for step in run}


@pytest.mark.parametrize(("order", "warmup_steps"), [("sequential", 2), ("shuffled", 0), ("coprime", 2)])
def test_a_resumed_run_continues_in_the_shards(order: Order, warmup_steps: int, tmp_path: Path) -> None:
    """The real loader is ahead of the run by its prefetched batches, which must not be skipped."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 3000, dtype=np.uint16)
    for index, part in enumerate(np.split(tokens, [1000])):
        write_shard(tmp_path / f"fineweb_train_{index:06d}.bin", part)
    settings = tiny_settings(warmup_steps=warmup_steps, iterations=6)

    def train(model: GPT, resume: TrainingCheckpoint | None = None) -> dict[int, float]:
        batches = Batches(
            sorted(tmp_path.glob("*.bin")),
            batch_tokens=settings.train_batch_tokens,
            seq_len=settings.train_seq_len,
            accumulation=settings.accumulation,
            order=order,
        )
        curve = {}
        for step in (run := tiny_training(model, batches, settings, saved=resume)):
            curve[step.number] = step.loss
            if step.number == 3 and resume is None:
                save(run, tmp_path / "run")
        batches.close()
        return curve

    losses = train(tiny_model())
    resumed = train(tiny_model(seed=5), load_checkpoint(tmp_path / "run"))
    assert resumed == {number: loss for number, loss in losses.items() if number > 3}


def test_after_kill_9_the_curve_is_bit_identical(tmp_path: Path) -> None:
    """The process saves after every step and is killed at an arbitrary moment."""
    with Program("-m", "tests.gpt.train.test_training_checkpoint", str(tmp_path)) as program:
        while "5\n" not in program.stdout:
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
    checkpoint = load_checkpoint(tmp_path)
    assert 5 <= checkpoint.step < ITERATIONS
    losses = curve(start())
    assert curve(start(tmp_path)) == {number: loss for number, loss in losses.items() if number > checkpoint.step}


def test_under_a_cap_the_saved_clock_continues(tmp_path: Path) -> None:
    run = start(max_wallclock_seconds=1000)
    steps = iter(run)
    first = [next(steps) for _ in range(3)]
    save(run, tmp_path)
    resumed = next(iter(start(tmp_path, max_wallclock_seconds=1000)))
    assert resumed.number == 4
    assert resumed.train_ms > first[-1].train_ms


def test_a_finished_run_has_no_more_steps(tmp_path: Path) -> None:
    run = start(iterations=3)
    curve(run)
    save(run, tmp_path)
    assert curve(start(tmp_path, iterations=3)) == {}


def test_changed_settings_are_reported(tmp_path: Path) -> None:
    save(start(), tmp_path)
    lines: list[str] = []
    changed = OptimizerSettings(matrix_lr=0.5, newton_schulz_dtype="float32")
    resume = load_checkpoint(tmp_path)
    settings = tiny_settings(**SHORT)
    tiny_training(tiny_model(), TinyBatches(), settings, changed, saved=resume, notify=lines.append)
    assert lines == ["resuming with matrix_lr = 0.5; the checkpoint was trained with 0.02"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    run = start(iterations=4)
    for _ in run:
        save(run, tmp_path, keep=keep)
    save(run, tmp_path, keep=keep)  # the same step again never overwrites the complete one
    names = ["step-00000004-1", "step-00000003", "step-00000002"][:keep]
    assert [path.name for path in checkpoint_paths(tmp_path)] == names
    assert len(list(tmp_path.iterdir())) == keep
    assert load_checkpoint(tmp_path).step == 4


def test_a_run_that_goes_back_drops_the_later_checkpoints(tmp_path: Path) -> None:
    fresh = start().checkpoint()
    for step in (1, 2, 9):
        save_checkpoint(tmp_path, dataclasses.replace(fresh, step=step), keep=3)
    save_checkpoint(tmp_path, dataclasses.replace(fresh, step=3))
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-00000003", "step-00000002"]


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(iterations=3)
    steps = iter(run)
    next(steps)
    save(run, tmp_path)
    next(steps)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("birdie.system.tensor_files.save_file", no_space)
    with pytest.raises(OutputError, match="no space left"):
        save(run, tmp_path)
    assert load_checkpoint(tmp_path).step == 1


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no checkpoint in"):
        load_checkpoint(tmp_path)


def two_checkpoints(folder: Path, state: TrainingCheckpoint | None = None) -> Path:
    """Save checkpoints of steps 1 and 2, with an average; return the path of the newer one."""
    state = state or start().checkpoint()
    average = {"ema/0/x": torch.arange(4.0)}
    for step in (1, 2):
        path = save_checkpoint(folder, dataclasses.replace(state, step=step, average=average))
    return path


def damaged_copies(data: bytes) -> Iterator[bytes]:
    """Yield copies with one flipped bit, at both ends, in the header and in between, then shorter and longer ones."""
    generator = np.random.default_rng(0)
    for position in {0, len(data) - 1, *generator.integers(0, len(data), 24).tolist()}:
        copy = bytearray(data)
        copy[position] ^= 1 << int(generator.integers(8))
        yield bytes(copy)
    yield from (b"", data[:-1], data[: len(data) // 2], data + b"\0")


@pytest.mark.parametrize("file", [*FILES, SUMS])
def test_a_damaged_checkpoint_is_left_out_with_a_warning(file: str, tmp_path: Path) -> None:
    path = two_checkpoints(tmp_path) / file
    data = path.read_bytes()
    for copy in damaged_copies(data):
        path.write_bytes(copy)
        lines: list[str] = []
        assert load_checkpoint(tmp_path, notify=lines.append).step == 1
        assert len(lines) == 1
        assert "step-00000002 is damaged" in lines[0]
        assert lines[0].endswith("going back to step-00000001")
    path.unlink()
    assert load_checkpoint(tmp_path).step == 1
    path.write_bytes(data)
    assert load_checkpoint(tmp_path, notify=lines.append).step == 2


def test_without_an_undamaged_checkpoint_there_is_one_error(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for path in tmp_path.glob("step-*/rng.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(WeightsError, match=r"step-00000002 is damaged: rng.safetensors .* no other") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_checkpoints_that_were_left_out_are_removed_before_the_run_goes_on(tmp_path: Path) -> None:
    (two_checkpoints(tmp_path) / "state.json").unlink()
    remove_newer(load_checkpoint(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("step", "clock"), [(-1, 0.0), (3, -1.0), (3, math.nan), (3, math.inf)])
def test_a_checkpoint_that_contradicts_itself_is_refused(step: int, clock: float, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, dataclasses.replace(start().checkpoint(), step=3, clock_ms=clock))
    if step < 0:
        path.rename(tmp_path / "step-00000009")
    with pytest.raises(WeightsError, match="contradicts itself: it says step 3"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_without_digests_is_damaged(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, start().checkpoint())
    (path / SUMS).unlink()
    with pytest.raises(WeightsError, match="SHA256SUMS is missing"):
        load_checkpoint(tmp_path)


def test_the_digests_are_those_of_sha256sum(tmp_path: Path) -> None:
    if (program := shutil.which("sha256sum")) is None:
        pytest.skip("sha256sum is not installed")
    subprocess.run(
        [program, "--check", "--strict", SUMS], cwd=two_checkpoints(tmp_path), check=True, capture_output=True
    )


def save_third(folder: Path, state: TrainingCheckpoint) -> None:
    save_checkpoint(folder, dataclasses.replace(state, step=3))


@pytest.mark.slow
def test_a_kill_at_each_call_of_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """The next save removes all that was left."""
    weights = {"w": torch.arange(4.0)}
    folder, state = tmp_path / "checkpoints", dataclasses.replace(start().checkpoint(), weights=weights, optimizer={})
    two_checkpoints(folder, state)
    steps = set()
    for _ in kill_at_each_call(save_third, folder, state):
        lines: list[str] = []
        loaded = load_checkpoint(folder, notify=lines.append)
        steps.add(loaded.step)
        assert lines == []
        assert all(torch.equal(tensor, loaded.weights[name]) for name, tensor in state.weights.items())
        save_checkpoint(folder, dataclasses.replace(state, step=4))
        assert len(list(folder.iterdir())) == len(checkpoint_paths(folder)) == 2
        shutil.rmtree(folder)
        two_checkpoints(folder, state)
    assert steps == {2, 3}


@pytest.mark.parametrize(
    ("change", "tensor"),
    [({"num_layers": 2}, "'blocks.2"), ({"vocab_size": 31}, "'tok_emb.weight'")],
)
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, int], tensor: str, tmp_path: Path) -> None:
    save(start(), tmp_path)
    with pytest.raises(WeightsError, match=tensor):
        tiny_training(tiny_model(**change), TinyBatches(), tiny_settings(), saved=load_checkpoint(tmp_path))


class Different(World):
    """A world whose other rank sees no checkpoint."""

    def all_gather_strings(self, value: str) -> list[str]:
        return [value, "none"]


def test_ranks_that_see_different_checkpoints_do_not_resume(tmp_path: Path) -> None:
    checkpoint = TrainingCheckpoint(
        step=8, clock_ms=1.0, weights={}, optimizer={}, rng={}, loader={}, settings={}, about={}
    )
    require_same_checkpoint(checkpoint, tmp_path, World())
    require_same_checkpoint(None, tmp_path, Different(1, 2))
    with pytest.raises(ConfigError, match=r"rank 0 .* step 8 .* rank 1 none"):
        require_same_checkpoint(checkpoint, tmp_path, Different(0, 2))


def test_the_generator_of_a_gpu_that_the_run_does_not_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this would start CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refuse)
    states = rng_state()
    assert states.keys() == {"cpu"}
    set_rng_state({**states, "cuda": states["cpu"]})


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = start()
    for step in run:
        save(run, Path(sys.argv[1]))
        sys.stdout.write(f"{step.number}\n")
        sys.stdout.flush()


def test_the_generator_of_the_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[torch.Tensor] = []
    state = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    set_rng_state(rng_state())
    assert [*map(torch.equal, restored, [state])] == [True]
