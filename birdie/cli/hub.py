"""`birdie hub`: write a folder for the Hugging Face Hub, push it or a submission there, pull a model from it."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from birdie.cli.console import (
    Json,
    Overwrite,
    into_folder,
    listed,
    log,
    print_hidden,
    print_json,
    print_line,
    print_written,
    size,
)
from birdie.errors import ConfigError
from birdie.system.files import atomic_folder
from birdie.system.outputs import require_output_folder

GROUP = "Compress"


def command(
    action: Annotated[
        Literal["folder", "push", "pull"],
        Parameter(help="folder FILE -o FOLDER; push FILE_OR_FOLDER USER/NAME; pull USER/NAME -o FOLDER."),
    ],
    /,
    *names: Annotated[str, Parameter(help="A .birdie file, a folder, or USER/NAME of a repository.")],
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], help="The folder to write.")] = None,
    overwrite: Overwrite = False,
    public: Annotated[bool, Parameter(negative=(), help="Let everybody read a repository that is created.")] = False,
    revision: Annotated[str | None, Parameter(help="Branch, tag or commit to pull.")] = None,
    base_model: Annotated[
        str | None,
        Parameter(
            help="USER/NAME of the model that this one was made of, for the card. Default: from the configuration."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(help="Of a file of deltas: its base, whose files are written as well where they are the same."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a folder for the Hugging Face Hub, push it there, or pull one.

    A birdie folder has model.birdie, the configuration and tokenizer that `birdie compress FOLDER` kept, and a model
    card: a table of bytes, and what the README of the model says, its license for example. `birdie.from_pretrained`
    loads it from disk or from the Hub, and so does transformers after `birdie.hub.register()`. push takes a .birdie
    file, a birdie folder, or any other, as `birdie submit` writes them.
    Log in with `hf auth login` first; repositories are created private.
    """
    if base_model is not None and (action == "pull" or (action == "push" and names and Path(names[0]).is_dir())):
        raise ConfigError("--base-model is for the card of a .birdie file that becomes a folder; drop it")
    if base is not None and (action == "pull" or (action == "push" and names and Path(names[0]).is_dir())):
        raise ConfigError("--base is for a .birdie file of deltas that becomes a folder; drop it")
    if action == "folder":
        if len(names) != 1 or output is None:
            raise ConfigError("birdie hub folder takes one .birdie file, and -o with the folder to write")
        output = require_output_folder(output, overwrite=overwrite)
        _folder(Path(names[0]), output, base_model, base, overwrite=overwrite, json=json)
    elif action == "push":
        if len(names) != 2 or output is not None:
            raise ConfigError("birdie hub push takes a .birdie file or a folder, and USER/NAME of a repository")
        _push(Path(names[0]), names[1], base_model, base, public=public, json=json)
    else:
        if len(names) != 1 or output is None:
            raise ConfigError("birdie hub pull takes USER/NAME of a repository, and -o with the folder to write")
        output = require_output_folder(output, overwrite=overwrite)
        _pull(names[0], output, revision, overwrite=overwrite, json=json)


def _folder(
    file: Path, output: Path, base_model: str | None, base: Path | None, *, overwrite: bool, json: bool
) -> None:
    from birdie.hub import write_birdie_folder

    hidden: list[str] = []
    with into_folder(output) as left:
        summary = write_birdie_folder(
            file, output, overwrite=overwrite, base_model=base_model, base=base, hidden=hidden.extend
        )
    in_base = [] if base is not None else list(summary.base_files)
    facts = {"bytes": summary.bytes, "left_out": [*hidden, *in_base]}
    print_hidden(hidden, as_json=json)
    _show_in_base(in_base)
    print_written(output, f"model of {size(summary.bytes)}", facts, left, as_json=json)


def _show_in_base(names: Sequence[str]) -> None:
    """Say on stderr which files a folder lacks, as they are in the base of its file."""
    if names:
        log(f"left out, as the base has the same: {listed(names)}; --base BASE writes them")


def _push(
    source: Path, repository: str, base_model: str | None, base: Path | None, *, public: bool, json: bool
) -> None:
    from birdie.hub import push, write_birdie_folder

    with tempfile.TemporaryDirectory(prefix="birdie-") as temporary:
        folder = source
        if not source.is_dir():
            folder = Path(temporary) / source.stem
            summary = write_birdie_folder(source, folder, base_model=base_model, base=base)
            _show_in_base([] if base is not None else summary.base_files)
        address = push(folder, repository, private=not public)
    if json:
        print_json({"repository": repository, "commit": address})
    else:
        print_line(f"pushed: {address}")


def _pull(repository: str, output: Path, revision: str | None, *, overwrite: bool, json: bool) -> None:
    from birdie.hub import download

    cached = download(repository, revision)
    files = sorted(path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file())
    hidden: list[str] = []
    with into_folder(output) as left, atomic_folder(output, overwrite=overwrite, hidden=hidden.extend) as folder:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached / name, folder / name)
    files = [name for name in files if name not in hidden]
    print_hidden(hidden, as_json=json)
    print_written(output, f"{len(files)} files", {"files": files, "left_out": hidden}, left, as_json=json)
