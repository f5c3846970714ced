"""Text of many short documents, and models whose attention matters, for tests of documents and windows."""

from typing import Any

import torch
from torch import Tensor

from birdie.gpt.model.gpt import GPT, GPTConfig

BOS, VOCAB = 1, 32
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
CPU = torch.device("cpu")


def document_text(rows: int, length: int, seed: int = 0) -> Tensor:
    """Return ids (rows, length) of documents of about nine tokens each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    return ids.masked_fill(torch.rand((rows, length), generator=generator) < 0.11, BOS)


def attentive_model(**changes: Any) -> GPT:
    """Return a new model whose output projections are not zero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SHAPE | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model
