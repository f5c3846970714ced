"""Adapters: new ones change nothing, rows and repeats of a layer have separate ones, and only they are trained."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.adapters import Adapters
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.config import ADAPTED_PARTS, AdaptedPart
from birdie.gpt.model.gpt import GPT
from tests.gpt.model.technique_table import ALL, EVERYTHING, SMALL, blocks_of, randomized, tokens, with_settings


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two threads, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RECURRENCE = {"num_loops": 2, "loop_start": 1, "loop_end": 2}


def trained(adapters: Adapters, seed: int = 0) -> Adapters:
    """Set every B to random values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for b in adapters.up.values():
        b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return adapters


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_new_adapters_change_nothing_and_trained_ones_every_logit(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)).eval(), tokens(3, 9)
    model.requires_grad_(False)  # torch multiplies by a frozen weight with another kernel, which rounds differently
    adapters = Adapters(model, 3, 4, alpha=6.0)
    plain, short = model(ids), model(ids, last_n=4)
    with adapters.attached(model):
        assert torch.equal(model(ids), plain)
        assert torch.equal(model(ids, last_n=4), short)
        trained(adapters)
        assert (model(ids) - plain).abs().amax(-1).min() > 1e-4
        torch.testing.assert_close(model(ids, last_n=4), model(ids)[:, -4:], rtol=1e-5, atol=1e-5)
    assert torch.equal(model(ids), plain)


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_only_adapters_get_gradients_and_every_one_does(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)).eval(), tokens(2, 16)
    adapters = trained(Adapters(model, 2, 3))
    leaves = adapters.take(0, 2)
    with adapters.attached(model):
        model.loss(ids, ids.roll(-1, 1)).backward()
    assert all(leaf.grad is not None and bool(leaf.grad.flatten(1).any(1).all()) for leaf in leaves)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    runs = 9 if model.config.num_loops else 5
    assert len(leaves) == 2 * (5 * runs + 1)


@pytest.mark.parametrize("change", [{}, EVERYTHING], ids=["baseline", "everything"])
def test_a_pair_is_a_low_rank_change_of_the_weight(change: dict[str, Any]) -> None:
    """Adapters on q, k, v and head add (α / r) · B · A to the weight, where a layer runs once."""
    model, ids = (
        randomized(with_settings({**change, "num_loops": 0, "embed_dim": 0, "tie_embeddings": False})),
        tokens(1, 9),
    )
    adapters = trained(Adapters(model, 1, 4, alpha=6.0, parts=("v", "q", "head", "k")))
    with adapters.attached(model):
        logits = model(ids)
    with torch.no_grad():
        for (part, run), b in adapters.up.items():
            attn = blocks_of(model)[run].attn
            assert model.lm_head is not None
            linear = {"q": attn.c_q, "k": attn.c_k, "v": attn.c_v, "head": model.lm_head}[part]
            linear.weight += 1.5 * b[0] @ adapters.down[part, run][0]
    torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)


def test_adapters_parallel_to_attention_and_mlp_read_their_inputs() -> None:
    model, ids = randomized(SMALL), tokens(1, 9)
    adapters = trained(Adapters(model, 1, 4, parts=("o", "mlp")))
    calls: list[tuple[Tensor, Tensor]] = []

    def record(_module: Any, inputs: Any, output: Any) -> None:
        calls.append((inputs[0], output[0] if isinstance(output, tuple) else output))

    block = blocks_of(model)[2]
    parts: dict[AdaptedPart, torch.nn.Module] = {"o": block.attn, "mlp": block.mlp}
    for module in parts.values():
        module.register_forward_hook(record)
    with adapters.attached(model):
        for module in parts.values():
            module.register_forward_hook(record)  # after the hook of the adapter
        model(ids)
    for i, part in enumerate(parts):
        (x, plain), (_, added) = calls[2 * i : 2 * i + 2]
        a, b = adapters.down[part, 2][0], adapters.up[part, 2][0]
        torch.testing.assert_close(added - plain, x @ a.T @ b.T, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("change", [{}, RECURRENCE, EVERYTHING], ids=["baseline", "recurrence", "everything"])
def test_rows_are_independent(change: dict[str, Any]) -> None:
    model, ids = randomized(with_settings(change)), tokens(3, 9)
    adapters = trained(Adapters(model, 3, 4))
    with adapters.attached(model):
        together = model(ids)
        for row in range(3):
            adapters.take(row, row + 1)
            torch.testing.assert_close(model(ids[row : row + 1]), together[row : row + 1], rtol=1e-4, atol=1e-4)
        adapters.take(0, 3)
        other = ids.clone()
        other[1] = tokens(9, seed=5)
        for key in adapters.up:
            adapters.up[key][1] *= 3
        changed = model(other)
    assert torch.equal(changed[[0, 2]], together[[0, 2]])
    assert not torch.allclose(changed[1], together[1])


def test_adapters_work_with_the_cache() -> None:
    model, ids = randomized(with_settings(RECURRENCE)).eval(), tokens(2, 9)
    adapters = trained(Adapters(model, 2, 4))
    with adapters.attached(model):
        cache = Cache(model, 2, 9)
        logits = torch.cat([cache(part) for part in ids.split(1, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)


def test_all_rows_start_from_one_draw_and_a_reset_returns_to_it() -> None:
    model = randomized(SMALL)
    one, many = Adapters(model, 1, 4, seed=3), Adapters(model, 3, 4, seed=3)
    for key, a in many.down.items():
        assert torch.equal(a, one.down[key].expand_as(a))
        assert a.abs().max() <= 32**-0.5
        assert a.abs().max() > 0.8 * 32**-0.5
    assert not torch.equal(Adapters(model, 1, 4, seed=4).down["q", 0], one.down["q", 0])
    for leaf in many.take(0, 2):
        with torch.no_grad():
            leaf += 1
    assert bool((many.up["v", 1][:2] == 1).all())
    assert not many.up["v", 1][2].any()
    many.reset(warm=True)
    assert not many.up["v", 1].any()
    assert torch.equal(many.down["v", 1][0], one.down["v", 1][0] + 1)
    many.reset()
    assert torch.equal(many.down["v", 1][:1], one.down["v", 1])


def test_impossible_adapters_are_refused() -> None:
    model = GPT(SMALL)
    wrong: Any
    for wrong in (("q", "q"), ("gate",)):
        with pytest.raises(ConfigError, match=", ".join(ADAPTED_PARTS)):
            Adapters(model, 1, 4, parts=wrong)
    with pytest.raises(ConfigError, match="rank 0 and 2 rows"):
        Adapters(model, 2, 0)
    adapters = Adapters(model, 2, 4)
    with pytest.raises(IndexError, match=r"1 to 3 .* 2"):
        adapters.take(1, 3)
    with adapters.attached(model), pytest.raises(ConfigError, match="already"), adapters.attached(model):
        pass
