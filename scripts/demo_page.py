"""Hooks of mkdocs: the front page of the site has the demo's model, as `birdie page` writes it.

`make docs` trains the demo if it has not been trained. Where there is none, the front page has no demo.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "demo"
PAGE = "demo.html"
MARKER = "<!-- demo -->"
FRAME = f"""
## Try it

This model was trained in a minute on two cores, on the sources of Python's standard library. It is
decoded and runs in your browser: <a href="{PAGE}">the page</a> loads nothing, and [one
command](page.md) makes such a page of any model of `birdie train`.

<iframe src="{PAGE}" title="The model of birdie demo" loading="lazy"
  style="width: 100%; height: 46rem; border: 1px solid currentColor; border-radius: .5rem"></iframe>
"""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of the documentation with the demo where the marker is."""
    return markdown.replace(MARKER, FRAME if _model().is_file() else "")


def on_post_build(config: Mapping[str, Any]) -> None:
    """Write the page of the demo into the site."""
    model = _model()
    if not model.is_file():
        return
    from birdie.gpt.data.tokenizer import load_tokenizer  # torch is not needed where there is no demo
    from birdie.web.model_page import model_page, model_recipe

    recipe = model_recipe(model)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    page = model_page(model, recipe, tokenizer, title="The model of birdie demo", prompt="def ")
    Path(config["site_dir"], PAGE).write_bytes(page.data)


def _model() -> Path:
    return FOLDER / "run" / "model.birdie"
