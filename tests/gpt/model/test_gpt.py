"""The GPT is the challenge's baseline: its size, its function, its gradient and its dtypes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from birdie.gpt.model.gpt import GPT, GPTConfig
from tests.gpt.model.technique_table import randomized, reference_logits

SMALL = GPTConfig(vocab_size=50, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2)
RECORD_1855: dict[str, Any] = {
    "vocab_size": 8192,
    "num_layers": 11,
    "mlp_mult": 4,
    "activation": "leaky_relu2",
    "rope_dims": 16,
    "ln_scale": True,
    "xsa_last_n": 11,
    "attn_gate": "sparse",
    "smear": "gated",
    "skip_gates": True,
    "num_loops": 2,
    "loop_start": 3,
    "loop_end": 5,
    "parallel": "lanes",
    "parallel_start_layer": 8,
}


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("change", "count"),
    [({}, 17_059_912), ({"num_layers": 10}, 18_897_488), (RECORD_1855, 35_945_671)],
    ids=["baseline", "ten layers", "#1855"],
)
def test_parameter_counts_are_those_of_the_records(change: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**change))
    assert sum(p.numel() for p in model.parameters()) == count


def test_parameter_names_are_the_challenges() -> None:
    names = {name for name, _ in GPT(GPTConfig(num_layers=2)).named_parameters()}
    block = {"attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "attn.q_gain"}
    block |= {"mlp.fc.weight", "mlp.proj.weight", "attn_scale", "mlp_scale", "resid_mix"}
    assert names == {"tok_emb.weight", "skip_weights"} | {f"blocks.{i}.{name}" for i in range(2) for name in block}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_the_forward_pass_equals_the_formulas(num_layers: int, tied: bool) -> None:
    config = GPTConfig(
        vocab_size=50, num_layers=num_layers, model_dim=32, num_heads=4, num_kv_heads=2, tie_embeddings=tied
    )
    model, ids = randomized(config), tokens(2, 9)
    expected = torch.stack([reference_logits(model, row.tolist()) for row in ids]).float()
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, ids, targets = randomized(SMALL), tokens(3, 8), tokens(3, 8, seed=2)
    expected = -model(ids).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    nats = model.loss(ids, targets, reduction="none")
    assert nats.shape == targets.shape
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(model.loss(ids, targets), expected.mean())


def test_the_gradient_of_the_loss_is_that_of_the_formulas() -> None:
    """A small step along the gradient changes the reference loss by the linear prediction."""
    model, ids, targets = randomized(SMALL), tokens(1, 6), tokens(1, 6, seed=2)
    model.loss(ids, targets).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    square = sum(gradient.square().sum().item() for gradient in gradients.values())
    step = 1e-3 / math.sqrt(square)

    def reference_loss(sign: float) -> float:
        moved = GPT(SMALL)
        moved.load_state_dict(
            {name: p.detach() + sign * step * gradients[name] for name, p in model.named_parameters()}
        )
        return F.cross_entropy(reference_logits(moved, ids[0].tolist()), targets[0]).item()

    predicted = 2 * step * square
    assert reference_loss(1) - reference_loss(-1) == pytest.approx(predicted, rel=1e-2)


def test_logits_are_float32_and_within_the_softcap() -> None:
    model = randomized(GPTConfig(vocab_size=50, num_layers=2, model_dim=32, num_heads=4, logit_softcap=0.5))
    for model.compute_dtype in (torch.float32, torch.bfloat16):
        logits = model(tokens(2, 8))
        assert logits.dtype == torch.float32
        assert logits.abs().max() <= 0.5


def test_bfloat16_is_close_to_float32_and_leaves_the_masters_alone() -> None:
    model, ids, targets = randomized(SMALL), tokens(4, 16), tokens(4, 16, seed=2)
    exact = model.loss(ids, targets).item()
    model.compute_dtype = torch.bfloat16
    loss = model.loss(ids, targets)
    assert loss.item() == pytest.approx(exact, rel=0.02)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.dtype == p.grad.dtype == torch.float32


def test_the_seed_decides_the_initial_weights() -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(GPT(SMALL).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.equal(models[0]["tok_emb.weight"], models[2]["tok_emb.weight"])


def test_training_works_after_inference_mode() -> None:
    model, ids = GPT(SMALL), tokens(2, 8)
    with torch.inference_mode():
        model(ids)
    model.loss(ids, ids).backward()
