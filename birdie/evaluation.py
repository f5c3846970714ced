"""From an artifact to a score: the model it holds, rebuilt from its bytes alone, and its bits per byte.

    model.birdie ── load_gpt ──► GPT, recipe ── evaluate ──► Evaluation

Only what was decoded is ever scored, and scoring opens validation shards alone. An int8 export of the challenge that
was compressed whole (birdie.repack) is scored as well: dequantized as the challenge does it, its model's shape read off
its tensors, the rest of its settings the challenge's defaults.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birdie import artifact
from birdie.compress import baseline
from birdie.compress.state import fill
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.sidecar import byte_counts
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.device import choose_device, choose_dtype
from birdie.distributed import World
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.model.gpt import GPT
from birdie.model.shape import config_of
from birdie.recipe import DataSettings, Recipe
from birdie.repack import load_object
from birdie.score.adapt import SGDSettings
from birdie.score.chunks import Keeping
from birdie.score.clock import EvaluationClock
from birdie.score.lora import LoraSettings
from birdie.score.package import Packaged, Shape, packaged
from birdie.score.phased import PhasedSettings
from birdie.score.plan import Plan, plan, score_by_documents, score_learning
from birdie.score.plan import score as score_by_plan
from birdie.score.settings import DOCUMENTWISE, EvaluationSettings, parse_changes
from birdie.score.tally import Score

Progress = Callable[[float, float | None], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decoded artifact's score and where the time went.

    Attributes:
        way: how, in a few words.
        settings: how, in full.
        sgd, lora, phased: how it learned; None: not so.
        evidence: what learning did, in a line; empty without.
        bytes: of the artifact.
        sidecar: whether a byte sidecar counted the text, not the tokenizer's table.
        seconds: import, decode, compile, score, adapt.
        warnings: doubts about shards or tokenizer that did not stop the scoring, and a budget that did not do.
    """

    score: Score
    way: str
    settings: EvaluationSettings
    sgd: SGDSettings | None
    lora: LoraSettings | None
    phased: PhasedSettings | None
    evidence: str
    bytes: int
    sidecar: bool
    seconds: dict[str, float]
    warnings: tuple[str, ...]


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, Recipe, Mapping[str, Any]]:
    """Rebuild the model an artifact holds: (model in evaluation mode, the recipe it was trained by, metadata).

    Raises:
        ArtifactError: the file is corrupt, or is not a birdie GPT.
        WeightsError: it is an export of a model other than the challenge's GPT.
    """
    summary = artifact.inspect(path)
    metadata = summary.metadata
    if summary.tree is not None:
        return *_load_export(path, device), metadata
    if metadata.get("model") != "gpt":
        raise ArtifactError(
            f"{path} does not hold a birdie GPT; only artifacts of `birdie train` can be scored or sampled"
        )
    try:
        recipe = Recipe.from_dict(metadata["recipe"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} describes its model in a way this version does not know: {error}") from error
    model = GPT(recipe.model)
    artifact.load(path, into=model)
    return model.to(device).eval(), recipe, metadata


def _load_export(path: Path | str, device: torch.device) -> tuple[GPT, Recipe]:
    """The GPT in a challenge's int8 export that was compressed whole, and the recipe its shape tells of."""
    state = baseline.dequantize(load_object(path))
    recipe = Recipe(model=config_of(state))
    model = GPT(recipe.model)
    fill(model, state, str(path))
    return model.to(device).eval(), recipe


def evaluate(
    path: Path | str,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    batch_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    settings: EvaluationSettings | Mapping[str, Any] | None = None,
    tilt: bool | None = None,
    package: Path | None = None,
    sgd: str = "",
    lora: str = "",
    phased: str = "",
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
    started: float = 0.0,
    notify: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode an artifact and score it; what is left out comes from the recipe in the artifact.

    Args:
        path: the artifact.
        data: folder of shards, or validation shards by name or glob.
        tokenizer: that the shards were made with.
        batch_tokens: inputs at a time over all ranks.
        max_tokens: how much of the split is scored; 0: all.
        device, dtype: of the arithmetic.
        settings: how to score; a mapping changes those of the recipe, None takes these.
        tilt: whether predictions lean on what the text said before, as the recipe's `[tilt]` says; None: it says.
        package: machine code that windows pass through instead, made if it is not there (`birdie.score.package`).
        sgd, lora, phased: changes of these tables of the recipe, for the adaptation that needs them, as "lr=0.01,…".
        keeping: a file for the state of an adaptation.
        stop: asked between the chunks of one.
        world: ranks that share the work; all get the answer.
        started: seconds that importing took, for the budget.
        notify: gets a line when the budget will not do, and what a package did.
        progress: called with (done, in all).

    Raises:
        ArtifactError: the file is corrupt.
        DataError: shards or tokenizer are missing, or not those the model was trained with.
        ConfigError: a setting is out of range, or the package is not for this.
        KeyboardInterrupt: an adaptation was stopped.
        WeightsError: its state cannot be gone on from.
    """
    if max_tokens is not None and max_tokens < 0:
        raise ConfigError(f"max_tokens is {max_tokens}; give a number of tokens, or 0 for all")
    world = world or World()
    place = choose_device(device, world.local_rank)
    clock = EvaluationClock(0.0, notify, started)
    with clock.part("decode"):
        model, recipe, metadata = load_gpt(path, place)
    model.compute_dtype = choose_dtype(dtype or recipe.train.compute_dtype, place)
    if not isinstance(settings, EvaluationSettings):
        settings = changed(recipe.evaluation, settings or {})
    _require_use(settings, {"sgd": sgd, "lora": lora, "phased": phased}, keeping)
    clock.budget = settings.budget_seconds
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer or recipe.data.tokenizer)
    dataset = _open_validation(data, recipe.data)
    warnings = [*check_tokenizer(dataset, pieces), *_doubts(metadata)]
    limit = recipe.validation.max_tokens if max_tokens is None else max_tokens
    tokens = dataset.validation_tokens()
    tokens = tokens[: limit + 1] if limit else tokens
    counts = byte_counts(dataset.val, pieces, tokens, recipe.model.vocab_size)
    made = plan(settings, tokens, recipe.train.train_seq_len, pieces.bos_id, recipe.model.isolate_documents)
    leaning = recipe.tilt if tilt is None else dataclasses.replace(recipe.tilt, enabled=tilt)
    through: Packaged | None = None
    if package is not None:
        with clock.part("compile"):
            _require_plain_windows(settings, leaning.enabled)
            through = _through(model, package, made, settings, world, notify)
    watched, evidence = clock.watch(progress), ""
    by_sgd = parse_changes(sgd, recipe.sgd, "sgd") if sgd else recipe.sgd
    by_lora = parse_changes(lora, recipe.lora, "lora") if lora else recipe.lora
    by_phases = parse_changes(phased, recipe.phased, "phased") if phased else recipe.phased
    shared: dict[str, Any] = {
        "batch_tokens": batch_tokens or recipe.validation.batch_tokens,
        "bos_id": pieces.bos_id,
        "device": place,
        "tilt": leaning,
        "world": world,
        "progress": watched,
    }
    adapt = settings.adapt
    if adapt != "none":
        if adapt == "sgd":
            learn = partial(score_learning, made, settings, by_sgd)
        else:
            learn = partial(score_by_documents, made, by_lora, by_phases if adapt == "phased" else None)
        score, adapted = learn(model, counts, keeping=keeping, stop=stop, **shared)
        clock.seconds["score"] += adapted.score_seconds
        clock.seconds["adapt"] += adapted.adapt_seconds
        evidence = adapted.evidence
    else:
        with clock.part("score"):
            score = score_by_plan(made, settings, model, counts, by=through, **shared)
    if through is not None:
        notify(f"at work: {through.evidence()}")
    if not clock.within:
        warnings.append(f"the evaluation took {clock.total:,.0f} s, more than its {clock.budget:,.0f} s")
    return Evaluation(
        score,
        _way(made, settings, by_sgd, by_lora) + (", tilted by n-grams" if leaning.enabled else ""),
        settings,
        by_sgd if adapt == "sgd" else None,
        by_lora if adapt in DOCUMENTWISE else None,
        by_phases if adapt == "phased" else None,
        evidence,
        Path(path).stat().st_size,
        isinstance(counts, np.ndarray),
        clock.seconds,
        tuple(warnings),
    )


def _require_use(settings: EvaluationSettings, given: Mapping[str, str], keeping: Keeping | None) -> None:
    """Refuse settings of an adaptation that was not asked for."""
    used = {"phased": ("lora", "phased")}.get(settings.adapt, (settings.adapt,))
    idle = [f"settings of {name}" for name, text in given.items() if text and name not in used]
    idle += ["a state"] if keeping is not None and settings.adapt == "none" else []
    if idle:
        raise ConfigError(f"{' and '.join(idle)} given, but adaptation is {settings.adapt}; ask for it with --adapt")


def _way(made: Plan, settings: EvaluationSettings, sgd: SGDSettings, lora: LoraSettings) -> str:
    """How it is scored, in a few words."""
    if settings.adapt == "sgd":
        return f"{made.says}, learning from {sgd.chunk_tokens:,} tokens at a time"
    if settings.adapt in DOCUMENTWISE:
        phases = ", the model learning in phases" if settings.adapt == "phased" else ""
        context = lora.context or made.length
        return f"each document in chunks of {lora.chunk}, windows of {context:,}, adapters learning it{phases}"
    return made.says


def _require_plain_windows(settings: EvaluationSettings, tilted: bool) -> None:
    """Refuse what asks for more than the losses of windows."""
    asked = {
        "a stream": settings.stream,
        "a temperature": settings.temperature != 1.0,
        "a tilt": tilted,
        "an adaptation": settings.adapt != "none",
    }
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"a package gives the losses of windows, and {name} needs more; leave out one of the two")


def _through(
    model: GPT, path: Path, made: Plan, settings: EvaluationSettings, world: World, notify: Callable[[str], None]
) -> Packaged:
    """The package for most windows of the plan.

    Raises:
        ConfigError: it is for something else, or several ranks would make it.
    """
    if world.size > 1 and not path.exists():
        raise ConfigError(f"there is no package {path} yet, and several ranks do not make one; make it with one first")
    return packaged(model, path, Shape.of(made.length, settings.stride or made.length), notify)


def changed(settings: EvaluationSettings, changes: Mapping[str, Any]) -> EvaluationSettings:
    """Settings with some of them changed; whoever asks for a stream, or for a stride, drops the recipe's other way.

    Raises:
        ConfigError: what comes out contradicts itself.
    """
    dropped: dict[str, Any] = {}
    if changes.get("stream"):
        dropped = {"stride": 0, "adapt": "none"}
    elif any(changes.get(name) is not None for name in ("stride", "adapt")) or changes.get("stream") is False:
        dropped = {"stream": False, "sinks": 0, "kv_bits": 0, "segments": 1, "exact": False}
    return dataclasses.replace(settings, **(dropped | dict(changes)))


def _open_validation(given: str | None, data: DataSettings) -> Dataset:
    """What to score on: a folder of shards, or validation shards by name or glob; left out, that of the training."""
    if given is None and data.val:
        return open_dataset(val=data.val)
    place = data.path if given is None else given
    return open_dataset(place, splits=["val"]) if given is None or Path(place).is_dir() else open_dataset(val=place)


def _doubts(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """What a score rests on that the file does not say."""
    if metadata.get("model") == "gpt":
        return ()
    return ("the export does not say how its model computes: it is scored as the challenge's baseline GPT",)


def check_same_tokenizer(tokenizer: Tokenizer, trained_with: Mapping[str, Any] | None, given: str) -> None:
    """Refuse a tokenizer other than the one in the artifact's metadata: its ids would mean other text; None: unknown.

    Raises:
        DataError: the two differ.
    """
    if trained_with is not None and tokenizer.digest != trained_with["sha256"]:
        raise DataError(
            f"the model was trained with tokenizer {trained_with['kind']} {trained_with['sha256'][:12]}, "
            f"but {given} is {tokenizer.kind} {tokenizer.digest[:12]}; give the one it was trained with (--tokenizer)"
        )
