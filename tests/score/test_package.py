"""Packages for scoring: the eager model's nats by code that holds no weight, and nobody else's code is ever loaded."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.artifact.save import save
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.errors import ConfigError
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.evaluation import evaluate
from birdie.run.recipe import DataSettings, Recipe
from birdie.runtime.distributed import World
from birdie.score import package
from birdie.score.bpb import ValidationSettings
from birdie.score.forward import at_once, losses
from birdie.score.package import Packaged, Shape, about, packaged, read_package, weights_of, write_package
from birdie.score.windows import sliding
from birdie.train.settings import TrainSettings

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
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def made_of_air(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A compiler that compiles nothing; what would have been loaded."""
    loaded: list[bytes] = []

    def load(file: Any) -> Callable[..., Tensor]:
        loaded.append(file.read())
        return lambda _weights, _ids, targets: targets.float()

    monkeypatch.setattr(package, "_compile", lambda _model, _shape: b"machine code\nof two lines")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    return loaded


def test_what_was_made_is_what_is_loaded(tmp_path: Path, made_of_air: list[bytes]) -> None:
    model, told = tiny(), list[str]()
    for _ in range(2):
        packaged(model, tmp_path / "scoring.pt2", SHAPE, told.append)
    assert made_of_air == [b"machine code\nof two lines"] * 2
    assert len(told) == 1
    assert (tmp_path / "cache" / "birdie" / "packages.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m, None),
        (lambda _: tiny(num_layers=3), "is for another model"),
        (lambda m: setattr(m, "compute_dtype", torch.bfloat16) or m, "is for dtype float32, not bfloat16"),
        (lambda m: setattr(m, "depth_recurrence", True) or m, "is for looping False, not True"),
    ],
)
def test_a_package_for_another_model_is_refused(
    tmp_path: Path, made_of_air: list[bytes], change: Callable[[GPT], GPT], words: str | None
) -> None:
    write_package(tiny(), tmp_path / "scoring.pt2", SHAPE)
    model = change(tiny(seed=1))  # other weights are no other model
    if words is None:
        packaged(model, tmp_path / "scoring.pt2", SHAPE)
        assert len(made_of_air) == 1
        return
    with pytest.raises(ConfigError, match=words):
        packaged(model, tmp_path / "scoring.pt2", SHAPE)
    assert made_of_air == []


def test_another_shape_torch_processor_or_source_is_refused(
    tmp_path: Path, made_of_air: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "scoring.pt2", tiny()
    write_package(model, path, SHAPE)
    with pytest.raises(ConfigError, match="for windows of 3 × 16 tokens, 4 scored, not of 3 × 16 tokens, 16 scored"):
        packaged(model, path, Shape(3, 16, 16))
    for where, name, value, words in (
        (torch, "__version__", "0.1", r"is for torch .*, not 0\.1; delete it to have it made anew"),
        (package, "processor", lambda _: "abacus", "is for another processor"),
        (package, "_sources", lambda: "elsewhere", "is for another version of birdie's model"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            with pytest.raises(ConfigError, match=words):
                packaged(model, path, SHAPE)
    assert made_of_air == []


@pytest.mark.parametrize("place", [len(package._MAGIC), len(package._MAGIC) + 40, -1])
def test_what_was_changed_or_made_elsewhere_is_never_loaded(
    tmp_path: Path, made_of_air: list[bytes], place: int
) -> None:
    path, model = tmp_path / "scoring.pt2", tiny()
    write_package(model, path, SHAPE)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    for content in (bytes(damaged), whole[:-1], whole[: len(package._MAGIC) + 5], package._MAGIC):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="was not made here by you, or is damaged"):
            packaged(model, path, SHAPE)
    path.write_bytes(whole)
    key = tmp_path / "cache" / "birdie" / "packages.key"
    mine = key.read_bytes()
    key.write_bytes(bytes(32))  # another user's, or another machine's
    with pytest.raises(ConfigError, match="was not made here by you"):
        packaged(model, path, SHAPE)
    key.unlink()
    with pytest.raises(ConfigError, match="was not made here by you"):
        packaged(model, path, SHAPE)
    key.write_bytes(mine)
    key.chmod(0o602)
    with pytest.raises(ConfigError, match=r"the key of your packages, .* cannot be used"):
        packaged(model, path, SHAPE)
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError, match="is not a package for scoring"):
        packaged(model, path, SHAPE)
    with pytest.raises(ConfigError, match="cannot read package"):
        packaged(model, tmp_path, SHAPE)
    assert made_of_air == []


def test_what_cannot_be_compiled_is_one_sentence_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("no working C++ compiler\nand a long tail")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(
        ConfigError, match=r"^no package can be compiled here \(no working C\+\+ compiler\); score with"
    ):
        packaged(tiny(), tmp_path / "scoring.pt2", SHAPE)
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
    save(model, tmp_path / "model.birdie", lossless=True, coder="fast", metadata=metadata)
    return tmp_path / "model.birdie"


def test_an_evaluation_by_package_is_that_of_the_model(
    artifact_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the windows; its weights are those that were decoded, though another model's package was made."""
    asked: list[int] = []

    def load(_file: Any) -> Callable[..., Tensor]:
        eager = package._Loss(tiny(seed=9, vocab_size=260, num_layers=1))

        def run(weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
            asked.append(len(ids))
            nats: Tensor = torch.func.functional_call(eager, weights, (ids, targets))
            return nats

        return run

    monkeypatch.setattr(package, "_compile", lambda _model, _shape: b"")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    for number, settings in enumerate(({}, {"stride": 8}, {"documents": True, "stride": 16})):
        told: list[str] = []
        file = tmp_path / f"{number}.pt2"
        plain = evaluate(artifact_file, device="cpu", settings=settings)
        through = evaluate(artifact_file, device="cpu", settings=settings, package=file, notify=told.append)
        assert through.score.bpb == pytest.approx(plain.score.bpb, abs=1e-6)
        assert through.seconds["compile"] > 0
        assert told[-1].startswith("active: ahead-of-time package: ")
    assert set(asked) == {at_once(CPU) // 32}
    with pytest.raises(ConfigError, match="is for windows of 64 × 32 tokens, 32 scored, not of 64 × 32 tokens, 8"):
        evaluate(artifact_file, device="cpu", settings={"stride": 8}, package=tmp_path / "0.pt2")
    for changes in ({"stream": True, "chunk": 8}, {"temperature": 0.9}):
        with pytest.raises(ConfigError, match=r"gives the losses of windows, and a (stream|temperature) needs more"):
            evaluate(artifact_file, device="cpu", settings=changes, package=tmp_path / "0.pt2")
    with pytest.raises(ConfigError, match="and a tilt needs more"):
        evaluate(artifact_file, device="cpu", tilt=True, package=tmp_path / "0.pt2")
    with pytest.raises(ConfigError, match="several ranks do not make one"):
        evaluate(artifact_file, device="cpu", package=tmp_path / "none.pt2", world=World(0, 2))


class Counted:
    """A package that is the eager model, and knows the shapes it was asked for."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, _weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        self.asked.append((*ids.shape, *targets.shape))
        return self.model.loss(ids, targets, "none")


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
def test_windows_go_through_in_its_shape_and_all_others_by_the_model(rows: int) -> None:
    model = tiny()
    counted = Counted(model)
    through = Packaged(model, counted, Shape(rows, 16, 4))
    tokens = np.random.default_rng(0).integers(0, 40, 72, dtype=np.uint16)
    for batch in sliding(71, 16, 4).sorted().batches(10_000):
        mine, eager = (losses(each, tokens, batch, CPU)[0] for each in (through, model))
        np.testing.assert_allclose(mine, eager, atol=1e-5)
    assert set(counted.asked) == {(rows, 16, rows, 4)}
    windows = len(sliding(71, 16, 4))
    assert (through.windows, through.others) == (windows - 2, 2)  # the first scores all, the last has a place less
    assert through.evidence() == f"ahead-of-time package: {windows - 2} windows of {windows} went through it"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile a package with")
def test_a_package_says_what_the_eager_model_says_of_any_weights(tmp_path: Path) -> None:
    """Compiled for one model's weights, run with another's: the nats are the other's."""
    model, other = tiny(num_layers=1, bos_id=1, isolate_documents=True), None
    write_package(model, tmp_path / "scoring.pt2", SHAPE)
    other = tiny(seed=1, num_layers=1, bos_id=1, isolate_documents=True)
    through = Packaged(other, read_package(tmp_path / "scoring.pt2", about(other, SHAPE)), SHAPE)
    ids = torch.randint(0, 40, (7, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        nats = through.loss(ids[:, :-1], ids[:, -4:], "none")
        theirs, first = (each.loss(ids[:, :-1], ids[:, -4:], "none") for each in (other, model))
    assert through.windows == 7
    torch.testing.assert_close(nats, theirs, rtol=0, atol=1e-4)
    assert (nats - first).abs().max() > 0.01
    content = (tmp_path / "scoring.pt2").read_bytes()
    for weights in (weights_of(model), weights_of(other)):
        for name, weight in weights.items():
            if weight.numel() > 16:
                assert weight.numpy().tobytes()[:64] not in content, name
