"""A small GPT over raw bytes, for the tests of benchmarks that score text."""

import numpy as np
import torch

from birdie.data.tokenizer import ByteTokenizer
from birdie.model.gpt import GPT, GPTConfig

TOKENIZER = ByteTokenizer()


def byte_gpt() -> GPT:
    """Return a GPT of two layers with initial weights, in float32."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=TOKENIZER.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config).eval()
    model.compute_dtype = torch.float32
    return model


def byte_tokens(*texts: str) -> np.ndarray:
    """Return BOS and the bytes of each text as one sequence of tokens."""
    return np.concatenate([[TOKENIZER.bos_id, *TOKENIZER.encode(text)] for text in texts]).astype(np.uint16)
