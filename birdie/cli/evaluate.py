"""`birdie evaluate`: bits per byte of what an artifact decodes to."""

from contextlib import nullcontext
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, compiling_told, ctrl_c_asks, emit, plain, progress_bar, remark, show, size
from birdie.errors import ConfigError
from birdie.run.evaluation import Evaluation
from birdie.run.evaluation import evaluate as evaluate_artifact
from birdie.runtime.device import choose_device
from birdie.runtime.distributed import process_group, world_from_environment
from birdie.runtime.startup import process_seconds
from birdie.score.chunks import Keeping


@compiling_told()
def evaluate(
    file: Path,
    /,
    *,
    data: Annotated[str | None, Parameter(help="Folder of shards; default: the one it was trained on.")] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the one of its training.")
    ] = None,
    seq_len: Annotated[
        int | None, Parameter(help="Length of windows, or context of a stream; default: that of training.")
    ] = None,
    stride: Annotated[int | None, Parameter(help="Places between sliding windows; 0: end to end.")] = None,
    documents: Annotated[bool | None, Parameter(help="Begin windows anew with each document.")] = None,
    batch_seqs: Annotated[int | None, Parameter(help="Windows at a time, over all ranks; 0: chosen.")] = None,
    temperature: Annotated[float | None, Parameter(help="Divides the logits.")] = None,
    stream: Annotated[
        bool | None, Parameter(help="Keep keys and values, so that each token passes the model once.")
    ] = None,
    chunk: Annotated[int | None, Parameter(help="Tokens of a stream at a time.")] = None,
    sinks: Annotated[int | None, Parameter(help="First tokens of a stream that are always seen.")] = None,
    kv_bits: Annotated[int | None, Parameter(help="Bits that keys and values of a stream are kept in; 0: all.")] = None,
    segments: Annotated[int | None, Parameter(help="Parts of a stream side by side.")] = None,
    exact: Annotated[bool | None, Parameter(help="A stream begun anew where its context is full.")] = None,
    tilt: Annotated[bool | None, Parameter(help="Lean towards what followed the same tokens before.")] = None,
    adapt: Annotated[str | None, Parameter(help="Learn from what is scored: sgd, lora, phased; none.")] = None,
    sgd: Annotated[str, Parameter(help="How: NAME=VALUE,… such as lr=0.01,epochs=1; rest: as the recipe.")] = "",
    lora: Annotated[str, Parameter(help="The same of adapters, such as rank=32,lr=0.001,parts=k+o+mlp+head.")] = "",
    phased: Annotated[str, Parameter(help="The same of phases, such as prefix_docs=500,phases=2.")] = "",
    state: Annotated[
        Path | None, Parameter(help="File for the state between chunks, also when Ctrl-C stops it.")
    ] = None,
    resume: Annotated[bool, Parameter(help="Go on from --state.", negative=())] = False,
    max_tokens: Annotated[int | None, Parameter(help="Score only this many tokens; 0: all.")] = None,
    budget_seconds: Annotated[float | None, Parameter(help="Time it may take, import included; 0: any.")] = None,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    dtype: Annotated[str | None, Parameter(help="auto, float32 or bfloat16; default: that of training.")] = None,
    package: Annotated[
        Path | None,
        Parameter(help="Score by code compiled ahead of time, in this file; made if it is missing, for this machine."),
    ] = None,
    json: Json = False,
) -> None:
    """Score a .birdie file in bits per byte over the validation split.

    What is not given is as the file's recipe has it, `[evaluation]`. Under torchrun ranks share the work.
    """
    asked: dict[str, Any] = {
        "seq_len": seq_len,
        "stride": stride,
        "documents": documents,
        "batch_seqs": batch_seqs,
        "temperature": temperature,
        "stream": stream,
        "chunk": chunk,
        "sinks": sinks,
        "kv_bits": kv_bits,
        "segments": segments,
        "exact": exact,
        "adapt": adapt,
        "budget_seconds": budget_seconds,
    }
    if resume and state is None:
        raise ConfigError("--resume goes on from a state; say which with --state FILE")
    keeping = None if state is None else Keeping(state, resume=resume)
    place = choose_device(device, world_from_environment().local_rank)
    with process_group(place) as world:
        asking = ctrl_c_asks(shown=world.is_main, after="what is under way") if keeping else nullcontext(_never)
        with progress_bar(f"scoring {file.name}", "tokens") as update, asking as stop:
            result = evaluate_artifact(
                file,
                data=data,
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                device=device,
                dtype=dtype,
                tilt=tilt,
                sgd=sgd,
                lora=lora,
                phased=phased,
                keeping=keeping,
                stop=stop,
                settings={name: value for name, value in asked.items() if value is not None},
                package=package,
                world=world,
                started=process_seconds() or 0.0,
                notify=remark if world.is_main else _nothing,
                progress=update if world.is_main else None,
            )
        if not world.is_main:
            return
    for warning in result.warnings:
        remark(f"warning: {warning}")
    if json:
        emit(evaluation_json(result))
    else:
        show(_table(file, result))


def _never() -> bool:
    """Whether to stop, of work that Ctrl-C stops at once."""
    return False


def _nothing(_: str) -> None:
    """What other ranks say."""


def evaluation_json(result: Evaluation) -> dict[str, object]:
    """The pinned keys of `birdie evaluate --json`."""
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
        "way": result.way,
        "settings": asdict(result.settings),
        **dict.fromkeys(("sgd", "lora", "phased")),
        **{table: asdict(settings) for table, settings in result.learned_by.items()},
        "tilt": asdict(result.recipe.tilt) if result.recipe.tilt.enabled else None,
        "evidence": result.evidence,
        "warnings": list(result.warnings),
    }


def _table(file: Path, result: Evaluation) -> Table:
    score = result.score
    table = Table(title=plain(f"{file}: {size(result.bytes)}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    sure = "one document" if isnan(score.ci95) else f"± {score.ci95:.5f}, 95 % over documents"
    table.add_row("bits per byte", f"{score.bpb:.5f} ({sure})")
    table.add_row("nats per token", f"{score.val_loss:.5f} ({score.bits_per_token:.5f} bits)")
    table.add_row("tokens scored", f"{score.tokens:,}")
    by = ", by the byte sidecar" if result.sidecar else ""
    table.add_row("bytes of text", f"{score.bytes:,} ({score.bytes / score.tokens:.3f} per token{by})")
    table.add_row("documents", f"{score.documents:,}")
    table.add_row("scored by", result.way)
    if result.evidence:
        table.caption = plain(result.evidence)
    for name, seconds in result.seconds.items():
        if seconds:
            table.add_row(f"time to {name}", f"{seconds:.1f} s")
    if budget := result.settings.budget_seconds:
        table.add_row("time in all", f"{sum(result.seconds.values()):.1f} s of {budget:,.0f} s")
    return table
