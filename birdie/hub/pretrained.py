"""Models of transformers, diffusers, peft and timm from .birdie files, ready to use.

    model.birdie ──► temporary folder (weights, configuration, tokenizer) ──from_pretrained of the library──► model

The file says itself which library it is of: `birdie compress FOLDER` keeps the configuration. The library's own loading
is used, so names that it changed since, tied weights and buffers are right.
"""

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import nn

from birdie.artifact import kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import DELTA, Reader
from birdie.artifact.folders import SHARD, files, write_folder
from birdie.artifact.loading import load
from birdie.artifact.options import Limits
from birdie.checkpoints.folder_scan import PIPELINE
from birdie.errors import BirdieError, ConfigError
from birdie.hub.untrusted import SECONDS, bounded, clean_folder, harmless
from birdie.system.outputs import Source, require_path

WEIGHTS = "model.birdie"  # of a birdie folder
_ADAPTER = "adapter_config.json"
_PATHS = {"checkpoint_path", "cache_dir", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}  # of create_model
_MOST_SHARED = 4  # times that a weight in the file may be used by a model


def from_pretrained(
    path: Source,
    *,
    lazy: bool = False,
    base: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    max_bytes: int | None = None,
    schemes: Collection[str] = (),
    **options: Any,
) -> Any:
    """Return the model of a .birdie file that keeps its configuration, in evaluation mode.

    Args:
        path: a .birdie file, a folder with model.birdie, or the name of a repository on the Hub, "user/name".
        lazy: decode each weight when it is used (docs/huggingface.md); for transformers, where the names of the
            weights in the file are those of the module.
        base: of a file of deltas, the checkpoint that it was made with, as in `birdie.load`. For an adapter of
            peft, the model that it adapts, or its name on the Hub; default: the folder that its configuration names.
        device, dtype: of the model; default: the CPU, and the dtypes of the file.
        revision: of the repository.
        max_bytes, schemes: as in `birdie.load`.
        options: passed to `from_pretrained` of the library (`create_model` of timm).

    Returns:
        A model of transformers, diffusers (or a pipeline), peft or timm.

    Raises:
        ArtifactError: the file is missing or damaged.
        ConfigError: it keeps no configuration, or its library is not installed or does not know the model.
    """
    file = local_file(path, revision)
    differs = _differs(file)
    if differs and lazy:
        raise ConfigError(f"{file} holds deltas to another checkpoint; lazy loading is not for them, leave lazy out")
    config, library = _described(file, base, max_bytes)
    if lazy and library != "transformers":
        raise ConfigError(f"lazy loading is for models of transformers, and {file} is of {library}; leave lazy out")
    if lazy:
        return _lazy(file, config, device, dtype, max_bytes, schemes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="birdie-"))) / "model"
        write_folder(
            file,
            folder,
            Limits(base=base if differs else None, max_bytes=max_bytes, schemes=schemes),
            max_shard_bytes=SHARD,
        )
        clean_folder(folder)
        try:
            model = _LOADERS[library](folder, config, None if differs else base, options)
        except BirdieError:
            raise
        except Exception as error:  # whatever the library raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"{library} cannot load the model of {file} ({reason}); try another version of it"
            ) from error
    if device is not None or dtype is not None:
        model = model.to(*(one for one in (device, dtype) if one is not None))
    return model


def _differs(file: Path) -> bool:
    """Return whether a file needs a base, for its tensors or its kept files."""
    with Reader(file) as reader:
        theirs = kept_files.in_base(reader.fields, reader.where)
        return bool(theirs) or (DELTA in reader.kinds and not file_metadata.is_inside(reader.fields))


def _described(file: Path, base: Any, max_bytes: int | None) -> tuple[dict[str, Any], str]:
    """Return the configuration of the model in a file, and its library, which is installed."""
    differs = _differs(file)
    if differs and base is None:
        raise ConfigError(f"{file} holds deltas to another checkpoint; give that as base=… (--base)")
    kept = files(file, base=base if differs else None, max_bytes=max_bytes)
    try:
        parsed = dict(json.loads(kept.get("config.json", b"{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"config.json kept in {file} is not a JSON object; compress the folder again") from error
    config = harmless(parsed)
    library = _library(kept, config, file)
    if find_spec(library) is None:
        raise ConfigError(f"{file} is a model of {library}, which is not installed; pip install {library}")
    return config, library


def transformers_class(path: Source, *, base: Any = None, max_bytes: int | None = None) -> Any:
    """Return the class of the model of transformers in a file, before it is decoded; arguments as of `from_pretrained`.

    Raises:
        ConfigError: it is of another library.
    """
    file = local_file(path)
    config, library = _described(file, base, max_bytes)
    if library != "transformers":
        raise ConfigError(f"{file} is a model of {library}, and this is for those of transformers")
    return _transformers_class(config)


def local_file(path: Source, revision: str | None = None) -> Path:
    """Return the .birdie file that `path` stands for: itself, that of a folder, or that of a repository on the Hub."""
    require_path(path)
    local = Path(path)
    if local.is_dir():
        if (local / WEIGHTS).is_file():
            return local / WEIGHTS
        raise ConfigError(f"{local} has no {WEIGHTS}; give a .birdie file, or a folder that birdie wrote")
    if local.exists() or not _is_repository(str(path)):
        return local
    from birdie.hub.transfer import download

    return download(str(path), revision) / WEIGHTS


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith((".birdie", "/"))


def _library(listed: Collection[str], config: dict[str, Any], file: Path) -> str:
    """Return the name of the library whose configuration a file keeps."""
    if _ADAPTER in listed:
        return "peft"
    if PIPELINE in listed or "_class_name" in config:
        return "diffusers"
    if "model_type" in config and config.get("architectures"):
        return "transformers"
    if "architecture" in config:
        return "timm"
    raise ConfigError(
        f"{file} keeps no configuration of a model, so there is nothing to build; compress its Hugging Face folder "
        "instead of its weights alone, or use birdie.load(…, into=model)"
    )


def _transformers_class(config: dict[str, Any]) -> Any:
    """Return the class of a model."""
    transformers, name = import_module("transformers"), str(config["architectures"][0])
    kind = getattr(transformers, name, None)
    if not _is_class(kind, transformers.PreTrainedModel):
        raise ConfigError(f"transformers {transformers.__version__} has no model {name}; install another version of it")
    return kind


def _is_class(value: Any, base: type) -> bool:
    """Return whether a value, found by a name from a file, is a class of models and not another part of a library."""
    return isinstance(value, type) and issubclass(value, base)


def _load_transformers(folder: Path, config: dict[str, Any], _base: Any, options: dict[str, Any]) -> Any:
    kind = _transformers_class(config)
    tensors, held = _weights_in(folder)
    # on the meta device: missing weights would be made up, whatever memory the configuration asks for
    with torch.device("meta"), bounded(tensors, SECONDS):
        described = sum(weight.numel() for weight in kind(kind.config_class.from_dict(dict(config))).parameters())
    if described > held * _MOST_SHARED:
        raise ConfigError(
            f"config.json describes a {kind.__name__} of {described:,} weights, and the file holds {held:,}; compress "
            "the complete folder of the model"
        )
    model, info = kind.from_pretrained(folder, output_loading_info=True, **{"trust_remote_code": False} | options)
    if missing := sorted(info["missing_keys"]):  # the library would leave them random
        raise ConfigError(
            f"the file lacks {len(missing)} of the weights of {kind.__name__}, {missing[0]} for one; compress the "
            "complete folder of the model"
        )
    return model


def _weights_in(folder: Path) -> tuple[int, int]:
    """Return (tensors, elements of all of them) in the .safetensors files of a folder, from their headers."""
    counts = []
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            counts += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    return len(counts), sum(counts)


def _load_diffusers(folder: Path, config: dict[str, Any], _base: Any, options: dict[str, Any]) -> Any:
    diffusers = import_module("diffusers")
    if (folder / PIPELINE).is_file():
        with bounded(_weights_in(folder)[0]):
            return diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=False, **options)
    name = str(config["_class_name"])
    kind: Any = getattr(diffusers, name, None)
    if not _is_class(kind, diffusers.ModelMixin):
        raise ConfigError(f"diffusers {diffusers.__version__} has no model {name}; install another version of it")
    with bounded(_weights_in(folder)[0]):
        return kind.from_pretrained(folder, **options).eval()


def _load_peft(folder: Path, _config: dict[str, Any], base: Any, options: dict[str, Any]) -> Any:
    peft = import_module("peft")
    adapter = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))
    if base is None:
        base = adapter.get("base_model_name_or_path")
        if not base or not isinstance(base, str):
            raise ConfigError("this adapter does not name the model that it adapts; give base=model")
        if not Path(base).is_dir():  # a file must not choose what is downloaded
            raise ConfigError(f"this adapter is of {base!r}, which is no folder; give base={base!r} to load it")
    if isinstance(base, str | Path):
        kind = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM"}.get(
            adapter.get("task_type"), "AutoModel"
        )
        base = getattr(import_module("transformers"), kind).from_pretrained(base, trust_remote_code=False)
    return peft.PeftModel.from_pretrained(base, folder, **options).eval()


def _load_timm(folder: Path, config: dict[str, Any], _base: Any, options: dict[str, Any]) -> Any:
    timm, name, arguments = import_module("timm"), str(config["architecture"]), dict(config.get("model_args") or {})
    if not timm.is_model(name) or _PATHS.intersection(arguments):  # a name with a colon would be fetched or opened
        raise ConfigError(f"config.json asks timm for {name!r} with {sorted(arguments)}, which is no model of it")
    settings = {"num_classes": config.get("num_classes")} | arguments | options
    settings = {name: value for name, value in settings.items() if value is not None}
    with bounded(_weights_in(folder)[0]):
        model = timm.create_model(name, pretrained=False, **settings)
    model.load_state_dict(import_module("safetensors.torch").load_file(folder / "model.safetensors"))
    return model.eval()


_LOADERS: dict[str, Callable[[Path, dict[str, Any], Any, dict[str, Any]], Any]] = {
    "transformers": _load_transformers,
    "diffusers": _load_diffusers,
    "peft": _load_peft,
    "timm": _load_timm,
}


def _lazy(
    file: Path,
    config: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    max_bytes: int | None,
    schemes: Collection[str],
) -> Any:
    """Return a model of transformers whose weights stay coded; its parameters are never in memory at once."""
    kind = _transformers_class(config)
    settings = kind.config_class.from_dict(config)
    with Reader(file) as reader:
        tensors = len(reader.names)
    with parameters_on_meta(getattr(settings, "dtype", None)), bounded(tensors, SECONDS):
        model = kind(settings)
    return load(file, into=model, lazy=True, device=device, dtype=dtype, max_bytes=max_bytes, schemes=schemes)


@contextmanager
def parameters_on_meta(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build modules with parameters on the meta device, one of which is in memory at a time; buffers are real.

    Args:
        dtype: of parameters for which the module names none.
    """
    register, default = nn.Module.register_parameter, torch.get_default_dtype()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.set_default_dtype(dtype or default)
    try:
        with patch.object(nn.Module, "register_parameter", register_on_meta):
            yield
    finally:
        torch.set_default_dtype(default)
