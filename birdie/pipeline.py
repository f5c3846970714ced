"""The road as functions: shards → training run → artifact → score. No printing: callers consume events.

    Run(recipe, folder) ── train() ──► Started, Step, Validated, Saved … ──► model
            │                                                                  │
            └── export(path) ──────────────► model.birdie ◄────────────────────┘
                                                  │
                                        evaluate(path) ──► Evaluation          (only what was decoded is scored)

A run folder holds `recipe.toml`, `checkpoints/` and, once exported, `model.birdie`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie import artifact, provenance
from birdie.compress.size import parse_size
from birdie.data.batches import Batches
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.device import choose_device, choose_dtype
from birdie.distributed import World
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.files import require_writable, write_bytes
from birdie.model.gpt import GPT
from birdie.recipe import DataSettings, Recipe
from birdie.score.bpb import Score, bits_per_byte
from birdie.train.checkpoint import POINTER, Checkpoint, load_checkpoint
from birdie.train.loop import Fit, Step, fit

Notify = Callable[[str], None]
Progress = Callable[[float, float | None], None]


def _silent(_: str) -> None:
    return None


def _unseen(_done: float, _total: float | None) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Started:
    """The facts of a run, known before its first step."""

    parameters: int
    world_size: int
    micro_steps: int
    dataset: str
    train_shards: int
    train_tokens: int
    val_tokens: int
    device: str
    compute_dtype: str
    newton_schulz_dtype: str
    resumed_at: int


@dataclass(frozen=True, slots=True)
class Validated:
    """A score of the float model, taken outside the training clock."""

    step: int
    train_ms: float
    score: Score


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run was asked to stop; what it had is in the checkpoint saved just before."""

    step: int
    path: Path


Event = Started | Step | Validated | Saved | Interrupted


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decoded artifact's score and where the time went.

    Attributes:
        seconds: decode, compile, score, adapt.
        warnings: doubts about shards or tokenizer that did not stop the scoring.
    """

    score: Score
    bytes: int
    seconds: dict[str, float]
    warnings: tuple[str, ...]


class Run:
    """A training run on this rank: its data, its model and the folder it leaves behind.

    Args:
        recipe: every setting.
        folder: the run folder; made if need be.
        world: this rank among its peers.
        notify: gets one-line remarks (a fallback taken, a doubt about the data).

    Raises:
        DataError, ConfigError: shards, tokenizer and settings do not fit together.
        OutputError: the folder cannot be written.
    """

    def __init__(self, recipe: Recipe, folder: Path, *, world: World | None = None, notify: Notify = _silent) -> None:
        self.recipe, self.folder, self.notify = recipe, Path(folder), notify
        self.world = world or World()
        self.device = choose_device(recipe.device, self.world.local_rank)
        self.dataset = _open(recipe.data)
        self.tokenizer = load_tokenizer(recipe.data.tokenizer)
        _check_vocabulary(recipe, self.tokenizer)
        for warning in check_tokenizer(self.dataset, self.tokenizer):
            notify(warning)
        self.val_tokens = _validation_stream(self.dataset, recipe)
        self.table = self.tokenizer.byte_table(recipe.model.vocab_size)
        if self.world.is_main:
            require_writable(self.folder)
            write_bytes(self.folder / "recipe.toml", recipe.to_toml().encode())
        torch.manual_seed(recipe.train.seed)
        self.model = GPT(recipe.model).to(self.device)
        self.model.compute_dtype = choose_dtype(recipe.train.compute_dtype, self.device)
        self.steps = 0

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints lie."""
        return self.folder / "checkpoints"

    def train(
        self, *, resume: bool = False, stop: Callable[[], bool] = lambda: False, on_priming: Progress = _unseen
    ) -> Iterator[Event]:
        """Train to the last step, the wall-clock cap, or until `stop()`; yields what happens as it happens.

        Args:
            resume: go on from the latest checkpoint of the folder if there is one.
            stop: asked after every step; True on any rank ends the run on all, after a checkpoint.
            on_priming: called with (done, total) after each priming step.

        Raises:
            ConfigError: the loss is no longer finite, or the ranks do not divide the batch.
            WeightsError: the checkpoint does not fit the model.
        """
        settings = self.recipe.train
        batches = Batches(
            self.dataset.train,
            batch_tokens=settings.train_batch_tokens,
            seq_len=settings.train_seq_len,
            accumulation=settings.accumulation,
            rank=self.world.rank,
            world_size=self.world.size,
            order=self.recipe.data.order,
            seed=settings.seed,
            pin_memory=self.device.type == "cuda",
        )
        try:
            going = fit(
                self.model,
                batches,
                settings,
                self.recipe.optimizer,
                world=self.world,
                device=self.device,
                resume=self._checkpoint() if resume else None,
                notify=self.notify,
                on_priming=on_priming,
            )
            yield from self._follow(going, stop)
        finally:
            batches.close()

    def _follow(self, going: Fit, stop: Callable[[], bool]) -> Iterator[Event]:
        self.steps = going.step
        yield self._started(going)
        save_every, validate_every = self.recipe.run.checkpoint_every, self.recipe.validation.every
        going.prime()
        if going.step == 0 and validate_every:
            yield Validated(0, 0.0, self.score(self.model))
        validated = None
        for step in going:
            self.steps = step.number
            yield step
            if stop():
                going.request_stop()
            if step.stopping or (save_every and step.number % save_every == 0):
                yield Saved(step.number, going.save(self.checkpoints))
            if going.interrupted:
                yield Interrupted(step.number, self.checkpoints)
                return
            if step.stopping or (validate_every and step.number % validate_every == 0):
                validated = step.number
                yield Validated(step.number, step.train_ms, self.score(self.model))
        if validated != going.step:  # resumed after the last step
            yield Validated(going.step, going.train_ms, self.score(self.model))

    def _checkpoint(self) -> Checkpoint | None:
        if (self.checkpoints / POINTER).is_file():
            return load_checkpoint(self.checkpoints)
        self.notify(f"there is no checkpoint in {self.checkpoints} yet; starting from the beginning")
        return None

    def _started(self, going: Fit) -> Started:
        return Started(
            parameters=sum(p.numel() for p in self.model.parameters()),
            world_size=self.world.size,
            micro_steps=self.recipe.train.accumulation // self.world.size,
            dataset=Path(self.recipe.data.path).name,
            train_shards=len(self.dataset.train),
            train_tokens=self.dataset.train_tokens,
            val_tokens=len(self.val_tokens),
            device=str(self.device),
            compute_dtype=going.facts["compute_dtype"],
            newton_schulz_dtype=going.facts["newton_schulz_dtype"],
            resumed_at=going.step,
        )

    def score(self, model: GPT) -> Score:
        """Score `model` on this run's validation stream; all ranks share the work and get the answer."""
        return bits_per_byte(
            model,
            self.val_tokens,
            self.table,
            seq_len=self.recipe.train.train_seq_len,
            batch_tokens=self.recipe.validation.batch_tokens,
            bos_id=self.tokenizer.bos_id,
            device=self.device,
            world=self.world,
        )

    def model_of(self, state: Mapping[str, Tensor]) -> GPT:
        """A second model of this run's shape, device and precision that holds the weights `state`."""
        model = GPT(self.recipe.model)
        model.load_state_dict(state)
        model.compute_dtype = self.model.compute_dtype
        return model.to(self.device)

    def export(
        self, path: Path | None = None, *, budget: int | None = None, progress: Progress | None = None
    ) -> artifact.Summary:
        """Compress the trained weights into one file: the recipe's schemes, or what fits `budget` bytes.

        Rank 0 writes; call it there alone.
        """
        settings = self.recipe.export
        if budget is None and settings.budget is not None:
            budget = parse_size(settings.budget)
        return artifact.save(
            self.model,
            path or self.folder / "model.birdie",
            scheme=None if budget is not None else settings.schemes(),
            budget=budget,
            coder=settings.coder,
            metadata=self.metadata(),
            progress=progress,
        )

    def metadata(self) -> dict[str, Any]:
        """What the artifact must say so that it can be scored and sampled, and where it came from."""
        tokenizer = {
            "kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "sha256": self.tokenizer.digest,
        }
        return {
            "model": "gpt",
            "recipe": self.recipe.to_dict(),
            "tokenizer": tokenizer,
            "steps": self.steps,
            "device": str(self.device),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
        }


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer} has {tokenizer.vocab_size} pieces but the model's vocab_size is "
            f"{recipe.model.vocab_size}; set --model.vocab-size {tokenizer.vocab_size}"
        )


def _open(data: DataSettings) -> Dataset:
    if data.train or data.val:
        return open_dataset(train=data.train, val=data.val)
    return open_dataset(data.path)


def _open_validation(given: str | None, data: DataSettings) -> Dataset:
    """What to score on: a folder of shards, or validation shards by name or glob; left out, that of the training."""
    if given is None:
        return _open(data)
    return open_dataset(given) if Path(given).is_dir() else open_dataset(val=given)


def _validation_stream(dataset: Dataset, recipe: Recipe) -> NDArray[np.uint16]:
    tokens = dataset.validation_tokens()
    limit = recipe.validation.max_tokens
    return tokens[: limit + 1] if limit else tokens


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, Recipe, Mapping[str, Any]]:
    """Rebuild the model an artifact holds: (model in evaluation mode, the recipe it was trained by, metadata).

    Raises:
        ArtifactError: the file is corrupt, or is not a birdie GPT.
    """
    summary = artifact.inspect(path)
    metadata = summary.metadata
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


def evaluate(
    path: Path | str,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    batch_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    world: World | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode an artifact and score it; what is left out comes from the recipe in the artifact.

    Raises:
        ArtifactError: the file is corrupt.
        DataError: shards or tokenizer are missing, or not those the model was trained with.
    """
    world = world or World()
    place = choose_device(device, world.local_rank)
    began = time.perf_counter()
    model, recipe, metadata = load_gpt(path, place)
    model.compute_dtype = choose_dtype(dtype, place)
    decode_s = time.perf_counter() - began
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata["tokenizer"], tokenizer or recipe.data.tokenizer)
    dataset = _open_validation(data, recipe.data)
    warnings = tuple(check_tokenizer(dataset, pieces))
    limit = recipe.validation.max_tokens if max_tokens is None else max_tokens
    tokens = dataset.validation_tokens()
    seq_len = seq_len or recipe.train.train_seq_len
    score = bits_per_byte(
        model,
        tokens[: limit + 1] if limit else tokens,
        pieces.byte_table(recipe.model.vocab_size),
        seq_len=seq_len,
        batch_tokens=batch_tokens or recipe.validation.batch_tokens,
        bos_id=pieces.bos_id,
        device=place,
        world=world,
        progress=progress,
    )
    seconds = {"decode": decode_s, "compile": 0.0, "score": score.seconds, "adapt": 0.0}
    return Evaluation(score, Path(path).stat().st_size, seconds, warnings)


def check_same_tokenizer(tokenizer: Tokenizer, trained_with: Mapping[str, Any], given: str) -> None:
    """Refuse a tokenizer other than the one in the artifact's metadata: its ids would mean other text.

    Raises:
        DataError: the two differ.
    """
    if tokenizer.digest != trained_with["sha256"]:
        raise DataError(
            f"the model was trained with tokenizer {trained_with['kind']} {trained_with['sha256'][:12]}, "
            f"but {given} is {tokenizer.kind} {tokenizer.digest[:12]}; give the one it was trained with (--tokenizer)"
        )
