"""Context of long work: the device and the ranks it runs on, whom it tells, and who may stop it."""

from dataclasses import dataclass, field

import torch

from birdie.system.callbacks import Notify, Progress, Stop, never, no_message, no_progress
from birdie.system.distributed import World


@dataclass(frozen=True, slots=True)
class Context:
    """Device, ranks and callbacks of a piece of work.

    Attributes:
        device: of the computation.
        world: this rank and its peers.
        notify: called with lines for the log.
        progress: called with (done, total).
        stop: called between units of work; True on any rank ends the work on all.
    """

    device: torch.device
    world: World = field(default_factory=World)
    notify: Notify = no_message
    progress: Progress = no_progress
    stop: Stop = never
