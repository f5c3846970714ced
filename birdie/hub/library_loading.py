"""Parts of a Hugging Face folder that its library loads for a calibration: model, configuration, tokenizer."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from birdie.checkpoints.folder_scan import PIPELINE
from birdie.errors import ConfigError
from birdie.hub.untrusted import bounded, harmless

Library = Literal["transformers", "diffusers"]


def library_of(folder: Path) -> Library | None:
    """Return the library whose model a folder describes, but not a pipeline; None if it describes none."""
    config = _configuration(folder)
    return "diffusers" if "_class_name" in config else "transformers" if "model_type" in config else None


def is_of_library(folder: Path) -> bool:
    """Return True if a checkpoint is the folder of a model of transformers or diffusers, or of a pipeline."""
    return library_of(folder) is not None or (folder / PIPELINE).is_file()


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def require_transformers_folder(folder: Path) -> None:
    """Check that a checkpoint can be calibrated on a text or on images, before anything is read."""
    if "model_type" not in _configuration(folder):
        raise ConfigError(
            f"--calibrate takes a text or images for the Hugging Face folder of a model, and {folder} has no "
            "config.json of one; a model of your own is calibrated by --model net.py:make --data data.py:batches (or a "
            "file of inputs, or images), in Python by birdie.calibrate(model, example_inputs=inputs)"
        )
    _require_library("transformers")


def _require_library(library: Library) -> None:
    if find_spec(library) is None:
        raise ConfigError(f"this calibration needs {library}, which is not installed; pip install {library}")


def load_model(folder: Path, tensors: int) -> Any:
    """Return the model of a folder in float32, of the class that its configuration names.

    Args:
        tensors: in the folder.
    """
    library, config = library_of(folder) or "transformers", _configuration(folder)
    _require_library(library)
    names = config.get("_class_name") or config.get("architectures") or [""]
    name = str(names if isinstance(names, str) else names[0])
    if (kind := getattr(import_module(library), name, None)) is None:
        raise ConfigError(f"{library} has no class {name!r}, which {folder / 'config.json'} names")
    options: dict[str, Any] = {"dtype": torch.float32}
    if library == "diffusers":
        options = {"torch_dtype": torch.float32}
        if getattr(kind, "_keep_in_fp32_modules", None) is None:
            options["low_cpu_mem_usage"] = False
    return load_weights(folder, name, "model", tensors, library, **options).eval()


def load_weights(
    folder: Path, kind: str, noun: str, tensors: int, library: Library = "transformers", **options: Any
) -> Any:
    """Return the model that a class of a library loads from a folder, in at most as many parts as its tensors explain.

    Args:
        folder, kind, noun, library, options: as for `load_part`.
        tensors: in the folder.
    """
    dropped: list[str] = []
    config = harmless(_configuration(folder), dropped)
    if dropped and library == "transformers":
        with tempfile.TemporaryDirectory(prefix="birdie-") as temporary:
            Path(temporary, "config.json").write_text(json.dumps(config, allow_nan=True), encoding="utf-8")
            options["config"] = load_part(Path(temporary), "AutoConfig", "configuration")
        logging.getLogger("birdie").warning("%s: left out %s", folder / "config.json", ", ".join(dropped))
    with bounded(tensors):
        return load_part(folder, kind, noun, library, **options)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Turn off the progress bar of transformers: birdie shows its own, which it would break up."""
    progress = import_module("transformers.utils.logging")
    enabled = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            progress.enable_progress_bar()


def load_part(
    folder: Path,
    kind: str,
    noun: str,
    library: Library = "transformers",
    **options: Any,
) -> Any:
    """Return what a class of a library loads from a folder; nothing is downloaded, and no code of it is run.

    Args:
        kind: the class: "AutoTokenizer".
        noun: what it loads, for the error message.
    """
    try:
        with no_progress_bar():
            if library == "transformers":
                options["trust_remote_code"] = False
            return getattr(import_module(library), kind).from_pretrained(folder, local_files_only=True, **options)
    except ConfigError:
        raise
    except Exception as error:  # whatever the library raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{library} cannot load the {noun} of {folder} ({reason}), which calibration needs; complete "
            "the folder, or compress it without --calibrate"
        ) from error
