"""Compiled graphs are counted, compiled before the clock, and cached where no other user can write."""

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.runtime import torch_compile
from birdie.runtime.callbacks import no_message
from birdie.runtime.distributed import World
from birdie.runtime.files import read_trusted
from birdie.train import compilation
from birdie.train.compilation import (
    CompileCache,
    CompileCounts,
    CompileReport,
    cache_folder,
    compile_cache,
    compile_counts,
    eager_pass,
    saves_graphs,
)
from birdie.train.loop import fit
from tests.tiny_run import LENGTH, OPTIMIZERS, TinyBatches, tiny_model, tiny_settings

CPU = torch.device("cpu")


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile trace and count graphs without compiling them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def private_folder(tmp_path: Path) -> Path:
    """Return a folder that only this user can write."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


class FakeCompiler:
    """Stand-in for torch's saving and loading of compiled graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, saved: bytes | None = b"graphs") -> None:
        self.saved, self.loaded = saved, list[bytes]()
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: self.saved and (self.saved, "info"))
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.load)

    def load(self, payload: bytes) -> object:
        self.loaded.append(payload)
        return "info"


def test_the_cache_round_trips(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = FakeCompiler(monkeypatch)
    cache = CompileCache(private_folder / "compiled", {"model": 1}, CPU)
    assert cache.load() is None
    assert torch_.loaded == []
    assert cache.save() is None
    assert CompileCache(private_folder / "compiled", {"model": 1}, CPU).load() is None
    assert torch_.loaded == [b"graphs"]
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_compiled_is_nothing_saved(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch, saved=None)
    cache = CompileCache(private_folder, {}, CPU)
    assert cache.save() is None
    assert not cache.path.exists()


def test_other_settings_or_another_torch_have_other_files(
    private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CompileCache(private_folder, {"a": 1, "b": 2}, CPU).path
    assert CompileCache(private_folder, {"b": 2, "a": 1}, CPU).path == path
    assert CompileCache(private_folder, {"a": 1, "b": 3}, CPU).path != path
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert CompileCache(private_folder, {"a": 1, "b": 2}, CPU).path != path


def test_length_and_seed_of_a_run_do_not_change_its_cache() -> None:
    def path(rank: int = 0, **changes: Any) -> Path:
        train = {"iterations": 5, "seed": 1, "train_seq_len": 64} | changes
        cache = compile_cache({"model": {}, "train": train, "qat": {}, "run": {"compile_cache": "auto"}}, rank, 2, CPU)
        assert cache is not None
        return cache.path

    assert path(iterations=9, seed=3) == path()
    assert path(train_seq_len=128) != path()
    assert path(rank=1) == path()
    assert path(rank=1, mixed_seq_lens=[64, 16]) != path(rank=0, mixed_seq_lens=[64, 16])
    assert compile_cache({"run": {"compile_cache": "none"}}, 0, 1, CPU) is None


def test_graphs_of_one_gpu_are_not_those_of_another(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own keys hold the number of the device, so each rank of a node keeps its graphs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    first, second = (CompileCache(private_folder, {}, torch.device("cuda", i)).path for i in range(2))
    assert first != second
    recipe: dict[str, Any] = {"train": {}}
    gpus = [saves_graphs(recipe, World(rank, 4, rank % 2), torch.device("cuda", rank % 2)) for rank in range(4)]
    assert gpus == [True, True, False, False]
    assert [saves_graphs(recipe, World(rank, 2, rank), CPU) for rank in range(2)] == [True, False]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:10], lambda _: b"", lambda b: b[:40] + b"?" + b[41:]]
)
def test_a_damaged_cache_is_a_warning_and_is_not_loaded(
    damage: Callable[[bytes], bytes], private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = FakeCompiler(monkeypatch, saved=b"graphs " * 9)
    cache = CompileCache(private_folder, {}, CPU)
    cache.save()
    cache.path.write_bytes(damage(cache.path.read_bytes()))
    assert "damaged" in str(cache.load())
    assert torch_.loaded == []


def test_a_cache_that_torch_refuses_is_a_warning(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_payload: bytes) -> None:
        raise EOFError

    FakeCompiler(monkeypatch)
    cache = CompileCache(private_folder, {}, CPU)
    cache.save()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)
    assert "EOFError" in str(cache.load())
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _payload: None)
    assert "torch does not accept" in str(cache.load())


def test_a_cache_that_others_could_have_written_is_never_loaded(
    private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = FakeCompiler(monkeypatch)
    cache = CompileCache(private_folder / "compiled", {}, CPU)
    cache.save()
    path, folder = cache.path, cache.path.parent
    for target, mode in ((path, 0o620), (path, 0o602), (folder, 0o770), (folder, 0o707), (private_folder, 0o777)):
        original = target.stat().st_mode
        target.chmod(mode)
        assert "not used" in str(cache.load()), (target, oct(mode))
        target.chmod(original)
    assert torch_.loaded == []
    private_folder.chmod(0o1777)  # like /tmp, where users can change only their files
    assert cache.load() is None
    assert torch_.loaded == [b"graphs"]


def test_a_file_of_another_user_or_a_link_is_never_loaded(
    private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(monkeypatch)
    cache = CompileCache(private_folder, {}, CPU)
    cache.save()
    link = private_folder / "link"
    link.symlink_to(cache.path)
    with pytest.raises(OSError, match=r"[Ll]ink|symbolic"):
        read_trusted(link)
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(cache.path, 12345, -1)
    with pytest.raises(PermissionError, match="you can write"):
        read_trusted(cache.path)


def test_a_folder_that_cannot_be_written_is_a_warning(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch)
    (private_folder / "file").write_text("")
    assert "not saved" in str(CompileCache(private_folder / "file", {}, CPU).save())


def test_only_the_newest_files_stay(private_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch)
    monkeypatch.setattr(compilation, "KEPT", 2)
    caches = [CompileCache(private_folder, {"n": n}, CPU) for n in range(3)]
    for age, cache in zip((30, 20, 10), caches, strict=True):
        cache.save()
        now = cache.path.stat().st_mtime
        os.utime(cache.path, (now - age, now - age))
    CompileCache(private_folder, {"n": 2}, CPU).save()
    assert [cache.path.exists() for cache in caches] == [False, True, True]


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "birdie" / "compiled"
    assert cache_folder("none") is None
    assert cache_folder("~/mine") == Path.home() / "mine"


@pytest.mark.usefixtures("graphs_only")
def test_an_eager_pass_saves_a_graph() -> None:
    """The rotary tables exist before the trace, so that one graph serves all steps."""

    def graphs(eager_first: bool) -> int:
        torch._dynamo.reset()
        start, model = compile_counts(), tiny_model(num_layers=1)
        if eager_first:
            eager_pass(model, LENGTH, CPU)
        loss = torch.compile(model.loss, dynamic=False)
        for _ in range(2):
            loss(*TinyBatches().next()).backward()
        return compile_counts().since(start).graphs

    assert (graphs(False), graphs(True)) == (2, 1)


@pytest.mark.usefixtures("graphs_only")
def test_a_compiled_run_compiles_only_before_its_clock() -> None:
    lines: list[str] = []
    run = fit(
        tiny_model(num_layers=1), TinyBatches(), tiny_settings(warmup_steps=2, iterations=2, compile=True), OPTIMIZERS
    )
    report = CompileReport(None, lines.append)
    report.begin_warmup()
    run.warm_up()
    report.end_warmup(save=True)
    assert report.warmup.graphs == 1
    losses = [step.loss for step in run]
    report.end_run()
    assert report.late_graphs == 0
    assert lines == [
        "torch.compile: 1 graph compiled before the clock",
        "active: torch.compile: no graph compiled inside the clock",
    ]
    plain = fit(tiny_model(num_layers=1), TinyBatches(), tiny_settings(iterations=2), OPTIMIZERS)
    assert losses == pytest.approx([step.loss for step in plain], abs=1e-5)


@pytest.mark.usefixtures("graphs_only")
def test_a_graph_inside_the_clock_is_reported() -> None:
    lines: list[str] = []
    report = CompileReport(None, lines.append)
    report.begin_warmup()
    report.end_warmup(save=True)
    settings = tiny_settings(warmup_steps=0, iterations=2, compile=True)
    list(fit(tiny_model(num_layers=1), TinyBatches(), settings, OPTIMIZERS))
    report.end_run()
    assert report.late_graphs == 2
    assert "2 graphs compiled inside the clock; more warmup_steps" in lines[-1]


def test_the_cache_is_written_by_one_rank_and_only_when_something_is_new(
    private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(monkeypatch)
    counts = iter([CompileCounts(0, 0, 0), CompileCounts(0, 0, 0), CompileCounts(1, 4, 0)] * 3)
    monkeypatch.setattr(compilation, "compile_counts", lambda: next(counts))
    for save, expected in ((False, False), (True, True)):
        report = CompileReport(cache := CompileCache(private_folder, {}, CPU), no_message)
        report.begin_warmup()
        report.end_warmup(save=save)
        assert cache.path.exists() is expected
    modified = cache.path.stat().st_mtime_ns
    report = CompileReport(cache, no_message)
    report.begin_warmup()
    report.end_warmup(save=True)  # four cache hits, no miss
    assert cache.path.stat().st_mtime_ns == modified
    assert report.warmup.line() == "1 graph compiled, 4 of 4 parts from the cache"


@pytest.mark.usefixtures("graphs_only")
def test_every_one_of_many_shapes_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the eight that torch allows by default, after which it silently runs the rest eagerly."""
    lines: list[str] = []

    def counts() -> tuple[int, int]:
        torch._dynamo.reset()
        start, twice = compile_counts(), torch_compile.CompiledOrEager(lambda x: 2 * x.sin(), lines.append)
        for size in range(2, 14):
            twice(torch.zeros(size))
        result = compile_counts().since(start)
        return result.graphs, result.fallbacks

    assert counts() == (12, 0)
    monkeypatch.setattr(torch_compile, "RECOMPILE_LIMIT", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs, fallbacks = counts()
    assert graphs == 5
    assert fallbacks >= 1
    assert lines == []
