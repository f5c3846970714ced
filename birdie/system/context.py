"""Context of long work: the device and the ranks it runs on, whom it tells, and who may stop it."""

from dataclasses import dataclass, field

import torch

from birdie.system.callbacks import Notify, Progress, Stop, never, no_message, no_progress
from birdie.system.distributed import World


@dataclass(frozen=True, slots=True)
class Context:
    """Device, ranks and callbacks of a piece of work."""

    device: torch.device  # of the computation
    world: World = field(default_factory=World)  # this rank and its peers
    notify: Notify = no_message  # called with lines for the log
    progress: Progress = no_progress  # called with (done, total)
    stop: Stop = never  # called between units of work; True on any rank ends the work on all
