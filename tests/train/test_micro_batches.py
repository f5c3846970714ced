"""Micro-batches: any size is the same gradient, and "auto" takes the fewest micro-steps that fit."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError
from birdie.run.recipe import Recipe, load_recipe
from birdie.runtime.distributed import World
from birdie.train.checkpoint import load_checkpoint
from birdie.train.loop import Fit, fit
from birdie.train.micro import MOST, candidates, largest, micro_batches, micro_steps, settled
from birdie.train.settings import TrainSettings
from tests.tiny_run import LENGTH, OPTIMIZERS, SEQUENCES, SPANS, TinyBatches, tiny_model, tiny_settings

STEP = SPANS * SEQUENCES * LENGTH
SIZES = [16, 32, 64, 128]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(told: list[str] | None = None, **changes: Any) -> Fit:
    notify = (told if told is not None else []).append
    return fit(tiny_model(), TinyBatches(), tiny_settings(**changes), OPTIMIZERS, notify=notify)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("growth", [{}, {"seq_len_start": 4, "batch_tokens_start": STEP // 4}])
def test_any_size_is_the_same_run(tokens: int, growth: dict[str, int]) -> None:
    plain = [(step.loss, step.tokens) for step in start(**growth)]
    micro = [(step.loss, step.tokens) for step in start(micro_batch_tokens=tokens, **growth)]
    assert [tokens for _, tokens in micro] == [tokens for _, tokens in plain]
    assert [loss for loss, _ in micro] == pytest.approx([loss for loss, _ in plain], abs=1e-4)


@pytest.mark.parametrize("tokens", [0, *SIZES])
@pytest.mark.parametrize("spans", [1, 3, 4])
def test_a_step_is_cut_into_all_of_its_tokens(tokens: int, spans: int) -> None:
    cut = list(micro_batches(TinyBatches(), [0] * spans, tokens, torch.device("cpu")))
    assert sum(1 / each.parts for each in cut) == pytest.approx(1)
    assert max(each.ids.numel() for each in cut) <= max(tokens, SEQUENCES * LENGTH)
    whole = TinyBatches()
    expected = [whole.next() for _ in range(spans)]
    assert torch.equal(torch.cat([each.ids for each in cut]), torch.cat([ids for ids, _ in expected]))
    assert torch.equal(torch.cat([each.targets for each in cut]), torch.cat([targets for _, targets in expected]))
    if SPANS % spans == 0 and tokens <= spans * SEQUENCES * LENGTH:
        assert len(cut) == micro_steps(tiny_settings(), SPANS // spans, tokens)


def test_candidates_cut_evenly() -> None:
    assert candidates(tiny_settings(), 1) == SIZES
    assert candidates(tiny_settings(), 2) == [16, 32, 64]
    settings = TrainSettings(train_batch_tokens=12 * 6 * 8, train_seq_len=8, accumulation=12)
    assert candidates(settings, 2) == [8, 16, 24, 48, 96, 144, 288]


def memory(limit: int) -> Any:
    """A device on which 100 bytes a token are needed and `limit` of them are there at all."""

    def needs(tokens: int) -> int:
        if 100 * tokens > limit:
            raise torch.OutOfMemoryError
        return 100 * tokens

    return needs


@pytest.mark.parametrize(
    ("free", "limit", "expected"),
    [(1e9, 1e9, 128), (6400, 1e9, 64), (6399, 1e9, 32), (1e9, 3300, 32), (0, 0, 16)],
)
def test_the_largest_that_fits_is_taken(free: float, limit: float, expected: int) -> None:
    assert largest(SIZES, memory(int(limit)), int(free)) == expected


def test_auto_on_a_cpu_is_the_rule_and_is_told() -> None:
    told: list[str] = []
    run = start(told, micro_batch_tokens="auto", iterations=1)
    assert told == [f"micro-batches of {STEP} tokens, 1 to a step on each rank (at most {MOST:,} on cpu)"]
    assert run.facts["micro_steps"] == 1
    assert run.state().settings["micro_batch_tokens"] == STEP


def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another(self: World, value: int, device: torch.device) -> int:  # noqa: ARG001
        return max(value, -32)

    monkeypatch.setattr(World, "max_int", with_another)
    settings = tiny_settings(micro_batch_tokens="auto")
    told: list[str] = []
    args: Sequence[Any] = (tiny_model(), settings, World(0, 2), torch.device("cpu"))
    assert settled(*args, before=None, notify=told.append) == 32
    assert told[0].startswith("micro-batches of 32 tokens, 2 to a step")


def test_a_resumed_run_keeps_the_size_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.train.micro.MOST", 64)
    run = start(micro_batch_tokens="auto")
    whole = {}
    for step in run:
        whole[step.number] = step.loss
        if step.number == 5:
            run.save(tmp_path)
    monkeypatch.setattr("birdie.train.micro.MOST", 16)
    told: list[str] = []
    settings = tiny_settings(micro_batch_tokens="auto")
    again = fit(tiny_model(), TinyBatches(), settings, OPTIMIZERS, resume=load_checkpoint(tmp_path), notify=told.append)
    assert told == ["micro-batches of 64 tokens, 2 to a step on each rank (as the run began)"]
    assert {step.number: step.loss for step in again} == {n: loss for n, loss in whole.items() if n > 5}


@pytest.mark.parametrize("tokens", [8, 48, 96, -16, "some"])
def test_sizes_that_do_not_cut_spans_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        tiny_settings(train_batch_tokens=4 * 64, micro_batch_tokens=tokens)


def test_it_is_a_setting_of_file_and_flag_alike(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[train]\nmicro_batch_tokens = "auto"\n')
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.train.micro_batch_tokens == "auto"
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert load_recipe(flags=["--train.micro-batch-tokens", "auto"]).train.micro_batch_tokens == "auto"
    assert load_recipe(flags=["--train.micro-batch-tokens", "131072"]).train.micro_batch_tokens == 131_072
