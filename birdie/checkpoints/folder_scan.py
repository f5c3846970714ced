"""Account of a model folder: every file is compressed, kept, or left out for a reason.

Files of weights that belong together (shards, with or without an index) are one group. Of several groups that are one
network in several forms, one is taken: plain before a variant ("fp16"), safetensors before other formats, one file
before shards. Files are known by their first bytes; what holds weights and is not understood is an error.
"""

import os
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from birdie.checkpoints.checkpoints import foreign_format, format_of, is_foreign_pickle, read_object
from birdie.checkpoints.layouts import choose
from birdie.checkpoints.nested import holds_matrices
from birdie.checkpoints.weight_shards import own_file, shard_files, weight_map
from birdie.errors import ConfigError, WeightsError
from birdie.system.names import is_name

PIPELINE = "model_index.json"
OF_TRAINING = "a checkpoint of training"
SMALL = 1_000_000  # bytes of a file of any name that is kept
TORCH = (".bin", ".pt", ".pth", ".th", ".ckpt", ".tar", ".pkl", ".ptz")
_LARGEST = 1 << 26  # bytes of a file that is kept for its name
_MOST_KEPT = 1 << 28  # bytes of all
_KEPT = {".json", ".txt", ".model", ".jinja", ".py", ".spm", ".vocab", ".tiktoken", ".bpe", ".yaml", ".yml"}
_FOREIGN = {"onnx", "openvino", "coreml", "original", "metal", "runs", "logs", "gguf", "flax", "tf"}
_UNREAD = (".h5", ".hdf5", ".keras", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".tflite", ".npz", ".ot")
_SAME = {  # names of one network in several libraries
    **dict.fromkeys(("pytorch_model", "tf_model", "flax_model", "rust_model", "consolidated"), "model"),
    "diffusion_flax_model": "diffusion_pytorch_model",
    "open_clip_pytorch_model": "open_clip_model",
}
_LIBRARY = ("model", "diffusion_pytorch_model", "adapter_model", "open_clip_model")
_SHARD = re.compile(r"[-_](\d{1,6})-of-(\d{1,6})")
_INDEX = re.compile(r"(.+?)\.(safetensors|bin)\.index(?:\.([\w-]+))?\.json")


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files of weights that belong together."""

    folder: str  # relative to the model folder; "" for itself
    stem: str  # what they are called on the way back, without number and, for safetensors, without suffix
    files: tuple[Path, ...]  # with tensors
    index: Path | None = None  # of the shards, if there is one


@dataclass(frozen=True, slots=True)
class Account:
    """The use of each file of a folder."""

    # the files whose tensors are compressed, by component: a folder, or the path of one of several in it
    groups: dict[str, FileGroup]
    kept: tuple[Path, ...]  # files that are kept as they are
    left_out: dict[str, str]  # name of each other file → why
    objects: tuple[Path, ...] = ()  # what torch.save wrote, without weights, and too large to be kept


@dataclass(slots=True)
class _FolderForm:
    """One network in one format, variant and number of files."""

    variant: str
    kind: str
    total: int
    files: dict[int, Path] = field(default_factory=dict)
    index: Path | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        size = sum(path.stat().st_size for path in self.files.values())
        kind = ("safetensors", "torch").index(self.kind) if self.kind in ("safetensors", "torch") else 2
        theirs = any(path.name.startswith("consolidated") for path in self.files.values())  # names of the authors' code
        return (kind > 1, bool(self.variant), kind, theirs, self.total > 0, -size)

    def is_part_beside(self, other: "_FolderForm") -> bool:
        """Return whether both are parts of one network, one for each GPU: consolidated.00.pth."""
        return self.variant.isdigit() and other.variant.isdigit() and self.kind == other.kind

    def names(self, root: Path) -> list[str]:
        """Return the names of all files."""
        files = [*self.files.values(), *([] if self.index is None else [self.index])]
        return [path.relative_to(root).as_posix() for path in files]


def is_of_others(name: str) -> bool:
    """Return whether a file of a name is text, a setting, or of a format that birdie does not write."""
    return name.lower().endswith((*_UNREAD, *_KEPT))


def scan(folder: Path, keep: Sequence[str] = (), skip: Sequence[str] = (), *, with_objects: bool = False) -> Account:
    """Return what becomes of each file of a folder.

    Args:
        keep: patterns of names, "*.fp16.safetensors", of files to keep as they are.
        skip: patterns of names of files to leave out.
        with_objects: list large files of torch.save without weights, optimizers for example, instead of leaving them
            out.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in _walk(folder)}
    for pattern in (*keep, *skip):
        if not any(fnmatchcase(name, pattern) for name in paths):
            raise ConfigError(f"no file of {folder} matches {pattern!r}; give a pattern of names, for example '*.onnx'")
    left_out: dict[str, str] = {}
    kept: list[str] = []
    forms: dict[tuple[str, str], list[_FolderForm]] = {}
    indices: list[str] = []
    candidates: list[str] = []
    nested: dict[str, str] = {}
    for name, path in paths.items():
        if any(fnmatchcase(name, pattern) for pattern in skip):
            left_out[name] = "--skip"
        elif path.is_dir():
            left_out[name] = "a link to a folder"
        elif not own_file(path, folder).is_file():
            left_out[name] = "not a regular file"
        elif any(fnmatchcase(name, pattern) for pattern in keep):
            kept.append(name)
        elif any(part.startswith((".", "__pycache__")) for part in name.split("/")):
            left_out[name] = "a hidden file"
        elif reason := foreign_folder(name):
            nested[name] = reason
        else:
            candidates.append(name)
    kinds = {name: _kind(paths[name]) for name in candidates}
    if not any(kinds.values()):  # the only weights are in such a folder
        kinds |= {name: _kind(paths[name]) for name in nested}
    else:
        left_out |= nested
    for name, kind in kinds.items():
        if _INDEX.fullmatch(Path(name).name):
            indices.append(name)
        elif kind:
            _add(forms, name, paths[name], kind)
        else:
            _keep_or_leave(name, paths[name], kept, left_out)
    for name in indices:
        left_out |= _use_index(forms, folder, paths[name], {*left_out, *kept})
    groups, rest = _chosen({key: several for key, several in forms.items() if several}, folder, left_out)
    objects = [name for name in rest if with_objects and is_name(name) and paths[name].stat().st_size > SMALL]
    for name in rest:
        if name not in objects:
            _keep_or_leave(name, paths[name], kept, left_out)
    if (total := sum(paths[name].stat().st_size for name in kept)) > _MOST_KEPT:
        raise WeightsError(
            f"the files of {folder} beside its weights have {total:,} bytes, more than the {_MOST_KEPT:,} that are "
            "kept; leave some out with --skip PATTERN"
        )
    return Account(
        _components(groups, folder, left_out),
        tuple(paths[name] for name in kept),
        left_out,
        tuple(paths[name] for name in objects),
    )


def _walk(folder: Path) -> Iterable[Path]:
    files_and_links = []
    for parent, folders, files in os.walk(folder):
        files_and_links += [Path(parent) / name for name in files]
        files_and_links += [Path(parent) / name for name in folders if (Path(parent) / name).is_symlink()]
    return sorted(files_and_links)


def foreign_folder(name: str) -> str | None:
    """Return why the model that a folder holds is not in the folder of a name, "runs/events"; None if it may be."""
    for part in name.split("/")[:-1]:
        if part.startswith("checkpoint"):
            return OF_TRAINING
        if part in _FOREIGN:
            return "of another library or a log"
    return None


def _kind(path: Path) -> str:
    """Return "safetensors" or "torch" for a file that may hold weights, "unread" for one of other formats, or ""."""
    name = path.name.lower()
    if path.stat().st_size <= SMALL and is_foreign_pickle(path):
        return ""
    if not path.stat().st_size and not name.endswith(".safetensors"):
        return ""
    if foreign := foreign_format(path):
        return "" if "NumPy" in foreign else "unread"
    if name.endswith(_UNREAD):
        return "unread"
    try:
        form = format_of(path)
    except WeightsError:
        return ""
    packed = form == "packed" and any(suffix in (*TORCH, ".safetensors") for suffix in Path(name).suffixes)
    return "torch" if form == "torch" or packed else "safetensors" if form == "safetensors" else ""


def _keep_or_leave(name: str, path: Path, kept: list[str], left_out: dict[str, str]) -> None:
    if not is_name(name):
        left_out[name] = "a name that not every system has"
    elif path.stat().st_size > _most_kept(path):
        left_out[name] = left_for_size(path)
    else:
        kept.append(name)


def _most_kept(path: Path) -> int:
    return _LARGEST if path.suffix in _KEPT else SMALL


def left_for_size(path: Path) -> str:
    """Return why a file that is no weights is left out, if it is too large to be kept."""
    return f"more than {_most_kept(path):,} bytes; --keep keeps it"


def _split(name: str) -> tuple[str, str, str, int, int]:
    """Return (folder, name of the network, variant, number of the shard, shards) of a file of weights."""
    folder, _, file = name.rpartition("/")
    stem = file
    while Path(stem).suffix.lower() in (*TORCH, *_UNREAD, ".safetensors", ".gz", ".xz", ".zst", ".br"):
        stem = Path(stem).stem
    shard = _SHARD.search(stem)
    if shard:
        stem = stem.replace(shard[0], "")
    base, _, variant = stem.partition(".")
    if base not in (*_SAME, *_LIBRARY):
        base, variant = stem, ""
    return folder, base, variant, int(shard[1]) if shard else 0, int(shard[2]) if shard else 0


def _add(forms: dict[tuple[str, str], list[_FolderForm]], name: str, path: Path, kind: str) -> None:
    folder, base, variant, number, total = _split(name)
    group = forms.setdefault((folder, _SAME.get(base, base)), [])
    form = next((form for form in group if (form.variant, form.kind, form.total) == (variant, kind, total)), None)
    if form is None or number in form.files:
        group.append(form := _FolderForm(variant, kind, total))
    form.files[number] = path


def _use_index(
    forms: dict[tuple[str, str], list[_FolderForm]], root: Path, index: Path, others: Collection[str]
) -> dict[str, str]:
    """Make one form of the shards that an index lists; return the files that are not used for it → why.

    Args:
        forms: by folder and name of the network.
        others: files that are kept as they are or left out.
    """
    base, kind, variant = _parts_of(index)
    folder = index.parent.relative_to(root).as_posix()
    group = forms.setdefault(("" if folder == "." else folder, _SAME.get(base, base)), [])
    missing = [shard for shard in {*weight_map(index).values()} if not os.path.lexists(index.parent / shard)]
    if missing and any(not form.total or len(form.files) == form.total for form in group):
        return {index.relative_to(root).as_posix(): f"stale: it lists {min(missing)}, which is not there"}
    listed = list(shard_files(index).values())
    if named := [path.name for path in listed if path.relative_to(root).as_posix() in others]:
        return {index.relative_to(root).as_posix(): f"it lists {named[0]}, which --skip or --keep names"}
    beside = [
        form for several in forms.values() for form in several if form.total and {*listed} & {*form.files.values()}
    ]
    unnamed = {path for form in beside for path in form.files.values()} - {*listed}
    for several in forms.values():
        for form in several:
            form.files = {number: path for number, path in form.files.items() if path not in (*listed, *unnamed)}
        several[:] = [form for form in several if form.files]
    group.append(_FolderForm(variant, kind, len(listed), dict(enumerate(listed, start=1)), index))
    return {path.relative_to(root).as_posix(): f"{index.name} does not name it" for path in sorted(unnamed)}


def _parts_of(index: Path) -> tuple[str, str, str]:
    """Return the name of the network, the format and the variant from the name of an index."""
    match = _INDEX.fullmatch(index.name)
    base, suffix, variant = match.groups() if match else (index.name.partition(".")[0], "safetensors", "")
    return base, "safetensors" if suffix == "safetensors" else "torch", variant or ""


def group_of(index: Path) -> FileGroup:
    """Return the shards that an index lists, and what they are called on the way back."""
    base, kind, variant = _parts_of(index)
    files = dict(enumerate(shard_files(index).values(), start=1))
    return _group(_FolderForm(variant, kind, len(files), files, index), "", _SAME.get(base, base), index.parent)


def _chosen(
    forms: Mapping[tuple[str, str], list[_FolderForm]], root: Path, left_out: dict[str, str]
) -> tuple[list[FileGroup], list[str]]:
    """Return one group of each network, and the names of files that turn out to hold no weights."""
    groups: list[FileGroup] = []
    rest: list[str] = []
    readable = any(form.kind != "unread" for several in forms.values() for form in several)
    for (folder, base), several in forms.items():
        if base not in _LIBRARY and all(form.kind == "torch" for form in several):
            for form in several:
                if _holds_weights(form, root):
                    groups.append(_group(form, folder, base, root))
                else:
                    rest += form.names(root)
            continue
        taken, *others = sorted(several, key=lambda form: form.order)
        first = taken.files[min(taken.files)]
        reason = f"{{}}; {first.name if taken.index is None else taken.index.name} is taken"
        if base == "open_clip_model" and (folder, "model") in forms:
            others, reason = several, "the same model for open_clip"
        elif taken.kind == "unread" and first.suffix.lower() == ".gguf" and readable:
            others, reason = several, "the same weights in another format"
        elif taken.kind == "unread":
            raise _not_understood(first, foreign_format(first) or f"a {first.suffix} file", root)
        else:
            parts = [form for form in others if form.is_part_beside(taken)]
            groups += [_group(form, folder, base, root) for form in (taken, *parts)]
            others = [form for form in others if form not in parts]
        for form in others:
            another = f"variant {form.variant}" if form.variant != taken.variant else "the same weights in another form"
            left_out |= dict.fromkeys(form.names(root), reason.format(another))
    return groups, rest


def _group(form: _FolderForm, folder: str, base: str, root: Path) -> FileGroup:
    """Return the files of a form, with the stem of the file of weights on the way back."""
    file = min(form.files.values())
    if form.total and (absent := set(range(1, form.total + 1)) - form.files.keys()):
        raise WeightsError(
            f"{root / folder} lacks shard {min(absent)} of {form.total} beside {next(iter(form.files.values())).name}; "
            "copy it again"
        )
    _, stem, variant, _, _ = _split(file.name)
    if form.index is not None:
        stem, variant = form.index.name.partition(".")[0], form.variant
    if variant.isdigit() and form.kind == "torch":
        stem, variant = file.name, ""
    elif stem in _SAME and form.kind == "torch":
        stem = base
    if form.kind != "safetensors" and base not in _LIBRARY:
        stem, variant = file.name, ""
    files = tuple(path for _, path in sorted(form.files.items()))
    return FileGroup(folder, f"{stem}.{variant}" if variant else stem, files, form.index)


def _holds_weights(form: _FolderForm, root: Path) -> bool:
    """Return whether a file that torch.save wrote holds weights, and not an optimizer or settings."""
    path = next(iter(form.files.values()))
    try:
        with zipfile.ZipFile(path) as archive:
            if not any("/data/" in f"/{entry}" for entry in archive.namelist()):
                return False
    except zipfile.BadZipFile:
        pass
    try:
        content = read_object(path, skip_objects=True)
    except WeightsError as error:
        raise _not_understood(path, f"not opened ({str(error).removeprefix(f'{path} ')})", root) from error
    try:
        state = choose(content, path).state
    except WeightsError as error:
        if isinstance(content, Mapping) and ("param_groups" in content or "state" in content):
            return False
        if not holds_matrices(content):
            return False
        raise _not_understood(path, f"not understood ({str(error).removeprefix(f'{path} ')})", root) from error
    large = path.stat().st_size > SMALL
    return any(tensor.is_floating_point() and (tensor.ndim > 1 or large) for tensor in state.values())


def _not_understood(path: Path, what: str, root: Path) -> WeightsError:
    name = path.relative_to(root).as_posix()
    holds = "" if "Git LFS" in what else "holds weights and "
    advice = "" if ";" in what else "save it as safetensors, "
    return WeightsError(
        f"{path} {holds}is {what}; {advice}leave it out with --skip {name}, or keep it unchanged with --keep {name}"
    )


def _instead(folder: Path) -> str:
    """Return what a folder without weights has, for an error message."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _walk(folder) if path.is_file()}
    if any(name.rpartition("/")[2].startswith("zero_pp_rank_") for name in sizes):
        return "; DeepSpeed has cut it in parts: make one file of them with zero_to_fp32.py, which it has put there"
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{ascii(name)[1:-1][:80]} ({sizes[name]:,} bytes)" for name in largest)
    return f"; its largest files are {listed}" if listed else ", nor anything else"


def _components(groups: list[FileGroup], folder: Path, left_out: dict[str, str]) -> dict[str, FileGroup]:
    """Return the groups by component."""
    if (folder / PIPELINE).is_file():
        for group in groups:
            if not group.folder:
                left_out |= {path.name: "a pipeline in one file; its folders are taken" for path in group.files}
        groups = [group for group in groups if group.folder]
        if not groups:
            raise WeightsError(
                f"{folder} is a pipeline ({PIPELINE}) none of whose folders has weights; download it again"
            )
    if not groups:
        raise WeightsError(
            f"folder {folder} holds none of model.safetensors, pytorch_model.bin or other weights{_instead(folder)}"
        )
    components: dict[str, FileGroup] = {}
    order = {stem: number for number, stem in enumerate(_LIBRARY)}
    for group in sorted(groups, key=lambda group: (group.folder, order.get(group.stem, len(order)), group.stem)):
        alone = group.folder not in components
        path = f"{group.folder}/{group.stem}" if group.folder else group.stem
        name = group.folder if alone else path
        if not all(map(is_name, filter(None, (name, path)))):
            raise WeightsError(f"{folder / path} has a name that not every system has; rename it")
        if name in components:
            raise WeightsError(f"{folder / path} is the name of a folder of weights and of a file; rename one of them")
        components[name] = group
    return components


def component_of(name: str, components: Collection[str]) -> str:
    """Return the component of a tensor: the longest one that precedes its name, or ""."""
    start = name.rfind("/")
    while start > 0:
        if name[:start] in components:
            return name[:start]
        start = name.rfind("/", 0, start)
    return ""
