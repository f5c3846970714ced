"""Model folders as Hugging Face libraries write them, from a .birdie file.

    files kept beside the tensors ──► config.json, tokenizer.json, LICENSE, …
    tensors ──► model.safetensors, or shards of at most so many bytes

`birdie.artifact.checkpoint` reads such folders.

Tensors keep the names that the library wrote to disk. Weights in a folder of their own have its name before theirs:
"unet/conv_in.weight". The metadata of the .birdie file say what the weights of each folder are called: {"weights":
{"unet": "diffusion_pytorch_model"}}; the model folder itself is "". Where one folder has several files of weights, the
second and all others are components of their own, called as the file: {"classifier.ckpt": ["", "classifier.ckpt"]}.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from birdie.artifact import kept_files
from birdie.artifact.base import BaseOption
from birdie.artifact.checkpoints import MARK, read_header, weight_map
from birdie.artifact.file import File, decoded_bytes
from birdie.artifact.folder_scan import TORCH, component_of
from birdie.artifact.links import Limits, opened
from birdie.artifact.rebuild import has_views
from birdie.artifact.summary import Summary
from birdie.artifact.to_safetensors import headers_in, write_tensors
from birdie.compress import registry
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.runtime.files import atomic_folder
from birdie.runtime.names import is_name, is_part
from birdie.runtime.outputs import require_output_folder

SHARD = 5_000_000_000  # bytes; the default of Hugging Face libraries
_DEEPEST = 16  # keys to the weights in a file


def holds_folder(summary: Summary) -> bool:
    """Return whether a .birdie file holds a model folder: names of its files of weights, or files beside them."""
    return bool(summary.files) or "weights" in summary.metadata


def write_folder(
    file: Path,
    target: Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = SHARD,
    base: BaseOption | None = None,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> None:
    """Decode a .birdie file into a folder that `from_pretrained` of its library loads.

    Args:
        file: the .birdie file.
        target: a folder that does not exist, is empty, or holds nothing but what an earlier decompression wrote; it
            appears complete or not at all. A link to a folder stands for it.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        max_shard_bytes: most bytes of a file of weights; one tensor may be larger.
        base, max_bytes, max_operations, schemes, workers: as in `birdie.load`.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"shards of {max_shard_bytes} bytes hold nothing; give for example 5GB")
    registry.import_schemes(schemes)
    limits: Limits = {"max_bytes": max_bytes, "max_operations": max_operations, "workers": workers}
    with opened(base, file, **limits) as reference, File(file, registry.decoder, reference) as reader:
        kept = kept_files.read(reader, max_bytes)
        if has_views(reader.fields.get("tree")):
            raise ConfigError(f"{file} holds tensors that are views of others; write a .pt file instead of a folder")
        is_own = not overwrite and _is_own(target, kept)
        target = require_output_folder(target, overwrite=overwrite or is_own)
        left = None if max_bytes is None else max_bytes - sum(map(len, kept.values()))
        reader.require(left, max_operations, shared=False)
        components = _components(reader.ordered, reader.fields, reader.where)
        with atomic_folder(target, overwrite=overwrite, replace=is_own, inputs=[file]) as folder:
            kept_files.write(kept, folder)
            for component in components:
                _write_weights(reader, folder, component, max_shard_bytes, workers)


def _is_own(target: Path, kept: Mapping[str, bytes]) -> bool:
    """Return whether a folder has content, all of which is birdie's: weights with its mark, and files kept as they are.

    Args:
        target: the folder.
        kept: name → content of the files that will be there again.
    """
    if not target.is_dir():
        return False
    paths = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    files = {name: path for name, path in paths.items() if path.is_symlink() or not path.is_dir()}
    if not files or any(path.is_symlink() or not path.is_file() for path in files.values()):
        return False
    marked = {path for path in files.values() if path.suffix == ".safetensors" and _is_marked(path)}
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
    """Tensors that become one file of weights, or its shards.

    Attributes:
        folder: in the model folder.
        stem: name of the file, without number and, for safetensors, without suffix.
        header: metadata in its header.
        nest: keys of the dict that holds the tensors, in a file of torch.
        keys: name in the .birdie file → name on disk.
    """

    folder: str
    stem: str
    header: dict[str, str]
    nest: list[str]
    keys: dict[str, str]


def _components(names: Collection[str], fields: Mapping[str, Any], where: str) -> Collection[_Component]:
    """Return the components of a folder, from the names of tensors and the metadata of a .birdie file."""
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
    components = {
        part: _Component(path[0], path[1], dict([MARK]) | headers.get(part, {}), nests.get(part, []), {})
        for part, path in paths.items()
    }
    for name in names:
        part = component_of(name, components)
        if part not in components:
            raise ArtifactError(
                f"tensor {name!r} of {where} belongs to no component of its folder; the file is damaged"
            )
        components[part].keys[name] = name[len(part) + 1 :] if part else name
    return components.values()


def _write_weights(reader: File, root: Path, component: _Component, most: int, workers: int | None) -> None:
    """Write tensors as one file, or as shards of at most so many bytes."""
    folder, stem, keys, header = root / component.folder, component.stem, component.keys, component.header
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, str]] = [{}]
    total = filled = 0
    for name in keys:
        size = decoded_bytes(reader.entry(name))
        if shards[-1] and filled + size > most:
            shards.append({})
            filled = 0
        shards[-1][name] = keys[name]
        filled, total = filled + size, total + size
    if len(shards) == 1 or stem.lower().endswith(TORCH):
        path = folder / f"{stem}.safetensors"
        write_tensors(reader, path, keys, header, workers)
        if stem.lower().endswith(TORCH):
            content: dict[str, Any] = load_file(path)
            for key in reversed(component.nest):
                content = {key: content}
            torch.save(content, folder / stem)
            path.unlink()
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(reader, folder / file, shard, header, workers)
        where |= dict.fromkeys(shard.values(), file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    base, dot, variant = stem.partition(".")
    (folder / f"{base}.safetensors.index{dot}{variant}.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
