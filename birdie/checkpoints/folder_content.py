"""Content of a model folder, and what its files are called on the way back.

    files of weights ──► tensors; names of those in a folder of their own follow its name
    small files      ──► kept as they are, with the index of shards
    metadata         ──► weights, shards, trees, keys, beside, headers, exact, from which the folder is written again

Shards of safetensors come back as shards. What torch.save wrote comes back under its name, with all that it holds, if
the copy is complete; else its weights do, with plain values beside them, and of the files that libraries know as
safetensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoint_facts import copies
from birdie.checkpoints.checkpoints import (
    format_in_usual_header,
    format_of,
    headers_of,
    read_object,
    read_object_or_tensors,
)
from birdie.checkpoints.folder_scan import SMALL, TORCH, FileGroup, component_of, group_of, left_for_size, scan
from birdie.checkpoints.layouts import Choice, choose
from birdie.checkpoints.weight_shards import join, own_file
from birdie.compress.state import problem_of
from birdie.compress.wrappers import without_prefixes
from birdie.errors import WeightsError


@dataclass(slots=True)
class FolderContent:
    """Tensors and files of a folder."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # name → tensor, mapped
    sources: list[Path] = field(default_factory=list)  # files of tensors
    kept: list[Path] = field(default_factory=list)  # files that are kept as they are
    files: dict[str, bytes] = field(default_factory=dict)  # name → content of these
    metadata: dict[str, Any] = field(default_factory=dict)  # for the .birdie file
    # name of each other file, and of what a file of weights holds beside them → (bytes, why)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    # "classifier.ckpt: model", the dicts of tensors that were taken of files that have several
    taken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences on what was taken, and on what comes back otherwise


@dataclass(slots=True)
class _FolderPart:
    """Tensors of one component."""

    tensors: dict[str, Tensor]  # name on disk, or path in the object of a file → tensor
    # name → file that it was read from, in the folder of the component
    file_of: dict[str, str] = field(default_factory=dict)
    # of each file that torch.save wrote, for a complete copy: its object without the tensors
    trees: list[Any] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)  # what was taken of each file
    beside: Any = None  # tree of the plain values beside the weights in a file that torch.save wrote
    # left_out, notes: as of `FolderContent`
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_folder(
    folder: Path, keep: Sequence[str], skip: Sequence[str], *, complete: bool, skip_objects: bool
) -> FolderContent:
    """Read a model folder; tensors are mapped.

    Args:
        keep: patterns of names of files to keep as they are, whatever their size.
        skip: patterns of names of files to leave out.
        complete: take all that a file of torch.save holds, and such files without weights of any size.
        skip_objects: leave out objects of classes that `weights_only=True` refuses, instead of refusing their file.
    """
    account = scan(folder, keep, skip, with_objects=complete)
    content = FolderContent(
        kept=list(account.kept),
        left_out={name: (_bytes_of(folder / name), why) for name, why in sorted(account.left_out.items())},
    )
    parts = {part: _read_group(group, folder, complete, skip_objects) for part, group in account.groups.items()}
    groups = dict(account.groups)
    if not complete and (same := copies({groups[part].files[0]: read.tensors for part, read in parts.items()}, folder)):
        raise WeightsError(_of_copies(folder, *same))
    for path in account.objects:
        name = path.relative_to(folder).as_posix()
        if (part_of_file := _complete(path)) is None:
            content.left_out[name] = (path.stat().st_size, left_for_size(path))
        else:
            parts[name], groups[name] = part_of_file, FileGroup(name.rpartition("/")[0], path.name, (path,))
    for part, read in parts.items():
        _add(content, part, groups[part], read, folder, groups, complete)
    content.files = {path.relative_to(folder).as_posix(): own_file(path, folder).read_bytes() for path in content.kept}
    return content


def _of_copies(folder: Path, one: Path, two: Path) -> str:
    first, second = one.relative_to(folder), two.relative_to(folder)
    chain = ""
    if all(any(map(str.isdecimal, str(path))) for path in (first, second)):
        run = one.parent if one.parent == two.parent else one.parent.parent
        chain = f", or keep the checkpoints of a run as a chain: birdie compress {run} --full-every 10 -o CHAIN"
    return (
        f"{first} and {second} of {folder} hold networks of the same names and shapes, so it is not the folder of one "
        f"model; give one of the files, or leave others out with --skip{chain}"
    )


def read_index(index: Path, *, complete: bool, skip_objects: bool) -> FolderContent:
    """Read the shards that an index names, as `read_folder` reads them in their folder."""
    content, group = FolderContent(), group_of(index)
    _add(
        content,
        "",
        group,
        _read_group(group, index.parent, complete, skip_objects),
        index.parent,
        {"": group},
        complete,
    )
    content.files = {path.name: path.read_bytes() for path in content.kept}
    return content


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_group(group: FileGroup, root: Path, complete: bool, skip_objects: bool) -> _FolderPart:
    """Return the tensors of a group, and what was taken of each of its files."""
    complete = complete and format_of(group.files[0]) == "torch"
    if complete and len(group.files) == 1 and (part := _complete(group.files[0])) is not None:
        return part
    folder = root / group.folder
    choices: dict[str, Choice] = {}
    content: Any = None

    def read(path: Path) -> Mapping[str, Tensor]:
        nonlocal content
        content = read_object_or_tensors(path, skip_objects)
        choice = choices[path.relative_to(root).as_posix()] = choose(content, path)
        return choice.state

    if group.index is None:
        part = _FolderPart({}, choices=choices)
        for path in group.files:
            for name, tensor in read(path).items():
                if name in part.tensors:
                    raise WeightsError(f"{path} holds {name!r}, which another shard holds as well; copy them again")
                part.tensors[name], part.file_of[name] = tensor, path.relative_to(folder).as_posix()
    else:
        joined = join(group.index, read)
        left_out = {f"{group.folder}/{name}".lstrip("/"): about for name, about in joined.left.items()}
        part = _FolderPart(joined.state, joined.shards, [], choices, None, left_out, joined.notes)
    taken = [choice for choice in choices.values() if choice.taken]
    if taken and taken[0].at and len(choices) == 1 and group.stem.lower().endswith(TORCH) and not skip_objects:
        part.beside, kept = _beside(content, taken[0].at)
        (name,) = choices
        choices[name] = replace(
            taken[0], dropped={key: size for key, size in taken[0].dropped.items() if key not in kept}
        )
    if complete and not taken:
        part.trees = _trees(part, _files(group, root))
    if len(group.files) == 1 and group.index is None and not part.trees and not group.folder:
        plain = without_prefixes(part.tensors)
        if plain.keys() != part.tensors.keys():
            part.notes = (f"comes back without the prefix of its wrapper: {next(iter(part.tensors))}, …",)
        part.tensors, part.file_of = plain, dict.fromkeys(plain, group.files[0].name)
    return part


def _beside(content: Any, at: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the tree of the plain values in the dicts on the way to the weights, and their key paths.

    None stands where the weights are.
    """
    top: dict[str, Any] = {}
    node, kept = top, []
    for depth, key in enumerate(at):
        for other, item in content.items():
            if other == key:
                node[key] = None if depth + 1 == len(at) else {}
            elif _is_plain(other) and _is_plain(item):
                node[other] = item
                kept.append("/".join(map(str, (*at[:depth], other))))
        node, content = node[key], content[key]
    return pytree.flatten(top)[1], kept


def _is_plain(value: Any) -> bool:
    """Return whether a value has no tensors, and is not large."""
    try:
        tensors, tree = pytree.flatten({"": value})
    except WeightsError:
        return False
    return not tensors and len(json.dumps(tree)) <= SMALL


def _trees(part: _FolderPart, files: Sequence[str]) -> list[Any]:
    """Return the dict of each of some files without its tensors; none if they have other names in a tree."""
    states = [{name: part.tensors[name] for name in part.file_of if part.file_of[name] == file} for file in files]
    apart = [pytree.flatten(state) for state in states]
    same = all(tensors.keys() == state.keys() for (tensors, _), state in zip(apart, states, strict=True))
    return [tree for _, tree in apart] if same else []


def _complete(path: Path) -> _FolderPart | None:
    """Return all of a file that torch.save wrote; None if it holds what cannot be stored, or no tensor."""
    apart = taken_apart(read_object(path, skip_objects=True))
    return None if apart is None else _FolderPart(apart[0], dict.fromkeys(apart[0], path.name), [apart[1]])


def taken_apart(content: Any) -> tuple[dict[str, Tensor], Any] | None:
    """Return the tensors of an object by their paths, and its tree; None if it cannot be stored, or has no tensor."""
    try:
        tensors, tree = pytree.flatten(content)
    except WeightsError:
        return None
    return None if not tensors or any(map(problem_of, tensors.values())) else (tensors, tree)


def _files(group: FileGroup, root: Path) -> list[str]:
    """Return the files of a group, as they are called in its folder, in the order in which they are numbered."""
    return sorted(path.relative_to(root / group.folder).as_posix() for path in group.files)


def _add(
    content: FolderContent,
    part: str,
    group: FileGroup,
    read: _FolderPart,
    root: Path,
    groups: Mapping[str, FileGroup],
    complete: bool,
) -> None:
    """Add the tensors of a component, and what brings its files back."""
    content.sources += group.files
    content.left_out |= read.left_out
    content.notes += [f"{group.folder}: {note}" if group.folder else note for note in read.notes]
    for name, choice in read.choices.items():
        content.left_out |= {f"{name}: {key}": (size, "beside the weights") for key, size in choice.dropped.items()}
        content.taken += [f"{name}: {key}" for key in choice.taken]
        content.notes += [f"{name}: {note}" for note in choice.notes]
    for name, tensor in read.tensors.items():
        full = f"{part}/{name}" if part else name
        if component_of(full, groups) != part:
            raise WeightsError(
                f"tensor {name!r} of {group.files[0]} has the name of one in another folder; rename one of them"
            )
        content.tensors[full] = tensor
    about: dict[str, Any] = {"weights": group.stem if part == group.folder else [group.folder, group.stem]}
    about["headers"] = headers_of(group.files)
    choices = list(read.choices.values())
    about["keys"] = list(choices[0].at) if len(choices) == 1 else []
    about["trees"] = read.trees
    exact = _same_format(content, group) if complete else None
    about["beside"] = read.beside
    files, of_torch = _files(group, root), format_of(group.files[0]) != "safetensors"
    is_several = len(files) > 1 or group.index is not None
    if read.trees or (is_several and not of_torch):
        numbers = {file: number for number, file in enumerate(files)}
        about["shards"] = {"files": files}
        if len(files) > 1:
            about["shards"]["of"] = [numbers[read.file_of[name]] for name in sorted(read.tensors)]
        if group.index is not None:
            about["shards"]["index"] = group.index.name
            content.kept.append(group.index)
    elif of_torch and not group.stem.lower().endswith(TORCH):
        content.notes.append(f"comes back as {group.stem}.safetensors: {', '.join(files)}")
        if group.index is not None:
            content.left_out[group.index.relative_to(root).as_posix()] = (_bytes_of(group.index), "of those shards")
    for field_, value in about.items():
        if value:
            content.metadata.setdefault(field_, {})[part] = value
    if exact is not None:
        content.metadata.setdefault("exact", {})[part] = exact


def _same_format(content: FolderContent, group: FileGroup) -> str | None:
    """Return "format" in the headers of files that lossless tensors give to the byte; None, with a note, if not."""
    if format_of(group.files[0]) != "safetensors":
        return None
    formats = {path.name: format_in_usual_header(path) for path in group.files}
    first = next(iter(formats.values()))
    others = [name for name, form in formats.items() if form is None or form != first]
    if others:
        content.notes.append(f"comes back with the same tensors and another header: {', '.join(others)}")
        return None
    return first
