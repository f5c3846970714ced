"""Scoring mode `ttt-multi-phase`, *experimental*: `ttt-lora`, and in phases the model trains on the documents so far.

    queue    [ batch ][ batch ]│[ batch ][ batch ]│[ batch ] …
    ranks      take batches    │                  │
               independently   └► all meet: SGD over the documents so far ─► new adapters ─► the rest of the queue

Phase p of P ends with the batch that holds document ⌊D · (p + 1) / P⌋ of the queue, where D is the number of documents
of the prefix. The model trains on exactly these first documents, on all of them again in each phase. Ledgers are
all-reduced before, and refuse targets that were not scored. Between two phases ranks do not wait for each other.

The longest documents come first, so with phases the order is not that of the stream: each document is scored before it
is trained on, but whether that is one pass from left to right was asked (parameter-golf#1536,
github.com/openai/parameter-golf/issues/1536) and never ruled; records up to parameter-golf#1855 do it. Without phases
no score depends on the order.

Measured (LOG.md): no gain over the adapters alone on the 12 documents of the FineWeb head, three phases of SGD.

Sources: parameter-golf#1610 (one phase), parameter-golf#1626 (several; github.com/openai/parameter-golf/pull/1626).
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, ScoringSettings, TrainingReport
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_sgd import Epochs, LearningRate, SGDSettings


@dataclass(frozen=True, slots=True)
class MultiPhaseMode(SGDSettings, ScoringMode):
    """Score documents as ttt-lora does, and between them train the model by SGD on the documents so far.

    The adapters are those of ttt-lora's settings; the defaults are those of parameter-golf#1610 and #1626.

    Raises:
        ConfigError: a value is out of range.
    """

    name: ClassVar[str] = "ttt-multi-phase"
    tables: ClassVar[tuple[type[ScoringMode], ...]] = (LoRAMode,)
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "ttt_phased"

    lr: LearningRate = 0.001
    epochs: Epochs = 1
    prefix_docs: Annotated[
        int, Parameter(env_var="PHASED_TTT_PREFIX_DOCS", help="First documents of the queue that the model trains on.")
    ] = 2000
    phases: Annotated[
        int, Parameter(env_var="PHASED_TTT_NUM_PHASES", help="Phases, each on all of these documents so far.")
    ] = 3

    def __post_init__(self) -> None:
        SGDSettings.__post_init__(self)
        for name in ("prefix_docs", "phases"):
            if getattr(self, name) < 1:
                raise ConfigError(f"multi-phase {name} is {getattr(self, name)}; it must be at least 1")

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        import torch

        from birdie.gpt.score.sgd import train_on_ranges
        from birdie.gpt.score.ttt_documents import DocumentTrainer, document_queue
        from birdie.system.device import synchronize

        model, ledger, lora = scoring.model, scoring.ledger, scoring.settings.table(LoRAMode)
        queue = document_queue(scoring.tokens, scoring.bos_id, lora.batch_docs)
        trainer = DocumentTrainer(scoring, lora, queue)
        initial = [p.detach().clone() for p in model.parameters()]
        ends, phases, last = self.ends(len(queue.begins)), 0, ""
        steps = tokens = 0
        seconds = 0.0
        try:
            for batches in queue.rounds(ends):
                for batch in trainer.share(batches):
                    yield from trainer.score(batch)
                if batches.stop == len(queue):
                    break
                while phases < len(ends) and ends[phases] <= batches.stop * queue.size:
                    began = time.perf_counter()
                    ledger.all_reduce(0, len(ledger), scoring.world, scoring.device)
                    documents = slice(0, ends[phases])
                    ranges = list(zip(queue.begins[documents].tolist(), queue.stops[documents].tolist(), strict=True))
                    sgd = train_on_ranges(
                        model, trainer.tokens, ranges, self, ledger, length=trainer.context, world=scoring.world
                    )
                    trainer.adapters.reset()  # they fit the old weights
                    synchronize(scoring.device)
                    phases, last = phases + 1, sgd.diagnostics()
                    steps, tokens = steps + sgd.steps, tokens + sgd.tokens
                    seconds += time.perf_counter() - began
            report = trainer.report()
            done = "no phase, since no document came after the batch that would have ended one"
            done = f"{phases} phases, the last: {last}" if phases else done
            return TrainingReport(
                report.train_seconds + seconds,
                report.chunks,
                report.steps + steps,
                report.tokens + tokens,
                f"{report.diagnostics}; {done}",
            )
        finally:
            with torch.no_grad():
                for p, weight in zip(model.parameters(), initial, strict=True):
                    p.copy_(weight)

    def describe(self, scoring: Scoring) -> str:
        return f"{scoring.settings.table(LoRAMode).describe(scoring)}, SGD on the model in up to {self.phases} phases"

    def check(self, settings: ScoringSettings, length: int) -> None:
        settings.table(LoRAMode).check(settings, length)

    @property
    def left_to_right(self) -> bool:
        """False: the model trains on long documents before shorter ones, earlier in the stream, are scored."""
        return False

    def ends(self, documents: int) -> list[int]:
        """Return after how many documents of the queue each phase takes place, without phases that add none."""
        prefix = min(self.prefix_docs, documents)
        return sorted({prefix * (phase + 1) // self.phases for phase in range(self.phases)} - {0})
