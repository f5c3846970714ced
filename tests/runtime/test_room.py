"""Work waits until there is room, and work larger than the room is done alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from birdie.runtime.room import Room


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
