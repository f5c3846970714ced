"""How much of a run's wall-clock cap its calibration will need: training ends that much earlier.

    one batch, calibrated on twice ─┐
                                    ├─► seconds expected ─► × 1.2 ─► kept back from the cap
    a few sampled positions ────────┘

The trial is made before the clock starts, as priming is, on a model of the run's shape but none of its weights, and
leaves no trace in random generators. The records of the challenge keep 4 to 12 s of 600 for it (#1868).
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import calibrate
from birdie.errors import ConfigError
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.model.sample import parallel_sequences
from birdie.run.calibration import loss, rows_in_batch, used
from birdie.run.recipe import Recipe
from birdie.runtime.device import synchronize
from birdie.train.settings import TrainSettings

MARGIN = 1.2  # the same work at another time takes longer now and then
_POSITIONS = 4  # sampled on trial


@dataclass(frozen=True, slots=True)
class Expected:
    """What calibration will take, in seconds.

    Attributes:
        fixed: whatever the number of tokens: sorting, copying, numbering.
        batches: of all batches that are calibrated on.
        sampling: of the model's own samples; 0 where data are given.
    """

    fixed: float
    batches: float
    sampling: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.fixed + self.batches + self.sampling


def expected(recipe: Recipe, device: torch.device) -> Expected:
    """Time the recipe's calibration on `device`, on trial."""
    length, settings = recipe.train.train_seq_len, recipe.calibration
    rows = rows_in_batch(length)
    count = max(2, settings.tokens // length)
    generators = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators):
        model = GPT(recipe.model).eval().to(device)
        ids = torch.randint(recipe.model.vocab_size, (min(rows, count), length + 1))
        batch = ids[:, :-1], ids[:, 1:]
        state = {name: weight.cpu() for name, weight in model.state_dict().items()}
        first = _timed(device, lambda: CalibrationResult.of(state, (model, [batch], loss)))
        second = _timed(device, lambda: calibrate(model, [batch], loss))
        sampling = _sampling(model, count, length + 1, device) if settings.data == "own" else 0.0
    return Expected(max(first - second, 0.0), second * used(-(-count // rows)), sampling)


def less_reserve(settings: TrainSettings, seconds: float) -> TrainSettings:
    """The settings of a run that ends `seconds` before its cap.

    Raises:
        ConfigError: that leaves nothing.
    """
    cap = settings.max_wallclock_seconds
    if settings.cap_ms is None:
        return settings
    if seconds >= cap:
        raise ConfigError(
            f"calibration would take {seconds:.1f} s of a cap of {cap:g} s and leave nothing to train in; "
            "lower calibration.tokens, set reserve_seconds, or raise max_wallclock_seconds"
        )
    return dataclasses.replace(settings, max_wallclock_seconds=cap - seconds)


def _sampling(model: GPT, count: int, length: int, device: torch.device) -> float:
    """Positions in the middle of their sequences, where attention sees the mean number of keys."""
    at_once = parallel_sequences(model, count, length)
    step = Cache(model, at_once, length + _POSITIONS)
    step.assume(length // 2)
    ids = torch.zeros((at_once, 1), dtype=torch.int64, device=device)

    def some() -> None:
        for _ in range(_POSITIONS // 2):
            torch.multinomial(step(ids)[:, 0].softmax(-1), 1)

    some()  # the first ones set up tables and libraries
    return _timed(device, some) / (_POSITIONS // 2) * length * -(-count // at_once)


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began
