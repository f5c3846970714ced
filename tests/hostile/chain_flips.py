"""Flipped bits in every link of a chain: `python -m tests.hostile chain_flips --count 20`.

A chain is copied, one random bit of one of its files is flipped, and whoever reads it is started: `birdie inspect`,
`birdie decompress` of each link, `birdie compress` with the checkpoints of the run, and with later ones alone. Laws:
each link comes back bit for bit or is refused in one sentence, and is listed as that; `compress` with the checkpoints
mends the chain; without them it adds what is new, and every link that was restored before still is.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from birdie.artifact.container import MAGIC
from tests.hostile.chain_laws import problems_of_links, states_of
from tests.hostile.workload import End, Report, State, call, forked, problem_of, write_checkpoints

READERS = ("inspect and decompress", "compress", "compress later ones")
LINKS, LATER = 4, 2
"""Checkpoints of the chain, and such that the run writes later."""
NAMED = "last.birdie"
"""The link of last.ckpt, which the run overwrites."""


def campaign(count: int = 20, seed: int = 0, only: Sequence[str] = ("*",)) -> Report:
    """Flip `count` bits of each link of a chain, or of those of these patterns, one at a time."""
    report, rng = Report(), random.Random(seed)
    with workplace() as folder:
        sound, later = states_of(folder / "sound"), states_of(folder / "grown")
        for path in sorted({path for pattern in only for path in (folder / "sound").glob(pattern)}):
            for _ in range(count):
                bit = rng.randrange(8 * path.stat().st_size)
                for reader in READERS:
                    shutil.rmtree(folder / "run.birdie", ignore_errors=True)
                    shutil.copytree(folder / "sound", folder / "run.birdie")
                    flip(folder / "run.birdie" / path.name, bit)
                    report.counts[f"{path.name}, {reader}"] += 1
                    for problem in _problems(folder, reader, sound, later, is_magic=bit < 8 * len(MAGIC)):
                        report.failures.append(f"{path.name}, bit {bit}, {reader}: {problem}")
    return report


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder with checkpoints of a run, later ones, and the chains of the first and of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write_checkpoints(folder / "all", LINKS + LATER)
        write_checkpoints(folder / "checkpoints", LINKS)
        shutil.copytree(folder / "all", folder / "later")
        for step in range(10, 10 * LINKS + 1, 10):
            shutil.rmtree(folder / "later" / f"step-{step}")
        for source, chain in (("checkpoints", "sound"), ("all", "grown")):
            if (end := call(_compress(folder / source, folder / chain))).code:
                raise RuntimeError(end.message)
        yield folder


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _compress(checkpoints: Path, chain: Path) -> list[str]:
    return ["compress", str(checkpoints), "-o", str(chain), "--full-every", "3"]


def _problems(
    folder: Path, reader: str, sound: dict[str, State], later: dict[str, State], *, is_magic: bool
) -> Iterator[str]:
    """Start a reader of FOLDER/run.birdie, which has a flipped bit; yield the laws that were broken.

    A file whose first bytes are not those of a .birdie file may be somebody else's, and is not replaced.
    """
    chain = folder / "run.birdie"
    if reader == "inspect and decompress":
        yield from problems_of_links(chain, sound, forked)
        return
    earlier = {name: state for name, state in states_of(chain).items() if state}
    end = forked(_compress(folder / ("checkpoints" if reader == "compress" else "later"), chain))
    if problem := problem_of(end):
        yield problem
    after = states_of(chain)
    if reader == "compress" and not (is_magic and end.code):
        yield from _problems_of_mending(end, after, sound)
        return
    expected = {name: later[name] for name in later if name in earlier or name not in sound or name == NAMED}
    if end.code:
        expected = earlier
    yield from (f"{name} is lost" for name, state in expected.items() if after.get(name) != state)
    yield from problems_of_links(chain, sound | later, forked)


def _problems_of_mending(end: End, after: dict[str, State], sound: dict[str, State]) -> Iterator[str]:
    if end.code:
        yield f"it is not mended: {end.message}"
    if after != sound:
        changed = [name for name in sound if after.get(name) != sound[name]]
        yield f"other links {sorted(after.keys() ^ sound.keys())}, changed {changed}"
