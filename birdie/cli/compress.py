"""`birdie compress`: compress a checkpoint (safetensors, torch.save, Hugging Face folder) into a .birdie file."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import (
    Json,
    Output,
    Overwrite,
    compiling_notice,
    plain,
    print_json,
    print_line,
    print_table,
    progress_bar,
    size,
)
from birdie.cli.inspect import grouped_table
from birdie.compress.rate.size import parse_size
from birdie.errors import BudgetError, ConfigError, OutputError
from birdie.runtime.callbacks import Progress
from birdie.runtime.outputs import require_output, require_writable

if TYPE_CHECKING:
    from birdie.artifact.folders import ModelFolder
    from birdie.artifact.summary import Summary
    from birdie.compress.calibration.result import CalibrationResult
    from birdie.run.recipe import CalibrationSettings, Recipe

GROUP = "Compress"
SPECS = (
    *("lossless", "int2", "int8", "sigma:0.3", "sdclip", "fp16", "bf16", "trellis:sigma=0.3", "feedback", "gptq"),
    *("ternary", "binary", "codebook:k=16", "rotation:bits=4", "lowrank:rank=4,base=int6", "spectral:auto,sigma=0.3"),
    "tucker:energy=0.99",
)
"""Specs that the help names: `examples_of_words()` of the registry, which needs torch."""
_MAX_LISTED = 20


@compiling_notice()
def command(
    checkpoint: Annotated[
        Path,
        Parameter(help="A safetensors file, what torch.save writes (also under gzip, …), or a Hugging Face folder."),
    ],
    /,
    *,
    output: Annotated[Output, Parameter(help="The .birdie file to write.")],
    overwrite: Overwrite = False,
    lossless: Annotated[
        bool, Parameter(negative=(), help="Keep everything: every bit of every tensor, and all other values.")
    ] = False,
    weights_only: Annotated[
        bool,
        Parameter(negative=(), help="Take the state dict alone, also with --lossless; skip objects of other programs."),
    ] = False,
    key: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="The dict of tensors that is meant, for example model.ema; repeatable: several become one file, with "
            "their keys as prefixes. Default: the usual layouts are understood.",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Of a folder: pattern of names of files to keep as they are, of any size."),
    ] = None,
    skip: Annotated[
        list[str] | None, Parameter(negative=(), help="Of a folder: pattern of names of files to leave out.")
    ] = None,
    budget: Annotated[str | None, Parameter(help="Largest size of the file: 16MB, 16MiB, 250000.")] = None,
    bits: Annotated[
        float | None, Parameter(help="Largest size of the file in bits per weight, everything included.")
    ] = None,
    quality: Annotated[
        float | None, Parameter(help="Largest KL divergence in nats per token; needs --calibrate.")
    ] = None,
    scheme: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="SPEC for all matrices, or PATTERN=SPEC, repeatable, first match wins. SPEC: "
            f"{', '.join(SPECS)}; or a scheme of an installed package (docs/schemes.md).",
        ),
    ] = None,
    coder: Annotated[
        Literal["max", "fast"], Parameter(help="Entropy coder: max is the smallest, fast loads fastest.")
    ] = "max",
    calibrate: Annotated[
        Path | None,
        Parameter(
            help="For a Hugging Face folder: a text (language models) or a folder of images (classifiers). For models "
            "of birdie: the run folder or recipe. Precision then follows the sensitivity of the loss. none: no inputs "
            "are made up for a folder, either."
        ),
    ] = None,
    calibration_data: Annotated[
        Literal["train", "own"] | None,
        Parameter(help="train: training shards; own: samples of the model. Default: the recipe's, else train."),
    ] = None,
    calibration_tokens: Annotated[
        int | None, Parameter(help="Number of calibration tokens. Default: the recipe's, else 65,536.")
    ] = None,
    refit: Annotated[
        int, Parameter(help="Steps that tune what is not encoded yet, after each of eight parts; needs --calibrate.")
    ] = 0,
    blockwise: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Calibrate one block of the model at a time, with the memory of a block; needs --calibrate.",
        ),
    ] = False,
    calibration_folder: Annotated[
        Path | None,
        Parameter(help="Folder for --blockwise, which keeps it: a calibration that was stopped resumes there."),
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "mps", "cpu"],
        Parameter(help="Of the calibration; auto takes a GPU if there is one."),
    ] = "cpu",
    json: Json = False,
) -> None:
    """Compress a checkpoint into one .birdie file.

    By default every matrix is quantized to eight bits over the range of each row, with error feedback; small tensors
    are stored in 16 bits where that is precise enough, else losslessly. --budget and --bits choose the precision of
    each tensor so that the file just fits; --quality chooses it so that the predictions change by no more than that.
    With --calibrate the quantization scales follow the sensitivity of the loss, which makes files of the same quality
    much smaller. For the folder of a model of transformers or diffusers inputs are made up instead (random tokens,
    noise images), if --budget or --bits is given and the model fits in memory; --calibrate none turns that off.

    --lossless keeps the complete object that torch.save wrote: weights, optimizer, step, arguments, and in a .ptz (the
    challenge's exports: torch.save under zlib, zstd, lzma or brotli) the quantized integers. `birdie decompress`
    restores it. All other settings, --key and --weights-only keep the state dict; the rest is listed as dropped. Sizes
    before and after are of what is kept. The last line names the dict of tensors that was taken, and the others.

    Of a Hugging Face folder (transformers, diffusers, peft, timm) the weights of all subfolders are compressed, and all
    small files, configuration, tokenizer and license are kept as well, and count. A table names every file that is left
    out; one that holds weights and is not understood is an error, unless --skip or --keep names it. `birdie decompress
    -o FOLDER` gives a folder that from_pretrained loads.
    """
    made_up = calibrate is None and not lossless and (budget is not None or bits is not None)
    calibrate = None if calibrate == Path("none") else calibrate
    if lossless and (scheme or budget or bits or quality or calibrate):
        raise ConfigError(
            "--lossless cannot be combined with --budget, --bits, --quality, --scheme or --calibrate; "
            "remove one or the other"
        )
    if quality is not None and not quality > 0:
        raise ConfigError(f"--quality is {quality}; give a positive KL divergence in nats per token, for example 0.01")
    with_data = {
        "--quality": quality is not None,
        "--refit": refit > 0,
        "--blockwise": blockwise,
        "--calibration-folder": calibration_folder is not None,
    }
    if calibrate is None and (flags := [flag for flag, active in with_data.items() if active]):
        raise ConfigError(f"{flags[0]} needs calibration data; add --calibrate TEXT_OR_RUN")
    if calibration_folder is not None and not blockwise:
        raise ConfigError("--calibration-folder is for a calibration block by block; add --blockwise")
    if blockwise and refit:
        raise ConfigError("--refit keeps the complete model in memory; drop it, or --blockwise")
    schemes = _schemes(scheme) if scheme else None
    import torch

    from birdie.artifact.checkpoints import files_of, header_of, read_checkpoint, read_weights
    from birdie.artifact.container import KIND
    from birdie.artifact.folders import read_folder
    from birdie.artifact.layouts import tensor_bytes
    from birdie.artifact.repack import save_object
    from birdie.artifact.save import save
    from birdie.compress.calibration.blockwise import work_folder
    from birdie.hub.calibration import TOKENS, calibrate_folder
    from birdie.hub.images import calibrate_on_images, images_in
    from birdie.hub.loading import is_of_library, require_transformers_folder
    from birdie.hub.made_up import calibrate_without_data, reason_of
    from birdie.run.calibration import artifact_metadata, calibrate_gpt, load_run_recipe, recipe_file
    from birdie.run.dataset import data_files
    from birdie.runtime.device import choose_device
    from birdie.runtime.distributed import process_group, world_from_environment
    from birdie.runtime.mapped import complete as complete_files
    from birdie.runtime.mapped import releasing

    if calibrate is not None and not calibrate.exists():
        raise ConfigError(f"--calibrate {calibrate} is neither a run folder nor a recipe nor a text: it does not exist")
    text = calibrate if calibrate is not None and calibrate.is_file() and calibrate.suffix != ".toml" else None
    images = [] if calibrate is None or recipe_file(calibrate).is_file() else images_in(calibrate)
    if text is not None or images:
        if calibration_data is not None:
            raise ConfigError("--calibration-data is for the calibration of a run, not on a text or images; drop it")
        require_transformers_folder(checkpoint)
    if calibrate is not None and not blockwise and world_from_environment().size > 1:
        raise ConfigError("ranks share a calibration block by block only; add --blockwise, or start one process")
    folder = None
    if checkpoint.is_dir():
        if key:
            raise ConfigError(f"--key is for the dicts in one file, and {checkpoint} is a folder; give the file in it")
        folder = read_folder(checkpoint, keep=keep or (), skip=skip or (), skip_objects=weights_only)
    elif keep or skip:
        raise ConfigError(f"--keep and --skip are for the files of a folder, and {checkpoint} is none; drop them")
    files = files_of(checkpoint) if folder is None else list(folder.sources)
    inputs = list(files)
    calibration_device = choose_device(device)
    if text is not None or images:
        inputs += [*([] if text is None else [text]), *images]
    elif calibrate is not None:
        recipe = load_run_recipe(calibrate)
        settings = _settings(recipe, calibration_data, calibration_tokens)
        inputs += [recipe_file(calibrate), *data_files(recipe.data, shards=settings.data == "train")]
    inputs += [] if folder is None else [checkpoint / name for name in folder.files]
    output = require_output(output, inputs, kind=KIND, overwrite=overwrite)
    complete = lossless and not weights_only and not key and not checkpoint.is_dir()
    content: Any = None
    dropped: dict[str, int] = {}
    taken: tuple[str, ...] = ()
    others: dict[str, int] = {}
    if folder is not None:
        content, dropped = folder.tensors, {name: count for name, (count, _) in folder.left_out.items()}
        taken = folder.taken
        if weights_only:
            dropped |= {name: len(data) for name, data in folder.files.items()}
    elif complete:
        content = read_checkpoint(checkpoint)
    else:
        choice = read_weights(checkpoint, keys=key or (), skip_objects=weights_only)
        content, dropped, taken, others = choice.state, choice.dropped, choice.taken, choice.others
    file_bytes = sum(file.stat().st_size for file in files)
    # a packed file (.ptz) may have fewer bytes than its tensors
    everything = complete or (lossless and folder is not None and not weights_only)
    input_bytes = file_bytes if everything else min(file_bytes, tensor_bytes(content))
    calibration: CalibrationResult | None = None
    note: str | None = None
    kept = None if folder is None or weights_only else folder.files
    if folder is not None:
        metadata: dict[str, Any] | None = folder.metadata
    else:
        header = header_of(checkpoint)
        metadata = {"headers": {"": header}} if header else None
    kept_bytes = sum(map(len, (kept or {}).values()))
    input_bytes, file_bytes = input_bytes + kept_bytes, file_bytes + kept_bytes
    require_writable(output.parent)  # before a calibration
    with (
        process_group(torch.device("cpu")) as world,
        complete_files(files),
        releasing(files),
        work_folder(output, calibration_folder or blockwise, world) as work,
    ):

        def bar(text: str, unit: str) -> AbstractContextManager[Progress | None]:
            return progress_bar(text, unit) if world.is_main else nullcontext()

        if text is not None:
            tokens = TOKENS if calibration_tokens is None else calibration_tokens
            with bar(f"calibrating on {text.name}", "tokens") as update:
                calibration = calibrate_folder(
                    checkpoint,
                    content,
                    text,
                    tokens=tokens,
                    device=calibration_device,
                    work=work,
                    world=world,
                    progress=update,
                )
        elif images:
            with bar(f"calibrating on {len(images):,} images", "images") as update:
                calibration = calibrate_on_images(
                    checkpoint, content, images, device=calibration_device, work=work, world=world, progress=update
                )
        elif calibrate is not None:
            with bar(f"calibrating on {calibration_source(recipe, settings)}", "tokens") as update:
                calibration = calibrate_gpt(
                    recipe, content, settings, update, device=calibration_device, folder=work, world=world
                ).result
            metadata = (metadata or {}) | artifact_metadata(recipe)
        elif made_up and world.size == 1 and is_of_library(checkpoint):
            with bar("calibrating on made-up inputs", "batches") as update:
                try:
                    calibration, parts = calibrate_without_data(
                        checkpoint, content, device=calibration_device, progress=update
                    )
                    note = "calibrated on made-up inputs; --calibrate with a text or images is better"
                    note += "".join(f"; not calibrated: {part} ({reason})" for part, reason in parts.items())
                except Exception as error:  # of the model's own code, too: nobody asked for this calibration
                    note = f"not calibrated: {reason_of(error)}"
        with bar(f"compressing {checkpoint.name}", "tensors") as update:
            if complete:
                summary = save_object(
                    content,
                    output,
                    coder=coder,
                    overwrite=overwrite,
                    metadata=metadata,
                    progress=update,
                    world=world,
                )
            else:

                def saved(calibration: "CalibrationResult | None", overwrite: bool) -> "Summary":
                    return save(
                        content,
                        output,
                        scheme=schemes,
                        budget=None if budget is None else parse_size(budget),
                        bits=bits,
                        quality=quality,
                        calibration=calibration,
                        refit=refit,
                        metadata=metadata,
                        files=kept,
                        coder=coder,
                        lossless=lossless,
                        overwrite=overwrite,
                        progress=update,
                        world=world,
                    )

                try:
                    summary = saved(calibration, overwrite)
                except Exception as error:
                    if not made_up or calibration is None or isinstance(error, BudgetError | OutputError):
                        raise
                    note = f"not calibrated: {reason_of(error)}"  # measuring runs the model's own code as well
                    summary = saved(None, True)
        if not world.is_main:
            return
    if json:
        sizes = {"input_bytes": input_bytes, "file_bytes": file_bytes, "saved_bytes": input_bytes - summary.bytes}
        choices = {"dropped": dropped, "taken": list(taken), "others": others}
        if folder is not None:
            choices["compressed"] = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
            choices["left_out"] = {
                name: {"bytes": count, "reason": reason} for name, (count, reason) in folder.left_out.items()
            }
        print_json(summary.to_json() | sizes | choices | {"calibration": note})
        return
    print_table(grouped_table(summary))
    if input_bytes != file_bytes:
        print_line(f"input: {size(input_bytes)} of weights in a file of {size(file_bytes)}")
    if folder is not None:
        print_table(_account(folder, checkpoint, kept))
    elif dropped:
        print_line(f"dropped: {_listed(dropped)}")
    if note is not None:
        print_line(note)
    if summary.uncalibrated:
        print_line(f"no data reached: {_listed(dict.fromkeys(summary.uncalibrated, 0))}")
    print_line(
        f"{size(input_bytes)} → {size(summary.bytes)} ({_change(input_bytes, summary.bytes, lossless)}): {output}"
    )
    print_line(f"list its tensors: birdie inspect {output}")
    if taken or others:
        names = ", ".join(plain(name).plain[:80] for name in taken) or "the tensors beside them"
        print_line(f"taken: {names}" + (f"; others, for --key: {_listed(others)}" if others else ""))


def calibration_source(recipe: "Recipe", settings: "CalibrationSettings") -> str:
    """Return the name of the calibration data for the progress bar."""
    return "samples of the model" if settings.data == "own" else recipe.data.path


def _settings(recipe: "Recipe", data: Literal["train", "own"] | None, tokens: int | None) -> "CalibrationSettings":
    """Return the calibration settings: flags, else those of the recipe; training data if neither names a source."""
    settings = recipe.calibration
    if data is None:
        data = "own" if settings.data == "own" else "train"
    return dataclasses.replace(settings, data=data, tokens=settings.tokens if tokens is None else tokens)


def _account(folder: "ModelFolder", checkpoint: Path, kept: Mapping[str, bytes] | None) -> Table:
    """Return the table of what became of each file of a folder; small files that are kept share a row."""
    from birdie.artifact.folder_scan import SMALL

    table = Table(title=f"files of {plain(str(checkpoint)).plain}", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("file", overflow="fold")
    rows = [("compressed", path.stat().st_size, path.relative_to(checkpoint).as_posix()) for path in folder.sources]
    if kept:
        total = sum(map(len, kept.values()))
        rows.append(("kept", total, f"{len(kept):,} in all: any of up to {SMALL:,} bytes, configuration, --keep"))
    left_out = dict(folder.left_out)
    if kept is None:
        left_out |= {name: (len(data), "--weights-only") for name, data in folder.files.items()}
    dropped = sorted(left_out.items(), key=lambda item: -item[1][0])
    rows += [("left out", count, f"{name}: {reason}") for name, (count, reason) in dropped[:_MAX_LISTED]]
    if rest := dropped[_MAX_LISTED:]:
        rows.append(("left out", sum(count for _, (count, _) in rest), f"{len(rest):,} more, which --json names"))
    for what, count, text in rows:
        table.add_row(what, f"{count:,}", plain(text))
    return table


def _listed(dropped: Mapping[str, int]) -> str:
    """Return the names of what is dropped, largest first, with the bytes of the tensors there."""
    names = sorted(dropped, key=lambda name: -dropped[name])
    texts = [plain(name).plain[:80] + (f" {size(dropped[name])}" if dropped[name] else "") for name in names]
    return ", ".join(texts[:_MAX_LISTED]) + (f" and {len(texts) - _MAX_LISTED:,} more" * (len(texts) > _MAX_LISTED))


def _change(input_bytes: int, output_bytes: int, lossless: bool) -> str:
    """Return the bytes saved (lossless), or the compression ratio."""
    if lossless and 0 < output_bytes <= input_bytes:
        saved = input_bytes - output_bytes
        return f"{size(saved)}, {saved / input_bytes:.1%} saved"
    if not input_bytes:
        return "its tensors are empty"
    ratio = input_bytes / output_bytes
    return f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / ratio:.2f}× larger"


def _schemes(texts: list[str]) -> str | list[tuple[str, str]]:
    """Return a spec for all matrices, or rules (pattern, spec); a spec without a pattern is the rule for the rest."""
    from birdie.compress.registry import is_spec

    general = [text for text in texts if is_spec(text)]
    if len(general) > 1:
        raise ConfigError(
            f"--scheme {general[0]} and --scheme {general[1]} are both for all matrices; keep one of them, or write "
            f"--scheme 'PATTERN={general[0]}'"
        )
    if len(texts) == 1 and general:
        return general[0]
    return [_rule(text) for text in texts if text not in general] + [("*", text) for text in general]


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, spec = text.partition("=")
    if not equals or ":" in pattern:
        from birdie.compress.registry import parse_spec

        parse_spec(text)  # names the nearest spec
    if not pattern or not spec:
        raise ConfigError(f"--scheme {text!r} is not SPEC or PATTERN=SPEC; write for example --scheme '*.mlp.*=int6'")
    return pattern, spec
