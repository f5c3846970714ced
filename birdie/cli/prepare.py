"""`birdie prepare`: text into shards and a tokenizer."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, emit, progress_bar, remark, say, show
from birdie.cli.hub import HubFlags, prepare_hub
from birdie.data.corpus import Corpus, file_corpus, stdlib_corpus
from birdie.data.prepare import Prepared
from birdie.data.prepare import prepare as prepare_data
from birdie.errors import ConfigError, DataError

STAGES = {
    "overlap": "looking for validation documents in training text",
    "vocabulary": "learning the vocabulary",
    "train": "tokenizing training text",
    "val": "tokenizing validation text",
    "check": "checking the byte counts",
}


def prepare(
    *source: Annotated[
        str,
        Parameter(
            help="`stdlib` (the sources of Python's standard library), `hub` (the challenge's published shards), "
            "or files, folders, globs."
        ),
    ],
    validation: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Files held out; default: about 5 %, by name or by document.")
    ] = (),
    documents: Annotated[
        Literal["auto", "file", "line"], Parameter(help="A document is a file or a line; auto: a line in .jsonl.")
    ] = "auto",
    tokenizer: Annotated[str | None, Parameter(help="`bytes` or a SentencePiece .model; default: learn one.")] = None,
    vocab_size: Annotated[int | None, Parameter(help="Pieces to learn, 1024 by default.")] = None,
    caseops: Annotated[
        bool, Parameter(negative=(), help="Capitals become operators before small letters, without loss.")
    ] = False,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="Root of the challenge's data layout.")] = Path(
        "data"
    ),
    hub: HubFlags | None = None,
    json: Json = False,
) -> None:
    """Turn text into shards and a tokenizer, in the challenge's layout; or fetch those that are published.

    The shards go to OUTPUT/datasets/fineweb10B_sp1024/, the tokenizer to OUTPUT/tokenizers/fineweb_1024_bpe.model
    (names follow the vocabulary), so with the default OUTPUT the challenge's commands find both. With --caseops their
    names end in _lossless_caps_caseops_v1_reserved, as those of the challenge's own CaseOps data do. No document may be
    both trained and validated on.
    """
    if not source:
        raise ConfigError("birdie prepare needs a source: stdlib, hub, or files, folders or globs")
    hub = hub or HubFlags()
    if source == ("hub",):
        if validation or documents != "auto" or tokenizer is not None or vocab_size is not None:
            raise ConfigError(
                "hub has its own split and tokenizers; choose with --variant and leave the flags for text out"
            )
        prepare_hub(hub, output, json=json)
        return
    if hub.given:
        raise ConfigError(f"{hub.given[0]} is for birdie prepare hub; leave it out, or give hub as the only source")
    if tokenizer is not None and vocab_size is not None:
        raise ConfigError("--tokenizer brings its own vocabulary; leave --vocab-size out")
    if source == ("stdlib",):
        if validation or documents != "auto":
            raise ConfigError("stdlib has its own documents and split; --validation and --documents are for files")
        corpus = stdlib_corpus()
    else:
        corpus = file_corpus(source, validation=validation, documents=documents)
    result = prepare_with_bar(corpus, tokenizer=tokenizer, vocab_size=vocab_size or 1024, root=output, caseops=caseops)
    if json:
        emit({"folder": str(result.folder), "tokenizer": result.tokenizer, **asdict(result.info)})
        return
    show(_table(result))
    say(f"shards: {result.folder}")
    say(f"tokenizer: {result.tokenizer}")


def prepare_with_bar(
    corpus: Corpus, *, tokenizer: str | None = None, vocab_size: int = 1024, root: Path, caseops: bool = False
) -> Prepared:
    """Prepare `corpus` under `root`, saying which stage is on."""
    result: Prepared | None = None
    stage = ""
    with progress_bar(f"preparing {corpus.name}", "B") as update:
        for event in prepare_data(corpus, tokenizer or vocab_size, root, caseops=caseops):
            if isinstance(event, Prepared):
                result = event
                continue
            if event.stage != stage:
                stage = event.stage
                remark(STAGES[stage])
            update(event.bytes, None)
    if result is None:
        raise DataError(f"preparing {corpus.name} ended without a data set")
    if result.left_out:
        remark(f"{result.left_out:,} training document(s) left out, being copies of validation documents")
    return result


def _table(result: Prepared) -> Table:
    table = Table(title=f"{result.info.corpus}, {result.info.vocab_size} pieces")
    for name in ("split", "documents", "tokens", "bytes", "bytes/token"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, split in (("train", result.info.train), ("validation", result.info.val)):
        ratio = split.bytes / max(split.tokens, 1)
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", f"{ratio:.3f}")
    return table
