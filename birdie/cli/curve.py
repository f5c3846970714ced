"""`birdie curve`: bytes of a model against a measure of one's own, and the smallest file that holds it."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from birdie.cli.compress_flags import AT_LEAST, DATA, FOLDER, IMAGE_SIZE, LOSS, METRIC, MODEL, own_code
from birdie.cli.console import Json, log, print_json, print_line
from birdie.errors import ConfigError
from birdie.system.figures import image_path
from birdie.system.outputs import require_writable
from birdie.system.own_code import imported

if TYPE_CHECKING:
    from birdie.artifact import SizePoint

GROUP = "Compress"


def command(
    checkpoint: Path,
    /,
    *,
    model: Annotated[str, MODEL],
    metric: Annotated[str, METRIC],
    at_least: Annotated[float | None, AT_LEAST] = None,
    key: Annotated[
        list[str] | None, Parameter(negative=(), help="As of birdie compress: the dict of tensors that is meant.")
    ] = None,
    sizes: Annotated[
        str | None, Parameter(help="Sizes of the files, such as 10kB,20kB,40kB. Default: 8 to 1 bits a weight.")
    ] = None,
    own_data: Annotated[str | None, DATA] = None,
    loss: Annotated[str | None, LOSS] = None,
    image_size: Annotated[str | None, IMAGE_SIZE] = None,
    folder: Annotated[Path | None, FOLDER] = None,
    plot: Annotated[Path | None, Parameter(help="Draw the curve into an image: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Measure files of several sizes by a metric of your own, or search for the smallest that holds a value of it.

    Every file is made in memory, decoded, and given to the metric as the module that --model builds. The last line is
    the command that writes the smallest file; `birdie compress --metric --at-least` searches and writes it.
    """
    from birdie.artifact import Measurements, SaveOptions, checkpoint_curve, require_search
    from birdie.checkpoints import open_checkpoint
    from birdie.gpt.run.calibrating import OnOwnModel, Request

    if own_data is None and (loss, image_size) != (None, None):
        raise ConfigError("--loss and --image-size are of the data; add --data, or drop them")
    # before the long work
    budgets = require_search(None if sizes is None else sizes.split(","), at_least)
    measure, measured = imported("--metric", metric), Measurements(folder)
    if plot is not None:
        require_writable(image_path(plot).parent)
    source = open_checkpoint(checkpoint, keys=key or ())
    network = OnOwnModel(Request(source.path, code=own_code(model, own_data, loss, image_size)))
    with source.mapped():
        known, note = network(source.content)
        with kept_in(folder):
            result, _ = checkpoint_curve(
                source,
                network.module,
                measure,
                SaveOptions(calibration=known),
                budgets=budgets,
                at_least=at_least,
                measured=measured,
                progress=log_point,
            )
    if plot is not None:
        result.plot(plot)
    if json:
        about = {"path": str(checkpoint), "calibration": note, "plot": None if plot is None else str(plot)}
        print_json({**about, **result.to_json()})
        return
    print_line(str(result))
    if note is not None:
        print_line(note)
    if plot is not None:
        print_line(f"plot: {plot}")
    if result.smallest is not None:
        flags = {"--data": own_data, "--loss": loss, "--image-size": image_size}
        texts = [text for flag, value in flags.items() if value is not None for text in (flag, value)]
        calibration = ["--model", model, *texts] if texts else []
        keys = [text for one in key or () for text in ("--key", one)]
        name, budget = checkpoint.with_suffix(".birdie").name, str(result.smallest.budget)
        words = ["birdie", "compress", str(checkpoint), "-o", name, "--budget", budget, *keys, *calibration]
        print_line(f"write it: {shlex.join(words)}")


@contextmanager
def kept_in(folder: Path | None) -> Iterator[None]:
    """Say after Ctrl-C what becomes of the values that were measured."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None:
            log("What was measured is not kept; with --folder FOLDER the same command would go on from it.")
        else:
            log(f"What was measured is kept in {folder}; the same command goes on from it.")
        raise


def log_point(point: "SizePoint") -> None:
    """Print a file that was measured, on stderr."""
    log(f"{point.bytes:,} B, {point.bits:.2f} bits a weight: {point.value:.6g}")
