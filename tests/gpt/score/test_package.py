"""Ahead-of-time packages: the eager model's losses by code without weights, and no foreign code is ever loaded."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.artifact.saving import save
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score import package
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import Scoring
from birdie.gpt.score.package import (
    PackagedModel,
    Shape,
    load_or_compile,
    named_weights,
    read_package,
    requirements,
    write_package,
)
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.score.window_losses import max_inputs, rotary_base_of, sliding, window_losses
from birdie.gpt.train.settings import TrainSettings
from birdie.system.distributed import World

CPU = torch.device("cpu")
SHAPE = Shape(rows=3, length=16, scored=4)


def tiny(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "num_layers": 2, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1} | changes
    model = GPT(GPTConfig(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():  # a new model's layers say nothing
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A compiler that compiles nothing; yields the code that would have been loaded."""
    loaded: list[bytes] = []

    def load(file: Any) -> Callable[..., Tensor]:
        loaded.append(file.read())
        return lambda _weights, _ids, targets: targets.float()

    monkeypatch.setattr(package, "_compile", lambda _model, _shape: b"machine code\nof two lines")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    return loaded


def test_the_compiled_code_is_loaded_and_compiled_once(tmp_path: Path, fake_compiler: list[bytes]) -> None:
    model, lines = tiny(), list[str]()
    for _ in range(2):
        load_or_compile(model, tmp_path / "scoring.pt2", SHAPE, lines.append)
    assert fake_compiler == [b"machine code\nof two lines"] * 2
    assert len(lines) == 1
    assert (tmp_path / "cache" / "birdie" / "packages.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m, None),
        (lambda _: tiny(num_layers=3), "is for another model"),
        (lambda m: setattr(m, "compute_dtype", torch.bfloat16) or m, "is for dtype float32, not bfloat16"),
        (lambda m: setattr(m, "depth_recurrence", True) or m, "is for depth_recurrence False, not True"),
    ],
)
def test_a_package_for_another_model_is_refused(
    tmp_path: Path, fake_compiler: list[bytes], change: Callable[[GPT], GPT], reason: str | None
) -> None:
    write_package(tiny(), tmp_path / "scoring.pt2", SHAPE)
    model = change(tiny(seed=1))  # other weights are no other model
    if reason is None:
        load_or_compile(model, tmp_path / "scoring.pt2", SHAPE)
        assert len(fake_compiler) == 1
        return
    with pytest.raises(ConfigError, match=reason):
        load_or_compile(model, tmp_path / "scoring.pt2", SHAPE)
    assert fake_compiler == []


def test_another_shape_torch_processor_or_source_is_refused(
    tmp_path: Path, fake_compiler: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "scoring.pt2", tiny()
    write_package(model, path, SHAPE)
    with pytest.raises(ConfigError, match="4 scored, not of 3 × 16 tokens, 16 scored"):
        load_or_compile(model, path, Shape(3, 16, 16))
    for owner, name, value, reason in (
        (torch, "__version__", "0.1", r"is for torch .*, not 0\.1"),
        (package, "processor", lambda _: "abacus", "is for another processor"),
        (package, "_source_digest", lambda: "0123", "is for another version of birdie's model"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(ConfigError, match=reason):
                load_or_compile(model, path, SHAPE)
    assert fake_compiler == []


@pytest.mark.parametrize("index", [len(package._MAGIC), len(package._MAGIC) + 40, -1])
def test_a_damaged_or_foreign_package_is_never_loaded(tmp_path: Path, fake_compiler: list[bytes], index: int) -> None:
    path, model = tmp_path / "scoring.pt2", tiny()
    write_package(model, path, SHAPE)
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[index] ^= 1
    for content in (bytes(damaged), intact[:-1], intact[: len(package._MAGIC) + 5], package._MAGIC):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not compiled by you"):
            load_or_compile(model, path, SHAPE)
    path.write_bytes(intact)
    key = tmp_path / "cache" / "birdie" / "packages.key"
    mine = key.read_bytes()
    key.write_bytes(bytes(32))  # another user's, or another machine's
    with pytest.raises(ConfigError, match="not compiled by you"):
        load_or_compile(model, path, SHAPE)
    key.unlink()
    with pytest.raises(ConfigError, match="not compiled by you"):
        load_or_compile(model, path, SHAPE)
    key.write_bytes(mine)
    key.chmod(0o602)
    with pytest.raises(ConfigError, match=r"key of your packages, .* cannot be used"):
        load_or_compile(model, path, SHAPE)
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError, match="not a package"):
        load_or_compile(model, path, SHAPE)
    with pytest.raises(ConfigError, match="cannot read"):
        load_or_compile(model, tmp_path, SHAPE)
    assert fake_compiler == []


def test_a_failed_compilation_is_one_sentence_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("no working C++ compiler\nand a long tail")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(ConfigError, match=r"^.*\(no working C\+\+ compiler\).*$"):
        load_or_compile(tiny(), tmp_path / "scoring.pt2", SHAPE)
    assert not (tmp_path / "scoring.pt2").exists()


@pytest.fixture
def artifact_file(tmp_path: Path) -> Path:
    """A tiny GPT over bytes, and its text beside it."""
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=tmp_path / "data"))
    recipe = Recipe(
        data=DataSettings(path=str(next((tmp_path / "data" / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(vocab_size=260, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1),
        train=TrainSettings(train_batch_tokens=256, train_seq_len=32, accumulation=1, compute_dtype="float32"),
        validation=ValidationSettings(max_tokens=500),
    )
    metadata = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    model = tiny(vocab_size=260, num_layers=1)
    save(model, tmp_path / "model.birdie", lossless=True, effort="fast", metadata=metadata)
    return tmp_path / "model.birdie"


def test_a_package_does_not_change_the_score(
    artifact_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the windows; its weights are the decoded ones, though it was compiled from another model."""
    rows: list[int] = []

    def load(_file: Any) -> Callable[..., Tensor]:
        eager = package._Loss(tiny(seed=9, vocab_size=260, num_layers=1))

        def run(weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
            rows.append(len(ids))
            nats: Tensor = torch.func.functional_call(eager, weights, (ids, targets))
            return nats

        return run

    monkeypatch.setattr(package, "_compile", lambda _model, _shape: b"")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    for number, settings in enumerate(({}, {"stride": 8}, {"documents": True, "stride": 16})):
        lines: list[str] = []
        file = tmp_path / f"{number}.pt2"
        plain = evaluate(artifact_file, EvaluationRequest(device="cpu", settings=settings))
        request = EvaluationRequest(device="cpu", settings=settings, package=file)
        packaged = evaluate(artifact_file, request, notify=lines.append)
        assert packaged.score.bpb == pytest.approx(plain.score.bpb, abs=1e-6)
        assert packaged.seconds["compile"] > 0
        assert lines[-1].startswith("active: ahead-of-time package: ")
    assert set(rows) == {max_inputs(CPU) // 32}

    def refused(name: str, world: World | None = None, **settings: Any) -> str:
        request = EvaluationRequest(device="cpu", settings=settings, package=tmp_path / name)
        with pytest.raises(ConfigError) as error:
            evaluate(artifact_file, request, world=world)
        return str(error.value)

    assert "32 scored, not of 64 × 32 tokens, 8 scored" in refused("0.pt2", stride=8)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"mode": "streaming", "streaming": {"chunk": 8}}, "mode streaming needs more"),
        ({"temperature": 0.9}, "temperature 0.9 needs more"),
        ({"ngram": {"enabled": True}}, "n-gram bias needs more"),
    )
    for change, reason in changes:
        assert reason in refused("0.pt2", **change)
    assert "none.pt2" in refused("none.pt2", World(0, 2))


class RecordingPackage:
    """A package that is the eager model, and records the shapes it was called with."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, _weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        self.shapes.append((*ids.shape, *targets.shape))
        return self.model.loss(ids, targets, "none")


def scoring_of(model: Any, tokens: np.ndarray) -> Scoring:
    return Scoring(model, Text(tokens, np.ones(len(tokens), np.uint16), 1), Ledger(len(tokens) - 1), 16, CPU)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
def test_windows_of_its_shape_are_computed_by_the_package_and_others_by_the_model(rows: int) -> None:
    model = tiny()
    recorder = RecordingPackage(model)
    packaged = PackagedModel(model, recorder, Shape(rows, 16, 4))
    tokens = np.random.default_rng(0).integers(0, 40, 72, dtype=np.uint16)
    for batch in sliding(71, 16, 4).by_shape().batches(10_000):
        compiled, eager = (window_losses(scoring_of(by, tokens), batch).nats for by in (packaged, model))
        np.testing.assert_allclose(compiled, eager, atol=1e-5)
    assert set(recorder.shapes) == {(rows, 16, rows, 4)}
    windows = len(sliding(71, 16, 4))
    assert (packaged.windows, packaged.others) == (windows - 2, 2)  # the first scores all, the last is shorter
    assert f"{windows - 2} windows of {windows} " in packaged.diagnostics()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile a package with")
def test_a_package_computes_the_losses_of_any_weights(tmp_path: Path) -> None:
    """Compiled for one model's weights, run with another's: the nats are the other's."""
    model = tiny(num_layers=1, bos_id=1, isolate_documents=True)
    write_package(model, tmp_path / "scoring.pt2", SHAPE)
    other = tiny(seed=1, num_layers=1, bos_id=1, isolate_documents=True)
    packaged = PackagedModel(other, read_package(tmp_path / "scoring.pt2", requirements(other, SHAPE)), SHAPE)
    ids = torch.randint(0, 40, (7, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        nats = packaged.loss(ids[:, :-1], ids[:, -4:], "none")
        expected, first = (module.loss(ids[:, :-1], ids[:, -4:], "none") for module in (other, model))
    assert packaged.windows == 7
    torch.testing.assert_close(nats, expected, rtol=0, atol=1e-4)
    assert (nats - first).abs().max() > 0.01
    content = (tmp_path / "scoring.pt2").read_bytes()
    for weights in (named_weights(model), named_weights(other)):
        for name, weight in weights.items():
            if weight.numel() > 16:
                assert weight.numpy().tobytes()[:64] not in content, name


def test_windows_of_other_shapes_have_the_rotary_base_of_full_ones() -> None:
    model = tiny(rope_train_seq_len=8)
    packaged = PackagedModel(model, lambda *_: torch.zeros(1), SHAPE)
    with rotary_base_of(packaged, 16):
        assert model.rotary._length == 16
