"""`birdie curve`: bytes of a model against a measure of one's own, and the smallest file that holds it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, log, print_json, print_line
from birdie.compress import parse_size
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
    model: Annotated[
        str, Parameter(help="FILE.py:NAME or package.module:NAME, a function that returns the module. It is run.")
    ],
    metric: Annotated[
        str, Parameter(help="FILE.py:NAME, a function (module) → number, the higher the better, such as accuracy.")
    ],
    at_least: Annotated[
        float | None, Parameter(help="Search for the smallest file whose metric is at least so much.")
    ] = None,
    sizes: Annotated[
        str | None, Parameter(help="Sizes of the files, such as 10kB,20kB,40kB. Default: 8 to 1 bits a weight.")
    ] = None,
    data: Annotated[
        str | None,
        Parameter(help="What to calibrate on, as of birdie compress --data. Default: files without calibration."),
    ] = None,
    loss: Annotated[str | None, Parameter(help="FILE.py:NAME, as of birdie compress --loss.")] = None,
    folder: Annotated[
        Path | None, Parameter(help="Keeps what was measured; the same command continues there after a stop.")
    ] = None,
    plot: Annotated[Path | None, Parameter(help="Draw the curve into an image: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Measure files of several sizes by a metric of your own, or search for the smallest that holds a value of it.

    Every file is made in memory, decoded, and given to the metric as the module that --model builds. The last line is
    the command that writes the smallest file.
    """
    from birdie.artifact import curve
    from birdie.checkpoints import open_checkpoint
    from birdie.gpt.run.calibrating import OnOwnModel, OwnCode, Request

    if loss is not None and data is None:
        raise ConfigError("--loss is of the batches; add --data, or drop it")
    measure = imported("--metric", metric)
    if plot is not None:  # before the long work
        require_writable(image_path(plot).parent)
    source = open_checkpoint(checkpoint)
    network = OnOwnModel(Request(source.path, code=OwnCode(model, data, loss)))
    with source.mapped():
        known, _ = network(source.content)
    result = curve(
        network.module,
        measure,
        sizes=None if sizes is None else [parse_size(size) for size in sizes.split(",")],
        at_least=at_least,
        calibration=known,
        folder=folder,
        progress=lambda point: log(_line(point)),
    )
    if plot is not None:
        result.plot(plot)
    if json:
        print_json({"path": str(checkpoint), **result.to_json(), "plot": None if plot is None else str(plot)})
        return
    print_line(str(result))
    if plot is not None:
        print_line(f"plot: {plot}")
    if result.smallest is not None:
        calibration = "" if data is None else f" --model {model} --data {data}" + (f" --loss {loss}" if loss else "")
        name = checkpoint.with_suffix(".birdie").name
        print_line(f"write it: birdie compress {checkpoint} -o {name} --budget {result.smallest.budget}{calibration}")


def _line(point: "SizePoint") -> str:
    return f"{point.bytes:,} B, {point.bits:.2f} bits a weight: {point.value:.6g}"
