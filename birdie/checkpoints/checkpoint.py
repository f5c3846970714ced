"""A checkpoint to compress: one file, the folder of a model, an ONNX model, or the object that torch.save wrote.

    file ──► dict of tensors that is meant (layouts) ──────────────┐
    file, complete ──► all of it, optimizer and step included ─────┼──► Checkpoint ──repack──► model.birdie
    ONNX file ──► tensors and all other bytes ─────────────────────┤
    folder ──► tensors of all files of weights, small files kept ──┘

How the tensors and files of weights of a folder are called is in `birdie.artifact.folders`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.checkpoints.checkpoints import files_of, format_of, headers_of, read_checkpoint, read_weights
from birdie.checkpoints.folder_content import FolderContent, read_folder, read_index, taken_apart
from birdie.checkpoints.name_patterns import ALL, NamePatterns
from birdie.checkpoints.nested import tensor_bytes
from birdie.checkpoints.onnx_file import read_onnx
from birdie.compress.exact import Roles
from birdie.compress.state import problem_of
from birdie.errors import ConfigError, WeightsError
from birdie.system.mapped import complete as require_complete_files
from birdie.system.mapped import releasing


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
        notes: sentences on what was taken and what comes back otherwise.
        onnx: where the tensors of an ONNX model lie in its files, whose other bytes are `files`
            (birdie.checkpoints.onnx_file); None: it is none.
        roles: what its graph tells of them.
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
    notes: tuple[str, ...] = ()
    onnx: list[Any] | None = None
    roles: Roles | None = None

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that are read."""
        return self.kept_bytes + sum(file.stat().st_size for file in self.sources)

    @property
    def input_bytes(self) -> int:
        """Bytes of what is compressed; a packed file (.ptz) may have fewer than its tensors."""
        if self.is_whole:
            return self.file_bytes
        return min(self.file_bytes, tensor_bytes(self.content) + sum(map(len, self.files.values())))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the files of a folder that are kept beside the weights, as configuration and tokenizer are."""
        return 0 if self.onnx is not None else sum(map(len, self.files.values()))

    @property
    def size_text(self) -> str:
        """Bytes of the weights and of the kept files, and of the files that hold them if those have more."""
        weights, kept, read = self.input_bytes - self.kept_bytes, self.kept_bytes, self.file_bytes
        where = (
            "a folder" if self.path.is_dir() else "a file" if len(self.sources) == 1 else f"{len(self.sources)} files"
        )
        files = f" and {kept:,} B of {len(self.files)} kept file{'s' * (len(self.files) > 1)}" if kept else ""
        return f"{weights:,} B of weights{files}" + (f", in {where} of {read:,} B" if read != self.input_bytes else "")

    def to_json(self) -> dict[str, Any]:
        """Return the sizes before, and what becomes of everything, for --json."""
        answer: dict[str, Any] = {
            "input_bytes": self.input_bytes,
            "file_bytes": self.file_bytes,
            "kept_bytes": self.kept_bytes,
            "dropped": self.dropped,
            "taken": list(self.taken),
            "others": self.others,
            "notes": list(self.notes),
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
    patterns: NamePatterns = ALL,
    complete: bool = False,
    or_complete: bool = False,
    weights_only: bool = False,
) -> Checkpoint:
    """Read a file or a folder; tensors are mapped.

    Args:
        path: a safetensors file, what torch.save writes, an ONNX file, an index of shards, or the folder of a model.
        keys: of a file: key paths of the dicts of tensors that are meant, "model.ema".
        keep: of a folder: patterns of names of files to keep as they are, whatever their size.
        skip: of a folder: patterns of names of files to leave out.
        patterns: of a file: names of the tensors to take, as in the .birdie file.
        complete: take all that a file holds, not its weights alone.
        or_complete: take all that a file holds if its weights alone cannot be stored, but the complete object can, as
            tensors that torch has quantized.
        weights_only: take the weights alone, and leave out objects of classes that `weights_only=True` of torch.load
            refuses.
    """
    if path.is_dir():
        _require_no_patterns(path, patterns)
        if keys:
            raise ConfigError(f"--key is for the dicts in one file, and {path} is a folder; give the file in it")
        complete = complete and not weights_only
        folder = read_folder(path, keep, skip, complete=complete, skip_objects=weights_only)
        return _of_folder(path, folder, complete)
    if keep or skip:
        raise ConfigError(f"--keep and --skip are for the files of a folder, and {path} is none; drop them")
    form = format_of(path)
    if form in ("onnx", "index"):
        _require_no_patterns(path, patterns)
    if form == "onnx":
        return _of_onnx(path, keys, weights_only)
    if form == "index" and not keys:
        complete = complete and not weights_only
        return _of_folder(path, read_index(path, complete=complete, skip_objects=weights_only), complete)
    sources = files_of(path)
    if complete and not weights_only and not keys and not patterns:
        content, left, notes = read_checkpoint(path)
        checkpoint = Checkpoint(path, content, sources, sources, is_object=True, is_whole=not left)
        checkpoint.dropped, checkpoint.notes = left, notes
    else:
        choice = read_weights(path, keys=keys, patterns=patterns, skip_objects=weights_only)
        problems = [name for name, tensor in choice.state.items() if isinstance(tensor, Tensor) and problem_of(tensor)]
        if (
            problems
            and or_complete
            and not (weights_only or keys or patterns)
            and taken_apart(read_checkpoint(path).content)
        ):
            checkpoint = open_checkpoint(path, complete=True)
            why = f"{problems[0]!r} is {problem_of(choice.state[problems[0]])}, and is stored as it is"
            checkpoint.notes = (*checkpoint.notes, f"nothing is quantized, and all of the file is kept: {why}")
            return checkpoint
        checkpoint = Checkpoint(path, choice.state, sources, sources)
        checkpoint.dropped, checkpoint.taken, checkpoint.others = choice.dropped, choice.taken, choice.others
        checkpoint.notes = choice.notes
    if header := headers_of(sources):
        checkpoint.metadata = {"headers": {"": header}}
    return checkpoint


def _require_no_patterns(path: Path, patterns: NamePatterns) -> None:
    if patterns:
        raise ConfigError(
            f"--include and --exclude are for the tensors of one file, and {path} is a complete model; drop them, or "
            "give a file of its weights"
        )


def _of_onnx(path: Path, keys: Sequence[str], weights_only: bool) -> Checkpoint:
    if keys or weights_only:
        flag = "--key" if keys else "--weights-only"
        raise ConfigError(f"{flag} is for checkpoints of torch, and {path} is ONNX, which is kept complete; drop it")
    model = read_onnx(path)
    if not model.tensors:
        raise WeightsError(f"{path} holds no weights, so there is nothing to compress; check the file")
    return Checkpoint(
        path,
        model.tensors,
        model.paths,
        model.paths,
        is_whole=True,
        files=model.other,
        onnx=model.layout,
        roles=model.roles,
    )


def _of_folder(path: Path, folder: FolderContent, complete: bool) -> Checkpoint:
    return Checkpoint(
        path,
        folder.tensors,
        folder.sources,
        [*folder.sources, *folder.kept],
        is_whole=complete,
        files=folder.files,
        metadata=folder.metadata,
        left_out=folder.left_out,
        dropped={name: size for name, (size, _) in folder.left_out.items()},
        taken=tuple(folder.taken),
        notes=tuple(folder.notes),
    )
