"""Model card of a birdie folder: front matter for the Hub, a table of bytes, and the model's own README below it.

README.md that the file keeps ──┬── front matter: its keys, then those of ours that it lacks ──┐
                                └── text, below a line ────────────────────────────────────────┴──► README.md
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birdie.artifact.summary import Summary
from birdie.errors import ConfigError
from birdie.hub.pretrained import WEIGHTS
from birdie.system.names import in_markdown

CARD = "README.md"
_TAGS = ("birdie", "compressed")
_FRONT = re.compile(r"\ufeff?---[ \t]*\n(.*?)\n?---[ \t]*(?:\n|$)", re.DOTALL)
_KEY = re.compile(r"^([A-Za-z_][\w-]*)[ \t]*:", re.MULTILINE)
_TAG_LIST = re.compile(r"^tags[ \t]*:[ \t]*(?:\[([^\]]*)\]|\n((?:[ \t]*-[ \t].*(?:\n|$))+))", re.MULTILINE)


def card(
    summary: Summary, readme: str = "", *, base_model: str | None = None, origin: str | None = None, task: str = ""
) -> str:
    """Return the model card of a file, in Markdown with the Hub's front matter.

    Args:
        readme: the card that the model has already; its keys stay, and its text follows ours.
        base_model: repository, "USER/NAME", that the caller names as the model's origin.
        origin: that which the configuration names.
        task: "text-generation", of the model's class; "" for none.

    Raises:
        ConfigError: the readme names an origin, and `base_model` another.
    """
    readme = readme.replace("\r\n", "\n")
    match = _FRONT.match(readme)
    front, text = ("", readme) if match is None else (match[1], readme[match.end() :])
    if base_model is not None and "base_model" in _KEY.findall(front):
        raise ConfigError(f"{CARD} kept in {summary.path} has a base_model already; drop the base {base_model}")
    ours = {"library_name": "birdie", "tags": f"[{', '.join(_TAGS)}]", "base_model": base_model or origin}
    parts = ["---", *_front(front, ours | {"pipeline_tag": task}), "---", "", _about(summary, base_model)]
    if text.strip():
        parts += ["", "---", "", "The README of the model before it was compressed, unchanged:", "", text.strip()]
    return "\n".join(parts) + "\n"


def _front(front: str, ours: Mapping[str, str | None]) -> list[str]:
    """Return the lines of a front matter, those of ours that it lacks at its end; our tags are joined to its."""
    known = _KEY.findall(front)
    if (tags := _TAG_LIST.search(front)) is not None:
        listed, items = tags[1], tags[2] or ""
        new = [tag for tag in _TAGS if tag not in re.findall(r"[\w-]+", listed or items)]
        if listed is not None:
            joined = ", ".join([*([listed.strip().rstrip(",")] if listed.strip() else []), *new])
            front = f"{front[: tags.start(1)]}{joined}{front[tags.end(1) :]}"
        else:
            dash = items[: items.index("-")]
            lines = [items.rstrip("\n"), *(f"{dash}- {tag}" for tag in new)]
            front = f"{front[: tags.start(2)]}{chr(10).join(lines)}\n{front[tags.end(2) :]}"
    added = [f"{key}: {value}" for key, value in ours.items() if value and key not in known]
    return [*([front.strip("\n")] if front.strip() else []), *added]


def _about(summary: Summary, base_model: str | None) -> str:
    """Return the text of a card: a table of bytes, and how the file is loaded."""
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
        *([("files that are those of the base", len(summary.base_files))] if summary.base_files else []),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    base, option = ("", "") if summary.base is None else (', base="PATH"', " --base PATH")
    others = f"`birdie decompress {WEIGHTS}{option} -o FOLDER` writes an ordinary one"
    if summary.base is None:
        others = f"transformers loads this folder as well, after `birdie.hub.register()`; {others}."
    else:
        at = "" if base_model is None else f", [{base_model}](https://huggingface.co/{base_model})"
        others = f"PATH is that of the model {in_markdown(summary.base)}{at}, with which it was made. {others}."
    return f"""# {in_markdown(Path(summary.path).stem).strip("`")}

A model compressed by birdie into one file, `{WEIGHTS}`: entropy-coded, checksummed, without pickle.

| | |
|---|--:|
{table}

```python
import birdie

model = birdie.from_pretrained("PATH_OR_REPOSITORY"{base})  # or a path to {WEIGHTS}
```

{others}"""


def _settings(summary: Summary) -> list[tuple[str, Any]]:
    error = summary.metadata.get("error")
    known = [("difference from the float model on held-out inputs", f"{error:.4g}")] if isinstance(error, float) else []
    return known + ([("byte budget", f"{summary.budget:,}")] if summary.budget else [])
