"""`birdie prepare hub`: the challenge's published shards and tokenizer, from the Hugging Face hub."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from rich.table import Table

from birdie.cli.console import emit, progress_bar, remark, say, show
from birdie.data.dataset import DatasetInfo
from birdie.data.fetch import Fetched, Source, Stage, fetch

STAGES: dict[Stage, str] = {
    "check": "checking the files that are there",
    "fetch": "fetching",
    "count": "counting tokens and bytes",
}


@Parameter(name="*", group=Group("From the Hugging Face hub"))
@dataclass(frozen=True, slots=True)
class HubFlags:
    """Flags of `birdie prepare hub`; None: not given."""

    variant: Annotated[
        str | None, Parameter(help="Tokenizer and vocabulary: sp1024 (default), sp4096, …, byte260.")
    ] = None
    train_shards: Annotated[
        int | None, Parameter(help="Of 100 M tokens, 200 MB each, from the first on; default: 10. The challenge's: 80.")
    ] = None
    repo: Annotated[
        str | None,
        Parameter(help="Default: willdepueoai/parameter-golf; kevclark/parameter-golf has sp4096 and sp8192."),
    ] = None
    revision: Annotated[str | None, Parameter(help="Branch, tag or commit; default: what is newest.")] = None
    remote_root: Annotated[str | None, Parameter(help="Folder of the repository that holds the export.")] = None
    endpoint: Annotated[str | None, Parameter(help="Address of the hub; default: HF_ENDPOINT, or huggingface.co.")] = (
        None
    )

    @property
    def given(self) -> list[str]:
        """The flags that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value is not None]


def prepare_hub(flags: HubFlags, output: Path, *, json: bool) -> None:
    """Fetch what `flags` name into the layout under `output`, and say what came."""
    default = Source()
    source = Source(flags.repo or default.repo, flags.revision, flags.remote_root, flags.endpoint)
    shards = 10 if flags.train_shards is None else flags.train_shards
    result = _with_bar(flags.variant or "sp1024", shards, output, source)
    for note in result.notes:
        remark(f"note: {note}")
    if json:
        answer = {"folder": str(result.folder), "tokenizer": result.tokenizer, **asdict(result.info)}
        emit({**answer, "commit": result.commit, "fetched": result.fetched, "kept": result.kept, "bytes": result.bytes})
        return
    show(_table(result.info))
    say(f"fetched: {len(result.fetched)} files, {result.bytes:,} bytes; {len(result.kept)} were there")
    say(f"shards: {result.folder}")
    say(f"tokenizer: {result.tokenizer}")


def _with_bar(variant: str, train_shards: int, root: Path, source: Source) -> Fetched:
    """Fetch, saying which stage is on; Ctrl-C says that what is whole stays."""
    told: set[Stage] = set()
    with progress_bar(f"{source.repo} {variant}", "B") as update:

        def report(stage: Stage, done: int, total: int) -> None:
            if stage not in told:
                told.add(stage)
                remark(f"{STAGES[stage]}: {total:,} bytes")
            update(done, total)

        try:
            return fetch(variant, train_shards, root, source=source, report=report)
        except KeyboardInterrupt:
            remark("Files that were whole are in place; the same command goes on from there.")
            raise


def _table(info: DatasetInfo) -> Table:
    table = Table(title=f"{info.corpus}, {info.vocab_size} pieces")
    for name in ("split", "documents", "tokens", "bytes", "bytes/token"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, split in (("train", info.train), ("validation", info.val)):
        ratio = split.bytes / max(split.tokens, 1)
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", f"{ratio:.3f}")
    return table
