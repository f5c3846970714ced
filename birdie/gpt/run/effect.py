"""Settings that are given and have no effect, because a technique is off or another setting decides.

Two settings of one thing are settled where sources are read (`recipe_file.OVERRIDES`). `UNREAD` declares which settings
nothing reads while a technique is off, so that a run can name those that were given.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.settings import MODES, is_read, shared_names


@dataclass(frozen=True, slots=True)
class Unread:
    """Settings that are not read while something else holds.

    Attributes:
        settings: as TABLE.SETTING.
        when: recipe → why they are not read; empty where they are.
    """

    settings: tuple[str, ...]
    when: Callable[[Recipe], str]


def _unless(settings: str, needed: str, holds: Callable[[Recipe], Any]) -> Unread:
    """Return the row of settings that are read only if `holds`; `needed` says so in words."""
    return Unread(tuple(settings.split()), lambda recipe: "" if holds(recipe) else needed)


def _forced(recipe: Recipe) -> str:
    forced = recipe.train.force_stop_step
    return f"train.force_stop_step {forced} is the last step, whatever the clock" if forced else ""


UNREAD = (
    _unless("data.path", "data.train and data.val name the shards", lambda r: not r.data.train),
    _unless(
        "model.loop_start model.loop_end model.enable_looping_at",
        "model.num_loops is 0",
        lambda r: r.model.num_loops,
    ),
    _unless("model.bigram_dim", "model.bigram_vocab_size is 0", lambda r: r.model.bigram_vocab_size),
    _unless("model.value_embed_dim", "model.value_embed_layers is empty", lambda r: r.model.value_embed_layers),
    _unless(
        "model.gate_window",
        "neither model.attn_gate (output, sparse) nor model.smear (gated) has a window",
        lambda r: r.model.attn_gate in ("output", "sparse") or r.model.smear == "gated",
    ),
    _unless("model.sparse_gate_scale", "model.attn_gate is not sparse", lambda r: r.model.attn_gate == "sparse"),
    _unless("model.leaky_slope", "model.activation is not leaky_relu2", lambda r: r.model.activation == "leaky_relu2"),
    _unless(
        "model.parallel", "model.parallel_start_layer is not set", lambda r: r.model.parallel_start_layer is not None
    ),
    _unless("model.tied_embed_init_std", "model.tie_embeddings is off", lambda r: r.model.tie_embeddings),
    _unless(
        "train.warmdown_iters",
        "train.warmdown_fraction is the length of the warmdown",
        lambda r: r.train.warmdown_fraction is None,
    ),
    Unread(("train.max_wallclock_seconds",), _forced),
    Unread(("train.iterations",), lambda r: "" if r.train.iterations == r.train.last_step else _forced(r)),
    _unless(
        "train.min_lr",
        "there is no warmdown",
        lambda r: r.train.warmdown_iters if r.train.warmdown_fraction is None else r.train.warmdown_fraction,
    ),
    _unless("train.seq_schedule_fraction", "train.seq_len_start is 0", lambda r: r.train.seq_len_start),
    _unless("train.batch_schedule_fraction", "train.batch_tokens_start is 0", lambda r: r.train.batch_tokens_start),
    _unless("optimizer.tied_embed_lr", "model.tie_embeddings is off", lambda r: r.model.tie_embeddings),
    _unless("optimizer.embed_lr optimizer.head_lr", "model.tie_embeddings is on", lambda r: not r.model.tie_embeddings),
    _unless(
        "optimizer.muon_momentum_warmup_start",
        "optimizer.muon_momentum_warmup_steps is 0",
        lambda r: r.optimizer.muon_momentum_warmup_steps,
    ),
    _unless("optimizer.decay_final", "optimizer.decay_full is 1", lambda r: r.optimizer.decay_full < 1),
    _unless("average.ema_decay", "average.kind is not ema", lambda r: r.average.kind == "ema"),
    _unless("average.swa_every average.swa_below", "average.kind is not swa", lambda r: r.average.kind == "swa"),
    _unless("average.lawa_k average.lawa_every", "average.kind is not lawa", lambda r: r.average.kind == "lawa"),
    _unless("bandit.factors bandit.discount", "bandit.every is 0", lambda r: r.bandit.every),
    _unless(
        "qat.start qat.below qat.tensors",
        "qat is off: neither bits, sigma, levels, scheme nor budget is set",
        lambda r: r.qat.enabled,
    ),
    _unless("qat.encodings", "qat.budget is off", lambda r: r.qat.budget),
    _unless("qat.group_size", "qat.levels is not set", lambda r: r.qat.levels),
    _unless(
        "calibration.tokens calibration.reserve_seconds",
        "calibration.data is none",
        lambda r: r.calibration.data != "none",
    ),
    _unless("calibration.reserve_seconds", "the run has no time limit", lambda r: r.train.cap_ms),
    _unless(
        "calibration.temperature calibration.seed",
        "calibration.data is not own",
        lambda r: r.calibration.data == "own",
    ),
    _unless(
        "export.scheme export.int4_layers export.int4_step",
        "export.budget chooses the schemes",
        lambda r: r.export.budget is None,
    ),
    _unless("export.int4_step", "export.int4_layers is empty", lambda r: r.export.int4_layers),
    _unless(
        "evaluation.ngram.orders evaluation.ngram.beta evaluation.ngram.threshold evaluation.ngram.table_bits",
        "evaluation.ngram.enabled is off",
        lambda r: r.evaluation.ngram.enabled,
    ),
)
"""Settings of techniques, and when they are not read; those of scoring modes are declared by the modes."""


def unread(recipe: Recipe) -> dict[str, str]:
    """Return the settings that nothing reads in a run of `recipe`, as TABLE.SETTING → why."""
    reasons: dict[str, str] = {}
    for row in UNREAD:
        if reason := row.when(recipe):
            reasons |= {name: reason for name in row.settings if name not in reasons}
    mode, reason = recipe.evaluation.scoring_mode, f"evaluation.mode {recipe.evaluation.mode} does not read it"
    tables = {kind.table_name(): kind for kind in MODES.values()}
    for name, value in asdict(recipe.evaluation).items():
        if name in shared_names() and not is_read(name, mode):
            reasons[f"evaluation.{name}"] = reason
        elif name in tables and not is_read(name, mode):
            reasons |= {f"evaluation.{name}.{setting}": reason for setting in value}
    return reasons


def no_effect(recipe: Recipe, origins: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a sentence for each setting that was given and that nothing reads.

    Args:
        origins: TABLE.SETTING → the flag, variable or key that gave it; None: those unlike their defaults were given.
    """
    default = Recipe()
    for name, reason in unread(recipe).items():
        value = attrgetter(name)
        if name in origins if origins is not None else value(recipe) != value(default):
            yield f"{name if origins is None else origins[name]} has no effect: {reason}"
