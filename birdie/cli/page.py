"""`birdie page`: write one HTML page that decodes and runs the model of a .birdie file in any browser, offline."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, Output, Overwrite, print_json, print_line, print_table
from birdie.errors import ConfigError
from birdie.system.files import write_bytes
from birdie.system.outputs import Kind, require_output

GROUP = "Evaluate"
_PAGE = Kind("a page of birdie", b"\xff\xfe" + "<!doctype html>".encode("utf-16-le"))
_ARTIFACTS = "model.birdie", "run/model.birdie"  # in a run folder, and in that of `birdie demo`


def command(
    model: Annotated[Path, Parameter(help="A run folder, or a .birdie file of `birdie train`.")],
    /,
    *,
    output: Annotated[Output, Parameter(help="File of the page.")] = Path("model.html"),
    title: Annotated[str, Parameter(help="Heading of the page.")] = "A language model in one page",
    prompt: Annotated[str, Parameter(help="Text in the prompt field when the page opens.")] = "",
    temperature: Annotated[float, Parameter(help="Sampling temperature when the page opens, from 0 to 2.")] = 0.8,
    tokens: Annotated[int, Parameter(help="Most tokens to generate when the page opens, from 1 to 10,000.")] = 200,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the tokenizer of the training run.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page that decodes and runs a GPT in any browser; it loads nothing.

    The page holds the bytes of the .birdie file, its decoder, and the model and its tokenizer in plain JavaScript.
    """
    if not 0 <= temperature <= 2:
        raise ConfigError(f"--temperature is {temperature:g}; it must be from 0 to 2")
    if not 1 <= tokens <= 10_000:
        raise ConfigError(f"--tokens is {tokens}; it must be from 1 to 10,000")
    from birdie.gpt.data.tokenizer import load_tokenizer
    from birdie.web.model_page import model_page, model_recipe

    path = _artifact(model)
    output = require_output(output, [path], kind=_PAGE, overwrite=overwrite)
    recipe = model_recipe(path)
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    page = model_page(path, recipe, pieces, title=title, prompt=prompt, temperature=temperature, tokens=tokens)
    write_bytes(output, page.data)
    address = output.resolve().as_uri()
    if json:
        print_json(
            {"path": str(output), "address": address, "bytes": len(page.data), "weights": page.weights}
            | {"parts": page.parts}
        )
        return
    table = Table(title=f"a page with {page.weights:,} weights")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for name, size in page.parts.items():
        table.add_row(name, f"{size:,}")
    table.add_section()
    table.add_row("page", f"{len(page.data):,}", style="bold")
    print_table(table)
    print_line(f"open it in a browser: {address}")


def _artifact(model: Path) -> Path:
    """Return the .birdie file of a run folder; a file stands for itself."""
    if not model.is_dir():
        return model
    for name in _ARTIFACTS:
        if (model / name).is_file():
            return model / name
    raise ConfigError(f"{model} has no model.birdie; name a folder of a finished run, or a .birdie file")
