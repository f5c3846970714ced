"""`birdie evaluate`: bits per byte of what an artifact decodes to."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, compiling_told, emit, plain, progress_bar, remark, show, size
from birdie.evaluation import Evaluation
from birdie.evaluation import evaluate as evaluate_artifact


@compiling_told()
def evaluate(
    file: Path,
    /,
    *,
    data: Annotated[str | None, Parameter(help="Folder of shards; default: the one it was trained on.")] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the one of its training.")
    ] = None,
    seq_len: Annotated[int | None, Parameter(help="Window length; default: that of training.")] = None,
    max_tokens: Annotated[int | None, Parameter(help="Score only this many tokens; 0: all.")] = None,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    dtype: Annotated[str | None, Parameter(help="auto, float32 or bfloat16; default: that of training.")] = None,
    json: Json = False,
) -> None:
    """Score a .birdie file in bits per byte over the validation split."""
    with progress_bar(f"scoring {file.name}", "tokens") as update:
        result = evaluate_artifact(
            file,
            data=data,
            tokenizer=tokenizer,
            seq_len=seq_len,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            progress=update,
        )
    for warning in result.warnings:
        remark(f"warning: {warning}")
    if json:
        emit(evaluation_json(result))
    else:
        show(_table(file, result))


def evaluation_json(result: Evaluation) -> dict[str, object]:
    """The pinned keys of `birdie evaluate --json`."""
    score = result.score
    return {
        "bpb": score.bpb,
        "val_loss": score.val_loss,
        "tokens": score.tokens,
        "bytes": result.bytes,
        "text_bytes": score.bytes,
        "documents": score.documents,
        "ci95": score.ci95,
        "seconds": result.seconds,
    }


def _table(file: Path, result: Evaluation) -> Table:
    score = result.score
    table = Table(title=plain(f"{file}: {size(result.bytes)}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("bits per byte", f"{score.bpb:.5f} ± {score.ci95:.5f} (95 %, over documents)")
    table.add_row("nats per token", f"{score.val_loss:.5f}")
    table.add_row("tokens scored", f"{score.tokens:,}")
    by = ", by the byte sidecar" if result.sidecar else ""
    table.add_row("bytes of text", f"{score.bytes:,} ({score.bytes / score.tokens:.3f} per token{by})")
    table.add_row("documents", f"{score.documents:,}")
    for name, seconds in result.seconds.items():
        if seconds:
            table.add_row(f"time to {name}", f"{seconds:.1f} s")
    return table
