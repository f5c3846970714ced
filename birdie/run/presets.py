"""Presets that shrink a recipe for a small machine: shape, batch, schedule and budget shrink together.

    Recipe ── scaled(recipe, "cpu", step_ms=43.54) ──► Recipe

Shares stay the same: of the layers and of a head (each setting of the model says how it shrinks, `GPTConfig.resized`),
of the run (warmdown, momentum warm-up, memory of an average), and bits per weight under a budget. Learning rates stay,
because Muon's updates have one size whatever the width. Vocabulary and tokenizer stay: they belong to the data.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from birdie.compress.rate.size import parse_size
from birdie.errors import ConfigError
from birdie.run.estimate import groups
from birdie.run.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of the shrunk run.

    Attributes:
        width: share of the model's width and of its tables' rows and widths.
        depth: share of the layers.
        batch_tokens: of a step, at most.
        seq_len: tokens of a sequence, at most.
        seconds: of training, at most.
        steps: that this is expected to allow; what a recipe counts in steps is converted by it.
        iterations: steps at most; None: those of the recipe.
        val_tokens: validated on, at most.
    """

    width: float
    depth: float
    batch_tokens: int
    seq_len: int
    seconds: float
    steps: int
    iterations: int | None
    val_tokens: int


SCALES = {
    "cpu": Scale(3 / 8, 1 / 2, 4096, 256, 600.0, 800, None, 131_072),  # ten minutes on two cores
    "smoke": Scale(1 / 8, 1 / 3, 512, 64, 60.0, 4, 4, 4096),  # a few steps: does all of it run?
}


def scaled(recipe: Recipe, name: str, step_ms: float | None = None) -> Recipe:
    """The recipe at the scale called `name`.

    Args:
        recipe: is left as it is.
        name: a key of `SCALES`.
        step_ms: of a step where the recipe comes from: with its cap it tells how many steps it is made for.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in SCALES:
        raise ConfigError(f"there is no preset {name!r}; choose {' or '.join(SCALES)}")
    scale = SCALES[name]
    model = recipe.model.resized(width=scale.width, depth=scale.depth, seq_len=scale.seq_len)
    export, validation = recipe.export, recipe.validation
    budget = export.budget
    if budget is not None:
        budget = str(round(parse_size(budget) * sum(groups(model).values()) / sum(groups(recipe.model).values())))
    layers = recipe.model.num_layers
    return dataclasses.replace(
        recipe,
        model=model,
        **_schedule(recipe, scale, step_ms),
        validation=dataclasses.replace(
            validation,
            batch_tokens=min(validation.batch_tokens, 65_536),
            every=0,
            max_tokens=min(validation.max_tokens or scale.val_tokens, scale.val_tokens),
        ),
        calibration=dataclasses.replace(
            recipe.calibration,
            tokens=min(recipe.calibration.tokens, scale.val_tokens // 4),
            reserve_seconds=None,
        ),
        export=dataclasses.replace(
            export,
            budget=budget,
            int4_layers=_moved(export.int4_layers, layers, model.num_layers),
        ),
    )


def _schedule(recipe: Recipe, scale: Scale, step_ms: float | None) -> dict[str, Any]:
    """Tables [train], [optimizer] and [average]."""
    train, optimizer, average = recipe.train, recipe.optimizer, recipe.average
    steps = train.last_step
    if step_ms is not None and train.cap_ms is not None:
        steps = min(steps, round(train.cap_ms / step_ms))
    fraction = train.warmdown_fraction
    seq_len = min(train.train_seq_len, scale.seq_len)
    batch = min(train.train_batch_tokens, scale.batch_tokens)
    rises = optimizer.muon_momentum_warmup_steps
    shorter = scale.steps / max(scale.steps, steps)
    return {
        "train": dataclasses.replace(
            train,
            iterations=train.iterations if scale.iterations is None else min(train.iterations, scale.iterations),
            max_wallclock_seconds=min(train.max_wallclock_seconds or scale.seconds, scale.seconds),
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
            batch_tokens_start=0,  # a single chunk cannot be scheduled
        ),
        "optimizer": dataclasses.replace(optimizer, muon_momentum_warmup_steps=math.ceil(rises * shorter)),
        "average": dataclasses.replace(
            average,
            ema_decay=average.ema_decay ** (1 / shorter),  # as much of the run is remembered
            swa_every=math.ceil(average.swa_every * shorter),
            lawa_every=math.ceil(average.lawa_every * shorter),
        ),
    }


def _moved(layers: tuple[int, ...], old_count: int, new_count: int) -> tuple[int, ...]:
    """Return layers at the same relative depths in a model of `new_count` layers, each once."""
    return tuple(sorted({layer * new_count // old_count for layer in layers}))
