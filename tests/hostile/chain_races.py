"""Processes that disturb each other at a chain: `python -m tests.hostile chain_races --count 20`.

Two writers of one chain, of one run or of two, with and without --overwrite; `birdie chain` twice at once, beside a
reader and a writer; and `birdie compress` again and again while a trainer writes its checkpoints slowly
(tests/hostile/slow_trainer.py). Laws: each command ends with success or in one sentence; every step that a successful
writer announced comes back bit for bit, unless a later one replaced or removed it; a chain is of one run; in the end
each checkpoint has a link, and each link is that of a complete checkpoint.
"""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.hostile import slow_trainer
from tests.hostile.chain_laws import rows_of, states_of
from tests.hostile.workload import End, Fork, Report, State, call, contents, forked, problem_of, write_checkpoints

STEPS = 4
DELAY = 0.3
"""Seconds, at most, by which the second writer starts later."""
CHECKPOINTS = 20
"""Checkpoints of a slow trainer, by default."""


def prepare(folder: Path) -> dict[str, dict[str, State]]:
    """Write the checkpoints of two runs; return run → name of a link → digests of the files of its checkpoint."""
    sound = {}
    for seed, run in enumerate(("one", "other")):
        write_checkpoints(folder / run, STEPS, seed=seed)
        _require(call(_compress(folder, run)))
        sound[run] = states_of(folder / "run.birdie")
        shutil.rmtree(folder / "run.birdie")
    return sound


def two_writers(
    folder: Path, sound: dict[str, dict[str, State]], rng: random.Random, runs: Sequence[str], *, overwrite: bool
) -> Iterator[str]:
    """Let two writers add checkpoints to a chain at the same time, which is empty or has two of one of the runs."""
    chain = folder / "run.birdie"
    shutil.rmtree(chain, ignore_errors=True)
    if rng.random() < 0.5:
        later = ("step-30", "step-40", "last.ckpt")
        _require(call([*_compress(folder, runs[0]), *(token for name in later for token in ("--skip", name))]))
    earlier = states_of(chain)
    forks = []
    for run in runs:
        forks.append(Fork([*_compress(folder, run), "--json", *(["--overwrite"] if overwrite else [])]))
        time.sleep(rng.choice((0, rng.uniform(0, DELAY))))
    ends = [fork.end() for fork in forks]
    yield from (problem for end in ends if (problem := problem_of(end)))
    done, states = {run for run, end in zip(runs, ends, strict=True) if not end.code}, states_of(chain)
    if len(done) == 2 and not overwrite:
        yield "both runs are in the chain"
    # of two runs both may be refused: one for the chain, the other for the lock of the first
    allowed = [sound[run] for run in done] or [earlier] * (len({*runs}) == 2 and not overwrite)
    if states not in allowed:
        of = {name: [run for run in sound if sound[run].get(name) == state] for name, state in states.items()}
        yield f"the chain has {of}; {[end.message + end.answer[-300:] for end in ends]}"
    yield from _problems_of_list(chain)


def two_retentions(folder: Path, sound: dict[str, dict[str, State]], rng: random.Random) -> Iterator[str]:
    """Remove links of a chain twice at the same time, while one reads it and one adds to it."""
    chain, target = folder / "run.birdie", folder / "restored"
    shutil.rmtree(chain, ignore_errors=True)
    _require(call(_compress(folder, "one")))
    commands = [
        ["chain", str(chain), "--drop", str(rng.choice((10, 20)))],
        ["chain", str(chain), "--drop", str(rng.choice((10, 20, 30)))],
        ["chain", str(chain), "--keep-every", "20"],
        _compress(folder, "one"),
    ]
    shutil.rmtree(target, ignore_errors=True)
    forks = [Fork(["decompress", str(chain), "--step", "40", "-o", str(target)])]
    for tokens in rng.sample(commands, 3):
        time.sleep(rng.choice((0, rng.uniform(0, DELAY / 6))))
        forks.append(Fork(tokens))
    yield from (problem for fork in forks if (problem := problem_of(fork.end())))
    state = contents(target)
    if state and state != sound["one"]["step-40.birdie"]:
        yield f"a reader got {state}"
    states = states_of(chain)
    if not {"step-40.birdie", "last.birdie"} <= states.keys():
        yield f"a step is lost that nobody dropped: {sorted(states)}"
    yield from (f"{name} is not restored" for name in states if states[name] != sound["one"][name])
    yield from _problems_of_list(chain)


def slow_training(folder: Path, rng: random.Random, way: str, form: str, count: int = CHECKPOINTS) -> Iterator[str]:
    """Compress the checkpoints of a trainer that writes slowly, again and again."""
    chain = folder / "run.birdie"
    command = ["compress", str(folder / "run"), "-o", str(chain), "--full-every", "10", "--json"]
    with slow_trainer.training(folder, count, way, form, rng.randrange(1 << 30)) as runs:
        while runs():
            if problem := problem_of(forked(command)):
                yield problem
            time.sleep(rng.uniform(0, 0.05))
    for _ in range(2):  # the first may leave what was written just before it
        end = forked(command)
    if end.code:
        yield f"in the end: {end.message or end.answer}"
    else:
        yield from _problems_of_rest(end)
    yield from _problems_of_parts(chain, folder)
    yield from _problems_of_list(chain)
    expected = [states[-1] for states in slow_trainer.written(folder).values()]
    links = [*_in_run(chain).values()]
    if lost := [state for state in expected if state not in links]:
        yield f"no link of {lost}"
    if others := [state for state in links if state not in expected]:
        yield f"links of {others}"


def _problems_of_rest(end: End) -> Iterator[str]:
    """Yield what the last call says that it left, although nobody writes any more."""
    waiting = json.loads(end.answer).get("waiting")
    if waiting:
        yield f"still left: {waiting}"


def _problems_of_parts(chain: Path, folder: Path) -> Iterator[str]:
    """Yield the links that are of no complete checkpoint."""
    complete = [state for states in slow_trainer.written(folder).values() for state in states]
    yield from (f"{name} is of a part: {state}" for name, state in _in_run(chain).items() if state not in complete)


def _in_run(chain: Path) -> dict[str, State]:
    """Return link → digests of the files of its checkpoint, by their names in it."""
    return states_of(chain) if chain.is_dir() else {}


def _problems_of_list(chain: Path) -> Iterator[str]:
    end, rows = rows_of(chain)
    if end.code:
        yield f"inspect: {end.message or [row['damage'] for row in rows if row['damage']]}"


def keep(chain: Path) -> None:
    """Remove the links of all steps but every 30th; the process exits if that fails."""
    _require(call(["chain", str(chain), "--keep-every", "30"]))


def _compress(folder: Path, run: str) -> list[str]:
    return ["compress", str(folder / run), "-o", str(folder / "run.birdie")]


def _require(end: End) -> None:
    if end.code:
        raise RuntimeError(end.message)


WRITERS = {
    f"two writers of {name}{', --overwrite' if overwrite else ''}": (runs, overwrite)
    for name, runs in (("one run", ("one", "one")), ("two runs", ("one", "other")))
    for overwrite in (False, True)
}
TRAINERS = {f"{way}, {form}": (way, form) for way in slow_trainer.WAYS for form in slow_trainer.FORMATS}
RETENTIONS = "two retentions, a reader and a writer"
RACES: tuple[str, ...] = (*WRITERS, RETENTIONS, *TRAINERS)


def campaign(count: int = 20, seed: int = 0, only: Sequence[str] = RACES) -> Report:
    """Run each race of two writers `count` times, and let each trainer write `count` checkpoints."""
    report, rng = Report(), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        sound = prepare(Path(name).resolve())
        for race in only:
            for index in range(1 if race in TRAINERS else count):
                problems = _race(race, Path(name).resolve(), sound, rng, count)
                report.failures += [f"{race}, {index}: {problem}" for problem in problems]
                report.counts[race] += count if race in TRAINERS else 1
    return report


def _race(race: str, folder: Path, sound: dict[str, dict[str, State]], rng: random.Random, count: int) -> Iterator[str]:
    if race in WRITERS:
        runs, overwrite = WRITERS[race]
        yield from two_writers(folder, sound, rng, runs, overwrite=overwrite)
        return
    if race == RETENTIONS:
        yield from two_retentions(folder, sound, rng)
        return
    with tempfile.TemporaryDirectory() as name:
        yield from slow_training(Path(name).resolve(), rng, *TRAINERS[race], count=count)
