"""Settings of a GPT inferred from its weights, for checkpoints without settings."""

import re
from collections.abc import Mapping

from torch import Tensor

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.model.config import GPTConfig

_BLOCK = re.compile(r"blocks\.(\d+)\.")


def infer_config(state: Mapping[str, Tensor]) -> GPTConfig:
    """Return the settings of a GPT with tensors of these names and shapes; what shapes do not show is the default."""
    try:
        layers = {int(match[1]) for name in state if (match := _BLOCK.match(name))}
        if layers != set(range(len(layers))):
            raise ValueError("the numbers of its layers have gaps")
        embedding, gain = state["tok_emb.weight"], state["blocks.0.attn.q_gain"]
        (vocab_size, dim), (heads,) = embedding.shape, gain.shape
        return GPTConfig(
            vocab_size=vocab_size,
            num_layers=len(layers),
            model_dim=dim,
            num_heads=heads,
            num_kv_heads=state["blocks.0.attn.c_k.weight"].shape[0] // (dim // heads),
            mlp_mult=state["blocks.0.mlp.fc.weight"].shape[0] / dim,
            tie_embeddings="lm_head.weight" not in state,
        )
    except (KeyError, ValueError, ZeroDivisionError, IndexError, ConfigError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise WeightsError(
            f"these are not the weights of the challenge's GPT ({reason}); use one of its exports"
        ) from error
