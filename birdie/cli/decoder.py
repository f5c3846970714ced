"""`birdie decoder`: write the decoder of .birdie files as one small Python file that does not need birdie."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, Output, Overwrite, log, print_json, print_line, size
from birdie.entropy.hints import Effort
from birdie.golf.standalone import build, pack
from birdie.golf.standalone.sources import PACKAGE, SCRIPT
from birdie.runtime import files, outputs

GROUP = "Compress"


def command(
    *,
    output: Annotated[Output, Parameter(help="The .py file to write.")] = Path("decode.py"),
    coder: Annotated[
        Effort,
        Parameter(
            help=f"max decodes {', '.join(build.SCHEMES['max'])} by every coder; fast, smaller, decodes "
            f"{', '.join(build.SCHEMES['fast'])} in files written with --coder fast. Birdie itself decodes all schemes."
        ),
    ] = "max",
    unpacked: Annotated[
        bool, Parameter(negative=(), help="Write readable source instead of the compressed file.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a decoder of .birdie files as one small .py file that needs numpy, numba and torch."""
    output = outputs.require_output(output, PACKAGE.rglob("*.py"), kind=SCRIPT, overwrite=overwrite)
    built = build.build(coder)
    data = f"# {built.title}\n{built.source}".encode() if unpacked else built.packed
    files.write_bytes(output, data)
    if not built.minified:
        log("without python-minifier the file is larger than necessary; pip install 'birdie-compress[submit]'")
    if json:
        forms = {name: len(form) for name, form in pack.forms(built.source, built.title).items()}
        answer = {"path": str(output), "bytes": len(data), "coder": coder, "minified": built.minified}
        answer |= {"modules": dict(built.bytes_by_module), "messages": list(built.messages)}
        print_json(answer | {"forms": forms | {"source": len(built.source)}})
        return
    print_line(f"{size(len(data))}: {output}")
    print_line(f"use it: python {output} MODEL.birdie OUT.pt, or import load and load_object from it")
