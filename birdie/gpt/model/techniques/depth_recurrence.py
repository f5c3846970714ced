"""Depth recurrence: a segment of layers runs again with the same weights.

    num_layers 11, layers 3–5 twice more:   0 1 2 3 4 5 3 4 5 3 4 5 6 7 8 9 10
                                            └── encoder ──┘ └──── decoder ───┘      halves of the list as it runs

Cost: time, and skip weights for the longer list; no other parameters. Skips follow the list as it runs. Before
`enable_looping_at` of the run the plain list runs, with the first skip weights; a model that is loaded repeats its
layers.

Source: openai/parameter-golf #1204, #1394. *Experimental*; measured: +0.002 ± 0.003 for two layers run twice in the
last 65 % of the run, at 1.28 times the time of a step.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from birdie.gpt.model.technique import Technique
from birdie.system.callbacks import Notify, no_message

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def layer_order(config: "GPTConfig", recurrence: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers in the order in which they run, as (encoder, decoder) halves.

    A layer may be in both halves and run several times. Outputs of the encoder are pushed, the decoder pops them.

    Args:
        recurrence: whether the segment is repeated.
    """
    segment = list(range(config.loop_start, config.loop_end + 1))
    repeats = segment * config.num_loops if recurrence else []
    order = [*range(config.loop_end + 1), *repeats, *range(config.loop_end + 1, config.num_layers)]
    half = len(order) // 2
    return tuple(order[:half]), tuple(order[half:])


class DepthRecurrence:
    """Hook that switches depth recurrence on at `enable_looping_at` of the run.

    Args:
        model: whose `depth_recurrence` it sets.
        notify: called with one line when the recurrence begins.
    """

    def __init__(self, model: "GPT", notify: Notify = no_message) -> None:
        self.model, self._notify, self._reported = model, notify, False
        self.changes: tuple[float, ...] = (model.config.enable_looping_at,)

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:  # noqa: ARG002  the hook's signature
        """Set the recurrence of the next step; a function of `fraction` alone, so that resuming is exact."""
        config = self.model.config
        self.model.depth_recurrence = fraction >= config.enable_looping_at
        if self.model.depth_recurrence and not self._reported and step >= 0:
            self._reported = True
            order = ",".join(str(layer) for half in layer_order(config, True) for layer in half)
            self._notify(f"depth recurrence from step {step + 1} on: layers {order}")


def _hook(model: "GPT", notify: Notify) -> DepthRecurrence | None:
    return DepthRecurrence(model, notify) if model.config.num_loops else None


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.config.num_loops:
        runs = sum(map(len, layer_order(model.config, model.depth_recurrence)))
        yield f"depth recurrence: {runs} layer passes through {model.config.num_layers} layers"


DEPTH_RECURRENCE = Technique(diagnostics=_diagnostics, hook=_hook)
