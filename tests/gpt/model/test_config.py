"""Settings of a model: refused with their value, inferred from shapes, and how weights begin."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.infer_config import infer_config
from tests.gpt.model.technique_table import ALL, SMALL, V, blocks_of, with_settings


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads 3 .* num_heads 8"),
        ({"model_dim": 100}, "model_dim 100 over num_heads 4"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0"),
        ({"rope_base": float("nan")}, "rope_base is nan"),
        ({"loop_start": 3, "loop_end": 2}, "loop_end 2 .* loop_start 3"),
        ({"loop_end": 9}, "loop_end is 9, .* layers 0 to 4"),
        ({"parallel_start_layer": 5}, "parallel_start_layer is 5, .* layers 0 to 4"),
        ({"num_loops": 1, "loop_end": 3, "parallel": "lanes", "parallel_start_layer": 3}, "layer 3 .* loop_end 3"),
        ({"value_embed_layers": (7,)}, "value_embed_layers names layer 7"),
        ({"xsa_last_n": 6}, "xsa_last_n is 6"),
        ({"rope_dims": 5}, "rope_dims is 5"),
        ({"rope_dims": 10}, "rope_dims is 10; .* 8"),
        ({"rope_dims": 2, "rope_train_seq_len": 8}, "rope_train_seq_len .* rope_dims"),
        ({"smear": "v1"}, "smear is 'v1'; choose none, fixed, gated"),
        ({"trigram": True}, "trigram .* bigram_vocab_size"),
        ({"bigram_vocab_size": 1}, "bigram_vocab_size is 1"),
        ({"value_embed_layers": (1,), "value_embed_dim": 0}, "value_embed_layers .* value_embed_dim"),
        ({"attn_gate": "sparse", "gate_window": 33}, "gate_window 33"),
        ({"enable_looping_at": 1.0}, "enable_looping_at is 1.0"),
        ({"mlp_mult": 0.001}, "mlp_mult 0.001"),
        ({"leaky_slope": -1.0}, "leaky_slope is -1.0"),
        ({"attn_window": -1}, "attn_window is -1"),
        ({"attn_window": 4, "attn_window_layers": (5,)}, "attn_window_layers names layer 5"),
        ({"attn_window_layers": (1,)}, "attn_window_layers .* attn_window"),
    ],
)
def test_impossible_settings_are_refused_with_their_value(change: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        with_settings(change)


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
@pytest.mark.parametrize(("width", "depth"), [(1 / 2, 3 / 5), (1 / 4, 1 / 3), (1.0, 1.0)])
def test_a_smaller_model_is_valid_and_has_the_same_techniques(
    change: dict[str, Any], width: float, depth: float
) -> None:
    config = GPTConfig(**({"num_layers": 5, "model_dim": 64, "num_heads": 4, "num_kv_heads": 2} | change))
    small = config.resized(width=width, depth=depth, seq_len=32)
    assert small.num_heads // small.num_kv_heads == 2
    for name in ("embed_dim", "bigram_vocab_size", "value_embed_layers", "rope_dims", "xsa_last_n", "attn_window"):
        assert bool(getattr(small, name)) == bool(getattr(config, name)), name
    assert (small.parallel_start_layer is None) == (config.parallel_start_layer is None)
    if (width, depth) == (1.0, 1.0):
        assert small == config


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


def test_orthogonal_matrices_start_orthogonal_and_zeros_stay() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, num_layers=2, model_dim=64, num_heads=4, orthogonal_init=True))
    for block in blocks_of(model):
        for weight in (block.attn.c_q.weight, block.mlp.fc.weight):
            torch.testing.assert_close(weight.T @ weight, torch.eye(64), rtol=1e-4, atol=1e-4)
        assert not block.attn.proj.weight.any()
        assert not block.mlp.proj.weight.any()


def test_singular_values_of_an_overtone_embedding_fall_as_the_inverse_root() -> None:
    torch.manual_seed(0)
    weight = GPT(with_settings({"overtone_init": True})).tok_emb.weight
    torch.manual_seed(0)
    largest = torch.linalg.matrix_norm(GPT(SMALL).tok_emb.weight, 2)
    values = torch.linalg.svdvals(weight)
    torch.testing.assert_close(values, largest / torch.arange(1, 33).sqrt(), rtol=1e-4, atol=1e-4)


def test_phases_blend_from_the_embedding_to_the_residual_stream() -> None:
    mixes = [block.resid_mix.detach() for block in blocks_of(GPT(with_settings({"phased_init": True})))]
    shares = [float(mix[0, 0]) for mix in mixes]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.5)
    assert shares[0] == pytest.approx(1 / (1 + math.exp(1.5)))
    assert all(float(mix.sum(0).sub(1).abs().max()) < 1e-6 for mix in mixes)
