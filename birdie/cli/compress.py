"""`birdie compress`: compress a checkpoint (safetensors, torch.save, Hugging Face folder) into a .birdie file."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from birdie.cli.account import listed, show_left_out, show_taken
from birdie.cli.chains import compress_checkpoints, is_chain
from birdie.cli.console import (
    FLAT,
    Json,
    Overwrite,
    compiling_notice,
    plain,
    print_json,
    print_line,
    print_table,
    progress_bar,
    seconds,
    size,
)
from birdie.cli.dry_run import show_forecast
from birdie.cli.inspect import grouped_table
from birdie.compress.rate.target import parse_size
from birdie.entropy.hints import LARGE
from birdie.errors import BudgetError, ConfigError, OutputError
from birdie.system.callbacks import Progress
from birdie.system.outputs import require_file_name, require_output, require_writable
from birdie.system.parsing import parse_duration

if TYPE_CHECKING:
    from birdie.artifact.summary import Summary
    from birdie.checkpoints.checkpoint import Checkpoint
    from birdie.compress.calibration.result import CalibrationResult

GROUP = "Compress"
SPECS = (
    *("lossless", "int2", "int8", "sigma:0.3", "sdclip", "fp16", "bf16", "trellis:sigma=0.3", "feedback", "gptq"),
    *("ternary", "binary", "codebook:k=16", "rotation:bits=4", "lowrank:rank=4,base=int6", "spectral:auto,sigma=0.3"),
    "tucker:energy=0.99",
)
"""Specs that the help names: `examples_of_words()` of the registry, which needs torch."""


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Target size or quality of the file, schemes of its tensors, and the coder."""

    budget: Annotated[str | None, Parameter(help="Largest size of the file: 16MB, 16MiB, 250000.")] = None
    bits: Annotated[
        float | None, Parameter(help="Largest size of the file in bits per weight, everything included.")
    ] = None
    quality: Annotated[float | None, Parameter(help="Largest KL divergence in nats per token; needs --calibrate.")] = (
        None
    )
    scheme: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="SPEC for all matrices, or PATTERN=SPEC, repeatable, first match wins. SPEC: "
            f"{', '.join(SPECS)}; or a scheme of an installed package (docs/schemes.md).",
        ),
    ] = None
    coder: Annotated[
        Literal["auto", "max", "fast"],
        Parameter(help="Entropy coder: max is the smallest, fast loads fastest; auto is max below 64 million weights."),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.quality is not None and not self.quality > 0:
            raise ConfigError(
                f"--quality is {self.quality}; give a positive KL divergence in nats per token, for example 0.01"
            )

    def text(self) -> str:
        """Return the flags as they were written."""
        numbers = {"bits": self.bits, "quality": self.quality}
        flags = [] if self.budget is None else [f"--budget {self.budget}"]
        flags += [f"--{name} {value:g}" for name, value in numbers.items() if value is not None]
        return " ".join([*flags, *(f"--scheme {spec}" for spec in self.scheme or ())])

    def options(self) -> dict[str, Any]:
        """Return the arguments of `birdie.save`."""
        return {
            "scheme": _schemes(self.scheme) if self.scheme else None,
            "budget": None if self.budget is None else parse_size(self.budget),
            "bits": self.bits,
            "quality": self.quality,
            "coder": self.coder,
        }


@dataclass(frozen=True, kw_only=True)
class CalibrationFlags:
    """Source, size and means of the calibration."""

    calibrate: Annotated[
        Path | None,
        Parameter(
            help="For a Hugging Face folder: a text (language models) or a folder of images (classifiers). For models "
            "of birdie: the run folder or recipe. Precision then follows the sensitivity of the loss. none: no inputs "
            "are made up for a folder, either."
        ),
    ] = None
    calibration_data: Annotated[
        Literal["train", "own"] | None,
        Parameter(help="train: training shards; own: samples of the model. Default: the recipe's, else train."),
    ] = None
    calibration_tokens: Annotated[
        int | None, Parameter(help="Number of calibration tokens. Default: the recipe's, else 65,536.")
    ] = None
    tune: Annotated[
        str | None,
        Parameter(
            help="Time for training towards the float model's predictions on the calibration's inputs, for example "
            "90s or 5min: the file is closer to the model at the same size."
        ),
    ] = None
    offload: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Calibrate with temporary files beside the output in place of memory; needs --calibrate.",
        ),
    ] = False
    device: Annotated[
        Literal["auto", "cuda", "mps", "cpu"],
        Parameter(help="Of the calibration; auto takes a GPU if there is one."),
    ] = "cpu"

    def __post_init__(self) -> None:
        if self.offload:
            self.require_data("--offload")
        if self.tuning and self.offload:
            raise ConfigError("--tune keeps the complete model in memory; drop it, or --offload")

    @property
    def tuning(self) -> float:
        """Seconds of tuning."""
        return parse_duration(self.tune) if self.tune else 0.0

    @property
    def source(self) -> Path | None:
        """Path of what to calibrate on."""
        return None if self.calibrate == Path("none") else self.calibrate

    def require_data(self, flag: str) -> None:
        """Check that there is something to calibrate on, for a flag that needs it."""
        if self.source is None:
            raise ConfigError(f"{flag} needs calibration data; add --calibrate TEXT_OR_RUN")


@compiling_notice()
def command(
    checkpoint: Annotated[
        Path,
        Parameter(help="A safetensors file, what torch.save writes (also under gzip, …), or a Hugging Face folder."),
    ],
    /,
    *,
    output: Annotated[
        str | None,  # a Path has lost the slash at the end
        Parameter(
            name=["-o", "--output"],
            help="The .birdie file to write; of a run, the folder of its chain.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    lossless: Annotated[
        bool, Parameter(negative=(), help="Keep everything: every bit of every tensor, and all other values.")
    ] = False,
    base: Annotated[
        Path | None,
        Parameter(
            help="Checkpoint, folder or .birdie file like this one, such as an earlier step, or the model before "
            "fine-tuning. The differences alone are stored, with --lossless every bit of them; `birdie decompress "
            "--base` needs the same."
        ),
    ] = None,
    full_every: Annotated[
        int | None,
        Parameter(
            help="Of a folder of checkpoints of a run: store them as a chain of lossless differences, of which one in "
            "so many stands alone. Default: 10, for a folder of nothing but checkpoints."
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Take the state dict alone, also with --lossless; skip objects of other programs.",
        ),
    ] = False,
    key: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="The dict of tensors that is meant, for example model.ema, or the names in it that begin so, as in "
            "state_dict.model.; repeatable: several become one file, with their keys as prefixes. Default: the usual "
            "layouts are understood.",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Of a folder: pattern of names of files to keep as they are, of any size."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Of a folder: pattern of names of files (checkpoints) to leave out."),
    ] = None,
    target: Annotated[TargetFlags, FLAT] = TargetFlags(),
    calibration: Annotated[CalibrationFlags, FLAT] = CalibrationFlags(),
    dry_run: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Write nothing: show expected bytes, error and time of these settings, and of others, within seconds.",
        ),
    ] = False,
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

    Of a folder of checkpoints (step-100/, checkpoint-500/, step_100.safetensors, …) every one becomes a link of a chain
    in the folder OUTPUT, losslessly and with all its files: most as differences to the one before. One without a number
    (last.ckpt, best.pt) has the step that is in it. The same command later adds those that are new. `birdie decompress
    OUTPUT --step 100` restores one, `birdie inspect OUTPUT` lists them.
    """
    options = target.options()
    others = target.scheme or target.budget or target.bits or target.quality or calibration.source or calibration.tuning
    if lossless and others:
        raise ConfigError(
            "--lossless cannot be combined with --budget, --bits, --quality, --scheme, --calibrate or --tune; "
            "remove one or the other"
        )
    if output is None and not dry_run:
        raise ConfigError("there is no file to write; add -o FILE.birdie, or --dry-run to see sizes alone")
    least = 1 if output is not None and is_chain(Path(output)) else 2
    if checkpoint.is_dir() and (full_every is not None or _is_series(checkpoint, least)):
        single = {"base": base, "weights-only": weights_only, "key": key, "keep": keep}
        single |= {"dry-run": dry_run}
        flags = [f"--{name}" for name, value in single.items() if value]
        if others or flags or output is None:
            raise ConfigError(
                f"{checkpoint} holds checkpoints of a run, which are kept losslessly as a chain, without "
                f"{flags[0] if flags else '--budget, --bits, --quality, --scheme, --calibrate and --tune'}; drop that, "
                "or give one checkpoint"
            )
        compress_checkpoints(
            checkpoint,
            Path(output),
            full_every=full_every,
            skip=skip or (),
            coder=target.coder,
            overwrite=overwrite,
            json=json,
        )
        return
    if full_every is not None:
        raise ConfigError(f"--full-every is for a folder of checkpoints, and {checkpoint} is none; drop it")
    file = None if output is None else require_file_name(output)
    if target.quality is not None:
        calibration.require_data("--quality")
    from birdie.checkpoints.checkpoint import open_checkpoint

    source = open_checkpoint(
        checkpoint,
        keys=key or (),
        keep=keep or (),
        skip=skip or (),
        complete=lossless,
        or_complete=not others,
        weights_only=weights_only,
    )
    lossless = lossless or source.is_object
    if file is None or dry_run:
        for flag, value in {"quality": target.quality, "tune": calibration.tune, "base": base}.items():
            if value is not None:
                raise ConfigError(f"--dry-run has no forecast of --{flag}; drop one of the two")
        show_forecast(source, target, lossless=lossless, as_json=json)
        return
    import torch

    from birdie.artifact.container import KIND
    from birdie.artifact.repack import write_checkpoint
    from birdie.gpt.run.calibrating import Request, calibrator
    from birdie.system.device import choose_device
    from birdie.system.distributed import process_group, world_from_environment

    alone = world_from_environment().size == 1
    calibrate = calibrator(
        Request(
            checkpoint,
            calibration.source,
            calibration.calibration_data,
            calibration.calibration_tokens,
            made_up=alone and calibration.calibrate is None and (target.budget is not None or target.bits is not None),
        )
    )
    if calibration.source is not None and not calibration.offload and not alone:
        raise ConfigError("ranks share a calibration by files; add --offload, or start one process")
    device = choose_device(calibration.device)
    inputs = [*source.paths, *calibrate.paths, *([] if base is None else [base])]
    file = require_output(file, inputs, kind=KIND, overwrite=overwrite)
    folder = require_writable(file.parent)
    with process_group(torch.device("cpu")) as world, source.mapped():

        def bar(text: str, unit: str) -> AbstractContextManager[Progress | None]:
            return progress_bar(text, unit) if text and world.is_main else nullcontext()

        with bar(calibrate.title, calibrate.unit) as update:
            where = folder if calibration.offload else None
            result, note = calibrate(source.content, device=device, offload=where, world=world, progress=update)
        if result is None and calibration.tuning:
            raise ConfigError(f"--tune has no inputs to train on; {note or 'add --calibrate TEXT_OR_RUN'}")
        with bar(f"compressing {checkpoint.name}", "tensors") as update:

            def save(result: "CalibrationResult | None", overwrite: bool) -> "Summary":
                return write_checkpoint(
                    source,
                    file,
                    overwrite=overwrite,
                    lossless=lossless,
                    base=base,
                    calibration=result,
                    tune=0.0 if result is None else calibration.tuning,
                    metadata=calibrate.metadata,
                    progress=update,
                    world=world,
                    **options,
                )

            try:
                summary = save(result, overwrite)
            except Exception as error:
                if result is None or not calibrate.is_optional or isinstance(error, BudgetError | OutputError):
                    raise
                note = calibrate.note_of(error)  # measuring runs the model's own code as well
                summary = save(None, True)
        if not world.is_main:
            return
    if json:
        control = None if summary.control is None else asdict(summary.control)
        saved = {"saved_bytes": source.input_bytes - summary.bytes}
        measured: dict[str, Any] = {"calibration": note, "error": summary.error, "untuned": summary.untuned}
        measured |= {"nothing_to_tune": summary.nothing_to_tune}
        measured |= {"control": control, "otherwise": summary.otherwise, "rounded": summary.rounded}
        print_json(summary.to_json() | source.to_json() | saved | measured)
    else:
        _show(source, summary, note, lossless)


def _is_series(folder: Path, least: int) -> bool:
    from birdie.chain.checkpoint_series import is_series

    return is_series(folder, least)


def _show(source: "Checkpoint", summary: "Summary", note: str | None, lossless: bool) -> None:
    from birdie.checkpoints.folder_scan import OF_TRAINING

    input_bytes, file_bytes = source.input_bytes, source.file_bytes
    print_table(grouped_table(summary))
    if input_bytes != file_bytes:
        print_line(f"input: {size(input_bytes)} of weights in a file of {size(file_bytes)}")
    show_left_out(source)
    if note is not None:
        print_line(note)
    if summary.untuned is not None and summary.error is not None:
        won = summary.error < summary.untuned or summary.nothing_to_tune
        kept = "" if won else "; tuning won no more than chance, so the file is without it"
        print_line(f"error on inputs kept apart: {summary.error:.4g}, without tuning {summary.untuned:.4g}{kept}")
    if summary.nothing_to_tune:
        print_line("nothing to tune: no weights are left to train beside the matrix that is encoded last")
    if summary.control is not None:
        print_line(str(summary.control))
    if summary.uncalibrated:
        print_line(f"no data reached: {listed(dict.fromkeys(summary.uncalibrated, 0))}")
    if summary.otherwise:
        otherwise = {row.name: row.bytes for row in summary.tensors if row.name in summary.otherwise}
        print_line(f"lossless or in 16 bits, not quantized: {listed(otherwise)}")
    if summary.not_kept:
        print_line(f"not kept with weights alone: {', '.join(summary.not_kept)}")
    if summary.rounded:
        print_line(f"rounded to 16 bits: {summary.rounded:,} of {len(summary.tensors):,} tensors")
    change = _change(input_bytes, summary.bytes, lossless)
    print_line(f"{size(input_bytes)} → {size(summary.bytes)} ({change}): {summary.path}")
    print_line(f"coder {summary.coder}: {_loading(summary)}")
    if any(tensor.scheme == "difference" for tensor in summary.tensors):
        print_line(_differences(summary))
    if any(why == OF_TRAINING for _, why in source.left_out.values()):
        print_line(
            f"left out are checkpoints, which a chain keeps: birdie compress {source.path} --full-every 10 -o CHAIN"
        )
    print_line(f"list its tensors: birdie inspect {summary.path}")
    show_taken(source)


def _loading(summary: "Summary") -> str:
    """Return the time to load, and of a large model what the other coder would change."""
    from birdie.artifact.inspect import load_seconds

    text = f"loads in about {seconds(summary.load_seconds)} on one core"
    if summary.weights < LARGE or summary.base is not None:
        return text
    other, change = ("max", "up to 2 % smaller") if summary.coder == "fast" else ("fast", "up to 2 % larger")
    return f"{text}; --coder {other}: {seconds(load_seconds(other, summary.weights))}, {change}"


def _differences(summary: "Summary") -> str:
    """Return how many tensors are stored given a base, and what the file needs to be read."""
    differences = [tensor for tensor in summary.tensors if tensor.scheme == "difference"]
    same = sum(not tensor.bytes for tensor in differences)
    alone = sum(tensor.scheme not in ("difference", "alias") for tensor in summary.tensors)
    if summary.base is None:
        return f"{len(differences):,} tensors are differences to others in the file"
    base = plain(summary.base or "the base").plain
    return (
        f"{len(differences):,} tensors are differences to {base}, {same:,} of them unchanged; {alone:,} are stored "
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
