"""`birdie compress`: compress a checkpoint (safetensors, torch.save, ONNX, Hugging Face folder) into a .birdie file."""

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from birdie.cli.account import show_left_out, show_taken
from birdie.cli.chains import compress_checkpoints, is_chain
from birdie.cli.compress_flags import INPUTS, CompressFlags
from birdie.cli.console import (
    FLAT,
    plain,
    print_json,
    print_line,
    print_table,
    progress_bar,
    seconds,
    size,
)
from birdie.cli.curve import kept_in, log_point
from birdie.cli.dry_run import show_forecast
from birdie.cli.inspect import grouped_table
from birdie.entropy import LARGE
from birdie.errors import BudgetError, ConfigError, OutputError
from birdie.system.callbacks import Progress
from birdie.system.files import write_bytes
from birdie.system.outputs import require_file_name, require_output, require_writable
from birdie.system.own_code import imported

if TYPE_CHECKING:
    from birdie.artifact import Curve, Summary
    from birdie.checkpoints import Checkpoint
    from birdie.compress import CalibrationResult
    from birdie.gpt.run.calibrating import OnOwnModel

GROUP = "Compress"


def command(
    checkpoint: Annotated[
        Path,
        Parameter(
            help="A safetensors file, what torch.save writes (also under gzip, …), ONNX, or a Hugging Face folder."
        ),
    ],
    /,
    *,
    flags: Annotated[CompressFlags | None, FLAT] = None,
) -> None:
    """Compress a checkpoint into one .birdie file.

    By default every matrix is quantized to eight bits over the range of each row, with error feedback; small tensors
    are stored in 16 bits where that is precise enough, else losslessly. --budget and --bits choose the precision of
    each tensor so that the file just fits; --quality chooses it so that the predictions change by no more than that.
    With --calibrate, or --model and --data for a model of your own, the quantization scales follow the sensitivity of
    the loss, which makes files of the same quality much smaller. For the folder of a model of transformers or diffusers
    inputs are made up instead (random tokens, noise images), if --budget or --bits is given and the model fits in
    memory; --calibrate none turns that off.

    --metric and --at-least search for the smallest file that holds a measure of your own, of the module of --model, and
    write it; `birdie curve` shows the measure of more sizes.

    --lossless keeps the complete object that torch.save wrote: weights, optimizer, step, arguments, and in a .ptz (the
    challenge's exports: torch.save under zlib, zstd, lzma or brotli) the quantized integers. `birdie decompress`
    restores it. All other settings, --key, --include, --exclude and --weights-only keep the state dict; the rest is
    listed as dropped. Sizes before and after are of what is kept. The last line names the dict of tensors that was
    taken, and the others.

    An ONNX file is kept complete, with its external data: its graph and its integers to the byte, and its weights by
    the settings. `birdie decompress -o MODEL.onnx` gives a model of the same graph, and after --lossless the very file.

    Of a Hugging Face folder (transformers, diffusers, peft, timm) the weights of all subfolders are compressed, and all
    small files, configuration, tokenizer and license are kept as well, and count. A table names every file that is left
    out; one that holds weights and is not understood is an error, unless --skip or --keep names it. `birdie decompress
    -o FOLDER` gives a folder that from_pretrained loads.

    Of a folder of checkpoints (step-100/, checkpoint-500/, step_100.safetensors, …) every one becomes a link of a chain
    in the folder OUTPUT, losslessly and with all its files: most as deltas to the one before. One without a number
    (last.ckpt, best.pt) has the step that is in it. The same command later adds those that are new. `birdie decompress
    OUTPUT --step 100` restores one, `birdie inspect OUTPUT` lists them.
    """
    flags = flags or CompressFlags()
    if flags.is_chain or _is_series(checkpoint, flags):
        _compress_run(checkpoint, flags)
        return
    from birdie.checkpoints import NamePatterns, open_checkpoint

    source = open_checkpoint(
        checkpoint,
        keys=flags.key or (),
        keep=flags.keep or (),
        skip=flags.skip or (),
        patterns=NamePatterns(flags.include or (), flags.exclude or ()),
        complete=flags.lossless,
        or_complete=not flags.is_lossy,
        weights_only=flags.weights_only,
    )
    lossless = flags.lossless or source.is_object
    if flags.dry_run:
        show_forecast(source, flags, lossless=lossless)
        return
    written = _compress(source, flags, lossless)
    if written is None:
        return
    if flags.json:
        _print_json(source, written)
    else:
        _show(source, written, lossless)


def _is_series(checkpoint: Path, flags: CompressFlags) -> bool:
    """Return whether a path is the folder of a run, of which two checkpoints tell, or one if there is a chain."""
    if not checkpoint.is_dir():
        return False
    from birdie.chain import is_series

    return is_series(checkpoint, 1 if flags.output is not None and is_chain(Path(flags.output)) else 2)


def _compress_run(folder: Path, flags: CompressFlags) -> None:
    flags.require_chain(folder)
    assert flags.output is not None
    compress_checkpoints(
        folder,
        Path(flags.output),
        full_every=flags.full_every,
        skip=flags.skip or (),
        effort=flags.effort,
        overwrite=flags.overwrite,
        json=flags.json,
    )


class _Written(NamedTuple):
    """Summary of the file, a note on its calibration, and the files that were measured beside it."""

    summary: "Summary"
    note: str | None
    curve: "Curve | None" = None


def _compress(source: "Checkpoint", flags: CompressFlags, lossless: bool) -> _Written | None:
    """Calibrate and write the file; return what was written, on rank 0."""
    import torch

    from birdie.artifact import KIND, Measurements, require_search, write_checkpoint
    from birdie.gpt.run.calibrating import OnOwnModel, Request, calibrator
    from birdie.system.device import choose_device
    from birdie.system.distributed import process_group, world_from_environment

    ranks = world_from_environment().size
    flags.require_ranks(ranks)
    made_up = ranks == 1 and flags.makes_up_inputs
    if flags.metric is not None:  # before the long work
        imported("--metric", flags.metric)
        require_search(None, flags.at_least)
        Measurements(flags.folder)
    calibrate = calibrator(
        Request(source.path, flags.data, flags.calibration_data, flags.calibration_tokens, flags.code, made_up=made_up)
    )
    device = choose_device(flags.device)
    assert flags.output is not None
    base = [Path(flags.base)] if isinstance(flags.base, str | Path) else []
    inputs = [*source.paths, *calibrate.paths, *base]
    file = require_output(require_file_name(flags.output), inputs, kind=KIND, overwrite=flags.overwrite)
    folder = require_writable(file.parent)
    with process_group(torch.device("cpu")) as world, source.mapped():

        def bar(text: str, unit: str) -> AbstractContextManager[Progress | None]:
            return progress_bar(text, unit) if text and world.is_main else nullcontext()

        with bar(calibrate.title, calibrate.unit) as update:
            where = folder if flags.offload else None
            result, note = calibrate(source.content, device=device, offload=where, world=world, progress=update)
        if result is None and flags.tune:
            raise ConfigError(f"--tune has no inputs to train on; {note or f'add {INPUTS}'}")
        if isinstance(calibrate, OnOwnModel) and flags.metric is not None:
            summary, curve = _smallest(source, file, calibrate, result, flags)
            return _Written(summary, note, curve)
        with bar(f"compressing {source.path.name}", "tensors") as update:

            def write(result: "CalibrationResult | None", overwrite: bool) -> "Summary":
                options = flags.save_options(
                    lossless=lossless,
                    calibration=result,
                    tune=0.0 if result is None else flags.tuning,
                    metadata=calibrate.metadata,
                    progress=update,
                )
                return write_checkpoint(source, file, options, overwrite=overwrite, world=world)

            try:
                summary = write(result, flags.overwrite)
            except Exception as error:
                if result is None or not calibrate.is_optional or isinstance(error, BudgetError | OutputError):
                    raise
                note = calibrate.note_of(error)  # measuring runs the model's own code as well
                summary = write(None, True)
        return _Written(summary, note) if world.is_main else None


def _smallest(
    source: "Checkpoint",
    file: Path,
    network: "OnOwnModel",
    calibration: "CalibrationResult | None",
    flags: CompressFlags,
) -> "tuple[Summary, Curve]":
    """Write the smallest file that holds a value of a metric; return its summary, and the files that were measured."""
    from birdie.artifact import Measurements, checkpoint_curve

    assert flags.metric is not None
    metric = imported("--metric", flags.metric)
    options = flags.save_options(calibration=calibration, metadata=network.metadata)
    with kept_in(flags.folder):
        curve, smallest = checkpoint_curve(
            source,
            network.module,
            metric,
            options,
            at_least=flags.at_least,
            measured=Measurements(flags.folder),
            progress=log_point,
        )
    if smallest is None:
        best = max(curve.points, key=lambda point: point.value)
        raise BudgetError(
            f"no file holds {flags.at_least:g} by the metric; the best has {best.value:.6g} and {best.bytes:,} bytes: "
            "lower --at-least, or add --data"
        )
    write_bytes(file, smallest.data)
    return replace(smallest.summary, path=str(file)), curve


def _print_json(source: "Checkpoint", written: _Written) -> None:
    summary, note, curve = written
    control = None if summary.control is None else asdict(summary.control)
    saved = {"saved_bytes": source.input_bytes - summary.bytes}
    measured: dict[str, Any] = {"calibration": note, "error": summary.error, "untuned": summary.untuned}
    measured |= {"nothing_to_tune": summary.nothing_to_tune, "fuller": summary.fuller}
    measured |= {"control": control, "otherwise": summary.otherwise, "rounded": summary.rounded}
    measured |= {"curve": None if curve is None else curve.to_json()}
    print_json(summary.to_json() | source.to_json() | saved | measured)


def _show(source: "Checkpoint", written: _Written, lossless: bool) -> None:
    from birdie.checkpoints import OF_TRAINING

    summary, note, curve = written
    if curve is not None:
        print_line(str(curve))
    input_bytes, file_bytes = source.input_bytes, source.file_bytes
    print_table(grouped_table(summary))
    if input_bytes != file_bytes:
        print_line(f"input: {source.size_text}")
    show_left_out(source)
    if note is not None:
        print_line(note)
    for line in summary.notes:
        print_line(line)
    if source.kept_bytes and not lossless:  # a tokenizer must not make weights look smaller
        weights, coded = input_bytes - source.kept_bytes, summary.bytes - summary.file_bytes
        print_line(f"weights: {size(weights)} → {size(coded)} ({_change(weights, coded, lossless)})")
        same = f", {len(summary.base_files)} of {len(summary.files)} are in the base" if summary.base_files else ""
        print_line(f"kept files: {size(source.kept_bytes)} → {size(summary.file_bytes)}{same}")
        print_line(f"{size(input_bytes)} → {size(summary.bytes)}: {summary.path}")
    else:
        change = _change(input_bytes, summary.bytes, lossless)
        print_line(f"{size(input_bytes)} → {size(summary.bytes)} ({change}): {summary.path}")
    print_line(f"effort {summary.effort}: {_loading(summary)}")
    if any(tensor.scheme == "delta" for tensor in summary.tensors):
        print_line(_differences(summary))
    if any(why == OF_TRAINING for _, why in source.left_out.values()):
        print_line(
            "left out are checkpoints, which a chain keeps: "
            f"birdie compress {shlex.quote(str(source.path))} --full-every 10 -o CHAIN"
        )
    print_line(f"list its tensors: birdie inspect {shlex.quote(summary.path)}")
    show_taken(source)


def _loading(summary: "Summary") -> str:
    """Return the time to load, and of a large model what the other effort would change."""
    from birdie.artifact import load_seconds

    text = f"loads in about {seconds(summary.load_seconds)} on one core"
    if summary.weights < LARGE or summary.base is not None:
        return text
    other, change = ("max", "up to 2 % smaller") if summary.effort == "fast" else ("fast", "up to 2 % larger")
    return f"{text}; --effort {other}: {seconds(load_seconds(other, summary.weights))}, {change}"


def _differences(summary: "Summary") -> str:
    """Return how many tensors are stored given a base, and what the file needs to be read."""
    deltas = [tensor for tensor in summary.tensors if tensor.scheme == "delta"]
    same = sum(not tensor.bytes for tensor in deltas)
    alone = sum(tensor.scheme not in ("delta", "alias") for tensor in summary.tensors)
    if summary.base is None:
        return f"{len(deltas):,} tensors are deltas to others in the file"
    base = plain(summary.base or "the base").plain
    return (
        f"{len(deltas):,} tensors are deltas to {base}, {same:,} of them unchanged; {alone:,} are stored "
        "alone. To read the file: birdie decompress --base"
    )


def _change(input_bytes: int, output_bytes: int, lossless: bool) -> str:
    """Return the bytes saved (lossless), or the compression ratio."""
    if lossless and 0 < output_bytes <= input_bytes:
        saved = input_bytes - output_bytes
        return f"{size(saved)}, {saved / input_bytes:.1%} saved"
    if not input_bytes:
        return "its tensors are empty"
    ratio = input_bytes / output_bytes
    return f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / ratio:.2f}× larger"
