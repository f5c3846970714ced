"""A trial compares at equal time and bytes, keeps only what is significantly better, and can be repeated."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import BirdieError, ConfigError, DataError
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab.experiment import Experiment
from birdie.lab.run_ledger import RunRecord, read_run
from birdie.lab.trial import FIXED, Lab, Result, changed, decide

SEEDS = (5, 6, 7)


def small_recipe(**changes: Any) -> Recipe:
    recipe = Recipe()
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(recipe.train, iterations=40, max_wallclock_seconds=0.0, seed=SEEDS[0]),
        export=dataclasses.replace(recipe.export, budget="1MB"),
        **changes,
    )


class Trainer:
    """Stands for training: bits per byte that depend on the learning rate and the seed, written as a run folder."""

    def __init__(self) -> None:
        self.calls: list[Path] = []
        self.stop_at = math.inf

    def run(self, recipe: Recipe, folder: Path) -> RunRecord:
        if not (folder / "summary.json").is_file():
            self.calls.append(folder)
            if len(self.calls) == self.stop_at:
                raise KeyboardInterrupt
            rate, seed, steps = recipe.optimizer.matrix_lr, recipe.train.seed, recipe.train.last_step
            if rate > 1:
                raise DataError("the loss is no longer finite")
            noise = (seed * 7 % 5 + recipe.run.log_every * seed % 3) / 1000
            bpb = 2 + abs(math.log(rate / 0.05)) / 10 - steps / 1000 + noise + round(seed * rate * 1000) % 7 / 1e4
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.toml").write_text(recipe.to_toml())
            summary = {"steps": steps, "bytes": 999_000, "bpb_artifact": bpb, "evaluation": {"bpb": bpb}}
            (folder / "summary.json").write_text(json.dumps(summary))
        return read_run(folder)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stub = Trainer()
    monkeypatch.setattr(Experiment, "run", lambda lab, recipe, name: stub.run(recipe, lab.run_folder(name)))
    return stub


@pytest.fixture
def lab(trainer: Trainer, tmp_path: Path) -> Lab:
    assert not trainer.calls
    lab = Lab(tmp_path / "lab")
    with lab.locked():
        lab.start(small_recipe())
    return lab


def test_a_good_change_becomes_the_incumbent(lab: Lab, trainer: Trainer) -> None:
    incumbent = lab.incumbent()
    result = lab.trial("nearer to the best rate", ["matrix_lr=0.05"])
    assert (result.verdict, result.seeds) == ("keep", SEEDS)
    assert result.difference < 0
    assert result.p == result.p_better < 0.05
    assert lab.incumbent() == changed(incumbent, ["optimizer.matrix_lr=0.05"])
    assert load_recipe(lab.recipe_path) == lab.incumbent()  # the file serves `birdie train` as well
    with pytest.raises(ConfigError, match="equals the incumbent"):
        lab.trial("again", ["optimizer.matrix_lr=0.05"])
    runs = len(trainer.calls)
    lab.trial("too far", ["optimizer.matrix_lr=0.1"])
    assert len(trainer.calls) == runs + len(SEEDS)  # the new incumbent's runs are known


@pytest.mark.parametrize(
    ("change", "verdict"),
    [("matrix_lr=0.0001", "revert"), ("run.log_every=7", "undecided"), ("keep_checkpoints=3", "undecided")],
)
def test_a_bad_change_and_no_change_leave_the_incumbent(change: str, verdict: str, lab: Lab) -> None:
    incumbent = lab.incumbent()
    assert lab.trial("a hypothesis", [change]).verdict == verdict
    assert lab.incumbent() == incumbent


def test_results_go_into_table_and_diary_once(lab: Lab) -> None:
    results = [lab.trial("a # hypothesis", ["matrix_lr=0.0001"]) for _ in range(2)]
    results.append(lab.trial("another", ["matrix_lr=0.0001"], seeds=2))
    table, diary = lab.results(), (lab.folder / "diary.md").read_text()
    assert table == [results[0], results[2]]
    assert diary.count("\n- verdict: **revert**") == 2
    assert "optimizer.matrix_lr 0.04 → 0.0001" in diary
    assert Result.from_dict(json.loads(json.dumps(results[0].to_dict()))) == results[0]


def test_an_interrupted_trial_continues(lab: Lab, trainer: Trainer) -> None:
    trainer.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        lab.trial("stopped", ["matrix_lr=0.05"])
    assert lab.results() == []
    trainer.stop_at = math.inf
    assert lab.trial("stopped", ["matrix_lr=0.05"]).verdict == "keep"
    assert len(trainer.calls) == 2 * len(SEEDS) + 1  # one run was begun twice, none was finished twice


def test_one_seed_is_never_enough(lab: Lab) -> None:
    result = lab.trial("much better", ["matrix_lr=0.05"], seeds=1)
    assert (result.verdict, math.isnan(result.p)) == ("undecided", True)


@pytest.mark.parametrize("seconds", [0.0, 0.9])
def test_both_sides_end_by_the_same_steps_or_the_same_clock(seconds: float, trainer: Trainer, tmp_path: Path) -> None:
    recipe = small_recipe()
    capped = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, max_wallclock_seconds=seconds))
    lab = Lab(tmp_path)
    lab.start(capped)
    assert lab.incumbent() == capped
    result = lab.trial("deeper", ["num_layers=18"])
    assert result.by == ("time" if seconds else "steps")
    assert lab.trial("deeper", ["num_layers=18"], by="steps").by == "steps"
    settings = [read_run(Path(folder)).settings for folder in (*result.incumbent.runs, *result.candidate.runs)]
    assert [run["train.seed"] for run in settings] == [*SEEDS, *SEEDS]
    assert {run["export.budget"] for run in settings} == {"1MB"}
    assert {run["train.max_wallclock_seconds"] for run in settings} == {seconds}
    assert result.candidate.steps == (40, 40, 40)
    assert trainer.calls
    lab.start(capped)
    with pytest.raises(ConfigError, match="another incumbent"):
        lab.start(changed(recipe, ["matrix_lr=0.1"]))
    if not seconds:
        with pytest.raises(ConfigError, match="max_wallclock_seconds"):
            lab.trial("deeper", ["num_layers=18"], by="time")


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("optimizer.matrx_lr=1", "did you mean optimizer.matrix_lr"),
        ("layers=3", "num_layers"),
        ("matrix_lr", "KEY=VALUE"),
        ("matrix_lr=high", "'high'"),
        ("optimizer.matrix_lr=0.04", "equals the incumbent"),
        *((f"{key}=1", key) for key in FIXED),
    ],
)
def test_a_change_that_cannot_be_tried_is_refused(change: str, hint: str, lab: Lab, trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match=hint):
        lab.trial("a hypothesis", [change])
    assert not trainer.calls


def test_verdicts_are_those_of_the_paired_test() -> None:
    theirs = [1.0, 1.1, 0.9]
    assert decide([bpb - 0.05 - i / 1000 for i, bpb in enumerate(theirs)], theirs, 0.05)[0] == "keep"
    assert decide([bpb + 0.05 + i / 1000 for i, bpb in enumerate(theirs)], theirs, 0.05)[0] == "revert"
    assert decide([0.9, 1.3, 0.8], theirs, 0.05)[0] == "undecided"
    assert decide(theirs, theirs, 0.05)[:2] == ("undecided", "no effect: the scores are equal")


def test_a_damaged_table_is_named(lab: Lab) -> None:
    (lab.folder / "results.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"results\.jsonl"):
        lab.trial("a hypothesis", ["matrix_lr=0.0001"])


def test_one_lab_is_used_by_one_process(lab: Lab) -> None:
    with lab.locked(), pytest.raises(ConfigError, match=str(lab.folder)), Lab(lab.folder).locked():
        pass


@pytest.mark.usefixtures("lab")
def test_the_command_shows_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build_app, ["try", "a [better] rate", "--set", "matrix_lr=0.05", "--seeds", "2"]) == 0
    out, err = capsys.readouterr()
    assert "keep: significantly better" in " ".join(out.split())
    assert "seed 6 (2 of 2), candidate" in err
    assert run(build_app, ["try"]) == 0
    out = capsys.readouterr().out
    assert "a [better]" in out
    assert "1,000,000 bytes" in out
    assert run(build_app, ["try", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [result["verdict"] for result in answer["results"]] == ["keep"]
    for tokens, hint in (
        (["--set", "matrix_lr=1"], "hypothesis"),
        (["idea"], "--set"),
        (["idea", "--set", "matrix_lr=1", "--budget", "1MB"], "--recipe"),
        (["--lab", "empty"], "--recipe"),
    ):
        assert run(build_app, ["try", *tokens]) == 1
        assert hint in capsys.readouterr().err


TINY = """
device = "cpu"
data = {{ path = "{data}", tokenizer = "bytes", order = "shuffled" }}
model = {{ vocab_size = 300, num_layers = 1, model_dim = 32, num_heads = 2, num_kv_heads = 1 }}
optimizer = {{ newton_schulz_dtype = "float32", matrix_lr = 0.002, muon_momentum_warmup_steps = 5 }}
validation = {{ every = 0, max_tokens = 2000 }}
export = {{ budget = "16kB", effort = "fast" }}

[train]
compute_dtype = "float32"
iterations = 16
max_wallclock_seconds = 0
warmdown_fraction = 0.4
warmup_steps = 1
train_batch_tokens = 256
train_seq_len = 32
accumulation = 1
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny model on the sources of birdie."""
    root = tmp_path_factory.mktemp("tiny")
    sources = Path(__file__).resolve().parents[2] / "birdie" / "lab" / "*.py"
    assert run(build_app, ["prepare", str(sources), "--tokenizer", "bytes", "-o", str(root), "--json"]) == 0
    (data,) = (root / "datasets").iterdir()
    (root / "tiny.toml").write_text(TINY.format(data=data))
    return root / "tiny.toml"


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.lab.experiment.call", lambda *_, **__: (1, ['{"error": {"message": "no shards"}}']))
    with pytest.raises(BirdieError, match="no shards"):
        Experiment(tmp_path).run(small_recipe(), "run")
    (tmp_path / "runs" / "run" / "stderr.txt").write_text("Traceback\nValueError: odd\n")
    monkeypatch.setattr("birdie.lab.experiment.call", lambda *_, **__: (1, []))
    with pytest.raises(BirdieError, match="odd"):
        Experiment(tmp_path).run(small_recipe(), "run")
    monkeypatch.setattr("birdie.lab.experiment.call", lambda *_, **__: (-9, []))
    with pytest.raises(BirdieError, match="SIGKILL"):
        Experiment(tmp_path).run(small_recipe(), "run")


def test_an_edited_incumbent_and_a_variable_of_the_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    text = lab.recipe_path.read_text()
    lab.recipe_path.write_text(text.replace("iterations = 40", "iterations = 30"))
    assert lab.incumbent().train.iterations == 30
    monkeypatch.setenv("MATRIX_LR", "0.5")
    with pytest.raises(ConfigError, match=r"optimizer\.matrix_lr"):
        lab.incumbent()
