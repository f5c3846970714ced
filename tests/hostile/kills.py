"""Processes killed at random moments: `python -m tests.hostile kills --count 30`.

A command runs in a process of its own and gets SIGKILL or SIGTERM at a moment drawn evenly from the time that an
undisturbed one takes. Laws: what is found afterwards is the old file or the complete new one, and no file that was
there is lost; inputs are untouched; SIGTERM leaves nothing else; the command, started again, ends with the bytes of the
undisturbed one and leaves no other file; training goes on from a checkpoint at most one interval old, and after SIGTERM
within its steps no step is lost; each link of its chain comes back, and in the end none is missing.
"""

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import Program
from tests.hostile.chain_laws import problems_of_run, states_of, weights_of_run
from tests.hostile.workload import (
    COMMANDS,
    EVERY,
    Report,
    State,
    contents,
    environment,
    inputs_of,
    training,
    workplace,
)

STEPS = 60
DELTAS = "train --checkpoint-deltas"
TARGETS = {
    "compress": COMMANDS["compress --budget"],
    "train": training(STEPS),
    DELTAS: training(STEPS, "--checkpoint-deltas"),
    **{
        name: COMMANDS[name]
        for name in (
            *("compress chain", "chain --keep-every", "decompress .pt", "decompress folder", "decompress --overwrite"),
            *("decompress --step", "page", "report"),
        )
    },
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
    with workplace(inputs_of(TARGETS[target] for target in only)) as folder:
        for target in only:
            _attack(report, folder, target, count, rng)
    return report


def _attack(report: Losses, folder: Path, target: str, count: int, rng: random.Random) -> None:
    command = TARGETS[target]
    command.begin(folder)
    _run(command.tokens(folder))  # compiles
    command.begin(folder)
    seconds, code, log = _run(command.tokens(folder))
    if code:
        raise RuntimeError(log)
    sound, inputs = contents(folder / "out"), contents(folder / "in")
    weights = weights_of_run(folder) if target == DELTAS else {}
    links = states_of(folder / "out" / "run.birdie")
    for name, number in SIGNALS.items():
        for index in range(count):
            earlier = command.begin(folder)
            known = states_of(folder / "out" / "run.birdie")
            moment = rng.uniform(0, seconds)
            _, code, log = _run(command.tokens(folder), moment, number)
            report.counts[f"{target}, {name}, exit code {code}"] += 1
            problems = [*_problems_of_death(folder, target, name, log, earlier, sound)]
            if target == DELTAS:
                problems += problems_of_run(weights_of_run(folder), weights, complete=False)
            for link, state in states_of(folder / "out" / "run.birdie").items():
                if link in links and state not in (links[link], known.get(link)):
                    problems.append(f"{link} is not restored: {state}")
            _, again, second = _run(command.again(folder))
            if again:
                problems.append(f"started again, exit code {again}: {second[-300:]}")
            else:
                problems += _problems_of_end(folder, sound)
            if target == DELTAS and not again:
                problems += problems_of_run(weights_of_run(folder), weights, complete=True)
            if contents(folder / "in") != inputs:
                problems.append("an input changed")
            if target.startswith("train"):
                problems += _losses(report, target, name, log, second)
            report.failures += [f"{target}, {name} {index} after {moment:.2f} s: {problem}" for problem in problems]


def _problems_of_death(folder: Path, target: str, name: str, log: str, earlier: State, sound: State) -> Iterator[str]:
    """Yield what is wrong after a death: files that are neither old nor new, that are lost, or that are left."""
    left = contents(folder / "out")
    for path, digest in left.items():
        if digest and path in sound and digest not in (sound[path], earlier.get(path)):
            yield f"{path} is not complete"
    if lost := sorted((earlier.keys() & sound.keys()) - left.keys()):
        yield f"lost {lost}"
    if "Traceback" in log:
        yield f"a traceback: {log[-600:]}"
    if name == "SIGTERM":
        strays = left.keys() - sound.keys() - earlier.keys() if not target.startswith("train") else set()
        if strays := strays | {str(path) for path in (folder / "out").rglob(".birdie-*")}:
            yield f"left {sorted(strays)}"


def _problems_of_end(folder: Path, sound: State) -> Iterator[str]:
    """Yield what differs from the result of an undisturbed command, and what is left beside it."""
    if (after := contents(folder / "out")) != sound:
        changed = [path for path in sound if after.get(path) != sound[path]]
        yield f"other files {sorted(set(after) - set(sound))}, changed {changed}"
    if strays := [path.name for path in (folder / "out").rglob(".birdie-*")]:
        yield f"temporary folders {strays}"


def _losses(report: Losses, target: str, name: str, log: str, second: str) -> Iterator[str]:
    """Note how many steps a training lost, and yield that as a failure if they are too many."""
    done = max(map(int, STEP.findall(log)), default=0)
    lost = max(0, done - max(map(int, RESUMED.findall(second)), default=0))
    report.lost[f"{target}, {name}"] = max(lost, report.lost[f"{target}, {name}"])
    if lost > (EVERY if name == "SIGKILL" or done in (0, STEPS) else 0):
        yield f"{lost} of {done} steps were lost"


def _run(tokens: list[str], moment: float | None = None, number: int = signal.SIGKILL) -> tuple[float, int, str]:
    """Run a command, with a signal after `moment` seconds; return its seconds, exit code and stderr."""
    start = time.perf_counter()
    with Program("-m", "birdie", *tokens, variables=environment()) as program:
        if moment is not None and program.wait(moment) is None:
            program.send_signal(number)
        code = program.wait(300)
        assert code is not None, f"birdie {' '.join(tokens)} runs for more than 300 s"
        return time.perf_counter() - start, code, program.stderr
