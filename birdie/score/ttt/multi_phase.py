"""*Experimental*: multi-phase TTT: documents train adapters (`lora`), and in phases the model trains on those so far.

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
from typing import TYPE_CHECKING

from birdie.runtime.device import synchronize
from birdie.runtime.distributed import World
from birdie.score.ttt.lora import DocumentQueue, DocumentTrainer
from birdie.score.ttt.sgd import train_on_ranges

if TYPE_CHECKING:
    from birdie.score.modes import MultiPhaseMode


class SGDPhases:
    """Phases of SGD over all documents scored so far, between batches of documents, when all ranks meet.

    Attributes:
        completed: phases so far.
        steps, tokens, seconds: of all phases.
    """

    def __init__(self, settings: "MultiPhaseMode") -> None:
        self._settings = settings
        self.completed = self.steps = self.tokens = 0
        self.seconds = 0.0
        self._last = ""

    def ends(self, documents: int) -> list[int]:
        """Return after how many documents of the queue each phase takes place."""
        return self._settings.ends(documents)

    def run(self, documents: int, queue: DocumentQueue, trainer: DocumentTrainer, world: World) -> None:
        """Train the model on the first `documents` of the queue, and reset the adapters, which fit the old weights."""
        began = time.perf_counter()
        ledger, device = trainer.sink.ledger, trainer.device
        ledger.all_reduce(0, len(ledger), world, device)
        ranges = list(zip(queue.begins[:documents].tolist(), queue.stops[:documents].tolist(), strict=True))
        sgd = train_on_ranges(
            trainer.model, trainer.tokens, ranges, self._settings, ledger, length=trainer.context, world=world
        )
        trainer.adapters.reset()
        synchronize(device)
        self.completed += 1
        self.steps += sgd.steps
        self.tokens += sgd.tokens
        self._last = sgd.diagnostics()
        self.seconds += time.perf_counter() - began

    def diagnostics(self) -> str:
        """Return the rest of the line for the log."""
        if not self.completed:
            return "; no phase, since no document came after the batch that would have ended one"
        return f"; {self.completed} phases, the last: {self._last}"
