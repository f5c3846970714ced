"""A recipe made small for a small machine: shape, batch, schedule and budget shrink together.

    Recipe ── scaled(recipe, "cpu", step_ms=43.54) ──► Recipe

What is a share stays that share: of the layers (loops, lanes, exclusive attention, embeddings of values), of a head
(rotary dimensions), of the run (warmdown, momentum's rise, an average's memory), bits per weight under a budget.
Learning rates stay, for Muon's updates have one size whatever the width. Vocabulary and tokenizer stay: they are the
data's.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from birdie.compress.rate.size import parse_size
from birdie.errors import ConfigError
from birdie.model.config import GPTConfig
from birdie.run.estimate import groups
from birdie.run.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller, and for how long.

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
        ConfigError: there is no such scale.
    """
    if name not in SCALES:
        raise ConfigError(f"there is no scale {name!r}; choose {' or '.join(SCALES)}")
    scale = SCALES[name]
    model = _model(recipe.model, scale)
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


def _model(config: GPTConfig, scale: Scale) -> GPTConfig:
    """Heads shrink by the root of the width, so that they get narrower as well as fewer."""
    queries = config.num_heads // config.num_kv_heads  # that share a key
    kv_heads = max(1, math.floor(config.num_kv_heads * math.sqrt(scale.width)))
    heads = queries * kv_heads
    dim = 2 * heads * max(1, round(config.model_dim * scale.width / (2 * heads)))
    layers = max(1, math.ceil(config.num_layers * scale.depth))
    loops = _moved((config.loop_start, config.loop_end), config.num_layers, layers)
    start = config.parallel_start_layer
    if start is not None:
        start = _moved((start,), config.num_layers, layers)[0]
        if config.parallel == "lanes" and config.num_loops:
            start = min(max(start, loops[-1] + 1), layers - 1)
    changed: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "model_dim": dim,
        "num_layers": layers,
        "embed_dim": _narrowed(config.embed_dim, scale.width),
        "bigram_vocab_size": _narrowed(config.bigram_vocab_size, scale.width),
        "bigram_dim": _narrowed(config.bigram_dim, scale.width),
        "value_embed_dim": _narrowed(config.value_embed_dim, scale.width),
        "value_embed_layers": _moved(config.value_embed_layers, config.num_layers, layers),
        "rope_dims": 2 * math.ceil(config.rope_dims * (dim // heads) / config.head_dim / 2),
        "rope_train_seq_len": min(config.rope_train_seq_len, scale.seq_len),
        "xsa_last_n": math.ceil(config.xsa_last_n * layers / config.num_layers),
        "attn_window": min(config.attn_window, scale.seq_len),
        "attn_window_layers": _moved(config.attn_window_layers, config.num_layers, layers),
        "gate_window": min(config.gate_window, dim),
        "loop_start": loops[0],
        "loop_end": loops[-1],
        "parallel_start_layer": start,
    }
    return dataclasses.replace(config, **changed)


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
            batch_tokens_start=0,  # one span is not cut
        ),
        "optimizer": dataclasses.replace(optimizer, muon_momentum_warmup_steps=math.ceil(rises * shorter)),
        "average": dataclasses.replace(
            average,
            ema_decay=average.ema_decay ** (1 / shorter),  # as much of the run is remembered
            swa_every=math.ceil(average.swa_every * shorter),
            lawa_every=math.ceil(average.lawa_every * shorter),
        ),
    }


def _narrowed(size: int, share: float) -> int:
    """A width or a number of rows; 0 stays 0."""
    return max(2, round(size * share)) if size else 0


def _moved(layers: tuple[int, ...], before: int, after: int) -> tuple[int, ...]:
    """The same depths in a model of `after` layers, each once."""
    return tuple(sorted({layer * after // before for layer in layers}))
