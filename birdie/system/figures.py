"""Figures by matplotlib, which is imported when one is drawn, written as images."""

from io import BytesIO
from pathlib import Path
from typing import Any

from birdie.errors import ConfigError
from birdie.system.files import write_bytes
from birdie.system.outputs import Kind, Source, require_output

_IMAGE = Kind("an image", rb"\x89PNG|%PDF|<\?xml|<svg|\xff\xd8|%!PS")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed; pip install 'birdie-compress[lab]'"
        ) from error
    return Figure((width, height), layout="constrained")


def image_path(path: Source, *, overwrite: bool = False) -> Path:
    """Return the path of an image that can be written, before any work.

    Raises:
        OutputError: something else is there.
    """
    return require_output(path, kind=_IMAGE, overwrite=overwrite)


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure as the kind of image that the name tells: .png, .svg, .pdf.

    Raises:
        ConfigError: matplotlib does not know that kind.
        OutputError: the file cannot be written.
    """
    image, suffix = BytesIO(), path.suffix[1:]
    try:
        figure.savefig(image, format=suffix or "png")
    except ValueError as error:
        raise ConfigError(f"matplotlib writes no images that end in .{suffix}; use .png, .svg or .pdf") from error
    write_bytes(path, image.getvalue())
