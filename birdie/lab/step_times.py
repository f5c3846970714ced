"""Step times of two recipes, measured by turns, so that other load on the machine slows both alike.

Each recipe is trained for a few steps whose schedule is that of the entire run in miniature: depth recurrence, growing
batches and late QAT take their share of the steps. The runs take turns step by step, for several rounds, and of each
step the fastest round counts. On a CPU, processor time on one thread is compared: identical recipes measure within 2 %
of one another on a machine with twice as much to do as it has cores, where wall-clock time is off by up to 10 %.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from birdie.errors import BirdieError, DataError
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe import Recipe
from birdie.gpt.train.loop import Step
from birdie.lab.experiment import OUTPUT, call
from birdie.lab.ledger import RECIPE
from birdie.system.device import choose_device
from birdie.system.files import write_bytes

STEPS, SETTLING = 24, 3
"""Steps of a round, and how many of them, at its beginning, are not counted."""
ROUNDS = 5
_CODE = "import sys; from birdie.lab.step_times import write; write(sys.argv[1:])"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Time that a recipe takes on this machine.

    Attributes:
        step_ms: milliseconds per step, on average over its schedule; compared on a CPU, of one processor.
        calibration_s: seconds of its calibration, which count as training; 0 without.
    """

    step_ms: float
    calibration_s: float

    def steps_in(self, seconds: float) -> int:
        """Return how many steps fit into `seconds` together with the calibration; at least 1."""
        return max(1, round(1000 * (seconds - self.calibration_s) / self.step_ms))

    def seconds_of(self, steps: int) -> float:
        """Return the time of so many steps, with the calibration."""
        return steps * self.step_ms / 1000 + self.calibration_s


def measure(recipes: Sequence[Recipe]) -> list[Cost]:
    """Measure the recipes by turns in a child process."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / str(index) / RECIPE for index in range(len(recipes))]
        for path, recipe in zip(paths, recipes, strict=True):
            path.parent.mkdir()
            write_bytes(path, json.dumps(recipe.to_dict()).encode())
        result = Path(name) / "costs.json"
        code, _ = call(["-c", _CODE, str(result), *map(str, paths)], Path(name) / OUTPUT)
        answer: dict[str, Any] = (
            json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {"error": f"exit code {code}"}
        )
    if "error" in answer:
        raise DataError(f"the step times cannot be measured: {answer['error']}")
    return [Cost(**cost) for cost in answer["costs"]]


def write(arguments: Sequence[str]) -> None:
    """Measure the recipes in the files `arguments[1:]`, as JSON, and write the costs or the error to `arguments[0]`."""
    result, *files = map(Path, arguments)
    try:
        recipes = [Recipe.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        costs = by_turns(recipes, result.parent)
        answer: dict[str, object] = {"costs": [dataclasses.asdict(cost) for cost in costs]}
    except BirdieError as error:
        answer = {"error": str(error)}
    write_bytes(result, json.dumps(answer).encode())
    sys.exit("error" in answer)


def by_turns(recipes: Sequence[Recipe], folder: Path, rounds: int = ROUNDS) -> list[Cost]:
    """Return the costs of the recipes, measured by turns in this process; of one recipe, by the clock."""
    devices = [choose_device(recipe.device) for recipe in recipes]
    by_processor = len(recipes) > 1 and all(device.type == "cpu" for device in devices)
    if by_processor:
        torch.set_num_threads(1)
    fastest: list[list[float]] = [[] for _ in recipes]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name, ExitStack() as stack:
            runs = [stack.enter_context(closing(_steps(recipe, Path(name), i))) for i, recipe in enumerate(recipes)]
            times: list[list[float]] = [[] for _ in recipes]
            for number in range(STEPS):
                order = range(len(runs)) if number % 2 else reversed(range(len(runs)))  # whoever is second is faster
                for index in order:
                    began = time.process_time()
                    clock_ms = next(runs[index])
                    times[index].append(1000 * (time.process_time() - began) if by_processor else clock_ms)
        fastest = [list(map(min, old or new, new)) for old, new in zip(fastest, times, strict=True)]
    steps = [sum(times[SETTLING:]) / (STEPS - SETTLING) for times in fastest]
    return [Cost(ms, recipe.reserved_seconds) for ms, recipe in zip(steps, recipes, strict=True)]


def _steps(recipe: Recipe, folder: Path, index: int) -> Generator[float, None, None]:
    """Yield the milliseconds of each step of the run in miniature; it is closed before its last step, which validates.

    Only `close` may end it: the pipeline's generator holds the batches' thread.
    """
    train = recipe.train
    fraction = train.warmdown_fraction
    if fraction is None:
        fraction = min(1.0, train.warmdown_iters / max(1, train.last_step))
    small = dataclasses.replace(
        recipe,
        train=dataclasses.replace(
            train,
            iterations=STEPS + 1,
            force_stop_step=STEPS + 1,
            warmdown_fraction=fraction,
        ),
        calibration=dataclasses.replace(recipe.calibration, data="none"),
        validation=dataclasses.replace(recipe.validation, every=0),
        run=dataclasses.replace(recipe.run, log_every=0, checkpoint_every=0),
    )
    torch.manual_seed(train.seed)
    with closing(Run(small, folder / str(index)).train()) as events:
        elapsed = 0.0
        for event in events:
            if isinstance(event, Step):
                yield event.train_ms - elapsed
                elapsed = event.train_ms
