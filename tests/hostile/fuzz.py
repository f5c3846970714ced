"""Mutated files against the decoders: `python -m tests.hostile.fuzz --count 1000000 --seed 0`.

A file as it is damaged on the way decodes to exactly the same or is refused with ArtifactError; one whose checksums
were made to agree again (half of them) decodes to tensors of the shapes and dtypes that it declares, the same each
time, or is refused. Never another exception, a crash, a hang, or memory beyond the limit. The one-file decoder and the
decoder in WebAssembly, where Node and its compiler are installed, say the same of each file (`tests.hostile.targets`).

Batches run in subprocesses of their own under a memory limit, and a timer kills one that spends too long on a mutant;
whatever goes wrong is told with the number of the mutant, and `--seed NUMBER --count 1` makes it again. `--checked`
compiles the kernels with a check of every index, which is slower and sees what otherwise goes unnoticed; `--only tiles`
tries one target.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from birdie.errors import ArtifactError
from tests.hostile import mutate, seeds, targets
from tests.hostile.seeds import Seed
from tests.hostile.targets import BrokenError, Content

ROOM = 256 << 20  # bytes a batch may take besides what it has once all is warm
SECONDS = 60  # a mutant may take, on a loaded machine that compiles its kernels first
BATCH = 25_000
MAX_FAILURES = 20


@dataclass
class Report:
    """Outcomes of the mutants.

    Attributes:
        counts: by target, mutation and outcome.
        failures: the number of a mutant and what happened.
        peak: bytes of resident memory, the most of any batch.
        growth: by how much a batch grew, at most.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak: int = 0
    growth: int = 0

    @property
    def tried(self) -> int:
        """Number of mutants that had an outcome."""
        return sum(count for what, count in self.counts.items() if not what.startswith(targets.AGREEMENT))

    def add(self, other: "Report") -> None:
        """Take in what another batch found."""
        self.counts.update(other.counts)
        self.failures += other.failures
        self.peak, self.growth = max(self.peak, other.peak), max(self.growth, other.growth)

    def __str__(self) -> str:
        lines = [f"{count:>10,}  {what}" for what, count in sorted(self.counts.items())]
        memory = f"at most {self.peak >> 20:,} MiB resident, {self.growth >> 20:,} MiB more than at the start"
        return "\n".join([*lines, memory, *(self.failures or ["no failures"])])


def run(count: int, first: int, progress: Callable[[int], object] = int, only: Collection[str] = ()) -> Report:
    """Try the mutants `first` … `first + count - 1` in this process, and call `progress` with the number of each.

    Args:
        count, first: of the mutants.
        progress: called before each mutant.
        only: names of the targets; all without any.
    """
    torch.set_num_threads(1)
    report = Report()
    with (
        seeds.short_chunks(),
        targets.webassembly(short=True),
        tempfile.TemporaryDirectory(dir=_quick_folder()) as folder,
    ):
        path = Path(folder) / "mutant.birdie"
        sound = {
            name: [(seed, target.decode(seed, seed.data, path)) for seed in target.sound()]
            for name, target in targets.TARGETS.items()
            if not only or name in only
        }
        targets.OUTCOMES.clear()
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with _limited():
            for index in range(first, first + count):
                progress(index)
                try:
                    report.counts[_attempt(index, sound, path)] += 1
                except Exception:
                    report.failures.append(f"mutant {index}: {traceback.format_exc(limit=-4)}")
                    if len(report.failures) >= MAX_FAILURES:
                        break
        report.counts.update(targets.OUTCOMES)
        report.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        report.growth = report.peak - (start << 10)
    return report


def _quick_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """ROOM of address space more than now, and no timer left running afterwards."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _attempt(index: int, sound: dict[str, list[tuple[Seed, Content]]], path: Path) -> str:
    """Make and decode one mutant: target, mutation and outcome."""
    rng = random.Random(index)
    name = rng.choices(list(sound), [targets.TARGETS[name].share for name in sound])[0]
    target = targets.TARGETS[name]
    seed, content = rng.choice(sound[name])
    how = rng.choice(list(target.repaired)) if index % 2 else "bytes"
    data = mutate.data(seed, rng) if how == "bytes" else target.repaired[how](seed, rng)
    # No handler: a kernel that hangs would not let one run, so the timer kills.
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        decoded = target.decode(seed, data, path)
    except ArtifactError:
        return f"{name}, {how}: refused"
    if how == "bytes":
        if decoded != content:
            raise BrokenError(f"{name}: damage went unnoticed")
        return f"{name}, {how}: the same"
    if index % 8 == 1 and decoded != target.decode(seed, data, path):
        raise BrokenError(f"{name}, {how}: decoded to something else the second time")
    return f"{name}, {how}: accepted"


def campaign(count: int, first: int, jobs: int = 1, *, checked: bool = False, only: Collection[str] = ()) -> Report:
    """Try so many mutants of all targets, or of those of `only`, in killable subprocesses, `jobs` at a time."""
    report = Report()
    with ThreadPoolExecutor(jobs) as pool:
        starts = range(first, first + count, BATCH)
        for batch in pool.map(lambda at: _batch(min(BATCH, first + count - at), at, checked, only), starts):
            report.add(batch)
            sys.stderr.write(f"{report.tried:,} tried, {len(report.failures):,} failures\n")
    return report


def _batch(count: int, first: int, checked: bool, only: Collection[str]) -> Report:
    """One batch in a subprocess; a mutant that kills it is a failure, and the rest is tried without it."""
    report, end = Report(), first + count
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if checked:
        cache = Path(tempfile.gettempdir()) / f"birdie-checked-kernels-{os.getuid()}"
        quiet |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache)}
    with tempfile.NamedTemporaryFile() as progress:
        while first < end and len(report.failures) < MAX_FAILURES:
            progress.truncate(8)
            progress.seek(0)
            progress.write(struct.pack("<q", -1))
            progress.flush()
            command = [sys.executable, "-m", "tests.hostile.fuzz", "--inside", progress.name]
            command += ["--count", str(end - first), "--seed", str(first), *(["--only", *only] if only else [])]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2], env=os.environ | quiet
            )
            if done.returncode == 0:
                outcome = json.loads(done.stdout.splitlines()[-1])
                report.add(Report(Counter(outcome["counts"]), outcome["failures"], outcome["peak"], outcome["growth"]))
                break
            (reached,) = struct.unpack("<q", Path(progress.name).read_bytes())
            if reached < 0:
                raise BrokenError(f"the batch from {first} never began: {done.stderr[-2000:]}")
            report.failures.append(f"mutant {reached}: the process ended with {done.returncode}: {done.stderr[-500:]}")
            first = reached + 1
    return report


def main() -> None:
    """A campaign, or with --inside one batch in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--checked", action="store_true", help="check every index in compiled code")
    parser.add_argument("--only", nargs="+", choices=targets.TARGETS, default=(), help="targets")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        with Path(options.inside).open("r+b") as progress, mmap.mmap(progress.fileno(), 8) as shared:
            report = run(
                *(options.count, options.seed, lambda index: struct.pack_into("<q", shared, 0, index), options.only)
            )
        sys.stdout.write(json.dumps(vars(report)) + "\n")
        return
    start = time.perf_counter()
    report = campaign(options.count, options.seed, options.jobs, checked=options.checked, only=options.only)
    seconds = time.perf_counter() - start
    tried = report.tried
    sys.stdout.write(f"{report}\n{tried:,} mutants in {seconds:.0f} s, {tried / seconds:,.0f} a second\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
