"""Scoring mode `ttt-sgd`: the stream is scored chunk by chunk, and after each chunk the whole model trains on it.

    chunk 0      score ─► train ─┐
    chunk 1                      └─► score ─► train ─┐
    …                                                └─► …
    last chunk                                             score

A window belongs to the chunk that holds its first scored position, and is scored completely with it, so all of a
chunk's own positions are scored when it ends. The last chunk is not trained on: nothing comes after it.
`birdie.gpt.score.sgd` takes the steps.

Sources: parameter-golf#461, parameter-golf#549 (github.com/openai/parameter-golf/pull/549).
"""

import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.score.mode import Losses, Scoring, TrainingReport
from birdie.gpt.score.modes.windows import WindowedMode

LearningRate = Annotated[float, Parameter(help="Learning rate of the first chunk; it falls as a cosine.")]
Epochs = Annotated[int, Parameter(help="Passes over a chunk after it was scored.")]


@dataclass(frozen=True, slots=True)
class SGDSettings:
    """Settings of SGD with momentum over the whole model; the defaults are those of parameter-golf#549.

    Raises:
        ConfigError: a value is out of range.
    """

    lr: LearningRate = 0.002
    epochs: Epochs = 3
    chunk_tokens: Annotated[int, Parameter(help="Tokens of a chunk, which share a learning rate.")] = 32_768
    momentum: Annotated[float, Parameter(help="Decay of the accumulated gradient.")] = 0.9
    batch_seqs: Annotated[int, Parameter(help="Sequences of a step over all ranks.")] = 32
    grad_clip: Annotated[float, Parameter(help="Largest norm of the gradient; 0: unlimited.")] = 1.0
    freeze_blocks: Annotated[
        int, Parameter(help="First blocks that are not trained; embedding and head always are.")
    ] = 0

    def __post_init__(self) -> None:
        for name in ("lr", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"SGD {name} is {getattr(self, name)}; it must be a number of at least 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"SGD momentum is {self.momentum}; it must be in [0, 1)")
        for name, minimum in {"epochs": 1, "chunk_tokens": 1, "batch_seqs": 1, "freeze_blocks": 0}.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"SGD {name} is {getattr(self, name)}; it must be at least {minimum}")


@dataclass(frozen=True, slots=True)
class SGDMode(SGDSettings, WindowedMode):
    """Score windows chunk by chunk, and train the model by SGD on each chunk after it was scored."""

    name: ClassVar[str] = "ttt-sgd"
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "legal_ttt"

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        from birdie.gpt.score.sgd import SGDTrainer, cosine, split_windows
        from birdie.gpt.score.window_losses import score_windows, windows_of
        from birdie.system.device import synchronize

        world, ledger = scoring.world, scoring.ledger
        trainer = SGDTrainer(scoring.model, self, world)
        chunks = list(split_windows(windows_of(scoring), self.chunk_tokens))
        last = max((number for number, (_, part) in enumerate(chunks) if len(part)), default=0)
        seconds = 0.0
        try:
            for number, (positions, part) in enumerate(chunks):
                yield from score_windows(scoring, part)
                began = time.perf_counter()
                if len(part):  # every rank must know what the others have scored before it learns from it
                    ledger.all_reduce(int(part.firsts.min()), int(part.stops.max()), world, scoring.device)
                if number < last:
                    factor = cosine(number, len(chunks))
                    trainer.train(scoring.tokens, [positions], ledger, length=scoring.length, factor=factor)
                    synchronize(scoring.device)
                seconds += time.perf_counter() - began
            return TrainingReport(seconds, len(chunks), trainer.steps, trainer.tokens, trainer.diagnostics())
        finally:
            trainer.restore()

    def describe(self, scoring: Scoring) -> str:
        return f"{WindowedMode.describe(self, scoring)}, SGD on chunks of {self.chunk_tokens:,} tokens"
