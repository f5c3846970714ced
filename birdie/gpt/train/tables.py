"""The tables of a recipe that decide what its training steps do."""

from dataclasses import dataclass, field

from birdie.gpt.train.settings import AverageSettings, BanditSettings, OptimizerSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class TrainingTables:
    """Settings of a training.

    Attributes:
        train: length, batch, precision, schedules.
        optimizer: learning rates and momenta.
        average: of the weights, which is the result in place of the last ones.
        bandit: varies the learning rates beside their schedule.
    """

    train: TrainSettings
    optimizer: OptimizerSettings
    average: AverageSettings = field(default_factory=AverageSettings)
    bandit: BanditSettings = field(default_factory=BanditSettings)
