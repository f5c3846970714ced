"""How the learning rate, Muon's momentum and weight decay move over a run.

Under a wall-clock cap the number of steps is not known beforehand, so the warmdown is measured in time: it begins when
what remains is what `warmdown_iters` steps take at the mean pace so far. Given as a fraction of the run it needs no
guess of the pace at all. Where the last step is forced, steps alone count and the clock decides nothing.

Sources: the challenge's baseline script; the fraction and the floor are those of its later records (#1105, #1787), the
taper of weight decay is of #1729.
"""

from birdie.train.settings import TrainSettings


def lr_multiplier(
    step: int,
    elapsed_ms: float,
    *,
    iterations: int,
    warmdown_iters: int,
    cap_ms: float | None,
    warmdown_fraction: float | None = None,
    min_lr: float = 0.0,
) -> float:
    """The factor in [0, 1] on every learning rate for the step that follows `step` finished ones.

    Args:
        step: steps finished.
        elapsed_ms: training time they took.
        iterations: steps of the whole run; sets the fall of `warmdown_iters` only where there is no cap.
        warmdown_iters: length of the linear fall to zero, in steps; 0 keeps the rate constant.
        cap_ms: limit on the training time; None where steps end the run.
        warmdown_fraction: length of the fall as a share of the run, of its steps or its time, whichever is further
            on, instead of `warmdown_iters`.
        min_lr: where the fall ends; its slope is still that to zero, as in the records.
    """
    return max(min_lr, _fall(step, elapsed_ms, iterations, warmdown_iters, cap_ms, warmdown_fraction))


def _fall(
    step: int, elapsed_ms: float, iterations: int, warmdown_iters: int, cap_ms: float | None, fraction: float | None
) -> float:
    if fraction is not None:
        left = 1 - _done(step, elapsed_ms, iterations, cap_ms)
        return min(1.0, max(0.0, left) / fraction) if fraction else 1.0
    if warmdown_iters == 0:
        return 1.0
    if cap_ms is None:
        return min(1.0, max(0, iterations - step) / warmdown_iters)
    warmdown_ms = warmdown_iters * elapsed_ms / max(step, 1)
    remaining_ms = max(0.0, cap_ms - elapsed_ms)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms


def scheduled(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """`lr_multiplier` of a run by `settings`."""
    return lr_multiplier(
        step,
        elapsed_ms,
        iterations=settings.last_step,
        warmdown_iters=settings.warmdown_iters,
        warmdown_fraction=settings.warmdown_fraction,
        cap_ms=settings.cap_ms,
        min_lr=settings.min_lr,
    )


def share_done(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """The share of a run that is behind it after `step` steps in `elapsed_ms`: of its steps or its time, the larger."""
    return _done(step, elapsed_ms, settings.last_step, settings.cap_ms)


def _done(step: int, elapsed_ms: float, iterations: int, cap_ms: float | None) -> float:
    by_steps = step / max(iterations, 1)
    return by_steps if cap_ms is None else max(by_steps, elapsed_ms / cap_ms)


def decay_multiplier(share: float, *, full: float = 0.7, final: float = 0.5) -> float:
    """The factor on weight decay after `share` of the run: 1 until `full` of it, then linearly to `final` at its end.

    Args:
        share: of the run that is done, from 0 to 1; beyond 1 (the step that passes the cap) counts as 1.
        full: share of the run before which decay is whole; 1 leaves it whole to the end.
        final: factor at the end of the run.
    """
    if share <= full or full >= 1:
        return 1.0
    return 1 - (1 - final) * min(1.0, (share - full) / (1 - full))


def muon_momentum(step: int, *, start: float, final: float, warmup_steps: int) -> float:
    """Momentum for the step that follows `step` finished ones: linear from `start` to `final` over `warmup_steps`."""
    progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return (1 - progress) * start + progress * final
