"""`birdie decompress`: convert a .birdie file back into .safetensors, what torch.save writes, ONNX, or a folder."""

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from birdie.cli.chains import decompress_link, link_of
from birdie.cli.console import (
    ForeignSchemes,
    Json,
    MaxOperations,
    MaxSize,
    Overwrite,
    folder_of,
    into_folder,
    listed,
    print_hidden,
    print_line,
    print_written,
    size,
)
from birdie.compress import parse_size
from birdie.errors import ConfigError, OutputError
from birdie.system.files import atomic_path
from birdie.system.outputs import Kind, require_output, require_output_folder

if TYPE_CHECKING:
    from birdie.artifact import Limits, Summary

GROUP = "Compress"

_KINDS = {  # of the files that are replaced without asking, by what is written
    "safetensors": Kind("a .safetensors file", rb"(?s:.{8})\{"),
    "torch": Kind("what torch.save writes", rb"PK\x03\x04|\x80\x02"),
    "ptz": Kind("what torch.save writes, packed", rb"\x78|\xfd7zXZ|\x28\xb5\x2f\xfd|\x5d\x00\x00"),
}


def command(
    file: Path,
    /,
    *,
    output: Annotated[
        str,  # a Path has lost the slash at the end
        Parameter(
            name=["-o", "--output"],
            help="The file to write: .safetensors, what torch.save writes (.pt, .ckpt, .bin, …; .ptz under zlib), or "
            ".onnx, if an ONNX model was compressed. Or a folder: a name without suffix, or with / at the end.",
        ),
    ],
    overwrite: Overwrite = False,
    step: Annotated[int | None, Parameter(help="Of the folder of a chain: step of the checkpoint to restore.")] = None,
    only: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Name of a tensor, or pattern of names, to write alone into the file; repeatable."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        Parameter(
            help="Of a folder: most bytes of a file of weights, all of them safetensors. Default: the files that the "
            "folder had; else 5GB."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(help="Checkpoint, folder or .birdie file that a file of deltas was made with (compress --base)."),
    ] = None,
    max_size: MaxSize = None,
    max_operations: MaxOperations = None,
    schemes: ForeignSchemes = (),
    json: Json = False,
) -> None:
    """Convert a .birdie file back into .safetensors, a file of torch.save, ONNX, or a folder.

    A file of `birdie compress --lossless` restores nested values too, except in .safetensors: it holds only the
    tensors, named by their paths. A folder has the weights and all files that `birdie compress FOLDER` kept: what
    from_pretrained of the library loads that wrote it. What holds a folder becomes one under any name that is not that
    of a file of weights, such as Qwen2.5-0.5B. The last line says what was written.

    An ONNX model comes back with every byte of its graph, after a lossless compression as the very file. Its files of
    external data are written beside it, under the names that the model has for them.

    A link of a chain of checkpoints (birdie compress CHECKPOINTS) restores all files of its checkpoint bit for bit,
    from the links beside it.
    """
    if file.is_dir():
        file = link_of(file, step)
    elif step is not None:
        raise ConfigError(f"--step is for the folder of a chain, and {file} is none; drop it, or give the folder")
    from birdie.artifact import Limits, is_link, read_link

    limit, link = None if max_size is None else parse_size(max_size), ""
    limits = Limits(base=base, max_bytes=limit, max_operations=max_operations, schemes=schemes)
    if only:
        _write_some(file, output, only, limits, overwrite=overwrite, json=json)
        return
    if is_link(file):
        link = read_link(file).name
        if base is not None:
            raise ConfigError(f"{file} is a link of a chain, whose base is beside it; drop --base")
        if decompress_link(file, output, limits, overwrite=overwrite, json=json):
            return
    from birdie.artifact import (
        ONNX,
        form_of,
        holds_folder,
        inspect,
        load_object,
        to_safetensors,
        write_folder,
        write_onnx,
    )
    from birdie.checkpoints import holds_values

    summary = inspect(file)
    is_object = summary.tree is not None and holds_values(summary.tree)
    form = form_of(output, from_folder=holds_folder(summary), is_onnx=summary.is_onnx)
    target = Path(output)
    if form == "folder" and is_object:  # which the files of a library have no room for
        form, target = "torch", target / "model.pt"
    left: list[str] = []
    hidden: list[str] = []
    if form == "onnx" or (form == "folder" and summary.is_onnx):
        is_folder = form == "folder"
        paths = write_onnx(file, target, limits, overwrite=overwrite, as_folder=is_folder, hidden=hidden.extend)
        total, form = sum(path.stat().st_size for path in paths if path.exists()), "onnx"
        what = ONNX.name if len(paths) == 1 else f"{len(paths)} files, {ONNX.name} and its external data"
    elif form == "folder":
        target = require_output_folder(target, overwrite=True)  # write_folder looks at what is there
        with into_folder(target) as left:
            most = None if max_shard_size is None else parse_size(max_shard_size)
            write_folder(file, target, limits, overwrite=overwrite, max_shard_bytes=most, hidden=hidden.extend)
        files = {path.relative_to(target).as_posix(): path for path in target.rglob("*") if path.is_file()}
        written = [path.stat().st_size for name, path in files.items() if name not in left]
        total, what = sum(written), folder_of(len(written))
    else:
        target = require_output(target, [file], kind=_KINDS[form], overwrite=overwrite)
        with atomic_path(target) as path:
            try:
                if form == "safetensors":
                    to_safetensors(file, path, limits)
                else:
                    _write(load_object(file, **vars(limits)), path, packed=form == "ptz")
            except RuntimeError as error:  # a full disk is one in torch
                raise OutputError(f"cannot write {target}: {error}; is the disk full?") from error
        total, what = target.stat().st_size, _KINDS[form].name
    left_out, remedy = _left_out(file, summary, form, link)
    if left_out and not json:
        print_line(f"left out: {listed(left_out)}; {remedy}")
    print_hidden(hidden, as_json=json)
    tensors = len(summary.tensors)
    facts: dict[str, Any] = {"bytes": total, "tensors": tensors, "written": "folder" if form == "folder" else "file"}
    facts |= {"left_out": [*left_out, *hidden]}
    print_written(target, f"{tensors} tensors, {size(total)}, as {what}", facts, left, as_json=json)


def _write_some(
    file: Path, output: str, names: Sequence[str], limits: "Limits", *, overwrite: bool, json: bool
) -> None:
    """Write some tensors of a file, and nothing else of it."""
    from safetensors.torch import save_file

    from birdie.artifact import form_of, inspect, load

    form, target = form_of(output, from_folder=False), Path(output)
    if form not in _KINDS:
        raise ConfigError(
            f"--only writes tensors into one file, and {output} is none; end its name in .safetensors or .pt"
        )
    target = require_output(target, [file], kind=_KINDS[form], overwrite=overwrite)
    state = load(file, names=names, **vars(limits))
    with atomic_path(target) as path:
        if form == "safetensors":
            save_file({name: tensor.clone() for name, tensor in state.items()}, path)  # no two share memory there
        else:
            _write(state, path, packed=form == "ptz")
    total, count = target.stat().st_size, len(inspect(file).tensors)
    facts = {"bytes": total, "tensors": len(state), "written": "file", "left_out": [f"{count - len(state)} tensors"]}
    text = f"{len(state)} of {count} tensors, {size(total)}, as {_KINDS[form].name}"
    print_written(target, text, facts, [], as_json=json)


def _left_out(file: Path, summary: "Summary", form: str, link: str) -> tuple[Sequence[str], str]:
    """Return what a .birdie file holds and the output does not, and what to do to have it.

    Args:
        file: the .birdie file.
        link: name of the file whose checkpoint it is, of a link of a chain.
    """
    from birdie.artifact import Reader
    from birdie.checkpoints import holds_values

    values = "all that is no tensor"
    if link:
        return [values], f"{link} has it: -o NAME{Path(link).suffix}"
    if form not in ("torch", "ptz", "onnx"):  # extra states of modules
        with Reader(file) as reader:
            extra = (reader.fields.get("state") or {}).get("extra", {})
        lost = [name for name, skeleton in extra.items() if holds_values(skeleton)]
        lost += [values] if summary.tree is not None and holds_values(summary.tree) else []
        if lost:
            return lost, "a .pt file has it"
    if summary.is_onnx:
        return ([], "") if form == "onnx" else (["the graph"], "an ONNX file has it: -o NAME.onnx")
    return ([], "") if form == "folder" else ([*summary.files], "a folder has them: -o NAME/")


def _write(content: Any, path: Path, *, packed: bool) -> None:
    import torch

    if packed:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(zlib.compress(buffer.getvalue(), 9))
    else:
        with path.open("wb") as file:  # from a path, torch would store the name of the temporary file
            torch.save(content, file)
