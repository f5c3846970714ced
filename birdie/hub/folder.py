"""Birdie folders: a .birdie file with what the Hub and transformers want to see beside it.

model.birdie         the weights, and once more all files below
config.json, …       the files that the .birdie file keeps; config.json with a quantization_config
model.safetensors    empty: transformers looks for it before it asks the quantizer (birdie.hub.quantizer)
README.md            the model card (birdie.hub.model_card)

A file of deltas needs its base, for which transformers has no argument: config.json stays as it was, and nothing
stands in for weights.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from birdie.artifact import kept_files
from birdie.artifact.base import BaseOption
from birdie.artifact.container import Reader
from birdie.artifact.folders import files as all_files
from birdie.artifact.inspection import inspect
from birdie.artifact.summary import Summary
from birdie.checkpoints.folder_scan import PIPELINE
from birdie.errors import ArtifactError, BirdieError, ConfigError
from birdie.hub.model_card import CARD, card
from birdie.hub.pipelines import task_of
from birdie.hub.pretrained import WEIGHTS, transformers_class
from birdie.system.files import Hidden, atomic_folder, log_hidden
from birdie.system.outputs import Source
from birdie.system.parsing import parse_object

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EMPTY = b'{"__metadata__":{"format":"pt"}}'


def write_birdie_folder(
    file: Source,
    target: Source,
    *,
    overwrite: bool = False,
    base_model: str | None = None,
    base: BaseOption | None = None,
    hidden: Hidden = log_hidden,
) -> Summary:
    """Write the birdie folder of a .birdie file, and return the summary of the file.

    Args:
        file: of `birdie compress FOLDER`, which keeps the configuration.
        target: a folder that does not exist or is empty; it appears complete or not at all.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        base_model: repository, "USER/NAME", of the model that this one was made of, and to which a file of deltas is
            one; for the card. Default: the one that its configuration names.
        base: of a file of deltas, the folder or .birdie file that it was made with: files that are the same there are
            written as well. None: they are not, and `base_files` of the summary has their names.
        hidden: called with the names of hidden files, which are not written into a folder that has content.

    Raises:
        ArtifactError: the file is missing or damaged, or the base is another.
        ConfigError: it keeps no configuration, or a card that names another origin.
        OutputError: the folder cannot be written.
    """
    summary = inspect(file)
    if base_model is not None and not _REPOSITORY.fullmatch(base_model):
        raise ConfigError(f"the base {base_model!r} is not a repository; write USER/NAME")
    if base is None:
        with Reader(file) as reader:
            files = kept_files.read(reader)
    else:
        files = all_files(file, base=base)
    files = {name: content for name, content in files.items() if not _lists_shards(name, content)}
    if not summary.files:
        raise ConfigError(
            f"{file} keeps no configuration, which a folder needs; compress the model's Hugging Face folder instead of "
            "its weights alone"
        )
    readme = files.get(CARD, b"").decode(errors="replace")
    task = "" if "pipeline_tag:" in readme else _task(Path(file))
    text = card(summary, readme, base_model=base_model, origin=_origin(files), task=task)
    with atomic_folder(target, overwrite=overwrite, inputs=[file], hidden=hidden) as folder:
        kept_files.write(files, folder)
        shutil.copyfile(file, folder / WEIGHTS)
        if "config.json" in files and PIPELINE not in files and summary.base is None:
            (folder / "config.json").write_text(_config(files["config.json"], summary), encoding="utf-8")
            empty = _EMPTY + b" " * (-len(_EMPTY) % 8)
            (folder / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
        (folder / CARD).write_text(text, encoding="utf-8")
    return summary


def _lists_shards(name: str, content: bytes) -> bool:
    """Return whether a file is the index of files of weights, which such a folder has not."""
    with suppress(ValueError):
        return name.endswith(".index.json") and "weight_map" in parse_object(content)
    return False


def _config(content: bytes, summary: Summary) -> str:
    try:
        config = parse_object(content)
    except ValueError as error:
        raise ArtifactError(
            f"config.json kept in {summary.path} is no JSON object ({error}); compress the folder again"
        ) from error
    if "quantization_config" in config:  # of another quantizer, whose integers the file has losslessly
        return json.dumps(config, indent=2, allow_nan=True) + "\n"
    about = {"bytes": summary.bytes, "bits_per_weight": round(summary.bits_per_weight, 3)}
    config["quantization_config"] = {"quant_method": "birdie", "file": WEIGHTS, **about}
    return json.dumps(config, indent=2, sort_keys=True, allow_nan=True) + "\n"  # as the library reads its own


def _origin(files: Mapping[str, bytes]) -> str | None:
    """Return the repository of the model that an adapter or a fine-tune is of, if its configuration names one."""
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("config.json", "_name_or_path")):
        with suppress(ValueError):
            origin = parse_object(files.get(name, b"{}")).get(key)
            if isinstance(origin, str) and _REPOSITORY.fullmatch(origin):
                return origin
    return None


def _task(file: Path) -> str:
    """Return the task of a model of transformers; "" if that is not installed, or has none for its class."""
    with suppress(BirdieError, ImportError):
        kind = transformers_class(file)
        return task_of(kind, kind.config_class)
    return ""
