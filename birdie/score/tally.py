"""From losses to bits per byte: sums by document, in float64, of targets that are each entered once.

    bpb = (Σ nll in nats / ln 2) / Σ bytes

over every scored target token, where the bytes of a target are what the tokenizer's byte table charges it after the
token before it, or what a byte sidecar says (control tokens such as BOS cost a prediction but no bytes).

The confidence interval treats documents as the independent units: it is that of a ratio of two sums (delta method), so
long documents weigh as much as they do in the score itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import DataError, RuleError
from birdie.runtime.distributed import World
from birdie.score.ledger import Ledger

LN2 = math.log(2.0)


class BytesPerToken(Protocol):
    """A byte table: what each target costs in bytes of text."""

    def count(self, previous: NDArray[np.integer], targets: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bytes of each of `targets` after the token in `previous` at the same place."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """Bits per byte and all it was made of.

    Attributes:
        bpb: bits per byte of text.
        val_loss: mean nats per target token (not comparable between tokenizers).
        tokens: targets scored.
        bytes: bytes of text they stand for.
        documents: documents they come from.
        ci95: half width of the 95 % confidence interval of `bpb` over documents; NaN with fewer than two.
        seconds: time the scoring took.
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


class Tally:
    """Adds up what is scored of a stream, and keeps its ledger.

    Args:
        tokens: (N + 1,) of the stream; place i's target is token i + 1.
        table: bytes per token of the tokenizer the stream was made with, or the bytes of every token (N + 1,).
        bos_id: the id that begins a document.
        keep: whether to keep the loss of each target in `nats`.

    Attributes:
        ledger: of the N targets.
        nats: (N,) float64, NaN where not scored; None unless kept.
        asked: None, as of a `forward.Sink` that wants losses alone.

    Raises:
        DataError: bytes are given for another number of tokens.
    """

    def __init__(
        self,
        tokens: NDArray[np.uint16],
        table: BytesPerToken | NDArray[np.uint16],
        bos_id: int,
        *,
        keep: bool = False,
    ) -> None:
        if isinstance(table, np.ndarray) and len(table) != len(tokens):
            raise DataError(f"bytes are given for {len(table):,} tokens, but {len(tokens):,} are scored; give as many")
        self._tokens, self._table = tokens, table
        self._document_of = np.cumsum(np.asarray(tokens) == bos_id, dtype=np.int32)
        self._sums = np.zeros((3, int(self._document_of[-1]) + 1 if len(tokens) else 1))  # nats, bytes, targets
        self.ledger = Ledger(max(0, len(tokens) - 1))
        self.asked: NDArray[np.integer] | None = None
        self.nats = np.full(len(self.ledger), np.nan) if keep else None

    def add(
        self, firsts: NDArray[np.integer], nats: NDArray[np.floating], logp: NDArray[np.floating] | None = None
    ) -> None:
        """Enter the losses of places firsts[i] …: nats (windows, n), final from now on; nothing else was asked for.

        Raises:
            RuleError: one of the places was entered before.
        """
        del logp
        for first in firsts.tolist():
            self.ledger.score(first, first + nats.shape[1])
        places = (firsts[:, None] + np.arange(nats.shape[1])).ravel()
        targets = np.asarray(self._tokens[places + 1]).astype(np.int64)
        if isinstance(self._table, np.ndarray):
            bytes_: NDArray[np.integer] = self._table[places + 1]
        else:
            bytes_ = self._table.count(np.asarray(self._tokens[places]).astype(np.int64), targets)
        document = self._document_of[places + 1]
        lowest, highest = int(document.min()), int(document.max())
        flat = nats.ravel().astype(np.float64)
        for row, weights in enumerate((flat, bytes_, np.ones(len(flat)))):
            found = np.bincount(document - lowest, weights=weights, minlength=highest - lowest + 1)
            self._sums[row, lowest : highest + 1] += found
        if self.nats is not None:
            self.nats[places] = flat

    def state(self, world: World, device: torch.device) -> dict[str, Tensor]:
        """What all ranks have entered so far, on the CPU. Every rank must call it."""
        own = self.ledger.seen & ~self.ledger.elsewhere
        held = {"sums": torch.from_numpy(self._sums.copy()), "seen": torch.from_numpy(own.astype(np.uint8))}
        if self.nats is not None:
            held["nats"] = torch.from_numpy(np.where(own, self.nats, 0.0))
        if world.size > 1:
            held = {name: world.sum_(each.to(_home(device))).cpu() for name, each in held.items()}
        held["seen"] = torch.from_numpy(np.packbits(held["seen"].numpy()))
        return held

    def load_state(self, state: Mapping[str, Tensor], world: World) -> None:
        """Go on from what `state` gave for the same stream; this tally must be new.

        Raises:
            ValueError: it is of another stream.
        """
        seen = np.unpackbits(state["seen"].numpy(), count=len(self.ledger)).astype(bool)
        if state["sums"].shape != self._sums.shape:
            raise ValueError("the sums are of other documents")
        self.ledger.load(seen, elsewhere=not world.is_main)
        if world.is_main:
            self._sums[:] = state["sums"].numpy()
        if self.nats is not None:
            self.nats[:] = np.where(seen, state["nats"].numpy(), np.nan) if world.is_main else np.nan

    def score(
        self, expected: int, seconds: float, world: World | None = None, device: torch.device | None = None
    ) -> Score:
        """What all ranks' entries come to.

        Args:
            expected: targets that all ranks together should have entered.
            seconds: time the scoring took.
            world, device: ranks that share the work, and where their sums travel.

        Raises:
            RuleError: there are more entries, or fewer.
            DataError: the loss is not finite, or the targets stand for no text.
        """
        sums = self._sums
        if world is not None and world.size > 1:
            sums = world.sum_(torch.from_numpy(sums.copy()).to(_home(device))).cpu().numpy()
        nats, bytes_, targets = sums
        scored = round(float(targets.sum()))
        if scored != expected:
            raise RuleError(
                f"{scored:,} targets were scored of {expected:,} that should have been; each is scored once"
            )
        total_nats, total_bytes = float(nats.sum()), float(bytes_.sum())
        if not math.isfinite(total_nats):
            raise DataError("the validation loss is not finite: the model's weights or its arithmetic have broken down")
        if total_bytes <= 0:
            raise DataError(
                "the validation targets stand for no bytes of text; is this the tokenizer the shards were made with?"
            )
        bpb = total_nats / LN2 / total_bytes
        seen = targets > 0
        documents = int(seen.sum())
        ci95 = math.nan
        if documents > 1:
            residual = nats[seen] / LN2 - bpb * bytes_[seen]
            variance = float(residual @ residual) * documents / (documents - 1)
            ci95 = 1.96 * math.sqrt(variance) / total_bytes
        return Score(bpb, total_nats / scored, scored, round(total_bytes), documents, ci95, seconds)


def _home(device: torch.device | None) -> torch.device:
    """Where sums travel from."""
    return device if device is not None and device.type == "cuda" else torch.device("cpu")
