"""The shape of a GPT follows from the names and shapes of its tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from birdie.errors import WeightsError
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.infer_config import infer_config

SHAPE: dict[str, Any] = {"vocab_size": 30, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "change", [{}, {"tie_embeddings": False}, {"mlp_mult": 1.5}, {"num_layers": 12}, {"num_kv_heads": 4}], ids=str
)
def test_settings_that_shapes_show_are_inferred(change: dict[str, Any]) -> None:
    config = GPTConfig(**(SHAPE | change))
    assert infer_config(GPT(config).state_dict()) == config


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"blocks.0.attn.q_gain": None}, r"'blocks\.0\.attn\.q_gain'"),
        ({"blocks.0.attn.q_gain": torch.ones(5)}, "num_heads 5"),
        ({"tok_emb.weight": torch.ones(30)}, "2"),
        ({"blocks.0.attn.q_gain": torch.ones(0)}, "zero"),
    ],
)
def test_tensors_of_another_model_are_refused(change: dict[str, Tensor | None], value: str) -> None:
    state = {**GPT(GPTConfig(**SHAPE)).state_dict(), **change}
    with pytest.raises(WeightsError, match=value):
        infer_config({name: tensor for name, tensor in state.items() if tensor is not None})
