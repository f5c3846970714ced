"""What the training loop yields after each optimizer step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step did.

    Attributes:
        number: steps done, this one included.
        loss: mean cross-entropy in nats over its tokens, on all ranks, before the update.
        train_ms: training time since the first step; suspensions at a yield do not count.
        lr_multiplier: factor on the learning rates, a bandit's included.
        momentum: of Muon.
        tokens: trained on in this step, over all ranks.
        grad_norm: norm of the whole gradient before any clipping.
        stopping: whether it is the last.
    """

    number: int
    loss: float
    train_ms: float
    lr_multiplier: float
    momentum: float
    tokens: int
    grad_norm: float
    stopping: bool
