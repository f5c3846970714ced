"""Submission folder of the challenge: a recipe is packed, run with several seeds, and put together with its evidence.

    recipe ── pack ──► train_gpt.py ──► one process a seed ──► FOLDER.work/runs/train_seedN ─┐
    finished runs ── float weights ───► exported and scored again ───────────────────────────┴─► FOLDER

FOLDER holds README.md, submission.json, train_gpt.py, requirements.txt, a log for each seed, the artifact of the median
seed and the tokenizer, if it is a file. It appears complete or not at all. What was run stays in FOLDER.work, from
which a second call takes finished seeds; one that was interrupted begins again.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from birdie.errors import BudgetError, ConfigError, DataError, WeightsError
from birdie.golf.audit.plan import foreseen
from birdie.golf.audit.rules import CAP_BYTES, CAP_SECONDS, COVERAGE, Finding
from birdie.golf.packed_script import PackedScript, pack
from birdie.gpt.data.tokenizer import BYTES
from birdie.gpt.run.environment import CHOICES, DEAD
from birdie.gpt.run.float_weights import FLOAT
from birdie.gpt.run.history import NAME as HISTORY
from birdie.gpt.run.recipe_loading import setting_variables
from birdie.gpt.run.recipe_registry import changes
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.run.run_folder import METRICS
from birdie.lab.run_ledger import RECIPE, RunRecord, read_run
from birdie.lab.significance import MARGIN_NATS, P, Test, compare
from birdie.system.callbacks import Notify, no_message
from birdie.system.child import run_child
from birdie.system.files import atomic_folder, atomic_path, write_bytes
from birdie.system.locks import HOLDER, LOCK, locked_folder
from birdie.system.outputs import require_folder, require_output_folder, require_own_folder, require_writable
from birdie.system.parsing import parse_object, to_json
from birdie.system.provenance import versions

SCRIPT, ARTIFACT, CLAIM, README = "train_gpt.py", "model.birdie", "submission.json", "README.md"
_WORK = "work.json"
AFTER_TRAINING = ("data", "validation", "calibration", "export", "evaluation", "run", "device")
"""Tables of a recipe that may differ from those a run was trained with, when it is exported again."""

_SHOWN = ("step:", "stopping_early", "interrupted", "Stopping", "Serialized model birdie", "final_birdie", "error:")
_README_TEXT = """\
# {name}

{blurb}

| seed | steps | ms/step | float bpb | artifact bpb | nats/token | artifact bytes | total bytes |
|---|---|---|---|---|---|---|---|
{rows}
| mean | | | {float_bpb:.6f} | {done.val_bpb:.6f} | {done.val_loss:.6f} | | |

Float weights are scored by non-overlapping windows, the artifact by the recipe's evaluation ({mode}).
`model.birdie` is that of seed {chosen.seed}, the median by bpb. Code {chosen.code_bytes:,} bytes + model \
{chosen.model_bytes:,} bytes = {chosen.total_bytes:,} of {cap:,}.

## Significance

{significance}

## Reproduce

```sh
pip install -r requirements.txt
export DATA_PATH=… TOKENIZER_PATH={tokenizer}
EVAL_ONLY_PATH=model.birdie python train_gpt.py   # score the artifact
SEED={chosen.seed} torchrun --standalone --nproc_per_node={ranks} train_gpt.py   # train, export and score
```

The script carries the modules of birdie that it needs, and unpacks them into your cache folder.
"""
_LEFT_OUT = {"EVAL_ONLY_PATH", "RESTORE", "CAP_BYTES", "RUN_ID"}


@dataclass(frozen=True, slots=True)
class SubmissionAbout:
    """Words about a submission that nobody but its author knows.

    Attributes:
        name: title; empty: the name of the folder.
        blurb: one sentence.
    """

    name: str = ""
    author: str = ""
    github_id: str = ""
    blurb: str = ""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Result of one seed.

    Attributes:
        float_bpb: bits per byte of the weights before export, by non-overlapping windows.
        val_loss: nats per token of the artifact, by the recipe's evaluation.
        val_bpb: bits per byte of the same.
        bytes_per_token: bytes of text for each token that was scored.
        model_bytes, code_bytes: of artifact and script.
        artifact, log: files of the run.
    """

    seed: int
    steps: int
    train_seconds: float
    float_bpb: float
    val_loss: float
    val_bpb: float
    bytes_per_token: float
    model_bytes: int
    code_bytes: int
    artifact: Path
    log: Path

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step."""
        return 1000 * self.train_seconds / max(1, self.steps)

    @property
    def total_bytes(self) -> int:
        """Bytes of code and model."""
        return self.code_bytes + self.model_bytes


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission folder.

    Attributes:
        seeds: results in the order that was asked for.
        chosen: the seed whose artifact ships: the median by bits per byte, of two the better one.
        comparison: t-test against the baseline, in nats per token; None without a baseline.
        minified: False where python-minifier is not installed; the script is larger then.
        foreseen: what an audit does not pass because of the recipe or the seeds.
    """

    folder: Path
    seeds: tuple[SeedResult, ...]
    chosen: SeedResult
    comparison: Test | None
    folder_bytes: int
    minified: bool
    foreseen: tuple[Finding, ...] = ()

    @property
    def val_loss(self) -> float:
        """Mean nats per token."""
        return fmean(seed.val_loss for seed in self.seeds)

    @property
    def val_bpb(self) -> float:
        """Mean bits per byte."""
        return fmean(seed.val_bpb for seed in self.seeds)


def submit(
    recipe: Recipe,
    folder: Path,
    *,
    seeds: Sequence[int] = (),
    runs: Sequence[RunRecord] = (),
    baseline: Sequence[str] = (),
    cap: int = CAP_BYTES,
    ranks: int = 1,
    about: SubmissionAbout | None = None,
    overwrite: bool = False,
    notify: Notify = no_message,
) -> Submission:
    """Run `recipe` with every seed, or export finished runs again, and write the submission folder.

    Args:
        recipe: settings; its seed is not used.
        folder: of the submission; a new or empty one.
        runs: finished runs, instead of seeds: their float weights are exported and scored by `recipe`.
        baseline: scores to beat: nats per token, bits per byte ("1.0611bpb"), or run folders.
        cap: bytes of code and model.
        ranks: processes of a run, by torchrun.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        notify: called with log lines.
    """
    folder = require_output_folder(os.path.abspath(folder), overwrite=overwrite)  # noqa: PTH100 - it may not exist
    require_writable(folder.parent)
    if runs:
        require_one_recipe(runs, recipe)
        seeds = [run.seed for run in runs]
    if not seeds:
        raise ConfigError("a submission needs seeds; give --seeds 42,314,999, or finished runs with --from")
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise ConfigError(f"seed {repeated[0]} is given twice; every run of a submission has a seed of its own")
    if baseline and find_spec("scipy") is None:
        raise ConfigError("a t-test against a baseline needs scipy; pip install scipy, or leave --baseline out")
    scores = [_baseline_score(name) for name in baseline]
    recipe = replace(recipe, train=replace(recipe.train, seed=Recipe().train.seed), data=_absolute(recipe.data))
    packed = pack("train", replace(recipe, data=_portable(recipe.data)))
    if len(packed.script) >= cap:
        raise BudgetError(
            f"the code has {len(packed.script):,} bytes, and the cap is {cap:,}: nothing is left to train"
        )
    findings = tuple(foreseen(recipe, seeds, len(packed.script), cap))
    for finding in findings:
        notify(f"warning: birdie audit will find {finding.rule.name} {finding.result}: {finding.evidence}")
    if recipe.validation.max_tokens and any(finding.rule == COVERAGE for finding in findings):
        notify("validation.max_tokens 0 scores the whole split")
    work = folder.with_name(f"{folder.name}.work")
    require_writable(require_own_folder(work, _WORK, beside=[LOCK, HOLDER], folders=["runs", "logs"]))
    with locked_folder(work, notify):
        _prepare(work, recipe, packed, cap, runs)
        make = _Runner(work, recipe, packed, cap, ranks, notify)
        sources = {run.seed: run for run in runs}
        results = [_checked(make.result(seed, sources.get(seed)), cap) for seed in seeds]
        done = _write(folder, recipe, packed, results, scores, cap, about or SubmissionAbout(), overwrite)
        return replace(done, foreseen=findings)


def require_one_recipe(runs: Sequence[RunRecord], recipe: Recipe | None = None) -> None:
    """Check that finished runs have float weights and one recipe but for the seed.

    Args:
        recipe: settings of another export; those of training must be those of the runs.
    """
    for run in runs:
        if not (run.folder / FLOAT).is_file():
            raise WeightsError(
                f"{run.folder} has no float weights ({FLOAT}): the run is {run.state}; finish it with --resume, or "
                "train it again"
            )
        for name, ours, theirs in changes(runs[0].recipe, run.recipe):
            if name != "train.seed":
                raise ConfigError(
                    f"{name} is {ours!r} in {runs[0].folder} and {theirs!r} in {run.folder}; give runs that differ in "
                    "the seed alone"
                )
    if recipe is None:
        return
    trained = Recipe.from_dict(runs[0].recipe).to_dict()
    for name, old, new in changes(trained, recipe.to_dict()):
        if name != "train.seed" and name.partition(".")[0] not in AFTER_TRAINING:
            raise ConfigError(
                f"{name} is {new!r}, and the runs were trained with {old!r}; only settings of "
                f"{', '.join(AFTER_TRAINING[:-1])} can change after training"
            )


def _absolute(data: DataSettings) -> DataSettings:
    """Return the data settings with absolute paths: runs have another working folder."""
    train, val = (tuple(map(os.path.abspath, names)) for names in (data.train, data.val))
    tokenizer = data.tokenizer if data.tokenizer in BYTES else os.path.abspath(data.tokenizer)  # noqa: PTH100
    return replace(data, path=os.path.abspath(data.path), tokenizer=tokenizer, train=train, val=val)  # noqa: PTH100


def _portable(data: DataSettings) -> DataSettings:
    """Return the data settings for the script: the challenge's folder, and the tokenizer beside the script."""
    tokenizer = data.tokenizer if data.tokenizer in BYTES else Path(data.tokenizer).name
    return replace(data, path=DataSettings().path, tokenizer=tokenizer)


def _prepare(work: Path, recipe: Recipe, packed: PackedScript, cap: int, runs: Sequence[RunRecord]) -> None:
    """Write what the runs need into the work folder, unless it is there already."""
    path = work / _WORK
    sources = sorted(str(run.folder.resolve()) for run in runs)
    ours = {"recipe": recipe.to_dict(), "cap": cap, "from": sources, "birdie": versions()["birdie"]}
    ours = json.loads(to_json(ours))
    script = work / SCRIPT
    if any((work / "runs").glob(f"*/{RECIPE}")):
        try:
            theirs = parse_object(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); delete {work}") from error
        difference = next((f"{name} is {new!r} and was {old!r}" for name, new, old in changes(ours, theirs)), None)
        if difference is None and script.read_bytes() != packed.script:
            difference = "birdie or a package it packs with has changed"
        if difference is not None:
            raise ConfigError(
                f"{work} was made with other settings ({difference}); choose another -o, delete it, or export its "
                f"finished runs again: birdie submit --from {work / 'runs'}"
            )
        return
    write_bytes(path, to_json(ours).encode())
    write_bytes(work / RECIPE, recipe.to_toml().encode())
    write_bytes(script, packed.script)


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs the packed script in the work folder, once for each seed."""

    work: Path
    recipe: Recipe
    packed: PackedScript
    cap: int
    ranks: int
    notify: Notify

    def result(self, seed: int, source: RunRecord | None) -> SeedResult:
        """Return the result of a seed: kept from an earlier call, or run now.

        Args:
            source: finished run whose float weights are exported again; None: the seed is trained.
        """
        name = f"train_seed{seed}"
        run, log = require_folder(self.work / "runs" / name, overwrite=True), self.work / "logs" / f"{name}.txt"
        if result := _finished(run, log, seed):
            self.notify(f"seed {seed}: taken from {run}")
            return result
        arguments, variables = [SCRIPT], {"SEED": str(seed), "RUN_ID": name, "CAP_BYTES": str(self.cap)}
        if source is not None:
            self.notify(f"seed {seed}: exporting {source.folder} again")
            _copy_run(source, run, log)
            variables["RESTORE"] = "1"
        else:
            self.notify(f"seed {seed}: training in {run}")
            if self.ranks > 1:
                arguments = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}", SCRIPT]

        def show(line: str) -> None:
            if line.startswith(_SHOWN):
                self.notify(f"seed {seed}: {line}")

        try:
            code, lines = run_child(arguments, folder=self.work, environment=self._environment(variables), on_line=show)
        except KeyboardInterrupt:
            self.notify(f"seed {seed}: stopped; the same command begins it again, and keeps the finished ones")
            raise
        reason = _failure(code, lines)
        if not reason and (result := _finished(run, log, seed)):
            return result
        raise ConfigError(
            f"seed {seed} did not finish: {reason or 'it left no score'}; the same command begins it again"
        )

    def _environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a run: settings are in the script, so their variables are left out."""
        left_out = {*setting_variables(), *CHOICES, *_LEFT_OUT, *(name for row in DEAD for name in row.names)}
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        data = self.recipe.data
        kept |= {"DATA_PATH": data.path, "TOKENIZER_PATH": data.tokenizer}
        return {**kept, **changes}


def _failure(code: int, lines: Sequence[str]) -> str:
    """Return why a run failed; empty if it did not."""
    if code == 0:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter(errors), "") or next((line for line in reversed(lines) if line), f"exit code {code}")


def _copy_run(source: RunRecord, run: Path, log: Path) -> None:
    """Copy the float weights, the metrics and the log of training of a finished run."""
    for name in (FLOAT, METRICS, HISTORY, "environment.json"):
        if (source.folder / name).is_file():
            _copy(source.folder / name, run / name)
    write_bytes(run / RECIPE, (source.folder / RECIPE).read_bytes())
    log.unlink(missing_ok=True)
    if source.log is None:
        return
    text = source.log.read_text(encoding="utf-8", errors="replace")
    training, mark, _ = text.rpartition("\npeak memory allocated:")
    if mark:  # train_gpt.py wrote it: what comes after is of the old export
        write_bytes(log, (training + "\n").encode())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as path:
        shutil.copyfile(source, path)


def _finished(run: Path, log: Path, seed: int) -> SeedResult | None:
    """Return the result of a run that was scored, else None."""
    try:
        record = read_run(run)
    except DataError:
        return None
    summary, artifact = record.summary, record.artifact
    if not summary or artifact is None or not log.is_file():
        return None
    try:
        score = record.score or {}
        result = SeedResult(
            seed,
            int(summary["steps"]),
            float(summary["train_seconds"]),
            float(summary["bpb_float"]),
            float(score["val_loss"]),
            float(score["bpb"]),
            float(score["bytes"]) / float(score["tokens"]),
            int(summary["bytes"]),
            int(summary["code_bytes"]),
            artifact,
            log,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{run / 'summary.json'} is damaged ({error!r}); delete {run} to run the seed again") from error
    if artifact.stat().st_size != result.model_bytes:
        raise DataError(f"{artifact} has not the {result.model_bytes:,} bytes that were scored; delete {run}")
    return result


def _checked(result: SeedResult, cap: int) -> SeedResult:
    """Return `result` if code and model keep the cap."""
    if result.total_bytes > cap:
        raise BudgetError(
            f"seed {result.seed}: {result.code_bytes:,} bytes of code and {result.model_bytes:,} of the model are "
            f"{result.total_bytes - cap:,} more than {cap:,}; set a coarser --export.scheme, or --export.budget"
        )
    return result


def _baseline_score(name: str) -> tuple[float, bool]:
    """Return a score of the baseline, and whether it is in bits per byte; else it is in nats per token."""
    bits = name.lower().endswith("bpb")
    try:
        value = float(name.lower().removesuffix("bpb"))
    except ValueError:
        record = read_run(Path(name))
        if record.score is None:
            raise ConfigError(f"{name} has no score: the run is {record.state}; finish it, or leave it out") from None
        return float(record.score["bpb"]), True
    if not 0 < value < math.inf:
        raise ConfigError(f"baseline {name} is no score; give nats per token, bits per byte (1.0611bpb) or run folders")
    return value, bits


def _write(
    folder: Path,
    recipe: Recipe,
    packed: PackedScript,
    results: Sequence[SeedResult],
    baseline: Sequence[tuple[float, bool]],
    cap: int,
    about: SubmissionAbout,
    overwrite: bool,
) -> Submission:
    """Write the folder, count its bytes as they lie, and put it in its position."""
    chosen = sorted(results, key=lambda seed: seed.val_bpb)[(len(results) - 1) // 2]
    to_bits = 1 / (math.log(2) * chosen.bytes_per_token)
    theirs = [value / to_bits if bits else value for value, bits in baseline]
    comparison = compare([seed.val_loss for seed in results], theirs, margin=MARGIN_NATS) if theirs else None
    tokenizer = None if recipe.data.tokenizer in BYTES else Path(recipe.data.tokenizer)
    inputs = [chosen.artifact, *(seed.log for seed in results), *([] if tokenizer is None else [tokenizer])]
    with atomic_folder(folder, overwrite=overwrite, inputs=inputs) as new:
        (new / SCRIPT).write_bytes(packed.script)
        (new / "requirements.txt").write_text("".join(f"{line}\n" for line in packed.requirements), encoding="utf-8")
        shutil.copyfile(chosen.artifact, new / ARTIFACT)
        for seed in results:
            shutil.copyfile(seed.log, new / f"{seed.log.stem}.log")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, new / tokenizer.name)
        code, model = ((new / name).stat().st_size for name in (SCRIPT, ARTIFACT))
        if code + model > cap or (code, model) != (chosen.code_bytes, chosen.model_bytes):
            raise BudgetError(
                f"{code:,} bytes of code and {model:,} of the model lie in the folder, and seed {chosen.seed} was "
                f"scored with {chosen.code_bytes:,} and {chosen.model_bytes:,}, of {cap:,}; delete {folder}.work"
            )
        named = replace(about, name=about.name or folder.name, blurb=about.blurb or _blurb(recipe))
        done = Submission(folder, tuple(results), chosen, comparison, 0, packed.minified)
        claim = _claim(done, recipe, named, theirs, to_bits)
        (new / CLAIM).write_text(to_json(claim, indent=2) + "\n", encoding="utf-8")
        (new / README).write_text(_readme(done, recipe, named, theirs, to_bits, cap), encoding="utf-8")
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
    return replace(done, folder_bytes=size)


def _blurb(recipe: Recipe) -> str:
    model = recipe.model
    return f"A GPT of {model.num_layers} layers and width {model.model_dim}, trained and compressed by birdie."


def _claim(
    done: Submission, recipe: Recipe, about: SubmissionAbout, theirs: Sequence[float], to_bits: float
) -> dict[str, Any]:
    """Return submission.json, with the keys that records have."""
    environment = read_run(done.chosen.artifact.parent).environment
    limited = 0 < recipe.train.max_wallclock_seconds <= CAP_SECONDS
    several = len(done.seeds) > 1
    claim: dict[str, Any] = {
        "author": about.author,
        "github_id": about.github_id,
        "name": about.name,
        "blurb": about.blurb,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "track": "10min_16mb" if limited else "non-record-unlimited-compute-16mb",
        "val_loss": round(done.val_loss, 8),
        "val_bpb": round(done.val_bpb, 8),
        "val_loss_std": round(stdev(seed.val_loss for seed in done.seeds), 8) if several else None,
        "val_bpb_std": round(stdev(seed.val_bpb for seed in done.seeds), 8) if several else None,
        "seeds": [seed.seed for seed in done.seeds],
        "seed_results": {
            str(seed.seed): {
                "val_loss": round(seed.val_loss, 8),
                "val_bpb": round(seed.val_bpb, 8),
                "float_bpb": round(seed.float_bpb, 8),
                "artifact_bytes": seed.total_bytes,
                "bytes_model": seed.model_bytes,
                "steps": seed.steps,
                "step_avg_ms": round(seed.step_ms, 2),
                "train_seconds": round(seed.train_seconds, 3),
            }
            for seed in done.seeds
        },
        "bytes_total": done.chosen.total_bytes,
        "bytes_code": done.chosen.code_bytes,
        "bytes_model": done.chosen.model_bytes,
        "artifact_seed": done.chosen.seed,
        "bytes_per_token": round(done.chosen.bytes_per_token, 6),
        "hardware": f"{environment.get('ranks', 1)} x {environment.get('device', 'unknown')}",
        "pytorch_version": environment.get("versions", {}).get("torch"),
        "birdie": environment.get("versions", {}).get("birdie"),
    }
    if (test := done.comparison) is not None:
        claim["comparison"] = {
            "baseline_val_loss": fmean(theirs),
            "baseline_seeds": len(theirs),
            "difference_nats": test.difference,
            "difference_bpb": test.difference * to_bits,
            "margin_nats": test.margin,
            "p": None if math.isnan(test.p) else test.p,
            "significant": test.significant(),
        }
    return claim


def _readme(
    done: Submission, recipe: Recipe, about: SubmissionAbout, theirs: Sequence[float], to_bits: float, cap: int
) -> str:
    """Return the text of README.md: results, significance and commands."""
    chosen, tokenizer = done.chosen, recipe.data.tokenizer
    rows = [
        f"| {seed.seed} | {seed.steps:,} | {seed.step_ms:.2f} | {seed.float_bpb:.6f} | {seed.val_bpb:.6f} "
        f"| {seed.val_loss:.6f} | {seed.model_bytes:,} | {seed.total_bytes:,} |"
        for seed in done.seeds
    ]
    return _README_TEXT.format(
        name=about.name,
        blurb=about.blurb,
        rows="\n".join(rows),
        float_bpb=fmean(seed.float_bpb for seed in done.seeds),
        done=done,
        chosen=chosen,
        cap=cap,
        mode=recipe.evaluation.mode,
        significance="\n".join(_significance(done, theirs, to_bits)),
        tokenizer="bytes" if tokenizer in BYTES else Path(tokenizer).name,
        ranks=read_run(chosen.artifact.parent).environment.get("ranks", 1),
    )


def _significance(done: Submission, theirs: Sequence[float], to_bits: float) -> Iterator[str]:
    """Yield sentences about spread, unit and the comparison with the baseline."""
    losses = [seed.val_loss for seed in done.seeds]
    if len(losses) > 1:
        spread = stdev(losses)
        yield (
            f"Mean of {len(losses)} seeds: {done.val_loss:.6f} nats per token (standard deviation {spread:.6f}), "
            f"{done.val_bpb:.6f} bpb ({spread * to_bits:.6f})."
        )
    else:
        yield f"One seed: {done.val_loss:.6f} nats per token, {done.val_bpb:.6f} bpb; its spread is not known."
    yield (
        f"With this tokenizer a token is {done.chosen.bytes_per_token:.4f} bytes of text, so {MARGIN_NATS} nats per "
        f"token are {MARGIN_NATS * to_bits:.6f} bpb."
    )
    if (test := done.comparison) is None:
        yield "No baseline was given, so there is no test."
        return
    result = "no p-value, as it needs two seeds or more"
    if not math.isnan(test.p):
        result = f"p = {test.p:.2g}, {'' if test.significant() else 'not '}significant at p < {P}"
    yield (
        f"Baseline: {fmean(theirs):.6f} nats per token, {fmean(theirs) * to_bits:.6f} bpb ({len(theirs)} "
        f"value{'s' * (len(theirs) != 1)}). Difference: {test.difference:+.6f} nats, {test.difference * to_bits:+.6f} "
        f"bpb. One-sided t-test of an improvement of more than {test.margin} nats: {result}."
    )
