"""A run with every technique on logs the active ones, resumes bit for bit, and exports a file that is its model."""

import dataclasses
from pathlib import Path

import pytest
import torch

from birdie.artifact.loading import load
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPTConfig
from birdie.gpt.run.evaluation import load_gpt
from birdie.gpt.run.events import Started
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import CalibrationSettings, DataSettings, ExportSettings, Recipe, RunSettings
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.settings import TrainSettings
from birdie.system.context import Context
from birdie.system.distributed import World
from tests.tiny_run import EVERYTHING

CPU = torch.device("cpu")

LENGTH = 32
TECHNIQUES = {**EVERYTHING, "enable_looping_at": 0.5}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return Recipe(
        data=DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(vocab_size=260, num_layers=5, model_dim=32, num_heads=2, num_kv_heads=1, **TECHNIQUES),
        train=TrainSettings(
            iterations=8,
            warmdown_iters=4,
            warmup_steps=2,
            train_batch_tokens=4 * LENGTH,
            train_seq_len=LENGTH,
            accumulation=2,
            max_wallclock_seconds=0,
            compute_dtype="float32",
        ),
        validation=ValidationSettings(every=0, max_tokens=500),
        calibration=CalibrationSettings(data="own", tokens=320),
        export=ExportSettings(effort="fast"),
        run=RunSettings(checkpoint_every=0),
        device="cpu",
    )


def train(
    recipe: Recipe, folder: Path, *, resume: bool = False, stop_after: int | None = None
) -> tuple[Run, list[str]]:
    log: list[str] = []
    run = Run(recipe, folder, Context(CPU, notify=log.append))
    for _ in run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after):
        pass
    return run, log


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    return train(recipe, tmp_path_factory.mktemp("finished"))


@pytest.mark.nightly
def test_a_resumed_run_reports_its_techniques_and_is_the_uninterrupted_one(
    recipe: Recipe, finished: tuple[Run, list[str]], tmp_path: Path
) -> None:
    """It stops before depth recurrence starts."""
    run, log = finished
    assert [line for line in log if "depth recurrence from" in line] == [
        "depth recurrence from step 5 on: layers 0,1,2,1,2,1,2,3,4"
    ]
    active = [line for line in log if line.startswith("active: ")]
    for technique in ("bigram and trigram", "gated smear", "value embeddings", "sparse gate", "gated skips", "streams"):
        assert any(technique in line for line in active), technique
    train(recipe, tmp_path, stop_after=3)
    resumed, _ = train(recipe, tmp_path, resume=True)
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_the_artifact_of_a_model_calibrated_on_its_samples_decodes_to_the_model(
    recipe: Recipe, finished: tuple[Run, list[str]], tmp_path: Path
) -> None:
    run, _ = finished
    summary = run.export(tmp_path / "model.birdie", budget=30_000)
    assert summary.bytes <= 30_000
    model, decoded_recipe, _ = load_gpt(tmp_path / "model.birdie", torch.device("cpu"))
    assert decoded_recipe == recipe
    assert model.depth_recurrence
    decoded = load(tmp_path / "model.birdie")
    ids = torch.randint(2, 260, (2, LENGTH))
    twin = run.work.new_model({name: weight.float() for name, weight in decoded.items()}).eval()
    torch.testing.assert_close(model(ids), twin(ids))
    error = (model(ids) - run.model.eval()(ids)).abs().mean()
    assert error < 0.1 * run.model(ids).std()


def test_techniques_can_be_set_by_file_environment_and_flag(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "recipe.toml") == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    for name, value in {"BIGRAM_VOCAB_SIZE": "2048", "XSA_LAST_N": "4", "LN_SCALE": "1", "VE_LAYERS": "7,8"}.items():
        monkeypatch.setenv(name, value)
    model = load_recipe(flags=["--model.smear", "fixed", "--model.mlp-mult", "3"]).model
    assert (model.bigram_vocab_size, model.xsa_last_n, model.ln_scale, model.mlp_mult) == (2048, 4, True, 3)
    assert (model.smear, model.value_embed_layers) == ("fixed", (7, 8))
    assert dataclasses.replace(GPTConfig(), mlp_mult=3).mlp_hidden == 1536


def test_a_packed_run_with_a_sequence_length_schedule_resumes_bit_for_bit(recipe: Recipe, tmp_path: Path) -> None:
    packed = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, order="packed"),
        model=GPTConfig(
            vocab_size=260,
            num_layers=2,
            model_dim=32,
            num_heads=2,
            num_kv_heads=1,
            isolate_documents=True,
            attn_window=20,
        ),
        train=dataclasses.replace(recipe.train, seq_len_start=8, seq_schedule_fraction=0.5, micro_batch_tokens="auto"),
    )
    uninterrupted, log = train(packed, tmp_path / "uninterrupted")
    train(packed, tmp_path / "stopped", stop_after=3)
    resumed, _ = train(packed, tmp_path / "stopped", resume=True)
    for name, weight in uninterrupted.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    for message in (
        "micro-batches of 128 tokens, 1 to a step",
        "documents: ",
        "warm-up ran 3 step sizes",
        "from step 5 on: sequences of 32, 128 tokens a step",
        "active: isolated documents",
        "active: attention window: layers 0, 1 attend to the last 20 positions",
    ):
        assert any(message in line for line in log), message


def test_a_run_with_mixed_sequence_lengths_resumes_with_the_same_lengths_only(recipe: Recipe, tmp_path: Path) -> None:
    model = GPTConfig(vocab_size=260, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1)
    recipe = dataclasses.replace(recipe, model=model)
    mixed = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, mixed_seq_lens=(LENGTH, 8)))
    _, log = train(mixed, tmp_path, stop_after=3)
    assert "mixed sequence lengths: rank 0: 32 and 8" in log
    with pytest.raises(
        ConfigError, match=r"cannot resume: train.mixed_seq_lens is \[\], but the run in .* has \[32, 8\]"
    ):
        train(recipe, tmp_path, resume=True)


def test_a_restart_resumes_the_checkpoint_of_its_own_job_only(recipe: Recipe, tmp_path: Path) -> None:
    """torchrun restarts ranks after any failure, also after a refusal to overwrite another run."""

    model = GPTConfig(vocab_size=260, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1)
    plain = dataclasses.replace(recipe, model=model)

    def attempt(number: int, job: str, stop_after: int | None = None) -> list[str]:
        log: list[str] = []
        run = Run(plain, tmp_path / "run", Context(CPU, World(restarts=number, job=job), log.append))
        events = list(run.train(stop=lambda: run.steps + 1 == stop_after))
        return [*log, *(f"resumed at {event.resumed_at}" for event in events if isinstance(event, Started))]

    attempt(0, "one", stop_after=3)
    for number in (0, 1):
        with pytest.raises(ConfigError, match="already holds a run"):
            attempt(number, "another")
    assert "resumed at 3" in attempt(1, "one")
