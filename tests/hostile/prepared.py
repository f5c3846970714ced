"""Folders that somebody prepared: `python -m tests.hostile prepared`.

A command runs once, and every name that it opens, creates, renames or removes in its output folder is recorded. Then
each of these names is, in turn, a link to somebody's file, a link to somebody's folder, a link to nothing, a pipe, a
folder, or a second name of somebody's file, and the command runs again. Laws: nothing of somebody's changes, nothing is
created elsewhere, nothing hangs, and there is no traceback.
"""

import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from birdie.artifact import saving
from tests.hostile.workload import COMMANDS, Command, Report, forked, reset, train_tokens, workplace

_RECORD = re.compile(r"[0-9a-f]{64}\.birdie")
SECONDS = 120
"""After which a command hangs."""
TEXT = "years of work\n"
TRAIN = Command(lambda at: train_tokens(at, 2), lambda at: [*train_tokens(at, 4), "--resume"])
TARGETS = {name: COMMANDS[name] for name in ("compress", "decompress .pt", "decoder", "prepare")} | {
    "train": Command(TRAIN.tokens, TRAIN.tokens),
    "train --resume": TRAIN,
}
Make = Callable[[Path, Path], object]
THINGS: dict[str, Make] = {
    "link to a file": lambda path, mine: path.symlink_to(mine / "file"),
    "link to a folder": lambda path, mine: path.symlink_to(mine / "folder"),
    "link to nothing": lambda path, mine: path.symlink_to(mine / "none"),
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, mine: shutil.copytree(mine, path, symlinks=True),
    "second name": lambda path, mine: path.hardlink_to(mine / "file"),
}
CHOSEN = {".", "data", "run"}
"""Names that the command line chooses: a link to a folder is followed there (tests/cli/test_output_states.py)."""
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.scandir"}


def prepare_mine(folder: Path) -> None:
    """Create what belongs to somebody: a file, and a folder that looks like one of birdie's."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "folder" / "step-00000001").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/0", "folder/step-00000001/model.safetensors"):
        (folder / name).write_text(TEXT)


def state_of(folder: Path) -> dict[str, object]:
    """Name → content, or kind, of everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def names_of(folder: Path, command: Command) -> list[str]:
    """Return the names that a command uses in FOLDER/out: where it is new, and where it goes on."""
    used = folder / "used"

    def record() -> None:
        saving._ON_DISK = 1
        file = os.open(used, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event in EVENTS:
                for path in arguments[:2]:
                    if isinstance(path, str | bytes) and (name := os.fsdecode(path)).startswith(f"{folder}/out/"):
                        os.write(file, f"{name}\n".encode())

        sys.addaudithook(hook)

    for tokens in (command.tokens(folder), command.again(folder)):
        forked(tokens, record)
    out = folder / "out"
    names = {Path(line).relative_to(out).as_posix() for line in used.read_text().splitlines()}
    names |= {path.relative_to(out).as_posix() for path in out.rglob("*")}
    used.unlink()
    names = {name for name in names if not _RECORD.search(name)}  # which others have, where the folder is another
    return sorted(name for name in names if name not in CHOSEN and ".birdie-" not in name)


def attack(report: Report, folder: Path, target: str, rng: random.Random, count: int) -> None:
    """Put each thing where each name is, or `count` of them, and run the command again."""
    command, mine, saved = TARGETS[target], folder / "mine", folder / "saved"
    reset(folder)
    names = names_of(folder, command)
    reset(folder)
    goes_on = command.again(folder) != command.tokens(folder)
    if goes_on:
        forked(command.tokens(folder))
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(folder / "out", saved)
    cases = [(name, thing) for name in names for thing in THINGS]
    for name, thing in rng.sample(cases, min(count, len(cases))):
        reset(folder, saved)
        prepare_mine(mine)
        untouched, path = state_of(mine), folder / "out" / name
        if path.parent.is_symlink() or (path.parent.exists() and not path.parent.is_dir()):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        THINGS[thing](path, mine)
        plant(folder / "out", mine)
        end = forked(command.again(folder) if goes_on else command.tokens(folder), _watched)
        where = f"{target}, {name}, {thing}"
        report.counts[f"{target}, exit code {end.code}"] += 1
        if end.code not in (0, 1) or "Traceback" in end.message or (end.code and not end.message.strip()):
            report.failures.append(f"{where}: exit code {end.code}: {end.message[-300:]}")
        if state_of(mine) != untouched:
            report.failures.append(f"{where}: what is somebody else's has changed")


def _watched() -> None:
    saving._ON_DISK = 1  # coded tensors of small models are kept on disk, too
    signal.alarm(SECONDS)


def plant(out: Path, mine: Path) -> None:
    """Put what looks like a killed process's into a folder: temporary folders and coded tensors, links among them."""
    for folder in (out / ".birdie-abcdefgh.part", out / f".birdie-{mine.stat().st_ino}-abcdefgh.part"):
        if out.is_dir() and not out.is_symlink() and any(out.iterdir()):
            folder.mkdir()
            (folder / "old").symlink_to(mine / "folder")
            (folder / "new").symlink_to(mine / "folder")
            (folder / "lock").symlink_to(mine / "file")


def campaign(count: int = 1000, seed: int = 0, only: Sequence[str] = tuple(TARGETS)) -> Report:
    """Attack each target with about `count` of its cases, drawn at random."""
    report, rng = Report(), random.Random(seed)
    with workplace() as folder:
        for target in only:
            attack(report, folder, target, rng, count)
    return report
