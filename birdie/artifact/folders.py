"""Model folders as Hugging Face libraries write them, to one .birdie file and back.

    config.json, tokenizer.json, LICENSE, … ──► files kept beside the tensors ──► the same files
    model.safetensors, shards, pytorch_model.bin ──► tensors ──► model.safetensors, or shards of at most so many bytes

Tensors keep the names that the library wrote to disk. Weights in a folder of their own have its name before theirs:
"unet/conv_in.weight". The metadata of the .birdie file say what the weights of each folder are called: {"weights":
{"unet": "diffusion_pytorch_model"}}; the model folder itself is "". Where one folder has several files of weights, the
second and all others are components of their own, called as the file: {"classifier.ckpt": ["", "classifier.ckpt"]}.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact.checkpoints import MARK, headers_of, own_file, read_header, read_weights, weight_map
from birdie.artifact.file import File, decoded_bytes
from birdie.artifact.folder_scan import TORCH, Group, scan
from birdie.artifact.layouts import Choice
from birdie.artifact.to_safetensors import headers_in, write_tensors
from birdie.compress import registry
from birdie.compress.wrappers import without_prefixes
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.runtime.files import atomic_folder
from birdie.runtime.names import is_name, is_part
from birdie.runtime.outputs import require_output_folder

SHARD = 5_000_000_000  # bytes; the default of Hugging Face libraries
_DEEPEST = 16  # keys to the weights in a file


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Content of a model folder.

    Attributes:
        tensors: by name.
        files: name → content of the files to keep.
        weights: component → name of its file of weights, without number and suffix; "" for the folder itself. A list of
            its folder and this name, if the component is not the folder of that name.
        headers: component → metadata in the headers of its files of weights, where there are any.
        sources: the files of weights, with their indices.
        left_out: name of each other file → (bytes, why). What a file of weights holds beside them follows its name.
        taken: the dicts of tensors that were taken of files that have several: "classifier.ckpt: model".
        keys: component → keys of the dict in its file that holds the weights, where they are not the file itself.
    """

    tensors: dict[str, Tensor]
    files: dict[str, bytes]
    weights: dict[str, str | list[str]]
    headers: dict[str, dict[str, str]]
    sources: tuple[Path, ...]
    left_out: dict[str, tuple[int, str]]
    taken: tuple[str, ...] = ()
    keys: dict[str, list[str]] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata for the .birdie file."""
        fields = {"headers": self.headers, "keys": self.keys}
        return {"weights": self.weights} | {name: value for name, value in fields.items() if value}


def read_folder(
    folder: Path, *, keep: Sequence[str] = (), skip: Sequence[str] = (), skip_objects: bool = False
) -> ModelFolder:
    """Read a folder; tensors are mapped.

    Args:
        folder: of a model.
        keep: patterns of names of files to keep as they are, whatever their size.
        skip: patterns of names of files to leave out.
        skip_objects: as in `read_weights`.
    """
    account = scan(folder, keep, skip)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, str | list[str]] = {}
    headers: dict[str, dict[str, str]] = {}
    beside: dict[str, tuple[int, str]] = {}
    taken: list[str] = []
    keys: dict[str, list[str]] = {}
    for part, group in account.groups.items():
        if header := headers_of(group.files):
            headers[part] = header
        state, choices = _read_group(group, folder, skip_objects)
        for name, choice in choices.items():
            beside |= {f"{name}: {key}": (size, "beside the weights") for key, size in choice.dropped.items()}
            taken += [f"{name}: {key}" for key in choice.taken]
            if choice.at and len(choices) == 1:
                keys[part] = list(choice.at)
        if not part:
            state = without_prefixes(state)
        for name, tensor in state.items():
            full = f"{part}/{name}" if part else name
            if component_of(full, account.groups) != part:
                raise WeightsError(
                    f"tensor {name!r} of {group.files[0]} has the name of one in another folder; rename one of them"
                )
            tensors[full] = tensor
        weights[part] = group.stem if part == group.folder else [group.folder, group.stem]
    files = {path.relative_to(folder).as_posix(): own_file(path, folder).read_bytes() for path in account.kept}
    sources = [
        path
        for group in account.groups.values()
        for path in (*([] if group.index is None else [group.index]), *group.files)
    ]
    left_out = {name: (_bytes_of(folder / name), why) for name, why in sorted(account.left_out.items())}
    return ModelFolder(tensors, files, weights, headers, tuple(sources), left_out | beside, tuple(taken), keys)


def component_of(name: str, components: Collection[str]) -> str:
    """Return the component of a tensor: the longest one that precedes its name, or ""."""
    start = name.rfind("/")
    while start > 0:
        if name[:start] in components:
            return name[:start]
        start = name.rfind("/", 0, start)
    return ""


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_group(group: Group, root: Path, skip_objects: bool) -> tuple[dict[str, Tensor], dict[str, Choice]]:
    """Return the tensors of a group, and what was taken of each of its files."""
    listed = {} if group.index is None else weight_map(group.index)
    folder = root / group.folder
    state: dict[str, Tensor] = {}
    choices: dict[str, Choice] = {}
    for path in group.files:
        choice = read_weights(path, skip_objects=skip_objects, with_prefixes=True)
        file = path.relative_to(folder).as_posix()
        choices[path.relative_to(root).as_posix()] = choice
        for key, tensor in choice.state.items():
            if key in state and listed.get(key) is None:
                raise WeightsError(f"{path} holds {key!r}, which another shard holds as well; copy them again")
            if key not in state or listed[key] == file:
                state[key] = tensor
    if absent := sorted(listed.keys() - state.keys()):
        raise WeightsError(
            f"{folder / listed[absent[0]]} lacks {absent[0]!r}, a tensor that the index lists for it; copy it again"
        )
    return state, choices


def write_folder(
    file: Path,
    target: Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = SHARD,
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
        max_bytes, max_operations, schemes, workers: as in `birdie.load`.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"shards of {max_shard_bytes} bytes hold nothing; give for example 5GB")
    registry.import_schemes(schemes)
    with File(file, registry.decoder) as reader:
        kept = kept_files.read(reader, max_bytes)
        is_own = not overwrite and _is_own(target, kept)
        target = require_output_folder(target, overwrite=overwrite or is_own)
        left = None if max_bytes is None else max_bytes - sum(map(len, kept.values()))
        reader.require(left, max_operations, shared=False)
        fields = reader.fields
        headers = headers_in(fields, reader.where)
        groups = _groups(reader.names, fields.get("metadata", {}).get("weights", {"": "model"}), reader.where)
        nests = _keys_in(fields, reader.where)
        with atomic_folder(target, overwrite=overwrite, replace=is_own, inputs=[file]) as folder:
            kept_files.write(kept, folder)
            for part, (subfolder, stem, keys) in groups.items():
                (folder / subfolder).mkdir(parents=True, exist_ok=True)
                header = dict([MARK]) | headers.get(part, {})
                _write_weights(
                    reader, folder / subfolder, stem, keys, header, max_shard_bytes, workers, nests.get(part, [])
                )


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


def _keys_in(fields: Mapping[str, Any], where: str) -> dict[str, list[str]]:
    """Return component → keys of the dict that holds its weights in a file of torch."""
    keys = fields.get("metadata", {}).get("keys", {})
    if not isinstance(keys, dict) or not all(
        isinstance(path, list) and len(path) <= _DEEPEST and all(isinstance(key, str) for key in path)
        for path in keys.values()
    ):
        raise ArtifactError(f"the keys in the metadata of {where} are no texts; the file is damaged")
    return keys


def _groups(names: Collection[str], weights: Any, where: str) -> dict[str, tuple[str, str, dict[str, str]]]:
    """Return component → (folder, stem, the tensors there: name in the .birdie file → name on disk)."""
    parts = weights if isinstance(weights, dict) else {}
    paths = {part: value if isinstance(value, list) else [part, value] for part, value in parts.items()}
    if not paths or not all(
        (part == "" or is_name(part)) and len(path) == 2 and (path[0] == "" or is_name(path[0])) and is_part(path[1])
        for part, path in paths.items()
    ):
        raise ArtifactError(f"the metadata of {where} do not name the weights of its folder; the file is damaged")
    groups: dict[str, tuple[str, str, dict[str, str]]] = {part: (*path, {}) for part, path in paths.items()}
    for name in names:
        part = component_of(name, groups)
        if part not in groups:
            raise ArtifactError(
                f"tensor {name!r} of {where} belongs to no component of its folder; the file is damaged"
            )
        groups[part][2][name] = name[len(part) + 1 :] if part else name
    return groups


def _write_weights(
    reader: File,
    folder: Path,
    stem: str,
    keys: Mapping[str, str],
    header: Mapping[str, str],
    most: int,
    workers: int | None,
    nest: Sequence[str],
) -> None:
    """Write tensors as one file, which has them below the keys of `nest` if it is one of torch, or as shards."""
    shards: list[dict[str, str]] = [{}]
    total = filled = 0
    for name in sorted(keys):
        size = decoded_bytes(reader.entry(name))
        if shards[-1] and filled + size > most:
            shards.append({})
            filled = 0
        shards[-1][name] = keys[name]
        filled, total = filled + size, total + size
    if stem.lower().endswith(TORCH):
        write_tensors(reader, folder / f"{stem}.safetensors", keys, header, workers)
        content: dict[str, Any] = load_file(folder / f"{stem}.safetensors")
        for key in reversed(nest):
            content = {key: content}
        torch.save(content, folder / stem)
        (folder / f"{stem}.safetensors").unlink()
        return
    if len(shards) == 1:
        write_tensors(reader, folder / f"{stem}.safetensors", keys, header, workers)
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
