"""Faults at every write: `python -m tests.hostile faults [--only COMMAND] [--count N]`.

A small library between the process and the kernel (faults.c, by LD_PRELOAD) lets the n-th operation that changes a file
fail with ENOSPC, EIO or EDQUOT, or kills the process there, for every n that the command reaches. The law after an
error: exit code 1 with one sentence, or success; every file is the old one, or complete and new; no other file is left.
After a kill the same holds but for temporary files, and when the command was started again they are gone, too. No file
that was there is lost. Each link in the chain of a training run comes back, whatever the run could not write.
"""

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hostile.chain_laws import problems_of_run, weights_of_run
from tests.hostile.workload import (
    COMMANDS,
    End,
    Report,
    State,
    contents,
    environment,
    forked,
    inputs_of,
    problem_of,
    workplace,
)

KILL = 0
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "kill": KILL}
FULL_DISK = "full disk"
NEVER = -1
PAGE = 4096
ROOM = 1 << 14
"""Pages of a disk on which there is room."""
SOURCE = Path(__file__).with_name("faults.c")


def compiler() -> str | None:
    """Return the C compiler of this machine, if it has one and loads libraries before others."""
    return shutil.which("cc") if sys.platform.startswith("linux") else None


@contextmanager
def faulty_layer() -> Iterator[Path]:
    """Yield the compiled file layer, for LD_PRELOAD."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        subprocess.run([compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        yield library


def campaign(
    count: int = 1000,
    seed: int = 0,
    only: Sequence[str] = tuple(COMMANDS),
    errors: Sequence[str] = (*ERRORS, FULL_DISK),
) -> Report:
    """Attack each command at `count` operations or so, from number `seed` on, in a process with the faulty layer."""
    with faulty_layer() as library:
        script = "import sys; from tests.hostile import faults; faults.answer(sys.argv[1])"
        ended = subprocess.run(
            [sys.executable, "-c", script, json.dumps([list(only), list(errors), count, seed])],
            env={**environment(), "LD_PRELOAD": str(library)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    answer = json.loads(ended.stdout.splitlines()[-1])
    return Report(Counter(answer["counts"]), answer["failures"])


def answer(request: str) -> None:
    """Attack as `campaign` asks another process to, and print the report as JSON."""
    report = _attack(*json.loads(request))
    sys.stdout.write(json.dumps({"counts": report.counts, "failures": report.failures}) + "\n")


def _attack(names: list[str], errors: list[str], count: int, seed: int) -> Report:
    report = Report()
    with workplace(inputs_of(COMMANDS[name] for name in names)) as folder:
        for command in names:
            COMMANDS[command].begin(folder)
            reached = _disturbed(folder, COMMANDS[command].tokens(folder), NEVER, KILL)
            if reached.code:
                report.failures.append(f"{command}, undisturbed: {reached.message}")
                continue
            sound, inputs = contents(folder / "out"), contents(folder / "in")
            weights = weights_of_run(folder)
            pages = sum(-(-path.stat().st_size // PAGE) for path in (folder / "out").rglob("*") if path.is_file())
            if FULL_DISK in errors and os.geteuid() == 0:
                for size in range(1 + seed, pages + 1, -(-pages // count)):
                    report.counts[f"{command}, {FULL_DISK}"] += 1
                    for problem in _problems_on_disk(folder, command, size, sound, weights):
                        report.failures.append(f"{command}, disk of {size} pages: {problem}")
            for at in range(seed, reached.measured, -(-reached.measured // count)):
                for error in set(errors) & set(ERRORS):
                    report.counts[f"{command}, {error}"] += 1
                    for problem in _problems(folder, command, at, error, sound, inputs, weights):
                        report.failures.append(f"{command}, {error} at operation {at}: {problem}")
    return report


def _problems(
    folder: Path, command: str, at: int, error: str, sound: State, inputs: State, weights: State
) -> Iterator[str]:
    """Run a command whose operation `at` fails, then once more undisturbed; yield the laws that were broken."""
    earlier = COMMANDS[command].begin(folder)
    first = _disturbed(folder, COMMANDS[command].tokens(folder), at, ERRORS[error])
    left = contents(folder / "out")
    if error != "kill":
        yield from _problems_of_failure(first, left, earlier | sound)
    yield from _problems_of_files(left, earlier, sound)
    yield from problems_of_run(weights_of_run(folder), weights, complete=False)
    if first.code == 0 and left.keys() != sound.keys():
        yield f"success with other files: {sorted(sound.keys() ^ left.keys())}"
    again = _disturbed(folder, COMMANDS[command].again(folder), NEVER, KILL)
    if again.code:
        yield f"started again, exit code {again.code}: {again.message[-300:]}"
    elif (after := contents(folder / "out")) != sound:
        changed = [name for name in sound if after.get(name) != sound[name]]
        yield f"started again, other files: {sorted(after.keys() - sound.keys())}, not the same: {changed}"
    if contents(folder / "in") != inputs:
        yield "an input changed"
    yield from problems_of_run(weights_of_run(folder), weights, complete=True)


def _problems_on_disk(folder: Path, command: str, pages: int, sound: State, weights: State) -> Iterator[str]:
    """Run a command that writes to a disk with so many free pages; yield the laws that were broken."""
    out, kept = folder / "out", folder / "kept"
    earlier = COMMANDS[command].begin(folder)
    out.rename(kept)
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM * PAGE}", "none", out], check=True)
    try:
        shutil.copytree(kept, out, dirs_exist_ok=True)
        status = os.statvfs(out)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize // PAGE
        subprocess.run(["mount", "-o", f"remount,size={(used + pages) * PAGE}", out], check=True)
        first = forked(COMMANDS[command].tokens(folder))
        left = contents(out)
        yield from _problems_of_failure(first, left, earlier | sound)
        yield from _problems_of_files(left, earlier, sound)
        yield from problems_of_run(weights_of_run(folder), weights, complete=False)
        subprocess.run(["mount", "-o", f"remount,size={ROOM * PAGE}", out], check=True)
        again = forked(COMMANDS[command].again(folder))
        if again.code or contents(out) != sound:
            yield f"with room again: {again.message[-300:] or contents(out)}"
        yield from problems_of_run(weights_of_run(folder), weights, complete=True)
    finally:
        subprocess.run(["umount", out], check=True)
        shutil.rmtree(kept)


def _problems_of_files(left: State, earlier: State, sound: State) -> Iterator[str]:
    """Yield the files that are neither old nor complete and new, or that are lost."""
    for name, digest in left.items():
        if digest and name in sound and digest not in (sound[name], earlier.get(name)):
            yield f"{name} is not complete"
    yield from (f"{name} is lost" for name in (earlier.keys() & sound.keys()) - left.keys())


def _problems_of_failure(end: End, left: State, known: State) -> Iterator[str]:
    """Yield what is wrong after a command that could not write: its end, and files that it should have removed."""
    if problem := problem_of(end):
        yield problem
    yield from (f"{name} is left" for name in left if name not in known and "step-" not in name)


def _disturbed(folder: Path, tokens: list[str], at: int, error: int) -> End:
    """Run a command whose operations on FOLDER/out fail from `at` on; the operations that it reached are measured."""
    layer = ctypes.CDLL(None)
    layer.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    layer.fault_count.restype = ctypes.c_long
    return forked(tokens, lambda: layer.fault_arm(str(folder / "out").encode(), at, error, 1), layer.fault_count)
