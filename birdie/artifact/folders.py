"""Model folders as Hugging Face libraries write them, to one .birdie file and back.

    config.json, tokenizer.json, LICENSE, … ──► files kept beside the tensors ──► the same files
    model.safetensors, shards, pytorch_model.bin ──► tensors ──► model.safetensors, or shards of at most so many bytes

Tensors keep the names that the library wrote to disk. A pipeline of diffusers has a folder for each component, which
precedes the names: "unet/conv_in.weight". The metadata of the .birdie file say what the weights of each folder are
called: {"weights": {"unet": "diffusion_pytorch_model"}}; the folder itself is "".
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.checkpoints import FOLDER_NAMES, files_of, header_of, own_file, read_files, without_prefixes
from birdie.artifact.container import Reader
from birdie.artifact.decoding import decoded_bytes, require_limits
from birdie.artifact.load import decoders_of
from birdie.artifact.to_safetensors import headers_in, write_tensors
from birdie.compress.registry import import_schemes
from birdie.errors import ArtifactError, ConfigError, WeightsError
from birdie.runtime.files import atomic_folder
from birdie.runtime.names import is_name, is_part

SHARD = 5_000_000_000  # bytes; the default of Hugging Face libraries
PIPELINE = "model_index.json"
_KEPT = {".json", ".txt", ".model", ".jinja", ".py", ".spm", ".vocab", ".tiktoken", ".bpe", ".yaml", ".yml"}
_LEGAL = ("license", "licence", "notice", "copying", "use_policy", "copyright")
_LEFT_OUT = {"trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"}
_FOREIGN = {"onnx", "openvino", "coreml", "original", "metal", "runs", "logs", "gguf", "flax", "tf"}
_LARGEST = 1 << 26  # bytes of a file that is kept


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Content of a model folder.

    Attributes:
        tensors: by name.
        files: name → content of the files to keep.
        weights: component → name of its file of weights, without number and suffix; "" for the folder itself.
        headers: component → metadata in the headers of its files of weights, where there are any.
        left_out: files that are not kept, although they have the names of some that are.
    """

    tensors: dict[str, Tensor]
    files: dict[str, bytes]
    weights: dict[str, str]
    headers: dict[str, dict[str, str]]
    left_out: tuple[str, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata for the .birdie file."""
        return {"weights": self.weights} | ({"headers": self.headers} if self.headers else {})


def components_of(folder: Path) -> list[str]:
    """Return the parts of a folder that have weights: "" for its own, the names of those of a pipeline.

    Raises:
        WeightsError: no part has any.
    """
    if not (folder / PIPELINE).is_file():
        return [""]
    parts = sorted(part.name for part in folder.iterdir() if part.is_dir() and _has_weights(part))
    if not parts:
        raise WeightsError(f"{folder} is a pipeline ({PIPELINE}) none of whose folders has weights; download it again")
    return parts


def folder_files(folder: Path) -> list[Path]:
    """Return the files of weights of all components.

    Raises:
        WeightsError: there are none, or one is missing.
    """
    return [file for part in components_of(folder) for file in files_of(folder / part)]


def read_folder(folder: Path) -> ModelFolder:
    """Read a folder; tensors are mapped.

    Raises:
        WeightsError: it holds no weights, a file of it is missing or damaged, or a link leads out of it.
    """
    tensors: dict[str, Tensor] = {}
    weights, headers = {}, {}
    for part in components_of(folder):
        if header := header_of(folder / part):
            headers[part] = header
        main = files_of(folder / part)[0]
        tensors |= {f"{part}/{name}" if part else name: tensor for name, tensor in read_files(folder / part).items()}
        stem = main.name.partition(".")[0]
        weights[part] = "model" if stem == "pytorch_model" else stem
    if list(weights) == [""]:
        tensors = without_prefixes(tensors)
    files, left_out = _kept(folder)
    return ModelFolder(tensors, files, weights, headers, left_out)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in FOLDER_NAMES)


def _kept(folder: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    files, left_out = {}, []
    parts = [part for part in folder.iterdir() if part.is_dir() and not _is_foreign(part.name)]
    for path in sorted(path for part in (folder, *parts) for path in part.iterdir()):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not _is_kept(path.name):
            continue
        if path.stat().st_size > _LARGEST or not is_name(name):
            left_out.append(name)
        else:
            files[name] = own_file(path, folder).read_bytes()
    return files, tuple(left_out)


def _is_kept(name: str) -> bool:
    if name.endswith(".index.json") or name in _LEFT_OUT or name.startswith("."):
        return False
    return Path(name).suffix in _KEPT or name.lower().startswith(_LEGAL)


def _is_foreign(name: str) -> bool:
    return name.startswith((".", "checkpoint", "__")) or name in _FOREIGN


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
        target: a folder that does not exist or is empty; it appears complete or not at all.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        max_shard_bytes: most bytes of a file of weights; one tensor may be larger.
        max_bytes, max_operations, schemes, workers: as in `birdie.load`.

    Raises:
        ArtifactError: as `birdie.load`.
        WeightsError: safetensors cannot hold a dtype or a name.
        OutputError: the folder cannot be written.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"shards of {max_shard_bytes} bytes hold nothing; give for example 5GB")
    import_schemes(schemes)
    with Reader(file) as reader:
        kept = kept_files.read(reader, max_bytes)
        left = None if max_bytes is None else max_bytes - sum(map(len, kept.values()))
        require_limits(reader, decoders_of(reader), left, max_operations)
        fields = file_metadata.parse(bytes(reader.metadata), reader.where)
        headers = headers_in(fields, reader.where)
        groups = _groups(reader.names, fields.get("metadata", {}).get("weights", {"": "model"}), reader.where)
        with atomic_folder(target, overwrite=overwrite, inputs=[file]) as folder:
            kept_files.write(kept, folder)
            for (part, stem), keys in groups.items():
                (folder / part).mkdir(exist_ok=True)
                header = headers.get(part, {})
                _write_weights(reader, folder / part, stem, keys, header, max_shard_bytes, workers)


def _groups(names: Collection[str], weights: Any, where: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return (component, stem) → the tensors there: name in the .birdie file → name on disk.

    Raises:
        ArtifactError: the metadata do not say what the weights are called.
    """
    if not (
        isinstance(weights, dict)
        and weights
        and all((part == "" or is_part(part)) and is_part(stem) for part, stem in weights.items())
    ):
        raise ArtifactError(f"the metadata of {where} do not name the weights of its folder; the file is damaged")
    groups: dict[tuple[str, str], dict[str, str]] = {(part, stem): {} for part, stem in weights.items()}
    for name in names:
        part, slash, key = name.partition("/")
        if slash and part in weights:
            groups[part, weights[part]][name] = key
        elif "" in weights:
            groups["", weights[""]][name] = name
        else:
            raise ArtifactError(
                f"tensor {name!r} of {where} belongs to no component of its folder; the file is damaged"
            )
    return groups


def _write_weights(
    reader: Reader,
    folder: Path,
    stem: str,
    keys: Mapping[str, str],
    header: Mapping[str, str],
    most: int,
    workers: int | None,
) -> None:
    """Write tensors as one file, or as shards with an index."""
    shards: list[dict[str, str]] = [{}]
    total = filled = 0
    for name in sorted(keys):
        size = decoded_bytes(reader.entry(name))
        if shards[-1] and filled + size > most:
            shards.append({})
            filled = 0
        shards[-1][name] = keys[name]
        filled, total = filled + size, total + size
    if len(shards) == 1:
        write_tensors(reader, folder / f"{stem}.safetensors", keys, header, workers)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(reader, folder / file, shard, header, workers)
        where |= dict.fromkeys(shard.values(), file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
