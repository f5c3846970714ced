"""Event files for TensorBoard, beside the JSONL metrics that every run writes."""

from pathlib import Path

from birdie.errors import ConfigError
from birdie.gpt.run.events import Event, Validated
from birdie.gpt.train.loop import Step


class Board:
    """Writer of the event files of one run; a resumed run adds a file.

    Args:
        folder: created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard is not installed; pip install 'birdie-compress[lab]', or leave the flag out"
            ) from error
        self._writer = SummaryWriter(folder)

    def record(self, event: Event) -> None:
        """Write the scalars of a step or a validation, by step and training time."""
        if isinstance(event, Step):
            scalars = {"train/loss_nats": event.loss, "train/lr_multiplier": event.lr_multiplier}
            step, stopping = event.number, event.stopping
        elif isinstance(event, Validated):
            scalars = {"validation/bpb": event.score.bpb, "validation/loss_nats": event.score.val_loss}
            step, stopping = event.step, True
        else:
            return
        for name, value in (scalars | {"train/seconds": event.train_ms / 1000}).items():
            self._writer.add_scalar(name, value, step)
        if stopping:
            self._writer.flush()
