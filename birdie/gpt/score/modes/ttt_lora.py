"""Scoring mode `ttt-lora`: each document trains adapters of its own while it is scored; the weights stay fixed.

    document   [ chunk 0 ][ chunk 1 ][ chunk 2 ][ …        one forward pass: the losses of the chunk are recorded,
               window of chunk 2:                          their mean is differentiated, the adapters take a step;
               ═════════════════════════►                  the next chunk is predicted with the updated adapters

A chunk is predicted in a window that ends with it and has up to `context` inputs, recomputed each time. Loss and
gradient are of one forward pass, and the loss is in the ledger before the step: score first. The window of the last
chunk begins where that of a full chunk would, so nothing depends on where a document ends before it does. The last
chunk is not trained on: nothing comes after it.

Adapters start anew with each document, from one draw (`birdie.gpt.model.adapters`), so neither the batch nor the rank
changes a score beyond rounding. With `warm_a` A continues from the document before in the same row: that document was
scored, so it is legal, but then the order matters.

    stream ─► documents, each with the BOS after it as its last target ─► longest first ─► batches ─► ranks

Documents of about one length waste no padding, and with the longest batches first the short ones fill the gaps between
ranks at the end. A rank's batches are settled in advance (`balanced_batches`).

Sources: the challenge's first record of LoRA at test time (rank 8 on head, q and v; chunks of 256), parameter-golf#1530
(github.com/openai/parameter-golf/pull/1530: batches, longest first, more parts, chunks of 48), parameter-golf#1767 (α,
warm A).
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.model.config import ADAPTED_PARTS, AdaptedPart
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, ScoringSettings, TrainingReport


@dataclass(frozen=True, slots=True)
class LoRAMode(ScoringMode):
    """Score each document in chunks, and train adapters of its own on each chunk after it was scored.

    The defaults are those of parameter-golf#1530.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    name: ClassVar[str] = "ttt-lora"
    trains: ClassVar[bool] = True
    log_name: ClassVar[str] = "ttt_lora"

    rank: Annotated[int, Parameter(env_var="TTT_LORA_RANK", help="Rank of the adapters.")] = 96
    alpha: Annotated[
        float, Parameter(env_var="TTT_LORA_ALPHA", help="The adapters' output is scaled by alpha / rank; 0: by 1.")
    ] = 0.0
    parts: Annotated[
        tuple[AdaptedPart, ...],
        Parameter(negative=(), help="Adapted parts: q, k, v, o (around attention), mlp (around the MLP), head."),
    ] = ADAPTED_PARTS
    lr: Annotated[float, Parameter(env_var="TTT_LORA_LR", help="Learning rate of AdamW.")] = 1e-4
    beta1: Annotated[float, Parameter(env_var="TTT_BETA1", help="Decay of AdamW's first moment.")] = 0.0
    beta2: Annotated[float, Parameter(env_var="TTT_BETA2", help="Decay of AdamW's second moment.")] = 0.999
    eps: Annotated[float, Parameter(help="Epsilon of AdamW.")] = 1e-10
    weight_decay: Annotated[float, Parameter(env_var="TTT_WEIGHT_DECAY", help="Weight decay of AdamW.")] = 0.5
    chunk: Annotated[
        int, Parameter(env_var="TTT_CHUNK_SIZE", help="Tokens of a document that are scored before a step.")
    ] = 48
    context: Annotated[
        int,
        Parameter(env_var="TTT_EVAL_SEQ_LEN", help="Most inputs of a window; 0: the sequence length of evaluation."),
    ] = 0
    batch_docs: Annotated[int, Parameter(env_var="TTT_BATCH_SIZE", help="Documents side by side on a rank.")] = 64
    warm_a: Annotated[
        bool, Parameter(env_var="TTT_WARM_START_A", help="A continues from the document before; B starts at zero.")
    ] = False
    seed: Annotated[int, Parameter(help="Seed of the initial A.")] = 0

    def __post_init__(self) -> None:
        for name in ("rank", "chunk", "batch_docs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("lr", "weight_decay", "alpha"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be a number of at least 0")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"LoRA eps is {self.eps}; it must be a number above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"LoRA {name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.parts or any(part not in ADAPTED_PARTS or self.parts.count(part) > 1 for part in self.parts):
            raise ConfigError(
                f"LoRA parts are {', '.join(self.parts)}; choose of {', '.join(ADAPTED_PARTS)}, each once"
            )
        if self.context < 0:
            raise ConfigError(f"LoRA context is {self.context}; it must be at least 0")
        if self.context:
            self.check_chunk(self.context)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"LoRA seed is {self.seed}; it must be from 0 to {2**63 - 1}")

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        from birdie.gpt.score.ttt_documents import DocumentTrainer, document_queue

        queue = document_queue(scoring.tokens, scoring.bos_id, self.batch_docs)
        trainer = DocumentTrainer(scoring, self, queue)
        for batch in trainer.share(range(len(queue))):
            yield from trainer.score(batch)
        return trainer.report()

    def describe(self, scoring: Scoring) -> str:
        windows = f"windows of {self.context_of(scoring.length):,}"
        return f"documents in chunks of {self.chunk}, {windows}, LoRA of rank {self.rank} per document"

    def check(self, settings: ScoringSettings, length: int) -> None:
        del settings
        self.check_chunk(self.context_of(length))

    @property
    def left_to_right(self) -> bool:
        """False with warm A: then a document may follow, in its row, one that comes later in the stream."""
        return not self.warm_a

    def context_of(self, length: int) -> int:
        """Return the most inputs of a window where windows of evaluation have `length`."""
        return self.context or length

    def check_chunk(self, context: int) -> None:
        """Raise ConfigError where chunks are longer than windows of `context` inputs."""
        if self.chunk > context:
            raise ConfigError(
                f"LoRA chunks of {self.chunk} tokens do not fit windows of {context}; use smaller chunks, or a longer "
                "context"
            )
