"""Initial values of the techniques that change them."""

import math

import pytest
import torch

from birdie.gpt.model.gpt import GPT, GPTConfig
from tests.gpt.model.technique_table import SMALL, V, blocks_of, with_settings


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
