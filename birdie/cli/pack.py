"""`birdie pack`: write `export` and `load` as one Python file for a training script that does not need birdie."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, Output, Overwrite, log, print_json, print_line, size
from birdie.golf.standalone.sources import PACKAGE, SCRIPT
from birdie.runtime import files, outputs

GROUP = "Compress"


def command(
    *,
    output: Annotated[Output, Parameter(help="The .py file to write.")] = Path("birdie_pair.py"),
    calibrated: Annotated[
        bool, Parameter(negative=(), help="Let export take calibration=(module, batches, loss); the file is larger.")
    ] = False,
    paste: Annotated[
        bool, Parameter(negative=(), help="Write ASCII text, to paste into a script instead of importing it; larger.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write export(state, budget, path) and load(path) as one .py file, for a training script of your own.

    The budget is for code and model together: export counts the running script and this file, and the model gets the
    rest. The file needs numpy, numba and torch, and no birdie.
    """
    from birdie.golf.pair import build_pair

    output = outputs.require_output(output, PACKAGE.rglob("*.py"), kind=SCRIPT, overwrite=overwrite)
    pair = build_pair(calibrated=calibrated)
    data = pair.text.encode() if paste else pair.module
    files.write_bytes(output, data)
    if not pair.minified:
        log("without python-minifier the file is larger than necessary; pip install 'birdie-compress[submit]'")
    if json:
        forms = {"module": len(pair.module), "text": len(pair.text), "source": len(pair.source.encode())}
        answer = {"path": str(output), "bytes": len(data), "calibrated": calibrated, "minified": pair.minified}
        print_json(answer | {"forms": forms, "requirements": list(pair.requirements)})
        return
    print_line(f"{size(len(data))}: {output}")
    if paste:
        print_line("paste it into a script, below any `from __future__` import")
    elif output.stem.isidentifier():
        print_line(f"use it: from {output.stem} import export, load")
    print_line('then: export(model.state_dict(), budget=16_000_000, path="model.birdie"); state = load("model.birdie")')
