"""The average of weights is the formula's, on every rank, through checkpoints and warm-up; and it is exported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from birdie.artifact.loading import load
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPTConfig
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.events import Validated
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.program import metadata
from birdie.gpt.run.recipe_settings import DataSettings, ExportSettings, Recipe, RunSettings
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.average import Average
from birdie.gpt.train.resuming import require_average
from birdie.gpt.train.settings import AverageSettings, TrainSettings
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import TrainingCheckpoint, load_checkpoint
from birdie.small.qat.settings import Qat
from birdie.system.context import Context
from tests.tiny_run import CHUNK_TOKENS, TinyBatches, save, tiny_model, tiny_settings, tiny_training

EMA = AverageSettings("ema", ema_decay=0.8)
SWA = AverageSettings("swa", swa_every=2, swa_below=0.6)
LAWA = AverageSettings("lawa", lawa_k=3, lawa_every=2)
KINDS = pytest.mark.parametrize("average", [EMA, SWA, LAWA], ids=lambda average: average.kind)
Weights = dict[str, Tensor]


def start(average: AverageSettings | None = None, **changes: Any) -> Training:
    settings = tiny_settings(**({"accumulation": 1, "train_batch_tokens": CHUNK_TOKENS} | changes))
    return tiny_training(tiny_model(), TinyBatches(), settings, average=average)


def weights_of(run: Training) -> Weights:
    """Return copies of the weights in the model."""
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def course() -> tuple[list[Weights], list[float], list[float]]:
    """Return the weights before the first and after each step, in float64, and each step's loss and multiplier."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in every test of training: the number of threads decides the order of sums
    run = start()
    weights, losses, factors = [weights_of(run)], [], []
    for step in run:
        weights.append(weights_of(run))
        losses.append(step.loss)
        factors.append(step.lr_multiplier)
    torch.set_num_threads(threads)
    return [{name: w.double() for name, w in snapshot.items()} for snapshot in weights], losses, factors


@KINDS
def test_the_average_is_that_of_the_formula(
    average: AverageSettings, course: tuple[list[Weights], list[float], list[float]]
) -> None:
    weights, losses, factors = course
    run = start(average)
    assert [step.loss for step in run] == losses  # training is not affected
    for name, mean in run.average.mean().items():
        path = [snapshot[name] for snapshot in weights]
        if average.kind == "ema":
            expected = path[0]
            for w in path[1:]:
                expected = 0.8 * expected + 0.2 * w
        elif average.kind == "swa":
            terms = [n for n in range(1, 13) if n % 2 == 0 and factors[n - 1] < 0.6]
            assert terms == [10, 12]  # the factor of step 9 is 2/3, that of step 10 is 1/2
            expected = torch.stack([path[n] for n in terms]).mean(0)
        else:
            expected = torch.stack([path[n] for n in (8, 10, 12)]).mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-7)


@KINDS
def test_finishing_puts_it_into_the_model_and_reports_the_distance(average: AverageSettings) -> None:
    run = start(average)
    list(run)
    last, mean = weights_of(run), dict(run.average.mean())
    (line,) = run.finish()
    assert equal(weights_of(run), mean)
    distance = torch.stack([(mean[n] - last[n]).double().norm() for n in last]).norm()
    moved = float(distance / torch.stack([last[n].double().norm() for n in last]).norm())
    assert moved > 1e-3
    assert f"{moved:.2%} of their norm from the last weights" in line
    assert str(run.average) in line
    for forbidden in (run.finish, run.state, lambda: run.average.in_model().__enter__()):
        with pytest.raises(WeightsError, match="average of its weights"):
            forbidden()


def test_a_run_without_an_average_ends_with_the_last_weights(
    course: tuple[list[Weights], list[float], list[float]],
) -> None:
    without, (weights, _, _) = start(), course
    list(without)
    assert equal({name: w.double() for name, w in weights_of(without).items()}, weights[-1])
    assert without.finish() == []
    assert equal({name: w.double() for name, w in weights_of(without).items()}, weights[-1])


def test_for_a_validation_it_is_in_the_model_temporarily() -> None:
    run = start(EMA)
    steps = iter(run)
    for _ in range(5):
        next(steps)
    last = weights_of(run)
    with run.average.in_model():
        assert equal(weights_of(run), dict(run.average.mean()))
        with pytest.raises(WeightsError, match="cannot train"):
            next(steps)
    assert equal(weights_of(run), last)
    with pytest.raises(ValueError, match="scoring failed"), run.average.in_model():
        raise ValueError("scoring failed")
    assert equal(weights_of(run), last)
    plain = start(EMA)
    losses = [step.loss for step in plain]
    validated = start(EMA)
    curve = []
    for step in validated:
        curve.append(step.loss)
        with validated.average.in_model():
            pass
    assert curve == losses
    assert equal(dict(validated.average.mean()), dict(plain.average.mean()))


@pytest.mark.parametrize("saved", [None, SWA])
def test_a_checkpoint_without_it_starts_it_anew_and_reports_that(saved: AverageSettings | None, tmp_path: Path) -> None:
    run = start(saved)
    next(iter(run))
    save(run, tmp_path)
    lines: list[str] = []
    resume = load_checkpoint(tmp_path)
    resumed = tiny_training(
        tiny_model(), TinyBatches(), tiny_settings(), saved=resume, average=EMA, notify=lines.append
    )
    assert "the checkpoint has no EMA of weights; the average begins at its step" in lines
    assert any(line.startswith("resuming with average.kind = ema") for line in lines)
    assert equal(dict(zip(weights_of(resumed), resumed.average.tensors(), strict=True)), weights_of(run))


@KINDS
def test_an_average_of_another_model_is_refused(average: AverageSettings) -> None:
    run = start(average, warmdown_iters=12)
    list(run)
    state = run.state().average
    name = next(key for key in state if key.endswith("tok_emb.weight"))
    for wrong in ({**state, name: state[name][1:]}, {key: value for key, value in state.items() if key != name}):
        with pytest.raises(WeightsError, match=r"average of 'tok_emb.weight'"):
            require_average(wrong, dict(run.model.named_parameters()), 12)


def test_views_stay_views_and_integers_are_not_averaged() -> None:
    """Matrices of one bank stay in its storage."""
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
    assert average.finish() is not None
    torch.testing.assert_close(bank, first + 0.5)
    assert all(tensors[f"layer{i}"].data_ptr() == bank[i].data_ptr() for i in range(3))
    assert tensors["steps"] == 7


def test_small_changes_of_bfloat16_weights_are_not_lost() -> None:
    """In bfloat16 this average would not change at all: 2⁻¹⁰ is below half of its spacing at 1."""
    weight = torch.ones(4, dtype=torch.bfloat16)
    average = Average(AverageSettings("ema", ema_decay=0.999), {"w": weight})
    weight.fill_(1.0078125)
    for step in range(1, 401):
        average.update(step, 1.0)
    expected = 1.0078125 - 0.0078125 * 0.999**400
    torch.testing.assert_close(average.mean()["w"], torch.full((4,), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"kind": "mean"}, "average kind is 'mean'; .* lawa"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"ema_decay": float("nan")}, "ema_decay is nan"),
        ({"swa_below": 0.0}, "swa_below is 0.0"),
        ({"swa_every": 0}, "swa_every is 0"),
        ({"lawa_k": 0}, "lawa_k is 0"),
        ({"lawa_every": -1}, "lawa_every is -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        AverageSettings(**change)


LENGTH = 32


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run with depth recurrence from its middle on."""
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return Recipe(
        data=DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(
            vocab_size=260,
            num_layers=3,
            model_dim=32,
            num_heads=2,
            num_kv_heads=1,
            mlp_mult=4,
            num_loops=1,
            loop_start=1,
            loop_end=2,
            enable_looping_at=0.5,
        ),
        train=TrainSettings(
            iterations=8,
            warmdown_iters=4,
            warmup_steps=2,
            max_wallclock_seconds=0,
            accumulation=2,
            train_batch_tokens=4 * LENGTH,
            train_seq_len=LENGTH,
            compute_dtype="float32",
        ),
        average=AverageSettings("ema", ema_decay=0.7),
        validation=ValidationSettings(every=3, max_tokens=500),
        export=ExportSettings(scheme="fp16", effort="fast"),
        run=RunSettings(checkpoint_every=0),
        device="cpu",
    )


def finished(
    recipe: Recipe, folder: Path, *, resume: bool = False, stop_after: int | None = None
) -> tuple[Run, list[Validated], list[str]]:
    lines: list[str] = []
    run = Run(recipe, folder, Context(torch.device("cpu"), notify=lines.append))
    events = list(run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after))
    return run, [event for event in events if isinstance(event, Validated)], lines


@pytest.fixture(scope="module")
def uninterrupted(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Validated], list[str]]:
    return finished(recipe, tmp_path_factory.mktemp("uninterrupted") / "run")


def test_a_checkpoint_that_cannot_be_written_does_not_end_a_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the last one, before the export; but one after a requested stop does."""

    def full(*_: Path | TrainingCheckpoint, **__: int) -> Path:
        raise OutputError("cannot write there: no space left on device; nothing was changed there")

    monkeypatch.setattr("birdie.gpt.run.pipeline.save_checkpoint", full)
    run, _, lines = finished(recipe, tmp_path / "run")
    assert run.steps == 8
    assert any(line.startswith("no checkpoint of step 8, training goes on: cannot write there") for line in lines)
    assert run.export().bytes > 0
    with pytest.raises(OutputError, match="no space left"):
        finished(recipe, tmp_path / "stopped", stop_after=3)


def distance(run: Run, state: Weights) -> float:
    """Return the root mean squared difference of the weights in the run's model from `state`."""
    weights = run.model.state_dict()
    return float(
        torch.cat([(weights[name] - state[name].float()).flatten() for name in weights]).square().mean().sqrt()
    )


def test_the_average_is_validated_exported_and_scored(
    recipe: Recipe, uninterrupted: tuple[Run, list[Validated], list[str]], tmp_path: Path
) -> None:
    run, validated, lines = uninterrupted
    off, plain, silent = finished(dataclasses.replace(recipe, average=AverageSettings()), tmp_path / "off")
    decoded = load(run.export().path)
    assert distance(run, decoded) < 1e-3 < 0.1 * distance(off, decoded)
    assert distance(off, load(off.export().path)) < 1e-3
    assert run.model.depth_recurrence
    score = evaluate(run.folder / "model.birdie", EvaluationRequest(device="cpu")).score
    assert score.bpb == pytest.approx(validated[-1].score.bpb, rel=1e-3)
    assert validated[-1].score.bpb != pytest.approx(plain[-1].score.bpb, rel=1e-3)
    assert [event.weights for event in validated] == ["the last weights", *(f"EMA 0.7 of {n} steps" for n in (3, 6, 8))]
    assert {event.weights for event in plain} == {"the last weights"}
    (line,) = [line for line in lines if line.startswith("active: average of weights: EMA 0.7 of 8 steps, ")]
    assert line.endswith(" of their norm from the last weights, is the result")
    assert not [line for line in silent if "average of weights" in line]
    assert metadata(run.work, run.trained)["weights"] == "EMA 0.7 of 8 steps"
    assert "weights" not in metadata(off.work, off.trained)


def test_a_stopped_run_ends_with_the_same_average(
    recipe: Recipe, uninterrupted: tuple[Run, list[Validated], list[str]], tmp_path: Path
) -> None:
    run, validated, _ = uninterrupted
    finished(recipe, tmp_path / "parts", stop_after=3)
    resumed, events, _ = finished(recipe, tmp_path / "parts", resume=True)
    assert distance(resumed, run.model.state_dict()) == 0
    assert (events[-1].score.bpb, events[-1].weights) == (validated[-1].score.bpb, validated[-1].weights)


def test_a_run_that_is_resumed_after_its_last_step_continues_from_the_last_weights(
    recipe: Recipe, tmp_path: Path
) -> None:
    """The checkpoint has both: a longer run continues the training, not the exported average."""
    constant = dataclasses.replace(  # steps that do not depend on the length of the run
        recipe,
        model=dataclasses.replace(recipe.model, enable_looping_at=0.0),
        train=dataclasses.replace(recipe.train, warmdown_iters=0),
    )
    longer = dataclasses.replace(constant, train=dataclasses.replace(constant.train, iterations=10))
    uninterrupted, _, _ = finished(longer, tmp_path / "uninterrupted")
    first, _, _ = finished(constant, tmp_path / "parts")
    again, _, lines = finished(constant, tmp_path / "parts", resume=True)
    assert distance(again, first.model.state_dict()) == 0
    assert [line for line in lines if "EMA 0.7 of 8 steps" in line]
    parts, _, _ = finished(longer, tmp_path / "parts", resume=True)
    assert distance(parts, uninterrupted.model.state_dict()) == 0


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"average": EMA, "qat": Qat(levels="ternary")}, "average ema of weights that train on ternary levels"),
        ({"average": SWA, "train": TrainSettings(min_lr=0.6)}, "swa_below is 0.6"),
        ({"qat": Qat(bits=6, below=0.1), "train": TrainSettings(min_lr=0.1)}, "qat below is 0.1"),
    ],
)
def test_averages_that_could_never_begin_or_would_be_lost_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        Recipe(**change)


@KINDS
def test_a_mask_is_not_averaged(average: AverageSettings) -> None:
    """A mean of −inf and −inf would be NaN."""
    weight, mask = torch.ones(3), torch.tensor([0.0, -torch.inf, -torch.inf])
    run = Average(average, {"weight": weight, "mask": mask})
    for step in range(1, 7):
        weight += 1
        run.update(step, 0.1)
    run.finish()
    assert mask.tolist() == [0.0, -torch.inf, -torch.inf]
    assert 1 < float(weight[0]) < 7
