"""From an artifact to a score: the model is rebuilt from the file's bytes alone and scored in bits per byte.

    model.birdie ── load_gpt ──► GPT, recipe ── evaluate(path, request) ──► Evaluation

Only what was decoded is scored, and scoring opens validation shards alone. An int8 export of the challenge that was
compressed as a file (repack) can be scored as well: it is dequantized as the challenge does it, the model's shape is
read off its tensors, and the other settings are the challenge's defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birdie.artifact import Summary, inspect, load, load_object
from birdie.checkpoints import dequantize
from birdie.compress import fill
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.gpt.data.byte_sidecar import byte_counts
from birdie.gpt.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.gpt.data.tokenizer import check_same_tokenizer, load_tokenizer, require_tokenizer
from birdie.gpt.model.attention_kernels import best_kernels
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.infer_config import infer_config
from birdie.gpt.model.stored_shape import require_shape
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score import evaluator, package
from birdie.gpt.score.accumulator import Score, Text
from birdie.gpt.score.clock import EvaluationClock
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.package import PackagedModel
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings
from birdie.system.callbacks import Notify, Progress, no_message
from birdie.system.device import choose_device, choose_dtype, dtype_name
from birdie.system.distributed import World


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Score of a decoded artifact, how it was computed, and where the time went.

    Attributes:
        score: bits per byte, loss and counts.
        mode: the scoring mode, with its settings.
        settings: of the evaluation: those of the artifact's recipe with the changes of the request.
        method: what the mode did, in a few words.
        dtype, device: of the arithmetic.
        diagnostics: what test-time training did, in one line; empty without it.
        bytes: of the artifact.
        sidecar: True if a byte sidecar counted the bytes of text, not the tokenizer's table.
        seconds: by part: import, decode, compile, score, adapt (test-time training), other.
        warnings: about shards, tokenizer or recipe, and an exceeded time budget.
    """

    score: Score
    mode: ScoringMode
    settings: EvaluationSettings
    method: str
    dtype: str
    device: str
    diagnostics: str
    bytes: int
    sidecar: bool
    seconds: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def settings_in_effect(self) -> dict[str, Any]:
        """The settings that the mode has read, in plain values."""
        return self.settings.in_effect(self.mode)


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, Recipe, Mapping[str, Any]]:
    """Rebuild the model of an artifact; return it in evaluation mode, its recipe and the metadata."""
    summary = inspect(path)
    if summary.tree is not None:
        return *_load_export(path, device), summary.metadata
    recipe = require_gpt(summary, path)
    model = GPT(recipe.model)
    load(path, into=model)
    return model.to(device).eval(), recipe, summary.metadata


def require_gpt(summary: Summary, path: Path | str) -> Recipe:
    """Return the recipe of an artifact of `birdie train`, whose model its tensors fit; nothing is decoded.

    Args:
        summary: of the artifact, which holds no checkpoint of another program.
        path: of the artifact, for the messages.

    Raises:
        ArtifactError: the file holds no birdie GPT, or does not fit what it says about its model.
    """
    metadata = summary.metadata
    if metadata.get("model") != "gpt":
        raise ArtifactError(
            f"{path} does not hold a birdie GPT; only artifacts of `birdie train` can be scored or sampled"
        )
    try:
        recipe, _ = _recipe_of(metadata)
    except ConfigError as error:
        reason = str(error) if len(str(error)) <= 1000 else f"{str(error)[:1000]}…"  # it quotes what a stranger wrote
        raise ArtifactError(f"{path} describes its model in a way this version does not know: {reason}") from error
    require_tokenizer(metadata.get("tokenizer"), path)
    require_shape(recipe.model, {row.name: row.shape for row in summary.tensors}, path)
    return recipe


def _recipe_of(metadata: Mapping[str, Any]) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe in an artifact's metadata, and warnings.

    Settings of evaluation do not describe the model, so those of another version, or of a scoring mode that is not
    registered, give way to the defaults.
    """
    values: Mapping[str, Any] = metadata.get("recipe", {})
    try:
        return Recipe.from_dict(values), ()
    except ConfigError as error:
        if not isinstance(values, dict):
            raise
        known = {table.name for table in fields(Recipe)} - {"evaluation"}
        recipe = Recipe.from_dict({name: value for name, value in values.items() if name in known})
        return recipe, (f"the artifact's settings of evaluation are replaced by the defaults: {error}",)


def _load_export(path: Path | str, device: torch.device) -> tuple[GPT, Recipe]:
    """Return the GPT in an int8 export of the challenge that was compressed as a file, and a recipe of its shape."""
    state = dequantize(load_object(path))
    recipe = Recipe(model=infer_config(state))
    require_shape(recipe.model, {name: tuple(weight.shape) for name, weight in state.items()}, path)
    model = GPT(recipe.model)
    fill(model, state, str(path))
    return model.to(device).eval(), recipe


def evaluate(
    path: Path | str,
    request: EvaluationRequest | None = None,
    *,
    world: World | None = None,
    notify: Notify = no_message,
    progress: Progress | None = None,
    import_seconds: float = 0.0,
) -> Evaluation:
    """Decode an artifact and score it; what the request leaves out comes from the recipe in the artifact.

    Args:
        path: of the artifact.
        request: what to score, with which settings and where.
        world: ranks that share the work; all return the same score.
        notify: called with a line if the time budget will be exceeded, and about a package.
        progress: called with (done, total).
        import_seconds: time already spent on imports, which counts against the budget.

    Raises:
        ArtifactError: the file is corrupt.
        DataError: shards or tokenizer are missing, or not those the model was trained with.
        ConfigError: a setting is out of range or has no part in the scoring mode, or the package is for something else.
    """
    request, world = request or EvaluationRequest(), world or World()
    device = choose_device(request.device, world.local_rank)
    clock = EvaluationClock(0.0, notify, import_seconds)
    with clock.part("decode"):
        model, recipe, metadata = load_gpt(path, device)
        size = Path(path).stat().st_size
    model.compute_dtype = choose_dtype(request.dtype or recipe.train.compute_dtype, device)
    model.kernels = best_kernels(device, model.compute_dtype, model.config.head_dim)
    settings, mode = request.resolve(recipe.evaluation)
    clock.budget = settings.budget_seconds
    text, text_warnings = _open_text(recipe, metadata, request)
    warnings = list(text_warnings)
    batch_tokens, length = request.batch_tokens or recipe.validation.batch_tokens, recipe.train.train_seq_len
    packaged: PackagedModel | None = None
    if request.package is not None:
        with clock.part("compile"):
            packaged = package.for_scoring(
                model,
                settings,
                mode,
                request.package,
                length=settings.seq_len or length,
                batch_tokens=batch_tokens,
                world=world,
                notify=notify,
            )
    with clock.part("score"):
        scored = evaluator.score(
            packaged or model,
            text,
            settings,
            mode,
            train_seq_len=length,
            device=device,
            batch_tokens=batch_tokens,
            world=world,
            progress=clock.watch(progress),
        )
    report = scored.report
    if report is not None:
        clock.reassign("score", "adapt", report.train_seconds)
        if not report.steps:
            warnings.append(f"{mode.name} trained on nothing: all of the text is in one chunk; use smaller chunks")
    if packaged is not None:
        notify(f"active: {packaged.diagnostics()}")
    if not clock.within_budget:
        warnings.append(f"the evaluation took {clock.total:,.0f} s, more than its budget of {clock.budget:,.0f} s")
    return Evaluation(
        scored.score,
        mode,
        settings,
        scored.method + (", n-gram logit bias" if settings.ngram.enabled else ""),
        dtype_name(model.compute_dtype),
        device.type,
        "" if report is None else report.diagnostics,
        size,
        isinstance(text.bytes, np.ndarray),
        clock.seconds,
        tuple(warnings),
    )


def _open_text(recipe: Recipe, metadata: Mapping[str, Any], request: EvaluationRequest) -> tuple[Text, tuple[str, ...]]:
    """Return the validation split of the request, or of the recipe, and warnings about shards and tokenizer."""
    name = request.tokenizer or recipe.data.tokenizer
    tokenizer = load_tokenizer(name)
    check_same_tokenizer(tokenizer, metadata.get("tokenizer"), name)
    dataset = _open_validation(request.data, recipe.data)
    warnings = (*check_tokenizer(dataset, tokenizer), *_model_warnings(metadata))
    max_tokens = recipe.validation.max_tokens if request.max_tokens is None else request.max_tokens
    tokens = dataset.validation_tokens(max_tokens + 1 if max_tokens else None)
    largest = int(tokens.max()) if len(tokens) else 0
    if largest >= recipe.model.vocab_size:
        raise DataError(
            f"the text has token {largest}, but the model's vocabulary is 0 to {recipe.model.vocab_size - 1}; score "
            "shards made with the model's own tokenizer"
        )
    counts = byte_counts(dataset.val, tokenizer, tokens, recipe.model.vocab_size)
    return Text(tokens, counts, tokenizer.bos_id), warnings


def _open_validation(data: str | None, recipe: DataSettings) -> Dataset:
    """Open a folder of shards, or validation shards by name or glob; None: those of the recipe."""
    if data is None and recipe.val:
        return open_dataset(val=recipe.val)
    path = recipe.path if data is None else data
    return open_dataset(path, splits=["val"]) if data is None or Path(path).is_dir() else open_dataset(val=path)


def _model_warnings(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings about assumptions that the score depends on and the file does not state."""
    if metadata.get("model") == "gpt":
        return _recipe_of(metadata)[1]
    return ("the export does not say how its model computes: it is scored as the challenge's baseline GPT",)
