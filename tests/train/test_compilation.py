"""Compiled graphs are counted, primed before the clock, and kept where nobody else can put any."""

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.runtime import torch_compile
from birdie.runtime.files import read_trusted
from birdie.train import compilation
from birdie.train.compilation import (
    CompileCache,
    Compiled,
    Compiling,
    cache_folder,
    cache_of,
    compiled,
    first_pass,
)
from birdie.train.loop import fit
from tests.tiny_run import LENGTH, OPTIMIZERS, TinyBatches, tiny_model, tiny_settings

CPU = torch.device("cpu")


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile that traces and counts graphs but leaves out the slow rest."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder that only this user can write."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    return folder


class FakeCompiler:
    """What torch keeps and takes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: bytes | None = b"graphs") -> None:
        self.kept, self.taken = kept, list[bytes]()
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: self.kept and (self.kept, "about"))
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.take)

    def take(self, payload: bytes) -> object:
        self.taken.append(payload)
        return "about"


def test_what_is_kept_is_given_back(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = FakeCompiler(monkeypatch)
    cache = CompileCache(own / "compiled", {"model": 1}, CPU)
    assert cache.load() is None
    assert torch_.taken == []
    assert cache.save() is None
    assert CompileCache(own / "compiled", {"model": 1}, CPU).load() is None
    assert torch_.taken == [b"graphs"]
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_compiled_is_nothing_kept(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch, kept=None)
    cache = CompileCache(own, {}, CPU)
    assert cache.save() is None
    assert not cache.path.exists()


def test_other_settings_or_another_torch_have_other_files(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CompileCache(own, {"a": 1, "b": 2}, CPU).path
    assert CompileCache(own, {"b": 2, "a": 1}, CPU).path == path
    assert CompileCache(own, {"a": 1, "b": 3}, CPU).path != path
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert CompileCache(own, {"a": 1, "b": 2}, CPU).path != path


def test_length_and_seed_of_a_run_do_not_matter_to_what_it_compiles() -> None:
    def path(rank: int = 0, **changes: Any) -> Path:
        train = {"iterations": 5, "seed": 1, "train_seq_len": 64} | changes
        cache = cache_of({"model": {}, "train": train, "qat": {}, "run": {"compile_cache": "auto"}}, rank, 2, CPU)
        assert cache is not None
        return cache.path

    assert path(iterations=9, seed=3) == path()
    assert path(train_seq_len=128) != path()
    assert path(rank=1) == path()
    assert path(rank=1, mixed_seq_lens=[64, 16]) != path(rank=0, mixed_seq_lens=[64, 16])
    assert cache_of({"run": {"compile_cache": "none"}}, 0, 1, CPU) is None


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:10], lambda _: b"", lambda b: b[:40] + b"?" + b[41:]]
)
def test_a_damaged_cache_is_one_line_and_is_not_given_to_torch(
    damage: Callable[[bytes], bytes], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = FakeCompiler(monkeypatch, kept=b"graphs " * 9)
    cache = CompileCache(own, {}, CPU)
    cache.save()
    cache.path.write_bytes(damage(cache.path.read_bytes()))
    assert "are damaged; compiling anew" in str(cache.load())
    assert torch_.taken == []


def test_what_torch_refuses_is_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_payload: bytes) -> None:
        raise EOFError

    FakeCompiler(monkeypatch)
    cache = CompileCache(own, {}, CPU)
    cache.save()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)
    assert "(EOFError); compiling anew" in str(cache.load())
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _payload: None)
    assert "torch does not take" in str(cache.load())


def test_what_others_could_have_written_is_never_loaded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = FakeCompiler(monkeypatch)
    cache = CompileCache(own / "compiled", {}, CPU)
    cache.save()
    path, folder = cache.path, cache.path.parent
    for place, mode in ((path, 0o620), (path, 0o602), (folder, 0o770), (folder, 0o707), (own, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        assert "are not used" in str(cache.load()), (place, oct(mode))
        place.chmod(before)
    assert torch_.taken == []
    own.chmod(0o1777)  # as /tmp is: others touch only their own there
    assert cache.load() is None
    assert torch_.taken == [b"graphs"]


def test_a_file_of_another_user_or_a_link_is_never_loaded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch)
    cache = CompileCache(own, {}, CPU)
    cache.save()
    link = own / "link"
    link.symlink_to(cache.path)
    with pytest.raises(OSError, match=r"[Ll]ink|symbolic"):
        read_trusted(link)
    monkeypatch.setattr(os, "getuid", lambda: cache.path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="only you can write"):
        read_trusted(cache.path)


def test_a_folder_that_cannot_be_written_is_one_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch)
    (own / "file").write_text("")
    assert "compiled graphs are not kept" in str(CompileCache(own / "file", {}, CPU).save())


def test_only_the_newest_files_stay(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCompiler(monkeypatch)
    monkeypatch.setattr(compilation, "KEPT", 2)
    caches = [CompileCache(own, {"n": n}, CPU) for n in range(3)]
    for age, cache in zip((30, 20, 10), caches, strict=True):
        cache.save()
        now = cache.path.stat().st_mtime
        os.utime(cache.path, (now - age, now - age))
    CompileCache(own, {"n": 2}, CPU).save()
    assert [cache.path.exists() for cache in caches] == [False, True, True]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "birdie" / "compiled"
    assert cache_folder("none") is None
    assert cache_folder("~/mine") == Path.home() / "mine"


@pytest.mark.usefixtures("graphs_only")
def test_a_first_pass_saves_a_graph() -> None:
    """The rotary tables are there before the trace, so that one graph is for all steps."""

    def primed(first: bool) -> int:
        torch._dynamo.reset()
        before, model = compiled(), tiny_model()
        if first:
            first_pass(model, LENGTH, CPU)
        loss = torch.compile(model.loss, dynamic=False)
        for _ in range(2):
            loss(*TinyBatches().next()).backward()
        return compiled().since(before).graphs

    assert (primed(False), primed(True)) == (2, 1)


@pytest.mark.usefixtures("graphs_only")
def test_a_compiled_run_compiles_before_its_clock_alone() -> None:
    said: list[str] = []
    run = fit(tiny_model(), TinyBatches(), tiny_settings(warmup_steps=2, iterations=2, compile=True), OPTIMIZERS)
    compiling = Compiling(None, said.append)
    compiling.before()
    run.prime()
    compiling.ready(keep=True)
    assert compiling.primed.graphs == 1
    losses = [step.loss for step in run]
    compiling.ended()
    assert compiling.late == 0
    assert said == [
        "torch.compile: 1 graph compiled before the clock",
        "at work: torch.compile: no graph compiled inside the clock",
    ]
    plain = fit(tiny_model(), TinyBatches(), tiny_settings(iterations=2), OPTIMIZERS)
    assert losses == pytest.approx([step.loss for step in plain], abs=1e-5)


@pytest.mark.usefixtures("graphs_only")
def test_a_graph_inside_the_clock_is_told() -> None:
    said: list[str] = []
    compiling = Compiling(None, said.append)
    compiling.before()
    compiling.ready(keep=True)
    list(fit(tiny_model(), TinyBatches(), tiny_settings(warmup_steps=0, iterations=2, compile=True), OPTIMIZERS))
    compiling.ended()
    assert compiling.late == 2
    assert "2 graphs compiled inside the clock; more warmup_steps" in said[-1]


def test_the_cache_is_written_by_one_rank_and_only_when_something_is_new(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(monkeypatch)
    counts = iter([Compiled(0, 0, 0), Compiled(0, 0, 0), Compiled(1, 4, 0)] * 3)
    monkeypatch.setattr(compilation, "compiled", lambda: next(counts))
    for keep, expected in ((False, False), (True, True)):
        compiling = Compiling(cache := CompileCache(own, {}, CPU), lambda _: None)
        compiling.before()
        compiling.ready(keep=keep)
        assert cache.path.exists() is expected
    before = cache.path.stat().st_mtime_ns
    compiling = Compiling(cache, lambda _: None)
    compiling.before()
    compiling.ready(keep=True)  # four parts found, none made
    assert cache.path.stat().st_mtime_ns == before
    assert compiling.primed.line() == "1 graph compiled, 4 of 4 parts from a cache"


@pytest.mark.usefixtures("graphs_only")
def test_what_has_many_sizes_has_a_graph_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only for the eight that torch allows, after which it runs the rest eagerly and keeps quiet."""
    told: list[str] = []

    def counts() -> tuple[int, int]:
        torch._dynamo.reset()
        before, twice = compiled(), torch_compile.compile_or_eager(lambda x: 2 * x.sin(), told.append)
        for size in range(2, 14):
            twice(torch.zeros(size))
        found = compiled().since(before)
        return found.graphs, found.given_up

    assert counts() == (12, 0)
    monkeypatch.setattr(torch_compile, "RECOMPILE_LIMIT", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs, given_up = counts()
    assert graphs == 5
    assert given_up >= 1
    assert told == []
