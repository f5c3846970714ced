"""Losses of windows in batches: the fast way to what `scorers.WindowScorer` says token by token.

    windows ─► this rank's share ─► those of one shape together ─► model ─► nats ─► tally

Windows of one shape pass the model together. Where only their last places are scored, the last layer and the head
answer for those alone: keys and values are all that the others contribute. Sums are float64 whatever the model computes
in. No score depends on batches or ranks beyond the rounding of the model's own arithmetic.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.rotary import Rotary
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import synchronize
from birdie.runtime.distributed import World
from birdie.score.windows import Windows

Nats = NDArray[np.float64]

_AT_ONCE = {"cpu": 2048}
_AT_ONCE_ELSEWHERE = 65_536


class LanguageModel(Protocol):
    """What is scored: a module that gives the loss of each target."""

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """ids (B, T), targets (B, S) after the last S of them → nats (B, S) with reduction "none"."""
        ...


class Sink(Protocol):
    """Where losses go: a `Tally`, or what keeps them for one.

    Attributes:
        asked: (N,) a token for each place whose log-probability is wanted beside the target's; None: none is.
    """

    asked: NDArray[np.integer] | None

    def add(self, firsts: NDArray[np.integer], nats: Nats, logp: Nats | None = None) -> None:
        """Take the losses of places firsts[i] …, (windows, n), and the log-probabilities that were asked for."""
        ...


def score_windows(
    model: LanguageModel,
    tokens: NDArray[np.uint16],
    windows: Windows,
    sink: Sink,
    *,
    batch_tokens: int,
    device: torch.device,
    temperature: float = 1.0,
    world: World | None = None,
    progress: Progress | None = None,
) -> float:
    """Enter this rank's share of `windows` in `sink`; returns seconds.

    Args:
        model: in evaluation mode.
        tokens: (N + 1,) of the stream.
        windows: over its N places.
        sink: of the stream.
        batch_tokens: inputs at a time over all ranks; at least one window a rank.
        device: of the model.
        temperature: divides the logits; other than 1 needs a model whose call gives logits, as a `GPT`'s does.
        world: ranks that share the windows.
        progress: called with (targets done, targets in all) of this rank after each batch.

    Raises:
        RuleError: a window scores what was scored before.
        ConfigError: the temperature is not above 0.
    """
    check_temperature(temperature)
    world = world or World()
    started = time.perf_counter()
    mine = windows.share(world.rank, world.size)
    done, total = 0, mine.scored
    for batch in mine.sorted().batches(min(batch_tokens // world.size, at_once(device))):
        sink.add(batch.firsts, *losses(model, tokens, batch, device, temperature, sink.asked))
        done += batch.scored
        if progress is not None:
            progress(done, total)
    synchronize(device)
    return time.perf_counter() - started


def losses(
    model: LanguageModel,
    tokens: NDArray[np.uint16],
    batch: Windows,
    device: torch.device,
    temperature: float = 1.0,
    asked: NDArray[np.integer] | None = None,
) -> tuple[Nats, Nats | None]:
    """Nats of the scored places of windows of one shape, (windows, scored), and what was `asked` (N,) beside."""
    length, scored = int(batch.stops[0] - batch.begins[0]), int(batch.stops[0] - batch.firsts[0])
    span = np.asarray(tokens)[batch.begins[:, None] + np.arange(length + 1)].astype(np.int64)
    ids, targets = (torch.from_numpy(each).to(device) for each in (span[:, :-1], span[:, length + 1 - scored :]))
    with torch.inference_mode(), positions_of(model, batch.length):
        if temperature == 1.0 and asked is None:
            nats = model.loss(ids, targets, reduction="none")
            return nats.float().cpu().numpy().astype(np.float64), None
        logits = model(ids, last_n=scored) / temperature  # type: ignore[operator]
        return read_off(logits, targets, asked_at(asked, batch.firsts, scored))


def at_once(device: torch.device) -> int:
    """Most inputs in one forward pass of a rank: beyond, a CPU loses more to memory than it gains, others need memory.

    Windows are independent, so it changes no score.
    """
    return _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)


def positions_of(model: LanguageModel, length: int) -> AbstractContextManager[None]:
    """Inside, a GPT counts positions as in windows of `length`, however short one is."""
    rotary = getattr(model, "rotary", None)
    return rotary.base_for_length(length) if isinstance(rotary, Rotary) else nullcontext()


def read_off(logits: Tensor, targets: Tensor, asked: Tensor | None = None) -> tuple[Nats, Nats | None]:
    """Nats of targets (rows, n), and log-probabilities of the tokens `asked`, of the same shape, from logits."""
    logp = logits.float().log_softmax(-1)
    nats = -logp.gather(-1, targets[..., None])[..., 0].cpu().numpy().astype(np.float64)
    if asked is None:
        return nats, None
    return nats, logp.gather(-1, asked.to(logp.device)[..., None])[..., 0].cpu().numpy().astype(np.float64)


def asked_at(asked: NDArray[np.integer] | None, firsts: NDArray[np.int64], n: int) -> Tensor | None:
    """Which tokens are asked for at n places from each of `firsts` on, (rows, n)."""
    return None if asked is None else torch.from_numpy(asked[firsts[:, None] + np.arange(n)].astype(np.int64))


def check_temperature(temperature: float) -> None:
    """Refuse what divides nothing."""
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}; it must be finite and above 0")
