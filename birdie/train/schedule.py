"""How the learning rate and Muon's momentum move over a run.

Under a wall-clock cap the number of steps is not known beforehand, so the warmdown is measured in time: it begins when
what remains is what `warmdown_iters` steps take at the mean pace so far. Given as a fraction of the run it needs no
guess of the pace at all. Sources: the challenge's baseline script; the fraction is that of its later records.
"""


def lr_multiplier(
    step: int,
    elapsed_ms: float,
    *,
    iterations: int,
    warmdown_iters: int,
    cap_ms: float | None,
    warmdown_fraction: float | None = None,
) -> float:
    """The factor in [0, 1] on every learning rate for the step that follows `step` finished ones.

    Args:
        step: steps finished.
        elapsed_ms: training time they took.
        iterations: steps of the whole run; sets the warmdown only where there is no cap.
        warmdown_iters: length of the linear fall to zero, in steps; 0 keeps the rate constant.
        cap_ms: limit on the training time; None where steps end the run.
        warmdown_fraction: length of the fall as a share of the run, instead of `warmdown_iters`.
    """
    if warmdown_fraction is not None:
        left = 1 - (step / max(iterations, 1) if cap_ms is None else elapsed_ms / cap_ms)
        return min(1.0, max(0.0, left) / warmdown_fraction) if warmdown_fraction else 1.0
    if warmdown_iters == 0:
        return 1.0
    if cap_ms is None:
        return min(1.0, max(0, iterations - step) / warmdown_iters)
    warmdown_ms = warmdown_iters * elapsed_ms / max(step, 1)
    remaining_ms = max(0.0, cap_ms - elapsed_ms)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms


def muon_momentum(step: int, *, start: float, final: float, warmup_steps: int) -> float:
    """Momentum for the step that follows `step` finished ones: linear from `start` to `final` over `warmup_steps`."""
    progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return (1 - progress) * start + progress * final
