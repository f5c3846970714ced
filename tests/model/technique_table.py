"""Every technique of a GPT with settings that switch it on, and models in which each parameter has an effect.

A new technique is one entry of TECHNIQUES, and its formula in `tests.model.reference_gpt`; `test_conformance` applies
every law to every entry.
"""

import dataclasses
from typing import Any

import torch

from birdie.errors import ConfigError
from birdie.model.config import GPTConfig
from birdie.model.gpt import GPT

V, BOS = 50, 1
SMALL = GPTConfig(vocab_size=V, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, tied_embed_init_std=0.5)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "bigram": {"bigram_vocab_size": 17, "bigram_dim": 8},
    "trigram": {"bigram_vocab_size": 17, "bigram_dim": 8, "trigram": True},
    "gated smear": {"smear": "gated", "gate_window": 6},
    "fixed smear": {"smear": "fixed"},
    "factored embedding": {"embed_dim": 12, "tie_embeddings": True},
    "factored embedding, untied": {"embed_dim": 12, "tie_embeddings": False},
    "partial RoPE": {"rope_dims": 4},
    "longer than trained": {"rope_dims": 6, "rope_train_seq_len": 5},
    "exclusive attention": {"xsa_last_n": 4},
    "value embeddings": {"value_embed_layers": (1, 4), "value_embed_dim": 8},
    "value residual": {"value_residual": True},
    "sparse gate": {"attn_gate": "sparse", "gate_window": 6, "sparse_gate_scale": 0.5},
    "output gate": {"attn_gate": "output", "gate_window": 6},
    "dense gate": {"attn_gate": "dense"},
    "isolated documents": {"isolate_documents": True},
    "attention window": {"attn_window": 4, "attn_window_layers": (0, 2), "isolate_documents": False},
    "leaky ReLU²": {"activation": "leaky_relu2"},
    "SwiGLU": {"activation": "swiglu", "mlp_mult": 1.5},
    "LN scale": {"ln_scale": True},
    "gated skips": {"skip_gates": True},
    "depth recurrence": {"num_loops": 2, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.5},
    "parallel residual streams": {"parallel": "lanes", "parallel_start_layer": 3},
    "parallel attention and MLP": {"parallel": "joint", "parallel_start_layer": 3},
    "asymmetric softcap": {"softcap": "asymmetric", "logit_softcap": 5.0},
    "polynomial softcap": {"softcap": "poly", "logit_softcap": 2.0},
}


def with_settings(change: dict[str, Any]) -> GPTConfig:
    return dataclasses.replace(SMALL, **change)


def combinations() -> list[dict[str, Any]]:
    """Return combined settings that together have every technique, each combination as many as go together."""
    combined: list[dict[str, Any]] = []
    for change in TECHNIQUES.values():
        for settings in combined:
            if all(settings.get(name, value) == value for name, value in change.items()) and _valid(settings | change):
                settings |= change
                break
        else:
            combined.append(dict(change))
    return combined


def _valid(settings: dict[str, Any]) -> bool:
    try:
        with_settings(settings)
    except ConfigError:
        return False
    return True


COMBINATIONS = combinations()
EVERYTHING = COMBINATIONS[0]
"""As many techniques as go together; for five layers and heads of at least 4 dimensions."""
ALL = {**TECHNIQUES, **{f"combination {n}": settings for n, settings in enumerate(COMBINATIONS)}, "baseline": {}}


def randomized(config: GPTConfig, seed: int = 0) -> GPT:
    """Return a model with no parameter at zero or one, so that each has an effect."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 2 else 0.5))
            if name == "softcaps":
                p.copy_(torch.tensor([2.0, 3.0]))
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Return ids with documents that begin at the third position and then every four."""
    ids = torch.randint(2, V, shape, generator=torch.Generator().manual_seed(seed))
    ids[..., 2::4] = BOS
    return ids
