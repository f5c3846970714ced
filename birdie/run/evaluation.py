"""From an artifact to a score: the model it holds, rebuilt from its bytes alone, and its bits per byte.

    model.birdie ── load_gpt ──► GPT, recipe ── evaluate ──► Evaluation

Only what was decoded is ever scored, and scoring opens validation shards alone. An int8 export of the challenge that
was compressed whole (repack) is scored as well: dequantized as the challenge does it, its model's shape read off
its tensors, the rest of its settings the challenge's defaults.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.artifact import int8_zlib as baseline
from birdie.artifact.load import inspect, load
from birdie.artifact.repack import load_object
from birdie.compress.state import fill
from birdie.data.byte_sidecar import byte_counts
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.model.gpt import GPT
from birdie.model.infer_config import infer_config
from birdie.run.recipe import DataSettings, Recipe
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import choose_device, choose_dtype, dtype_name
from birdie.runtime.distributed import World
from birdie.score.chunks import Keeping
from birdie.score.clock import EvaluationClock
from birdie.score.forward import at_once
from birdie.score.package import Packaged, Shape, packaged
from birdie.score.plan import Plan, plan
from birdie.score.scoring import score as score_by_plan
from birdie.score.settings import CHUNK, DOCUMENTWISE, LEARN_BY, EvaluationSettings, parse_changes
from birdie.score.tally import BytesPerToken, Score

OF_WINDOWS = ("stride", "documents", "batch_seqs")
"""Settings that have no part in adaptation by documents."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decoded artifact's score and where the time went.

    Attributes:
        way: how, in a few words.
        recipe: that of the artifact, with what was given in place of what it says: how, in full.
        dtype, device: of the arithmetic.
        evidence: what learning did, in a line; empty without.
        bytes: of the artifact.
        sidecar: whether a byte sidecar counted the text, not the tokenizer's table.
        seconds: import, decode, compile, score, adapt, other.
        warnings: doubts about shards or tokenizer that did not stop the scoring, and a budget that did not do.
    """

    score: Score
    way: str
    recipe: Recipe
    dtype: str
    device: str
    evidence: str
    bytes: int
    sidecar: bool
    seconds: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def settings(self) -> EvaluationSettings:
        """Of windows and streams."""
        return self.recipe.evaluation

    @property
    def learned_by(self) -> dict[str, Any]:
        """The tables of the recipe that said how it learned, by name; empty without."""
        return {table: getattr(self.recipe, table) for table in LEARN_BY[self.settings.adapt]}


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, Recipe, Mapping[str, Any]]:
    """Rebuild the model an artifact holds: (model in evaluation mode, the recipe it was trained by, metadata).

    Raises:
        ArtifactError: the file is corrupt, or is not a birdie GPT.
        WeightsError: it is an export of a model other than the challenge's GPT.
    """
    summary = inspect(path)
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
    load(path, into=model)
    return model.to(device).eval(), recipe, metadata


def _load_export(path: Path | str, device: torch.device) -> tuple[GPT, Recipe]:
    """The GPT in a challenge's int8 export that was compressed whole, and the recipe its shape tells of."""
    state = baseline.dequantize(load_object(path))
    recipe = Recipe(model=infer_config(state))
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
    if keeping is not None:
        keeping.check()
    with clock.part("decode"):
        model, recipe, metadata = load_gpt(path, place)
        size = Path(path).stat().st_size
    model.compute_dtype = choose_dtype(dtype or recipe.train.compute_dtype, place)
    recipe = _as_asked(recipe, settings, tilt, {"sgd": sgd, "lora": lora, "phased": phased}, keeping)
    settings = recipe.evaluation
    clock.budget = settings.budget_seconds
    text = _text(recipe, metadata, data, tokenizer, recipe.validation.max_tokens if max_tokens is None else max_tokens)
    warnings = list(text.warnings)
    made = plan(settings, text.tokens, recipe.train.train_seq_len, text.bos_id, recipe.model.isolate_documents)
    batch_tokens = batch_tokens or recipe.validation.batch_tokens
    through: Packaged | None = None
    if package is not None:
        with clock.part("compile"):
            _require_plain_windows(recipe)
            shape = _shape(made, settings, batch_tokens, world, place)
            through = _through(model, package, shape, world, notify)
    with clock.part("score"):
        score, adapted = score_by_plan(
            made,
            recipe,
            model,
            text.counts,
            batch_tokens=batch_tokens,
            bos_id=text.bos_id,
            device=place,
            by=through,
            world=world,
            progress=clock.watch(progress),
            keeping=keeping,
            stop=stop,
        )
    if adapted is not None:
        clock.went_on("score", adapted.earlier_seconds)
        clock.move("score", "adapt", adapted.adapt_seconds)
        if not adapted.steps:
            warnings.append(
                f"adapt {settings.adapt} learned nothing: all of the text is in one chunk; make chunks smaller"
            )
    if through is not None:
        notify(f"active: {through.evidence()}")
    if not clock.within:
        warnings.append(f"the evaluation took {clock.total:,.0f} s, more than its {clock.budget:,.0f} s")
    return Evaluation(
        score,
        _way(made, recipe),
        recipe,
        dtype_name(model.compute_dtype),
        place.type,
        "" if adapted is None else adapted.evidence,
        size,
        isinstance(text.counts, np.ndarray),
        clock.seconds,
        tuple(warnings),
    )


def _as_asked(
    recipe: Recipe,
    settings: EvaluationSettings | Mapping[str, Any] | None,
    tilt: bool | None,
    learning: Mapping[str, str],
    keeping: Keeping | None,
) -> Recipe:
    """The recipe with what was given in place of what it says; `learning`: changes of its tables.

    Raises:
        ConfigError: a value is out of range, or for an adaptation that was not asked for.
    """
    if not isinstance(settings, EvaluationSettings):
        settings = changed(recipe.evaluation, settings or {})
    given = {table: text for table, text in learning.items() if text}
    idle = [f"settings of {table}" for table in given if table not in LEARN_BY[settings.adapt]]
    idle += ["a state"] if keeping is not None and settings.adapt == "none" else []
    if idle:
        raise ConfigError(f"{' and '.join(idle)} given, but adaptation is {settings.adapt}; ask for it with --adapt")
    tables: dict[str, Any] = {
        table: parse_changes(text, getattr(recipe, table), table) for table, text in given.items()
    }
    if tilt is not None:
        tables["tilt"] = dataclasses.replace(recipe.tilt, enabled=tilt)
    return dataclasses.replace(recipe, evaluation=settings, **tables)


@dataclass(frozen=True, slots=True)
class _Text:
    """What is scored.

    Attributes:
        tokens: (N + 1,).
        counts: the tokenizer's byte table, or the bytes of every token (N + 1,).
        bos_id: what documents begin with.
        warnings: doubts that did not stop it.
    """

    tokens: NDArray[np.uint16]
    counts: BytesPerToken | NDArray[np.uint16]
    bos_id: int
    warnings: tuple[str, ...]


def _text(
    recipe: Recipe, metadata: Mapping[str, Any], data: str | None, tokenizer: str | None, max_tokens: int
) -> _Text:
    """The validation split, as given or as the recipe has it; max_tokens 0: all of it.

    Raises:
        DataError: shards or tokenizer are missing, or not those the model was trained with.
    """
    tokenizer = tokenizer or recipe.data.tokenizer
    pieces = load_tokenizer(tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer)
    dataset = _open_validation(data, recipe.data)
    warnings = (*check_tokenizer(dataset, pieces), *_doubts(metadata))
    tokens = dataset.validation_tokens()
    tokens = tokens[: max_tokens + 1] if max_tokens else tokens
    largest = int(tokens.max()) if len(tokens) else 0
    if largest >= recipe.model.vocab_size:
        raise DataError(
            f"the text has token {largest}, but the model knows only 0 to {recipe.model.vocab_size - 1}; score shards "
            "made with its own tokenizer"
        )
    return _Text(tokens, byte_counts(dataset.val, pieces, tokens, recipe.model.vocab_size), pieces.bos_id, warnings)


def _way(made: Plan, recipe: Recipe) -> str:
    """How it is scored, in a few words."""
    adapt, lora, says = recipe.evaluation.adapt, recipe.lora, made.says
    if adapt == "sgd":
        says += f", learning from {recipe.sgd.chunk_tokens:,} tokens at a time"
    elif adapt != "none":
        phases = f", the model learning in up to {recipe.phased.phases} phases" if adapt == "phased" else ""
        context = lora.context or made.length
        says = f"each document in chunks of {lora.chunk}, windows of {context:,}, adapters learning it{phases}"
    return says + (", tilted by n-grams" if recipe.tilt.enabled else "")


def _require_plain_windows(recipe: Recipe) -> None:
    """Refuse what asks for more than the losses of windows."""
    settings = recipe.evaluation
    asked = {
        "a stream": settings.stream,
        "a temperature": settings.temperature != 1.0,
        "a tilt": recipe.tilt.enabled,
        "an adaptation": settings.adapt != "none",
    }
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"a package gives the losses of windows, and {name} needs more; leave out one of the two")


def _shape(made: Plan, settings: EvaluationSettings, batch_tokens: int, world: World, device: torch.device) -> Shape:
    """Of most of the plan's windows that pass together on a rank."""
    inputs = min((settings.batch_seqs * made.length or batch_tokens) // world.size, at_once(device))
    return Shape(max(1, inputs // made.length), made.length, settings.stride or made.length)


def _through(model: GPT, path: Path, shape: Shape, world: World, notify: Callable[[str], None]) -> Packaged:
    """The package for windows of a shape.

    Raises:
        ConfigError: it is for something else, or several ranks would make it.
    """
    if world.size > 1 and not path.exists():
        raise ConfigError(f"there is no package {path} yet, and several ranks do not make one; make it with one first")
    return packaged(model, path, shape, notify)


def changed(settings: EvaluationSettings, changes: Mapping[str, Any]) -> EvaluationSettings:
    """Settings with some of them changed; whoever asks for a stream, or for a stride, drops the recipe's other way.

    Raises:
        ConfigError: what comes out contradicts itself, or a change would have no part in it.
    """
    dropped: dict[str, Any] = {}
    if changes.get("stream"):
        dropped = {"stride": 0, "adapt": "none"}
    elif changes.get("stride") is not None or changes.get("adapt", "none") != "none" or changes.get("stream") is False:
        dropped = {"stream": False, "sinks": 0, "kv_bits": 0, "segments": 1, "exact": False, "chunk": CHUNK}
    made = dataclasses.replace(settings, **(dropped | dict(changes)))
    idle = [name for name in OF_WINDOWS if changes.get(name) and made.adapt in DOCUMENTWISE]
    if idle:
        raise ConfigError(
            f"adapt {made.adapt} goes by documents and has windows of its own; leave {' and '.join(idle)} out"
        )
    return made


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
