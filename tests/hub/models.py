"""Small models of Hugging Face libraries, with random weights and no download."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
WHISPER = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 20, "max_source_positions": 50,
}  # fmt: skip
Build = Callable[[Any], Any]
TRANSFORMERS: dict[str, Build] = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "llama, tied": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gpt2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**SMALL)),
    "t5": lambda t: t.T5ForConditionalGeneration(
        t.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=256)
    ),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**{**SMALL, "image_size": 32, "patch_size": 8})),
    "whisper": lambda t: t.WhisperForConditionalGeneration(t.WhisperConfig(**WHISPER)),
    "mixtral": lambda t: t.MixtralForCausalLM(
        t.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt_oss": lambda t: t.GptOssForCausalLM(
        t.GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mamba": lambda t: t.MambaForCausalLM(
        t.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=256, state_size=8)
    ),
}


def write(name: str, folder: Path, *, shard: str = "100KB") -> Any:
    """Write a model in bfloat16 in shards, and return what the library loads."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    torch.manual_seed(0)
    model = TRANSFORMERS[name](transformers).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    return type(model).from_pretrained(folder).eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Return inputs for a model."""
    ids = torch.arange(24).view(2, 12)
    if name == "vit":
        return {"pixel_values": torch.ones(2, 3, 32, 32, dtype=torch.bfloat16)}
    if name == "whisper":
        return {"input_features": torch.ones(2, 20, 100, dtype=torch.bfloat16), "decoder_input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


def outputs(model: Any, name: str) -> torch.Tensor:
    """Return the logits of a model."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(name)).logits
    return logits
