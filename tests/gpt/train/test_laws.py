"""Laws of training × its features: each feature is one line of the table, and keeps every law.

resume     a run that goes on from a file, after a warm-up, is the uninterrupted one without, to the last bit:
           in weights, optimizer, average, plan, loader and random generators
ranks      two ranks train as one
action     it changes the run, or, where it must not, it does not
log        a line says that it is active
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from birdie.gpt.train import fp8 as fp8_module
from birdie.gpt.train.fp8 import train_in_fp8
from birdie.gpt.train.settings import AverageSettings, BanditSettings
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import TrainingCheckpoint, load_checkpoint, save_checkpoint
from birdie.small.qat.settings import Qat
from birdie.system.callbacks import Notify, StepHook
from birdie.system.distributed import World
from tests.gpt.model.technique_table import COMBINATIONS
from tests.ranks import run_in_process_group
from tests.tiny_run import CHUNK_TOKENS, OPTIMIZERS, TinyBatches, tiny_model, tiny_settings, tiny_training

STOP = 3  # of 6 steps: in the middle of every stage, window and average below


@dataclass(frozen=True)
class Feature:
    """Settings of a feature, and what a run with it must show.

    Attributes:
        train, optimizer, model: changed settings.
        more: further arguments of `Training`.
        hook: prepares a model for a technique of its own.
        line: in the log; None: the feature has none.
        differs: whether the run must differ from plain training; None: by rounding only.
        close: how near the losses of two ranks are to those of one; rounding to eight bits magnifies their differences.
    """

    train: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[Any, Notify], StepHook] | None = None
    line: str | None = None
    differs: bool | None = True
    close: float = 1e-4


SHAPE = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1}
WIDE = {"num_layers": 5, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
SHORT = {"iterations": 6, "warmdown_iters": 3, "accumulation": 2, "train_batch_tokens": 2 * CHUNK_TOKENS}
LOOPS = {"num_loops": 1, "loop_start": 1, "loop_end": 1, "enable_looping_at": 0.6}
FOUR = {
    "accumulation": 4,
    "train_batch_tokens": 4 * CHUNK_TOKENS,
}  # chunks: two ranks have two stages or lengths
FEATURES = {
    "plain": Feature(differs=False),
    "ema": Feature(more={"average": AverageSettings("ema", ema_decay=0.7)}, line="average of weights: EMA 0.7 of 6"),
    "swa": Feature(more={"average": AverageSettings("swa", swa_every=2, swa_below=1.1)}, line="SWA of 3 snapshots"),
    "lawa": Feature(more={"average": AverageSettings("lawa", lawa_every=2, lawa_k=2)}, line="LAWA of 2 snapshots"),
    "bandit": Feature(more={"bandit": BanditSettings(every=2)}, line="learning-rate bandit: 3 choices of 2 steps"),
    "normuon": Feature(optimizer={"muon_beta2": 0.9, "muon_row_normalize": True}),
    "polar express": Feature(optimizer={"muon_coefficients": "polar_express"}),
    "clipping": Feature(optimizer={"grad_clip_norm": 0.1}),
    "decay": Feature(optimizer={"muon_weight_decay": 0.5, "adam_weight_decay": 0.5, "decay_full": 0.3}),
    "lengths": Feature(train={"seq_len_start": 4, "seq_schedule_fraction": 0.6}, line="from step 3 on: sequences of 8"),
    "batches": Feature(train={**FOUR, "batch_tokens_start": 2 * CHUNK_TOKENS}, line="from step 1 on: sequences of 16,"),
    "mixed lengths": Feature(train={**FOUR, "mixed_seq_lens": (16, 4)}, line="sequence lengths: rank 0 took 384 "),
    "micro-batches": Feature(train={"micro_batch_tokens": 16}, differs=None),
    "measured": Feature(train={"micro_batch_tokens": "auto"}, line="micro-batches of 64 tokens, 1 to", differs=None),
    "forced end": Feature(train={"force_stop_step": 6}, line="forced last step: 6,", differs=False),
    "recurrence": Feature(model=LOOPS, line="depth recurrence from step 5 on"),
    "qat": Feature(hook=Qat(bits=3, start=0.2, tensors=("tok_emb*",)).prepare, line="qat ", model={"vocab_size": 256}),
    "compiled": Feature(train={"compile": True}, differs=False),
    "fp8": Feature(train={"fp8": True}, line="fp8: ", close=5e-3),
}  # fmt: skip
FEATURES |= {f"techniques {n}": Feature(model={**WIDE, **settings}) for n, settings in enumerate(COMBINATIONS)}
if find_spec("torchao") is None:
    FEATURES.pop("fp8")


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _set_stand_ins(patch.setattr)
        yield


def _set_stand_ins(replace: Callable[[Any, str, Any], None]) -> None:
    """Graphs of torch.compile are traced and not compiled; torchao emulates products in fp8."""
    replace(torch, "compile", partial(torch.compile, backend="eager"))
    replace(fp8_module, "fp8_supported", lambda *_: True)
    replace(fp8_module, "train_in_fp8", partial(train_in_fp8, emulate=True))


class RandomBatches(TinyBatches):
    """Draws from torch's global generator, as dropout or augmentation would; its state is in the checkpoint."""

    def next(self) -> tuple[Tensor, Tensor]:
        torch.rand(1)
        return super().next()


@dataclass
class Result:
    """A run: its losses by step, its log, its state before and its weights after `finish`."""

    losses: dict[int, float]
    log: list[str]
    state: TrainingCheckpoint
    weights: dict[str, Tensor]


def run(
    name: str,
    *,
    stop: int | None = None,
    saved: TrainingCheckpoint | None = None,
    world: World | None = None,
    **train: Any,
) -> Result:
    """Train with a feature; `stop` ends the run after that step."""
    feature, log, losses = FEATURES[name], list[str](), dict[int, float]()
    seed = (world or World()).rank if saved is None else 5
    model = tiny_model(seed, **(SHAPE | feature.model))
    hooks = [*([] if feature.hook is None else [feature.hook(model, log.append)]), *model.step_hooks(log.append)]
    training: Training = tiny_training(
        model,
        RandomBatches(world),
        tiny_settings(**(SHORT | feature.train | train)),
        dataclasses.replace(OPTIMIZERS, **feature.optimizer),
        hooks=hooks,
        saved=saved,
        world=world,
        stop=lambda: training.number == stop,
        notify=log.append,
        **feature.more,
    )
    for step in training:
        losses[step.number] = step.loss
    state = training.checkpoint()
    log += training.finish()
    return Result(losses, log, state, {name: tensor.clone() for name, tensor in training.tensors().items()})


@functools.cache
def plain_run(name: str) -> Result:
    """Return the run without warm-up and without interruption."""
    return run(name)


def require_equal(one: Result, other: Result) -> None:
    """Check that two runs agree in everything that a checkpoint holds."""
    assert one.losses == other.losses
    for part in ("weights", "optimizer", "rng", "average"):
        tensors, others = getattr(one.state, part), getattr(other.state, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[key], others[key]) for key in tensors), part
    assert (one.state.loader, one.state.bandit) == (other.state.loader, other.state.bandit)
    assert all(torch.equal(one.weights[key], other.weights[key]) for key in one.weights)


NIGHTLY = {name for name in FEATURES if name.startswith("techniques") and name != "techniques 0"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in FEATURES]
)
class TestLaws:
    """Each law for each feature."""

    def test_a_resumed_run_is_the_uninterrupted_one(self, name: str, tmp_path: Path) -> None:
        first = run(name, stop=STOP, warmup_steps=2)
        save_checkpoint(tmp_path, first.state)
        rest = run(name, saved=load_checkpoint(tmp_path), warmup_steps=2)
        assert not [line for line in rest.log if line.startswith("resuming with")]
        rest.losses = first.losses | rest.losses
        require_equal(rest, plain_run(name))

    def test_it_acts(self, name: str) -> None:
        with_it, plain = plain_run(name), plain_run("plain")
        if FEATURES[name].differs is None:
            assert list(with_it.losses.values()) == pytest.approx(list(plain.losses.values()), abs=1e-4)
            return
        same = with_it.losses == plain.losses and all(
            torch.equal(weight, plain.weights[key]) for key, weight in with_it.weights.items()
        )
        assert same is not FEATURES[name].differs

    def test_the_log_says_so(self, name: str) -> None:
        line = FEATURES[name].line
        assert line is None or [text for text in plain_run(name).log if line in text]


SHARED = {  # features of which a rank has a share, or on which ranks must agree
    *("ema", "bandit", "normuon", "clipping", "lengths", "batches", "mixed lengths", "measured", "qat"),
    "techniques 0",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [SHARED, pytest.param(FEATURES.keys() - SHARED, marks=pytest.mark.nightly)],
    ids=["shared", "others"],
)
def test_two_ranks_train_as_one(names: set[str], tmp_path: Path) -> None:
    """In one process group, which resumes each run."""
    run_in_process_group(partial(_train_all, names=sorted(names)), 2, tmp_path)
    for name, two in torch.load(tmp_path / "results.pt", weights_only=True).items():
        alone, close = plain_run(name), FEATURES[name].close
        assert list(two["losses"].values()) == pytest.approx(list(alone.losses.values()), abs=close), name
        assert two["optimizer"].keys() == alone.state.optimizer.keys(), name
        for key, weight in alone.weights.items():
            torch.testing.assert_close(two["weights"][key], weight, rtol=0, atol=50 * close, msg=name)


def _train_all(world: World, folder: Path, names: list[str]) -> None:
    _set_stand_ins(setattr)
    results = {}
    for name in names:
        first = run(name, world=world, stop=STOP)
        rest = run(name, world=world, saved=first.state)
        losses = first.losses | rest.losses
        results[name] = {"losses": losses, "optimizer": rest.state.optimizer, "weights": rest.weights}
    if world.is_main:
        torch.save(results, folder / "results.pt")
