"""Artifacts and submission folders to audit."""

import json
from pathlib import Path
from typing import Any

import torch

import birdie.artifact.saving
from birdie.gpt.data.tokenizer import ByteTokenizer, Tokenizer
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.settings import EvaluationSettings
from birdie.gpt.train.settings import TrainSettings
from tests.golf.audit.audited_logs import baseline

ROOT = Path(__file__).resolve().parents[3]


def save_artifact(
    path: Path,
    data: DataSettings,
    tokenizer: Tokenizer | None = None,
    **evaluation: Any,
) -> Path:
    """Save a .birdie file as `birdie train` leaves it, of a model that was never trained."""
    torch.manual_seed(0)
    tokenizer = tokenizer or ByteTokenizer()
    recipe = Recipe(
        data=data,
        model=GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=16, num_heads=1, num_kv_heads=1),
        train=TrainSettings(train_seq_len=24, train_batch_tokens=24, accumulation=1),
        evaluation=EvaluationSettings(**{"ttt_lora": LoRAMode(chunk=8, rank=4, lr=0.01), **evaluation}),
    )
    about = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest}
    metadata = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": about, "steps": 1}
    birdie.artifact.saving.save(GPT(recipe.model), path, effort="fast", metadata=metadata)
    return path


def write_submission(folder: Path, **changes: object) -> Path:
    """Write a folder of three seeds that breaks no rule; `changes` go into its submission.json."""
    folder.mkdir(exist_ok=True)
    scores = []
    for seed, loss in ((1337, 2.0727), (42, 2.0731), (7, 2.0725)):
        text = baseline(seed=seed, loss=loss, code=137)
        (folder / f"train_seed{seed}.log").write_text(text)
        scores.append(float(text.rsplit("val_bpb:", 1)[1]))
    mean = sum(scores) / 3
    claim = {"val_bpb": mean, "bytes_total": 15_815_984, "seeds": [1337, 42, 7], **changes}
    (folder / "submission.json").write_text(json.dumps(claim))
    (folder / "train_gpt.py").write_text(baseline().split("====", 1)[0].split("\n", 1)[1])
    return folder
