"""Birdie folders: a .birdie file with what the Hub and transformers want to see beside it.

model.birdie         the weights, and once more all files below
config.json, …       the files that the .birdie file keeps; config.json with a quantization_config
model.safetensors    empty: transformers looks for it before it asks the quantizer (birdie.hub.quantizer)
README.md            the model card: bytes, bits, delta from the float model, how to load it

A file of deltas needs its base, for which transformers has no argument: config.json stays as it was, and nothing
stands in for weights.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from birdie.artifact import kept_files
from birdie.artifact.container import Reader
from birdie.artifact.inspection import inspect
from birdie.artifact.summary import Summary
from birdie.checkpoints.folder_scan import PIPELINE
from birdie.errors import ArtifactError, ConfigError
from birdie.hub.pretrained import WEIGHTS
from birdie.system.files import Hidden, atomic_folder, log_hidden
from birdie.system.names import in_markdown
from birdie.system.outputs import Source
from birdie.system.parsing import parse_object

CARD = "README.md"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EMPTY = b'{"__metadata__":{"format":"pt"}}'


def write_birdie_folder(
    file: Source,
    target: Source,
    *,
    overwrite: bool = False,
    base_model: str | None = None,
    hidden: Hidden = log_hidden,
) -> Summary:
    """Write the birdie folder of a .birdie file, and return the summary of the file.

    Args:
        file: of `birdie compress FOLDER`, which keeps the configuration.
        target: a folder that does not exist or is empty; it appears complete or not at all.
        overwrite: let the folder have content: files of the same names are replaced, and all others stay.
        base_model: repository, "USER/NAME", of the model to which a file of deltas is one; for the card.
        hidden: called with the names of hidden files, which are not written into a folder that has content.

    Raises:
        ArtifactError: the file is missing or damaged.
        ConfigError: it keeps no configuration, or holds no deltas to the model of a repository.
        OutputError: the folder cannot be written.
    """
    summary = inspect(file)
    if base_model is not None and summary.base is None:
        raise ConfigError(f"{file} holds no deltas to another model; drop the base {base_model}")
    if base_model is not None and not _REPOSITORY.fullmatch(base_model):
        raise ConfigError(f"the base {base_model!r} is not a repository; write USER/NAME")
    with Reader(file) as reader:
        files = kept_files.read(reader)
    if not summary.files:
        raise ConfigError(
            f"{file} keeps no configuration, which a folder needs; compress the model's Hugging Face folder instead of "
            "its weights alone"
        )
    with atomic_folder(target, overwrite=overwrite, inputs=[file], hidden=hidden) as folder:
        kept_files.write(files, folder)
        shutil.copyfile(file, folder / WEIGHTS)
        if "config.json" in files and PIPELINE not in files and summary.base is None:
            (folder / "config.json").write_text(_config(files["config.json"], summary), encoding="utf-8")
            empty = _EMPTY + b" " * (-len(_EMPTY) % 8)
            (folder / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
        (folder / CARD).write_text(card(summary, base_model), encoding="utf-8")
    return summary


def _config(content: bytes, summary: Summary) -> str:
    try:
        config = parse_object(content)
    except ValueError as error:
        raise ArtifactError(
            f"config.json kept in {summary.path} is no JSON object ({error}); compress the folder again"
        ) from error
    if "quantization_config" in config:  # of another quantizer, whose integers the file has losslessly
        return json.dumps(config, indent=2) + "\n"
    about = {"bytes": summary.bytes, "bits_per_weight": round(summary.bits_per_weight, 3)}
    config["quantization_config"] = {"quant_method": "birdie", "file": WEIGHTS, **about}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def card(summary: Summary, base_model: str | None = None) -> str:
    """Return the model card of a file, in Markdown with the Hub's front matter; `base_model` as for the folder."""
    schemes: dict[str, int] = {}
    for tensor in summary.tensors:
        schemes[tensor.scheme] = schemes.get(tensor.scheme, 0) + tensor.bytes
    rows = [
        ("bytes", f"{summary.bytes:,}"),
        ("weights", f"{summary.weights:,}"),
        ("bits per weight, everything included", f"{summary.bits_per_weight:.3f}"),
        *_settings(summary),
        *([] if summary.base is None else [("stored as deltas to", in_markdown(summary.base))]),
        *(
            (f"bytes as {in_markdown(scheme).strip('`')}", f"{size:,}")
            for scheme, size in sorted(schemes.items(), key=lambda item: -item[1])
            if size
        ),
        ("bytes of configuration and tokenizer", f"{summary.file_bytes:,}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    base, option = ("", "") if summary.base is None else (', base="PATH"', " --base PATH")
    others = f"`birdie decompress {WEIGHTS}{option} -o FOLDER` writes an ordinary one"
    if summary.base is None:
        others = f"transformers loads this folder as well, after `birdie.hub.register()`; {others}."
    else:
        at = "" if base_model is None else f", [{base_model}](https://huggingface.co/{base_model})"
        others = f"PATH is that of the model {in_markdown(summary.base)}{at}, with which it was made. {others}."
    return f"""---
library_name: birdie
tags: [birdie, compressed]
{"" if base_model is None else f"base_model: {base_model}{chr(10)}"}---

# {in_markdown(Path(summary.path).stem).strip("`")}

A model compressed by birdie into one file, `{WEIGHTS}`: entropy-coded, checksummed, without pickle.

| | |
|---|--:|
{table}

```python
import birdie

model = birdie.from_pretrained("PATH_OR_REPOSITORY"{base})  # or a path to {WEIGHTS}
```

{others}
"""


def _settings(summary: Summary) -> list[tuple[str, Any]]:
    error = summary.metadata.get("error")
    known = [("difference from the float model on held-out inputs", f"{error:.4g}")] if isinstance(error, float) else []
    return known + ([("byte budget", f"{summary.budget:,}")] if summary.budget else [])
