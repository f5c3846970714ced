"""From an artifact to a score: the model is rebuilt from the file's bytes alone and scored in bits per byte.

    model.birdie ── load_gpt ──► GPT, recipe ── evaluate(path, request) ──► Evaluation

Only what was decoded is scored, and scoring opens validation shards alone. An int8 export of the challenge that was
compressed as a file (repack) can be scored as well: it is dequantized as the challenge does it, the model's shape is
read off its tensors, and the other settings are the challenge's defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birdie.artifact import inspect, load, load_object
from birdie.checkpoints import dequantize
from birdie.compress import fill
from birdie.gpt.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.gpt.data.tokenizer import Tokenizer, check_same_tokenizer, load_tokenizer
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.infer_config import infer_config
from birdie.gpt.model.stored_shape import require_shape
from birdie.gpt.run.gpt_file import recipe_of, require_gpt
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_data import RunData, validation_text
from birdie.gpt.run.work import Work
from birdie.gpt.score import package
from birdie.gpt.score.accumulator import Score, Text
from birdie.gpt.score.clock import EvaluationClock
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.package import PackagedModel
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings
from birdie.system.callbacks import Notify, Progress, no_message
from birdie.system.context import Context
from birdie.system.device import choose_device, dtype_name
from birdie.system.distributed import World


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Score of a decoded artifact, how it was computed, and where the time went.

    Attributes:
        score: bits per byte, loss and counts.
        mode: the scoring mode, with its settings.
        settings: of the evaluation: those of the artifact's recipe with the changes of the request.
        method: what the mode did, in a few words.
        diagnostics: what test-time training did, in one line; empty without it.
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
    recipe = require_gpt(summary.metadata, {row.name: row.shape for row in summary.tensors}, path)
    model = GPT(recipe.model)
    load(path, into=model)
    return model.to(device).eval(), recipe, summary.metadata


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
    recipe = _changed(recipe, request)
    settings, mode = request.resolve(recipe.evaluation)
    clock.budget = settings.budget_seconds
    dataset, tokenizer = open_validation(recipe, request.data)
    text, warnings = checked_text(recipe, metadata, dataset, tokenizer)
    work = Work(recipe, RunData(dataset, tokenizer, text), Context(device, world, notify))
    work.prepare(model)
    packaged: PackagedModel | None = None
    if request.package is not None:
        with clock.part("compile"):
            packaged = package.for_scoring(
                model,
                settings,
                mode,
                request.package,
                length=settings.seq_len or recipe.train.train_seq_len,
                batch_tokens=recipe.validation.batch_tokens,
                world=world,
                notify=notify,
            )
    with clock.part("score"):
        scored = work.score(model, settings, mode, packaged=packaged, progress=clock.watch(progress))
    report = scored.report
    if report is not None:
        clock.reassign("score", "adapt", report.train_seconds)
    if packaged is not None:
        notify(f"active: {packaged.diagnostics()}")
    warnings += scored.warnings(mode, clock.total, clock.budget)
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
        warnings,
    )


def _changed(recipe: Recipe, request: EvaluationRequest) -> Recipe:
    """Return the recipe with what the request says about text, batches and numbers."""
    numbers = {"batch_tokens": request.batch_tokens, "max_tokens": request.max_tokens}
    validation: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    train: dict[str, Any] = {} if request.dtype is None else {"compute_dtype": request.dtype}
    return replace(
        recipe,
        data=replace(recipe.data, tokenizer=request.tokenizer or recipe.data.tokenizer),
        train=replace(recipe.train, **train),
        validation=replace(recipe.validation, **validation),
    )


def open_validation(recipe: Recipe, data: str | None) -> tuple[Dataset, Tokenizer]:
    """Open the tokenizer of a recipe, and validation shards: a folder, a name or a glob; None: those of the recipe."""
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    if data is None and recipe.data.val:
        return open_dataset(val=recipe.data.val), tokenizer
    path = recipe.data.path if data is None else data
    if data is None or Path(path).is_dir():
        return open_dataset(path, splits=["val"]), tokenizer
    return open_dataset(val=path), tokenizer


def checked_text(
    recipe: Recipe, metadata: Mapping[str, Any], dataset: Dataset, tokenizer: Tokenizer
) -> tuple[Text, tuple[str, ...]]:
    """Return the text that a model of this recipe is scored on, and warnings about shards, tokenizer and recipe."""
    check_same_tokenizer(tokenizer, metadata.get("tokenizer"), recipe.data.tokenizer)
    warnings = (*check_tokenizer(dataset, tokenizer), *_model_warnings(metadata))
    return validation_text(recipe, dataset, tokenizer), warnings


def _model_warnings(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings about assumptions that the score depends on and the file does not state."""
    if metadata.get("model") == "gpt":
        return recipe_of(metadata)[1]
    return ("the export does not say how its model computes: it is scored as the challenge's baseline GPT",)
