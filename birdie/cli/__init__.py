"""The command line: one file per command, the only place that prints, parses or exits.

Commands are named here and imported when called, so `birdie --help` answers at once.
"""

import importlib
import io
import sys
from collections.abc import Sequence

from cyclopts import App

from birdie.cli.console import run

COMMANDS = {
    "demo": "Train a small GPT for a minute, compress it under a budget, score the file: the whole road.",
    "prepare": "Turn text into shards and a tokenizer.",
    "recipe": "List, show and compare the recipes that ship.",
    "estimate": "Tell what a recipe will take, or where a run will end, before it does.",
    "train": "Train a GPT by a recipe, then compress it and score the file.",
    "compress": "Compress a checkpoint (.safetensors, .pt, .bin, .ptz, a Hugging Face folder) into one .birdie file.",
    "decompress": "Turn a .birdie file back into .safetensors or .pt.",
    "inspect": "Show what is in a .birdie file and who paid which bytes.",
    "evaluate": "Score a .birdie file in bits per byte.",
    "audit": "Check an artifact, a submission folder or a script against the challenge's rules.",
    "sample": "Let the model in a .birdie file write.",
    "decoder": "Write the decoder as one small Python file that needs no birdie.",
}


def build_app(tokens: Sequence[str]) -> tuple[App, list[str]]:
    """The application that understands `tokens`, and the tokens it is to be called with."""
    if list(tokens[:1]) == ["train"]:
        recipe, scale = _asked(tokens[1:])
        train = importlib.import_module("birdie.cli.train")
        # alone: beside other commands cyclopts takes the recipe's table [train] for the command of that name
        app = App(
            name="birdie train",
            config=train.configured(recipe, scale),
            result_action="return_value",
            suppress_keyboard_interrupt=False,
        )
        app.default(train.after_reading(recipe))
        return app, list(tokens[1:])
    app = App(
        name="birdie",
        help="Train, compress, pack and score models under a byte budget.",
        version="birdie.cli.console:version",
        result_action="return_value",
        suppress_keyboard_interrupt=False,  # ours: it has an answer in JSON too
    )
    for name, help_ in COMMANDS.items():
        app.command(f"birdie.cli.{name}:{name}", name=name, help=help_)
    return app, list(tokens)


def _asked(tokens: Sequence[str]) -> tuple[str | None, str | None]:
    """The recipe and the scale among a command's tokens: settings enter the application before it reads its tokens."""
    recipe = next((token for token in tokens if token.endswith(".toml") and not token.startswith("-")), None)
    if recipe is None and tokens and not tokens[0].startswith("-"):
        recipe = tokens[0]
    scale = None
    for place, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name == "--scale":
            scale = value if equals else "".join(tokens[place + 1 : place + 2])
    return recipe, scale


def main(tokens: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error in one sentence, 130 Ctrl-C."""
    tokens = sys.argv[1:] if tokens is None else tokens
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show must not end the command
            stream.reconfigure(errors="replace")
    sys.exit(run(build_app, tokens))
