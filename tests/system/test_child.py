"""Threads and children: no more at once than there is room, errors and signals reach whom they should."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import birdie
from birdie.compress.schemes.trellis import Trellis
from birdie.system.child import run_child, unwatched
from birdie.system.threads import Room

SAVES = """
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("saving", flush=True)
    pathlib.Path("saved").touch()
"""


def test_code_and_lines_are_returned_and_errors_are_among_them_unless_they_have_a_file(tmp_path: Path) -> None:
    program = ["-c", "import sys; print('out'); sys.stdout.flush(); sys.stderr.write('err\\n'); sys.exit(3)"]
    seen: list[str] = []
    assert run_child(program, on_line=seen.append) == (3, ["out", "err"])
    assert seen == ["out", "err"]
    with (tmp_path / "errors").open("wb") as errors:
        assert run_child(program, errors=errors) == (3, ["out"])
    assert (tmp_path / "errors").read_text() == "err\n"


@pytest.mark.parametrize("where", ["on_line", "watch"])
def test_an_exception_interrupts_the_child_and_waits_until_it_has_saved(where: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def interrupt() -> None:
        if seen:
            raise KeyboardInterrupt

    def follow(line: str) -> None:
        seen.append(line)
        if where == "on_line" and line == "begun":
            interrupt()

    watch = interrupt if where == "watch" else unwatched
    with pytest.raises(KeyboardInterrupt):
        run_child(["-c", SAVES], folder=tmp_path, watch=watch, on_line=follow)
    assert (tmp_path / "saved").is_file()
    assert seen[-1] == "saving"


def test_no_more_is_taken_than_there_is_room() -> None:
    room, lock = Room(10), threading.Lock()
    taken, most = 0, 0

    def work(amount: int) -> None:
        nonlocal taken, most
        with room.taken(amount):
            with lock:
                taken += amount
                most = max(most, taken)
            threading.Event().wait(0.002)
            with lock:
                taken -= amount

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [1, 4, 6, 3, 10, 2, 5, 25, 9, 1] * 3))
    assert most == 25, "the largest alone"


def blas_threads() -> set[int]:
    """Return the threads of NumPy's BLAS; SciPy may bring another."""
    return {library["num_threads"] for library in threadpool_info() if "numpy" in library["filepath"]}


def test_tensors_are_encoded_with_one_thread(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    encode = Trellis.encode_with

    def watched(self: Trellis, *arguments: object, **settings: object) -> object:
        seen.append(blas_threads())
        return encode(self, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Trellis, "encode_with", watched)
    with threadpool_limits(2, user_api="blas"):
        birdie.save({"w": torch.randn(64, 64)}, f"{tmp_path}/model.birdie", bits=4.0)
        assert blas_threads() == {2}
    assert seen
    assert set.union(*seen) == {1}
