"""A submission folder: one run a seed, resumable, honest about its bytes, complete or not there at all."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app
from birdie.cli.console import run as run_command
from birdie.errors import BudgetError, ConfigError, DataError, OutputError, WeightsError
from birdie.golf import submission
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import RULES
from birdie.golf.packed_script import Kind, PackedScript, pack
from birdie.golf.submission import Submission, SubmissionAbout, submit
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.lab.run_ledger import find_runs, read_run
from tests.golf.scripts import start
from tests.gpt.run.test_run_folder import tiny_recipe

# Leaves what a run of the packed script leaves. It waits for Ctrl-C if the file `interrupt` exists.
FAKE = b"""
import json, os, pathlib, signal, sys, time
name, seed = os.environ["RUN_ID"], int(os.environ["SEED"])
run, logs = pathlib.Path("runs") / name, pathlib.Path("logs")
run.mkdir(parents=True, exist_ok=True)
logs.mkdir(exist_ok=True)
if pathlib.Path("fail").exists():
    sys.exit("error: no space left on device")
with (logs / (name + ".txt")).open("w") as log:
    log.write(f"started ITERATIONS={os.environ.get('ITERATIONS')}")
    log.write(f" RESTORE={os.environ.get('RESTORE')} of {sorted(file.name for file in run.iterdir())}\\n")
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("step:1/2 train_loss:2.0", flush=True)
    if pathlib.Path("interrupt").exists():
        time.sleep(60)
except KeyboardInterrupt:
    (run / "recipe.toml").write_text("")
    sys.exit(130)
model, code = b"m" * (1000 + seed), os.path.getsize("train_gpt.py")
(run / "model.birdie").write_bytes(model)
(run / "recipe.toml").write_text(f"[train]\\nseed = {seed}\\n")
(run / "environment.json").write_text(json.dumps({"device": "cpu", "ranks": 1, "versions": {"birdie": "0"}}))
score = {"val_loss": 2 + seed / 100, "bpb": (2 + seed / 100) / 2, "tokens": 100, "bytes": 288.53900817779268}
summary = {"bytes": len(model), "code_bytes": code, "bpb_float": 1, "steps": 2, "train_seconds": 1, "evaluation": score}
(run / "summary.json").write_text(json.dumps(summary))
"""

RECIPE = Recipe(data=DataSettings(tokenizer="bytes"))
Submit = Callable[..., Submission]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """`make(…)` is `submit` of a recipe whose script is FAKE, into the folder `sub`."""
    monkeypatch.setattr(
        submission, "pack", lambda *_: PackedScript(FAKE, {"birdie/a.py": "x = 1\n"}, ("torch==2",), True)
    )
    monkeypatch.setenv("ITERATIONS", "7")

    defaults: dict[str, Any] = {"seeds": (3, 1, 2), "overwrite": True}

    def call(recipe: Recipe | None = None, **options: Any) -> Submission:
        return submit(recipe or RECIPE, tmp_path / "sub", **(defaults | options))

    return call


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_has_all_seeds_and_the_median_artifact(make: Submit, tmp_path: Path) -> None:
    done = make(about=SubmissionAbout(author="Ann", name="A title"), baseline=["2.05", "1.035bpb"])
    folder = tmp_path / "sub"
    logs = {f"train_seed{seed}.log" for seed in (1, 2, 3)}
    texts = {"README.md", "submission.json", "requirements.txt"}
    assert files(folder) == {*texts, "train_gpt.py", "model.birdie", *logs}
    assert (done.chosen.seed, (folder / "model.birdie").stat().st_size) == (2, 1002)
    claim = json.loads((folder / "submission.json").read_text())
    assert (claim["author"], claim["name"], claim["seeds"]) == ("Ann", "A title", [3, 1, 2])
    assert claim["val_loss"] == pytest.approx(2.02)
    assert claim["val_loss_std"] == pytest.approx(0.01)
    assert claim["bytes_total"] == claim["bytes_code"] + claim["bytes_model"] == len(FAKE) + 1002
    assert claim["seed_results"]["3"]["artifact_bytes"] == len(FAKE) + 1003
    assert claim["comparison"]["difference_nats"] == pytest.approx(-0.04)
    assert claim["comparison"]["difference_bpb"] == pytest.approx(-0.02)
    readme = (folder / "README.md").read_text()
    assert "A title" in readme
    assert "0.005 nats per token are 0.002500 bpb" in readme
    assert f"{len(FAKE) + 1002:,} of 16,000,000" in readme
    assert done.folder_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_what_the_audit_will_find_is_said_before_the_first_seed(make: Submit) -> None:
    log: list[str] = []
    done = make(seeds=(3, 1), notify=log.append)
    assert [(finding.rule.name, finding.result) for finding in done.foreseen] == [("seeds", "unknown")]
    assert log[0].startswith("warning: birdie audit will find seeds unknown: 2 seeds are scored (1, 3)")
    assert "training" in log[1]


def test_a_tokenizer_ships_beside_the_script(make: Submit, tmp_path: Path) -> None:
    (tmp_path / "my.model").write_bytes(b"pieces")
    packed: list[Recipe] = []

    def remember(_: Kind, recipe: Recipe) -> PackedScript:
        packed.append(recipe)
        return PackedScript(FAKE, {}, (), True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "pack", remember)
        make(Recipe(data=DataSettings(path=str(tmp_path / "data"), tokenizer=str(tmp_path / "my.model"))))
    assert (tmp_path / "sub" / "my.model").read_bytes() == b"pieces"
    assert "TOKENIZER_PATH=my.model" in (tmp_path / "sub" / "README.md").read_text()
    assert (packed[0].data.path, packed[0].data.tokenizer) == (DataSettings().path, "my.model")


def test_a_second_call_runs_nothing_again(make: Submit, tmp_path: Path) -> None:
    first = make(seeds=(1, 2))
    log: list[str] = []
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "sub.work").rglob("model.birdie")}
    second = make(seeds=(1, 2, 3), notify=log.append)
    assert second.seeds[:2] == first.seeds
    assert [line.split(":")[1].split()[0] for line in log[:3]] == ["taken", "taken", "training"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_ctrl_c_reaches_the_run_and_the_next_call_begins_it_again(make: Submit, tmp_path: Path) -> None:
    work = tmp_path / "sub.work"
    work.mkdir()
    (work / "work.json").touch()
    (work / "interrupt").touch()

    def interrupt(line: str) -> None:
        if "step:1/2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(notify=interrupt)
    assert (work / "runs" / "train_seed3" / "recipe.toml").is_file()
    assert not (tmp_path / "sub").exists()
    (work / "interrupt").unlink()
    make()
    assert len((tmp_path / "sub" / "train_seed3.log").read_text().splitlines()) == 1


def test_a_run_that_fails_is_one_sentence(make: Submit, tmp_path: Path) -> None:
    (tmp_path / "sub.work").mkdir()
    (tmp_path / "sub.work" / "work.json").touch()
    (tmp_path / "sub.work" / "fail").touch()
    with pytest.raises(ConfigError, match="seed 3 did not finish: no space left on device; the same command"):
        make()
    assert not (tmp_path / "sub").exists()
    (tmp_path / "sub.work" / "fail").unlink()
    make(dataclasses.replace(RECIPE, device="cpu"))  # nothing had been trained, so settings may change


def test_a_full_disk_leaves_the_folder_as_it_was(make: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(seeds=(1,))
    names = files(tmp_path / "sub")
    real = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if target.name == "train_seed2.log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match="no space left on device; nothing was changed"):
        make(seeds=(1, 2))
    assert files(tmp_path / "sub") == names
    assert files(tmp_path) == {"sub", "sub.work"}


def test_other_settings_are_refused_by_name(make: Submit) -> None:
    make(seeds=(1,))
    with pytest.raises(ConfigError, match=r"recipe\.device is 'cpu' and was 'auto'.*--from"):
        make(dataclasses.replace(RECIPE, device="cpu"), seeds=(1,))
    with pytest.raises(ConfigError, match=r"cap is 50000 and was 16000000"):
        make(seeds=(1,), cap=50_000)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": ()}, ConfigError, "needs seeds"),
        ({"seeds": (4, 5, 4)}, ConfigError, "seed 4 is given twice"),
        ({"cap": len(FAKE)}, BudgetError, "nothing is left"),
        ({"cap": len(FAKE) + 1000}, BudgetError, "seed 3: .* are 3 more than"),
        ({"baseline": ["-1"]}, ConfigError, "baseline -1"),
        ({"baseline": ["nothing"]}, DataError, "nothing holds no run"),
    ],
)
def test_bad_input_writes_nothing(
    options: dict[str, Any], error: type[Exception], message: str, make: Submit, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        make(**options)
    assert not (tmp_path / "sub").exists()


def test_what_is_no_submission_is_not_replaced(make: Submit, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match="has content"):
        make(overwrite=False)
    assert not (tmp_path / "sub.work").exists()
    assert files(tmp_path / "sub") == {"thesis.txt"}


def test_runs_must_differ_in_the_seed_alone(make: Submit, tmp_path: Path) -> None:
    for seed, steps in ((1, 5), (2, 5), (3, 6)):
        run = tmp_path / "runs" / f"seed{seed}"
        run.mkdir(parents=True)
        (run / "recipe.toml").write_text(f"[train]\nseed = {seed}\niterations = {steps}\n")
    with pytest.raises(WeightsError, match=r"seed1 has no float weights .* the run is begun"):
        make(runs=list(find_runs(tmp_path / "runs")))
    for run in (tmp_path / "runs").iterdir():
        (run / "float.safetensors").touch()
    with pytest.raises(ConfigError, match=r"train\.iterations is 5 in .*seed1 and 6 in .*seed3"):
        make(runs=list(find_runs(tmp_path / "runs")))
    shutil.rmtree(tmp_path / "runs" / "seed3")
    with pytest.raises(ConfigError, match=r"train\.iterations is 20000, and the runs were trained with 5"):
        make(runs=list(find_runs(tmp_path / "runs")))
    with pytest.raises(DataError, match="holds no runs"):
        list(find_runs(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["baseline", "-o", "x", "--seeds", "1,two"], "seeds are '1,two'"),
        (["baseline", "-o", "x", "--seeds", "-1"], "a seed is from 0"),
        (["baseline", "-o", "x"], "needs seeds"),
        (["-o", "x", "--seeds", "1"], "nothing to submit"),
        (["baseline", "-o", "x", "--seeds", "1", "--nproc", "0"], "nproc is 0"),
        (["baseline", "-o", "x", "--seeds", "1", "--cap", "big"], "'big' is not a size"),
        (["--seeds", "1", "-o", "x", "baseline"], "name the recipe first"),
        (["--from", "-o", "x"], "--from names no run"),
        (["--from", "nowhere", "-o", "x"], "nowhere holds no runs"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tokens: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(build_app, ["submit", *tokens]) == 1
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert error.startswith("error: ")
    assert files(tmp_path) == set()


def test_finished_runs_are_exported_again(make: Submit, tmp_path: Path) -> None:
    """The script gets a copy of the run and RESTORE=1."""
    recipe = tiny_recipe(tmp_path / "data")
    list(Run(recipe, tmp_path / "run").train())
    done = make(recipe, seeds=(), runs=[read_run(tmp_path / "run")])
    log = (tmp_path / "sub" / "train_seed1337.log").read_text()
    assert done.chosen.seed == 1337
    assert "RESTORE=1" in log
    assert "float.safetensors" in log
    assert not (tmp_path / "run" / "model.birdie").exists()


@pytest.mark.nightly
def test_a_submission_scores_itself_without_birdie_and_passes_the_audit(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    recipe = tiny_recipe(tmp_path / "data")
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, max_wallclock_seconds=600.0))
    done = submit(recipe, tmp_path / "sub", seeds=(42, 314, 999), baseline=["5.5", "5.6"])
    assert pack("train", recipe).minified
    result = audit(tmp_path / "sub")
    assert result.failed == ()
    unknown = {rule.name for rule in RULES if result.result(rule) == "unknown"}
    assert unknown == {"validation-unseen", "whole-split"}
    assert {(finding.rule.name, finding.result) for finding in done.foreseen} == {("whole-split", "unknown")}
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tmp_path / "sub" / "train_gpt.py", bare)
    settings = {"RUN_ID": "tiny", "DATA_PATH": recipe.data.path, "TOKENIZER_PATH": "bytes"}
    settings |= {"EVAL_ONLY_PATH": str(tmp_path / "sub" / "model.birdie")}
    scored = start(bare, "train_gpt.py", variables=settings)
    assert scored.returncode == 0, scored.stderr[-2000:]
    line = next(line for line in scored.stdout.splitlines() if line.startswith("final_birdie_roundtrip_exact"))
    assert float(line.rpartition(":")[2]) == pytest.approx(done.chosen.val_bpb, abs=1e-6)
