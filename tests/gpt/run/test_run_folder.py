"""A run folder belongs to one process at a time, and a damaged checkpoint costs a run no more than its interval."""

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.chain.chain_rows import find_link, survey
from birdie.chain.link_content import restore
from birdie.cli import build_app
from birdie.cli.console import run as run_command
from birdie.errors import BirdieError, ConfigError, OutputError, WeightsError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.events import Event, Saved, Started
from birdie.gpt.run.float_weights import load_float
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.program import export
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import DataSettings, Recipe, RunSettings
from birdie.gpt.run.run_folder import CHAIN, LOGGED, METRICS, Metrics
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.loop import Step
from birdie.gpt.train.settings import TrainSettings
from birdie.gpt.train.training_checkpoint import FILES, SUMS, checkpoint_paths, load_checkpoint
from birdie.system.context import Context
from birdie.system.distributed import World
from birdie.system.structured import read_steps
from tests.ranks import run_in_process_group

CPU = torch.device("cpu")

LENGTH = 32


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return read_steps(folder / METRICS, LOGGED).lines


def tiny_recipe(root: Path) -> Recipe:
    list(prepare(file_corpus([Path(__file__)], documents="line"), tokenizer="bytes", root=root))
    return Recipe(
        data=DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(vocab_size=260, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1),
        train=TrainSettings(
            iterations=9,
            warmup_steps=0,
            train_batch_tokens=4 * LENGTH,
            train_seq_len=LENGTH,
            accumulation=2,
            max_wallclock_seconds=0,
            compute_dtype="float32",
        ),
        validation=ValidationSettings(every=0, max_tokens=500),
        run=RunSettings(checkpoint_every=2),
        device="cpu",
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(tmp_path_factory.mktemp("data"))


def train(recipe: Recipe, folder: Path, log: list[str], *, resume: bool = False, stop_after: int = 0) -> list[Event]:
    run = Run(recipe, folder, Context(CPU, notify=log.append))
    return list(run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after))


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(recipe, folder, [])
    return folder


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "run"))


def damage(checkpoint: Path) -> None:
    """Flip the highest bit of an exponent of the weights."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


def test_a_damaged_checkpoint_costs_its_interval_and_changes_no_weight(
    recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    uninterrupted = GPT(recipe.model)
    load_float(finished, uninterrupted)
    folder, log = tmp_path / "stopped", list[str]()
    train(recipe, folder, log, stop_after=6)
    newest, older = checkpoint_paths(folder / "checkpoints")
    damage(newest)
    resumed = Run(recipe, folder, Context(CPU, notify=log.append))
    begun = resumed.train(resume=True)
    started = next(event for event in begun if isinstance(event, Started))
    assert started.resumed_at == 4
    assert checkpoint_paths(folder / "checkpoints") == [older], "a damaged one must not be kept for a good one"
    assert [line for line in log if newest.name in line and "going back to step-00000004" in line]
    list(begun)
    for name, weight in uninterrupted.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    for checkpoint in checkpoint_paths(folder / "checkpoints"):
        damage(checkpoint)
    with pytest.raises(WeightsError, match="has no other"):
        train(recipe, folder, log, resume=True)


def test_the_recipe_says_how_many_checkpoints_are_kept(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, run=RunSettings(checkpoint_every=1, keep_checkpoints=3))
    saved = [event.step for event in train(recipe, tmp_path, []) if isinstance(event, Saved)]
    assert saved == list(range(1, 10))
    assert [path.name for path in checkpoint_paths(tmp_path / "checkpoints")] == [
        f"step-{step:08d}" for step in (9, 8, 7)
    ]
    with pytest.raises(ConfigError, match="keep_checkpoints is 0"):
        RunSettings(keep_checkpoints=0)


def with_chain(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, run=RunSettings(checkpoint_every=2, checkpoint_deltas=True))


def linked_steps(folder: Path) -> list[int | None]:
    rows = survey(folder / CHAIN)
    assert not any(row.damage for row in rows)
    return [row.step for row in rows]


def test_a_chain_keeps_every_checkpoint_and_a_run_goes_on_from_any(recipe: Recipe, tmp_path: Path) -> None:
    first, second, log = tmp_path / "first", tmp_path / "second", list[str]()
    train(with_chain(recipe), first, log)
    assert linked_steps(first) == [2, 4, 6, 8, 9]
    assert len([line for line in log if "bytes in" in line]) == 5
    for path in checkpoint_paths(first / "checkpoints"):
        restore(first / CHAIN / f"{path.name}.birdie", tmp_path / path.name)
        for name in (*FILES[:3], "state.json", SUMS):
            assert (tmp_path / path.name / name).read_bytes() == (path / name).read_bytes()
    restore(find_link(first / CHAIN, 4), second / "checkpoints" / "step-00000004")
    resumed = [event for event in train(with_chain(recipe), second, [], resume=True) if isinstance(event, Step)]
    assert [event.number for event in resumed] == [5, 6, 7, 8, 9]
    assert {line["step"]: line["loss"] for line in read_metrics(second)}.items() <= {
        line["step"]: line["loss"] for line in read_metrics(first)
    }.items()
    assert linked_steps(second) == [4, 6, 8, 9]


def test_a_checkpoint_whose_link_was_not_finished_gets_one_when_the_run_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    train(with_chain(recipe), tmp_path, [], stop_after=6)
    (tmp_path / CHAIN / "step-00000006.birdie").unlink()
    kept = (tmp_path / CHAIN / "step-00000004.birdie").stat().st_mtime_ns
    train(with_chain(recipe), tmp_path, [], resume=True)
    assert linked_steps(tmp_path) == [2, 4, 6, 8, 9]
    assert (tmp_path / CHAIN / "step-00000004.birdie").stat().st_mtime_ns == kept


def test_a_run_that_goes_back_replaces_the_steps_that_it_takes_again(recipe: Recipe, tmp_path: Path) -> None:
    train(with_chain(recipe), tmp_path, [], stop_after=7)
    assert linked_steps(tmp_path) == [2, 4, 6, 7]
    for path in checkpoint_paths(tmp_path / "checkpoints"):
        shutil.rmtree(path)
    with pytest.raises(ConfigError, match="birdie decompress"):
        train(with_chain(recipe), tmp_path, [], resume=True)
    restore(find_link(tmp_path / CHAIN, 4), tmp_path / "checkpoints" / "step-00000004")
    log: list[str] = []
    train(with_chain(recipe), tmp_path, log, resume=True, stop_after=5)
    assert linked_steps(tmp_path) == [2, 4, 5]
    assert any("removed 2 links of steps 6 to 7" in line for line in log)


def test_a_chain_that_cannot_be_written_does_not_end_the_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OutputError("no space left on device")

    monkeypatch.setattr("birdie.chain.chain_folder.write_link", fail)
    log: list[str] = []
    saved = [event.step for event in train(with_chain(recipe), tmp_path, log) if isinstance(event, Saved)]
    assert saved == [2, 4, 6, 8, 9]
    assert any("no space left" in line for line in log)


def hold(recipe: Recipe, folder: Path, ready: Callable[[], None], release: Callable[[], bool]) -> None:
    training = Run(recipe, folder).train()
    next(training)
    ready()
    release()
    os.abort()


def test_a_second_process_is_refused_until_the_first_ends_in_any_way(recipe: Recipe, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ready, release = context.Event(), context.Event()
    first = context.Process(target=hold, args=(recipe, tmp_path, ready.set, release.wait))
    first.start()
    assert ready.wait(120)
    contents = sorted(tmp_path.rglob("*"))
    second = Run(recipe, tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {first.pid} on .* since 2"):
        next(second.train())
    assert sorted(tmp_path.rglob("*")) == contents
    (tmp_path / ".birdie-dead.part").mkdir()
    release.set()
    first.join()
    assert first.exitcode != 0
    training = second.train()
    next(training)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".lock.holder", "environment.json"]
    training.close()
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


def test_a_process_can_train_again_once_the_run_ended_or_was_closed(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path)
    with run.locked():
        training = run.train()  # does not wait for itself
        next(training)
        training.close()
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            next(Run(recipe, tmp_path).train())
    train(recipe, tmp_path, [], stop_after=2)
    assert [event.resumed_at for event in train(recipe, tmp_path, [], resume=True) if isinstance(event, Started)] == [2]
    assert not (tmp_path / ".lock").exists()


def refused_on_all(world: World, folder: Path) -> None:
    """Rank 0 alone meets the lock, rank 1 alone a damaged checkpoint; each ends both ranks."""
    recipe = Recipe.from_dict(torch.load(folder / "recipe.pt"))
    run = Run(recipe, folder / "run", Context(CPU, world))
    if world.is_main:
        with Run(recipe, folder / "run").locked():
            with pytest.raises(ConfigError, match="in use by"):
                next(run.train())
            world.barrier()
    else:
        with pytest.raises(ConfigError, match="in use by"):
            next(run.train())
        world.barrier()
        run.folder = folder / "other"
    world.barrier()
    with pytest.raises(WeightsError if world.rank else ConfigError, match="no other" if world.rank else "another rank"):
        next(run.train(resume=True))


def test_all_ranks_end_if_one_cannot_start(recipe: Recipe, tmp_path: Path) -> None:
    """The other run folder of rank 1 stands for a damaged copy on another node."""
    train(recipe, tmp_path / "run", [], stop_after=2)
    train(recipe, tmp_path / "other", [], stop_after=2)
    damage(checkpoint_paths(tmp_path / "other" / "checkpoints")[0])
    torch.save(recipe.to_dict(), tmp_path / "recipe.pt")
    run_in_process_group(refused_on_all, 2, tmp_path)


def test_finished_run_leaves_what_another_export_needs(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path / "run")
    list(run.train())
    run.export()
    again = run.work.new_model()
    trained = load_float(tmp_path / "run", again)
    export(run.work, again, trained, tmp_path / "again.birdie")
    assert (tmp_path / "again.birdie").read_bytes() == (tmp_path / "run" / "model.birdie").read_bytes()
    assert trained == dataclasses.replace(run.trained, never_began=())


def test_metrics_of_a_resumed_run_are_those_of_one_that_was_not_stopped(
    recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    train(recipe, tmp_path / "two", [], stop_after=5)
    train(recipe, tmp_path / "two", [], resume=True)
    losses = [
        [(line["step"], line["loss"]) for line in read_metrics(folder)] for folder in (finished, tmp_path / "two")
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, 10))
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert len(environment["starts"]) == 2
    assert environment["seed"] == recipe.train.seed


@pytest.fixture(scope="module")
def stopped(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with validations that was stopped after step 5."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(validating(recipe), folder, [], stop_after=5)
    (folder / "log.txt").write_text("a log\n")
    return folder


def validating(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, validation=ValidationSettings(every=2, max_tokens=100))


@pytest.mark.parametrize(
    ("name", "damage", "kept"),
    [
        ("metrics.jsonl", lambda data: data.replace(b'{"step": 3', b'{"step": \xff'), [1, 2, 6]),
        ("metrics.jsonl", lambda data: data.replace(b'{"step": 3', b'{"step": 2'), [1, 2, 6]),
        ("metrics.jsonl", lambda data: bytes(len(data)), [6]),
        ("history.jsonl", lambda data: data.replace(b'"step": 2', b'"step"; 2'), [0]),
        ("history.jsonl", lambda _: b"[" * 9000, []),
        ("environment.json", lambda data: data.replace(b"starts", b"st\xe1rts"), None),
        ("environment.json", lambda _: b"[]", None),
        ("recipe.toml", lambda data: data.replace(b"[train]", b"[train\x00"), None),
    ],
)
def test_a_damaged_text_file_costs_its_lines_and_is_kept(
    name: str, damage: Callable[[bytes], bytes], kept: list[int] | None, stopped: Path, recipe: Recipe, tmp_path: Path
) -> None:
    """The run goes on, and whoever wants to repair the file still has it."""
    folder, log = copied(stopped, tmp_path), list[str]()
    damaged = damage((folder / name).read_bytes())
    (folder / name).write_bytes(damaged)
    train(validating(recipe), folder, log, resume=True, stop_after=6)
    (warning,) = [line for line in log if name in line and line.startswith("warning: ")]
    assert "is damaged" in warning
    assert warning.endswith(f"the damaged file is kept as {name}.damaged")
    assert (folder / f"{name}.damaged").read_bytes() == damaged
    if kept is not None:
        required = ("train_ms", "loss") if name == "metrics.jsonl" else ("train_ms", "bpb")
        lines, problem = read_steps(folder / name, required)
        assert ([line["step"] for line in lines], problem) == (kept, "")


@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl", "environment.json", "recipe.toml"])
def test_a_pipe_in_a_run_folder_ends_a_resumed_run_in_one_sentence(
    name: str, stopped: Path, recipe: Recipe, tmp_path: Path
) -> None:
    folder = copied(stopped, tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BirdieError, match=rf"{name} is|{name}: it is not a regular file"):
        train(validating(recipe), folder, [], resume=True)


def test_a_history_that_cannot_be_written_does_not_end_the_training(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutputError("no space left on device")

    monkeypatch.setattr("birdie.gpt.run.history.record", full)
    log: list[str] = []
    train(validating(recipe), tmp_path, log)
    assert sum("goes on without a file of its folder: no space left" in line for line in log) == 6
    assert checkpoint_paths(tmp_path / "checkpoints")[0].name == "step-00000009"


def test_a_full_disk_under_the_float_weights_leaves_the_last_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; it is set for the last file alone."""
    log = list[str]()
    run = Run(recipe, tmp_path, Context(CPU, notify=log.append))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for event in run.train():
            if isinstance(event, Saved) and event.step == 9:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    (line,) = [line for line in log if "float.safetensors" in line]
    assert "goes on without a file of its folder: cannot write" in line
    assert "\n" not in line
    assert not (tmp_path / "float.safetensors").exists()
    assert load_checkpoint(tmp_path / "checkpoints").step == 9
    assert run.export().bytes


def test_a_line_that_does_not_fit_on_the_disk_damages_no_other(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, -1, lambda _: None)
    step = Step(1, 2.0, 3.0, 1.0, 0.9, 64, 1.0, stopping=False)
    metrics.record(step)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            metrics.record(dataclasses.replace(step, number=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    metrics.record(dataclasses.replace(step, number=3))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def rewritten(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of a checkpoint and write its digests anew."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != SUMS)
    lines = {name: f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names}
    (checkpoint / SUMS).write_text("".join(lines[name] for name in FILES if name in lines))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["loader"].update(spans=10**30),
        lambda state: state["loader"].update(spans=-8),
        lambda state: state["loader"].update(spans=True),
        lambda state: state["loader"].update(spans="8"),
        lambda state: state["loader"].clear(),
        lambda state: state["about"].update({"train.seed": "x" * 9999}),
    ],
)
def test_a_checkpoint_of_absurd_values_costs_its_interval(
    change: Callable[[dict[str, Any]], object], stopped: Path, recipe: Recipe, tmp_path: Path
) -> None:
    folder, log = copied(stopped, tmp_path), list[str]()
    rewritten(folder / "checkpoints" / "step-00000005", change)
    begun = Run(validating(recipe), folder, Context(CPU, notify=log.append)).train(resume=True)
    assert [event.resumed_at for event in itertools.islice(begun, 2) if isinstance(event, Started)] == [4]
    begun.close()
    (warning,) = [line for line in log if "going back to step-00000004" in line]
    assert len(warning) < 1000


def test_the_only_checkpoint_is_not_removed_for_being_no_folder(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000009").write_text("mine")
    with pytest.raises(WeightsError, match=r"step-00000009 is damaged: it is no folder"):
        train(recipe, tmp_path, [], resume=True)
    assert (tmp_path / "checkpoints" / "step-00000009").read_text() == "mine"


def test_a_flipped_bit_in_the_float_weights_is_found(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    path = folder / "float.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"float\.safetensors cannot be read \(its weights are not those"):
        load_float(folder, GPT(recipe.model))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(WeightsError, match="named pipe"):
        load_float(folder, GPT(recipe.model))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CHANGES: dict[str, dict[str, Any]] = {
    "train.iterations": {"train": {"iterations": 5}},
    "train.max_wallclock_seconds": {"train": {"max_wallclock_seconds": 1e-3, "iterations": 20}},
    "train.warmdown_iters": {"train": {"warmdown_iters": 3}},
    "optimizer.matrix_lr": {"optimizer": {"matrix_lr": 0.5}},
    "average.kind": {"average": {"kind": "ema"}},
    "qat.bits": {"qat": {"bits": 6}},
    "validation.every": {"validation": {"every": 3}},
    "model.logit_softcap": {"model": {"logit_softcap": 5.0}},
}


def changed(recipe: Recipe, tables: dict[str, dict[str, Any]]) -> Recipe:
    values = recipe.to_dict()
    for table, settings in tables.items():
        values[table] |= settings
    return Recipe.from_dict(values)


@pytest.mark.parametrize("setting", CHANGES)
def test_a_finished_run_claims_no_other_settings(recipe: Recipe, finished: Path, setting: str) -> None:
    state, other = contents(finished), changed(recipe, CHANGES[setting])
    with pytest.raises(ConfigError, match=f"the run in .* is finished.*{setting} ") as error:
        train(other, finished, [], resume=True)
    assert "\n" not in str(error.value)
    assert contents(finished) == state


def test_a_finished_run_can_be_exported_and_scored_anew(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    other = changed(recipe, {"export": {"scheme": "int4"}, "evaluation": {"stride": 4}, "run": {"log_every": 1}})
    train(other, folder, [], resume=True)
    assert load_recipe(folder / "recipe.toml") == other
    assert "changed" not in json.loads((folder / "environment.json").read_text())


def test_a_finished_run_can_be_made_longer_and_says_so(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    longer = changed(recipe, {"train": {"iterations": 11}})
    with pytest.raises(ConfigError, match=r"optimizer\.matrix_lr"):
        train(changed(longer, CHANGES["optimizer.matrix_lr"]), folder, [], resume=True)
    train(longer, folder, [], resume=True)
    changes = json.loads((folder / "environment.json").read_text())["changed"]
    assert changes == [{"after_step": 9, "setting": "train.iterations", "from": 9, "to": 11}]


def test_the_command_leaves_a_finished_run_as_it_is(finished: Path) -> None:
    state = contents(finished)
    tokens = ["train", str(finished / "recipe.toml"), "--folder", str(finished), "--resume"]
    assert run_command(build_app, [*tokens, "--optimizer.matrix-lr", "0.5"]) == 1
    assert contents(finished) == state


def test_a_run_that_goes_on_with_other_settings_says_so_for_good(recipe: Recipe, tmp_path: Path) -> None:
    log: list[str] = []
    train(recipe, tmp_path, [], stop_after=4)
    train(changed(recipe, CHANGES["optimizer.matrix_lr"]), tmp_path, log, resume=True, stop_after=6)
    assert "resuming with matrix_lr = 0.5; the checkpoint was trained with 0.04" in log
    train(changed(recipe, CHANGES["qat.bits"]), tmp_path, log, resume=True)
    assert "resuming with qat.bits = 6; the checkpoint was trained with None" in log
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert [(row["after_step"], row["setting"], row["to"]) for row in environment["changed"]] == [
        (4, "optimizer.matrix_lr", 0.5),
        (6, "optimizer.matrix_lr", recipe.optimizer.matrix_lr),
        (6, "qat.bits", 6),
    ]


def test_weights_of_another_model_are_refused(recipe: Recipe, finished: Path) -> None:
    wider = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, model_dim=64))
    with pytest.raises(WeightsError, match="another model"):
        load_float(finished, GPT(wider.model))


@pytest.mark.parametrize("damaged", [False, True])
def test_run_without_its_float_weights_cannot_be_restored(recipe: Recipe, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        (tmp_path / "float.safetensors").write_bytes(bytes(40))
    with pytest.raises(WeightsError, match=r"float\.safetensors"):
        load_float(tmp_path, GPT(recipe.model))


def test_a_replaced_run_is_not_resumed(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path, [], stop_after=6)
    replacing = Run(recipe, tmp_path, replace=True)
    begun = replacing.train()
    assert next(event for event in begun if isinstance(event, Started)).resumed_at == 0
    begun.close()
    assert checkpoint_paths(tmp_path / "checkpoints") == []
