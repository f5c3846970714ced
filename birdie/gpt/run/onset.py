"""Techniques of a recipe that begin during a run: those that had not begun when it ended, which a run must say."""

from collections.abc import Iterator

from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.train.plan import fraction_done, lr_multiplier


def not_begun(recipe: Recipe, steps: int, elapsed_ms: float, *, averaged: bool) -> Iterator[str]:
    """Yield a sentence for each technique of `recipe` that no step of a run has had.

    Args:
        elapsed_ms: training time when its last step began.
        averaged: whether the average of the weights has a term.
    """
    step, settings = max(0, steps - 1), recipe.training
    fraction = fraction_done(settings, step, elapsed_ms)
    multiplier = lr_multiplier(settings, step, elapsed_ms)
    end = f"the last step began at {fraction:.3g} of the run, with learning rates at {multiplier:.3g} of their peaks"
    qat, model, average, train = recipe.qat, recipe.model, recipe.average, recipe.train
    if qat.enabled and qat.progress(fraction, multiplier) is None:
        condition = f"start {qat.start:g}" + ("" if qat.below is None else f", below {qat.below:g}")
        yield f"quantization-aware training ({condition}): {end}"
    if average.kind != "none" and not averaged:
        every = average.lawa_every if average.kind == "lawa" else average.swa_every
        condition = f"every {every} steps" + (f", below {average.swa_below:g}" if average.kind == "swa" else "")
        yield f"average of weights {average.kind} ({condition}), so the last weights are the result: {end}"
    if model.num_loops and fraction < model.enable_looping_at:
        yield f"depth recurrence (enable_looping_at {model.enable_looping_at:g}): {end}"
    if 0 < train.seq_len_start < train.train_seq_len and fraction < train.seq_schedule_fraction:
        yield f"sequences of full length (after {train.seq_schedule_fraction:g} of the run): {end}"
    if 0 < train.batch_tokens_start < train.train_batch_tokens and fraction < train.batch_schedule_fraction:
        yield f"batches of full size (after {train.batch_schedule_fraction:g} of the run): {end}"
    if recipe.optimizer.decay_full < 1 and fraction <= recipe.optimizer.decay_full:
        yield f"taper of weight decay (decay_full {recipe.optimizer.decay_full:g}): {end}"
    warmdown = train.warmdown_iters if train.warmdown_fraction is None else train.warmdown_fraction
    if warmdown and multiplier >= 1 and steps > 1:
        yield f"warmdown of the learning rates: {end}"
