"""Schedules of the learning rate, Muon's momentum and weight decay over a run.

Under a wall-clock cap the number of steps is not known in advance, so the warmdown is measured in time: it begins when
the remaining time is what `warmdown_iters` steps take at the mean pace so far. Given as a fraction of the run it needs
no estimate of the pace. Where the last step is forced, only steps count and the clock decides nothing.

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
    """Return the factor in [0, 1] on every learning rate for the step after `step` finished ones.

    Args:
        step: finished steps.
        elapsed_ms: training time of those.
        iterations: steps of the run; decides the warmdown of `warmdown_iters` only where there is no cap.
        warmdown_iters: length of the linear fall to zero, in steps; 0 keeps the rate constant.
        cap_ms: limit on the training time; None: the run ends with its last step.
        warmdown_fraction: length of the fall as a fraction of the run, in steps or in time, whichever is further on;
            replaces `warmdown_iters`.
        min_lr: floor of the factor; the slope of the fall stays that to zero, as in the records.
    """
    return max(min_lr, _warmdown(step, elapsed_ms, iterations, warmdown_iters, cap_ms, warmdown_fraction))


def _warmdown(
    step: int, elapsed_ms: float, iterations: int, warmdown_iters: int, cap_ms: float | None, fraction: float | None
) -> float:
    if fraction is not None:
        remaining = 1 - _fraction_done(step, elapsed_ms, iterations, cap_ms)
        return min(1.0, max(0.0, remaining) / fraction) if fraction else 1.0
    if warmdown_iters == 0:
        return 1.0
    if cap_ms is None:
        return min(1.0, max(0, iterations - step) / warmdown_iters)
    warmdown_ms = warmdown_iters * elapsed_ms / max(step, 1)
    remaining_ms = max(0.0, cap_ms - elapsed_ms)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms


def scheduled_lr_multiplier(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """Return `lr_multiplier` for a run with `settings`."""
    return lr_multiplier(
        step,
        elapsed_ms,
        iterations=settings.last_step,
        warmdown_iters=settings.warmdown_iters,
        warmdown_fraction=settings.warmdown_fraction,
        cap_ms=settings.cap_ms,
        min_lr=settings.min_lr,
    )


def fraction_done(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """Return the fraction of a run that is done after `step` steps in `elapsed_ms`: in steps or time, the larger."""
    return _fraction_done(step, elapsed_ms, settings.last_step, settings.cap_ms)


def _fraction_done(step: int, elapsed_ms: float, iterations: int, cap_ms: float | None) -> float:
    by_steps = step / max(iterations, 1)
    return by_steps if cap_ms is None else max(by_steps, elapsed_ms / cap_ms)


def decay_multiplier(fraction: float, *, full: float = 0.7, final: float = 0.5) -> float:
    """Return the factor on weight decay after `fraction` of the run: 1 until `full` of it, then linear to `final`.

    Args:
        fraction: of the run that is done; values above 1 (the step that passes the cap) count as 1.
        full: fraction of the run up to which the factor is 1; 1: to the end.
        final: factor at the end of the run.
    """
    if fraction <= full or full >= 1:
        return 1.0
    return 1 - (1 - final) * min(1.0, (fraction - full) / (1 - full))


def muon_momentum(step: int, *, start: float, final: float, warmup_steps: int) -> float:
    """Return the momentum of the step after `step` finished ones: linear from `start` to `final` in `warmup_steps`."""
    progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return (1 - progress) * start + progress * final
