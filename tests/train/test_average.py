"""The average of weights is the formula's, on every rank, through checkpoints and priming; and it is what ships."""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from birdie.artifact.files import load
from birdie.compress.qat import Qat
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.model.gpt import GPTConfig
from birdie.run.evaluation import evaluate
from birdie.run.pipeline import Run, Validated
from birdie.run.recipe import DataSettings, ExportSettings, Recipe, RunSettings
from birdie.runtime.distributed import World
from birdie.score.bpb import ValidationSettings
from birdie.score.request import EvaluationRequest
from birdie.train.average import Average, AverageSettings
from birdie.train.checkpoint import Checkpoint, load_checkpoint
from birdie.train.loop import Fit, fit
from birdie.train.settings import TrainSettings
from tests.ranks import start_ranks
from tests.tiny_run import OPTIMIZERS, TinyBatches, tiny_model, tiny_settings

EMA = AverageSettings("ema", ema_decay=0.8)
SWA = AverageSettings("swa", swa_every=2, swa_below=0.6)
LAWA = AverageSettings("lawa", lawa_k=3, lawa_every=2)
KINDS = pytest.mark.parametrize("average", [EMA, SWA, LAWA], ids=lambda average: average.kind)
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(average: AverageSettings | None = None, **changes: Any) -> Fit:
    return fit(tiny_model(), TinyBatches(), tiny_settings(**changes), OPTIMIZERS, average=average)


def held(run: Fit) -> Weights:
    """What the model holds now."""
    return {name: p.detach().clone() for name, p in run._model.named_parameters()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def along(**changes: Any) -> tuple[list[Weights], list[float], list[float]]:
    """Weights before the first and after each step, in float64; each step's loss and factor on the rates."""
    run = start(**changes)
    weights, losses, factors = [held(run)], [], []
    for step in run:
        weights.append(held(run))
        losses.append(step.loss)
        factors.append(step.lr_multiplier)
    return [{name: w.double() for name, w in each.items()} for each in weights], losses, factors


@KINDS
def test_the_average_is_that_of_the_formula(average: AverageSettings) -> None:
    weights, losses, factors = along()
    run = start(average)
    assert [step.loss for step in run] == losses  # training does not notice
    for name, mean in run.average.mean().items():
        path = [each[name] for each in weights]
        if average.kind == "ema":
            expected = path[0]
            for w in path[1:]:
                expected = 0.8 * expected + 0.2 * w
        elif average.kind == "swa":
            taken = [n for n in range(1, 13) if n % 2 == 0 and factors[n - 1] < 0.6]
            assert taken == [10, 12]  # the factor of step 9 is 2/3, that of step 10 is 1/2
            expected = torch.stack([path[n] for n in taken]).mean(0)
        else:
            expected = torch.stack([path[n] for n in (8, 10, 12)]).mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-7)


@KINDS
def test_finishing_makes_it_the_model_and_tells_how_far_that_is(average: AverageSettings) -> None:
    run, without = start(average), start()
    for each in (run, without):
        list(each)
    last, mean = held(run), dict(run.average.mean())
    (line,) = run.finish()
    assert same(held(run), mean)
    assert same(held(without), last)
    assert without.finish() == []
    assert same(held(without), last)
    apart = torch.stack([(mean[n] - last[n]).double().norm() for n in last]).norm()
    moved = float(apart / torch.stack([last[n].double().norm() for n in last]).norm())
    assert moved > 1e-3
    assert f"{moved:.2%} of their norm from the last weights" in line
    assert str(run.average) in line
    for forbidden in (run.finish, run.state, lambda: run.average.in_model().__enter__()):
        with pytest.raises(WeightsError, match="the model holds the average of its weights"):
            forbidden()


def test_for_a_validation_it_is_in_the_model_and_out_again() -> None:
    run = start(EMA)
    steps = iter(run)
    for _ in range(5):
        next(steps)
    last = held(run)
    with run.average.in_model():
        assert same(held(run), dict(run.average.mean()))
        with pytest.raises(WeightsError, match="cannot train: the model holds the average"):
            next(steps)
    assert same(held(run), last)
    with pytest.raises(ValueError, match="scoring failed"), run.average.in_model():
        raise ValueError("scoring failed")
    assert same(held(run), last)
    interrupted = start(EMA)
    whole = [step.loss for step in interrupted]
    run_on = start(EMA)
    curve = []
    for step in run_on:
        curve.append(step.loss)
        with run_on.average.in_model():
            pass
    assert curve == whole
    assert same(dict(run_on.average.mean()), dict(interrupted.average.mean()))


@KINDS
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_resumed_average_is_bit_identical(average: AverageSettings, warmup_steps: int, tmp_path: Path) -> None:
    run = start(average, warmup_steps=warmup_steps)
    for step in run:
        if step.number == 9:
            run.save(tmp_path)
    resumed = fit(
        tiny_model(seed=5),
        TinyBatches(),
        tiny_settings(warmup_steps=warmup_steps),
        OPTIMIZERS,
        resume=load_checkpoint(tmp_path),
        average=average,
    )
    list(resumed)
    assert resumed.average.terms == run.average.terms > 0
    assert same(dict(resumed.average.mean()), dict(run.average.mean()))
    assert same(resumed.state().average, run.state().average)


@KINDS
def test_priming_leaves_no_trace_in_it(average: AverageSettings) -> None:
    primed, plain = start(average, warmup_steps=5, warmdown_iters=12), start(average, warmdown_iters=12)
    primed.prime()
    assert same(primed.state().average, plain.state().average)
    for run in (primed, plain):
        list(run)
    assert same(dict(primed.average.mean()), dict(plain.average.mean()))


@pytest.mark.parametrize("before", [None, SWA])
def test_a_checkpoint_without_it_begins_it_anew_and_says_so(before: AverageSettings | None, tmp_path: Path) -> None:
    run = start(before)
    next(iter(run))
    run.save(tmp_path)
    told: list[str] = []
    resume = load_checkpoint(tmp_path)
    again = fit(
        tiny_model(), TinyBatches(), tiny_settings(), OPTIMIZERS, resume=resume, average=EMA, notify=told.append
    )
    assert "the checkpoint has no EMA of weights; it begins anew at its step" in told
    assert any(line.startswith("resuming with average.kind = ema") for line in told)
    assert same(dict(zip(held(again), again.average.tensors(), strict=True)), held(run))


@KINDS
def test_an_average_of_another_model_is_refused(average: AverageSettings) -> None:
    run = start(average, warmdown_iters=12)
    list(run)
    state = run.state().average
    name = next(key for key in state if key.endswith("tok_emb.weight"))
    for wrong in ({**state, name: state[name][1:]}, {key: value for key, value in state.items() if key != name}):
        with pytest.raises(WeightsError, match=r"the average of 'tok_emb.weight' in the checkpoint is not of this"):
            Average(average, dict(run._model.named_parameters())).load_state(wrong)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_average_is_refused(damage: str, tmp_path: Path) -> None:
    path = start(EMA).save(tmp_path) / "average.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_views_stay_views_and_counters_stay_counters() -> None:
    """Matrices that lie in one bank go on lying there, and what is no number to average is left alone."""
    bank = torch.randn(3, 4, 5)
    tensors = {f"layer{i}": bank[i] for i in range(3)} | {"steps": torch.tensor(7)}
    average = Average(AverageSettings("ema", ema_decay=0.5), tensors)
    first = bank.clone()
    bank.add_(1)
    average.update(1, 1.0)
    last = bank.clone()
    with average.in_model():
        torch.testing.assert_close(bank, first + 0.5)
    assert torch.equal(bank, last)
    assert "steps" not in average.mean()
    assert average.settle() is not None
    torch.testing.assert_close(bank, first + 0.5)
    assert all(tensors[f"layer{i}"].data_ptr() == bank[i].data_ptr() for i in range(3))
    assert tensors["steps"] == 7


def test_small_changes_of_bfloat16_weights_are_not_lost() -> None:
    """In bfloat16 this average would not move at all: 2⁻¹⁰ is below half of its spacing at 1."""
    weight = torch.ones(4, dtype=torch.bfloat16)
    average = Average(AverageSettings("ema", ema_decay=0.999), {"w": weight})
    weight.fill_(1.0078125)
    for step in range(1, 401):
        average.update(step, 1.0)
    expected = 1.0078125 - 0.0078125 * 0.999**400
    torch.testing.assert_close(average.mean()["w"], torch.full((4,), expected), rtol=1e-6, atol=0)


def test_without_a_term_the_last_weights_are_the_result_and_that_is_said() -> None:
    run = start(AverageSettings("swa", swa_every=50))
    list(run)
    last = held(run)
    with run.average.in_model():
        assert same(held(run), last)
    assert str(run.average) == "the last weights"
    assert run.finish() == ["average of weights: SWA took no term, so the last weights are the result"]
    assert same(held(run), last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mean"}, "average kind is 'mean'; choose none, ema, swa or lawa"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"ema_decay": float("nan")}, "ema_decay is nan"),
        ({"swa_below": 0.0}, "swa_below is 0.0"),
        ({"swa_every": 0}, "swa_every is 0"),
        ({"lawa_k": 0}, "lawa_k is 0"),
        ({"lawa_every": -1}, "lawa_every is -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AverageSettings(**change)


def train_as_rank(rank: int, size: int, rendezvous: str, folder: str) -> None:
    """Twelve steps in one go, and again with a stop after nine; every rank leaves what it averaged."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=wait)
    world = World(rank, size, rank)

    def begin(resume: Any = None) -> Fit:
        # ranks begin with different weights: rank 0's must win, in the average, too
        model = tiny_model(seed=rank)
        return fit(model, TinyBatches(world), tiny_settings(), OPTIMIZERS, world=world, average=EMA, resume=resume)

    run = begin()
    for step in run:
        if step.number == 9:
            run.save(Path(folder) / "run")
    dist.barrier()
    resumed = begin(load_checkpoint(Path(folder) / "run"))
    list(resumed)
    torch.save({"whole": run.average.mean(), "resumed": resumed.average.mean()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_hold_one_average_and_resume_it(tmp_path: Path) -> None:
    start_ranks(train_as_rank, (2, str(tmp_path / "rendezvous"), str(tmp_path)), 2)
    zero, one = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for each in (zero["resumed"], one["whole"], one["resumed"]):
        assert same(zero["whole"], each)
    alone = start(EMA)
    list(alone)
    for name, value in alone.average.mean().items():
        torch.testing.assert_close(zero["whole"][name], value, rtol=0, atol=1e-3)


LENGTH = 32


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run whose layers loop from its middle on."""
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    train = {"iterations": 8, "warmdown_iters": 4, "warmup_steps": 2, "max_wallclock_seconds": 0, "accumulation": 2}
    loops = {"num_loops": 1, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.5}
    shape = {"vocab_size": 260, "num_layers": 3, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_mult": 4}
    return Recipe(
        data=DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(**shape, **loops),
        train=TrainSettings(train_batch_tokens=4 * LENGTH, train_seq_len=LENGTH, compute_dtype="float32", **train),
        average=AverageSettings("ema", ema_decay=0.7),
        validation=ValidationSettings(every=3, max_tokens=500),
        export=ExportSettings(scheme="fp16", coder="fast"),
        run=RunSettings(checkpoint_every=0),
        device="cpu",
    )


def finished(
    recipe: Recipe, folder: Path, *, resume: bool = False, stop_after: int | None = None
) -> tuple[Run, list[Validated], list[str]]:
    told: list[str] = []
    run = Run(recipe, folder, notify=told.append)
    events = list(run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after))
    return run, [event for event in events if isinstance(event, Validated)], told


def test_a_checkpoint_that_cannot_be_written_does_not_end_a_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all its last one, before the export; one that a stop asked for does."""

    def full(*_: Path | Checkpoint) -> Path:
        raise OutputError("cannot write there: no space left on device; nothing was changed there")

    monkeypatch.setattr("birdie.train.loop.save_checkpoint", full)
    run, _, told = finished(recipe, tmp_path / "run")
    assert run.steps == 8
    assert any(line.startswith("no checkpoint of step 8, training goes on: cannot write there") for line in told)
    assert run.export().bytes > 0
    with pytest.raises(OutputError, match="no space left"):
        finished(recipe, tmp_path / "stopped", stop_after=3)


def apart(run: Run, state: Weights) -> float:
    """Root of the mean squared difference of what the run's model holds from `state`."""
    mine = run.model.state_dict()
    return float(torch.cat([(mine[name] - state[name].float()).flatten() for name in mine]).square().mean().sqrt())


def test_the_average_is_what_is_validated_exported_and_scored(recipe: Recipe, tmp_path: Path) -> None:
    run, validated, told = finished(recipe, tmp_path / "on")
    off, plain, silent = finished(dataclasses.replace(recipe, average=AverageSettings()), tmp_path / "off")
    decoded = load(run.export().path)
    assert apart(run, decoded) < 1e-3 < 0.1 * apart(off, decoded)
    assert apart(off, load(off.export().path)) < 1e-3
    assert run.model.looping
    score = evaluate(run.folder / "model.birdie", EvaluationRequest(device="cpu")).score
    assert score.bpb == pytest.approx(validated[-1].score.bpb, rel=1e-3)
    assert validated[-1].score.bpb != pytest.approx(plain[-1].score.bpb, rel=1e-3)
    assert [each.weights for each in validated] == ["the last weights", *(f"EMA 0.7 of {n} steps" for n in (3, 6, 8))]
    assert {each.weights for each in plain} == {"the last weights"}
    (line,) = [line for line in told if line.startswith("at work: average of weights: EMA 0.7 of 8 steps, ")]
    assert line.endswith(" of their norm from the last weights, is the result")
    assert not [line for line in silent if "average of weights" in line]
    assert run.metadata()["weights"] == "EMA 0.7 of 8 steps"
    assert "weights" not in off.metadata()


@pytest.mark.parametrize("stop_after", [3, 7])
def test_a_stopped_run_ends_with_the_same_average(recipe: Recipe, tmp_path: Path, stop_after: int) -> None:
    whole, validated, _ = finished(recipe, tmp_path / "whole")
    finished(recipe, tmp_path / "parts", stop_after=stop_after)
    parts, after, _ = finished(recipe, tmp_path / "parts", resume=True)
    assert apart(parts, whole.model.state_dict()) == 0
    assert (after[-1].score.bpb, after[-1].weights) == (validated[-1].score.bpb, validated[-1].weights)


def test_going_on_after_the_last_step_goes_on_from_the_last_weights(recipe: Recipe, tmp_path: Path) -> None:
    """The checkpoint has both: a longer run continues what was trained, not what was exported."""
    constant = dataclasses.replace(  # what a step does then says nothing of how long the run is
        recipe,
        model=dataclasses.replace(recipe.model, enable_looping_at=0.0),
        train=dataclasses.replace(recipe.train, warmdown_iters=0),
    )
    longer = dataclasses.replace(constant, train=dataclasses.replace(constant.train, iterations=10))
    whole, _, _ = finished(longer, tmp_path / "whole")
    first, _, _ = finished(constant, tmp_path / "parts")
    again, _, told = finished(constant, tmp_path / "parts", resume=True)
    assert apart(again, first.model.state_dict()) == 0
    assert [line for line in told if "EMA 0.7 of 8 steps" in line]
    parts, _, _ = finished(longer, tmp_path / "parts", resume=True)
    assert apart(parts, whole.model.state_dict()) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"average": EMA, "qat": Qat(levels="ternary")}, "average ema of weights that train on ternary levels"),
        ({"average": SWA, "train": TrainSettings(min_lr=0.6)}, "swa_below is 0.6, but the learning rates never fall"),
        ({"qat": Qat(bits=6, below=0.1), "train": TrainSettings(min_lr=0.1)}, "qat below is 0.1, but the learning"),
    ],
)
def test_what_could_never_come_on_or_would_be_lost_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe(**change)


def test_it_goes_with_training_on_a_uniform_grid(recipe: Recipe, tmp_path: Path) -> None:
    run, _, told = finished(dataclasses.replace(recipe, qat=Qat(bits=6, tensors=("blocks.*",))), tmp_path)
    assert [line for line in told if line.startswith("at work: average of weights")]
    assert apart(run, load(run.export().path)) < 1e-3
