"""Estimates equal the counts of real models and steps."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import birdie
from birdie.cli import main
from birdie.errors import ConfigError, DataError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.cost import training_cost
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run import history
from birdie.gpt.run.events import Validated
from birdie.gpt.run.history import HistoryEntry
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import DataSettings, ExportSettings, Recipe, RunSettings
from birdie.gpt.run.run_estimate import artifact, groups, load, memory, schedule
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.loop import Step
from birdie.system.distributed import PendingTensor, World
from tests.tiny_run import OPTIMIZERS, TinyBatches, tiny_model, tiny_settings, tiny_training

TINY = GPTConfig(vocab_size=32, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2)
SHAPES = {
    "plain": TINY,
    "depth recurrence": dataclasses.replace(TINY, num_loops=2, loop_start=1, loop_end=2),
    "techniques": dataclasses.replace(
        TINY, tie_embeddings=False, activation="swiglu", bigram_vocab_size=16, bigram_dim=8, attn_gate="dense"
    ),
    "factored": dataclasses.replace(TINY, embed_dim=16, value_embed_layers=(1,), value_embed_dim=8),
}


def tiny_recipe(**train: Any) -> Recipe:
    return Recipe(model=TINY, train=tiny_settings(**train), optimizer=OPTIMIZERS)


@pytest.mark.parametrize("name", ["baseline", "sota"])
def test_parameters_by_group_sum_to_those_of_a_recipe_model(name: str) -> None:
    config = find(name).recipe().model
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(config).parameters())
    assert sum(groups(config).values()) == count


def test_parameters_by_group_sum_to_those_of_a_built_model() -> None:
    for config in SHAPES.values():
        assert sum(groups(config).values()) == sum(p.numel() for p in GPT(config).parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_flops_equal_the_counts_of_torch(name: str) -> None:
    """Matrix products are exact; attention is half of what torch counts, which ignores the causal mask."""
    config, ids = SHAPES[name], torch.randint(32, (2, 16))
    model = GPT(config)
    with FlopCounterMode(display=False) as products:
        model.loss(ids, ids).backward()
    with torch.device("meta"):
        meta_model, meta_ids = GPT(config), torch.zeros((2, 16), dtype=torch.int64)
    with FlopCounterMode(display=False) as everything:
        meta_model.loss(meta_ids, meta_ids).backward()
    cost = training_cost(config, 2, 16, torch.float32, depth_recurrence=True)
    assert cost.matrix_flops == products.get_total_flops()
    assert 2 * cost.attention_flops == everything.get_total_flops() - products.get_total_flops()


def test_kept_bytes_equal_the_tensors_saved_by_autograd() -> None:
    """On a CPU, whose fused attention saves exactly the tensors that are counted."""
    ids, model, kept = torch.randint(32, (2, 16)), GPT(TINY), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(ids, ids)
    saved = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights)
    # the model keeps a rotary table, and stores the heads of its attention interleaved
    assert training_cost(TINY, 2, 16, torch.float32, depth_recurrence=False).kept_bytes == pytest.approx(
        saved, rel=0.05
    )


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each float tensor that is summed over the ranks, on a rank whose peer adds nothing."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> PendingTensor:
        sizes.append(tensor.nbytes if tensor.is_floating_point() else 0)
        return PendingTensor(None, lambda: tensor)

    def share(_world: World, tensor: torch.Tensor, _room: torch.Tensor) -> PendingTensor:
        count(tensor)
        return PendingTensor(None, lambda: tensor[: len(tensor) // 2].float())

    monkeypatch.setattr(World, "start_sum_", lambda _, tensor: count(tensor))
    monkeypatch.setattr(World, "start_reduce_scatter", share)
    monkeypatch.setattr(World, "start_all_gather", lambda *arguments: PendingTensor(None, lambda: arguments[-1]))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)  # the clock, and the squared norm
    for name in ("broadcast", "barrier"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    return sizes


def test_reduced_bytes_equal_those_of_a_real_step(reduced: list[int]) -> None:
    world = World(0, 2)
    steps = iter(tiny_training(tiny_model(), TinyBatches(world), tiny_settings(), world=world))
    reduced.clear()
    next(steps)
    expected = load(tiny_recipe(), 2, torch.float32, depth_recurrence=False)
    assert expected.reduced_bytes == sum(reduced)
    assert expected.sent_bytes == expected.reduced_bytes  # 2 · (2 − 1) / 2 of it
    assert load(tiny_recipe(), 1, torch.float32, depth_recurrence=False).reduced_bytes == 0


def test_memory_grows_with_batch_depth_and_vocabulary() -> None:
    def total(**model: Any) -> int:
        tokens = model.pop("tokens", 128)
        recipe = dataclasses.replace(tiny_recipe(train_batch_tokens=tokens), model=dataclasses.replace(TINY, **model))
        step = load(recipe, 1, torch.float32, depth_recurrence=False)
        return memory(recipe, step, 1, torch.float32, compiled=False).total

    assert total() < total(num_layers=4) < total(num_layers=5)
    assert total() < total(vocab_size=64)
    assert total() < total(tokens=256)


def test_a_schedule_ends_by_steps_or_by_the_cap() -> None:
    by_steps = schedule(tiny_recipe(), 1)
    assert (by_steps.steps, by_steps.tokens) == (12, 12 * 128)
    capped = schedule(tiny_recipe(iterations=10**6, max_wallclock_seconds=10), 1)
    assert capped.steps == math.ceil(10 / capped.step_s)
    assert 10 <= capped.seconds < 10 + capped.step_s
    with pytest.raises(ConfigError, match="do not divide accumulation"):
        schedule(tiny_recipe(), 8)


@pytest.mark.parametrize("scheme", ["int5", "ternary", "fp16"])
def test_the_estimated_size_holds_for_an_artifact_of_gaussian_weights(scheme: str, tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=256, num_layers=2, model_dim=128, num_heads=2, num_kv_heads=2)
    recipe = Recipe(model=config, export=ExportSettings(scheme=scheme, effort="fast"))
    model = GPT(config)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, generator=generator)
    saved = birdie.save(model, tmp_path / "model.birdie", scheme=recipe.export.schemes(), effort="fast")
    estimate = artifact(recipe)
    assert estimate.bytes == pytest.approx(saved.bytes, rel=0.02)
    assert estimate.low < saved.bytes < estimate.high


def test_a_history_has_one_entry_per_step(tmp_path: Path) -> None:
    for step in (0, 100, 200, 300):
        history.record(tmp_path, HistoryEntry(step, 10.0 * step, 3 - step / 1000))
    history.truncate(tmp_path, 200)  # resumed from step 200
    history.record(tmp_path, HistoryEntry(250, 2500, 2.7))
    history.record(tmp_path, HistoryEntry(250, 2600, 2.6))
    assert [entry.step for entry in history.read(tmp_path)] == [0, 100, 200, 250]
    assert history.read(tmp_path)[-1] == HistoryEntry(250, 2600, 2.6)
    for line in ("{}", "[1]", '{"step": Infinity, "train_ms": 1, "bpb": 2}', '{"step": 3'):
        (tmp_path / history.NAME).write_text(line + "\n")
        with pytest.raises(DataError, match=r"history.jsonl is damaged from line 1 on"):
            history.read(tmp_path)
    history.truncate(tmp_path, 10)  # a damaged history does not stop the run
    assert history.read(tmp_path) == []


def test_a_resumed_run_has_the_validations_of_an_uninterrupted_run(tmp_path: Path) -> None:
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=tmp_path))
    recipe = dataclasses.replace(
        tiny_recipe(iterations=8),
        data=DataSettings(path=str(next((tmp_path / "datasets").iterdir())), tokenizer="bytes"),
        model=dataclasses.replace(TINY, vocab_size=260),
        validation=ValidationSettings(every=2, max_tokens=100),
        run=RunSettings(checkpoint_every=3),
        device="cpu",
    )
    folder = tmp_path / "run"
    validations: list[Validated] = []
    for event in Run(recipe, folder).train():
        validations += [event] if isinstance(event, Validated) else []
        if isinstance(event, Step) and event.number == 5:
            break  # killed: the last checkpoint is of step 3, the last validation of step 4
    assert [entry.step for entry in history.read(folder)] == [0, 2, 4]
    resumed = [event for event in Run(recipe, folder).train(resume=True) if isinstance(event, Validated)]
    entries = history.read(folder)
    assert [entry.step for entry in entries] == [0, 2, 4, 6, 8]
    expected = [(event.step, event.score.bpb) for event in (*validations[:2], *resumed)]
    assert [(entry.step, entry.bpb) for entry in entries] == expected


def estimate_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["estimate", *tokens, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text(
        tiny_recipe(iterations=1000, accumulation=8, train_batch_tokens=128).to_toml()
    )
    result = estimate_json(capsys, str(tmp_path))
    assert set(result) == {*("name", "parameters", "artifact", "step", "communication", "machines", "recorded")}
    assert result["parameters"]["total"] == sum(result["parameters"]["groups"].values())
    assert [machine["devices"] for machine in result["machines"]] == [8, 1]
    assert all(machine["step_ms"] > 0 and machine["memory"]["total"] > 0 for machine in result["machines"])
    with pytest.raises(SystemExit) as done:
        main(["estimate", str(tmp_path / "recipe.toml")])
    assert done.value.code == 0
    assert "8 × H100: steps" in capsys.readouterr().out


def test_a_recipe_that_cannot_be_estimated_is_an_error_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean sota" in estimate_json(capsys, "sotta")["error"]["message"]
    assert "no recipe.toml" in estimate_json(capsys, str(tmp_path))["error"]["message"]
