"""Sampling follows the model: temperature 0 takes the argmax, a seed decides the draws, the context is cropped."""

from typing import Any

import pytest
import torch

from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.sampling import generate, sample_sequences


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=30, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


START = torch.tensor([1, 2, 3])


def test_temperature_zero_takes_the_likeliest_token(model: GPT) -> None:
    ids = START
    for token in generate(model, START, 10, temperature=0):
        assert token == model(ids[None])[0, -1].argmax()
        ids = torch.cat((ids, torch.tensor([token])))


def test_top_k_draws_among_the_k_likeliest(model: GPT) -> None:
    likeliest = set(model(START[None])[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    draws = {next(generate(model, START, 1, temperature=5.0, top_k=3, generator=generator)) for _ in range(100)}
    assert draws == likeliest


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324])
def test_the_limit_of_low_temperatures_is_greedy(model: GPT, temperature: float, top_k: int | None) -> None:
    cold = list(generate(model, START, 10, temperature=temperature, top_k=top_k))
    assert cold == list(generate(model, START, 10, temperature=0))


@pytest.mark.parametrize("settings", [{"temperature": 50.0}, {"temperature": 50.0, "top_k": 9}, {"temperature": 0}])
def test_only_ids_below_vocab_size_are_drawn(model: GPT, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = set(generate(model, START, 200, vocab_size=5, generator=generator, **settings))
    assert draws <= set(range(5))
    assert settings["temperature"] == 0 or len(draws) == 5


def test_a_seed_decides_the_text(model: GPT) -> None:
    texts = [list(generate(model, START, 20, generator=torch.Generator().manual_seed(s))) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) == 20 for text in texts)


def test_only_the_last_tokens_of_the_context_count(model: GPT) -> None:
    other = torch.tensor([9, 9, 2, 3])
    same = [list(generate(model, ids, 10, temperature=0, context=2)) for ids in (START, other)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"vocab_size": 31}, "vocab_size is 31; .* 30"),
        ({"top_k": 0}, "top_k is 0"),
        ({"context": 0}, "context is 0"),
        ({"ids": torch.tensor([], dtype=torch.int64)}, "at least one token"),
        ({"ids": torch.tensor([30])}, "30…30 .* vocabulary of 30"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(model: GPT, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(model, **{"ids": START, "tokens": 1, **arguments})


def test_cold_sequences_are_the_greedy_ones(model: GPT) -> None:
    rows = sample_sequences(model, 2, 11, first=1, temperature=0)
    assert rows[0].tolist() == rows[1].tolist() == [1, *generate(model, torch.tensor([1]), 10, temperature=0)]


def test_sequences_follow_the_model_and_the_seed(model: GPT) -> None:
    """The distribution of second tokens is the model's prediction after the first one."""
    counts: list[int] = []
    rows = sample_sequences(model, 4000, 2, first=3, temperature=2.0, seed=1, progress=counts.append)
    expected = (model(torch.tensor([[3]]))[0, -1] / 2.0).softmax(0)
    frequencies = torch.bincount(rows[:, 1], minlength=30) / 4000
    assert (frequencies - expected).abs().max() < 0.04
    assert counts[-1] == rows.numel()
    again = [sample_sequences(model, 4000, 2, first=3, temperature=2.0, seed=seed) for seed in (1, 2)]
    assert torch.equal(again[0], rows)
    assert not torch.equal(again[1], rows)
