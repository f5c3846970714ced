"""The GPT is the challenge's baseline: its size, its function, its causality, and what its configuration refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.model.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=50, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2)


def randomized(config: GPTConfig, seed: int = 0) -> GPT:
    """A model none of whose parameters is zero or one, so that each has its effect."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 2 else 0.7))
    return model


def tokens(*shape: int, vocab_size: int = 50, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def reference_attention(w: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, c: GPTConfig) -> torch.Tensor:
    """One sequence, one head and one position at a time. x: (length, dim)."""
    length, d = len(x), c.model_dim // c.num_heads
    q, k, v = (x @ w[f"{prefix}c_{n}.weight"].T for n in "qkv")
    heads = []
    for h in range(c.num_heads):
        kv = h // (c.num_heads // c.num_kv_heads)
        qh = rms(q[:, h * d : (h + 1) * d])
        kh, vh = rms(k[:, kv * d : (kv + 1) * d]), v[:, kv * d : (kv + 1) * d]

        def turn(z: torch.Tensor, position: int) -> torch.Tensor:
            out = z.clone()
            for i in range(d // 2):
                angle = position / c.rope_base ** (2 * i / d)
                a, b = z[i], z[i + d // 2]
                out[i] = a * math.cos(angle) + b * math.sin(angle)
                out[i + d // 2] = -a * math.sin(angle) + b * math.cos(angle)
            return out

        rows = []
        for t in range(length):
            query = turn(qh[t], t) * w[f"{prefix}q_gain"][h]
            scores = torch.stack([query @ turn(kh[s], s) for s in range(t + 1)]) / math.sqrt(d)
            rows.append(scores.softmax(0) @ vh[: t + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ w[f"{prefix}proj.weight"].T


def reference_logits(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The formulas as written down, for one sequence (length,), in float64."""
    c, w = model.config, {name: p.detach().double() for name, p in model.named_parameters()}
    x = x0 = rms(w["tok_emb.weight"][ids])
    stack = []
    encoders = c.num_layers // 2
    for i in range(c.num_layers):
        if i >= encoders and stack:
            x = x + w["skip_weights"][i - encoders] * stack.pop()
        b = f"blocks.{i}."
        x = w[b + "resid_mix"][0] * x + w[b + "resid_mix"][1] * x0
        x = x + w[b + "attn_scale"] * reference_attention(w, b + "attn.", rms(x), c)
        x = x + w[b + "mlp_scale"] * ((rms(x) @ w[b + "mlp.fc.weight"].T).relu() ** 2 @ w[b + "mlp.proj.weight"].T)
        if i < encoders:
            stack.append(x)
    head = w["tok_emb.weight"] if c.tie_embeddings else w["lm_head.weight"]
    return c.logit_softcap * torch.tanh(rms(x) @ head.T / c.logit_softcap)


@pytest.mark.parametrize(("num_layers", "count"), [(9, 17_059_912), (10, 18_897_488)])
def test_parameter_count_is_the_challenges(num_layers: int, count: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=num_layers))
    assert sum(p.numel() for p in model.parameters()) == count


def test_parameter_names_are_the_challenges() -> None:
    names = {name for name, _ in GPT(GPTConfig(num_layers=2)).named_parameters()}
    block = {"attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "attn.q_gain"}
    block |= {"mlp.fc.weight", "mlp.proj.weight", "attn_scale", "mlp_scale", "resid_mix"}
    assert names == {"tok_emb.weight", "skip_weights"} | {f"blocks.{i}.{name}" for i in range(2) for name in block}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_forward_equals_the_formulas(num_layers: int, tied: bool) -> None:
    config = GPTConfig(
        vocab_size=50, num_layers=num_layers, model_dim=32, num_heads=4, num_kv_heads=2, tie_embeddings=tied
    )
    model, ids = randomized(config), tokens(2, 9)
    expected = torch.stack([reference_logits(model, row) for row in ids]).float()
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, ids, targets = randomized(SMALL), tokens(3, 8), tokens(3, 8, seed=2)
    picked = -model(ids).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    each = model.loss(ids, targets, reduction="none")
    assert each.shape == targets.shape
    torch.testing.assert_close(each, picked)
    torch.testing.assert_close(model.loss(ids, targets), picked.mean())


def test_gradient_of_the_loss_is_that_of_the_formulas() -> None:
    """A step against the gradient lowers the reference loss by what the gradient foretells."""
    model, ids, targets = randomized(SMALL), tokens(1, 6), tokens(1, 6, seed=2)
    model.loss(ids, targets).backward()
    step = 1e-3 / math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))

    def reference_loss(sign: float) -> float:
        moved = GPT(SMALL)
        moved.load_state_dict({name: p.detach() + sign * step * p.grad for name, p in model.named_parameters()})
        return F.cross_entropy(reference_logits(moved, ids[0]), targets[0]).item()

    foretold = 2 * step * sum(p.grad.square().sum().item() for p in model.parameters())
    assert reference_loss(1) - reference_loss(-1) == pytest.approx(foretold, rel=1e-2)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 20), data=st.data())
def test_the_future_has_no_influence(length: int, data: st.DataObject) -> None:
    changed = data.draw(st.integers(1, length - 1))
    model, ids = randomized(SMALL), tokens(1, length)
    other = ids.clone()
    other[:, changed:] = (other[:, changed:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, :changed], model(other)[:, :changed])


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
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_the_seed_decides_the_initial_weights() -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(GPT(SMALL).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.equal(models[0]["tok_emb.weight"], models[2]["tok_emb.weight"])


def test_a_new_model_predicts_nearly_uniformly() -> None:
    model = GPT(SMALL)
    assert model.loss(tokens(2, 16), tokens(2, 16, seed=2)).item() == pytest.approx(math.log(50), rel=0.02)


def test_training_works_after_inference_mode() -> None:
    model, ids = GPT(SMALL), tokens(2, 8)
    with torch.inference_mode():
        model(ids)
    model.loss(ids, ids).backward()


def test_matrices_are_listed_under_their_parameters_names() -> None:
    model = GPT(SMALL)
    expected = {name: p for name, p in model.named_parameters() if name.endswith(".weight")}
    listed = dict(model.named_matrices())
    assert listed.keys() == expected.keys()
    assert all(listed[name] is expected[name] for name in listed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 8"),
        ({"model_dim": 100}, "model_dim 100 over num_heads 8 is not an even head size"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0"),
        ({"rope_base": float("nan")}, "rope_base is nan"),
    ],
)
def test_an_impossible_configuration_is_refused_with_its_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**change)
