"""A model in one HTML page that loads nothing: its .birdie file, the decoder, and a GPT in plain JavaScript.

    model.birdie ─► its bytes ──────────────────────────┐
    tokenizer ────► description (pieces) ─┐             │
    recipe ───────► plan ─────────────────┤             │
    page.js, worker.js and its modules ───┤             │
    page.wasm ────────────────────────────┴─ zlib ──────┴─ as characters (units) ─► page.html with page.css and start.js

The page forbids itself every connection (Content-Security-Policy), and its worker starts from what the page holds.
"""

import base64
import hashlib
import html
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from birdie.artifact import Reader, inspect
from birdie.errors import ArtifactError, ConfigError
from birdie.gpt.data.tokenizer import Tokenizer, check_same_tokenizer
from birdie.gpt.model.techniques.depth_recurrence import layer_order
from birdie.gpt.run.gpt_file import require_gpt
from birdie.gpt.run.recipe_settings import Recipe
from birdie.standalone import DECODER, PAGE_PROGRAM, joined
from birdie.system.parsing import to_json
from birdie.system.provenance import __version__
from birdie.web.model_plan import model_plan
from birdie.web.pieces import tokenizer_description
from birdie.web.support import unsupported
from birdie.web.units import BYTE_ORDER_MARK, text_of

FOLDER = Path(__file__).parent
MOST_BYTES = 32_000_000
"""Largest file that a page holds: twice the challenge's cap; a browser holds it some times over while it decodes."""
MOST_VALUES = 100_000_000
"""Most weights, keys and values that a page computes with, each a float32."""
_WIDTH = 9  # of the number of bytes in the page, so that it does not change that number


@dataclass(frozen=True, slots=True)
class Page:
    """A page and what its bytes are.

    Attributes:
        data: the file.
        parts: bytes by part of the page, in the order of the table of `birdie page`.
        weights: of the model.
    """

    data: bytes
    parts: dict[str, int]
    weights: int


def model_recipe(path: Path) -> Recipe:
    """Return the recipe of a .birdie file that a page can run; nothing is decoded.

    Raises:
        ArtifactError: the file is damaged, or holds no birdie GPT.
        ConfigError: the model is too large for a page, or has a scheme without JavaScript.
    """
    summary = inspect(path)
    if summary.tree is not None:
        raise ArtifactError(f"{path} holds a checkpoint and no recipe; a page needs a file of `birdie train`")
    recipe = require_gpt(summary.metadata, {row.name: row.shape for row in summary.tensors}, path)
    if problem := unsupported(path):
        raise ConfigError(f"{problem}; export the model without it, such as by a budget")
    if summary.bytes > MOST_BYTES:
        raise ConfigError(
            f"{path} has {summary.bytes:,} bytes, more than the {MOST_BYTES:,} that a page holds; export the model "
            "with a smaller budget"
        )
    config = recipe.model
    runs = sum(map(len, layer_order(config, config.num_loops > 0)))
    cache = 2 * runs * config.kv_dim * recipe.train.train_seq_len
    if summary.weights + cache > MOST_VALUES:
        raise ConfigError(
            f"{path} has {summary.weights:,} weights, and {cache:,} keys and values for its context of "
            f"{recipe.train.train_seq_len:,} tokens, more than the {MOST_VALUES:,} numbers that a page computes with; "
            "train a smaller model"
        )
    return recipe


def model_page(
    path: Path,
    recipe: Recipe,
    tokenizer: Tokenizer,
    *,
    title: str,
    prompt: str = "",
    temperature: float = 0.8,
    tokens: int = 200,
) -> Page:
    """Return the page of the model in a .birdie file.

    Args:
        path: of the file.
        recipe: as `model_recipe` returns it.
        tokenizer: of the model.
        title: heading of the page.
        prompt: in the text field when the page opens.
        temperature: in its field, from 0 to 2.
        tokens: most tokens to generate, from 1 to 10,000.

    Raises:
        ArtifactError: the file is damaged.
        ConfigError: the model or the tokenizer has a part without JavaScript.
        DataError: the tokenizer is not that of the model.
    """
    summary = inspect(path)
    check_same_tokenizer(tokenizer, summary.metadata.get("tokenizer"), tokenizer.name)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids, but the model "
            f"{recipe.model.vocab_size:,}; use the one it was trained with (--tokenizer)"
        )
    settings = {
        "weights": summary.weights,
        "bos": tokenizer.bos_id,
        "vocabulary": tokenizer.vocab_size,
        "plan": model_plan(recipe.model, recipe.train.train_seq_len),
        "tokenizer": tokenizer_description(tokenizer),
    }
    with Reader(path) as reader:
        for name in reader.entries:
            reader.read(name)  # checks its bytes
    model = path.read_bytes()
    start, style = _script("units.js", "start.js"), _compact((FOLDER / "page.css").read_text("utf-8"))
    shown: dict[str, Any] = {
        "style": style,
        "title": html.escape(_without_surrogates(title, "title")),
        "weights": f"{summary.weights:,}",
        "prompt": "\n" + html.escape(_without_surrogates(prompt, "prompt")),  # HTML drops a line feed at the beginning
        "temperature": f"{temperature:g}",
        "tokens": tokens,
        "weight_bytes": f"{len(model):,}",
        "version": __version__,
    }
    content = {
        "body": _filled(_compact((FOLDER / "page.html").read_text("utf-8")), shown),
        "script": _script("page.js"),
        "worker": _script(DECODER, "model.js", "tokenizer.js", "worker.js"),
        "settings": settings,
    }
    blocks = {
        "content": zlib.compress(to_json(content, ensure_ascii=False, separators=(",", ":")).encode(), 9),
        "program": zlib.compress(PAGE_PROGRAM.read_bytes(), 9),
        "model": model,
    }
    texts = {name: text_of(data) for name, data in blocks.items()}
    shell = _compact((FOLDER / "shell.html").read_text("utf-8"))
    lengths = {f"{name}_length": len(data) for name, data in blocks.items()}
    values = {**shown, **lengths, **texts, "policy": _policy(start, style), "script": start, "page_bytes": " " * _WIDTH}
    size = len(BYTE_ORDER_MARK) + 2 * len(_filled(shell, values))
    page = _filled(shell, values | {"page_bytes": f"{size:{_WIDTH}}"})
    data = BYTE_ORDER_MARK + page.encode("utf-16-le")
    parts = {name: 2 * len(text) for name, text in texts.items()}
    return Page(
        data,
        {
            "weights": len(model),
            "weights as text": parts["model"] - len(model),
            "decoder": parts["program"],
            "model, tokenizer, page": parts["content"],
            "HTML, start": len(data) - sum(parts.values()),
        },
        summary.weights,
    )


def _filled(template: str, values: dict[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), template)


def _without_surrogates(text: str, name: str) -> str:
    """Return `text`, which a page can hold if it is Unicode: an argument of bytes that are no UTF-8 is not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {name} has bytes that are no UTF-8, at character {error.start}; remove them") from error
    return text


def _policy(script: str, style: str) -> str:
    """Return a policy that allows this script, this style and a worker of the page's own, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' blob: 'wasm-unsafe-eval'; worker-src blob:; "
        f"style-src 'sha256-{hashes[1]}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _compact(text: str) -> str:
    """Return lines without their indentation, without empty ones."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@cache
def _script(*modules: str | Path) -> str:
    """Return modules of this folder as one script."""
    return joined([FOLDER / module for module in modules], comments=False)
