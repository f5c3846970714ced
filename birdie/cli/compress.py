"""`birdie compress`: any checkpoint into one small file."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from birdie.artifact.checkpoints import read_checkpoint, read_state_dict
from birdie.artifact.repack import save_object
from birdie.artifact.save import save
from birdie.cli.console import Json, compiling_told, emit, progress_bar, say, show, size
from birdie.cli.inspect import summary_table
from birdie.compress.rate.size import parse_size
from birdie.compress.registry import examples_of_words, is_spec
from birdie.errors import ConfigError
from birdie.run.calibration import artifact_metadata, calibrate_gpt, load_run_recipe
from birdie.run.recipe import CalibrationSettings, Recipe
from birdie.runtime.files import require_file


@compiling_told()
def compress(
    checkpoint: Annotated[Path, Parameter(help=".safetensors, .pt, .pth, .th, .bin, .ptz, or a Hugging Face folder.")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="The .birdie file to write.")],
    lossless: Annotated[
        bool, Parameter(negative=(), help="Keep every bit of every tensor, and all of a .ptz.")
    ] = False,
    budget: Annotated[str | None, Parameter(help="Bytes the file may take: 16MB, 16MiB, 250000.")] = None,
    bits: Annotated[float | None, Parameter(help="Bits per weight the file may take, all included.")] = None,
    quality: Annotated[float | None, Parameter(help="Nats of KL per token it may cost; needs --calibrate.")] = None,
    scheme: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="SPEC for all matrices, or PATTERN=SPEC, repeatable, first match wins. SPEC: "
            f"{', '.join(examples_of_words())}; or a scheme of an installed package (docs/schemes.md).",
        ),
    ] = None,
    coder: Annotated[Literal["max", "fast"], Parameter(help="Entropy coding: smallest, or quickest to load.")] = "max",
    calibrate: Annotated[
        Path | None,
        Parameter(help="A run folder or recipe whose model this is and whose training data tell what matters."),
    ] = None,
    calibration_data: Annotated[
        Literal["train", "own"] | None,
        Parameter(help="train: its training shards; own: sampled from the model. Default: the recipe's, else train."),
    ] = None,
    calibration_tokens: Annotated[
        int | None, Parameter(help="Tokens to calibrate on. Default: the recipe's, 65,536 unless it says otherwise.")
    ] = None,
    recalibrate: Annotated[
        bool, Parameter(negative=(), help="Calibrate once more on the quantized model, keep the better; --calibrate.")
    ] = False,
    refit: Annotated[
        int, Parameter(help="Steps that tune norms, gains and biases to what quantization left; needs --calibrate.")
    ] = 0,
    json: Json = False,
) -> None:
    """Compress a checkpoint into one .birdie file.

    Without a target every matrix becomes per-row int8; what is small is kept in 16 bits where that is close enough and
    losslessly elsewhere. With --budget or --bits the precision of each tensor is chosen so that the file just fits, or
    with --quality so that predictions change by so much and no more. With --calibrate what the loss minds sets every
    step, which makes files of the same quality far smaller.

    With --lossless a .ptz (the challenge's exports: torch.save under zlib, zstd, lzma or brotli) is kept whole, its
    integers as integers and all that stands beside them; `birdie decompress` gives it back.
    """
    require_file(output)
    if output.exists() and checkpoint.exists() and output.samefile(checkpoint):
        raise ConfigError(f"{output} is the checkpoint itself; give the .birdie file a name of its own")
    if lossless and (scheme or budget or bits or quality):
        raise ConfigError(
            "--lossless keeps every bit, so it takes no --budget, --bits, --quality or --scheme; drop one side"
        )
    if quality is not None and not quality > 0:
        raise ConfigError(
            f"--quality {quality} is not a positive number of nats of KL per token; write for example 0.01"
        )
    asked = {"--quality": quality is not None, "--recalibrate": recalibrate, "--refit": refit}
    if calibrate is None and (missing := [flag for flag, given in asked.items() if given]):
        raise ConfigError(f"{missing[0]} is judged on data; say what the model predicts: --calibrate RECIPE_OR_RUN")
    content, whole = read_checkpoint(checkpoint) if lossless else (read_state_dict(checkpoint), False)
    before = _bytes_on_disk(checkpoint)
    known, metadata = None, None
    if calibrate is not None and not whole:
        recipe = load_run_recipe(calibrate)
        settings = _settings(recipe, calibration_data, calibration_tokens)
        with progress_bar(f"calibrating on {calibration_source(recipe, settings)}", "tokens") as update:
            known = calibrate_gpt(recipe, content, settings, update).result
        metadata = artifact_metadata(recipe)
    with progress_bar(f"compressing {checkpoint.name}", "tensors") as update:
        if whole:
            summary = save_object(content, output, coder=coder, progress=update)
        else:
            summary = save(
                content,
                output,
                scheme=_schemes(scheme) if scheme else None,
                budget=None if budget is None else parse_size(budget),
                bits=bits,
                quality=quality,
                calibration=known,
                recalibrate=recalibrate,
                refit=refit,
                metadata=metadata,
                coder=coder,
                lossless=lossless,
                progress=update,
            )
    if json:
        emit(summary.to_json() | {"input_bytes": before, "saved_bytes": before - summary.bytes})
        return
    show(summary_table(summary))
    say(f"{size(before)} → {size(summary.bytes)} ({_change(before, summary.bytes, lossless)}): {output}")


def calibration_source(recipe: Recipe, settings: CalibrationSettings) -> str:
    """What a bar says calibration is made on."""
    return "the model's own samples" if settings.data == "own" else recipe.data.path


def _settings(recipe: Recipe, data: Literal["train", "own"] | None, tokens: int | None) -> CalibrationSettings:
    """The recipe's, with what the flags say; training data where nobody says anything."""
    own = recipe.calibration
    if data is None:
        data = "own" if own.data == "own" else "train"
    return dataclasses.replace(own, data=data, tokens=own.tokens if tokens is None else tokens)


def _change(before: int, after: int, lossless: bool) -> str:
    """What it was worth: bytes bought back for free, or how many times smaller what was quantized is."""
    if lossless and 0 < after <= before:
        return f"{size(before - after)}, {(before - after) / before:.1%}, back"
    ratio = before / after
    return f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / ratio:.2f}× larger"


def _schemes(texts: list[str]) -> str | list[tuple[str, str]]:
    """Return the one spec for all matrices, or the rules; a spec beside rules is the one for the rest."""
    rules = [("*", text) if is_spec(text) else _rule(text) for text in texts]
    return texts[0] if len(texts) == 1 and is_spec(texts[0]) else rules


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, spec = text.partition("=")
    if not equals or not pattern or not spec:
        raise ConfigError(f"--scheme {text!r} is not SPEC or PATTERN=SPEC; write for example --scheme '*.mlp.*=int6'")
    return pattern, spec


def _bytes_on_disk(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))
    return path.stat().st_size
