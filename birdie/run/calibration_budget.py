"""Calibration time budget: the part of a run's wall-clock cap that its calibration will need.

    one batch, calibrated twice ────┐
                                    ├─► seconds of calibration ─► × 1.2 ─► subtracted from the cap of training
    a few sampled positions ────────┘

The measurement is made before the clock starts, as warm-up is. It uses a second model of the run's shape and restores
the random generators, so the run itself does not change. The challenge's records reserve 4 to 12 s of 600 s
(parameter-golf#1868, github.com/openai/parameter-golf/pull/1868).
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
from birdie.run.calibration import calibrated_batch_count, loss, rows_per_batch
from birdie.run.recipe import Recipe
from birdie.runtime.device import synchronize
from birdie.train.settings import TrainSettings

MARGIN = 1.2  # factor on the measured time: the same work sometimes takes longer
_POSITIONS = 4  # sampled in the measurement


@dataclass(frozen=True, slots=True)
class CalibrationTime:
    """Estimate of the time that calibration takes, in seconds.

    Attributes:
        fixed: independent of the number of tokens: sorting, copying, numbering.
        batches: of all batches that are calibrated on.
        sampling: of the model's own samples; 0 with training data.
    """

    fixed: float
    batches: float
    sampling: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return self.fixed + self.batches + self.sampling


def time_calibration(recipe: Recipe, device: torch.device) -> CalibrationTime:
    """Measure a small part of the recipe's calibration on `device`; return the estimate for all of it."""
    length, settings = recipe.train.train_seq_len, recipe.calibration
    rows = rows_per_batch(length)
    count = max(2, settings.tokens // length)
    generators = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators):
        model = GPT(recipe.model).eval().to(device)
        ids = torch.randint(recipe.model.vocab_size, (min(rows, count), length + 1))
        batch = ids[:, :-1], ids[:, 1:]
        state = {name: weight.cpu() for name, weight in model.state_dict().items()}
        calibrate(model, [batch], loss)  # loads libraries, which the calibration after training need not do
        first = _seconds(device, lambda: CalibrationResult.of(state, (model, [batch], loss)))
        second = _seconds(device, lambda: calibrate(model, [batch], loss))
        sampling = _sampling_seconds(model, count, length + 1, device) if settings.data == "own" else 0.0
    batches = calibrated_batch_count(-(-count // rows))
    return CalibrationTime(max(first - second, 0.0), second * batches, sampling)


def reduce_cap(settings: TrainSettings, seconds: float) -> TrainSettings:
    """Return the settings with the wall-clock cap reduced by `seconds`; without a cap, the same settings."""
    cap = settings.max_wallclock_seconds
    if settings.cap_ms is None:
        return settings
    if seconds >= cap:
        raise ConfigError(
            f"calibration would take {seconds:.1f} s of a cap of {cap:g} s and leave no time for training; "
            "lower calibration.tokens, set reserve_seconds, or raise max_wallclock_seconds"
        )
    return dataclasses.replace(settings, max_wallclock_seconds=cap - seconds)


def _sampling_seconds(model: GPT, count: int, length: int, device: torch.device) -> float:
    """Measure positions in the middle of the sequences, where attention sees the mean number of keys."""
    rows = parallel_sequences(model, count, length)
    step = Cache(model, rows, length + _POSITIONS)
    step.assume(length // 2)
    ids = torch.zeros((rows, 1), dtype=torch.int64, device=device)

    def sample() -> None:
        for _ in range(_POSITIONS // 2):
            torch.multinomial(step(ids)[:, 0].softmax(-1), 1)

    sample()  # the first call initializes tables and libraries
    return _seconds(device, sample) / (_POSITIONS // 2) * length * -(-count // rows)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
