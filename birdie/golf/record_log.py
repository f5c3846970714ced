"""Lines of the challenge's log, from plain values: people and programs read them, so formats and order are fixed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from birdie.gpt.score.accumulator import Score

if TYPE_CHECKING:
    from birdie.gpt.run.recipe_settings import DataSettings, Recipe
    from birdie.gpt.run.run_data import RunData
    from birdie.gpt.train.training import Training


def data_lines(settings: "DataSettings", data: "RunData", length: int) -> Iterator[str]:
    """Yield the lines about data: kind and name of the tokenizer, training shards, pattern and size of validation."""
    shards, text = data.dataset.train, data.dataset.val[0].name.partition("_val_")[0]
    pattern = settings.val[0] if settings.val else f"{Path(settings.path)}/{text}_val_*.bin"
    yield f"val_bpb:enabled tokenizer_kind={data.tokenizer.kind} tokenizer_path={settings.tokenizer}"
    yield f"train_loader:dataset:{shards[0].parent.name} train_shards:{len(shards)}"
    yield f"val_loader:shards pattern={pattern} tokens:{(len(data.text.tokens) - 1) // length * length}"


def settings_lines(recipe: "Recipe", parameters: int, run: "Training") -> Iterator[str]:
    """Yield the lines about the model, the ranks and the settings of training."""
    model, train, rates = recipe.model, recipe.train, recipe.optimizer
    yield f"model_params:{parameters}"
    yield f"world_size:{run.world.size} grad_accum_steps:{run.micro_steps}"
    kernels = ("cudnn", "flash", "mem_efficient", "math")
    enabled = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in kernels}
    yield "sdp_backends:" + " ".join(f"{name}={on}" for name, on in enabled.items())
    yield f"attention_mode:gqa num_heads:{model.num_heads} num_kv_heads:{model.num_kv_heads}"
    tied = model.tie_embeddings
    yield (
        f"tie_embeddings:{tied} embed_lr:{rates.tied_embed_lr if tied else rates.embed_lr} "
        f"head_lr:{0.0 if tied else rates.head_lr} matrix_lr:{rates.matrix_lr} scalar_lr:{rates.scalar_lr}"
    )
    yield (
        f"train_batch_tokens:{train.train_batch_tokens} train_seq_len:{train.train_seq_len} "
        f"iterations:{train.iterations} warmup_steps:{train.warmup_steps} "
        f"max_wallclock_seconds:{train.max_wallclock_seconds:.3f}"
    )
    yield f"seed:{train.seed}"


def step_line(step: int, total: int, loss: float, ms: float) -> str:
    """Return the line of a training step: loss in nats, training time so far."""
    return f"step:{step}/{total} train_loss:{loss:.4f} {_times(step, ms)}"


def validation_line(step: int, total: int, score: Score, ms: float) -> str:
    """Return the line of a validation."""
    return f"step:{step}/{total} val_loss:{score.val_loss:.4f} val_bpb:{score.bpb:.4f} {_times(step, ms)}"


def _times(step: int, ms: float) -> str:
    return f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"


def capped_line(step: int, total: int, ms: float) -> str:
    """Return the line of a run that the wall-clock cap ended."""
    return f"stopping_early: wallclock_cap train_time:{ms:.0f}ms step:{step}/{total}"


def memory_line(device: torch.device) -> str:
    """Return the line about the memory of a GPU; 0 without one."""
    allocated = reserved = 0
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return f"peak memory allocated: {allocated // 2**20} MiB reserved: {reserved // 2**20} MiB"


def score_lines(name: str, score: Score, ms: float | None = None, stride: str = "") -> list[str]:
    """Return the lines of a score: rounded, with the time it took, if that is given, and exact."""
    rounded = f"{name}{stride} val_loss:{score.val_loss:.4f} val_bpb:{score.bpb:.4f} eval_time:{ms or 0.0:.0f}ms"
    exact = f"{name}_exact{stride} val_loss:{score.val_loss:.8f} val_bpb:{score.bpb:.8f}"
    return [exact] if ms is None else [rounded, exact]
