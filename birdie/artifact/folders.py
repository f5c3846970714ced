"""Model folders as Hugging Face libraries write them, from a .birdie file.

    files kept beside the tensors ──► config.json, tokenizer.json, LICENSE, …
    tensors ──► model.safetensors, or shards of at most so many bytes

`birdie.checkpoints.checkpoint` reads such folders.

Tensors keep the names that the library wrote to disk. Weights in a folder of their own have its name before theirs:
"unet/conv_in.weight". The metadata of the .birdie file say what the weights of each folder are called: {"weights":
{"unet": "diffusion_pytorch_model"}}; the model folder itself is "". Where one folder has several files of weights, the
second and all others are components of their own, called as the file: {"classifier.ckpt": ["", "classifier.ckpt"]}.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact.base import Base, BaseOption
from birdie.artifact.container import Reader
from birdie.artifact.file import File, decoded_bytes
from birdie.artifact.links import opened
from birdie.artifact.options import DEFAULT_LIMITS, Limits
from birdie.artifact.safetensors_export import headers_in, is_written, write_tensors
from birdie.artifact.summary import Summary
from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoints import MARK, read_header
from birdie.checkpoints.folder_scan import TORCH, component_of
from birdie.checkpoints.rebuild import has_views
from birdie.checkpoints.weight_shards import weight_map
from birdie.compress import registry
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.system.file_objects import Input, source_of
from birdie.system.files import Hidden, atomic_folder, log_hidden
from birdie.system.names import is_name, is_part
from birdie.system.outputs import require_output_folder
from birdie.system.parsing import to_json

SHARD = 5_000_000_000  # bytes; the default of Hugging Face libraries
_DEEPEST = 16  # keys to the weights in a file


def holds_folder(summary: Summary) -> bool:
    """Return whether a .birdie file holds a model folder: names of its files of weights, or files beside them."""
    return (bool(summary.files) and not summary.is_onnx) or "weights" in summary.metadata


def files(path: Input, *, base: "BaseOption | None" = None, max_bytes: int | None = None) -> dict[str, bytes]:
    """Return the files that a .birdie file keeps beside its tensors: configuration, tokenizer, license.

    Args:
        path: of the file; or its bytes, or a binary file object.
        base: of a file of deltas, the folder or .birdie file that it was made with: files that were the same there are
            not stored again.
        max_bytes: most bytes of all; default 256 MiB, or 64 × the file.

    Returns:
        Relative name → content; empty if it keeps none.

    Raises:
        ArtifactError: the file is missing or damaged, keeps more than `max_bytes`, or has files from a base that is not
            given.
    """
    with Reader(source_of(path)) as reader:
        if base is None or not kept_files.in_base(reader.fields, reader.where):
            return kept_files.read_all(reader, None, max_bytes)
        reference = Base.open(base)
        with reference.mapped():
            return kept_files.read_all(reader, reference.kept(), max_bytes)


def write_folder(
    file: Path,
    target: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    hidden: Hidden = log_hidden,
) -> None:
    """Decode a .birdie file into a folder that `from_pretrained` of its library loads.

    Args:
        file: the .birdie file.
        target: a folder that does not exist, is empty, or holds nothing but what an earlier decompression wrote; it
            appears complete or not at all. A link to a folder stands for it.
        limits: as in `birdie.load`.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        max_shard_bytes: most bytes of a file of weights, where one tensor may be larger; all weights are then
            safetensors. None: the files are those that the folder had, or have at most 5 GB.
        hidden: called with the names of hidden files, which are not written into a folder that has content.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ConfigError(f"shards of {max_shard_bytes} bytes hold nothing; give for example 5GB")
    registry.import_schemes(limits.schemes)
    with opened(file, limits) as reference, File(file, registry.decoder, reference) as reader:
        kept = kept_files.read_all(reader, None if reference is None else reference.kept(), limits.max_bytes)
        if has_views(reader.fields.get("tree")):
            raise ConfigError(f"{file} holds tensors that are views of others; write a .pt file instead of a folder")
        components = _components(reader.ordered, reader.fields, reader.where, kept)
        if max_shard_bytes is not None:  # other shards get an index of their own
            indices = {f"{one.folder}/{one.index}".lstrip("/") for one in components if one.index}
            kept = {name: data for name, data in kept.items() if name not in indices}
        left = None if limits.max_bytes is None else limits.max_bytes - sum(map(len, kept.values()))
        if overwrite or not target.is_dir():
            target = require_output_folder(target, overwrite=overwrite)
        reader.require(left, limits.max_operations, shared=False)
        exact = [] if max_shard_bytes is not None else [one for one in components if one.exact is not None]
        is_own = not overwrite and _is_own(target, kept, _same_files(reader, target, exact))
        target = require_output_folder(target, overwrite=overwrite or is_own)
        with atomic_folder(target, overwrite=overwrite, replace=is_own, inputs=[file], hidden=hidden) as folder:
            kept_files.write(kept, folder)
            for component in components:
                _write_weights(reader, folder, component, max_shard_bytes, limits.workers)


def _same_files(reader: File, target: Path, components: Collection["_Component"]) -> Iterator[Path]:
    """Yield the files of weights in a folder that are, to the byte, what is written there again."""
    for component in components:
        folder = target / component.folder
        for name, keys, header in component.exact_files():
            form = component.exact or ""
            if (folder / name).is_file() and is_written(reader, folder / name, keys, header, form):
                yield folder / name


def _is_own(target: Path, kept: Mapping[str, bytes], same: Iterable[Path]) -> bool:
    """Return whether a folder has content, all of which is birdie's: weights with its mark, and files kept as they are.

    Args:
        kept: name → content of the files that will be there again.
        same: files of weights without the mark that will be there again, to the byte.
    """
    if not target.is_dir():
        return False
    paths = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    files = {name: path for name, path in paths.items() if path.is_symlink() or not path.is_dir()}
    if not files or any(path.is_symlink() or not path.is_file() for path in files.values()):
        return False
    marked = {path for path in files.values() if path.suffix == ".safetensors" and _is_marked(path)} | {*same}
    return all(
        path in marked
        or (path.stat().st_size == len(kept.get(name, b"")) and path.read_bytes() == kept.get(name))
        or (".safetensors.index." in path.name and _lists_only(path, marked))
        for name, path in files.items()
    )


def _is_marked(path: Path) -> bool:
    with suppress(WeightsError):
        return MARK in read_header(path).items()
    return False


def _lists_only(index: Path, marked: Collection[Path]) -> bool:
    with suppress(WeightsError):
        return {index.parent / shard for shard in weight_map(index).values()} <= {*marked}
    return False


@dataclass(frozen=True, slots=True)
class _Component:
    """Tensors that become one file of weights, or its shards."""

    folder: str  # in the model folder
    stem: str  # name of the file, without number and, for safetensors, without suffix
    header: dict[str, str]  # metadata in its header, without birdie's mark
    exact: str | None  # "format" in its header if its files come back to the byte, without the mark; None if not
    nest: list[str]  # keys of the dict that holds the tensors, in a file of torch
    beside: Any  # tree of the plain values in the dicts on the way there
    keys: dict[str, str]  # name in the .birdie file → name on disk
    files: list[str]  # names of the files that the folder had, if the tensors go into the same ones
    trees: list[Any]  # of each of these, if torch.save wrote it: its object without the tensors
    of: list[int]  # number of the file of each tensor, in the order of their names
    index: str  # of these files, in the same folder; "" without one

    def shards(self) -> list[dict[str, str]]:
        """Return name → name on disk of the tensors of each of the files."""
        names = sorted(self.keys.values())
        file_of = dict(zip(names, self.of or [0] * len(names), strict=True))
        return [
            {name: key for name, key in self.keys.items() if file_of[key] == number}
            for number in range(len(self.files))
        ]

    def heading(self, *, as_it_was: bool) -> tuple[dict[str, str], str]:
        """Return metadata and "format" in the headers of its files: those that they had, or with birdie's mark."""
        if as_it_was and self.exact is not None:
            return self.header, self.exact
        return dict([MARK]) | self.header, "pt"

    def exact_files(self) -> list[tuple[str, dict[str, str], dict[str, str]]]:
        """Return name, name → name on disk of its tensors, and header of each safetensors file that comes back."""
        if not self.files:
            return [(f"{self.stem}.safetensors", self.keys, self.header)]
        headers = [_header_of(name, self.header) for name in self.files]
        return list(zip(self.files, self.shards(), headers, strict=True))


def _components(
    names: Collection[str], fields: Mapping[str, Any], where: str, kept: Collection[str]
) -> Collection[_Component]:
    """Return the components of a folder, from the names of tensors and files, and the metadata of a .birdie file."""
    about = fields.get("metadata", {})
    weights, nests, headers = about.get("weights", {"": "model"}), about.get("keys", {}), headers_in(fields, where)
    parts = weights if isinstance(weights, dict) else {}
    paths = {part: value if isinstance(value, list) else [part, value] for part, value in parts.items()}
    if not paths or not all(
        (part == "" or is_name(part)) and len(path) == 2 and (path[0] == "" or is_name(path[0])) and is_part(path[1])
        for part, path in paths.items()
    ):
        raise ArtifactError(f"the metadata of {where} do not name the weights of its folder; the file is damaged")
    if not isinstance(nests, dict) or not all(
        isinstance(nest, list) and len(nest) <= _DEEPEST and all(isinstance(key, str) for key in nest)
        for nest in nests.values()
    ):
        raise ArtifactError(f"the keys in the metadata of {where} are no texts; the file is damaged")
    beside, exact = about.get("beside", {}), about.get("exact", {})
    is_sound = isinstance(exact, dict) and all(isinstance(value, str) for value in exact.values())
    if not isinstance(beside, dict) or not is_sound:
        raise ArtifactError(f"the values beside the weights in {where} are none; the file is damaged")
    keys: dict[str, dict[str, str]] = {part: {} for part in paths}
    for name in names:
        part = component_of(name, paths)
        if part not in paths:
            raise ArtifactError(
                f"tensor {name!r} of {where} belongs to no component of its folder; the file is damaged"
            )
        keys[part][name] = name[len(part) + 1 :] if part else name
    components = [
        _Component(
            path[0],
            path[1],
            headers.get(part, {}),
            exact.get(part),
            nests.get(part, []),
            beside.get(part),
            keys[part],
            *files,
        )
        for part, path in paths.items()
        for files in [_files_of(about, part, len(keys[part]), where)]
    ]
    written = [f"{one.folder}/{file}".lstrip("/") for one in components for file in one.files]
    if len({*written, *kept}) < len(written) + len(kept) or not all(
        kept_files.is_file(name, (*written, *kept)) for name in written
    ):
        raise ArtifactError(f"two files in the metadata of {where} have one name; the file is damaged")
    return components


def _files_of(
    about: Mapping[str, Any], part: str, count: int, where: str
) -> tuple[list[str], list[Any], list[int], str]:
    """Return files, trees, numbers and index of a component with so many tensors, from the metadata of a file."""
    shards, trees = about.get("shards", {}), about.get("trees", {})
    listed = shards.get(part, {}) if isinstance(shards, dict) and isinstance(trees, dict) else None
    if isinstance(listed, dict):
        files, of, index = listed.get("files", []), listed.get("of", []), listed.get("index", "")
        objects = trees.get(part, [])
        if (
            all(isinstance(value, list) for value in (files, of, objects))
            and all(is_name(name) for name in (*files, *([index] if index else [])))
            and all(type(number) is int and 0 <= number < len(files) for number in of)
            and len(of) == (count if len(files) > 1 else 0)
            and len(objects) in (0, len(files))
        ):
            return files, objects, of, index
    raise ArtifactError(f"the files of weights in the metadata of {where} are not those of a folder; it is damaged")


def _write_weights(reader: File, root: Path, component: _Component, most: int | None, workers: int | None) -> None:
    """Write tensors as the files that the folder had, as one file, or as shards of at most so many bytes."""
    folder, stem, keys = root / component.folder, component.stem, component.keys
    header, form = component.heading(as_it_was=most is None)
    write = partial(write_tensors, reader, workers=workers, form=form)
    folder.mkdir(parents=True, exist_ok=True)
    if component.files and (most is None or not all(map(_is_flat, component.trees))):
        _write_files(reader, folder, component, workers)
        return
    shards: list[dict[str, str]] = [{}]
    total = filled = 0
    for name in keys:
        size = decoded_bytes(reader.entry(name))
        if shards[-1] and filled + size > (most or SHARD) and (most is not None or component.exact is None):
            shards.append({})
            filled = 0
        shards[-1][name] = keys[name]
        filled, total = filled + size, total + size
    if stem.lower().endswith(TORCH):
        torch.save(_nested(_decoded(reader, keys, workers), component, reader.where), folder / stem)
        return
    if len(shards) == 1:
        write(folder / f"{stem}.safetensors", keys, header)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / file, shard, header)
        where |= dict.fromkeys(shard.values(), file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    base, dot, variant = stem.partition(".")
    (folder / f"{base}.safetensors.index{dot}{variant}.json").write_text(
        to_json(index, indent=2) + "\n", encoding="utf-8"
    )


def _nested(state: dict[str, Tensor], component: _Component, where: str) -> dict[str, Any]:
    """Return the dict that held the dict with these tensors, and the plain values beside it."""
    content: dict[str, Any] = state
    if component.beside is None or not component.nest:
        for key in reversed(component.nest):
            content = {key: content}
        return content
    content = node = pytree.rebuild(component.beside, {})
    try:
        for key in component.nest[:-1]:
            node = node[key]
        if node[component.nest[-1]] is not None:
            raise KeyError(component.nest[-1])
        node[component.nest[-1]] = state
    except (KeyError, TypeError, IndexError) as error:
        raise ArtifactError(f"the values beside the weights in {where} have no room for them; it is damaged") from error
    return content


def _write_files(reader: File, folder: Path, component: _Component, workers: int | None) -> None:
    """Write tensors into the files that they were read from."""
    header, form = component.heading(as_it_was=True)
    for number, (name, keys) in enumerate(zip(component.files, component.shards(), strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if component.trees:
            torch.save(pytree.rebuild(component.trees[number], _decoded(reader, keys, workers)), folder / name)
        else:
            write_tensors(reader, folder / name, keys, _header_of(name, header), workers, form=form)


def _is_flat(tree: Any) -> bool:
    """Return whether an object is a dict of tensors, which a safetensors file can hold."""
    return isinstance(tree, list) and (tree[:1] == ["tensors"] or (tree[:1] == ["ordered"] and _is_flat(tree[1])))


def _decoded(reader: File, keys: Mapping[str, str], workers: int | None) -> dict[str, Tensor]:
    """Return name on disk → tensor of some tensors; tied ones share their memory."""
    return {keys[name]: tensor for name, tensor in reader.decode_all(list(keys), workers).items()}


def _header_of(file: str, header: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of one of several files, from those that `headers_of` joined."""
    end = f" ({Path(file).name})"
    values = {key.removesuffix(end): value for key, value in header.items() if key.endswith(end)}
    return {key: value for key, value in header.items() if not key.endswith(".safetensors)")} | values
