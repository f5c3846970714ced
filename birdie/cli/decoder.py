"""`birdie decoder`: write the decoder as one small Python file, for machines without birdie."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, emit, remark, say, size
from birdie.entropy.hints import Effort
from birdie.golf.standalone import build as standalone
from birdie.golf.standalone import pack
from birdie.runtime import files


def decoder(
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="The .py file to write.")] = Path("decode.py"),
    coder: Annotated[Effort, Parameter(help="max decodes every file; fast only those of --coder fast.")] = "max",
    unpacked: Annotated[bool, Parameter(negative=(), help="Write the source text before packing.")] = False,
    json: Json = False,
) -> None:
    """Write a decoder of .birdie files as one small .py file that needs numpy, numba and torch."""
    files.require_file(output)
    built = standalone.build(coder)
    data = built.source.encode() if unpacked else built.packed
    files.write_bytes(output, data)
    if not built.minified:
        remark("python-minifier is not installed, so the file is larger than need be; pip install 'birdie[submit]'")
    if json:
        forms = {name: len(form) for name, form in pack.forms(built.source, built.title).items()}
        answer = {"path": str(output), "bytes": len(data), "coder": coder, "minified": built.minified}
        answer |= {"modules": dict(built.bytes_by_module), "messages": list(built.messages)}
        emit(answer | {"forms": forms | {"source": len(built.source)}})
        return
    say(f"{size(len(data))}: {output}")
    say("import load and load_object from it, or run: python decode.py MODEL.birdie OUT.pt")
