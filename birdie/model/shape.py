"""The shape of a GPT read off its weights, for checkpoints that come without settings."""

import re
from collections.abc import Mapping

from torch import Tensor

from birdie.errors import ConfigError, WeightsError
from birdie.model.config import GPTConfig

_BLOCK = re.compile(r"blocks\.(\d+)\.")


def config_of(state: Mapping[str, Tensor]) -> GPTConfig:
    """The settings that give a GPT tensors of these names and shapes; what shapes do not tell is the default.

    Raises:
        WeightsError: they are not the tensors of a GPT.
    """
    try:
        embedding, gain = state["tok_emb.weight"], state["blocks.0.attn.q_gain"]
        (vocabulary, dim), (heads,) = embedding.shape, gain.shape
        return GPTConfig(
            vocab_size=vocabulary,
            num_layers=1 + max(int(found[1]) for name in state if (found := _BLOCK.match(name))),
            model_dim=dim,
            num_heads=heads,
            num_kv_heads=state["blocks.0.attn.c_k.weight"].shape[0] // (dim // heads),
            mlp_mult=state["blocks.0.mlp.fc.weight"].shape[0] / dim,
            tie_embeddings="lm_head.weight" not in state,
        )
    except (KeyError, ValueError, ZeroDivisionError, IndexError, ConfigError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise WeightsError(
            f"these are not the weights of the challenge's GPT ({what}); give one of its exports"
        ) from error
