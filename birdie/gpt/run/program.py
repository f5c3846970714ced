"""The program that trains a recipe and writes its file, by calling birdie's core; callers log, save and stop.

    Work, GPT ─► training ─► follow: steps, validations ─► finish ─► calibrate ─► export ─► model.birdie

`birdie train` puts a folder, checkpoints and events around these functions (pipeline.py); a packed script and the
records' `train_gpt.py` the challenge's log (golf/script_main.py). So all of them take the same steps and write the same
file. A module that few recipes need is imported where the recipe asks for it: `golf/packed_script.py` packs it then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birdie.artifact import write_parameters
from birdie.compress import parse_size
from birdie.gpt.data.batches import Batches
from birdie.gpt.model.documents import DocumentFinder
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.events import Validated
from birdie.gpt.run.float_weights import Trained
from birdie.gpt.run.gpt_calibration import Calibration, artifact_metadata, calibrate_gpt
from birdie.gpt.run.onset import not_begun
from birdie.gpt.run.work import Work
from birdie.gpt.train.loop import Step
from birdie.gpt.train.training import Training
from birdie.system import provenance
from birdie.system.callbacks import Progress, in_lines

if TYPE_CHECKING:
    from birdie.gpt.train.training_checkpoint import TrainingCheckpoint
    from birdie.small import FakeQuantization, StoredTraining


@dataclass(frozen=True, slots=True)
class Resumable:
    """Nothing is in progress: whoever saves a run or stops it does so now."""

    step: Step


@contextmanager
def training(work: Work, model: GPT, saved: "TrainingCheckpoint | None" = None) -> Iterator[Training]:
    """Yield the training of a model by the recipe; at the end its loader ends and layers get their classes back.

    Args:
        saved: checkpoint that the run resumes.
    """
    recipe, context, settings = work.recipe, work.context, work.recipe.training
    batches = Batches(
        work.data.dataset.train,
        batch_tokens=settings.train_batch_tokens,
        seq_len=settings.train_seq_len,
        accumulation=settings.accumulation,
        rank=context.world.rank,
        world_size=context.world.size,
        order=recipe.data.order,
        seed=settings.seed,
        bos_id=recipe.model.bos_id,
        vocab_size=recipe.model.vocab_size,
        pin_memory=context.device.type == "cuda",
    )
    qat = _quantized_training(work, model) if recipe.qat.enabled else None
    packed = recipe.data.order == "packed"
    isolated = packed or (recipe.model.isolate_documents and model.kernels.varlen is not None)
    try:
        yield Training(
            model,
            batches,
            recipe.tables,
            context,
            hooks=[*([] if qat is None else [qat]), *model.step_hooks(context.notify)],
            documents=DocumentFinder(recipe.model.bos_id, context.device, packed=packed, notify=context.notify)
            if isolated
            else None,
            saved=saved,
        )
    finally:
        batches.close()
        if qat is not None:
            qat.remove()


def _quantized_training(work: Work, model: GPT) -> "FakeQuantization | StoredTraining":
    """Prepare a model for the recipe's quantization-aware training."""
    recipe, context = work.recipe, work.context
    if not recipe.qat.budget:
        return recipe.qat.prepare(model, context.notify)
    from birdie.small import BudgetFile, StoredTraining

    export = recipe.export
    assert export.budget is not None
    return StoredTraining(
        model,
        BudgetFile(parse_size(export.budget), export.pinned(), export.effort, metadata(work, Trained())),
        lambda state: calibrate_gpt(recipe, state, recipe.calibration, device=context.device, symmetries=False).result,
        settings=recipe.qat,
        context=context,
    )


def follow(work: Work, run: Training) -> Iterator[Step | Validated | Resumable]:
    """Train to the end, the wall-clock cap or a stop; yield steps and validations, which are outside the clock.

    The weights of the last step are validated always, those at step 0 and between as the recipe says. Warms up first,
    unless the caller has.
    """
    every = work.recipe.validation.every
    validated = None
    run.warm_up(work.context.progress)
    if run.number == 0 and every and not run.interrupted:
        validated = 0
        yield _validated(work, run)
    for step in run:
        yield step
        if not run.interrupted and (step.stopping or (every and step.number % every == 0)):
            validated = step.number
            yield _validated(work, run)
        yield Resumable(step)
    if not run.interrupted and validated != run.number:  # no step is left, and none was taken
        yield _validated(work, run)


def _validated(work: Work, run: Training) -> Validated:
    """Score the weights that would be exported now: the average, if there is one."""
    model = run.model
    assert isinstance(model, GPT)
    with run.average.in_model():
        score = work.score(model, progress=in_lines(work.context.notify, "validating", "tokens")).score
    return Validated(run.number, run.clock.ms, score, str(run.average))


def finish(work: Work, run: Training, last: Validated | None) -> Trained:
    """Put the average of the weights into the model, if there is one; log what was active and what never began."""
    recipe, model, notify = work.recipe, run.model, work.context.notify
    assert isinstance(model, GPT)
    weights, averaged = str(run.average), run.average.terms > 0
    for line in (*run.finish(), *model.diagnostics()):
        notify(f"active: {line}")
    lines = tuple(not_begun(recipe, run.number, run.began_ms, averaged=averaged))
    for line in lines:
        notify(f"never began: {line}")
    score, train_ms = (None, 0.0) if last is None else (last.score, last.train_ms)
    return Trained(run.number, weights, train_ms, score, lines)


def calibrate(work: Work, model: GPT, progress: Progress | None = None) -> Calibration | None:
    """Calibrate a model as the recipe says; None if it does not. For one rank.

    Args:
        progress: called with (done, total) tokens.
    """
    recipe, settings = work.recipe, work.recipe.calibration
    if settings.data == "none":
        return None
    state = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    calibration = calibrate_gpt(recipe, state, settings, progress=progress, device=work.context.device)
    source = "its own samples" if settings.data == "own" else "training data"
    reserved = f"; {recipe.reserved_seconds:.1f} s were reserved" if recipe.train.cap_ms else ""
    work.context.notify(
        f"calibrated on {calibration.tokens:,} tokens of {source} in {calibration.seconds:.1f} s{reserved}"
    )
    return calibration


def export(
    work: Work,
    model: GPT,
    trained: Trained,
    path: Path,
    *,
    budget: int | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> int:
    """Encode the weights by the recipe's schemes, or into `budget` bytes, write the file, and return its bytes.

    For one rank.

    Args:
        trained: facts about the weights, for the metadata.
        budget: maximum bytes of the file; tensors that the recipe pins keep their schemes.
        progress: called with (done, total).
    """
    recipe, known = work.recipe, None if calibration is None else calibration.result
    rules = list(recipe.export.schemes() if budget is None else recipe.export.pinned())
    if recipe.qat.enabled:
        from birdie.small import storage_rules

        rules = [*storage_rules(recipe.qat, model), *rules]
    return write_parameters(
        model,
        path,
        rules,
        known,
        budget=budget,
        effort=recipe.export.effort,
        metadata=metadata(work, trained),
        progress=progress,
    )


def metadata(work: Work, trained: Trained) -> dict[str, Any]:
    """Return the artifact's metadata: what scoring and sampling need, and the provenance of the weights."""
    return {
        **artifact_metadata(work.recipe, work.data.tokenizer),
        **({"weights": trained.weights} if work.recipe.average.kind != "none" else {}),
        "steps": trained.steps,
        "device": str(work.context.device),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }
