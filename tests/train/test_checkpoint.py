"""A checkpoint holds everything: training goes on bit by bit as if it had never stopped, even after kill -9."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from birdie.data.batches import Batches
from birdie.data.sampler import Order
from birdie.data.shards import write_shard
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.train.checkpoint import Checkpoint, load_checkpoint, require_alike, save_checkpoint
from birdie.train.groups import OptimizerSettings
from birdie.train.loop import Fit, fit
from tests.tiny_run import OPTIMIZERS, VOCAB, TinyBatches, tiny_model, tiny_settings

ITERATIONS = 40


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The number of threads decides the order of sums, so that the killed process and this one use the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(folder: Path | None = None, optimizers: OptimizerSettings = OPTIMIZERS, **changes: object) -> Fit:
    """A run from the beginning, or from the checkpoint in `folder` on a model with other initial weights."""
    settings = tiny_settings(**({"iterations": ITERATIONS} | changes))
    if folder is None:
        return fit(tiny_model(), TinyBatches(), settings, optimizers)
    return fit(tiny_model(seed=5), TinyBatches(), settings, optimizers, resume=load_checkpoint(folder))


def curve(run: Fit) -> dict[int, float]:
    return {step.number: step.loss for step in run}


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_resumed_run_is_bit_identical(warmup_steps: int, tmp_path: Path) -> None:
    run, whole = start(warmup_steps=warmup_steps), {}
    for step in run:
        whole[step.number] = step.loss
        if step.number == 15:
            run.save(tmp_path)
    resumed = start(tmp_path, warmup_steps=warmup_steps)
    assert curve(resumed) == {number: loss for number, loss in whole.items() if number > 15}
    a, b = run.state(), resumed.state()
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a.optimizer[name], b.optimizer[name]) for name in a.optimizer)
    assert a.loader == b.loader


@pytest.mark.parametrize(("order", "warmup_steps"), [("sequential", 2), ("shuffled", 0), ("coprime", 2)])
def test_a_resumed_run_reads_on_through_the_shards(order: Order, warmup_steps: int, tmp_path: Path) -> None:
    """The real loader is ahead of the run by what it prefetched: that must not be skipped."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 3000, dtype=np.uint16)
    for index, part in enumerate(np.split(tokens, [1000])):
        write_shard(tmp_path / f"fineweb_train_{index:06d}.bin", part)
    settings = tiny_settings(warmup_steps=warmup_steps, iterations=6)

    def go(model: GPT, resume: Checkpoint | None = None) -> dict[int, float]:
        batches = Batches(
            sorted(tmp_path.glob("*.bin")),
            batch_tokens=settings.train_batch_tokens,
            seq_len=settings.train_seq_len,
            accumulation=settings.accumulation,
            order=order,
        )
        losses = {}
        for step in (run := fit(model, batches, settings, OPTIMIZERS, resume=resume)):
            losses[step.number] = step.loss
            if step.number == 3 and resume is None:
                run.save(tmp_path / "run")
        batches.close()
        return losses

    whole = go(tiny_model())
    resumed = go(tiny_model(seed=5), load_checkpoint(tmp_path / "run"))
    assert resumed == {number: loss for number, loss in whole.items() if number > 3}


def test_after_kill_9_the_curve_is_bit_identical(tmp_path: Path) -> None:
    """The process saves after every step and is killed while it runs, wherever that hits it."""
    command = [sys.executable, "-m", "tests.train.test_checkpoint", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    for line in process.stdout:
        if int(line) == 10:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    checkpoint = load_checkpoint(tmp_path)
    assert 10 <= checkpoint.step < ITERATIONS
    whole = curve(start())
    assert curve(start(tmp_path)) == {number: loss for number, loss in whole.items() if number > checkpoint.step}


def test_under_a_cap_the_saved_clock_goes_on(tmp_path: Path) -> None:
    run = start(max_wallclock_seconds=1000)
    steps = iter(run)
    before = [next(steps) for _ in range(3)]
    run.save(tmp_path)
    resumed = next(iter(start(tmp_path, max_wallclock_seconds=1000)))
    assert resumed.number == 4
    assert resumed.train_ms > before[-1].train_ms


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


def test_what_the_caller_notes_comes_back(tmp_path: Path) -> None:
    about = {"tokenizer": "abc", "model": {"num_layers": 3, "tied": True, "softcap": None}}
    fit(tiny_model(), TinyBatches(), tiny_settings(), OPTIMIZERS, about=about).save(tmp_path)
    assert load_checkpoint(tmp_path).about == about


def test_only_the_latest_checkpoint_is_kept(tmp_path: Path) -> None:
    run = start(iterations=3)
    (tmp_path / ".step-00000009.abc.part").mkdir()  # what a killed writer leaves
    for _ in run:
        run.save(tmp_path)
    run.save(tmp_path)  # the same step again never writes over the good one
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000003-1"]
    assert load_checkpoint(tmp_path).step == 3


def test_a_failed_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_checkpoint_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no checkpoint in"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "", "step-00000001/.."])
def test_the_pointer_cannot_lead_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(name)
    with pytest.raises(WeightsError, match="does not name a checkpoint"):
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


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, start().state()) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(WeightsError, match="format 99"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_layers": 2}, "differ in tensor 'blocks.2"), ({"vocab_size": 31}, "'tok_emb.weight' has shape")],
)
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, int], message: str, tmp_path: Path) -> None:
    start().save(tmp_path)
    shape = {"vocab_size": 32, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
    model = GPT(GPTConfig(**(shape | change)))
    with pytest.raises(WeightsError, match=message):
        fit(model, TinyBatches(), tiny_settings(), OPTIMIZERS, resume=load_checkpoint(tmp_path))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = start()
    for step in run:
        run.save(Path(sys.argv[1]))
        sys.stdout.write(f"{step.number}\n")
        sys.stdout.flush()


class Seeing(World):
    """Ranks of which one sees another checkpoint, or none."""

    def all_gather_strings(self, value: str) -> list[str]:
        return [value, "none"]


def test_ranks_that_see_different_checkpoints_do_not_go_on(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=8, clock_ms=1.0, weights={}, optimizer={}, rng={}, loader={}, settings={}, about={})
    require_alike(checkpoint, tmp_path, World())
    require_alike(None, tmp_path, Seeing(1, 2))
    with pytest.raises(ConfigError, match=r"rank 0 finds one of step 8 .* rank 1 none; put the run folder where all"):
        require_alike(checkpoint, tmp_path, Seeing(0, 2))
