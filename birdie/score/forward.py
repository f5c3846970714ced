"""Losses of windows in batches: the fast way to what `scorers.WindowScorer` says token by token.

    windows ─► this rank's share ─► those of one shape together ─► model ─► nats ─► tally

Windows of one shape pass the model together. Where only their last places are scored, the last layer and the head
answer for those alone: keys and values are all that the others contribute. Sums are float64 whatever the model computes
in. No score depends on batches or ranks beyond the rounding of the model's own arithmetic.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.device import synchronize
from birdie.distributed import World
from birdie.errors import ConfigError
from birdie.score.tally import Tally
from birdie.score.windows import Windows

Progress = Callable[[float, float | None], None]

MAX_FORWARD_TOKENS = 65_536
"""Most inputs in one forward pass of a rank: windows are independent, so this bounds memory and changes no score."""


class LanguageModel(Protocol):
    """What is scored: a module that gives the loss of each target."""

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """ids (B, T), targets (B, S) after the last S of them → nats (B, S) with reduction "none"."""
        ...


def score_windows(
    model: LanguageModel,
    tokens: NDArray[np.uint16],
    windows: Windows,
    tally: Tally,
    *,
    batch_tokens: int,
    device: torch.device,
    temperature: float = 1.0,
    world: World | None = None,
    progress: Progress | None = None,
) -> float:
    """Enter this rank's share of `windows` in `tally`; returns seconds.

    Args:
        model: in evaluation mode.
        tokens: (N + 1,) of the stream.
        windows: over its N places.
        tally: of the stream.
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
    for batch in mine.sorted().batches(min(batch_tokens // world.size, MAX_FORWARD_TOKENS)):
        tally.add(batch.firsts, losses(model, tokens, batch, device, temperature))
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
) -> NDArray[np.float64]:
    """Nats of the scored places of windows of one shape, (windows, scored)."""
    length, scored = int(batch.stops[0] - batch.begins[0]), int(batch.stops[0] - batch.firsts[0])
    span = np.asarray(tokens)[batch.begins[:, None] + np.arange(length + 1)].astype(np.int64)
    ids, targets = (torch.from_numpy(each).to(device) for each in (span[:, :-1], span[:, length + 1 - scored :]))
    with torch.inference_mode():
        if temperature == 1.0:
            nats = model.loss(ids, targets, reduction="none")
        else:
            logits = model(ids, tail=scored) / temperature  # type: ignore[operator]
            nats = nats_of(logits, targets)
        return nats.float().cpu().numpy().astype(np.float64)


def nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target]: (…, V) and (…) → (…) float32."""
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="none"
    ).view_as(targets)


def check_temperature(temperature: float) -> None:
    """Refuse what divides nothing."""
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}; it must be finite and above 0")
