"""`birdie evaluate`: score the model in a .birdie file in bits per byte.

Flags are the fields of `EvaluationRequest`, of `EvaluationSettings` and of each scoring mode. A setting without a flag
comes from the recipe in the artifact, so the flags have no defaults of their own.
"""

from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter
from rich.table import Table

from birdie.cli.console import (
    FLAT,
    Json,
    log,
    plain,
    print_json,
    print_table,
    progress_bar,
    size,
)
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import MODES, EvaluationSettings
from birdie.system.callbacks import no_message
from birdie.system.platform import process_seconds

if TYPE_CHECKING:
    from birdie.gpt.run.evaluation import Evaluation

GROUP = "Evaluate"


def optional_fields(kind: type) -> type:
    """Return a dataclass with the fields of `kind`, those of nested dataclasses included, all None by default.

    Names of environment variables are dropped: they are settings of training runs.
    """
    hints, group = get_type_hints(kind, include_extras=True), _group(kind)
    hints = {setting.name: hints[setting.name] for setting in fields(kind)}
    if kind is EvaluationSettings:  # registered modes have no field
        hints |= {mode.table_name(): mode for mode in MODES.values() if mode.table_name() not in hints}
    optional: list[tuple[str, Any, Any]] = []
    for name, hint in hints.items():
        if isinstance(hint, type) and is_dataclass(hint):
            if fields(hint):
                optional.append((name, optional_fields(hint) | None, field(default=None)))
            continue
        bare, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        parameter = next((note for note in annotations if isinstance(note, Parameter)), Parameter())
        offered = Parameter(help=parameter.help, negative=parameter.negative, group=group, show=parameter.show)
        optional.append((name, Annotated[bare | None, offered], field(default=None)))
    # cyclopts takes a class of the module `types`, which is the default, for one without fields
    return make_dataclass(f"Optional{kind.__name__}", optional, frozen=True, namespace={"__module__": __name__})


def _group(kind: type) -> Group:
    """Return the panel of the help that the flags of a dataclass stand in."""
    if issubclass(kind, ScoringMode):
        return Group(f"Mode {kind.name}", help=f"{kind.summary()}.", sort_key=1)
    if kind is EvaluationSettings:
        return Group("Scoring", help=f"Modes: {', '.join(MODES)}.", sort_key=0)
    return Group(kind.__name__.removesuffix("Settings"), help=(kind.__doc__ or "").partition("\n")[0], sort_key=2)


def explicit(values: Any) -> dict[str, Any]:
    """Return the values of an optional dataclass that are not None, nested."""
    pairs = ((setting.name, getattr(values, setting.name)) for setting in fields(values))
    return {name: explicit(value) if is_dataclass(value) else value for name, value in pairs if value is not None}


if TYPE_CHECKING:
    Settings = Any
else:
    Settings = optional_fields(EvaluationSettings)


def command(
    file: Path,
    /,
    *,
    settings: Annotated[Settings | None, FLAT] = None,
    request: Annotated[EvaluationRequest | None, FLAT] = None,
    json: Json = False,
) -> None:
    """Score the model in a .birdie file in bits per byte of the validation split.

    Settings without a flag come from `[evaluation]` of the recipe in the file. Under torchrun the ranks share the work.
    """
    from birdie.gpt.run.evaluation import evaluate
    from birdie.system.device import choose_device
    from birdie.system.distributed import process_group, world_from_environment

    request = replace(request or EvaluationRequest(), settings={} if settings is None else explicit(settings))
    device = choose_device(request.device, world_from_environment().local_rank)
    with process_group(device) as world:
        with progress_bar(f"scoring {file.name}", "tokens") as update:
            result = evaluate(
                file,
                request,
                world=world,
                notify=log if world.is_main else no_message,
                progress=update if world.is_main else None,
                import_seconds=process_seconds() or 0.0,
            )
        if not world.is_main:
            return
    for warning in result.warnings:
        log(f"warning: {warning}")
    if json:
        print_json(evaluation_json(result))
    else:
        print_table(_table(file, result))


def evaluation_json(result: "Evaluation") -> dict[str, object]:
    """Return the object of `birdie evaluate --json`."""
    score = result.score
    return {
        "bpb": score.bpb,
        "val_loss": score.val_loss,
        "bits_per_token": score.bits_per_token,
        "tokens": score.tokens,
        "bytes": result.bytes,
        "text_bytes": score.bytes,
        "documents": score.documents,
        "ci95": score.ci95,
        "device": result.device,
        "dtype": result.dtype,
        "seconds": result.seconds,
        "budget_seconds": result.settings.budget_seconds,
        "mode": result.mode.name,
        "method": result.method,
        "settings": result.settings_in_effect,
        "diagnostics": result.diagnostics,
        "warnings": list(result.warnings),
    }


def _table(file: Path, result: "Evaluation") -> Table:
    score = result.score
    table = Table(title=plain(f"{file}: {size(result.bytes)}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    interval = "one document" if isnan(score.ci95) else f"± {score.ci95:.5f}, 95 % over documents"
    table.add_row("bits per byte", f"{score.bpb:.5f} ({interval})")
    table.add_row("nats per token", f"{score.val_loss:.5f} ({score.bits_per_token:.5f} bits)")
    table.add_row("tokens scored", f"{score.tokens:,}")
    sidecar = ", by the byte sidecar" if result.sidecar else ""
    table.add_row("bytes of text", f"{score.bytes:,} ({score.bytes / score.tokens:.3f} per token{sidecar})")
    table.add_row("documents", f"{score.documents:,}")
    table.add_row("mode", f"{result.mode.name}: {result.method}")
    if result.diagnostics:
        table.caption = plain(result.diagnostics)
    for name, seconds in result.seconds.items():
        if seconds:
            table.add_row(f"time to {name}", f"{seconds:.1f} s")
    if budget := result.settings.budget_seconds:
        table.add_row("time in total", f"{sum(result.seconds.values()):.1f} s of {budget:,.0f} s")
    return table
