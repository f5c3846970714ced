"""`birdie script`: write a recipe, a scorer, the decoder or the pair as one file that does not need birdie."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from birdie.cli.console import Json, Output, Overwrite, log, print_json, print_line, size
from birdie.errors import ConfigError
from birdie.golf.audit.rules import CAP_BYTES
from birdie.standalone import C_DECODER, PACKAGE, SCRIPT
from birdie.system import files, outputs

GROUP = "Train"

_JAVASCRIPT = outputs.Kind("a decoder that birdie writes", rb"// birdie ")
_C = outputs.Kind("a decoder that birdie writes", rb"/\* birdie\.[ch]: ")
_LANGUAGES = {"js": "JavaScript", "c": "C"}
_NAMES = {"train": "train_gpt.py", "score": "score_gpt.py", "pair": "birdie_pair.py", "decoder": "decode.py"}


def command(
    recipe: Annotated[
        str | None, Parameter(help="A name that `birdie recipe list` shows, or a .toml file; for train and score.")
    ] = None,
    /,
    *,
    kind: Annotated[
        Literal["train", "score", "pair", "decoder"],
        Parameter(
            help="train: train, export and score a recipe. score: decode and score a .birdie file of a recipe. "
            "pair: export and load, for a training script of your own. decoder: load, for any program."
        ),
    ] = "train",
    language: Annotated[
        Literal["python", "js", "c"],
        Parameter(
            help="js: write the decoder as one JavaScript module, for browsers and Node. c: write it in C99, for any "
            "program: birdie.c, and birdie.h beside it. Both with --kind decoder."
        ),
    ] = "python",
    output: Annotated[
        Output | None,
        Parameter(
            help="The file to write; default: train_gpt.py, score_gpt.py, birdie_pair.py, decode.py, decode.js or "
            "birdie.c."
        ),
    ] = None,
    requirements: Annotated[
        Path | None, Parameter(help="Also write the packages that the file needs to this file, for pip.")
    ] = None,
    paste: Annotated[
        bool,
        Parameter(negative=(), help="Write the pair as ASCII text, to paste into a script instead of importing it."),
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write one file that carries the modules of birdie which it needs, for machines without birdie.

    A training script has the settings of the recipe, reads SEED, DATA_PATH, TOKENIZER_PATH and RUN_ID, and writes the
    challenge's log; its bytes are what the challenge counts as code. Under torchrun: `torchrun --nproc_per_node=8
    train_gpt.py`. A scoring script: `python score_gpt.py model.birdie`, with the same variables of data.

    The pair is export(state, budget, path) and load(path); the budget is for code and model together. The decoder is
    load and load_object, or `python decode.py MODEL.birdie OUT.pt`. Both need numpy, numba and torch alone. In
    JavaScript the decoder is decode(ArrayBuffer), and toOnnx(ArrayBuffer) for onnxruntime-web; in C what birdie.h says;
    these need nothing.
    """
    from birdie.golf.packed_script import pack
    from birdie.gpt.run.recipe_registry import find

    of_recipe = kind in ("train", "score")
    if recipe is None and of_recipe:
        raise ConfigError(f"a script to {kind} has a recipe; name it: birdie script RECIPE --kind {kind}")
    if recipe is not None and not of_recipe:
        raise ConfigError(f"a {kind} has no recipe; leave {recipe!r} out")
    if paste and kind != "pair":
        raise ConfigError(f"--paste is for --kind pair; a file of the kind {kind} is started or imported")
    if language != "python":
        if kind != "decoder":
            raise ConfigError(f"--language {language} is for --kind decoder; a file of the kind {kind} is Python")
        if requirements is not None:
            raise ConfigError(f"a decoder in {_LANGUAGES[language]} needs no packages; leave --requirements out")
        (_write_javascript if language == "js" else _write_c)(output, overwrite=overwrite, json=json)
        return
    known = None if recipe is None else find(recipe)
    inputs = [*PACKAGE.rglob("*.py"), *([] if known is None else [known.path])]
    output = outputs.require_output(output or Path(_NAMES[kind]), inputs, kind=SCRIPT, overwrite=overwrite)
    if requirements is not None:
        requirements = outputs.require_output(requirements, [*inputs, output], overwrite=overwrite)
    packed = pack(kind, None if known is None else known.recipe())
    data = packed.text.encode("ascii") if paste else packed.script
    files.write_bytes(output, data)
    if requirements is not None:
        files.write_bytes(requirements, "".join(f"{line}\n" for line in packed.requirements).encode())
    if not packed.minified:
        log("without python-minifier the file is larger than necessary; pip install 'birdie-compress[submit]'")
    if json:
        answer = {"path": str(output), "kind": kind, "language": language, "bytes": len(data)}
        answer |= {"left": CAP_BYTES - len(data)}
        modules = {path: len(source.encode()) for path, source in sorted(packed.sources.items())}
        answer |= {"minified": packed.minified, "requirements": list(packed.requirements), "modules": modules}
        print_json(answer)
        return
    print_line(f"{size(len(data))}: {output}")
    print_line(f"left for the weights: {size(CAP_BYTES - len(data))} of {size(CAP_BYTES)}")
    print_line("it needs: " + (str(requirements) if requirements else ", ".join(packed.requirements)))
    if kind == "decoder":
        print_line(f"use it: python {output} MODEL.birdie OUT.pt, or import load and load_object from it")
    elif kind == "pair":
        advice = "paste it below any `from __future__` import"
        print_line(advice if paste else f"use it: from {output.stem} import export, load")
        print_line(
            'then: export(model.state_dict(), budget=16_000_000, path="model.birdie"); state = load("model.birdie")'
        )


def _write_javascript(output: Path | None, *, overwrite: bool, json: bool) -> None:
    """Write the decoder as a JavaScript module."""
    from birdie.standalone import javascript_decoder

    inputs = [*PACKAGE.joinpath("standalone", "javascript").iterdir()]
    output = outputs.require_output(output or Path("decode.js"), inputs, kind=_JAVASCRIPT, overwrite=overwrite)
    data = javascript_decoder()
    files.write_bytes(output, data)
    if json:
        print_json({"path": str(output), "kind": "decoder", "language": "js", "bytes": len(data)})
        return
    print_line(f"{size(len(data))}: {output}")
    print_line(f'use it: import {{ decode }} from "./{output.name}"; const tensors = await decode(arrayBuffer)')


def _write_c(output: Path | None, *, overwrite: bool, json: bool) -> None:
    """Write the decoder in C, and its header beside it."""
    source, header = C_DECODER
    output = outputs.require_output(output or Path(source.name), C_DECODER, kind=_C, overwrite=overwrite)
    if output.name == header.name:
        raise ConfigError(
            f"{header.name} is written beside the decoder; name the file of the decoder: -o {source.name}"
        )
    beside = output.with_name(header.name)
    outputs.require_output(beside, [*C_DECODER, output], kind=_C, overwrite=overwrite)
    files.write_bytes(beside, header.read_bytes())
    files.write_bytes(output, source.read_bytes())
    total = source.stat().st_size + header.stat().st_size
    if json:
        print_json(
            {"path": str(output), "header": str(beside), "kind": "decoder", "language": "c", "bytes": total},
        )
        return
    print_line(f"{size(total)}: {output}, {beside}")
    print_line(f"use it: cc -std=c99 -O3 -ffp-contract=off -c {output.name}; {header.name} says how")
