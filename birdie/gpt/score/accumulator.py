"""From losses to bits per byte: sums by document, in float64, over targets that are each recorded once.

    bpb = (Σ loss in nats / ln 2) / Σ bytes

over every scored target. The bytes of a target are what the tokenizer's byte table counts for it after the token before
it, or what a byte sidecar says (control tokens such as BOS cost a prediction but have no bytes).

The confidence interval treats documents as the independent units. It is that of a ratio of two sums (delta method), so
long documents weigh as much in it as they do in the score itself.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import DataError, RuleError
from birdie.gpt.score.ledger import Ledger
from birdie.system.distributed import World

LN2 = math.log(2.0)


class BytesPerToken(Protocol):
    """Byte table of a tokenizer: the bytes of text each target stands for."""

    def count(self, previous: NDArray[np.integer], targets: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the bytes of each of `targets`, where `previous` holds the token before it."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to score, and what counts their bytes.

    Attributes:
        tokens: (N + 1,); the target at position i is token i + 1.
        bytes: byte table of the tokenizer that made the tokens, or the bytes of every token (N + 1,).
        bos_id: token that begins a document.
    """

    tokens: NDArray[np.uint16]
    bytes: BytesPerToken | NDArray[np.uint16]
    bos_id: int

    def head(self, tokens: int) -> "Text":
        """Return the first `tokens` tokens."""
        counts = self.bytes[:tokens] if isinstance(self.bytes, np.ndarray) else self.bytes
        return Text(self.tokens[:tokens], counts, self.bos_id)


@dataclass(frozen=True, slots=True)
class Score:
    """Bits per byte, and the sums it was computed from.

    Attributes:
        bpb: bits per byte of text.
        val_loss: mean nats per target token (not comparable between tokenizers).
        tokens: targets scored.
        bytes: bytes of text of these targets.
        documents: documents they come from.
        ci95: half width of the 95 % confidence interval of `bpb` over documents; NaN with fewer than two.
        seconds: duration of the scoring.
    """

    bpb: float
    val_loss: float
    tokens: int
    bytes: int
    documents: int
    ci95: float
    seconds: float

    @property
    def bits_per_token(self) -> float:
        """Mean bits per target token."""
        return self.val_loss / LN2


class Accumulator:
    """Sums of losses and bytes over the targets of a stream, with the ledger of what was recorded.

    Args:
        text: of N targets.
        keep_losses: keep the loss of each target in `losses`.

    Attributes:
        ledger: of the N targets.
        losses: (N,) float64 nats, NaN where not recorded; None unless kept.

    Raises:
        DataError: the byte counts are for another number of tokens.
    """

    def __init__(self, text: Text, *, keep_losses: bool = False) -> None:
        tokens, table = text.tokens, text.bytes
        if isinstance(table, np.ndarray) and len(table) != len(tokens):
            raise DataError(f"byte counts are given for {len(table):,} tokens, but the stream has {len(tokens):,}")
        self._tokens, self._table = tokens, table
        self._document_of = np.cumsum(np.asarray(tokens) == text.bos_id, dtype=np.int32)
        self._sums = np.zeros((3, int(self._document_of[-1]) + 1 if len(tokens) else 1))  # nats, bytes, targets
        self.ledger = Ledger(max(0, len(tokens) - 1))
        self.losses = np.full(len(self.ledger), np.nan) if keep_losses else None

    def add(self, firsts: NDArray[np.integer], nats: NDArray[np.floating]) -> None:
        """Record the losses of positions firsts[i] …: nats (windows, n), final from now on.

        Raises:
            RuleError: one of the positions was recorded before.
        """
        for first in firsts.tolist():
            self.ledger.score(first, first + nats.shape[1])
        positions = (firsts[:, None] + np.arange(nats.shape[1])).ravel()
        targets = np.asarray(self._tokens[positions + 1]).astype(np.int64)
        if isinstance(self._table, np.ndarray):
            bytes_: NDArray[np.integer] = self._table[positions + 1]
        else:
            bytes_ = self._table.count(np.asarray(self._tokens[positions]).astype(np.int64), targets)
        document = self._document_of[positions + 1]
        lowest, highest = int(document.min()), int(document.max())
        flat = nats.ravel().astype(np.float64)
        for row, weights in enumerate((flat, bytes_, np.ones(len(flat)))):
            sums = np.bincount(document - lowest, weights=weights, minlength=highest - lowest + 1)
            self._sums[row, lowest : highest + 1] += sums
        if self.losses is not None:
            self.losses[positions] = flat

    def score(
        self, expected: int, seconds: float, world: World | None = None, device: torch.device | None = None
    ) -> Score:
        """Return the score of what all ranks have recorded.

        Args:
            expected: targets that all ranks together must have recorded.
            seconds: duration of the scoring.
            world, device: ranks that share the work, and the device of the model.

        Raises:
            RuleError: more or fewer targets were recorded.
            DataError: the loss is not finite, or the targets have no bytes of text.
        """
        sums = self._sums
        if world is not None and world.size > 1:
            sums = world.sum_(torch.from_numpy(sums.copy()).to(reduce_device(device))).cpu().numpy()
        nats, bytes_, targets = sums
        scored = round(float(targets.sum()))
        if scored != expected:
            raise RuleError(f"{scored:,} targets were scored of {expected:,}; each must be scored once")
        total_nats, total_bytes = float(nats.sum()), float(bytes_.sum())
        if not math.isfinite(total_nats):
            raise DataError("the validation loss is not finite: the model's weights or its arithmetic have broken down")
        if total_bytes <= 0:
            raise DataError(
                "the validation targets have no bytes of text; check that the tokenizer is the one of the shards"
            )
        bpb = total_nats / LN2 / total_bytes
        nonempty = targets > 0
        documents = int(nonempty.sum())
        ci95 = math.nan
        if documents > 1:
            residual = nats[nonempty] / LN2 - bpb * bytes_[nonempty]
            variance = float(residual @ residual) * documents / (documents - 1)
            ci95 = 1.96 * math.sqrt(variance) / total_bytes
        return Score(bpb, total_nats / scored, scored, round(total_bytes), documents, ci95, seconds)


def reduce_device(device: torch.device | None) -> torch.device:
    """Return the device that sums are all-reduced on: NCCL needs CUDA tensors, gloo takes CPU tensors."""
    return device if device is not None and device.type == "cuda" else torch.device("cpu")
