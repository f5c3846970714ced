"""The shape of a GPT and the order in which its layers run, in plain JSON, as birdie/web/model.js reads it."""

from typing import Any

from birdie.errors import ConfigError
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.rotary import Rotary
from birdie.gpt.model.techniques.depth_recurrence import layer_order
from birdie.gpt.model.techniques.exclusive_attention import is_exclusive
from birdie.gpt.model.techniques.parallel_residual import first_of_two_streams, is_joint


def model_plan(config: GPTConfig, context: int) -> dict[str, Any]:
    """Return the plan of a model that attends to its last `context` positions.

    Raises:
        ConfigError: the model has an attention function that birdie/web/model.js does not know.
    """
    if config.attention != "softmax":
        raise ConfigError(
            f"the attention function {config.attention!r} of the model has no JavaScript; only softmax runs in a page"
        )
    encoder, decoder = layer_order(config, config.num_loops > 0)
    windowed = config.attn_window_layers or range(config.num_layers)
    rotary = Rotary(config.rotary_dims, config.rope_base, config.rope_train_seq_len)
    return {
        "context": context,
        "vocabulary": config.vocab_size,
        "dim": config.model_dim,
        "tokenDim": config.token_dim,
        "isFactored": config.embed_dim > 0,
        "isTied": config.tie_embeddings,
        "heads": config.num_heads,
        "kvHeads": config.num_kv_heads,
        "headDim": config.head_dim,
        "rotaryDims": config.rotary_dims,
        "ropeBase": rotary.base_at(context),
        "bos": config.bos_id,
        "isolateDocuments": config.isolate_documents,
        "encoder": encoder,
        "decoder": decoder,
        "layers": [
            {
                "inputScale": (layer + 1) ** -0.5 if config.ln_scale else 1.0,
                "isJoint": is_joint(config, layer),
                "isExclusive": is_exclusive(config, layer),
                "window": config.attn_window if layer in windowed else 0,
                "valueEmbedding": config.value_embed_layers.index(layer)
                if layer in config.value_embed_layers
                else None,
            }
            for layer in range(config.num_layers)
        ],
        "dividesAt": first_of_two_streams(config),
        "skipGates": config.skip_gates,
        "ngramRows": config.bigram_vocab_size,
        "trigram": config.trigram,
        "smear": config.smear,
        "valueResidual": config.value_residual,
        "gate": config.attn_gate,
        "gateScale": config.sparse_gate_scale,
        "activation": config.activation,
        "leakySlope": config.leaky_slope,
        "softcap": config.softcap,
        "cap": config.logit_softcap,
    }
