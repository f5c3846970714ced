"""A checkpoint to compress: one file, the folder of a model, or the complete object that torch.save wrote.

    file ──► dict of tensors that is meant (layouts) ──────────────┐
    file, complete ──► all of it, optimizer and step included ─────┼──► Checkpoint ──repack──► model.birdie
    folder ──► tensors of all files of weights, small files kept ──┘

How the tensors and files of weights of a folder are called is in `birdie.artifact.folders`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.artifact.checkpoint_facts import copies
from birdie.artifact.checkpoints import (
    files_of,
    headers_of,
    own_file,
    read_checkpoint,
    read_weights,
    weight_map,
)
from birdie.artifact.folder_scan import Group, component_of, scan
from birdie.artifact.layouts import Choice, tensor_bytes
from birdie.artifact.summary import Summary
from birdie.compress.wrappers import without_prefixes
from birdie.errors import ConfigError, WeightsError
from birdie.runtime.mapped import complete as require_complete_files
from birdie.runtime.mapped import releasing


@dataclass(slots=True)
class Checkpoint:
    """Content of a checkpoint, and an account of all else that it holds.

    Attributes:
        path: of the file or folder.
        content: name → tensor, mapped; or a complete object.
        sources: the files that hold the content, with their indices.
        paths: all files that are read, which an output must not replace.
        is_object: whether the content is a complete object.
        is_whole: whether nothing of the sources is left out.
        files: name → content of the files of a folder that are kept beside the tensors.
        metadata: for the .birdie file.
        left_out: of a folder: name of each other file → (bytes, why). What a file of weights holds beside them follows
            its name.
        dropped: name of what is left out, a file or a key path → bytes.
        taken: the dicts of tensors that were taken of files that have several: "model", "classifier.ckpt: model".
        others: key path of each other dict of tensors in a file → bytes.
    """

    path: Path
    content: Any
    sources: list[Path]
    paths: list[Path]
    is_object: bool = False
    is_whole: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    others: dict[str, int] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that are read."""
        return sum(file.stat().st_size for file in self.sources) + sum(map(len, self.files.values()))

    @property
    def input_bytes(self) -> int:
        """Bytes of what is compressed; a packed file (.ptz) may have fewer than its tensors."""
        if self.is_whole:
            return self.file_bytes
        return min(self.file_bytes, tensor_bytes(self.content) + sum(map(len, self.files.values())))

    def to_json(self, summary: Summary) -> dict[str, Any]:
        """Return the sizes before and after, and what became of everything, for --json."""
        answer: dict[str, Any] = {
            "input_bytes": self.input_bytes,
            "file_bytes": self.file_bytes,
            "saved_bytes": self.input_bytes - summary.bytes,
            "dropped": self.dropped,
            "taken": list(self.taken),
            "others": self.others,
        }
        if self.path.is_dir():
            answer["compressed"] = {
                path.relative_to(self.path).as_posix(): path.stat().st_size for path in self.sources
            }
            answer["left_out"] = {name: {"bytes": size, "reason": why} for name, (size, why) in self.left_out.items()}
        return answer

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Let pages of the files be released, and let a file that is cut in the meantime be an error."""
        with require_complete_files(self.sources), releasing(self.sources):
            yield


def open_checkpoint(
    path: Path,
    *,
    keys: Sequence[str] = (),
    keep: Sequence[str] = (),
    skip: Sequence[str] = (),
    complete: bool = False,
    weights_only: bool = False,
) -> Checkpoint:
    """Read a file or a folder; tensors are mapped.

    Args:
        path: a safetensors file, what torch.save writes, an index of shards, or the folder of a model.
        keys: of a file: key paths of the dicts of tensors that are meant, "model.ema".
        keep: of a folder: patterns of names of files to keep as they are, whatever their size.
        skip: of a folder: patterns of names of files to leave out.
        complete: take all that a file holds, not its weights alone.
        weights_only: take the weights alone, and leave out objects of classes that `weights_only=True` of torch.load
            refuses.
    """
    if path.is_dir():
        if keys:
            raise ConfigError(f"--key is for the dicts in one file, and {path} is a folder; give the file in it")
        return _open_folder(path, keep, skip, complete, weights_only)
    if keep or skip:
        raise ConfigError(f"--keep and --skip are for the files of a folder, and {path} is none; drop them")
    sources = files_of(path)
    if complete and not weights_only and not keys:
        checkpoint = Checkpoint(path, read_checkpoint(path), sources, sources, is_object=True, is_whole=True)
    else:
        choice = read_weights(path, keys=keys, skip_objects=weights_only)
        checkpoint = Checkpoint(path, choice.state, sources, sources)
        checkpoint.dropped, checkpoint.taken, checkpoint.others = choice.dropped, choice.taken, choice.others
    if header := headers_of(sources):
        checkpoint.metadata = {"headers": {"": header}}
    return checkpoint


def _open_folder(
    folder: Path, keep: Sequence[str], skip: Sequence[str], complete: bool, weights_only: bool
) -> Checkpoint:
    account = scan(folder, keep, skip)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, str | list[str]] = {}  # component → stem of its files, with its folder if that is another name
    headers: dict[str, dict[str, str]] = {}
    keys: dict[str, list[str]] = {}  # component → keys of the dict in its file that holds the weights
    left_out = {name: (_bytes_of(folder / name), why) for name, why in sorted(account.left_out.items())}
    taken: list[str] = []
    sources: list[Path] = []
    networks: dict[Path, dict[str, Tensor]] = {}  # first file of each group → its weights
    for part, group in account.groups.items():
        sources += [*([] if group.index is None else [group.index]), *group.files]
        if header := headers_of(group.files):
            headers[part] = header
        state, choices = _read_group(group, folder, weights_only)
        for name, choice in choices.items():
            left_out |= {f"{name}: {key}": (size, "beside the weights") for key, size in choice.dropped.items()}
            taken += [f"{name}: {key}" for key in choice.taken]
            if choice.at and len(choices) == 1:
                keys[part] = list(choice.at)
        networks[group.files[0]] = state
        for name, tensor in (state if part else without_prefixes(state)).items():
            full = f"{part}/{name}" if part else name
            if component_of(full, account.groups) != part:
                raise WeightsError(
                    f"tensor {name!r} of {group.files[0]} has the name of one in another folder; rename one of them"
                )
            tensors[full] = tensor
        weights[part] = group.stem if part == group.folder else [group.folder, group.stem]
    if same := copies(networks):
        raise WeightsError(_of_copies(folder, *same))
    paths = [*sources, *account.kept]
    kept = {path.relative_to(folder).as_posix(): own_file(path, folder).read_bytes() for path in account.kept}
    if weights_only:
        left_out |= {name: (len(data), "--weights-only") for name, data in kept.items()}
        kept = {}
    return Checkpoint(
        folder,
        tensors,
        sources,
        paths,
        is_whole=complete and not weights_only,
        files=kept,
        metadata={"weights": weights}
        | {name: value for name, value in (("headers", headers), ("keys", keys)) if value},
        left_out=left_out,
        dropped={name: size for name, (size, _) in left_out.items()},
        taken=tuple(taken),
    )


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
