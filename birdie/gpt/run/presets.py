"""Presets that shrink a recipe for a small machine: model, batch, schedule and budget shrink together.

    Recipe ── apply_preset(recipe, "cpu", step_ms=43.54) ──► Recipe

Fractions stay the same: of the layers and of a head (each setting of the model declares how it scales,
`GPTConfig.resized`), of the run (warmdown, momentum warm-up, memory of an average), and bits per weight under a budget.
Learning rates stay, because the size of Muon's updates does not depend on the width; `smoke` halves them for its small
batches. Vocabulary and tokenizer stay,
because they belong to the data.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from birdie.compress import parse_size
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.train.settings import RATES


@dataclass(frozen=True, slots=True)
class Preset:
    """Size of the shrunk run.

    Attributes:
        width: factor on the model's width and on the rows and widths of its embedding tables.
        depth: factor on the number of layers.
        batch_tokens: maximum tokens per step.
        seq_len: maximum tokens per sequence.
        seconds: maximum training time.
        steps: expected number of steps in that time; settings that a recipe counts in steps are converted by it.
        iterations: maximum number of steps; None: that of the recipe.
        val_tokens: maximum number of validation tokens.
        rates: factor on the learning rates, for batches whose gradients are mostly noise.
    """

    width: float
    depth: float
    batch_tokens: int
    seq_len: int
    seconds: float
    steps: int
    iterations: int | None
    val_tokens: int
    rates: float = 1.0


PRESETS = {
    "cpu": Preset(3 / 8, 1 / 2, 4096, 256, 600.0, 800, None, 131_072),  # ten minutes on two cores
    "smoke": Preset(1 / 8, 1 / 3, 2048, 64, 60.0, 4, 4, 4096, rates=0.5),  # a few steps: a recipe runs and learns
}


def apply_preset(recipe: Recipe, name: str, step_ms: float | None = None) -> Recipe:
    """Return `recipe` shrunk by the preset called `name`.

    Args:
        recipe: to shrink; it is not changed.
        name: a key of `PRESETS`.
        step_ms: milliseconds per step on the machine the recipe was written for; with the wall-clock cap it gives the
            number of steps that the recipe's schedule assumes.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; choose --preset {' or '.join(PRESETS)}")
    preset = PRESETS[name]
    model = recipe.model.resized(width=preset.width, depth=preset.depth, seq_len=preset.seq_len)
    export, validation = recipe.export, recipe.validation
    budget = export.budget
    if budget is not None:
        from birdie.gpt.run.run_estimate import groups  # builds both models on torch's meta device

        budget = str(round(parse_size(budget) * sum(groups(model).values()) / sum(groups(recipe.model).values())))
    layers = recipe.model.num_layers
    return dataclasses.replace(
        recipe,
        model=model,
        **_schedule(recipe, preset, step_ms),
        validation=dataclasses.replace(
            validation,
            batch_tokens=min(validation.batch_tokens, 65_536),
            every=0,
            max_tokens=min(validation.max_tokens or preset.val_tokens, preset.val_tokens),
        ),
        calibration=dataclasses.replace(
            recipe.calibration,
            tokens=min(recipe.calibration.tokens, preset.val_tokens // 4),
            reserve_seconds=type(recipe.calibration)().reserve_seconds,
        ),
        export=dataclasses.replace(
            export,
            budget=budget,
            int4_layers=_same_depths(export.int4_layers, layers, model.num_layers),
        ),
    )


def with_minutes(recipe: Recipe, minutes: float) -> Recipe:
    """Return `recipe` with a training of so many minutes; what it counts in steps shrinks with its time.

    Steps of a recipe without a wall-clock cap stay as they are.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes is {minutes:g}; give a positive number of minutes")
    train, seconds = recipe.train, 60 * minutes
    shortening = min(1.0, 1000 * seconds / train.cap_ms) if train.cap_ms is not None else 1.0
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(
            train,
            max_wallclock_seconds=seconds,
            warmdown_iters=math.ceil(train.warmdown_iters * shortening),
            force_stop_step=0,
        ),
        **_shortened(recipe, shortening),
    )


def _shortened(recipe: Recipe, shortening: float, rates: float = 1.0) -> dict[str, Any]:
    """Return the tables [optimizer] and [average] for a run of so much fewer steps, with a factor on learning rates."""
    optimizer, average = recipe.optimizer, recipe.average
    return {
        "optimizer": dataclasses.replace(
            optimizer,
            muon_momentum_warmup_steps=math.ceil(optimizer.muon_momentum_warmup_steps * shortening),
            **{name: rates * getattr(optimizer, name) for name in RATES},
        ),
        "average": dataclasses.replace(
            average,
            ema_decay=average.ema_decay ** (1 / shortening),  # the same memory, as a fraction of the run
            swa_every=math.ceil(average.swa_every * shortening),
            lawa_every=math.ceil(average.lawa_every * shortening),
        ),
    }


def _schedule(recipe: Recipe, preset: Preset, step_ms: float | None) -> dict[str, Any]:
    """Return the new settings of the tables [train], [optimizer] and [average]."""
    train = recipe.train
    steps = train.last_step
    if step_ms is not None and train.cap_ms is not None:
        steps = min(steps, round(train.cap_ms / step_ms))
    fraction = train.warmdown_fraction
    seq_len = min(train.train_seq_len, preset.seq_len)
    batch = min(train.train_batch_tokens, preset.batch_tokens)
    return {
        "train": dataclasses.replace(
            train,
            iterations=train.iterations if preset.iterations is None else min(train.iterations, preset.iterations),
            max_wallclock_seconds=min(train.max_wallclock_seconds or preset.seconds, preset.seconds),
            warmdown_fraction=min(1.0, train.warmdown_iters / max(1, steps)) if fraction is None else fraction,
            force_stop_step=0,
            warmup_steps=min(train.warmup_steps, 1),
            train_batch_tokens=max(1, batch // seq_len) * seq_len,
            train_seq_len=seq_len,
            accumulation=1,
            micro_batch_tokens=0,
            seq_len_start=math.gcd(train.seq_len_start * seq_len // train.train_seq_len, seq_len)
            if train.seq_len_start
            else 0,
            mixed_seq_lens=(),
            batch_tokens_start=0,  # the schedule of the batch size needs several accumulation chunks
        ),
        **_shortened(recipe, preset.steps / max(preset.steps, steps), preset.rates),
    }


def _same_depths(layers: tuple[int, ...], old_count: int, new_count: int) -> tuple[int, ...]:
    """Return the layers at the same relative depths in a model of `new_count` layers, without duplicates."""
    return tuple(sorted({layer * new_count // old_count for layer in layers}))
