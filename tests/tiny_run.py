"""A training run small enough to repeat many times in a test: model, loader, settings; and all techniques."""

from typing import Any

import torch
from torch import Tensor

from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.train.groups import OptimizerSettings
from birdie.train.settings import TrainSettings

VOCAB, LENGTH, SEQUENCES, SPANS = 32, 16, 2, 4
OPTIMIZERS = OptimizerSettings(matrix_lr=0.02, newton_schulz_dtype="float32")
EVERYTHING: dict[str, Any] = {  # for five layers and heads of at least 4
    "bigram_vocab_size": 17,
    "bigram_dim": 8,
    "trigram": True,
    "smear": "gated",
    "gate_window": 6,
    "rope_dims": 4,
    "xsa_last_n": 4,
    "value_embed_layers": (1, 4),
    "value_embed_dim": 8,
    "value_residual": True,
    "attn_gate": "sparse",
    "isolate_documents": True,
    "activation": "leaky_relu2",
    "ln_scale": True,
    "skip_gates": True,
    "num_loops": 2,
    "loop_start": 1,
    "loop_end": 2,
    "parallel": "lanes",
    "parallel_start_layer": 3,
    "softcap": "asymmetric",
    "logit_softcap": 5.0,
    "embed_dim": 12,
}


class TinyBatches:
    """Sorted random tokens, so that there is something to learn; its position counts spans over all ranks."""

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


def tiny_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=VOCAB, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2))


def tiny_settings(**changes: Any) -> TrainSettings:
    defaults = {
        "iterations": 12,
        "warmdown_iters": 6,
        "warmup_steps": 0,
        "train_batch_tokens": SPANS * SEQUENCES * LENGTH,
        "train_seq_len": LENGTH,
        "accumulation": SPANS,
        "max_wallclock_seconds": 0,
        "compute_dtype": "float32",
    }
    return TrainSettings(**(defaults | changes))
