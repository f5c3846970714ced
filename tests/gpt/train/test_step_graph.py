"""A step as graphs equals the eager step, follows the schedule, and is dropped with a reason where it is wrong."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from birdie.errors import ConfigError
from birdie.gpt.train import step_graph
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import Plan
from birdie.gpt.train.settings import OptimizerSettings
from birdie.gpt.train.step_graph import CudaGraphs
from birdie.gpt.train.training import Training
from tests.gpt.train.recorded_graph import RecordedGraphs
from tests.tiny_run import OPTIMIZERS, TinyBatches, tiny_model, tiny_settings, tiny_training

T = TypeVar("T")
EVERYTHING = dataclasses.replace(
    OPTIMIZERS,
    grad_clip_norm=0.3,
    muon_beta2=0.9,
    muon_weight_decay=0.1,
    adam_weight_decay=0.05,
    decay_full=0.5,
    muon_momentum_warmup_steps=8,
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    backend = RecordedGraphs()
    monkeypatch.setattr("birdie.gpt.train.step_graph.graph_backend", lambda _device: backend)
    return backend


def run(
    optimizers: OptimizerSettings = OPTIMIZERS, notes: list[str] | None = None, model: Any = None, **changes: Any
) -> Training:
    settings = tiny_settings(fused=False, **changes)  # chunks of rows read the factor on the loss
    model = tiny_model() if model is None else model
    return tiny_training(model, TinyBatches(), settings, optimizers, notify=(notes if notes is not None else []).append)


def test_graphs_train_as_eager_steps_do(graphs: RecordedGraphs) -> None:
    notes: list[str] = []
    eager = run(EVERYTHING, iterations=6, warmdown_iters=3)
    replayed = run(EVERYTHING, notes, iterations=6, warmdown_iters=3, step_graphs=True)
    expected, steps = list(eager), list(replayed)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    for a, b in zip(eager.tensors().values(), replayed.tensors().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "CUDA graphs: 5 steps replayed, 1 shapes" in replayed.finish()
    assert "agree with eager ones" in notes[-1]
    assert len(graphs.calls) == 2


def test_each_size_of_a_step_has_graphs_of_its_own(graphs: RecordedGraphs) -> None:
    sizes: dict[str, Any] = {
        "iterations": 6,
        "batch_tokens_start": 64,
        "batch_schedule_fraction": 0.5,
        "warmup_steps": 4,
    }
    expected = [step.loss for step in run(**sizes)]
    assert [step.loss for step in run(step_graphs=True, **sizes)] == pytest.approx(expected, rel=1e-5)
    assert len(graphs.calls) == 4


class NumbersAsRates:
    """Rates that stay numbers, which graphs repeat."""

    def __init__(self, optimizers: Optimizers, _device: torch.device) -> None:
        self.optimizers, self.update = optimizers, optimizers.update

    def set(self, rate: float, momentum: float, decay: float) -> None:
        plan = Plan(tiny_settings(), OPTIMIZERS).at(0, 0.0)
        self.optimizers.set_rates(dataclasses.replace(plan, rate=rate, momentum=momentum, decay=decay))


@pytest.mark.usefixtures("graphs")
def test_a_rate_that_a_graph_holds_fixed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "HeldRates", NumbersAsRates)
    notes: list[str] = []
    expected = [step.loss for step in run(iterations=6, warmdown_iters=4)]
    training = run(notes=notes, iterations=6, warmdown_iters=4, step_graphs=True)
    assert [step.loss for step in training] == expected
    assert any("changes the weights by 5" in note and "stay eager" in note for note in notes)


@pytest.mark.usefixtures("graphs")
def test_what_cannot_be_captured_is_trained_eagerly() -> None:
    class Reads(torch.nn.Module):
        """A model that reads a value in the middle of its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()
            self.compute_dtype = torch.float32

        def parameter_groups(self) -> Any:
            return {f"inner.{name}": group for name, group in self.inner.parameter_groups().items()}

        def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.inner.loss(ids, targets)
            return loss if float(loss.detach()) > 0 else loss * 2

    notes: list[str] = []
    expected = [step.loss for step in run(model=Reads(), iterations=6)]
    training = run(notes=notes, model=Reads(), iterations=6, step_graphs=True)
    assert [step.loss for step in training] == pytest.approx(expected, rel=1e-5)
    assert [note for note in notes if "not permitted when stream is capturing" in note]


@pytest.mark.usefixtures("graphs")
def test_a_loss_that_is_not_finite_leaves_the_weights() -> None:
    training = run(iterations=8, step_graphs=True)
    steps = iter(training)
    for _ in range(4):
        next(steps)
    training.tensors()["tok_emb.weight"][0, 0] = float("nan")
    saved = {name: tensor.clone() for name, tensor in training.tensors().items()}
    with pytest.raises(ConfigError, match="loss of step 5 is nan"):
        next(steps)
    for name, tensor in training.tensors().items():
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0, equal_nan=True)


def test_without_cuda_the_log_says_so() -> None:
    notes: list[str] = []
    run(notes=notes, step_graphs=True)
    assert "CUDA graphs: not used, they need CUDA, and this is cpu" in notes


def test_graphs_that_give_nan_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(RecordedGraphs):
        """Each replay of a gradient fills its results with NaN, as a stale address would."""

        def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
            replay, result = super().capture(work)

            def broken() -> None:
                replay()
                if isinstance(result, torch.Tensor):
                    result.fill_(torch.nan)

            return broken, result

    monkeypatch.setattr("birdie.gpt.train.step_graph.graph_backend", lambda _device: Broken())
    notes: list[str] = []
    expected = [step.loss for step in run(iterations=6)]
    assert [step.loss for step in run(notes=notes, iterations=6, step_graphs=True)] == pytest.approx(expected, rel=1e-5)
    assert [note for note in notes if "stay eager" in note and "nan" in note]


def test_weights_that_became_nan_are_apart() -> None:
    ones, nan, infinite = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])
    assert not step_graph._apart([nan], [ones], [0 * ones]) <= 0.1
    assert step_graph._apart([infinite], [infinite], [infinite - 1]) == 0


def test_a_failed_capture_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context stays on the stream of the capture when ending it fails."""
    current = ["default"]

    @contextmanager
    def failing(*_: object, **__: object) -> Iterator[None]:
        current[0] = "capturing"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "graph", failing)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs().capture(lambda: None)
    assert current == ["default"]
