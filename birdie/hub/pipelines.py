"""The tokenizer that a file of a Hugging Face folder keeps, and a pipeline from texts or images to answers.

model.birdie ──┬──► kept files ──► temporary folder ──► tokenizer, processors of transformers ──┐
               └──► from_pretrained ──────────────────────────────────► model ──────────────────┴──► pipeline
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birdie.artifact import kept_files
from birdie.artifact.folders import files
from birdie.errors import ConfigError
from birdie.hub.pretrained import from_pretrained, local_file
from birdie.hub.untrusted import clean_folder
from birdie.system.outputs import Source

_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")


def tokenizer(
    path: Source, *, base: Any = None, revision: str | None = None, max_bytes: int | None = None, **options: Any
) -> Any:
    """Return the tokenizer that a .birdie file of a Hugging Face folder keeps.

        model, words = birdie.from_pretrained("model.birdie"), birdie.tokenizer("model.birdie")
        ids = words("Once upon a time", return_tensors="pt").input_ids
        print(words.decode(model.generate(ids)[0]))

    Args:
        path: a .birdie file, a folder with model.birdie, or the name of a repository on the Hub, "user/name".
        base: of a file of deltas, the folder or .birdie file that it was made with.
        revision: of the repository.
        max_bytes: most bytes of the kept files.
        options: passed to `AutoTokenizer.from_pretrained` of transformers.

    Raises:
        ArtifactError: the file is missing or damaged.
        ConfigError: it keeps no tokenizer, or transformers is not installed or cannot load it.
    """
    with _kept(path, base, revision, max_bytes) as (file, folder):
        return _tokenizer(file, folder, options)


def pipeline(
    path: Source,
    task: str | None = None,
    *,
    lazy: bool = False,
    base: Any = None,
    revision: str | None = None,
    max_bytes: int | None = None,
    **options: Any,
) -> Any:
    """Return a pipeline of transformers with the model, the tokenizer and the processors of a .birdie file.

        tell = birdie.pipeline("model.birdie")
        print(tell("Once upon a time", max_new_tokens=20)[0]["generated_text"])

    Args:
        path: as for `tokenizer`.
        task: "text-generation", "image-classification", …; None: the one of the model's class.
        lazy, base, revision, max_bytes: as for `birdie.from_pretrained`.
        options: passed to `transformers.pipeline`.

    Raises:
        ArtifactError: the file is missing or damaged.
        ConfigError: the model's class does not tell the task, or the file lacks what the pipeline needs.
    """
    with _kept(path, base, revision, max_bytes) as (file, folder):
        transformers = import_module("transformers")
        model = from_pretrained(file, lazy=lazy, base=base, max_bytes=max_bytes)
        if not isinstance(model, transformers.PreTrainedModel):
            raise ConfigError(f"{file} is no model of transformers; build a pipeline of its own library")
        parts: dict[str, Any] = {}
        if _has(folder, _TOKENIZER):
            parts["tokenizer"] = _tokenizer(file, folder, {})
        if _has(folder, _PROCESSOR):
            parts |= _processors(transformers, file, folder)
        try:
            return transformers.pipeline(
                task or task_of(type(model), type(model.config)), model=model, **{**parts, **options}
            )
        except Exception as error:  # whatever the library raises
            raise ConfigError(f"transformers makes no pipeline of {file} ({reason_in_line(error)})") from error


def task_of(kind: type, config: type) -> str:
    """Return the task of the pipeline that transformers has for a class of models with a class of configurations.

    Raises:
        ConfigError: there is none.
    """
    for task, parts in import_module("transformers.pipelines").SUPPORTED_TASKS.items():
        for auto in parts.get("pt", ()):
            kinds = auto._model_mapping.get(config, ())  # values() imports every model of the library
            if kind in (kinds if isinstance(kinds, tuple) else (kinds,)):
                return str(task)
    raise ConfigError(f"transformers has no pipeline for {kind.__name__} alone; name the task: pipeline(path, task)")


@contextmanager
def _kept(path: Source, base: Any, revision: str | None, max_bytes: int | None) -> Iterator[tuple[Path, Path]]:
    """Yield the local file and a temporary folder with the files that it keeps."""
    file = local_file(path, revision)
    if find_spec("transformers") is None:
        raise ConfigError(
            "tokenizers and pipelines are those of transformers, which is not installed; pip install transformers"
        )
    kept = files(file, base=base, max_bytes=max_bytes)
    with tempfile.TemporaryDirectory(prefix="birdie-") as name:
        folder = Path(name)
        kept_files.write(kept, folder)
        clean_folder(folder)
        yield file, folder


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def _tokenizer(file: Path, folder: Path, options: dict[str, Any]) -> Any:
    if not _has(folder, _TOKENIZER):
        raise ConfigError(f"{file} keeps no tokenizer; compress the folder that has it beside the weights")
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(
            folder, **{"trust_remote_code": False, "local_files_only": True} | options
        )
    except Exception as error:  # whatever the library raises
        raise ConfigError(f"transformers cannot load the tokenizer kept in {file} ({reason_in_line(error)})") from error


def _processors(transformers: Any, file: Path, folder: Path) -> dict[str, Any]:
    """Return the processors that a folder has, by the names of a pipeline's arguments."""
    try:
        processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the library raises
        raise ConfigError(f"transformers cannot load the processor kept in {file} ({reason_in_line(error)})") from error
    if isinstance(processor, transformers.ProcessorMixin):
        names = ("tokenizer", "image_processor", "feature_extractor")
        return {"processor": processor} | {name: getattr(processor, name) for name in names if hasattr(processor, name)}
    if isinstance(processor, transformers.FeatureExtractionMixin):
        return {"feature_extractor": processor}
    return {"image_processor": processor}


def reason_in_line(error: Exception) -> str:
    """Return one line about an error of a library."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
