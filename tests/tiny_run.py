"""Model, batches and settings of a training run that takes milliseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.micro_batches import BatchSource, Documents
from birdie.gpt.train.plan import StepPlan
from birdie.gpt.train.settings import AverageSettings, BanditSettings, OptimizerSettings, TrainingTables, TrainSettings
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import TrainingCheckpoint, save_checkpoint
from birdie.system.callbacks import StepHook
from birdie.system.context import Context
from birdie.system.distributed import World
from tests.gpt.model.technique_table import EVERYTHING as EVERYTHING

VOCAB, LENGTH, SEQUENCES, CHUNKS = 32, 16, 2, 4
CHUNK_TOKENS = SEQUENCES * LENGTH
STEP_TOKENS = CHUNKS * CHUNK_TOKENS
OPTIMIZERS = OptimizerSettings(matrix_lr=0.02, newton_schulz_dtype="float32")


class TinyBatches:
    """Sorted random tokens, which a model can learn; the position counts micro-batches over all ranks."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.position + self.world.rank)
        self.position += self.world.size
        rows = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator).sort(dim=1).values
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def tiny_model(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
    return GPT(GPTConfig(**(shape | changes)))


def tiny_training(
    model: nn.Module,
    batches: BatchSource,
    train: TrainSettings,
    optimizer: OptimizerSettings = OPTIMIZERS,
    *,
    average: AverageSettings | None = None,
    bandit: BanditSettings | None = None,
    hooks: Sequence[StepHook] = (),
    documents: Documents | None = None,
    saved: TrainingCheckpoint | None = None,
    **context: Any,
) -> Training:
    """Return a training where the model is; `context` has other fields of a `Context`, None for a default."""
    tables = TrainingTables(train, optimizer, average or AverageSettings(), bandit or BanditSettings())
    where = Context(
        next(model.parameters()).device, **{name: value for name, value in context.items() if value is not None}
    )
    return Training(model, batches, tables, where, hooks=hooks, documents=documents, saved=saved)


def at_rates(rate: float = 1.0, momentum: float = 0.95, decay: float = 1.0) -> StepPlan:
    """Return the plan of a step at these rates."""
    return StepPlan(0, 0.0, rate, rate, momentum, decay, ())


def accept(_loss: float, _norm: float) -> None:
    """Accept loss and gradient norm of a step."""


def save(run: Training, folder: Path, keep: int = 2) -> Path:
    """Write the state of a run as the newest checkpoint of `folder`."""
    return save_checkpoint(folder, run.checkpoint(), keep=keep)


def trained_model(run: Training) -> GPT:
    """Return the model of a training run."""
    model = run.model
    assert isinstance(model, GPT)
    return model


def tiny_settings(**changes: Any) -> TrainSettings:
    defaults: dict[str, Any] = {
        "iterations": 12,
        "warmdown_iters": 6,
        "warmup_steps": 0,
        "train_batch_tokens": STEP_TOKENS,
        "train_seq_len": LENGTH,
        "accumulation": CHUNKS,
        "max_wallclock_seconds": 0,
        "compute_dtype": "float32",
    }
    return TrainSettings(**(defaults | changes))
