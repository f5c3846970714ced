"""A trainer that writes checkpoints slowly, and not atomically, as most do: whoever reads finds parts of files.

It is a fork of the process that reads. What it is about to write is noted first, so a reader can tell a complete
checkpoint from a part of one.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

PAUSE = 0.05
"""Seconds, at most, between two pieces of a file."""


def plainly(path: Path, data: bytes, _: random.Random) -> None:
    """Write a file at once, which others see grow."""
    path.write_bytes(data)


def in_pieces(path: Path, data: bytes, rng: random.Random) -> None:
    """Write a file in pieces with pauses."""
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(1, 5)))
    with path.open("wb", buffering=0) as file:
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            file.write(data[start:stop])
            time.sleep(rng.uniform(0, PAUSE))


def in_place(path: Path, data: bytes, rng: random.Random) -> None:
    """Overwrite a file with one that may be shorter, without emptying it first."""
    with path.open("rb+" if path.exists() else "wb", buffering=0) as file:
        half = len(data) // 2
        file.write(data[:half])
        time.sleep(rng.uniform(0, PAUSE))
        file.write(data[half:])
        file.truncate()


def at_the_size_first(path: Path, data: bytes, rng: random.Random) -> None:
    """Give a file its size and fill it from its end, as writers that map it do."""
    with path.open("wb", buffering=0) as file:
        file.truncate(len(data))
        half = len(data) // 2
        file.seek(half)
        file.write(data[half:])
        time.sleep(rng.uniform(0, PAUSE))
        file.seek(0)
        file.write(data[:half])


Write = Callable[[Path, bytes, random.Random], None]
WAYS: Mapping[str, Write] = {"plain": plainly, "pieces": in_pieces, "size first": at_the_size_first}
FORMATS = ("pt", "safetensors", "folder")


@contextmanager
def training(folder: Path, count: int, way: str, form: str, seed: int) -> Iterator[Callable[[], bool]]:
    """Write `count` checkpoints into FOLDER/run in another process; yield a function that tells whether it still runs.

    Args:
        folder: FOLDER/digests.jsonl says what was written.
        count: checkpoints; each is followed by last.ckpt, which is overwritten in place.
        way: of `WAYS`.
        form: of `FORMATS`: a file, or a folder of two.
        seed: of weights and pauses.
    """
    (folder / "run").mkdir()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            _train(folder, count, WAYS[way], form, random.Random(seed))
        finally:
            os._exit(0)
    running = True

    def runs() -> bool:
        nonlocal running
        running = running and os.waitpid(child, os.WNOHANG) == (0, 0)
        return running

    try:
        yield runs
    finally:
        if running:
            os.waitpid(child, 0)


def written(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return name of a checkpoint → the digests of its files, by name, of each that was begun; the last is there."""
    states: dict[str, list[dict[str, str]]] = {}
    for line in (folder / "digests.jsonl").read_text(encoding="utf-8").splitlines():
        name, digests = json.loads(line)
        states.setdefault(name, []).append(digests)
    return states


def _train(folder: Path, count: int, write: Write, form: str, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    state = {"a": torch.randn(20, 24, generator=generator), "b": torch.randn(90, generator=generator).half()}
    with (folder / "digests.jsonl").open("a", encoding="utf-8") as log:
        for step in range(1, count + 1):
            state["a"] = state["a"] + 1e-4 * torch.randn(20, 24, generator=generator)
            name = f"step_{step}" if form == "folder" else f"step_{step}.{form}"
            files = _files(folder, name, step, state, form)
            _note(log.fileno(), name, files)
            for file, data in files.items():
                target = folder / "run" / name / file if form == "folder" else folder / "run" / name
                target.parent.mkdir(exist_ok=True)
                write(target, data, rng)
            last = _torch_bytes(folder / "last.ckpt", {"step": step, "pad": "x" * rng.randrange(99), "model": state})
            _note(log.fileno(), "last.ckpt", {"last.ckpt": last})
            in_place(folder / "run" / "last.ckpt", last, rng)


def _note(log: int, name: str, files: Mapping[str, bytes]) -> None:
    digests = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    os.write(log, (json.dumps([name, digests]) + "\n").encode())


def _files(folder: Path, name: str, step: int, state: Mapping[str, Tensor], form: str) -> dict[str, bytes]:
    if form == "pt":
        return {name: _torch_bytes(folder / name, {"step": step, "model": dict(state)})}
    if form == "safetensors":
        return {name: save(dict(state))}
    return {"model.safetensors": save(dict(state)), "state.json": json.dumps({"step": step}).encode()}


def _torch_bytes(path: Path, value: object) -> bytes:
    """Return what `torch.save` writes into a file of this name."""
    torch.save(value, path)
    data = path.read_bytes()
    path.unlink()
    return data
