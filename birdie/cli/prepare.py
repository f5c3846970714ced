"""`birdie prepare`: tokenize text into shards, or download the challenge's shards (`birdie prepare hub`)."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.table import Table

from birdie.cli.console import Json, log, print_json, print_line, print_table, progress_bar
from birdie.errors import ConfigError, DataError
from birdie.gpt.data.corpus import Corpus, file_corpus, stdlib_corpus

if TYPE_CHECKING:
    from birdie.gpt.data.dataset import DatasetInfo
    from birdie.gpt.data.download import DownloadedDataset
    from birdie.gpt.data.preparation import PreparedDataset

GROUP = "Train"

PREPARE_STAGES = {
    "overlap": "searching the training text for validation documents",
    "vocabulary": "training the vocabulary",
    "train": "tokenizing the training text",
    "val": "tokenizing the validation text",
    "check": "checking the byte counts",
}


@Parameter(name="*", group=Group("From the Hugging Face hub"))
@dataclass(frozen=True, slots=True)
class HubFlags:
    """Flags of `birdie prepare hub`; None: the flag is not on the command line."""

    variant: Annotated[
        str | None, Parameter(help="Tokenizer and vocabulary: sp1024 (default), sp4096, …, byte260.")
    ] = None
    train_shards: Annotated[
        int | None,
        Parameter(help="Number of training shards of 100 M tokens (200 MB) each; default: 10. The challenge has 80."),
    ] = None
    repo: Annotated[
        str | None,
        Parameter(help="Default: willdepueoai/parameter-golf; kevclark/parameter-golf has sp4096 and sp8192."),
    ] = None
    revision: Annotated[str | None, Parameter(help="Branch, tag or commit; default: the newest commit.")] = None
    remote_root: Annotated[str | None, Parameter(help="Folder of the repository with the data sets.")] = None
    endpoint: Annotated[str | None, Parameter(help="Address of the hub; default: HF_ENDPOINT, or huggingface.co.")] = (
        None
    )

    @property
    def names(self) -> list[str]:
        """Names of the flags on the command line."""
        return [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value is not None]


def command(
    *source: Annotated[
        str,
        Parameter(
            help="`stdlib` (the sources of Python's standard library), `hub` (the challenge's published shards), "
            "or files, folders, globs."
        ),
    ],
    validation: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="Held-out files; default: about 5 %, chosen by file name or by document."),
    ] = (),
    documents: Annotated[
        Literal["auto", "file", "part", "line"],
        Parameter(
            help="A document is a file, some lines of it (part) or a line without its end; auto: a file, or a part if "
            "there is only one text file."
        ),
    ] = "auto",
    tokenizer: Annotated[str | None, Parameter(help="`bytes` or a SentencePiece .model; default: train one.")] = None,
    vocab_size: Annotated[int | None, Parameter(help="Pieces of the trained tokenizer; default: 1024.")] = None,
    caseops: Annotated[
        bool, Parameter(negative=(), help="Lossless operators for capitals: `Hello` is TITLE and `hello`.")
    ] = False,
    name: Annotated[
        str | None,
        Parameter(
            help="Name of the text in folders and files; default: that of its file or folder. Other scripts of the "
            "challenge look for `fineweb`."
        ),
    ] = None,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="Folder for data sets and tokenizers.")] = Path(
        "data"
    ),
    hub: HubFlags | None = None,
    json: Json = False,
) -> None:
    """Tokenize text into shards of the challenge's format, or download published shards.

    Shards are written to OUTPUT/datasets/NAME_sp1024/, the tokenizer to OUTPUT/tokenizers/NAME_sp1024.model, where
    sp1024 is the kind and size of the vocabulary. A vocabulary that is trained keeps every byte of the text; those of
    the challenge normalize it. Published shards have the challenge's own names, where its commands find them. A
    document in both the training and the validation text is an error.
    """
    if not source:
        raise ConfigError("birdie prepare needs a source: stdlib, hub, or files, folders or globs")
    hub = hub or HubFlags()
    if source == ("hub",):
        if validation or documents != "auto" or (tokenizer, vocab_size, name) != (None, None, None):
            raise ConfigError(
                "hub has its own split, names and tokenizers; choose with --variant and remove the flags for text"
            )
        _prepare_from_hub(hub, output, json=json)
        return
    if hub.names:
        raise ConfigError(f"{hub.names[0]} is for birdie prepare hub; remove it, or give hub as the only source")
    if tokenizer is not None and vocab_size is not None:
        raise ConfigError("--tokenizer has its own vocabulary; remove --vocab-size")
    if source == ("stdlib",):
        if validation or documents != "auto" or name is not None:
            raise ConfigError(
                "stdlib has its own name, documents and split; --name, --validation and --documents are for files"
            )
        corpus = stdlib_corpus()
    else:
        corpus = file_corpus(source, validation=validation, documents=documents, name=name)
    result = prepare_with_bar(
        corpus, tokenizer=tokenizer, vocab_size=1024 if vocab_size is None else vocab_size, root=output, caseops=caseops
    )
    if json:
        print_json(_facts(result))
        return
    print_table(_table(result.info))
    print_line(_fidelity(result.tokenizer, result.info))
    print_line(f"shards: {result.folder}")
    print_line(f"tokenizer: {result.tokenizer}")
    print_line(f"train on them: birdie train laptop{_flags(result)}")


def _fidelity(tokenizer: str, info: "DatasetInfo") -> str:
    """Return what becomes of the bytes of the text."""
    from birdie.gpt.data.tokenizer import load_tokenizer

    if load_tokenizer(tokenizer).keeps_text:
        return "keeps every byte of the text"
    source, kept = info.train.source_bytes + info.val.source_bytes, info.train.bytes + info.val.bytes
    change = "" if source == kept else f": {source:,} bytes of text become {kept:,}"
    return f"normalizes as the challenge, NFKC and single spaces{change}"


def _flags(result: "PreparedDataset") -> str:
    """Return the flags that `birdie train laptop` needs for a data set; none for that of its recipe."""
    from birdie.gpt.run.recipe_registry import find

    recipe, text = find("laptop").recipe(), ""
    for path, default, flag in (
        (result.folder, recipe.data.path, "path"),
        (Path(result.tokenizer), recipe.data.tokenizer, "tokenizer"),
    ):
        text += f" --data.{flag} {shlex.quote(str(path))}" if path != Path(default) else ""
    size = result.info.vocab_size
    return text + (f" --model.vocab-size {size}" if size != recipe.model.vocab_size else "")


def prepare_with_bar(
    corpus: Corpus, *, tokenizer: str | None = None, vocab_size: int = 1024, root: Path, caseops: bool = False
) -> "PreparedDataset":
    """Prepare `corpus` below `root`, with a progress bar and one line per stage."""
    from birdie.gpt.data.preparation import PreparedDataset, prepare

    result: PreparedDataset | None = None
    stage = ""
    with progress_bar(f"preparing {corpus.name}", "B") as update:
        for event in prepare(corpus, vocab_size if tokenizer is None else tokenizer, root, caseops=caseops):
            if isinstance(event, PreparedDataset):
                result = event
                continue
            if event.stage != stage:
                stage = event.stage
                log(PREPARE_STAGES[stage])
            update(event.bytes, None)
    if result is None:
        raise DataError(f"preparing {corpus.name} ended without a data set")
    if result.excluded:
        log(f"{result.excluded:,} training document(s) excluded as copies of validation documents")
    return result


def _prepare_from_hub(flags: HubFlags, output: Path, *, json: bool) -> None:
    from birdie.gpt.data.download import Source, download

    default = Source()
    source = Source(flags.repo or default.repo, flags.revision, flags.remote_root, flags.endpoint)
    shards = 10 if flags.train_shards is None else flags.train_shards
    result = download(flags.variant or "sp1024", shards, output, source=source)
    for note in result.notes:
        log(f"note: {note}")
    if json:
        files = {"fetched": result.downloaded, "kept": result.kept, "bytes": result.bytes}
        print_json({**_facts(result), "commit": result.commit, **files})
        return
    print_table(_table(result.info))
    print_line(_fidelity(result.tokenizer, result.info))
    print_line(f"downloaded: {len(result.downloaded)} files, {result.bytes:,} bytes; {len(result.kept)} existed")
    print_line(f"shards: {result.folder}")
    print_line(f"tokenizer: {result.tokenizer}")


def _facts(result: "PreparedDataset | DownloadedDataset") -> dict[str, Any]:
    from birdie.gpt.data.tokenizer import load_tokenizer

    facts = {"folder": str(result.folder), "tokenizer": result.tokenizer, **asdict(result.info)}
    return {**facts, "keeps_text": load_tokenizer(result.tokenizer).keeps_text}


def _table(info: "DatasetInfo") -> Table:
    table = Table(title=f"{info.corpus}, {info.vocab_size} pieces")
    for name in ("split", "documents", "tokens", "bytes", "bytes/token"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, split in (("train", info.train), ("validation", info.val)):
        ratio = split.bytes / max(split.tokens, 1)
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", f"{ratio:.3f}")
    return table
