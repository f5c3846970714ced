"""Processes that disturb each other: `python -m tests.hostile races --count 30`.

Two compressions to one file, two runs in one folder, two preparations of one data set, a reader of an artifact that is
written again and again, shards that are cut, overwritten, replaced or removed under a training run, and a clock that
jumps by a day. Laws: everybody ends with a complete result or in one sentence, never of a signal; what is left is what
one of them alone leaves.
"""

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from birdie.artifact.loading import load
from tests.hostile.faults import faulty_layer
from tests.hostile.workload import (
    COMMANDS,
    Report,
    contents,
    ended,
    problem_of,
    reset,
    started,
    train_tokens,
    workplace,
)

STEPS = 40
DAY = 86_400


def two_compressions(folder: Path, _: random.Random) -> Iterator[str]:
    """Two files of different size under one name: one of them stays, complete."""
    ways = COMMANDS["compress"].tokens(folder), COMMANDS["compress --budget"].tokens(folder)
    alone = []
    for tokens in ways:
        reset(folder)
        ended(started(tokens))
        alone.append(contents(folder / "out"))
    reset(folder)
    ends = [ended(process) for process in [started(tokens) for tokens in ways]]
    yield from (end.message for end in ends if end.code)
    if contents(folder / "out") not in alone:
        yield f"left: {contents(folder / 'out')}"


def two_runs(folder: Path, rng: random.Random) -> Iterator[str]:
    """Two trainings in one folder: the second is refused, and the first does not notice."""
    tokens = train_tokens(folder, STEPS)
    ended(started(tokens))
    alone = contents(folder / "out")
    reset(folder)
    processes = []
    for _ in range(2):
        processes.append(started(tokens))
        time.sleep(rng.uniform(0, 2))
    ends = [ended(process) for process in processes]
    yield from (problem for end in ends if (problem := problem_of(end)))
    if sorted(end.code for end in ends) != [0, 1]:
        yield f"exit codes {[end.code for end in ends]}"
    if contents(folder / "out") != alone:
        yield f"left: {contents(folder / 'out')}"


def two_preparations(folder: Path, _: random.Random) -> Iterator[str]:
    """The same data set twice at once: complete, or one of them says in one sentence that it is not alone."""
    tokens = COMMANDS["prepare"].tokens(folder)
    ended(started(tokens))
    alone = contents(folder / "out")
    reset(folder)
    ends = [ended(process) for process in [started(tokens), started(tokens)]]
    yield from (problem for end in ends if (problem := problem_of(end)))
    if all(end.code for end in ends):
        yield "nobody succeeded"
    if contents(folder / "out") != alone:
        yield f"left: {contents(folder / 'out')}"


def readers_of_an_artifact(folder: Path, _: random.Random) -> Iterator[str]:
    """A file that is loaded while it is replaced: each time the old one or the new one."""
    target = folder / "out" / "m.birdie"
    sizes: set[int] = set()
    for tokens in (COMMANDS["compress"].tokens(folder), COMMANDS["compress --budget"].tokens(folder)) * 2:
        process = started(tokens)
        while process.poll() is None:
            if target.exists():
                sizes.add(sum(tensor.numel() for tensor in load(target, workers=1).values()))
        if (end := ended(process)).code:
            yield end.message
    if len(sizes) != 1:
        yield f"loaded {sizes} weights"


def cut(path: Path, rng: random.Random) -> None:
    """Cut a file anywhere."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def overwrite(path: Path, rng: random.Random) -> None:
    """Change bytes of a file in place."""
    with path.open("rb+") as file:
        file.seek(rng.randrange(path.stat().st_size))
        file.write(rng.randbytes(64))


def replace(path: Path, _: random.Random) -> None:
    """Rename another file over this one."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def remove(path: Path, _: random.Random) -> None:
    """Remove a file."""
    path.unlink()


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (cut, overwrite, replace, remove)


def changing_shards(folder: Path, rng: random.Random) -> Iterator[str]:
    """A shard that changes under a run: the run ends complete, or in one sentence."""
    shards = next((folder / "in" / "data" / "datasets").iterdir())
    sound = {path: path.read_bytes() for path in shards.glob("*.bin")}
    for change in CHANGES:
        reset(folder)
        process = started(train_tokens(folder, STEPS))
        time.sleep(rng.uniform(2, 7))
        change(rng.choice(sorted(sound)), rng)
        end = ended(process)
        for path, data in sound.items():
            path.write_bytes(data)
        if problem := problem_of(end):
            yield f"{change.__name__}: {problem}"


def jumping_clock(folder: Path, rng: random.Random) -> Iterator[str]:
    """Days that pass or come again within seconds change neither the run nor when it ends."""
    tokens = train_tokens(folder, STEPS, cap=1000)
    ended(started(tokens))
    alone = contents(folder / "out")
    reset(folder)
    script = "import sys; from tests.hostile import races; races.run_with_jumps(int(sys.argv[1]), sys.argv[2:])"
    with faulty_layer() as library:
        process = started([str(rng.randrange(1 << 30)), *tokens], ("-c", script), LD_PRELOAD=str(library))
        end = ended(process)
    if end.code:
        yield end.message
    if contents(folder / "out") != alone:
        yield f"left: {contents(folder / 'out')}"


def run_with_jumps(seed: int, tokens: list[str]) -> None:
    """Run a command in a process whose clock jumps by up to a day, forward and back, every 50 ms."""
    from birdie.cli import main

    rng, shift = random.Random(seed), ctypes.CDLL(None).fault_shift
    shift.argtypes = [ctypes.c_long]

    def jump() -> None:
        while True:
            shift(rng.randint(-DAY, DAY))
            time.sleep(0.05)

    threading.Thread(target=jump, daemon=True).start()
    main(tokens)


RACES: dict[str, Callable[[Path, random.Random], Iterator[str]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(two_compressions, two_runs, two_preparations),
        *(readers_of_an_artifact, changing_shards, jumping_clock),
    )
}


def campaign(count: int = 30, seed: int = 0, only: Sequence[str] = tuple(RACES)) -> Report:
    """Run each race `count` times."""
    report, rng = Report(), random.Random(seed)
    with workplace() as folder:
        for race in only:
            for index in range(count):
                reset(folder)
                report.counts[race] += 1
                report.failures += [f"{race}, {index}: {problem}" for problem in RACES[race](folder, rng)]
    return report
