"""Temperature of the decoded model, fitted on training tokens and stored in the artifact's recipe.

    model.birdie ─► decoded GPT ─► logits of training tokens ─► T of the lowest loss ─► model.birdie, same weights

A model whose weights were quantized, or that trained for short, is often too unsure or too sure of itself. One number
that divides the logits repairs that. It is fitted on text that the model was trained on, never on what is scored
(openai/parameter-golf, March 2026, ternary record: T = 0.90).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Reader
from birdie.artifact.inspect import inspect
from birdie.run.calibration import Batch, training_sequences
from birdie.run.dataset import open_shards
from birdie.run.evaluation import load_gpt
from birdie.run.recipe import Recipe
from birdie.score.settings import EvaluationSettings

RESERVED = 16
"""Bytes of a budget that the fitted number may take in the file's header."""
_TOKENS = 65_536
_STEPS = 8  # of Newton's method; it converges in four or five
_RANGE = 0.25, 4.0  # of 1 / T


def store_temperature(path: Path, recipe: Recipe, device: torch.device) -> tuple[float, float]:
    """Fit the temperature of an artifact on training tokens, and write it into the artifact's recipe.

    Returns:
        the temperature, rounded to four digits, and the difference that it makes to the loss of these tokens, in nats.
    """
    model, _, _ = load_gpt(path, device)
    batches = training_sequences(open_shards(recipe.data), recipe.train.train_seq_len, _TOKENS)
    temperature, gain = fit_temperature(lambda ids: model(ids.to(device)), batches)
    with Reader(path) as reader:
        fields = file_metadata.parse(bytes(reader.metadata), reader.where)
        entries = [reader.read(name) for name in reader.entries]
    fields["metadata"]["recipe"]["evaluation"]["temperature"] = temperature
    container.write(path, entries, file_metadata.to_bytes(**fields))
    return temperature, gain


def fit_temperature(logits_of: Callable[[Tensor], Tensor], batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the temperature of the lowest loss on (ids, targets), and the mean loss with it minus that without it.

    The loss is convex in 1 / T, so Newton's method has one end.

    Args:
        logits_of: token ids (batch, length) → logits (batch, length, vocabulary).
    """
    beta = 1.0
    with torch.no_grad():
        first = _moments(logits_of, batches, beta)[0]
        for _ in range(_STEPS):
            _, slope, curvature = _moments(logits_of, batches, beta)
            step = slope / max(curvature, 1e-12)
            beta = min(max(beta - step, _RANGE[0]), _RANGE[1])
            if abs(step) < 1e-5:
                break
        temperature = round(1 / beta, 4)
        return temperature, _moments(logits_of, batches, 1 / temperature)[0] - first


def stored_evaluation(path: Path, settings: EvaluationSettings) -> EvaluationSettings:
    """Return `settings` at the temperature that an artifact's recipe holds."""
    recipe: Any = inspect(path).metadata["recipe"]
    return replace(settings, temperature=recipe["evaluation"]["temperature"])


def _moments(
    logits_of: Callable[[Tensor], Tensor], batches: Sequence[Batch], beta: float
) -> tuple[float, float, float]:
    """Return the mean loss at 1 / T = `beta`, and its first two derivatives: of softmax, a mean and a variance."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for ids, targets in batches:
        logits = logits_of(ids).flatten(0, -2).float()
        chosen = logits.gather(1, targets.to(logits.device).reshape(-1, 1)).squeeze(1)
        scaled = beta * logits
        probabilities = scaled.softmax(1)
        mean = (probabilities * logits).sum(1)
        variance = (probabilities * (logits - mean[:, None]) ** 2).sum(1)
        loss = scaled.logsumexp(1) - beta * chosen
        sums += torch.stack([loss.double().sum(), (mean - chosen).double().sum(), variance.double().sum()]).cpu()
        count += len(chosen)
    mean_loss, slope, curvature = (float(value) / count for value in sums)
    return mean_loss, slope, curvature
