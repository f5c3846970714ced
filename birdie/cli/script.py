"""`birdie script`: write a recipe as one training or scoring script that does not need birdie."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, Output, Overwrite, log, print_json, print_line, size
from birdie.golf.audit.rules import CAP_BYTES
from birdie.golf.standalone.sources import PACKAGE, SCRIPT
from birdie.runtime import files, outputs

GROUP = "Train"


def command(
    recipe: Annotated[str, Parameter(help="A name that `birdie recipe list` shows, or a .toml file.")],
    /,
    *,
    output: Annotated[
        Output | None, Parameter(help="The .py file to write; default: train_gpt.py, with --scoring score_gpt.py.")
    ] = None,
    scoring: Annotated[
        bool,
        Parameter(negative=(), help="Write a script that only decodes a .birdie file of this recipe and scores it."),
    ] = False,
    requirements: Annotated[
        Path | None, Parameter(help="Also write the packages that the script needs to this file, for pip.")
    ] = None,
    messages: Annotated[
        Path | None, Parameter(help="Also write the sentences that the numbers of the script's errors stand for.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a recipe as one script that trains, compresses and scores, with the parts of birdie that it needs inside.

    It takes the challenge's environment variables and writes its log, as train_gpt.py of a checkout does. Its bytes are
    what the challenge counts as code, so its errors have numbers: --messages writes their sentences. Under torchrun:
    `torchrun --nproc_per_node=8 train_gpt.py`.

    With --scoring: `python score_gpt.py model.birdie`; DATA_PATH and TOKENIZER_PATH as for training.
    """
    from birdie.golf.messages import table
    from birdie.golf.packed import pack
    from birdie.golf.scoring import pack_scoring
    from birdie.run.registry import find

    output = output or Path("score_gpt.py" if scoring else "train_gpt.py")
    known = find(recipe)
    inputs = [*PACKAGE.rglob("*.py"), known.path]
    output = outputs.require_output(output, inputs, kind=SCRIPT, overwrite=overwrite)
    requirements, messages = (
        path and outputs.require_output(path, [*inputs, output], overwrite=overwrite)
        for path in (requirements, messages)
    )
    packed = pack_scoring(known.recipe()) if scoring else pack(known.recipe())
    files.write_bytes(output, packed.script)
    lines = "".join(f"{line}\n" for line in packed.requirements)
    if requirements is not None:
        files.write_bytes(requirements, lines.encode())
    if messages is not None:
        files.write_bytes(messages, table(packed.messages).encode())
    if not packed.minified:
        log("without python-minifier the script is larger than necessary; pip install 'birdie-compress[submit]'")
    if json:
        print_json(
            {
                "path": str(output),
                "bytes": len(packed.script),
                "left": CAP_BYTES - len(packed.script),
                "minified": packed.minified,
                "requirements": list(packed.requirements),
                "modules": {path: len(source.encode()) for path, source in sorted(packed.sources.items())},
            }
        )
        return
    print_line(f"{size(len(packed.script))}: {output}")
    print_line(f"left for the weights: {size(CAP_BYTES - len(packed.script))} of {size(CAP_BYTES)}")
    print_line("it needs: " + (str(requirements) if requirements else ", ".join(packed.requirements)))
