"""Recipe, data and context, which the stages of a run share; a model of the recipe, and its score.

Work ─┬─► program.py: train, calibrate, export
      └─► new_model, score: validation while training, and the decoded artifact
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from birdie.gpt.model.attention_kernels import best_kernels
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_data import RunData
from birdie.gpt.score import evaluator
from birdie.gpt.score.evaluator import Scored
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.settings import EvaluationSettings
from birdie.gpt.score.window_losses import LanguageModel
from birdie.system import provenance
from birdie.system.callbacks import Progress
from birdie.system.context import Context
from birdie.system.device import choose_dtype


@dataclass(frozen=True, slots=True)
class Work:
    """A recipe, its data, and where it runs."""

    recipe: Recipe
    data: RunData
    context: Context

    def start(self) -> dict[str, Any]:
        """Return time, command and machine of a start of the run, as its folder keeps them."""
        device = self.context.device
        return {
            "starts": [datetime.now(UTC).isoformat(timespec="seconds")],
            "command": sys.argv,
            "recipe_digest": self.recipe.digest,
            "seed": self.recipe.train.seed,
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "machine": provenance.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "ranks": self.context.world.size,
        }

    def new_model(self, state: Mapping[str, Tensor] | None = None) -> GPT:
        """Return the recipe's GPT on its device, with the dtype and the kernels it computes with.

        Args:
            state: its weights; None: initial ones.
        """
        model = GPT(self.recipe.model)
        if state is not None:
            model.load_state_dict(state)
        return self.prepare(model.to(self.context.device))

    def prepare(self, model: GPT) -> GPT:
        """Let a model on the device compute with the recipe's dtype and the best kernels for it."""
        device = self.context.device
        model.compute_dtype = choose_dtype(self.recipe.train.compute_dtype, device)
        model.kernels = best_kernels(device, model.compute_dtype, self.recipe.model.head_dim)
        return model

    def score(
        self,
        model: GPT,
        settings: EvaluationSettings | None = None,
        mode: ScoringMode | None = None,
        *,
        packaged: LanguageModel | None = None,
        progress: Progress | None = None,
    ) -> Scored:
        """Score a model on the validation tokens; all ranks share the work and return the same score.

        Args:
            settings: of the evaluation; None: non-overlapping windows.
            mode: None: the one that the settings name.
            packaged: the same model with compiled code for its windows.
            progress: called with (done, total).
        """
        training = model.training
        model.eval()  # in training mode, QAT would score quantized weights
        try:
            return evaluator.score(
                model if packaged is None else packaged,
                self.data.text,
                settings,
                mode,
                train_seq_len=self.recipe.train.train_seq_len,
                batch_tokens=self.recipe.validation.batch_tokens,
                device=self.context.device,
                world=self.context.world,
                progress=progress,
            )
        finally:
            model.train(training)
