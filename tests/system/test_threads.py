"""Work waits until there is room for it, and BLAS has one thread while tensors are compressed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import birdie
from birdie.compress.schemes.trellis import Trellis
from birdie.system.threads import Room


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


def test_an_error_gives_its_room_back() -> None:
    room = Room(1)
    with pytest.raises(ValueError, match="no"), room.taken(1):
        raise ValueError("no")
    with room.taken(1):
        pass


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
