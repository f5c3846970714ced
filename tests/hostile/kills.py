"""Processes killed at random moments: `python -m tests.hostile kills --count 30`.

A command runs in a process of its own and gets SIGKILL or SIGTERM at a moment drawn evenly from the time that an
undisturbed one takes. Laws: what is found afterwards is the old file or the complete new one, inputs are untouched;
the command, started again, ends with the bytes of the undisturbed one and leaves no other file; training goes on from
a checkpoint at most one interval old, and after SIGTERM within its steps no step is lost.
"""

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import Program
from tests.hostile.workload import (
    COMMANDS,
    EVERY,
    Command,
    Report,
    contents,
    environment,
    reset,
    train_tokens,
    workplace,
)

STEPS = 60
TARGETS = {
    "compress": COMMANDS["compress --budget"],
    "train": Command(lambda at: train_tokens(at, STEPS), lambda at: [*train_tokens(at, STEPS), "--resume"]),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
STEP, RESUMED = re.compile(r"^step (\d+)  loss", re.MULTILINE), re.compile(r"resumed at step (\d+)")


@dataclass
class Losses(Report):
    """Result of the campaign, and the most steps that a killed training lost, by signal."""

    lost: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{name}, most steps lost: {steps} (interval: {EVERY})" for name, steps in sorted(self.lost.items())]
        return "\n".join([*lines, super().__str__()])


def campaign(count: int = 30, seed: int = 0, only: Sequence[str] = tuple(TARGETS)) -> Losses:
    """Kill each target `count` times with each signal."""
    report, rng = Losses(), random.Random(seed)
    with workplace() as folder:
        for target in only:
            _attack(report, folder, target, count, rng)
    return report


def _attack(report: Losses, folder: Path, target: str, count: int, rng: random.Random) -> None:
    command = TARGETS[target]
    reset(folder)
    _run(command.tokens(folder))  # compiles
    reset(folder)
    seconds, _, _ = _run(command.tokens(folder))
    sound, inputs = contents(folder / "out"), contents(folder / "in")
    for name, number in SIGNALS.items():
        for index in range(count):
            reset(folder)
            moment = rng.uniform(0, seconds)
            _, code, log = _run(command.tokens(folder), moment, number)
            left = contents(folder / "out")
            report.counts[f"{target}, {name}, exit code {code}"] += 1
            where = f"{target}, {name} {index} after {moment:.2f} s"
            for path, digest in left.items():
                if digest and path in sound and digest != sound[path]:
                    report.failures.append(f"{where}: {path} is not complete")
            if "Traceback" in log:
                report.failures.append(f"{where}: a traceback: {log.strip().splitlines()[-1]}")
            if name == "SIGTERM" and set(left) - set(sound) and target == "compress":
                report.failures.append(f"{where}: left {sorted(set(left) - set(sound))}")
            _, again, second = _run(command.again(folder))
            if again:
                report.failures.append(f"{where}: started again, exit code {again}: {second[-300:]}")
            elif (after := contents(folder / "out")) != sound:
                changed = [path for path in sound if after.get(path) != sound[path]]
                report.failures.append(f"{where}: other files {sorted(set(after) - set(sound))}, changed {changed}")
            if contents(folder / "in") != inputs:
                report.failures.append(f"{where}: an input changed")
            if target == "train":
                done = max(map(int, STEP.findall(log)), default=0)
                lost = max(0, done - max(map(int, RESUMED.findall(second)), default=0))
                report.lost[f"{target}, {name}"] = max(lost, report.lost[f"{target}, {name}"])
                if lost > (EVERY if name == "SIGKILL" or done in (0, STEPS) else 0):
                    report.failures.append(f"{where}: {lost} of {done} steps were lost")


def _run(tokens: list[str], moment: float | None = None, number: int = signal.SIGKILL) -> tuple[float, int, str]:
    """Run a command, with a signal after `moment` seconds; return its seconds, exit code and stderr."""
    start = time.perf_counter()
    with Program("-m", "birdie", *tokens, variables=environment()) as program:
        if moment is not None and program.wait(moment) is None:
            program.send_signal(number)
        code = program.wait(300)
        assert code is not None, f"birdie {' '.join(tokens)} runs for more than 300 s"
        return time.perf_counter() - start, code, program.stderr
